"""Ablation studies: their cases, and that every case is trained once, also if the study is interrupted."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from shortlist.config import LossConfig, RunConfig
from shortlist.config.schema import OWN_LOSSES
from shortlist.errors import ConfigError, DataError, Interrupted, RunError
from shortlist.progress import Display
from shortlist.recipes import open_recipe, recipe_names
from shortlist.training import ablate, ablation
from shortlist.training.ablation import METHODS, STUDIES, Case, batch_sizes, case_config
from tests.training.runs import FASTEST_MODEL, class_folders, config

SHORT = (
    *(FASTEST_MODEL, "data.validation=none", "training.epochs=1", "evaluation.bootstrap=0"),
    *("batch.per_class=2", "batch.size=4"),
)


class Heard(Display):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str, **facts: object) -> None:
        self.messages.append(text)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return config(class_folders(tmp_path_factory.mktemp("images"), classes=8, images=4), *SHORT)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """The configs of the runs that were started, not resumed."""
    seen: list[RunConfig] = []
    real = ablation.train_run
    monkeypatch.setattr(ablation, "train_run", lambda one, *rest: seen.append(one) or real(one, *rest))
    return seen


@pytest.fixture
def diverging(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """The configs of the runs, none of which is trained: each diverges at once, which is its result."""
    seen: list[RunConfig] = []

    def diverge(one: RunConfig, path: Path, *rest: object) -> None:
        seen.append(one)
        (path / "failed").mkdir()
        raise RunError("not finite")

    monkeypatch.setattr(ablation, "train_run", diverge)
    return seen


def test_every_case_is_trained_and_collected(base: RunConfig, tmp_path: Path, trained: list[RunConfig]) -> None:
    file = ablate("batch-size", base, tmp_path, values=["4", "8"], seeds=1)
    results = json.loads(file.read_text())
    cases = {(case["method"], case["value"], case["seed"]) for case in results["cases"]}
    assert cases == {(method, value, 0) for method in ("RS@k", "RS@k + SiMix", "SAP") for value in ("4", "8")}
    assert all(0 <= case["metrics"]["r@1"] <= 1 and case["steps"] >= 1 for case in results["cases"])
    assert {(one.loss.name, one.loss.simix, one.batch.size, one.training.seed) for one in trained} == {
        (name, simix, size, 0)
        for name, simix in (("recall_at_k", False), ("recall_at_k", True), ("smooth_ap", False))
        for size in (4, 8)
    }
    assert ablate("batch-size", base, tmp_path, values=["4", "8"], seeds=1).read_text() == file.read_text()
    assert len(trained) == 6  # no case twice
    ablate("batch-size", base, tmp_path, values=["4"], methods=["SAP"], seeds=2)
    assert [one.training.seed for one in trained[6:]] == [1]  # only the second seed


@pytest.mark.parametrize(
    ("study", "value", "found"),
    [
        ("rank-temperature", "0.5", lambda one: one.loss.rank_temperature == 0.5),
        ("k", "[1,2,4]", lambda one: one.loss.k == (1, 2, 4)),
    ],
)
def test_other_studies(
    study: str, value: str, found: object, base: RunConfig, tmp_path: Path, diverging: list[RunConfig]
) -> None:
    ablate(study, base, tmp_path, values=[value], seeds=1)
    assert [one.loss.simix for one in diverging] == [False, True]
    assert all(found(one) for one in diverging)


def test_a_method_changes_only_what_defines_it() -> None:
    """Checked for a recipe of each loss, with its own settings and with others."""
    given = {"k": [3, 5], "rank_temperature": 2.0, "similarity_temperature": 0.02, "count_query": True}
    for whole in {each.loss.model_dump_json(): each for each in map(open_recipe, recipe_names())}.values():
        own = [] if whole.loss.pml_class else sorted(OWN_LOSSES[whole.loss.name])
        chosen = open_recipe(whole.name, [f"loss.{key}={json.dumps(given[key])}" for key in own if key in given])
        for base, (method, defining) in itertools.product((whole, chosen), METHODS.items()):
            before = base.model_dump(mode="json")
            after = case_config(base, STUDIES["batch-size"], Case(method, "auto", 3)).model_dump(mode="json")
            assert defining.keys() <= {"name", "simix"}
            kept = OWN_LOSSES[defining["name"]]  # settings of the recipe that the loss of the method has, too
            changes = {
                "batch": {"size": "auto"},
                "training": {"seed": 3},
                "evaluation": {"before": False},
                "loss": {**LossConfig().model_dump(mode="json", exclude={*kept, "plus"}), **defining},
            }
            assert after == {**before, **{name: {**before[name], **change} for name, change in changes.items()}}


def test_a_start_is_kept_where_a_method_has_it() -> None:
    given = open_recipe("glyphs", ["loss.start={rank_temperature: 4}"])
    rsk, simix, sap = (case_config(given, STUDIES["batch-size"], Case(method, "16", 0)).loss for method in METHODS)
    assert rsk.start == simix.start == given.loss.start is not None
    assert sap.start is None


def test_the_memory_of_another_loss_is_left_out() -> None:
    contrastive = open_recipe("glyphs", ["loss={name: pml.ContrastiveLoss, memory: {size: 4096}}"])
    assert case_config(contrastive, STUDIES["batch-size"], Case("RS@k", "16", 0)).loss.memory is None


def test_k_is_that_of_the_recipe() -> None:
    landmarks = case_config(open_recipe("gldv1-resnet101-rsk"), STUDIES["batch-size"], Case("RS@k", "4096", 0))
    assert landmarks.loss.cut_offs == (1, 2, 4)
    cars = open_recipe("cars196-resnet50-rsk")  # sets no k: the values of the paper, which depend on SiMix
    found = [case_config(cars, STUDIES["batch-size"], Case(method, "16", 0)).loss.cut_offs for method in METHODS]
    assert found[:2] == [(1, 2, 4, 8, 16), (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)]


def test_an_interrupted_study_is_resumed(base: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ablation.train_run

    def stopped(one: RunConfig, *rest: object) -> object:
        if one.loss.simix:
            raise Interrupted("stopped by hand")
        return real(one, *rest)

    monkeypatch.setattr(ablation, "train_run", stopped)
    with pytest.raises(Interrupted, match=r"RS@k \+ SiMix, 4, seed 0. Run the same command again"):
        ablate("batch-size", base, tmp_path, values=["4"], seeds=1)
    monkeypatch.setattr(ablation, "train_run", real)
    assert len(json.loads(ablate("batch-size", base, tmp_path, values=["4"], seeds=1).read_text())["cases"]) == 3


def test_a_case_that_another_process_trains_is_skipped(base: RunConfig, tmp_path: Path) -> None:
    heard = Heard()
    with Case("SAP", "4", 0).folder(tmp_path).locked():
        file = ablate("batch-size", base, tmp_path, values=["4"], seeds=1, display=heard)
    assert "Another process is training this run." in heard.messages
    assert [case["method"] for case in json.loads(file.read_text())["cases"]] == ["RS@k", "RS@k + SiMix"]


def test_a_run_that_diverges_is_a_result(base: RunConfig, tmp_path: Path, diverging: list[RunConfig]) -> None:
    cases = json.loads(ablate("k", base, tmp_path, values=["[1]"], seeds=1).read_text())["cases"]
    assert [case["failed"] for case in cases] == [True, True]
    assert len(diverging) == 2


def test_the_learning_rate_may_follow_the_batch(base: RunConfig, tmp_path: Path, diverging: list[RunConfig]) -> None:
    for rule, factor in (("constant", 1), ("sqrt", 2**0.5), ("linear", 2)):
        ablate("batch-size", base, tmp_path / rule, values=["8"], methods=["SAP"], seeds=1, learning_rate=rule)
        assert diverging[-1].optimizer.lr == pytest.approx(factor * base.optimizer.lr)


def test_batch_sizes_are_about_powers_of_2_and_the_largest(tmp_path: Path) -> None:
    many = config(class_folders(tmp_path, classes=26, images=4), *SHORT, "data.train_share=0.8")
    assert batch_sizes(many, Display()) == ("16", "32", "42")  # 21 classes of 2
    half = many.model_copy(update={"data": many.data.model_copy(update={"validation": "half"})})
    assert batch_sizes(half, Display()) == ("16", "22")
    assert batch_sizes(many.with_changes(batch={"per_class": 3, "size": 6}), Display())[:2] == ("15", "30")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "batchsize"}, "Unknown study 'batchsize'; did you mean 'batch-size'"),
        ({"name": "k", "methods": ["SAP"]}, "Unknown method 'SAP'; known: RS@k"),
        ({"name": "k", "learning_rate": "sqrt"}, "sqrt has no effect in the study k"),
        ({"name": "batch-size", "learning_rate": "cubic"}, "Unknown learning-rate rule 'cubic'"),
        ({"name": "batch-size", "values": ["5"]}, "RS@k, 5, seed 0 of tiny is not a valid configuration"),
        (
            {"name": "batch-size", "values": ["4", "400"]},
            "A batch of batch.size=400 images cannot be filled. The largest batch possible is 8",
        ),
        ({"name": "k", "values": ["[2,1]"]}, "loss.k: should be strictly increasing"),
        (
            {"name": "batch-size", "values": ["many"], "learning_rate": "sqrt"},
            "RS@k, many, seed 0 of tiny is not a valid configuration",
        ),
        ({"name": "batch-size", "values": ["auto"], "learning_rate": "sqrt"}, "requires a number for batch.size"),
    ],
)
def test_mistakes_are_reported_before_training(
    arguments: dict[str, object], message: str, base: RunConfig, tmp_path: Path, trained: list[RunConfig]
) -> None:
    with pytest.raises(ConfigError, match=message):
        ablate(config=base, path=tmp_path / "study", **arguments)
    assert not trained
    assert not (tmp_path / "study").exists()


def test_a_study_without_runs_can_be_replaced(base: RunConfig, tmp_path: Path) -> None:
    wrong = base.model_copy(update={"data": base.data.model_copy(update={"source": "nowhere"})})
    for study in ("batch-size", "k"):
        with pytest.raises(DataError, match="nowhere"):
            ablate(study, wrong, tmp_path / study, methods=["RS@k"], seeds=1)
    ablate("k", base, tmp_path / "k", values=["[1]"], methods=["RS@k"], seeds=1)
    assert json.loads((tmp_path / "k" / "study.json").read_text())["config"] == base.model_dump(mode="json")


def test_a_study_without_test_classes_stops_after_its_first_run(
    base: RunConfig, tmp_path: Path, trained: list[RunConfig]
) -> None:
    only = base.model_copy(update={"data": base.data.model_copy(update={"train_share": 1.0})})
    for _ in range(2):
        with pytest.raises(RunError, match=r"was not tested.* Set evaluation.tests"):
            ablate("k", only, tmp_path, values=["[1]"], seeds=1)
    assert len(trained) <= 2


def test_spaces_in_a_list_make_no_other_case(base: RunConfig, tmp_path: Path, diverging: list[RunConfig]) -> None:
    for value in ("[1, 2]", "[1,2]"):
        file = ablate("k", base, tmp_path, values=[value], methods=["RS@k"], seeds=1)
    assert [case["value"] for case in json.loads(file.read_text())["cases"]] == ["[1,2]"]
    assert len(diverging) == 1


def test_a_folder_holds_one_study(base: RunConfig, tmp_path: Path) -> None:
    ablate("k", base, tmp_path, values=["[1]"], methods=["RS@k"], seeds=1)
    other = base.model_copy(update={"optimizer": base.optimizer.model_copy(update={"lr": 1.0})})
    with pytest.raises(RunError, match="contains another study, or this one with other settings"):
        ablate("k", other, tmp_path, values=["[1]"], methods=["RS@k"], seeds=1)
