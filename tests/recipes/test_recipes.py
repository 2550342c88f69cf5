"""Recipes: inheritance, hyper-parameters, quoted results, and error messages."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import yaml

from shortlist.config.schema import PartConfig
from shortlist.errors import ConfigError
from shortlist.recipes import describe_recipes, differences, open_recipe, recipe_names

DATA = ("inaturalist", "sop", "vehicleid", "cars196")
ROWS = ("resnet50", "resnet50-d128", "vit-b32", "vit-b16")
WHOLE = "data: {source: images}\ntraining: {epochs: 1}\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


class TestInheritance:
    def test_inherited_values_are_merged_section_by_section(self, here: Path) -> None:
        write(here / "a.yaml", WHOLE + "optimizer: {lr: 1.0, weight_decay: 2.0}\nloss: {k: [1, 2]}\n")
        write(here / "b.yaml", "optimizer: {lr: 3.0}\nbatch: {size: 8}\n")
        config = open_recipe(write(here / "c.yaml", "inherits: [a.yaml, b.yaml]\nbatch: {per_class: 2}\n"))
        assert (config.optimizer.lr, config.optimizer.weight_decay) == (3.0, 2.0)  # the later one, and the rest
        assert (config.batch.size, config.batch.per_class) == (8, 2)
        assert config.loss.k == (1, 2)
        assert config.name == "c"

    def test_lists_are_replaced(self, here: Path) -> None:
        write(here / "a.yaml", WHOLE + "loss: {k: [1, 2, 4]}\n")
        assert open_recipe(write(here / "b.yaml", "inherits: a.yaml\nloss: {k: [8]}\n")).loss.k == (8,)

    def test_names_descriptions_and_results_are_not_inherited(self, here: Path) -> None:
        write(here / "a.yaml", WHOLE + "name: a\nabout: A.\npaper: {x: {r@1: 9}}\nmeasured: {x: {r@1: 8}}\n")
        config = open_recipe(write(here / "b.yaml", "inherits: a.yaml\n"))
        assert (config.name, config.about, config.paper, config.measured) == ("b", "", {}, {})

    def test_a_file_inherits_from_a_packaged_recipe(self, here: Path) -> None:
        config = open_recipe(write(here / "mine.yaml", "inherits: cars196-resnet50-rsk\ndata: {root: cars}\n"))
        base = open_recipe("cars196-resnet50-rsk")
        assert config.data.root == Path("cars")
        assert config.model_copy(update={"data": base.data, "name": base.name, "about": base.about}) == (
            base.model_copy(update={"paper": {}})
        )

    def test_inherited_files_are_relative_to_the_recipe(self, here: Path) -> None:
        write(here / "deep" / "a.yaml", WHOLE)
        assert open_recipe(write(here / "deep" / "b.yaml", "inherits: a.yaml\n")).data.source == "images"

    def test_overrides_are_applied_last_and_to_one_call_only(self) -> None:
        for _ in range(2):
            assert open_recipe("cars196-resnet50-rsk-simix", ["loss.simix=false"]).loss.simix is False
            assert open_recipe("cars196-resnet50-rsk-simix").loss.simix is True

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                "inherits: cars196-resnet50\n",
                "inherits from 'cars196-resnet50', but there is no such .* did you mean",
            ),
            (
                "inherits: gldv1-resnet101-rsk\nloss: {name: smooth_ap}\n",
                "k has no effect .* or set it to null if inherited",
            ),
            ("inherits: {a: b}\n", "inherits must be the name of a recipe or a list"),
            ("inherits: wrong.yaml\n", "in a circle: .*wrong.yaml -> .*wrong.yaml"),
            ("inherits: ./deep/../wrong.yaml\n", "in a circle: .*wrong.yaml -> .*deep/../wrong.yaml$"),
            ("inherit: cars196-resnet50-rsk\n", "inherit: unknown key; did you mean 'inherits'"),
            (
                "inherits: cars196-resnet50-rsk\nloss: {k: [1]}\nloss: {k: [2]}\n",
                "duplicate key 'loss' .*line 3",
            ),
            ("inherits: cars196-resnet50-rsk\nloss: {k: [1], k: [2]}\n", "duplicate key 'k'"),
            ("inherits: parts\n", "no such recipe or file"),
        ],
    )
    def test_mistakes(self, here: Path, text: str, message: str) -> None:
        (here / "deep").mkdir()
        with pytest.raises(ConfigError, match=message):
            open_recipe(write(here / "wrong.yaml", text))

    def test_parts_cannot_be_opened_as_recipes(self) -> None:
        with pytest.raises(ConfigError, match="No recipe or file found for 'resnet50'"):
            open_recipe("resnet50")


RELEASE = [  # the table of the authors' release: data, model, batch, chunk, epochs, milestones, learning rate
    "inaturalist resnet50 4000 200 90 40,70    1e-4",
    "inaturalist vit-b32  4000 200 90 10,40,70 5e-5",
    "inaturalist vit-b16  4000 100 90 10,40,70 5e-5",
    "sop         resnet50 4000 200 55 25,50    2e-4",
    "sop         vit-b32  4000 200 55 25,50    5e-5",
    "sop         vit-b16  4000 100 55 25,50    5e-5",
    "vehicleid   resnet50 4000 200 90 40,70    1e-4",
    "vehicleid   vit-b32  4000 200 90 40,70    1e-4",
    "vehicleid   vit-b16  4000 100 90 40,70    5e-5",
    "cars196     resnet50 392  98 170 80,140   1e-4",
    "cars196     vit-b32  392  98  50 20,30,40 3e-5",
    "cars196     vit-b16  392  98  50 20,30,40 1e-5",
    "cub         resnet50 400 100  40 10,20,30 1e-4",
    "cub         vit-b32  400 100  40 10,20,30 3e-5",
    "cub         vit-b16  400 100  40 10,20,30 1e-5",
]


class TestDifferences:
    def test_changed_settings_of_a_packaged_recipe_are_listed(self) -> None:
        assert not differences(
            open_recipe("cars196-resnet50-rsk", ["data.root=x", "training.seed=3", "batch.chunk_size=7"])
        )
        changed = differences(
            open_recipe("cars196-resnet50-rsk", ["optimizer.lr=0.5", "loss.simix=true", "batch.size=196"])
        )
        assert changed == [
            "loss.simix=True (the recipe: False)",
            "batch.size=196 (the recipe: 392)",
            "optimizer.lr=0.5 (the recipe: 0.0001)",
        ]

    def test_a_recipe_of_the_user_has_no_differences(self, here: Path) -> None:
        assert not differences(open_recipe(write(here / "mine.yaml", WHOLE)))


class TestPackagedRecipes:
    def test_there_is_a_recipe_for_every_row_of_the_paper(self) -> None:
        rows = {f"{data}-{model}-{loss}" for data in DATA for model in ROWS for loss in ("rsk", "rsk-simix", "sap")}
        others = {"cars196-resnet50-rsk-simix-588", "sop-resnet50-rsk-384"}
        landmarks = {f"gldv1-resnet101-{loss}" for loss in ("sap", "rsk", "rsk-simix")}
        assert rows | others | landmarks <= set(recipe_names())

    def test_every_recipe_is_valid_and_has_a_description(self) -> None:
        for name in recipe_names():
            config = open_recipe(name)
            assert config.name == name
            assert config.about.endswith("."), name

    def test_no_recipe_repeats_another(self) -> None:
        configs = [open_recipe(name).model_dump_json(exclude={"name", "about", "paper"}) for name in recipe_names()]
        assert len(set(configs)) == len(configs)

    @pytest.mark.parametrize(
        ("data", "model", "batch", "chunk", "epochs", "milestones", "lr"), [row.split() for row in RELEASE]
    )
    def test_hyper_parameters_of_the_release(
        self, data: str, model: str, batch: str, chunk: str, epochs: str, milestones: str, lr: str
    ) -> None:
        """Every cell of its table, and the settings that all rows share."""
        vit = model.startswith("vit")
        rows = [name for name in recipe_names() if re.fullmatch(rf"{data}-{model}(-d128)?-(rsk|rsk-simix|sap)", name)]
        assert len(rows) == (1 if data == "cub" else 3 if vit else 6)
        for name in rows:
            config = open_recipe(name)
            assert config.batch.size == (384 if name.endswith("sap") else int(batch))
            assert (config.batch.chunk_size, config.batch.per_class, config.batch.epoch) == (int(chunk), 4, "release")
            assert (config.optimizer.name, config.optimizer.lr) == ("adamw" if vit else "adam", float(lr))
            assert (config.optimizer.weight_decay, config.training.precision) == (4e-4, "float32")
            assert all(part == PartConfig() for _, part in config.optimizer.parts)
            assert (config.schedule.name, config.schedule.gamma, config.schedule.warmup) == ("multistep", 0.3, 0)
            assert config.schedule.milestones == tuple(map(int, milestones.split(",")))
            assert (config.training.epochs, config.training.steps) == (int(epochs), None)
            assert config.model.pooling == ("token" if vit else "gem")
            assert (config.model.layer_norm, config.model.freeze_batch_norm) == (True, True)
            assert config.model.dim == (128 if "-d128-" in name else 512)
            assert (config.images.size, config.images.resize, config.images.flip) == (224, 256, 0.5)
            assert (config.images.scale, config.images.ratio) == ((0.08, 1.0), (3 / 4, 4 / 3))
            assert (config.images.mean, config.images.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
            assert (config.loss.rank_temperature, config.loss.similarity_temperature) == (1.0, 0.01)
            assert config.loss.name == ("smooth_ap" if name.endswith("sap") else "recall_at_k")
            assert config.loss.simix == name.endswith("simix")
            assert (config.loss.count_query, config.evaluation.test_every) == (False, None)

    @pytest.mark.parametrize("name", [f"{data}-{row}-rsk" for data in DATA for row in ROWS])
    def test_differences_between_paper_and_release(self, name: str) -> None:
        paper, release = (open_recipe(each).model_dump() for each in (name, f"{name}-release"))
        assert paper["loss"].pop("count_query") is False
        assert release["loss"].pop("count_query") is True
        assert paper["evaluation"].pop("test_every") is None
        assert release["evaluation"].pop("test_every") == 5
        assert {key: release[key] for key in paper if key not in ("name", "about")} == {
            key: paper[key] for key in paper if key not in ("name", "about")
        }

    def test_hyper_parameters_of_the_release_of_smooth_ap(self) -> None:
        for data, epochs, milestones in (("vehicleid", 400, (200, 300)), ("inaturalist", 90, (40, 70))):
            config = open_recipe(f"{data}-resnet50-sap-original")
            assert (config.batch.size, config.batch.per_class, config.loss.similarity_temperature) == (384, 4, 0.01)
            assert (config.optimizer.name, config.optimizer.lr, config.optimizer.weight_decay) == ("adam", 1e-5, 4e-4)
            assert (config.training.epochs, config.schedule.milestones, config.schedule.gamma) == (
                epochs,
                milestones,
                0.3,
            )
            assert (config.model.pooling, config.model.layer_norm, config.model.dim) == ("average", False, 512)
            assert config.loss.count_query
            assert config.batch.epoch == "release"  # it has the same sampler
        assert {open_recipe(f"{data}-resnet50-sap-original").loss.count_query for data in DATA} == {True}

    def test_hyper_parameters_of_landmarks(self) -> None:
        for loss, k in (("rsk", (1, 2, 4)), ("rsk-simix", (1, 2, 4, 8)), ("sap", None), ("ap", None)):
            config = open_recipe(f"gldv1-resnet101-{loss}")
            assert (config.batch.size, config.batch.per_class, config.training.steps) == (4096, 4, 500)
            assert (config.model.dim, config.model.pooling, config.model.layer_norm) == (2048, "gem", False)
            assert (config.model.whitening, config.model.whitening_size, config.images.max_side) == ("pairs", 362, 1024)
            assert (config.optimizer.name, config.optimizer.lr, config.optimizer.weight_decay) == ("adam", 5e-7, 1e-6)
            assert config.optimizer.parts.pooling == PartConfig(lr_multiplier=10, weight_decay=0)
            assert (config.schedule.name, config.schedule.gamma) == ("exponential", pytest.approx(math.exp(-0.01)))
            assert config.evaluation.scales == pytest.approx((1, 2**0.5, 2**-0.5))
            assert (config.images.flip, config.training.validate_every_steps) == (0, 25)
            assert config.loss.k == k
            assert config.data.validation_source is not None
            assert config.data.validation_source.source == "sfm120k-val"

    def test_sets_of_k_and_larger_batches(self) -> None:
        cars = open_recipe("cars196-resnet50-rsk-simix-588")
        assert (cars.batch.size, cars.batch.per_class, cars.training.epochs) == (588, 6, 170)
        assert open_recipe("sop-resnet50-rsk").loss.cut_offs == (1, 2, 4, 8, 16)
        assert open_recipe("sop-resnet50-rsk-simix").loss.cut_offs == (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)

    def test_the_list_is_json_compatible(self) -> None:
        listed = {each["name"]: each for each in describe_recipes()}
        assert list(listed) == recipe_names()
        assert listed["cars196-resnet50-rsk"]["paper"] == {
            "cars196": {"r@1": 80.7, "r@2": 88.3, "r@4": 92.8, "r@8": 95.7}
        }

    def test_the_resolved_config_can_be_run(self, here: Path) -> None:
        config = open_recipe("vehicleid-vit-b32-sap")
        file = write(here / "x.yaml", yaml.safe_dump(config.model_dump(mode="json")))
        assert open_recipe(file) == config


# The figures that the authors report, in %: a line for each row of their large table, named by the end of a recipe's
# name. "-" is what they leave empty.
TABLE = """
                                 inaturalist          sop                  vehicleid: small, medium, large     cars196
