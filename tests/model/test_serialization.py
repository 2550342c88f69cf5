import copy
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch

from shortlist.errors import ModelError
from shortlist.model import Embedder, serialization
from shortlist.model.state_dict import read_tensors, write_tensors


@pytest.fixture(scope="module")
def original() -> Embedder:
    return Embedder("test_resnet", dim=8, image_size=64, mean=(0.1, 0.2, 0.3), backbone_args={"drop_rate": 0.25})


@pytest.fixture
def embedder(original: Embedder) -> Embedder:
    """A copy, which tests can change."""
    return copy.deepcopy(original)


def pixels(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (3, 3, 64, 64), dtype=torch.uint8, generator=generator)


def same(a: Embedder, b: Embedder) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("arguments", [{}, {"dim": None, "layer_norm": False, "pooling": "average"}])
@pytest.mark.parametrize("backbone", ["test_resnet", "test_vit"])
def test_loads_bit_for_bit(tmp_path, backbone, arguments):
    embedder = Embedder(backbone, **{"dim": 8, **arguments})
    folder = embedder.save(tmp_path / "a folder" / "with ümlaut")
    assert sorted(file.name for file in folder.iterdir()) == ["embedder.json", "embedder.safetensors"]
    random_state = torch.get_rng_state()
    loaded = Embedder.load(folder)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert same(loaded, embedder)
    assert loaded.config == embedder.config
    assert not loaded.training
    assert torch.equal(loaded(pixels()), embedder.eval()(pixels()))
    assert not same(Embedder(backbone, **{"dim": 8, **arguments}), embedder)


def test_every_argument_is_restored(tmp_path, embedder):
    loaded = Embedder.load(embedder.save(tmp_path))
    assert loaded.config == embedder.config
    assert loaded.config.mean == (0.1, 0.2, 0.3)
    assert loaded.config.backbone_args == {"drop_rate": 0.25}
    assert loaded.backbone.drop_rate == 0.25
    assert json.loads((tmp_path / "embedder.json").read_text())["config"]["backbone"] == "test_resnet"


def test_precision_is_kept(tmp_path, embedder):
    loaded = Embedder.load(embedder.double().save(tmp_path))
    assert loaded.linear.weight.dtype == torch.float64
    assert same(loaded, embedder)


class TestDigest:
    """The digest that loading verifies is reused, but only as long as the embedder is unchanged."""

    @pytest.fixture
    def loaded(self, tmp_path: Path, embedder: Embedder) -> Embedder:
        return Embedder.load(embedder.save(tmp_path))

    def test_it_equals_that_in_the_file(self, tmp_path: Path, embedder: Embedder) -> None:
        saved = json.loads((embedder.save(tmp_path) / "embedder.json").read_text())["sha256"]
        assert saved == embedder.digest() == Embedder.load(tmp_path).digest()

    def test_weights_are_hashed_once(self, loaded: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(serialization, "digest", lambda *_: pytest.fail("hashed again"))
        loaded.digest()
        loaded.train().eval()(pixels())
        loaded.digest()

    @pytest.mark.parametrize(
        "change",
        [
            lambda embedder: torch.nn.init.zeros_(embedder.linear.bias),
            lambda embedder: embedder.load_state_dict({"linear.bias": torch.zeros(8)}, strict=False),
            lambda embedder: setattr(embedder, "linear", torch.nn.Linear(embedder.layout.channels, 8)),
            lambda embedder: next(embedder.backbone.buffers()).add_(1),
            lambda embedder: embedder.double(),
            lambda embedder: setattr(embedder, "config", replace(embedder.config, image_size=32)),
        ],
    )
    def test_changes_are_detected(self, loaded: Embedder, change: Callable[[Embedder], object]) -> None:
        before = loaded.digest()
        change(loaded)
        state = {name: tensor.detach() for name, tensor in loaded.state_dict().items()}
        assert before != loaded.digest() == serialization.digest(state, loaded.config.to_dict())

    def test_an_optimizer_step_is_detected(self, loaded: Embedder) -> None:
        before = loaded.digest()
        loaded(pixels()).sum().backward()
        torch.optim.Adam(loaded.parameters()).step()
        assert loaded.digest() != before

    def test_a_copy_has_its_own_digest(self, loaded: Embedder) -> None:
        copied = copy.deepcopy(loaded)
        assert copied.digest() == loaded.digest()
        torch.nn.init.zeros_(copied.linear.bias)
        assert copied.digest() != loaded.digest()

    def test_in_inference_mode(self, tmp_path: Path, embedder: Embedder) -> None:
        embedder.save(tmp_path)
        with torch.inference_mode():
            loaded = Embedder.load(tmp_path)
            assert loaded.digest() == embedder.digest()
            loaded.linear.bias.zero_()
            assert loaded.digest() != embedder.digest()


def test_the_source_of_weights_is_recorded_and_not_needed(tmp_path):
    weights = tmp_path / "weights.safetensors"
    safetensors.torch.save_file(timm.create_model("test_resnet").state_dict(), weights)
    embedder = Embedder("test_resnet", dim=8, pretrained=weights)
    weights.unlink()
    loaded = Embedder.load(embedder.save(tmp_path / "run"))
    assert loaded.config.pretrained == str(weights)
    assert same(loaded, embedder)


@pytest.mark.parametrize("name", ["embedder.json", "embedder.safetensors"])
def test_a_missing_file_is_named(tmp_path, embedder, name):
    embedder.save(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ModelError, match=f"{name} not found in"):
        Embedder.load(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 200, 0.5, -1])
