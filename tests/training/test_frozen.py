"""A frozen backbone: only the head is trained, on cached features, and the run is like any other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.nn.functional import normalize

from shortlist import runs
from shortlist.config import PAPER_K_WITH_SIMIX, RunConfig
from shortlist.data.images import load_crop
from shortlist.encoding import Encoder, embed_images
from shortlist.errors import ConfigError
from shortlist.export import export
from shortlist.gallery import Gallery
from shortlist.model import CorrectedLinear, Embedder, pca_whitening
from shortlist.ranking import RecallAtKLoss, SiMix
from shortlist.search import open_vectors
from shortlist.seeds import derived_seed
from shortlist.training import Display, RunFolder, ablate, datasets, describe_plan, evaluate_run, make_plan
from shortlist.training import resume_run as resume
from shortlist.training import train_run as train
from shortlist.training.components import build_embedder, build_transforms
from shortlist.training.durations import MEASURED_STEPS, seconds_per_step
from shortlist.training.frozen import _Estimate
from shortlist.training.learner import Learner
from tests.processes import Commands
from tests.training.runs import class_folders, config, kill_where, same_weights, wait_where, weights
from tests.training.test_resume import assert_same, wait_after
from tests.user_parts import Net

VIEWS, TRAINED = 3, 18  # views of each of 3 classes x 6 images
FROZEN = ("model.freeze=backbone", f"data.views={VIEWS}", "loss.simix=true", "batch.chunk_size=auto")


class Listener(Display):
    """Records how many images were encoded for each run."""

    def __init__(self) -> None:
        self.encoded: list[int] = []
        self.messages: list[str] = []

    def message(self, text: str, **facts: Any) -> None:
        self.messages.append(text)
        self.encoded += [facts["encoded"]] if "encoded" in facts else []


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("data") / "images")


@pytest.fixture(scope="module")
def finished(images: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run with a report. Tests must not change it."""
    path = tmp_path_factory.mktemp("runs") / "finished"
    return RunFolder(runs.train(config(images, *FROZEN, "evaluation.before=true"), output=path).path)


def pooled_views(chosen: RunConfig, embedder: Embedder) -> Tensor:
    """Features (n, views, channels), one view at a time."""
    train_images, (transform, _) = make_plan(chosen, Display()).train, build_transforms(chosen, embedder)
    rows = []
    for index in range(len(train_images)):
        seeds = (derived_seed("view", 0, view, train_images.paths[index]) for view in range(VIEWS))
        views = [load_crop(train_images.file(index), transform, Random(seed)) for seed in seeds]
        with torch.no_grad():
            rows.append(embedder.eval().pooled_features(torch.stack(views)))
    return torch.stack(rows).half().float()


# Training


def test_a_literal_loop(images: Path, tmp_path: Path) -> None:
    sgd = ("optimizer.name=sgd", "optimizer.lr=0.1", "optimizer.momentum=0", "data.validation=none")
    chosen = config(images, *FROZEN, *sgd, "training.epochs=2")
    run = train(chosen, tmp_path / "run")
    trained = weights(run)
    (features,) = (np.load(file) for file in run.views.rglob("*.npy") if "float16" in facts(file))
    cached = torch.from_numpy(features.reshape(2 * TRAINED, VIEWS, -1)).float()
    torch.testing.assert_close(cached, pooled_views(chosen, build_embedder(chosen)), rtol=2e-3, atol=2e-3)
    assert same_weights(backbone(trained), backbone(build_embedder(chosen).state_dict()))
    assert_close(trained, by_hand(chosen, cached, change=False))
    with pytest.raises(AssertionError):  # control: with other views, it is another result
        assert_close(trained, by_hand(chosen, cached, change=True))


def facts(file: Path) -> str:
    return (file.parent / "facts.json").read_text()


def by_hand(chosen: RunConfig, features: Tensor, change: bool) -> dict[str, Tensor]:
    plan, embedder = make_plan(chosen, Display()), build_embedder(chosen)
    labels = torch.from_numpy(plan.train.labels.copy())
    head = nn.Sequential(embedder.layer_norm, embedder.linear)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, weight_decay=4e-4)
    loss = RecallAtKLoss(PAPER_K_WITH_SIMIX, simix=SiMix())
    for step, (epoch, batch) in enumerate(plan.batches(0)):
        random = torch.Generator().manual_seed(derived_seed("views", 0, epoch + change))
        view = torch.randint(VIEWS, (len(labels),), generator=random)[batch]
        optimizer.zero_grad()
        torch.manual_seed(derived_seed("step", 0, step))
        torch.manual_seed(derived_seed("loss", int(torch.randint(2**62, ()))))  # as in LargeBatchStep
        loss(normalize(head(features[batch, view])), labels[batch]).backward()
        optimizer.step()
    return embedder.state_dict()


