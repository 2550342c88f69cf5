"""The public names, the version and the errors, and the modules that `import shortlist` imports."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path

import pytest

import shortlist
from shortlist.errors import ConfigError, DataError, Interrupted, ModelError, RunError, ShortlistError

ROOT = Path(__file__).parents[1]


def test_dir_lists_the_public_names_only() -> None:
    assert dir(shortlist) == sorted(shortlist.__all__)
    assert not {"import_module", "Any", "TYPE_CHECKING"} & set(dir(shortlist))


@pytest.mark.parametrize("name", shortlist.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    found = getattr(shortlist, name)
    if name != "__version__":
        assert inspect.isclass(found) or inspect.isfunction(found)
        assert found.__doc__


def test_losses_and_metrics_of_the_documentation_are_public() -> None:
    ranking = set(import_module("shortlist.ranking").__all__)
    named = {"recall_at_k_loss", "smooth_ap_loss", "retrieval_metrics", "query_scores", "VirtualBatch", "SiMix"}
    assert named <= ranking & set(shortlist.__all__)


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="module 'shortlist' has no attribute 'Recall'"):
        shortlist.Recall  # noqa: B018


def test_the_version_is_that_of_the_package() -> None:
    assert shortlist.__version__ == metadata.version("shortlist")
    assert f'version = "{shortlist.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_a_source_tree_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert shortlist.__version__ == "0+unknown"


def test_importing_shortlist_imports_no_other_package() -> None:
    code = """
import sys
before = set(sys.modules)
import shortlist
dir(shortlist), shortlist.__version__
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["shortlist"]


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [(ConfigError, ValueError), (DataError, ValueError), (ModelError, ValueError), (RunError, RuntimeError)],
)
def test_errors_are_those_of_python_as_well(kind: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(kind, ShortlistError)
    assert issubclass(kind, builtin)
    assert issubclass(Interrupted, ShortlistError)
    assert not issubclass(Interrupted, ValueError | RuntimeError)