def test_truncated_weights_are_refused(tmp_path, embedder, keep):
    file = embedder.save(tmp_path) / "embedder.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    with pytest.raises(ModelError, match=r"embedder.safetensors is damaged"):
        Embedder.load(tmp_path)


@pytest.mark.parametrize("where", [0.3, 0.6, 0.999])
def test_one_wrong_bit_is_refused(tmp_path, embedder, where):
    file = embedder.save(tmp_path) / "embedder.safetensors"
    content = bytearray(file.read_bytes())
    content[int(where * len(content))] ^= 1
    file.write_bytes(content)
    with pytest.raises(ModelError, match="damaged"):
        Embedder.load(tmp_path)


def test_a_damaged_or_changed_configuration_is_refused(tmp_path, embedder):
    file = embedder.save(tmp_path) / "embedder.json"
    content = file.read_text()
    file.write_text(content[:50])
    with pytest.raises(ModelError, match=r"embedder.json is damaged"):
        Embedder.load(tmp_path)
    file.write_text(content.replace('"gem"', '"max"'))
    with pytest.raises(ModelError, match=r"embedder.json was edited after saving"):
        Embedder.load(tmp_path)
    file.write_text(content)
    Embedder.load(tmp_path)


def rewrite(folder: Path, **changes) -> None:
    """Save tensors again under another description, as another program would."""
    tensors = safetensors.torch.load_file(folder / "embedder.safetensors")
    description = json.loads((folder / "embedder.json").read_text())
    description["config"] = {**description["config"], **changes.pop("config", {})}
    for name in changes.pop("without", ()):
        del description["config"][name]
    description["sha256"] = serialization.digest(tensors, description["config"])
    description.update(changes)
    safetensors.torch.save_file(
        tensors, folder / "embedder.safetensors", metadata={"embedder": json.dumps(description)}
    )
    (folder / "embedder.json").write_text(json.dumps(description))


def test_another_architecture_is_refused(tmp_path, embedder):
    embedder.save(tmp_path)
    rewrite(tmp_path)
    assert same(Embedder.load(tmp_path), embedder)  # the control: rewriting alone harms nothing
    rewrite(tmp_path, config={"backbone": "test_efficientnet", "backbone_args": {}})
    with pytest.raises(
        ModelError, match=r"not those of 'test_efficientnet' .* missing \(.*unexpected \(.*of another shape"
    ):
        Embedder.load(tmp_path)


def test_a_newer_format_is_refused(tmp_path, embedder):
    embedder.save(tmp_path)
    rewrite(tmp_path, format=99)
    with pytest.raises(ModelError, match=r"format 99, .* update shortlist"):
        Embedder.load(tmp_path)


def test_an_unknown_entry_is_refused(tmp_path, embedder):
    embedder.save(tmp_path)
    rewrite(tmp_path, config={"whitening": True})
    with pytest.raises(ModelError, match=r"another version of shortlist: whitening"):
        Embedder.load(tmp_path)


def test_a_missing_entry_is_refused(tmp_path, embedder):
    embedder.save(tmp_path)
    rewrite(tmp_path, without=["pooling"])
    with pytest.raises(ModelError, match=r"another version of shortlist: pooling"):
        Embedder.load(tmp_path)


def test_other_safetensors_are_refused(tmp_path, embedder):
    embedder.save(tmp_path)
    safetensors.torch.save_file({"linear.weight": torch.zeros(8, 96)}, tmp_path / "embedder.safetensors")
    with pytest.raises(ModelError, match="its header has no configuration"):
        Embedder.load(tmp_path)


def test_a_failed_save_keeps_the_previous_files(tmp_path, embedder, monkeypatch):
    embedder.save(tmp_path)
    before = {name: value.clone() for name, value in embedder.state_dict().items()}
    with torch.no_grad():
        embedder.linear.weight.zero_()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ModelError, match=r"cannot be written to .*No space left"):
        embedder.save(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["embedder.json", "embedder.safetensors"]
    assert torch.equal(Embedder.load(tmp_path).linear.weight, before["linear.weight"])


@pytest.mark.parametrize("completed", [0, 1])
def test_a_kill_between_the_two_files_keeps_the_previous_ones(tmp_path, embedder, monkeypatch, completed):
    embedder.save(tmp_path)
    before = embedder.linear.weight.detach().clone()
    with torch.no_grad():
        embedder.linear.weight.zero_()
    replace, done = Path.replace, []

    def killed(self: Path, target: Path) -> Path:
        if len(done) == completed:
            raise KeyboardInterrupt  # like SIGKILL: nothing runs after it
        done.append(target)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        embedder.save(tmp_path)
    monkeypatch.undo()
    assert torch.equal(Embedder.load(tmp_path).linear.weight, before)
    embedder.save(tmp_path)  # the next one succeeds
    assert sorted(file.name for file in tmp_path.iterdir()) == ["embedder.json", "embedder.safetensors"]
    assert same(Embedder.load(tmp_path), embedder)


def test_any_tensors_can_be_written(tmp_path):
    whole = torch.arange(6.0).reshape(2, 3)
    tensors = {
        "whole": whole,
        "again": whole,
        "transposed": whole.T,
        "row": whole[:1],
        "parameter": torch.nn.Parameter(whole),
    }
    write_tensors(tmp_path / "file", tensors, {"facts": "some"})
    found, metadata = read_tensors(tmp_path / "file")
    assert metadata == {"facts": "some"}
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644  # other users may read it


def test_a_file_instead_of_a_folder_is_reported(tmp_path, embedder):
    (tmp_path / "run").write_text("not a folder")
    with pytest.raises(ModelError, match="cannot be written to"):
        embedder.save(tmp_path / "run")