def backbone(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each for name, each in tensors.items() if name.startswith(("backbone.", "pooling."))}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name in ("layer_norm.weight", "layer_norm.bias", "linear.weight", "linear.bias"):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-5)


def test_a_moving_average_of_the_head_only(images: Path) -> None:
    learner = Learner(config(images, *FROZEN, "training.ema=0.5"), torch.device("cpu"))
    assert sum(each.numel() for each in learner.average.parameters()) == count(learner.embedder.parts()["head"])
    features, labels = torch.randn(6, learner.embedder.layout.channels), torch.tensor([0, 0, 0, 1, 1, 1])
    learner.train_step(0, iter([features]), labels, 1.0)  # its weights are copied
    first = learner.embedder.linear.weight.detach().clone()
    learner.train_step(1, iter([features]), labels, 1.0)
    torch.testing.assert_close(learner.result.linear.weight, (first + learner.embedder.linear.weight) / 2)
    assert learner.result.backbone is learner.embedder.backbone
    assert learner.result is not learner.embedder
    state = learner.state(2)
    other = Learner(config(images, *FROZEN, "training.ema=0.5", "training.seed=1"), torch.device("cpu"))
    other.load(state)
    assert same_weights(other.result.state_dict(), learner.result.state_dict())


def count(parameters: list[nn.Parameter]) -> int:
    return sum(each.numel() for each in parameters)


# An ordinary run


def test_evaluations_are_the_usual_ones(finished: RunFolder, tmp_path: Path) -> None:
    """Embedding from pixels gives the same vectors up to rounding, and the same metrics."""
    (before,), (after,) = (json.loads(file.read_text()) for file in (finished.before_file, finished.evaluation_file))
    assert before["metrics"] != after["metrics"]
    copy = RunFolder(Path(shutil.copytree(finished.path, tmp_path / "run")))
    (again,) = evaluate_run(copy.path)
    assert again.to_dict()["metrics"] == after["metrics"]
    shutil.rmtree(copy.vectors)
    (from_pixels,) = evaluate_run(copy.path)
    assert from_pixels.to_dict()["metrics"] == after["metrics"]
    kept, fresh = (open_vectors(next(folder.vectors.glob("*.npy"))) for folder in (finished, copy))
    np.testing.assert_allclose(kept, fresh, atol=1e-5)


def test_the_vectors_of_tests_are_not_computed_again(
    finished: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(finished.path, tmp_path / "run"))
    monkeypatch.setattr(Embedder, "pooled_features", None)
    evaluate_run(copy)


def test_several_scales(images: Path, tmp_path: Path) -> None:
    run = train(config(images, *FROZEN, "evaluation.scales=[1, 0.7]", "training.epochs=1"), tmp_path / "run")
    (measured,) = json.loads(run.evaluation_file.read_text())
    shutil.rmtree(run.vectors)
    shutil.rmtree(run.views)
    (again,) = evaluate_run(run.path)
    assert again.to_dict()["metrics"] == measured["metrics"]


def test_report_gallery_and_export(finished: RunFolder, images: Path, tmp_path: Path) -> None:
    assert "report.html" in {file.name for file in finished.path.iterdir()}
    encoder = Encoder.from_run(finished.path)
    catalog = make_plan(finished.config(), Display()).eval_sets[0].catalog
    vectors = embed_images(encoder.network, catalog, encoder.transform)
    gallery = Gallery.build(encoder, images, tmp_path / "gallery")
    (hit,) = gallery.search(catalog.file(0), 1)
    assert hit.score == pytest.approx(float(vectors[0] @ vectors[0]), abs=1e-4)
    (done,) = export(finished.path, package=tmp_path / "package")
    assert done.check["largest_difference"] <= 1e-5


def test_the_plan(images: Path) -> None:
    chosen = config(images, *FROZEN)
    described = describe_plan(make_plan(chosen, Display()), build_embedder(chosen, weights=False))
    embedder = build_embedder(chosen)
    assert described["parameters"] == {"head": count(embedder.parts()["head"]), "all": count(embedder.parts()["head"])}
    assert "cached features, mapped from disk" in described["memory"]


# Interrupted runs


