"""Images in object stores: folders, tables and images by URL, and the cache."""

from __future__ import annotations

import errno
import io
import os
import pickle
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shortlist import locations
from shortlist.data import open_catalog, open_collection
from shortlist.data.images import ImageError, load_image
from shortlist.data.inspection import check, summary
from shortlist.encoding import Encoder
from shortlist.encoding.parquet import embed_to_table
from shortlist.errors import ConfigError, DataError
from shortlist.gallery import Gallery
from tests.data.pictures import class_folders, picture, pixels
from tests.encoding.conftest import encoder

__all__ = ["encoder"]  # a fixture

SIZES = {"bolt": 3, "nut": 2}


def png(seed: int) -> bytes:
    out = io.BytesIO()
    picture(seed=seed).save(out, format="PNG")
    return out.getvalue()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHORTLIST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "remote"


@pytest.fixture
def store() -> Iterator[fsspec.AbstractFileSystem]:
    """A store with the images memory://store/CLASS/N.png."""
    system = fsspec.filesystem("memory")
    for seed, path in enumerate(f"{name}/{i}.png" for name, size in SIZES.items() for i in range(size)):
        system.pipe(f"/store/{path}", png(seed))
    yield system
    system.rm("/store", recursive=True)


def cached_files(cache: Path) -> list[Path]:
    return [each for each in cache.rglob("*") if each.is_file()]


class TestPaths:
    def test_urls(self) -> None:
        path = Path("s3://bucket/a") / "b.png"
        assert locations.is_remote(path)
        assert locations.as_url(path) == locations.absolute_path(path) == "s3://bucket/a/b.png"
        assert pickle.loads(pickle.dumps(path)) == path

    @pytest.mark.parametrize("text", ["C:/images", "images", "/images", "./a:b/c", "image: 3/x.png"])
    def test_local_paths(self, text: str) -> None:
        assert not locations.is_remote(text)
        assert locations.as_url(text) == text

    def test_file_urls(self, tmp_path: Path) -> None:
        root = class_folders(tmp_path / "images", SIZES)
        found, expected = open_catalog(f"file://{root}"), open_catalog(root)
        assert (found.root, found.fingerprint()) == (expected.root, expected.fingerprint())
        table = tmp_path / "table.csv"
        table.write_text(f"path,label\nfile://{root}/bolt/0.jpg,a\n{root}/nut/0.jpg,b\n")
        assert [open_collection(table).file(index) for index in range(2)] == [root / "bolt/0.jpg", root / "nut/0.jpg"]


