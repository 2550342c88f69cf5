"""Configurations: reading, validation and error messages."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from shortlist.config import PAPER_K, PAPER_K_WITH_SIMIX, RunConfig, read_config
from shortlist.errors import ConfigError
from shortlist.recipes import open_recipe, recipe_names

SMALLEST = "name: small\ndata: {source: images}\ntraining: {epochs: 3}\n"


def config(*overrides: str, text: str = SMALLEST) -> RunConfig:
    return read_config(text, "small.yaml", overrides)


def refusal(*overrides: str, text: str = SMALLEST) -> str:
    with pytest.raises(ConfigError) as refused:
        config(*overrides, text=text)
    return str(refused.value)


def test_yaml_and_overrides() -> None:
    text = SMALLEST + "optimizer: {lr: 0.5, parts: {head: {lr_multiplier: 2}}}\n"
    assert config(text=text).optimizer.lr == 0.5
    found = config(
        "optimizer.lr=1e-3",
        "optimizer.parts.backbone.lr_multiplier=0.1",
        "loss.k=[1, 5]",
        "data.root=a folder",
        text=text,
    )
    assert found.optimizer.lr == 1e-3
    assert found.optimizer.parts.head.lr_multiplier == 2  # stays, beside what is overridden
    assert found.optimizer.parts.backbone.lr_multiplier == 0.1
    assert found.loss.k == (1, 5)
    assert found.data.root == Path("a folder")
    assert found.data.source == "images"


def test_values_with_an_equals_sign_or_invalid_yaml_are_text() -> None:
    assert config("about=a=b").about == "a=b"
    assert config("about=[not yaml").about == "[not yaml"
    assert config("about='1'").about == "1"


@pytest.mark.parametrize("text", ["|", ">", "#", "~", "-", " ", "; ", "5", "true", "[a]", "None", "a #1"])
def test_text_is_not_read_as_yaml(text: str) -> None:
    assert config(f"data.label_separator={text}").data.label_separator == text
    assert config(f'data.label_separator="{text}"').data.label_separator == text
    other = config("data.validation_source={source: x}", f"data.validation_source.source={text}").data.validation_source
    assert other is not None
    assert other.source == text
    assert config("data.label_separator=null").data.label_separator is None


@pytest.mark.parametrize(("written", "number"), [("1e-4", 1e-4), ("1E+2", 100), ("1.5e3", 1500), (".5e3", 500)])
def test_numbers_with_an_exponent(written: str, number: float) -> None:
    """PyYAML by itself reads these as text."""
    assert isinstance(yaml.safe_load(written), str)
    assert config(f"optimizer.lr={written}").optimizer.lr == number
    assert config(text=SMALLEST + f"optimizer: {{lr: {written}}}").optimizer.lr == number
    arguments = config(f"model.backbone_args.drop_rate={written}").model.backbone_args  # of no type that we know
    assert arguments == {"drop_rate": number}
    assert isinstance(arguments["drop_rate"], float)


def test_text_that_resembles_a_number_stays_text() -> None:
    for text in ("1e", "e4", "1e-4x", "v1e4", "2e-"):
        assert config(f"about={text}").about == text


@pytest.mark.parametrize(
    ("override", "key", "nearest"),
    [
        ("optimiser.lr=1", "optimiser", "'optimizer'"),
        ("optimizer.learning_rate=1", "optimizer.learning_rate", "known: lr, momentum"),
        ("optimizer.weight_deacy=1", "optimizer.weight_deacy", "'weight_decay'"),
        ("optimizer.parts.haed.weight_decay=1", "optimizer.parts.haed", "'head'"),
        ("data.on_mising=skip", "data.on_mising", "'on_missing'"),
        ("lr=1", "lr", "'optimizer.lr'"),
        ("epochs=1", "epochs", "'training.epochs'"),
        ("training.source=x", "training.source", "'data.source'"),
    ],
)
def test_unknown_keys(override: str, key: str, nearest: str) -> None:
    message = refusal(override)
    assert message.startswith("small.yaml is not a valid configuration:")
    assert f"  {key}: unknown key; " in message
    assert nearest in message


def test_all_problems_are_listed_at_once() -> None:
    lines = refusal("optimizer.lr=no", "loss.k=[]", "model.pooling=mean").splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["model.pooling", "loss.k", "optimizer.lr"]


ARGUMENTS = "should consist of texts, numbers, lists, and mappings whose keys are texts"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr=fast", "optimizer.lr: should be a valid number"),
        ("optimizer.lr=-1", "optimizer.lr: should be greater than 0 (given: -1)"),
        ("optimizer.lr=.inf", "optimizer.lr: should be a finite number"),
        ("optimizer.lr=true", "optimizer.lr: should be a number (given: True)"),
        ("optimizer.lr=", "optimizer.lr: should be a valid number"),
        ("optimizer.name=adma", "optimizer.name: should be 'adam', 'adamw' or 'sgd' (given: 'adma')"),
        (
            "optimizer=adam",
            "optimizer: must be a mapping with the keys name, lr, weight_decay, momentum, parts (given: 'adam')",
        ),
        ("training.epochs=1.5", "training.epochs: should be a valid integer"),
        ("training.epochs=true", "training.epochs: should be a number (given: True)"),
        ("training.epochs=0", "training.epochs: should be greater than or equal to 1"),
        ("training.ema=1", "training.ema: should be less than 1"),
        ("batch.chunk_size=often", "batch.chunk_size: should be a valid integer"),
        ("batch.keep_graphs=some", "batch.keep_graphs: "),
        ("batch.keep_graphs=-1", "batch.keep_graphs: "),
        ("batch.per_class=1", "batch.per_class: should be greater than or equal to 2"),
        ("model.layer_norm=perhaps", "model.layer_norm: should be a valid boolean"),
        ("model.backbone_args={a: [{1: 2}]}", f"model.backbone_args: {ARGUMENTS}"),
        ("model.backbone_args={a: 2020-01-01}", f"model.backbone_args: {ARGUMENTS}"),
        ("loss.miner={name: x, args: {a: !!binary aaaa}}", f"loss.miner.args: {ARGUMENTS}"),
        ("data.workers=true", "data.workers: "),
        ("data.source=", "data.source: should not be empty (given: '')"),
        ("data.label_separator=", "data.label_separator: should not be empty (given: '')"),
        ("data.label_separator=''", "data.label_separator: should not be empty (given: '')"),
        ("images.mean=[0.5, 0.5]", "images.mean: "),
        ("name=a b/c", "name: "),
        ("loss.k=5", "loss.k: must be a list (given: 5)"),
        ("loss.k=[4, 1]", "loss.k: should be strictly increasing"),
        ("loss.k=[1, 1]", "loss.k: should be strictly increasing"),
        ("loss.k=[0, 1]", "loss.k: should be greater than or equal to 1"),
    ],
)
def test_wrong_types_and_values(override: str, message: str) -> None:
    assert f"\n  {message}" in refusal(override)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.steps=5"], "training: set either epochs or steps"),
        (["training.epochs=null"], "training: set either epochs or steps"),
        (["batch.size=10"], "batch: size 10 is not a multiple of per_class 4; use 8"),
        (["batch.size=3"], "batch: size 3 is not a multiple of per_class 4; use 8"),
        (["batch.size=4"], "batch: size 4 is a single class of 4 images"),
        (["loss.name=smooth_ap", "loss.k=[1, 2]"], "loss: k has no effect with smooth_ap"),
        (["loss.name=smooth_ap", "loss.rank_temperature=2"], "loss: rank_temperature has no effect with smooth_ap"),
        (["optimizer.momentum=0.5"], "optimizer: momentum has no effect with adam"),
        (["schedule.name=multistep"], "schedule: multistep requires milestones"),
        (
            ["schedule.name=multistep", "schedule.milestones=[5, 3]"],
            "schedule.milestones: should be strictly increasing",
        ),
        (["schedule.milestones=[3]"], "schedule: milestones has no effect with constant"),
        (["schedule.name=cosine", "schedule.gamma=0.5"], "schedule: gamma has no effect with cosine"),
        (["images.scale=[0.5, 0.2]"], "images.scale: should have the smaller number first"),
        (["images.scale=[0.5, 2]"], "images.scale: should be less than or equal to 1"),
        (["images.ratio=[2, 1]"], "images.ratio: should have the smaller number first"),
        (["images.size=64", "images.resize=32"], "images: resize 32 is too small"),
        (["images.std=[0.1, 0.1, 0]"], "images.std: should be greater than 0"),
        (["images.max_side=64", "images.size=64"], "images: size has no effect with max_side"),
        (["images.max_side=64", "images.resize=64"], "images: resize has no effect"),
        (["images.max_side=64", "images.scale=[0.5, 1]"], "images: scale has no effect"),
        (["images.max_side=64", "images.ratio=[1, 1]"], "images: ratio has no effect"),
        (["model.l2_pooled=true"], "model: l2_pooled replaces the layer norm"),
        (["model.whitening=pca", "model.dim=null"], "model: whitening initialises the linear layer"),
        (["model.whitening_size=362"], "model: whitening_size has no effect with whitening: none"),
        (["model.whitening=lda"], "model.whitening: should be 'none', 'pca' or 'pairs'"),
    ],
)
def test_impossible_combinations(overrides: list[str], message: str) -> None:
    assert f"\n  {message}" in refusal(*overrides)


def test_settings_with_an_effect_are_accepted() -> None:
    """Negative control of the combinations above."""
    assert config("training.epochs=null", "training.steps=5").training.steps == 5
    assert config("batch.size=8").batch.size == 8
    assert config("loss.name=smooth_ap", "loss.similarity_temperature=0.1").loss.name == "smooth_ap"
    assert config("optimizer.name=sgd", "optimizer.momentum=0.5").optimizer.momentum == 0.5
    assert config("schedule.name=multistep", "schedule.milestones=[3, 5]").schedule.milestones == (3, 5)
    assert config("schedule.name=exponential", "schedule.gamma=0.5").schedule.gamma == 0.5
    assert config("images.size=64", "images.resize=64").images.resize == 64


def test_unions_keep_their_types() -> None:
    assert config("batch.keep_graphs=true").batch.keep_graphs is True
    assert config("batch.keep_graphs=false").batch.keep_graphs is False
    assert config("batch.keep_graphs=auto").batch.keep_graphs == "auto"
    gigabytes = config("batch.keep_graphs=1").batch.keep_graphs
    assert isinstance(gigabytes, float)
    assert config("batch.chunk_size=7").batch.chunk_size == 7
    assert config("batch.chunk_size=auto").batch.chunk_size == "auto"
    assert config("data.workers=0").data.workers == 0
    assert config("model.dim=null").model.dim is None
    assert config("model.weights=null").model.weights is None


def test_cut_offs_of_the_paper() -> None:
    assert config().loss.cut_offs == PAPER_K
    assert config("loss.simix=true").loss.cut_offs == PAPER_K_WITH_SIMIX
    assert config("loss.simix=true", "loss.k=[3]").loss.cut_offs == (3,)


@pytest.mark.parametrize("text", ["just text", "- a\n- list", "", "a: [b", "a: b: c"])
def test_a_text_that_is_not_a_mapping_is_refused(text: str) -> None:
    assert refusal(text=text).startswith("small.yaml ")


def test_missing_keys_are_named() -> None:
    message = refusal(text="name: x\ndata: {root: y}\n")
    assert "\n  data.source: is required" in message
    assert "\n  training: is required" in message


@pytest.mark.parametrize("override", ["optimizer.lr", "=1", "", "lr:3", "lr" * 200])
def test_an_override_without_a_key_or_a_value(override: str) -> None:
    assert "is not of the form key=value" in refusal(override)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["loss.name=smooth_ap"],  # whose k and the like are written with the rest
        ["loss.simix=true", "training.ema=0.99", "batch.keep_graphs=0.5", "data.workers=2", "data.root=/a/b ü"],
        ["schedule.name=multistep", "schedule.milestones=[2]", "optimizer.name=sgd", "optimizer.lr=1e-7"],
        ["model.backbone_args={drop_path_rate: 1e-1, name: 'null'}", "model.dim=null", "batch.keep_graphs=true"],
    ],
)
def test_a_written_config_reads_back_unchanged(overrides: list[str]) -> None:
    before = config(*overrides)
    text = yaml.safe_dump(before.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    after = config(text=text)
    assert after == before
    assert config("optimizer.lr=0.123", text=text) != before


def test_configs_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        config().optimizer.lr = 1.0  # type: ignore[misc]


def test_packaged_recipes_with_overrides() -> None:
    assert {"folder", "cars196-lite0-cpu"} <= set(recipe_names())
    assert open_recipe("folder", ["training.epochs=1"]).training.epochs == 1


def test_recipes_by_path(tmp_path: Path) -> None:
    file = tmp_path / "my recipe ü.yaml"
    file.write_text(SMALLEST, encoding="utf-8")
    assert open_recipe(str(file)).name == "small"
    file.write_text(SMALLEST.replace("epochs", "epoch"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"training\.epoch: unknown key; did you mean 'epochs'"):
        open_recipe(str(file))
    file.write_bytes(b"\xff\xfe\x00binary")
    with pytest.raises(ConfigError, match="is not"):
        open_recipe(str(file))


def test_unknown_recipes() -> None:
    with pytest.raises(
        ConfigError, match="No recipe or file found for 'cars196-lite'; did you mean 'cars196-lite0-cpu'"
    ):
        open_recipe("cars196-lite")
