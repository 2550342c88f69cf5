"""Galleries in Milvus: addresses, connections, and models that are stored elsewhere."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from pymilvus.exceptions import MilvusException

from shortlist.data import Catalog
from shortlist.encoding import Encoder
from shortlist.errors import ConfigError
from shortlist.extras import MissingExtraError
from shortlist.gallery import Gallery, GalleryError, milvus_connection, milvus_store
from shortlist.gallery.milvus_address import MilvusAddress
from shortlist.gallery.milvus_connection import MilvusConnection
from tests.displays import Told
from tests.gallery.galleries import NUMBER, Open
from tests.processes import Commands


@pytest.fixture
def place(tmp_path: Path) -> str:
    return f"milvus:{tmp_path}/gallery.db"


class TestAddresses:
    @pytest.mark.parametrize(
        ("text", "uri", "collection"),
        [
            ("milvus:/a/b.db", "/a/b.db", "shortlist"),
            ("milvus:/a/b.db#parts", "/a/b.db", "parts"),
            ("http://localhost:19530", "http://localhost:19530", "shortlist"),
            ("http://localhost:19530/parts", "http://localhost:19530", "parts"),
            ("https://cluster.example/parts_2/", "https://cluster.example", "parts_2"),
        ],
    )
    def test_valid(self, text: str, uri: str, collection: str) -> None:
        place = MilvusAddress.parse(text)
        assert place == MilvusAddress(uri, collection)
        assert MilvusAddress.parse(str(place)) == place

    def test_a_relative_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert MilvusAddress.parse("milvus:a.db").uri == str(tmp_path / "a.db")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("milvus:gallery", "ends with .db"),
            ("milvus:a.db#2 parts", "a collection's name"),
            ("http://localhost:19530/a/b", "a collection's name"),
            ("http://root:secret@localhost:19530", "MILVUS_TOKEN"),
            ("http:///parts", "is not an address"),
            ("http://host:port/parts", "is not an address"),
            ("http://host:99999/parts", "is not an address"),
            ("http://host:0/parts", "is not an address"),
            ("http://[::1/parts", "is not an address"),
        ],
    )
    def test_invalid(self, text: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message) as error:
            Gallery.open(text)
        assert "secret" not in str(error.value)


class TestOpening:
    def test_no_server(self) -> None:
        with pytest.raises(GalleryError, match=r"http://127.0.0.1:9/shortlist: .*127.0.0.1:9"):
            Gallery.open("http://127.0.0.1:9")

    def test_no_file(self, place: str, tmp_path: Path) -> None:
        with pytest.raises(GalleryError, match=r"The file .*gallery.db does not exist"):
            Gallery.open(place)
        assert list(tmp_path.iterdir()) == []  # and none was created

    def test_no_such_collection(self, new: Open, place: str) -> None:
        new()
        with pytest.raises(GalleryError, match=r"no such collection \(existing collections: shortlist\)"):
            Gallery.open(f"{place}#parts")

    def test_a_collection_of_another_program(self, tmp_path: Path) -> None:
        place = MilvusAddress.parse(f"milvus:{tmp_path}/other.db")
        client = place.connect()
        client.create_collection("shortlist", dimension=4)
        client.close()
        with pytest.raises(GalleryError, match="was not created by shortlist"):
            Gallery.open(str(place))

    def test_another_format_version(self, new: Open) -> None:
        store = new().store
        facts = json.loads(store._properties()[milvus_store.FACTS])
        for number, message in ((99, "later version"), (1, "earlier version of shortlist: create the gallery again")):
            changed = {milvus_store.FACTS: json.dumps({**facts, "format": number})}
            store.client.alter_collection_properties(store.name, changed)
            with pytest.raises(GalleryError, match=message):
                store.refresh()

    def test_open_in_another_process(self, new: Open, place: str, commands: Commands, tmp_path: Path) -> None:
        new()
        code, _, err = commands.run("gallery", "show", place, cwd=tmp_path)
        assert (code, err.count("\n")) == (1, 1)
        assert err.startswith("Error: ")
        assert "one process at a time" in err

    def test_without_pymilvus(self, new: Open, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
        new().close()
        monkeypatch.setitem(sys.modules, "pymilvus", None)
        with pytest.raises(MissingExtraError, match=r"pip install 'shortlist\[milvus\]'"):
            Gallery.open(place)

    def test_two_collections_in_a_file(self, place: str, encoder: Encoder, images: Catalog, tmp_path: Path) -> None:
        run = encoder.save(tmp_path / "run")
        for name, number in (("one", 3), ("two", 5)):
            gallery = Gallery.create(f"{place}#{name}", encoder, model=run)
            gallery.add(images.subset(range(number)))
            gallery.close()
        for name, number in (("one", 3), ("two", 5)):
            gallery = Gallery.open(f"{place}#{name}")
            assert len(gallery) == number
            gallery.close()


class TestModel:
    def test_a_moved_model(self, new: Open, images: Catalog, tmp_path: Path) -> None:
        new().add(images)
        shutil.move(tmp_path / "run", tmp_path / "elsewhere")
        gallery = new()
        assert len(gallery.similar(0, 3)) == 3  # without a model
        with pytest.raises(
            GalleryError, match=r"The run .*run, .* does not exist: if it was moved, give its folder with `model`"
        ):
            gallery.search(images.file(0))
        assert new(model=tmp_path / "elsewhere").search(images.file(0), 1)[0].item.id == 0

    def test_a_model_is_required(self, place: str, encoder: Encoder) -> None:
        with pytest.raises(GalleryError, match="needs `model`, the folder of the model"):
            Gallery.create(place, encoder)

    def test_the_token_is_not_stored(
        self, new: Open, images: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MILVUS_TOKEN", "root:hush")
        new().add(images)
        files = [each for each in (tmp_path / "gallery.db").rglob("*") if each.is_file()]
        assert files
        assert not any(b"hush" in each.read_bytes() for each in files)


def test_indexes_of_lite(new: Open, images: Catalog, encoder: Encoder, tmp_path: Path) -> None:
    gallery = new(kind="hnsw")
    gallery.add(images)
    assert (gallery.facts()["kind"], gallery.facts()["recall"]) == ("hnsw", None)
    assert len(gallery.similar(0, 3)) == 3
    with pytest.raises(ConfigError, match="Milvus Lite has no index of the kind ivfpq"):
        Gallery.create(f"milvus:{tmp_path}/other.db", encoder, model=tmp_path, kind="ivfpq")


class Gone:
    """A client whose server does not answer the first requests."""

    def __init__(self, failures: int, code: int = 2) -> None:
        self.failures, self.code = failures, code

    def has_collection(self, name: str) -> str:
        self.failures -= 1
        if self.failures >= 0:
            raise MilvusException(self.code, "there is no\nserver")
        return name


class TestServerThatIsGone:
    address = MilvusAddress("http://host:1", "parts")

    @pytest.fixture(autouse=True)
    def at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(milvus_connection, "RETRY_SECONDS", 0)

    @pytest.mark.parametrize("code", [2, 101])
    def test_a_change_waits(self, code: int) -> None:
        connection = MilvusConnection(self.address, Gone(3, code))
        with connection.retrying(), pytest.warns(UserWarning, match=r"parts: there is no server; waiting") as warned:
            assert connection.has_collection("a") == "a"
        assert len(warned) == 1

    def test_a_search_does_not(self) -> None:
        connection = MilvusConnection(self.address, Gone(2))
        with pytest.raises(GalleryError, match=r"^http://host:1/parts: there is no server$"):
            connection.has_collection("a")
        with connection.retrying(), pytest.raises(GalleryError):
            connection.without_retries().has_collection("a")

    def test_a_change_gives_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(milvus_connection, "RESTART_SECONDS", -1)
        connection = MilvusConnection(self.address, Gone(9))
        with (
            connection.retrying(),
            pytest.warns(UserWarning, match="waiting"),
            pytest.raises(GalleryError, match="Start the server and repeat the command"),
        ):
            connection.has_collection("a")

    def test_another_error_is_raised(self) -> None:
        connection = MilvusConnection(self.address, Gone(1, 1100))
        with connection.retrying(), pytest.raises(GalleryError, match="there is no server"):
            connection.has_collection("a")


def test_several_requests(new: Open, images: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(milvus_store, "ROWS_PER_REQUEST", 2)
    monkeypatch.setattr(milvus_store.MilvusStore, "images_per_change", 5)
    gallery = new()
    display = Told()
    assert gallery.add(images, display=display).added == NUMBER
    calls = display.of(f"embedding {images.name}")
    assert calls[-1] == (NUMBER, NUMBER)
    assert calls == sorted(calls)
    assert [item.id for item in gallery.items()] == list(range(NUMBER))
    assert gallery.add(images).unchanged == NUMBER
    assert gallery.remove([tmp_path / "images"]) == NUMBER
    assert len(gallery) == 0


def test_an_outdated_property_of_the_server(new: Open, images: Catalog) -> None:
    """A server that was restarted returns it for some time. No id is used twice, and no image overwritten."""
    gallery = new()
    gallery.add(images.subset(range(4)))
    gallery.store.client.alter_collection_properties(gallery.store.name, {milvus_store.NEXT_ID: "2"})
    gallery = new()
    gallery.add(images)
    assert [item.id for item in gallery.items()] == list(range(NUMBER))


def test_killed_while_an_image_is_replaced(new: Open, images: Catalog) -> None:
    """The image is then stored twice. The next call removes the duplicate."""
    gallery = new()
    gallery.add(images)
    stored = gallery.store.stored_rows([str(images.file(0))])[str(images.file(0))][0]
    gallery.store.change([stored.row._replace(modified=1)], gallery.store.vectors([0]))
    assert len(gallery) == NUMBER + 1
    gallery.add(images)
    assert [item.id for item in gallery.items()] == list(range(NUMBER))