@pytest.mark.usefixtures("store")
class TestSources:
    def test_a_folder(self, tmp_path: Path) -> None:
        local = class_folders(tmp_path / "store", SIZES, "png")
        for opened in (open_catalog, open_collection):
            found, expected = opened("memory://store"), opened(local)
            assert (found.name, found.fingerprint()) == (expected.name, expected.fingerprint())
        assert pixels(load_image(found.file(4))).tolist() == pixels(picture(seed=4)).tolist()

    def test_an_image(self) -> None:
        catalog = open_collection("memory://store/nut/1.png")
        assert load_image(catalog.file(0)).size == picture().size

    @pytest.mark.parametrize("ending", ["csv", "parquet"])
    def test_a_table(self, ending: str, store: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
        columns = {"path": ["bolt/0.png", "memory://store/nut/0.png", "nut/9.png"], "label": ["a", "b", "b"]}
        if ending == "parquet":
            pq.write_table(pa.table(columns), tmp_path / "table")
        else:
            rows = zip(*columns.values(), strict=True)
            (tmp_path / "table").write_text("path,label\n" + "".join(f"{path},{label}\n" for path, label in rows))
        store.put_file(str(tmp_path / "table"), f"/store/table.{ending}")
        catalog = open_catalog(f"memory://store/table.{ending}", on_missing="skip")
        assert catalog.missing == ("nut/9.png",)
        assert pixels(load_image(catalog.file(1))).tolist() == pixels(picture(seed=3)).tolist()
        (tmp_path / f"local.{ending}").write_bytes((tmp_path / "table").read_bytes())
        local = open_catalog(tmp_path / f"local.{ending}", root="memory://store", on_missing="skip")
        assert local.fingerprint() == catalog.fingerprint()

    def test_a_table_that_has_changed(self, store: fsspec.AbstractFileSystem) -> None:
        for number in (1, 2):
            store.pipe("/store/table.csv", "\n".join(["path", *(f"nut/{i}.png" for i in range(number))]).encode())
            assert len(open_collection("memory://store/table.csv")) == number

    def test_check_and_summary(self, store: fsspec.AbstractFileSystem) -> None:
        store.pipe("/store/nut/bad.png", b"")
        catalog = open_catalog("memory://store", on_missing="skip")
        assert summary(catalog)["root"] == "memory://store"
        report = check(catalog)
        assert report.unreadable == (("nut/bad.png", "the file is empty"),)
        assert report.images == 6
        with pytest.raises(ImageError, match=r"Cannot read the image memory://store/nut/bad.png: the file is empty"):
            load_image(catalog.root / "nut/bad.png")

    def test_embed_and_index(self, encoder: Encoder, store: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
        gallery = Gallery.build(encoder, "memory://store", tmp_path / "gallery", workers=0)
        assert locations.as_url(gallery.item(0).path) == "memory://store/bolt/0.png"
        store.pipe("/store/bolt/0.png", png(99))  # a cached copy must not be used for it
        done = gallery.add(open_collection("memory://store"), workers=0)
        assert (done.replaced, done.unchanged) == (1, 4)
        assert gallery.search(picture(seed=99), 1)[0].score == pytest.approx(1, abs=1e-4)
        assert gallery.remove(["memory://store/bolt"]) == 3
        embed_to_table(encoder, open_collection("memory://store"), tmp_path / "vectors.parquet", workers=0)
        assert pq.read_table(tmp_path / "vectors.parquet")["path"].to_pylist()[0] == "memory://store/bolt/0.png"


class TestCache:
    def test_a_second_read_needs_no_store(self, store: fsspec.AbstractFileSystem, cache: Path) -> None:
        file = Path("memory://store/bolt/0.png")
        first = load_image(file)
        assert len(cached_files(cache)) == 1
        store.rm("/store/bolt/0.png")
        assert pixels(load_image(file)).tolist() == pixels(first).tolist()
        assert locations.size_and_mtime(file) is None

    def test_the_least_recently_used_are_removed(
        self, store: fsspec.AbstractFileSystem, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for number in range(6):
            store.pipe(f"/store/{number}", bytes(100))
        monkeypatch.setenv(locations.LIMIT_VARIABLE, "300")
        files = [Path(f"memory://store/{number}") for number in range(6)]
        for at, file in enumerate(files[:3]):
            locations.open_binary(file).close()
            cached = locations._cached(locations.as_url(file))
            os.utime(cached, ns=(at, cached.stat().st_mtime_ns))
        locations.open_binary(files[0]).close()  # now the most recently used
        locations.open_binary(files[3]).close()
        assert sum(each.stat().st_size for each in cached_files(cache)) == 300
        assert not locations._cached(locations.as_url(files[1])).exists()
        assert locations._cached(locations.as_url(files[0])).exists()

    def test_a_copy_that_another_process_removes(
        self, store: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file, download, calls = Path("memory://store/nut/0.png"), locations._download, []

        def removed_at_first(url: str, cached: Path) -> None:
            download(url, cached)
            calls.append(url)
            if len(calls) == 1:
                cached.unlink()

        monkeypatch.setattr(locations, "_download", removed_at_first)
        with locations.open_binary(file) as opened:
            assert opened.read() == store.cat("/store/nut/0.png")
        assert len(calls) == 2

    @pytest.mark.parametrize("reason", [errno.EROFS, errno.EPERM])
    def test_a_cache_that_cannot_be_written(
        self, store: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch, reason: int
    ) -> None:
        """What it contains is read. What has changed in the store is not: the old copy would be read."""

        def refuse(path: Path, *_: object, **__: object) -> None:
            raise OSError(reason, os.strerror(reason), str(path))

        file = Path("memory://store/nut/0.png")
        locations.open_binary(file).close()
        for name in ("utime", "unlink"):
            monkeypatch.setattr(os, name, refuse)
        with locations.open_binary(file) as opened:
            assert opened.read() == store.cat("/store/nut/0.png")
        store.pipe("/store/nut/0.png", png(99))
        with pytest.raises(DataError, match=r"Cannot write to the cache .*: .*\. Set SHORTLIST_CACHE to another"):
            locations.size_and_mtime(file)

    @pytest.mark.usefixtures("store")
    def test_a_file_that_cannot_be_cached(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(path: Path) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

        monkeypatch.setattr(Path, "touch", refuse)
        with pytest.raises(
            DataError, match=r"Cannot write to the cache .*: Permission denied\. Set SHORTLIST_CACHE to"
        ):
            locations.open_binary(Path("memory://store/nut/0.png"))

    def test_two_threads_that_need_the_same_file(
        self, store: fsspec.AbstractFileSystem, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        barrier, get = threading.Barrier(2), store.get_file

        def slowly(path: str, to: str) -> None:
            Path(to).write_bytes(b"half")
            barrier.wait(timeout=60)
            get(path, to)

        monkeypatch.setattr(store, "get_file", slowly)

        def read(_: int) -> bytes:
            with locations.open_binary(Path("memory://store/nut/0.png")) as opened:
                return opened.read()

        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(read, range(2))) == [store.cat("/store/nut/0.png")] * 2
        assert len(cached_files(cache)) == 1

    def test_files_of_other_users_stay_in_the_cache(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for at in range(4):
            file = cache / "ab" / str(at)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(bytes(100))
            os.utime(file, (at, at))
        remove = os.unlink

        def unlink(path: Path, *_: object) -> None:
            if Path(path).name == "0":
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
            remove(path)

        monkeypatch.setattr(os, "unlink", unlink)
        locations.trim(cache, 200)
        assert {file.name for file in cached_files(cache)} == {"0", "3"}

    def test_an_interrupted_download(
        self, store: fsspec.AbstractFileSystem, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def get(path: str, to: str) -> None:
            Path(to).write_bytes(b"half")
            raise TimeoutError("no answer\nfor a minute")

        monkeypatch.setattr(store, "get_file", get)
        with pytest.raises(DataError, match=r"^Cannot read memory://store/nut/0.png: no answer for a minute\.$"):
            load_image(Path("memory://store/nut/0.png"))
        assert cached_files(cache) == []

    @pytest.mark.parametrize(("text", "size"), [("500MB", 500e6), ("1.5 gb", 1.5e9), ("7", 7), ("2T", 2e12)])
    def test_limits(self, text: str, size: float, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(locations.LIMIT_VARIABLE, text)
        assert locations.cache_limit() == size

    def test_a_limit_that_is_no_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(locations.LIMIT_VARIABLE, "much")
        with pytest.raises(ConfigError, match="SHORTLIST_REMOTE_CACHE must be a size such as 24GB, not 'much'"):
            locations.cache_limit()


class TestMistakes:
    @pytest.mark.parametrize(
        ("url", "message"),
        [
            ("memory://nothing", "memory://nothing does not exist"),
            ("nope://bucket/images", "Cannot read nope://bucket/images: Protocol not known: nope"),
        ],
    )
    def test_no_such_store(self, url: str, message: str) -> None:
        with pytest.raises(DataError, match=message):
            open_catalog(url)

    @pytest.mark.parametrize(("protocol", "package"), [("s3", "s3fs"), ("gs", "gcsfs")])
    def test_a_missing_package(self, protocol: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(DataError, match=rf"{protocol}:// needs another package: .*{package}"):
            open_collection(f"{protocol}://bucket/images")

    @pytest.mark.usefixtures("store")
    def test_no_credentials(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class NoCredentialsError(Exception):
            pass

        def info(_: object, path: str) -> None:
            raise NoCredentialsError("Unable to locate\ncredentials")

        message = r"Cannot read memory://store: Unable to locate credentials\. Set the credentials"
        with monkeypatch.context() as patched:
            patched.setattr(type(fsspec.filesystem("memory")), "info", info)
            with pytest.raises(DataError, match=message):
                open_catalog("memory://store")

    def test_a_missing_image(self, store: fsspec.AbstractFileSystem) -> None:
        with pytest.raises(ImageError, match=r"Cannot read the image memory://store/x.png: the file does not exist"):
            load_image(Path("memory://store/x.png"))
