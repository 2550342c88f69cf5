"""Export a run's model to one or more formats. Every file is verified before it replaces an existing one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from shortlist.encoding import Encoder
from shortlist.encoding.conversion import Samples, converting, plain_network, verify
from shortlist.errors import ConfigError
from shortlist.export.formats import EXPORT_FORMATS
from shortlist.export.metadata import describe_export
from shortlist.export.package import check_package_folder, write_package
from shortlist.export.push import check_push, push
from shortlist.export.source import ExportSource
from shortlist.files import atomic_replace, check_writable
from shortlist.progress import Display, default_display
from shortlist.training import open_encoder


@dataclass(frozen=True)
class Exported:
    """A file or folder that was written, and the result of its verification.

    Args:
        kind: ONNX, TorchScript, torch.export or package.
        path: The file, or the folder of a package.
        check: The images used for the verification, the largest difference of a vector's component, and the tolerance.
        url: Address of the repository that a package was uploaded to.
    """

    kind: str
    path: Path
    check: Mapping[str, Any]
    url: str | None = None


def export(
    run: Path | str,
    *,
    onnx: Path | str | None = None,
    torchscript: Path | str | None = None,
    torch_export: Path | str | None = None,
    package: Path | str | None = None,
    license: str | None = None,  # noqa: A002 - its name on model hubs
    push_to_hub: str | None = None,
    private: bool = False,
    display: Display | None = None,
) -> list[Exported]:
    """Export a run's model.

    Args:
        run: Folder of a finished run, a folder written by `Encoder.save`, or another name of a model, such as
            `timm:NAME`.
        onnx: ONNX file to write; needs the extra `export`.
        torchscript: TorchScript file to write, for `torch.jit.load` or C++.
        torch_export: File to write for `torch.export.load`.
        package: Folder to write: weights, configuration, model card, and code that needs only timm and torch.
        license: License of the weights, for the model card.
        push_to_hub: Repository of the Hugging Face Hub, OWNER/NAME, to upload the package to. It is created if it does
            not exist.
        private: Require that the repository is private.
        display: Shows the progress.

    Returns:
        The written files and folders, in the order of the arguments.

    Raises:
        ConfigError: No output was given, an output path cannot be written, or there is no access token of the Hub.
        HubError: The Hub cannot be reached, or refuses the upload. The package has been written.
        ModelError: The network cannot be converted, or the vectors of the file differ. The file is then not written.
        RunError: The run is not finished, or the package folder contains other files.
    """
    paths = zip(EXPORT_FORMATS, (onnx, torchscript, torch_export), strict=True)
    files = {kind: Path(path) for kind, path in paths if path is not None}
    if not files and package is None:
        raise ConfigError("Nothing to write: give a path for `onnx`, `torchscript`, `torch_export` or `package`.")
    _check_outputs(files, package)
    _check_package_options(package, license, push_to_hub, private)
    display = display or default_display()
    encoder, source = open_encoder(run), ExportSource(Path(run), display)
    encoder.embedder.cpu()
    network, samples = plain_network(encoder), source.samples(encoder)
    written = []
    for kind, path in files.items():
        with display.task(f"writing {path} ({kind})"):
            written.append(_write_file(kind, path, encoder, network, samples))
    if package is not None:
        with display.task(f"writing {package} (package)"):
            check = write_package(Path(package), encoder, samples, source, license)
        url = None
        if push_to_hub is not None:
            with display.task(f"uploading {package} to {push_to_hub}"):
                url = push(Path(package), push_to_hub, private)
        written.append(Exported("package", Path(package), check, url))
    return written


def _check_outputs(files: Mapping[str, Path], package: Path | str | None) -> None:
    """Check that everything can be written, before the first file is written."""
    if len({path.absolute() for path in files.values()}) < len(files):
        raise ConfigError("Two formats cannot be written to the same file: give each its own path.")
    for path in files.values():
        check_writable(path)
    if package is not None:
        check_package_folder(Path(package))


def _check_package_options(
    package: Path | str | None,
    license: str | None,  # noqa: A002
    push_to_hub: str | None,
    private: bool,
) -> None:
    if license is not None and package is None:
        raise ConfigError("`license` is written to the model card: use it with `package`.")
    if push_to_hub is not None and package is None:
        raise ConfigError("`push_to_hub` uploads the folder of a package: use it with `package`.")
    if private and push_to_hub is None:
        raise ConfigError("`private` is a property of an uploaded package: use it with `push_to_hub`.")
    if push_to_hub is not None:
        check_push(push_to_hub)


def _write_file(kind: str, path: Path, encoder: Encoder, network: nn.Module, samples: Samples) -> Exported:
    with converting(encoder, kind, "use another format, or `package`"):
        converted = EXPORT_FORMATS[kind](encoder, network)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_replace(path) as temporary:
        converted.save(temporary, describe_export(encoder))
        check = verify(converted.open(temporary), samples, converted.tolerance, kind)
        converted.save(temporary, describe_export(encoder, check))
    return Exported(kind, path, check)
