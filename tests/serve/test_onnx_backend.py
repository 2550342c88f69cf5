"""Uploads that are embedded with ONNX Runtime instead of PyTorch."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import onnx
import pytest
import torch

from shortlist.encoding import Encoder
from shortlist.encoding.onnx_network import OnnxFormat, in_onnx_runtime
from shortlist.errors import ModelError
from shortlist.gallery import Gallery, rebuild, switch
from shortlist.model import Embedder
from shortlist.serve import serve, service
from tests.export.conftest import no_symbol_log  # noqa: F401 - a fixture
from tests.export.encoders import FEW_BLOCKS, encoder, pictures
from tests.processes import LONG
from tests.serve.test_command import run

pytestmark = pytest.mark.long


def fails(*_: object, **__: object) -> None:
    raise RuntimeError("an operator is not known\nand a long story")


@pytest.fixture(scope="module")
def converted(gallery: Gallery, tmp_path_factory: pytest.TempPathFactory) -> tuple[Encoder, Path]:
    """The encoder of the gallery in ONNX Runtime, and the file of its network, which takes seconds to convert."""
    folder = tmp_path_factory.mktemp("models")
    made = in_onnx_runtime(gallery.encoder, folder, 1)
    (file,) = folder.glob("*.onnx")
    return made, file


@pytest.fixture
def gallery_is_converted(converted: tuple[Encoder, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a conversion of the gallery's network give the graph that it gave before; other networks are converted."""
    made, file = converted
    convert = OnnxFormat.__init__

    def convert_others(self: OnnxFormat, given: Encoder, network: torch.nn.Module) -> None:
        if given.fingerprint == made.fingerprint:
            self.model = onnx.load(file)
        else:
            convert(self, given, network)

    monkeypatch.setattr(OnnxFormat, "__init__", convert_others)


def test_a_network_is_converted_once_for_all_processes(
    gallery: Gallery, converted: tuple[Encoder, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, (first, file) = gallery.encoder, converted
    assert made.runtime is None
    assert first.runtime is not None
    assert first.fingerprint == made.fingerprint
    folder = tmp_path / "models"
    shutil.copytree(file.parent, folder)
    monkeypatch.setattr(OnnxFormat, "__init__", fails)
    again = in_onnx_runtime(made, folder, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Embedder, "forward", fails)
        vectors = [each.encode(pictures()) for each in (first, again)]
    for found in vectors:
        torch.testing.assert_close(found, made.encode(pictures()), atol=1e-4, rtol=0)
    with pytest.raises(ModelError, match="cannot be exported as ONNX"):  # the file of another model is not used
        in_onnx_runtime(encoder(dim=4), folder, 1)
    assert list(folder.glob("*.onnx")) == []


@pytest.mark.usefixtures("gallery_is_converted")
def test_it_serves_and_converts_the_model_of_another_gallery(
    gallery: Gallery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "REFRESH_SECONDS", 0.01)
    rebuild(gallery, encoder(backbone_args=FEW_BLOCKS, dim=24), tmp_path / "new", workers=0)
    switch(tmp_path / "live", gallery.store.folder)
    opened, seen = Gallery.open(tmp_path / "live"), list[tuple[str, int, bool, bool]]()

    def searched(client: httpx.Client) -> tuple[str, int, bool, bool]:
        with monkeypatch.context() as patch:
            patch.setattr(Embedder, "forward", fails)
            answer = client.post("/api/search", files={"image": gallery.item(5).path.read_bytes()}, data={"k": 1})
        used = opened.encoder
        hit = answer.json()["results"][0]
        return opened.name, hit["id"], hit["score"] > 0.999, used.runtime is not None

    def ask(address: str) -> None:
        try:
            with httpx.Client(base_url=address, timeout=LONG) as client:
                seen.append(searched(client))
                switch(tmp_path / "live", tmp_path / "new")
                while opened.name == "gallery":
                    assert client.get("/api/health").status_code == 200
                    time.sleep(0.05)  # for the conversion
                seen.append(searched(client))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    asking: list[threading.Thread] = []

    def ready(address: str, public: bool) -> None:
        asking.append(threading.Thread(target=ask, args=(address,)))
        asking[0].start()

    serve(opened, port=0, backend="onnx", ready=ready)
    asking[0].join()
    assert seen == [("gallery", 5, True, True), ("new", 5, True, True)]
    assert opened.encoder.runtime is None


class TestMistakes:
    @pytest.fixture
    def refused(
        self, gallery: Gallery, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> Callable[..., str]:
        """Return a function that runs the command and returns its error message."""

        def say(backend: str = "onnx") -> str:
            args = (str(gallery.store.folder), "--port", "0", "--backend", backend)
            code, err = run(*args, capsys=capsys, monkeypatch=monkeypatch)
            assert (code, err.count("\n")) == (1, 1)
            return err.strip()

        return say

    def test_no_such_backend(self, refused: Callable[..., str]) -> None:
        assert refused("onxx") == "Error: Unknown --backend 'onxx'; did you mean 'onnx'?"

    @pytest.mark.parametrize("package", ["onnx", "onnxruntime", "onnxscript"])
    def test_a_package_is_not_installed(
        self, refused: Callable[..., str], package: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, package, None)
        problem = f"--backend onnx needs the package {package}, which is not installed"
        assert refused() == f"Error: {problem}: pip install 'shortlist[export]'"

    def test_a_model_that_cannot_be_converted(
        self, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.export, "export", fails)
        problem = "'test_efficientnet' cannot be exported as ONNX (an operator is not known)"
        assert refused() == f"Error: {problem}: use --backend torch"

    def test_other_vectors(
        self, refused: Callable[..., str], converted: tuple[Encoder, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def other_weights(self: OnnxFormat, *_: object) -> None:
            self.model = onnx.load(converted[1])
            (bias,) = (each for each in self.model.graph.initializer if each.name == "linear.bias")
            bias.raw_data = (onnx.numpy_helper.to_array(bias) + np.float32(0.01)).tobytes()

        monkeypatch.setattr(OnnxFormat, "__init__", other_weights)
        message = refused()
        assert message.startswith(
            "Error: The vectors of the ONNX file differ from those of PyTorch (largest difference 0.0"
        )
        assert message.endswith("tolerance 0.0001), so use --backend torch.")
