"""Recipes: what they inherit, what they quote, and what happens to one that is wrong."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import yaml

from shortlist.config.schema import PartConfig
from shortlist.errors import ConfigError
from shortlist.recipes import describe_recipes, differences, open_recipe, recipe_names

PAPER = Path(__file__).parents[2] / "../shared/paper/paper.tex"
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
    def test_what_is_inherited_is_merged_section_by_section(self, here: Path) -> None:
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

    def test_figures_and_words_are_of_a_recipe_alone(self, here: Path) -> None:
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

    def test_a_file_is_found_beside_its_heir(self, here: Path) -> None:
        write(here / "deep" / "a.yaml", WHOLE)
        assert open_recipe(write(here / "deep" / "b.yaml", "inherits: a.yaml\n")).data.source == "images"

    def test_overrides_come_last_and_stay_with_their_call(self) -> None:
        for _ in range(2):
            assert open_recipe("cars196-resnet50-rsk-simix", ["loss.simix=false"]).loss.simix is False
            assert open_recipe("cars196-resnet50-rsk-simix").loss.simix is True

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("inherits: cars196-resnet50\n", "inherits from 'cars196-resnet50', which is no recipe .* did you mean"),
            (
                "inherits: gldv1-resnet101-rsk\nloss: {name: smooth_ap}\n",
                "k means nothing .* or null where it is inherit",
            ),
            ("inherits: {a: b}\n", "inherits must be a recipe's name, or a list"),
            ("inherits: wrong.yaml\n", "in a circle: .*wrong.yaml -> .*wrong.yaml"),
            ("inherits: ./deep/../wrong.yaml\n", "in a circle: .*wrong.yaml -> .*deep/../wrong.yaml$"),
            ("inherit: cars196-resnet50-rsk\n", "inherit: unknown; did you mean 'inherits'"),
            (
                "inherits: cars196-resnet50-rsk\nloss: {k: [1]}\nloss: {k: [2]}\n",
                "the key 'loss' is there twice .*line 3",
            ),
            ("inherits: cars196-resnet50-rsk\nloss: {k: [1], k: [2]}\n", "the key 'k' is there twice"),
            ("inherits: parts\n", "no recipe and no file"),
        ],
    )
    def test_mistakes(self, here: Path, text: str, says: str) -> None:
        (here / "deep").mkdir()
        with pytest.raises(ConfigError, match=says):
            open_recipe(write(here / "wrong.yaml", text))

    def test_parts_are_no_recipes(self) -> None:
        with pytest.raises(ConfigError, match="no recipe and no file 'resnet50'"):
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
    def test_what_a_run_has_otherwise_is_said(self) -> None:
        assert not differences(
            open_recipe("cars196-resnet50-rsk", ["data.root=x", "training.seed=3", "batch.chunk_size=7"])
        )
        said = differences(
            open_recipe("cars196-resnet50-rsk", ["optimizer.lr=0.5", "loss.simix=true", "batch.size=196"])
        )
        assert said == [
            "loss.simix=True (the recipe: False)",
            "batch.size=196 (the recipe: 392)",
            "optimizer.lr=0.5 (the recipe: 0.0001)",
        ]

    def test_of_a_recipe_of_ones_own_nothing_is_known(self, here: Path) -> None:
        assert not differences(open_recipe(write(here / "mine.yaml", WHOLE)))


class TestPackagedRecipes:
    def test_every_row_of_the_issue_is_there(self) -> None:
        rows = {
            f"{data}-{model}-{loss}"
            for data in ("inaturalist", "sop", "vehicleid", "cars196")
            for model in ("resnet50", "resnet50-d128", "vit-b32", "vit-b16")
            for loss in ("rsk", "rsk-simix", "sap")
        }
        others = {"cars196-resnet50-rsk-simix-588", "sop-resnet50-rsk-384"}
        landmarks = {f"gldv1-resnet101-{loss}" for loss in ("sap", "rsk", "rsk-simix")}
        assert rows | others | landmarks <= set(recipe_names())

    @pytest.mark.parametrize("name", recipe_names())
    def test_every_recipe_is_valid_and_says_what_it_is(self, name: str) -> None:
        config = open_recipe(name)
        assert config.name == name
        assert config.about.endswith(".")

    def test_no_recipe_repeats_another(self) -> None:
        configs = [open_recipe(name).model_dump_json(exclude={"name", "about", "paper"}) for name in recipe_names()]
        assert len(set(configs)) == len(configs)

    @pytest.mark.parametrize(
        ("data", "model", "batch", "chunk", "epochs", "milestones", "lr"), [row.split() for row in RELEASE]
    )
    def test_hyper_parameters_of_the_release(
        self, data: str, model: str, batch: str, chunk: str, epochs: str, milestones: str, lr: str
    ) -> None:
        """Every cell of its table, and what it says of all."""
        vit = model.startswith("vit")
        rows = [name for name in recipe_names() if re.fullmatch(rf"{data}-{model}(-d128)?-(rsk|rsk-simix|sap)", name)]
        assert len(rows) == (1 if data == "cub" else 3 if vit else 6)
        for name in rows:
            config = open_recipe(name)
            assert config.batch.size == (384 if name.endswith("sap") else int(batch))
            assert (config.batch.chunk_size, config.batch.per_class) == (int(chunk), 4)
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

    def test_hyper_parameters_of_smooth_ap_s_release(self) -> None:
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
            assert config.loss.k == k
            assert config.data.validation_source is not None
            assert config.data.validation_source.source == "sfm120k-val"

    def test_sets_of_k_and_larger_batches(self) -> None:
        cars = open_recipe("cars196-resnet50-rsk-simix-588")
        assert (cars.batch.size, cars.batch.per_class, cars.training.epochs) == (588, 6, 170)
        assert open_recipe("sop-resnet50-rsk").loss.cut_offs == (1, 2, 4, 8, 16)
        assert open_recipe("sop-resnet50-rsk-simix").loss.cut_offs == (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)

    def test_the_list_is_ready_for_json(self) -> None:
        listed = {each["name"]: each for each in describe_recipes()}
        assert list(listed) == recipe_names()
        assert listed["cars196-resnet50-rsk"]["paper"] == {
            "cars196": {"r@1": 80.7, "r@2": 88.3, "r@4": 92.8, "r@8": 95.7}
        }

    def test_the_resolved_config_can_be_run(self, here: Path) -> None:
        config = open_recipe("vehicleid-vit-b32-sap")
        file = write(here / "x.yaml", yaml.safe_dump(config.model_dump(mode="json")))
        assert open_recipe(file) == config


COLUMNS = (
    [("inaturalist", f"r@{k}") for k in (1, 4, 16, 32)]
    + [("sop", f"r@{k}") for k in (1, 10, 100, 1000)]
    + [(f"vehicleid-{size}", f"r@{k}") for size in ("small", "medium", "large") for k in (1, 5)]
    + [("cars196", f"r@{k}") for k in (1, 2, 4, 8)]
)
ROWS = {  # end of a recipe's name -> start of the row in the table, dimension
    "resnet50-d128-rsk": ("RS@k", "R50-128"),
    "resnet50-d128-rsk-simix": ("RS@k+SiMix", "R50-128"),
    "resnet50-rsk": ("RS@k", "R50-512"),
    "resnet50-rsk-simix": ("RS@k+SiMix", "R50-512"),
    "resnet50-sap-original": ("SAP", "R50-512"),
    "resnet50-sap": ("SAP+GeM+LN", "R50-512"),
    "vit-b32-sap": ("SAP", "ViT-B/32-512"),
    "vit-b32-rsk": ("RS@k", "ViT-B/32-512"),
    "vit-b16-sap": ("SAP", "ViT-B/16-512"),
    "vit-b16-rsk": ("RS@k", "ViT-B/16-512"),
    "resnet50-d128-proxynca": ("ProxyNCA", "I1-128"),
    "resnet50-d128-margin": ("Margin", "R50-128"),
    "resnet50-d128-contrastive-memory": ("Cont.w/M", "R50-128"),
    "resnet50-contrastive-memory": ("Cont.w/M", "I3-512"),
    "resnet50-fastap": ("FastAP", "R50-512"),
    "resnet50-ms": ("MS", "I3-512"),
    "resnet50-normsoftmax": ("NormSoftMax", "R50-512"),
    "resnet50-blackbox-ap": ("BlackboxAP", "R50-512"),
    "resnet50-proxynca-pp": ("ProxyNCA++", "R50-512"),
}


@pytest.mark.skipif(not PAPER.is_file(), reason="no paper in the folder shared beside the project")
class TestFigures:
    """Every figure that a recipe quotes stands in the paper's own table, in the row of that method."""

    @pytest.fixture(scope="class")
    @classmethod
    def table(cls) -> dict[tuple[str, str], dict[tuple[str, str], float]]:
        text = PAPER.read_text(encoding="utf-8")
        body = re.sub(r"(?m)^\s*%.*$", "", text[text.index(r"\begin{table*}") :])
        rows = {}
        for row in body[: body.index(r"\end{tabular}")].split(r"\\"):
            cells = [cell.strip() for cell in row.split("&")]
            if len(cells) != 20 or not re.search(r"\d", cells[-1] + cells[2] + cells[6]) or "textcolor" in row:
                continue
            values = [re.search(r"\d+\.\d", cell) for cell in cells[2:]]
            found = {key: float(value.group()) for key, value in zip(COLUMNS, values, strict=True) if value}
            if found:
                rows[cls._method(cells[0]), cls._model(cells[1])] = found
        return rows

    @staticmethod
    def _method(cell: str) -> str:
        cell = cell.rpartition(r"\hline")[2]
        return re.sub(r"\\cite\{[^}]*\}|\\textsuperscript\{[^}]*\}|\\tiny|[{}\s\\]", "", cell)

    @staticmethod
    def _model(cell: str) -> str:
        kind = re.search(r"(ViT-B/\d+|[RI]_\{\d+\})\$?\^\{(\d+)\}", cell)
        assert kind, cell
        return f"{re.sub(r'[_{}]', '', kind.group(1))}-{kind.group(2)}"

    @pytest.mark.parametrize("row", ROWS)
    def test_of_the_table(self, row: str, table: dict[tuple[str, str], dict[tuple[str, str], float]]) -> None:
        quoted = {
            (test, metric): value
            for data in ("inaturalist", "sop", "vehicleid", "cars196")
            if f"{data}-{row}" in recipe_names()
            for test, figures in open_recipe(f"{data}-{row}").paper.items()
            for metric, value in figures.items()
        }
        assert quoted == table[ROWS[row]]

    @pytest.mark.parametrize("name", [name for name in recipe_names() if name.startswith("gldv1")])
    def test_of_the_landmarks(self, name: str) -> None:
        start = {
            "sap": r"SAP \cite",
            "rsk": r"GeM\dag                & RS@k",
            "rsk-simix": r"GeM+SiMix",
            "ap": "github",
        }
        text = PAPER.read_text(encoding="utf-8")
        text = text[text.index("Arch.}        &") :]
        row = text[text.index(start[name.removeprefix("gldv1-resnet101-")]) :].split(r"\\")[0]
        values = re.findall(r"(?<=&)\s*(\d+\.\d|-)\s*(?=&|$)", row)[2:]  # the first two are means
        tests = ("roxford5k", "roxford5k+r1m", "rparis6k", "rparis6k+r1m")
        keys = [(test, f"mAP {setup}") for test in tests for setup in ("medium", "hard")]
        expected = {key: float(value) for key, value in zip(keys, values, strict=True) if value != "-"}
        quoted = open_recipe(name).paper
        assert {(test, metric): value for test, each in quoted.items() for metric, value in each.items()} == expected

    def test_of_the_text(self) -> None:
        text = PAPER.read_text(encoding="utf-8")
        for name, sentence in {
            "cars196-resnet50-sap-392": "We train SAP with a batch size of $392$",
            "cars196-resnet50-sap-392-simix": "when combined with SiMix a performace of",
            "cars196-resnet50-rsk-simix-588": "further increased to $588$",
            "sop-resnet50-rsk-384": "equal to $384$, is used for RS@k",
        }.items():
            numbers = re.findall(r"\$(\d\d\.\d)\\%\$", text[text.index(sentence) :])[:4]
            (figures,) = open_recipe(name).paper.values()
            assert list(figures.values()) == [float(number) for number in numbers]