resnet50-d128-rsk                69.3 82.9 90.6 93.1  80.6 91.6 96.4 98.8  95.6 97.8  94.4 96.8  93.5 96.6  78.1 85.8 91.1 94.5
resnet50-d128-rsk-simix          69.6 83.3 91.2 93.8  80.9 91.7 96.5 98.8  95.4 97.5  93.8 96.6  93.0 96.2  84.7 90.9 94.7 96.9
resnet50-rsk                     71.2 84.0 91.3 93.6  82.8 92.9 97.0 99.0  95.7 97.9  94.6 96.9  93.8 96.6  80.7 88.3 92.8 95.7
resnet50-rsk-simix               71.8 84.7 91.9 94.3  82.1 92.8 97.0 99.1  95.3 97.7  94.2 96.5  93.3 96.4  88.2 93.0 95.9 97.4
resnet50-sap-original            67.2 81.8 90.3 93.1  80.1 91.5 96.6 99.0  94.9 97.6  93.3 96.4  91.9 96.2  76.1 84.3 89.8 93.8
resnet50-sap                     68.7 82.7 90.9 93.5  80.3 92.0 96.9 99.0  94.2 97.2  92.7 96.2  91.0 95.8  78.2 85.6 90.8 94.3
vit-b32-sap                      72.2 84.6 91.6 93.9  83.7 94.0 97.8 99.3  94.8 97.7  93.5 96.8  92.1 96.3  78.1 85.7 91.0 94.8
vit-b32-rsk                      75.9 87.1 93.1 95.1  85.1 94.6 98.0 99.3  95.1 97.7  94.1 96.7  93.2 96.5  78.1 86.4 92.3 95.6
vit-b16-sap                      79.1 89.0 94.2 95.8  86.6 95.4 98.4 99.5  95.5 97.7  94.2 96.9  93.1 96.6  86.2 92.1 95.1 97.2
vit-b16-rsk                      83.9 92.1 95.9 97.2  88.0 96.1 98.6 99.6  96.2 98.0  95.2 97.2  94.7 97.1  89.5 94.2 96.6 98.3
resnet50-d128-proxynca           61.6 77.4 87.0 90.6  73.7    -    -    -     -    -     -    -     -    -  73.2 82.4 86.4 88.7
resnet50-d128-margin             58.1 75.5 86.8 90.7  72.7 86.2 93.8 98.0     -    -     -    -     -    -  79.6 86.5 91.9 95.1
resnet50-d128-contrastive-memory    -    -    -    -  80.6 91.6 96.2 98.7  94.7 96.8  93.7 95.8  93.0 95.8     -    -    -    -
resnet50-contrastive-memory         -    -    -    -  79.5 90.8 96.1 98.7  94.6 96.9  93.4 96.0  93.0 96.1     -    -    -    -
resnet50-fastap                  60.6 77.0 87.2 90.6  76.4 89.0 95.1 98.2  91.9 96.8  90.6 95.9  87.5 95.1     -    -    -    -
resnet50-ms                         -    -    -    -  78.2 90.5 96.0 98.7     -    -     -    -     -    -  84.1 90.4 94.0 96.1
resnet50-normsoftmax                -    -    -    -  78.2 90.6 96.2    -     -    -     -    -     -    -  84.2 90.4 94.4 96.9
resnet50-blackbox-ap             62.9 79.0 88.9 92.1  78.6 90.5 96.0 98.7     -    -     -    -     -    -     -    -    -    -
resnet50-proxynca-pp                -    -    -    -  80.7 92.5 96.7 98.9     -    -     -    -     -    -  86.5 92.5 95.7 97.7
"""  # noqa: E501
COLUMNS = (
    [("inaturalist", f"r@{k}") for k in (1, 4, 16, 32)]
    + [("sop", f"r@{k}") for k in (1, 10, 100, 1000)]
    + [(f"vehicleid-{size}", f"r@{k}") for size in ("small", "medium", "large") for k in (1, 5)]
    + [("cars196", f"r@{k}") for k in (1, 2, 4, 8)]
)
LANDMARKS = """
           roxford5k  with r1m   rparis6k   with r1m
