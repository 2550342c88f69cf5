"""embed, index, search and gallery on the command line."""

# ruff: noqa: F811 - a fixture of test_cli

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pyarrow import parquet

from shortlist.data import TestTransform
from shortlist.encoding import Encoder
from shortlist.model import Embedder
from tests.test_cli import Call, assert_error, call  # noqa: F401

NUMBER = 72


@pytest.fixture(params=["folder", "milvus"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "gallery" if request.param == "folder" else "milvus:gallery.db"


def facts(err: str) -> dict:
    """The last message of a command with --json."""
    return json.loads(err.splitlines()[-1])


def test_embed(call: Call, folders: Path, tmp_path: Path) -> None:
    code, out, err = call("embed", folders / "run", folders / "images", "-o", "vectors.parquet", "--json")
    assert (code, facts(err)["embedded"]) == (0, NUMBER)
    found = parquet.read_table(tmp_path / "vectors.parquet")
    assert set(found["label"].to_pylist()) == {f"class {number:02}" for number in range(12)}
    assert json.loads(out)["embedded"] == NUMBER
    code, _, err = call("embed", folders / "run", folders / "images" / "class 03", "-o", "vectors.parquet")
    message = f"vectors.parquet: images embedded: 0, unchanged: 6, dropped: {NUMBER - 6}, unreadable: 0."
    assert err.splitlines()[-1] == message


def test_unreadable_images_are_listed(call: Call, folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "images", tmp_path / "images")
    (tmp_path / "images" / "class 00" / "bad.png").write_text("words")
    for command in (("embed", "-o", "vectors.parquet"), ("index", "-o", "gallery")):
        code, _, err = call(command[0], folders / "run", "images", *command[1:])
        assert code == 0
        *_, bad, last = err.splitlines()
        assert bad.startswith(f"unreadable: {tmp_path}/images/class 00/bad.png: it is not an image, or its format")
        assert "unreadable: 1." in last
    assert_error(call("index", folders / "run", "images/class 00/bad.png", "-o", "other"), "none of its 1 images")


def test_from_index_to_search(call: Call, folders: Path, place: str, tmp_path: Path) -> None:
    code, out, err = call("index", folders / "run", folders / "images", "-o", place, "--json")
    assert (code, json.loads(out)["added"], facts(err)["added"]) == (0, NUMBER, NUMBER)
    assert facts(err)["message"].endswith(f"has {NUMBER} images; search is exact (flat).")
    query = folders / "images" / "class 05" / "2.png"
    code, out, _ = call("search", place, query, "-k", "3", "--sheet", "sheets/sheet.png")
    assert code == 0
    assert "1.0000" in out
    assert "class 05" in out
    with Image.open(tmp_path / "sheets" / "sheet.png") as sheet:
        assert sheet.width > 500
    code, out, _ = call("search", place, query, query, "-k", "2", "--label", "class 07", "--json")
    found = json.loads(out)
    assert found["gallery"]["images"] == NUMBER
    assert [len(each["hits"]) for each in found["results"]] == [2, 2]
    assert {hit["label"] for each in found["results"] for hit in each["hits"]} == {"class 07"}
    assert Path(found["results"][0]["hits"][0]["path"]).is_file()


def test_nothing_similar_enough(call: Call, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gallery has the minimum score that the run's report recommends, unless another one is given."""
    shutil.copytree(folders / "run", "run")
    monkeypatch.setattr("shortlist.report.thresholds.MIN_FOUND", 0.0)  # the model is not good
    call("report", "run")
    recommended = json.loads(Path("run/min-score.json").read_text())["min_score"]
    call("index", "run", folders / "images", "-o", "gallery")
    assert json.loads(call("gallery", "show", "gallery", "--json")[1])["min_score"] == recommended
    file = Path("run/min-score.json")
    for content in ("{}", file.read_text().replace("0.", "0.0", 1)):
        file.write_text(content)
        for command in (("index", "run", folders / "images"), ("gallery", "rebuild", "gallery", "--model", "run")):
            assert_error(call(*command, "-o", "new"), "run/min-score.json is damaged")
        assert not Path("new").exists()
    call("index", folders / "run", folders / "images", "-o", "other", "--min-score", "0.9999")
    assert "minimum score  0.9999" in call("gallery", "show", "other")[1]
    Image.new("RGB", (40, 40), "white").save("white.png")
    code, out, _ = call("search", "other", "white.png", "-k", "3")
    lines = out.splitlines()
    assert (code, lines[0]) == (0, "white.png: nothing similar enough")
    assert sum(bool(re.match(r" \d  0\.\d{4} \(weak\)  class", line)) for line in lines) == 3
    assert lines[-1] == "(weak): below the minimum score 0.9999, which --min-score overrides."
    assert json.loads(call("search", "other", "white.png", "--json")[1])["results"][0]["hits"] == []
    found = json.loads(call("search", "other", "white.png", "-k", "3", "--min-score", "-1", "--json")[1])
    assert (found["min_score"], len(found["results"][0]["hits"])) == (-1, 3)
    assert call("gallery", "set", "other", "--min-score", "0.5")[:2] == (
        0,
        "Searches of other leave out results with a score below 0.5.\n",
    )
    assert "minimum score  0.5" in call("gallery", "show", "other")[1]


def test_what_comes_with_an_image_comes_back(call: Call, folders: Path) -> None:
    first, second = (folders / "images" / "class 05" / f"{number}.png" for number in (0, 1))
    Path("table.csv").write_text(f'path,label,sku,price\n{first},round|red,"A,1",9.50\n{second},round,B,7\n')
    assert call("index", folders / "run", "table.csv", "-o", "gallery", "--label-separator", "|")[0] == 0
    code, out, _ = call("search", "gallery", first, "--csv")
    header, best, other = csv.reader(out.splitlines())
    assert (code, header) == (0, ["query", "rank", "id", "score", "label", "path", "sku", "price"])
    assert best == [str(first), "1", "0", best[3], "round, red", str(first), "A,1", "9.50"]
    assert (float(best[3]), other[6]) == (pytest.approx(1, abs=1e-4), "B")
    for separator, labels in (([], ["round|red", "round"]), (["--label-separator=|"], [["round", "red"], ["round"]])):
        assert call("embed", folders / "run", "table.csv", "-o", "vectors.parquet", *separator)[0] == 0
        assert parquet.read_table("vectors.parquet")["label"].to_pylist() == labels
    (found,) = json.loads(call("search", "gallery", first, "--label", "red", "--json")[1])["results"]
    assert [(hit["labels"], hit["fields"]) for hit in found["hits"]] == [
        (["round", "red"], {"sku": "A,1", "price": "9.50"})
    ]
    assert re.search(r"round, red  .*  A,1  9\.50", call("search", "gallery", first)[1])
    assert_error(call("search", "gallery", first, "--csv", "--json"), "cannot be combined")


def test_gallery(call: Call, folders: Path, place: str) -> None:
    call("index", folders / "run", folders / "images", "-o", place)
    paths = (folders / "images" / "class 05", folders / "images/class 06/0.png")
    code, out, _ = call("gallery", "remove", place, *paths, "--json")
    assert (code, json.loads(out)) == (0, {"removed": 7, "images": NUMBER - 7})
    code, out, _ = call("gallery", "show", place, "--json")
    assert (code, json.loads(out)["images"], len(json.loads(out)["labels"])) == (0, NUMBER - 7, 11)
    code, out, err = call("gallery", "add", place, folders / "images")
    assert (code, out) == (0, "")
    assert err.splitlines()[-1].startswith(f"Images added: 7, unchanged: {NUMBER - 7}, unreadable: 0. The gallery ")
    code, out, _ = call("gallery", "show", place)
    assert (code, "exact (flat)" in out) == (0, True)


def test_daily_updates(call: Call, folders: Path, tmp_path: Path) -> None:
    """Only images that have changed are embedded, and the log lists the changes."""
    images = tmp_path / "images"
    shutil.copytree(folders / "images", images)
    update = ("index", folders / "run", "images", "-o", "gallery", "--prune", "--log", "changes.jsonl", "--json")
    assert call(*update)[0] == 0
    Path("changes.jsonl").unlink()
    (images / "class 00" / "0.png").unlink()
    (images / "class 01" / "0.png").rename(images / "class 01" / "new.png")
    shutil.copy(images / "class 03" / "1.png", images / "class 02" / "1.png")
    (images / "class 04" / "bad.png").write_text("words")
    _, out, err = call(*update)
    found, counts = json.loads(out), f"added: 1, replaced: 1, unchanged: {NUMBER - 3}, removed: 2, unreadable: 1."
    assert f"Images {counts} The gallery" in err
    assert {name: found[name] for name in ("added", "replaced", "unchanged", "removed")} == {
        "added": 1,
        "replaced": 1,
        "unchanged": NUMBER - 3,
        "removed": 2,
    }
    changes = [json.loads(line) for line in Path("changes.jsonl").read_text().splitlines()]
    assert {(each["change"], str(Path(each["path"]).relative_to(images))) for each in changes} == {
        ("added", "class 01/new.png"),
        ("replaced", "class 02/1.png"),
        ("removed", "class 00/0.png"),
        ("removed", "class 01/0.png"),
        ("unreadable", "class 04/bad.png"),
    }
    assert {each["gallery"] for each in changes} == {"gallery"}
    reasons = {each["change"]: each["reason"] for each in changes if "reason" in each}
    assert reasons == {"unreadable": found["unreadable"][str(images / "class 04" / "bad.png")]}
    call("gallery", "remove", "gallery", images / "class 05" / "0.png", "--log", "changes.jsonl")
    last = json.loads(Path("changes.jsonl").read_text().splitlines()[-1])
    assert (last["change"], last["path"]) == ("removed", str(images / "class 05" / "0.png"))
    one = ("gallery", "add", "gallery", images / "class 05" / "0.png", "--prune")
    assert_error(call(*one), "--prune is for folders and tables")


def test_a_new_model(call: Call, folders: Path) -> None:
    """Rebuild a gallery, compare the two, switch, and switch back."""
    call("index", folders / "run", folders / "images", "-o", "one")
    assert call("gallery", "switch", "live", "one")[:2] == (0, "live now refers to one.\n")
    code, out, err = call("gallery", "rebuild", "live", "--model", folders / "run", "-o", "two", "--json")
    assert (code, json.loads(out)["added"], json.loads(out)["name"]) == (0, NUMBER, "two")
    assert "embedding one" in err
    code, out, _ = call("gallery", "rebuild", "live", "--model", folders / "run", "-o", "two", "--json")
    assert (json.loads(out)["added"], json.loads(out)["unchanged"]) == (0, NUMBER)
    code, out, _ = call("compare", "live", "two", "--queries", folders / "images", "--json")
    assert (code, json.loads(out)["tests"][0]["queries"]["r@1"]) == (0, NUMBER)
    code, out, _ = call("gallery", "switch", "live", "two")
    assert out == "live now refers to two. To undo this: shortlist gallery switch live --back\n"
    assert json.loads(call("gallery", "show", "live", "--json")[1])["name"] == "two"
    assert json.loads(call("gallery", "switch", "live", "--back", "--json")[1])["gallery"] == "one"
    assert json.loads(call("gallery", "show", "live", "--json")[1])["name"] == "one"
    for arguments in (("live",), ("live", "two", "--back")):
        assert_error(call("gallery", "switch", *arguments), "Give either the gallery to switch to, or --back")


def test_the_minimum_score_of_a_new_model(call: Call, folders: Path) -> None:
    """It is kept only for the same model; otherwise, rebuild and switch print how to set one."""
    call("index", folders / "run", folders / "images" / "class 00", "-o", "one", "--min-score", "0.7")
    call("gallery", "switch", "live", "one")
    _, out, err = call("gallery", "rebuild", "live", "--model", folders / "run", "-o", "same", "--json")
    assert (json.loads(out)["min_score"], "minimum score" in err) == (0.7, False)
    Encoder(Embedder("test_efficientnet", dim=8).eval(), TestTransform(32, 36)).save(Path("other"))
    _, out, err = call("gallery", "rebuild", "live", "--model", "other", "-o", "two", "--json")
    assert json.loads(out)["min_score"] is None
    note = "two has no minimum score, so searches return all results. The previous gallery has 0.7, but"
    assert facts(err)["message"].startswith(note)
    assert facts(err)["message"].endswith("To set one: shortlist gallery set two --min-score SCORE")
    code, out, err = call("gallery", "switch", "live", "two", "--json")
    assert (code, json.loads(out)["gallery"], err.startswith(note)) == (0, "two", True)
    assert err.endswith("shortlist gallery set live --min-score SCORE\n")
    assert call("gallery", "switch", "live", "--back")[2] == ""
    call("gallery", "set", "two", "--min-score", "0.4")
    _, _, err = call("gallery", "rebuild", "live", "--model", "other", "-o", "two")
    assert err.endswith("The minimum score of two is 0.4; that of the previous gallery is 0.7.\n")
    assert call("gallery", "switch", "live", "two")[2] == ""


def test_gallery_check(call: Call, folders: Path) -> None:
    call("index", folders / "run", folders / "images" / "class 00", "-o", "gallery")
    assert call("gallery", "check", "gallery")[:2] == (0, "3 files and the model checked: 0 problems\n")
    (vectors,) = Path("gallery").glob("vectors-*.npy")
    vectors.unlink()
    code, out, _ = call("gallery", "check", "gallery", "--json")
    found = json.loads(out)
    assert (code, found["ok"], found["problems"]) == (1, False, [f"{vectors.name} is missing"])
    code, out, _ = call("gallery", "check", "gallery")
    assert (code, out.splitlines()[0]) == (1, f"damaged: {vectors.name} is missing")
    assert_error(call("gallery", "check", "milvus:some.db"), "is a Milvus collection")


def test_shards(call: Call, folders: Path, tmp_path: Path) -> None:
    """A table and a gallery of merged shards are those of one process."""
    run, images = folders / "run", folders / "images"
    for command, one, out in (("embed", "one.parquet", "out.parquet"), ("index", "one", "out")):
        call(command, run, images, "-o", one)
        code, printed, err = call(command, run, images, "-o", out, "--shard", "0/2", "--json")
        assert (code, json.loads(printed)["part"]) == (0, f"{out}.parts/images.0-of-2.npy")
        assert json.loads(printed)["embedded"] + 36 == NUMBER
        missing = call(command, run, images, "-o", out, "--merge")
        again = shlex.join(["shortlist", command, str(run), str(images), "-o", out, "--shard", "1/2"])
        assert_error(missing, f"{out}.parts is not complete: shard 1/2 is missing or not finished. Run again:", again)
        assert call(command, run, images, "-o", out, "--shard", "1/2")[0] == 0
        code, _, err = call(command, run, images, "-o", out, "--merge")
        assert (code, str(NUMBER) in err) == (0, True)
        assert not (tmp_path / f"{out}.parts").exists()
        assert call(command, run, images, "-o", out, "--merge")[0] == 0  # nothing to do
    tables = [parquet.read_table(tmp_path / name) for name in ("one.parquet", "out.parquet")]
    assert tables[0].equals(tables[1])
    vectors = [np.load(next((tmp_path / name).glob("vectors-*.npy"))) for name in ("one", "out")]
    assert np.array_equal(*vectors)


def test_shards_for_milvus(call: Call, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images that are added in several changes."""
    from shortlist.gallery import milvus_store

    monkeypatch.setattr(milvus_store.MilvusStore, "images_per_change", 30)
    arguments = ("index", folders / "run", folders / "images", "-o", "milvus:out.db", "--parts", "parts")
    assert_error(call(*arguments[:-2], "--merge"), "give --parts, a folder for the parts of all shards")
    assert call(*arguments, "--shard", "0/1")[0] == 0
    code, out, _ = call(*arguments, "--merge", "--json")
    assert (code, json.loads(out)["added"]) == (0, NUMBER)
    assert "1.0000" in call("search", "milvus:out.db", folders / "images" / "class 11" / "5.png", "-k", "1")[1]


def test_mistakes_in_shards(call: Call, folders: Path) -> None:
    arguments = ("embed", folders / "run", folders / "images", "-o", "out.parquet")
    assert_error(call(*arguments, "--shard", "3/2"), "--shard is I/N with I from 0 to N - 1", "not '3/2'")
    assert_error(call(*arguments, "--shard", "0/2", "--merge"), "give one of the two options")
    assert_error(call(*arguments, "--parts", "parts"), "--parts is for --shard and --merge")
    assert_error(call(*arguments, "--merge"), "out.parquet.parts has no complete part of images", "with --shard")


def test_the_measured_recall_is_reported(call: Call, folders: Path) -> None:
    code, _, err = call("index", folders / "run", folders / "images", "-o", "gallery", "--kind", "hnsw", "--json")
    assert (code, facts(err)["kind"], facts(err)["recall"]["queries"]) == (0, "hnsw", NUMBER)
    message = "approximate (hnsw, recall@10 100.0 %, measured with 72 of its own images as queries)"
    assert message in facts(err)["message"]
    assert message in call("gallery", "show", "gallery")[1]


def test_paths_are_never_cut(call: Call, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are relative below the current folder and absolute elsewhere, and are not truncated to the terminal."""
    monkeypatch.setenv("COLUMNS", "40")
    long = tmp_path / ("a folder with a long name " * 4) / "[red]"
    shutil.copytree(folders / "images" / "class 00", long)
    call("index", folders / "run", long, "-o", "gallery")
    _, out, _ = call("search", "gallery", long / "0.png", "-k", "1")
    assert out.splitlines()[0] == f"{long / '0.png'}:"
    assert out.splitlines()[2].split(maxsplit=3) == ["1", "1.0000", "-", f"{long.relative_to(tmp_path) / '0.png'} "]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    _, out, _ = call("search", "../gallery", long / "0.png", "-k", "1")
    assert f" {long / '0.png'} " in out.splitlines()[2]
    assert (
        json.loads((tmp_path / "gallery" / "gallery.json").read_text())["fingerprint"]
        in call("gallery", "show", "../gallery")[1]
    )


def test_mistakes(call: Call, folders: Path, tmp_path: Path) -> None:
    run, images = folders / "run", folders / "images"
    call("index", run, images / "class 00", "-o", "gallery")
    assert_error(call("search", "nowhere", images / "class 00" / "0.png"), "No gallery found in nowhere")
    assert_error(call("search", "gallery", "nothing.png"), "nothing.png", "the file does not exist")
    assert_error(
        call("search", "gallery", images / "class 00" / "0.png", "--model", tmp_path), "embedder.json not found in"
    )
    query = images / "class 00" / "0.png"
    assert_error(call("search", "gallery", query, "--label", "class00"), "the label 'class00', and no labels at all")
    call("index", run, images, "-o", "labelled")
    assert_error(call("search", "labelled", query, "--label", "class00"), "did you mean 'class 00'?")
    assert_error(call("search", "milvus:nothing.db", images / "class 00" / "0.png"), "nothing.db", "shortlist index")
    assert_error(call("index", run, "nowhere/at/all", "-o", "gallery"), "nowhere/at/all does not exist")
    assert_error(call("index", run, images, "-o", "other", "--kind", "hsnw"), "did you mean 'hnsw'")
    assert_error(call("index", tmp_path, images, "-o", "other"), "No run found in")
    assert_error(call("gallery", "remove", "gallery", "nothing.png"), "has no image at", "nothing.png")
    assert_error(call("gallery", "add", "gallery", images, "--root", images), "--root has no effect")
    assert_error(call("embed", run, images, "-o", "tiny.yaml"), "is not a Parquet file")
    assert not (tmp_path / "other").exists()