@pytest.fixture(scope="module")
def home(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which commands run, with a recipe and an uninterrupted run."""
    path = tmp_path_factory.mktemp("killed")
    settings = ("batch.chunk_size=6", "training.checkpoint_every=2", "training.ema=0.7", "model.whitening=pca")
    text = yaml.safe_dump(config(images, *FROZEN, *settings).model_dump(mode="json"))
    (path / "frozen.yaml").write_text(text)
    train(config(images, *FROZEN, *settings), path / "whole")
    return path


def test_killed_while_views_are_encoded(home: Path, commands: Commands) -> None:
    """Progress is recorded after each batch of 6 views, that is 2 images."""
    notes = "from shortlist.encoding import vector_file\nvector_file.NOTE_INTERVAL = 0.0\n"
    waits = wait_where('kwargs["seen"] == 12', "shortlist.encoding.embed", "_append")
    kill_where(notes + waits, commands, home, "train", "frozen.yaml", "--run", "encoding")
    display = Listener()
    resume(home / "encoding", display)
    assert display.encoded == [TRAINED - 10]
    assert_same(home / "encoding", home / "whole")


def test_killed_while_the_head_is_trained(home: Path, commands: Commands) -> None:
    kill_where(wait_after(5), commands, home, "train", "frozen.yaml", "--run", "training")
    display = Listener()
    resume(home / "training", display)
    assert display.encoded == [0]
    assert any("Resuming after step 4 of 9" in text for text in display.messages)
    assert_same(home / "training", home / "whole")


# A cache that runs share


def test_a_second_run_encodes_nothing(
    images: Path, finished: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seed, batch size and loss may differ: only the weights of the backbone matter."""
    shared = (*FROZEN, f"data.view_cache={tmp_path / 'cache'}", f"model.weights={finished.path}")
    display = Listener()
    train(config(images, *shared), tmp_path / "one", display)
    assert display.encoded == [TRAINED]
    assert not (tmp_path / "one" / "views").exists()
    monkeypatch.setattr(Embedder, "pooled_features", None)
    others = ("training.seed=1", "batch.size=9", "loss.simix=false", "loss.name=smooth_ap", "evaluation.before=true")
    train(config(images, *shared, *others), tmp_path / "other", display)
    assert display.encoded == [TRAINED, 0]


def test_two_processes_encode_each_image_once(home: Path, commands: Commands) -> None:
    order = ("train", "frozen.yaml", "data.view_cache=shared", "training.epochs=1", "--json", "--run")
    both = [commands.start(*order, name, cwd=home) for name in ("left", "right")]
    assert [each.wait() for each in both] == [0, 0]
    lines = [json.loads(line) for each in both for line in each.out.splitlines()]
    assert sum(line.get("encoded", 0) for line in lines) == TRAINED
    assert same_weights(weights(home / "left"), weights(home / "right"))


def test_unreadable_images_are_looked_for_once(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Path(shutil.copytree(images, tmp_path / "images"))
    (copy / "class 00" / "0.png").write_text("not an image")
    chosen = config(copy, *FROZEN, "data.on_missing=skip", f"data.view_cache={tmp_path / 'cache'}")
    first = make_plan(chosen, Display())
    monkeypatch.setattr(datasets, "find_unreadable", None)
    second = make_plan(chosen, Display())
    assert [path for path, _ in second.unreadable] == ["class 00/0.png"]
    assert second.catalog.fingerprint() == first.catalog.fingerprint()
    (copy / "class 00" / "1.png").write_text("not an image either")
    with pytest.raises(TypeError):  # it would look again
        make_plan(chosen, Display())


def test_the_runs_of_a_study_share_their_views(images: Path, tmp_path: Path) -> None:
    display = Listener()
    fast = ("training.epochs=null", "training.steps=1", "tracking=[]")
    values = {"values": ["[1]", "[1, 2]"], "methods": ["RS@k"], "seeds": 1}
    ablate("k", config(images, *FROZEN, *fast), tmp_path / "study", **values, display=display)
    assert display.encoded == [TRAINED, 0]


# Heads


@pytest.mark.parametrize("head", ["linear", "residual", "low_rank"])
def test_heads_begin_with_whitening_of_views(head: str, images: Path, tmp_path: Path) -> None:
    """At the end of training, a correction is merged into an ordinary linear layer."""
    rank = ("model.head_rank=2",) if head == "low_rank" else ()
    chosen = config(images, *FROZEN, "model.whitening=pca", f"model.head={head}", *rank, "training.epochs=1")
    embedder = build_embedder(chosen)
    assert isinstance(embedder.linear, CorrectedLinear) == (head != "linear")
    features = embedder.layer_norm(pooled_views(chosen, embedder).flatten(0, 1)).detach()
    weight, bias = pca_whitening(features, 8, 0.1)
    run = train(chosen, tmp_path / "run")
    change = (weights(run)["linear.weight"] - weight).abs()
    flipped = (weights(run)["linear.weight"] + weight).abs()  # the sign of a direction is arbitrary
    assert 1e-5 < torch.minimum(change.amax(1), flipped.amax(1)).max() < 0.05 * weight.abs().max()
    assert {name for name in weights(run) if name.startswith("linear.")} == {"linear.weight", "linear.bias"}
    assert weights(run)["linear.bias"].abs().sum() > 0.5 * bias.abs().sum()


def test_the_identity_is_corrected_if_dimensions_are_equal(images: Path) -> None:
    channels = build_embedder(config(images)).layout.channels
    learner = Learner(config(images, *FROZEN, "model.head=residual", f"model.dim={channels}"), torch.device("cpu"))
    assert torch.equal(learner.result.linear.weight, torch.eye(channels))
    assert not learner.result.linear.bias.any()
    features, labels = torch.randn(6, channels), torch.tensor([0, 0, 0, 1, 1, 1])
    learner.train_step(0, iter([features]), labels, 1.0)
    assert not torch.equal(learner.result.linear.weight, torch.eye(channels))
    torch.testing.assert_close(learner.result.linear.weight, learner.embedder.linear.weight)


# Estimates


def test_the_estimate() -> None:
    clock, display, done = iter([0.0, 1.0, 2.5, 9.0]), Listener(), []
    settings = "encoding", 200, {"9 steps": 80.0}, lambda *counts: done.append(counts), display
    estimate = _Estimate(*settings, lambda: next(clock))
    for number in (10, 20, 35, 50):
        estimate(number, 1000)
    assert done == [(10, 1000), (20, 1000), (35, 1000), (50, 1000)]
    message = "measured time until the end: about 3 min 20 s: encoding about 2 min 00 s, 9 steps about 1 min 20 s"
    assert display.messages == [message]  # 25 images in 2.5 s


def test_measuring_a_step_changes_nothing(images: Path) -> None:
    chosen = config(images, *FROZEN, "loss={name: pml.ContrastiveLoss, memory: {size: 6}}")
    plan = make_plan(chosen, Display())
    learner, state = Learner(chosen, torch.device("cpu"), plan.classes), torch.get_rng_state()
    before = {name: each.clone() for name, each in learner.state(0).tensors.items()}
    durations = [
        10.0,
        30.0,
        *[2.5] * (MEASURED_STEPS - 1),
    ]  # of preparations, of a step that had to wait, of the others
    clock = iter(time for duration in durations for time in (100.0, 100.0 + duration))
    assert seconds_per_step(learner, plan.first_labels(), clock=lambda: next(clock)) == 2.5
    assert same_weights(before, learner.state(0).tensors)
    assert torch.equal(torch.get_rng_state(), state)


# Errors


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.views=4"], "data.views is for frozen backbones; set model.freeze: backbone, or remove it"),
        (["data.view_cache=x"], "data.view_cache is for frozen backbones"),
        ([*FROZEN, "data.views=0"], "data.views: should be greater than or equal to 1"),
        ([*FROZEN, "training.precision=bfloat16"], "training.precision has no effect with model.freeze: backbone"),
        ([*FROZEN, "optimizer.parts.backbone.lr_multiplier=2"], "optimizer.parts.backbone has no effect"),
        ([*FROZEN, "model.freeze_batch_norm=false"], "freeze_batch_norm has no effect with freeze: backbone"),
        ([*FROZEN, "model.whitening=pca", "model.whitening_size=64"], "whitening_size has no effect"),
        (["model.head_rank=2"], "head_rank has no effect with head: linear"),
        (["model.head=residual", "model.dim=null"], "head: residual corrects the linear layer, which dim: null omits"),
    ],
)
def test_settings_that_exclude_each_other(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(Path("x"), *overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.dim=null", "model.layer_norm=false"],
            "trains layer norm and linear layer, but this model has neither",
        ),
        (["model.head=low_rank"], "model.head=low_rank corrects initial weights: those of model.whitening"),
    ],
)
def test_models_without_a_head(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_embedder(config(Path("x"), *FROZEN, *overrides))


def test_a_model_of_the_user(images: Path, tmp_path: Path) -> None:
    """Only the head of an Embedder is known to shortlist."""
    settings = {"output": tmp_path / "run", "report": False}
    recipe = config(images, *FROZEN)
    with pytest.raises(ConfigError, match="but it is not known which layers of Net these are"):
        runs.train(recipe, model=Net(), **settings)
    embedder = Embedder("test_efficientnet", dim=8, image_size=32)
    before, head = {name: each.clone() for name, each in embedder.state_dict().items()}, embedder.linear
    run = runs.train(recipe, "training.epochs=1", model=embedder, **settings)
    assert embedder.linear is head
    assert same_weights(backbone(weights(run.path)), backbone(before))
    assert not same_weights(weights(run.path), before)


def test_a_loss_with_a_schedule(images: Path, tmp_path: Path) -> None:
    """The time of a step is measured before the first step, at the start of the schedule."""
    folder = train(config(images, *FROZEN, "loss.start.rank_temperature=50"), tmp_path / "run", Display())
    assert folder.evaluation_file.exists()