sap        67.9 46.3  49.5 25.8  81.7 63.3  57.4 29.8
rsk        68.3 46.1  50.1 25.8  82.1 63.9  57.9 30.2
rsk-simix  68.4 45.3  51.0 26.4  81.2 62.4  58.7 31.1
ap         66.3 42.5     -    -  80.2 60.8     -    -
"""
LANDMARK_COLUMNS = [
    (test, f"mAP {setup}")
    for test in ("roxford5k", "roxford5k+r1m", "rparis6k", "rparis6k+r1m")
    for setup in ("medium", "hard")
]
IN_THE_TEXT = {  # their sentences about further experiments
    "cars196-resnet50-sap-392": [79.5, 86.6, 91.2, 94.4],
    "cars196-resnet50-sap-392-simix": [85.4, 91.0, 94.3, 96.7],
    "cars196-resnet50-rsk-simix-588": [88.3, 93.3, 95.9, 97.6],
    "sop-resnet50-rsk-384": [81.2, 92.2, 96.9, 99.0],
}
Figures = dict[tuple[str, str], float]


def reported(table: str, columns: list[tuple[str, str]]) -> dict[str, Figures]:
    """The values of each line by test and metric."""
    rows = {name: cells for name, *cells in map(str.split, table.strip().splitlines()[1:])}
    return {
        name: {key: float(cell) for key, cell in zip(columns, cells, strict=True) if cell != "-"}
        for name, cells in rows.items()
    }


def quoted(*recipes: str) -> Figures:
    return {
        (test, metric): value
        for recipe in recipes
        for test, figures in open_recipe(recipe).paper.items()
        for metric, value in figures.items()
    }


class TestFigures:
    """Recipes quote the values of the paper, and all values of each row that has a recipe."""

    @pytest.mark.parametrize(("row", "figures"), reported(TABLE, COLUMNS).items())
    def test_of_the_table(self, row: str, figures: Figures) -> None:
        names = {f"{data}-{row}" for data in DATA}
        assert quoted(*names.intersection(recipe_names())) == figures

    @pytest.mark.parametrize(("row", "figures"), reported(LANDMARKS, LANDMARK_COLUMNS).items())
    def test_of_the_landmarks(self, row: str, figures: Figures) -> None:
        assert quoted(f"gldv1-resnet101-{row}") == figures

    @pytest.mark.parametrize(("name", "figures"), IN_THE_TEXT.items())
    def test_of_the_text(self, name: str, figures: list[float]) -> None:
        assert list(quoted(name).values()) == figures

    def test_no_others_are_quoted(self) -> None:
        known = {f"{data}-{row}" for data in DATA for row in reported(TABLE, COLUMNS)}
        known |= {f"gldv1-resnet101-{row}" for row in reported(LANDMARKS, LANDMARK_COLUMNS)} | set(IN_THE_TEXT)
        known |= {f"{name}-release" for name in known}  # with the figures of the row itself, as tested above
        assert {name for name in recipe_names() if open_recipe(name).paper} <= known
