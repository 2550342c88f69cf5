"""Pickles are read as plain data, without importing or calling anything that they name."""

from __future__ import annotations

import builtins
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from shortlist.data.unpickling import read_plain_pickle
from shortlist.errors import DataError

PLAIN = {"names": ["a", "ü"], "box": (1, 2.5, None, True), "nested": [{}, [], {"x": b"y"}, {1, 2}]}


def written(folder: Path, content: bytes) -> Path:
    file = folder / "gnd.pkl"
    file.write_bytes(content)
    return file


class Calls:
    """Object whose pickle requests a function call."""

    def __init__(self, function: object, *arguments: object):
        self.call = (function, arguments)

    def __reduce__(self) -> object:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_plain_data_of_every_protocol(tmp_path: Path, protocol: int):
    if protocol < 3:  # these protocols have neither bytes nor sets
        plain = {"names": PLAIN["names"], "box": PLAIN["box"]}
    else:
        plain = {**PLAIN, "nested": PLAIN["nested"][:3]} if protocol == 3 else PLAIN
    assert read_plain_pickle(written(tmp_path, pickle.dumps(plain, protocol))) == plain


def test_strings_of_python_2(tmp_path: Path):
    """'all_souls' and 'caf\\xe9' as written by Python 2, whose strings are bytes."""
    binary = b"\x80\x02]q\x00(U\x09all_soulsq\x01U\x04caf\xe9q\x02e."
    assert read_plain_pickle(written(tmp_path, binary)) == ["all_souls", "café"]
    assert read_plain_pickle(written(tmp_path, b"(lp0\nS'all_souls'\np1\naS'caf\\xe9'\np2\na.")) == [
        "all_souls",
        "café",
    ]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("deep", [False, True], ids=["alone", "among data"])
def test_a_malicious_pickle_does_nothing(tmp_path: Path, protocol: int, deep: bool):
    mark = tmp_path / "was here"
    evil = [
        (Calls(os.system, f"touch '{mark}'"), "system"),
        (Calls(eval, f"open({str(mark)!r}, 'w').close()"), "eval"),
        (Calls(exec, f"open({str(mark)!r}, 'w').close()"), "exec"),
        (Calls(builtins.open, str(mark), "w"), "open"),
        (Calls(getattr, "", "upper"), "getattr"),
    ]
    for call, name in evil:
        content = pickle.dumps({"imlist": ["a"], "gnd": [call]} if deep else call, protocol)
        with pytest.raises(DataError, match=rf"gnd.pkl requests \S+\.{name}; only numbers, strings, lists"):
            read_plain_pickle(written(tmp_path, content))
        assert not mark.exists()
        if name != "getattr":  # control: pickle.loads does execute it
            result = pickle.loads(content)
            if name == "open":
                (result["gnd"][0] if deep else result).close()
            assert mark.exists()
            mark.unlink()


@pytest.mark.parametrize(
    "content",
    [np.arange(3), np.float64(1), np.dtype("int8"), Path(), PLAIN.keys, set],
    ids=lambda each: type(each).__name__,
)
def test_every_class_and_function_is_refused(tmp_path: Path, content: object):
    with pytest.raises(DataError, match="requests "):
        read_plain_pickle(written(tmp_path, pickle.dumps(content, 2)))


def test_the_error_for_arrays_gives_advice(tmp_path: Path):
    with pytest.raises(DataError, match=r"requests numpy\S+; .* convert its NumPy arrays to lists$"):
        read_plain_pickle(written(tmp_path, pickle.dumps({"cids": ["a"], "qidx": np.arange(3)})))
    with pytest.raises(DataError, match="Check that it is the original file"):
        read_plain_pickle(written(tmp_path, pickle.dumps(Path())))


OPCODES = {
    "GLOBAL": b"cos\nsystem\n(S'true'\ntR.",
    "INST": b"(S'true'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nS'true'\no.",
    "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    "NEWOBJ": b"\x80\x02cbuiltins\nobject\n)\x81.",
    "PERSID": b"Pwhatever\n.",
    "BINPERSID": b"\x80\x02K\x01Q.",
}


@pytest.mark.parametrize("content", OPCODES.values(), ids=OPCODES)
def test_every_opcode_for_globals_is_refused(tmp_path: Path, content: bytes):
    with pytest.raises(DataError, match=r"gnd\.pkl requests "):
        read_plain_pickle(written(tmp_path, content))


def test_registered_extensions_are_refused(tmp_path: Path):
    import copyreg

    copyreg.add_extension("os", "system", 240)
    try:
        with pytest.raises(DataError, match=r"requests os\.system"):
            read_plain_pickle(written(tmp_path, b"\x80\x02\x82\xf0(U\x04truetR."))
    finally:
        copyreg.remove_extension("os", "system", 240)


@pytest.mark.parametrize(
    "content",
    [b"", b"<!DOCTYPE html><html>quota exceeded</html>", pickle.dumps(PLAIN)[:-9], b"\x80\x02R.", b"\xff" * 50, b"0."],
    ids=["empty", "web page", "truncated", "nothing to call", "noise", "empty stack"],
)
def test_damaged_pickles(tmp_path: Path, content: bytes):
    with pytest.raises(DataError, match=r"gnd.pkl cannot be read as a pickle \(\w+\): the download may have failed"):
        read_plain_pickle(written(tmp_path, content))


def test_no_file(tmp_path: Path):
    with pytest.raises(DataError, match=r"Cannot read .*gnd\.pkl: No such file"):
        read_plain_pickle(tmp_path / "gnd.pkl")
