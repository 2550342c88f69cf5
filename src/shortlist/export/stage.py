"""Export: from a run to the files that were asked for, each checked before it gets its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from shortlist.encoding import Encoder
from shortlist.errors import ConfigError, ModelError, ShortlistError
from shortlist.export.check import Run, check
from shortlist.export.description import describe
from shortlist.export.graph import plain_network
from shortlist.export.onnx_file import OnnxFile
from shortlist.export.origin import Origin, Samples
from shortlist.export.package import check_package, write_package
from shortlist.export.torch_files import TorchExport, TorchScript
from shortlist.files import atomic_replace, check_writable
from shortlist.progress import Display, default_display
from shortlist.training import open_encoder


class Graph(Protocol):
    """A kind of file that holds a network with its weights."""

    tolerance: float

    def __init__(self, encoder: Encoder, network: nn.Module) -> None: ...

    def save(self, path: Path, description: dict[str, Any]) -> None: ...

    @staticmethod
    def open(path: Path) -> Run: ...


KINDS: Mapping[str, type[Graph]] = {"ONNX": OnnxFile, "TorchScript": TorchScript, "torch.export": TorchExport}


@dataclass(frozen=True)
class Exported:
    """What was written, and how far its vectors are from the run's.

    Args:
        kind: ONNX, TorchScript, torch.export or package.
        path: the file, or the package's folder.
        check: the images that it was checked with, the largest difference of a number, and what was allowed.
    """

    kind: str
    path: Path
    check: Mapping[str, Any]


def export(
    run: Path | str,
    *,
    onnx: Path | str | None = None,
    torchscript: Path | str | None = None,
    torch_export: Path | str | None = None,
    package: Path | str | None = None,
    license: str | None = None,  # noqa: A002 - what it is called on model hubs
    display: Display | None = None,
) -> list[Exported]:
    """Write a run's model in the forms that are asked for.

    Args:
        run: a finished run's folder, or what `Encoder.save` wrote.
        onnx: a file for onnxruntime and others; needs the extra `export`.
        torchscript: a file for `torch.jit.load`, also from C++.
        torch_export: a file for `torch.export.load`.
        package: a folder with weights, configuration, a model card, and code that loads them with timm and torch alone.
        license: of the weights, for the model card.
        display: for progress.

    Raises:
        ConfigError: nothing was asked for, or it cannot be written where it was asked for.
        ModelError: the network cannot be written so, or the file gives other vectors; it is then not there.
        RunError: the run is not finished, or the package's folder holds something else.
    """
    files = {
        kind: Path(path)
        for kind, path in zip(KINDS, (onnx, torchscript, torch_export), strict=True)
        if path is not None
    }
    if not files and package is None:
        raise ConfigError("Nothing to write: give a path for `onnx`, `torchscript`, `torch_export` or `package`.")
    if license is not None and package is None:
        raise ConfigError("`license` is for the model card: it goes with `package`.")
    _check_places(files, package)
    display = display or default_display()
    encoder, origin = open_encoder(run), Origin(Path(run), display)
    encoder.embedder.cpu()
    network, samples = plain_network(encoder), origin.samples(encoder)
    written = []
    for kind, path in files.items():
        with display.task(f"writing {path} ({kind})"):
            written.append(_write_graph(kind, path, encoder, network, samples))
    if package is not None:
        with display.task(f"writing {package} (package)"):
            measured = write_package(Path(package), encoder, samples, origin, license)
        written.append(Exported("package", Path(package), measured))
    return written


def _check_places(files: Mapping[str, Path], package: Path | str | None) -> None:
    """See that all can be written, before the first is."""
    if len({path.absolute() for path in files.values()}) < len(files):
        raise ConfigError("Two forms cannot be written to one file: give each a name of its own.")
    for path in files.values():
        check_writable(path)
    if package is not None:
        check_package(Path(package))


def _write_graph(kind: str, path: Path, encoder: Encoder, network: nn.Module, samples: Samples) -> Exported:
    try:
        graph = KINDS[kind](encoder, network)
    except ShortlistError:
        raise
    except Exception as error:  # exporters raise nearly everything
        first = str(error).strip().partition("\n")[0]
        shapes = " with images that keep their shapes" if encoder.transform.size is None else ""
        raise ModelError(
            f"{encoder.embedder.config.backbone!r}{shapes} cannot be written as {kind} ({first}): use another "
            "format, or `package`"
        ) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_replace(path) as temporary:
        graph.save(temporary, describe(encoder))
        measured = check(graph.open(temporary), samples, graph.tolerance, kind)
        graph.save(temporary, describe(encoder, measured))
    return Exported(kind, path, measured)
