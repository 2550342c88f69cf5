"""Encoders of timm models and of packages, without any training."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import timm
import torch

from shortlist import Encoder
from shortlist.encoding import pretrained
from shortlist.encoding.conversion import Samples
from shortlist.errors import ConfigError, ModelError
from shortlist.export.package import write_package
from shortlist.export.source import ExportSource
from shortlist.files import write_json
from shortlist.progress import Display
from tests.data.pictures import picture
from tests.export.encoders import SCALES, WHOLE, encoder, pictures


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    file = tmp_path / "weights.pth"
    torch.save(timm.create_model("test_resnet").state_dict(), file)
    return file


class TestTimm:
    @pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_efficientnet"])
    def test_the_vectors_are_the_features_of_timm(self, name: str, tmp_path: Path) -> None:
        """Preprocessed by timm's own transform, which resizes and crops in two steps, and in float."""
        torch.manual_seed(1)
        model = timm.create_model(name).eval()
        torch.save(model.state_dict(), tmp_path / "weights.pth")
        model.reset_classifier(0)
        settings = timm.data.resolve_model_data_config(model)
        image = picture(200, 180, seed=3)
        expected = model(timm.data.create_transform(**settings)(image)[None])
        found = Encoder.from_pretrained(name, pretrained=tmp_path / "weights.pth").encode(image)
        assert found.shape == expected.shape
        assert torch.cosine_similarity(found, expected).item() > 0.999

    def test_pooling_and_image_size(self, weights: Path) -> None:
        image = picture(90, 80)
        average, gem = (
            Encoder.from_pretrained("test_resnet", pretrained=weights, pooling=pooling) for pooling in (None, "gem")
        )
        assert (average.embedder.config.pooling, gem.embedder.config.pooling) == ("average", "gem")
        assert not torch.allclose(average.encode(image), gem.encode(image))
        small = Encoder.from_pretrained("test_resnet", pretrained=weights, image_size=64)
        assert small.transform.size == 64
        assert Encoder.from_pretrained("test_vit", pretrained=False).embedder.config.pooling == "token"

    def test_unknown_models(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ModelError, match="has no backbone 'resnet_50'; the nearest names are: "):
            Encoder.from_pretrained("resnet_50")
        with pytest.raises(ModelError, match="timm has no weights for 'darknet17'"):
            Encoder.from_pretrained("darknet17")


class TestPackage:
    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"backbone": "test_vit", "pooling": "token"},
            {"dim": None, "layer_norm": False, "transform": WHOLE, "scales": SCALES},
            {"layer_norm": False, "l2_pooled": True, "drop_path_rate": 0.1},
            {"backbone": "swin_tiny_patch4_window7_224", "backbone_args": {"depths": [1, 1, 1, 1]}},
        ],
        ids=str,
    )
    def test_the_vectors_are_those_of_the_run(self, settings: dict[str, object], tmp_path: Path) -> None:
        original = encoder(**settings)
        package = exported(original, tmp_path)
        (package / "load.py").write_text("raise RuntimeError('this must not be executed')")
        found = Encoder.from_pretrained(package)
        torch.testing.assert_close(found.encode(pictures()), original.encode(pictures()))
        assert (found.transform, found.scales) == (original.transform, original.scales)

    def test_a_saved_encoder(self, tmp_path: Path) -> None:
        original = encoder()
        again = Encoder.from_pretrained(original.save(tmp_path / "model"))
        assert again.fingerprint == original.fingerprint

    def test_from_the_hub(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        original = encoder()
        package, asked = exported(original, tmp_path), []

        def download(name: str, **options: object) -> str:
            asked.append((name, options))
            return str(package)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        for online in (True, False):
            monkeypatch.setattr(pretrained, "reachable", lambda address, online=online: online)
            found = Encoder.from_pretrained("someone/parts")
            torch.testing.assert_close(found.encode(pictures()), original.encode(pictures()))
        files = {"allow_patterns": ["config.json", "model.safetensors"]}  # and no code
        expected = [("someone/parts", {**files, "local_files_only": local}) for local in (False, True)]
        assert asked == expected

    def test_a_package_that_is_not_on_the_hub(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pretrained, "reachable", lambda address: False)
        with pytest.raises(
            ModelError, match=r"^The folder someone/nothing-7 does not exist, and no package of this name"
        ) as refused:
            Encoder.from_pretrained("someone/nothing-7")
        assert "Hub: it cannot be reached, and no earlier download was found" in str(refused.value)
        assert "local_files_only" not in str(refused.value)

    def test_damaged_packages(self, tmp_path: Path) -> None:
        package = exported(encoder(), tmp_path)
        written = json.loads((package / "config.json").read_text())
        found = {name: value for name, value in written.items() if name != "sha256"}
        for change, message in (
            ({"made_by": "someone"}, "is not a package that shortlist exported, or its config.json is damaged"),
            ({"preprocessing": {"kind": "words"}}, "or its config.json is damaged: KeyError"),
            ({"backbone": "os:system", "backbone_options": {"command": "false"}}, "which is not a timm model"),
            ({"backbone": "test_efficientnet"}, "the weights in .* are not those of 'test_efficientnet'"),
        ):
            write_json(package / "config.json", {**found, **change})
            with pytest.raises(ModelError, match=message):
                Encoder.from_pretrained(package)
        (package / "config.json").write_text(json.dumps({**written, "mean": [0.4, 0.5, 0.5]}))
        with pytest.raises(ModelError, match="its contents differ from what was written"):
            Encoder.from_pretrained(package)
        write_json(package / "config.json", found)
        with (package / "model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x01")
        with pytest.raises(ModelError, match=r"the contents of model.safetensors differ from what was exported"):
            Encoder.from_pretrained(package)
        (package / "model.safetensors").unlink()
        with pytest.raises(ModelError, match=r"has no config.json and model.safetensors"):
            Encoder.from_pretrained(package)

    def test_arguments_for_timm_models(self, tmp_path: Path) -> None:
        package = exported(encoder(), tmp_path)
        for options in ({"pooling": "gem"}, {"image_size": 32}, {"pretrained": False}):
            with pytest.raises(ConfigError, match="is a package: `pretrained`, `pooling` and `image_size` are for"):
                Encoder.from_pretrained(package, **options)  # type: ignore[arg-type]


def exported(original: Encoder, folder: Path) -> Path:
    """Write a package, as `shortlist export --package` does."""
    saved = original.save(folder / "saved")
    with torch.inference_mode():
        images = [original._pixels(each) for each in pictures()]
        vectors = torch.cat([original.network(each[None]) for each in images])
    package = folder / "package"
    write_package(package, original, Samples(images, vectors, "pictures"), ExportSource(saved, Display()), None)
    shutil.rmtree(saved)
    return package


def test_a_run_that_is_not_finished(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(ModelError, match="is not finished: resume it first"):
        Encoder.from_run(tmp_path)
    with pytest.raises(ModelError, match=r"^embedder.json not found in"):
        Encoder.from_run(tmp_path / "nothing")


def test_the_device_is_chosen(tmp_path: Path) -> None:
    saved = encoder().save(tmp_path)
    assert next(Encoder.from_run(saved, device="meta").embedder.parameters()).device.type == "meta"
