"""User-defined models and losses that a recipe names as module:name, and modules that it imports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from shortlist import Embedder, Encoder, train
from shortlist.config import LossConfig
from shortlist.config.schema import ModelConfig
from shortlist.errors import ConfigError, ModelError
from shortlist.ranking import RankingLoss
from shortlist.training.components import build_embedder, build_loss
from shortlist.training.user_loss import ExternalLoss
from tests import user_parts
from tests.processes import Commands
from tests.training.runs import RECIPE, class_folders, config, fast_config, same_weights, weights
from tests.user_parts import Net, Proxies, ReciprocalRank, pull

PARTS = "tests.user_parts"
FAST = ("training.epochs=1", "data.validation=none")
REGISTERS = """
import timm
from timm.models import register_model

@register_model
def user_net(pretrained=False, **options):
    return timm.create_model("test_resnet", pretrained=False, **options)
"""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 classes of 3 images; 4 of the classes are for training, with two steps per epoch."""
    return class_folders(tmp_path_factory.mktemp("data") / "images", classes=8, images=3)


@pytest.fixture
def home(images: Path, tmp_path: Path) -> Path:
    """A folder with images, a recipe and a module of the user."""
    (tmp_path / "images").symlink_to(images)
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    shutil.copy(user_parts.__file__, tmp_path / "mine.py")
    return tmp_path


def recipe(home: Path, **sections: Any) -> Path:
    values = {**yaml.safe_load(RECIPE), **sections}
    (home / "recipe.yaml").write_text(yaml.safe_dump(values))
    return home / "recipe.yaml"


def loss(**settings: Any) -> Any:
    return build_loss(LossConfig(**settings), torch.tensor([3, 8, 5]), dim=4)


class TestLoss:
    def test_a_class_is_constructed(self) -> None:
        built = loss(name=f"{PARTS}:Proxies", args={"scale": 2.0})
        assert isinstance(built, ExternalLoss)
        assert isinstance(built.loss, Proxies)
        assert (built.loss.scale, built.loss.weight.shape) == (2.0, (3, 4))  # the classes and dimensions of the run
        assert built(torch.rand(4, 4), torch.tensor([3, 8, 8, 5])).isfinite()

    def test_what_it_keeps_is_in_its_state(self) -> None:
        built = loss(name=f"{PARTS}:Proxies")
        built(torch.rand(2, 4), torch.tensor([3, 8]))
        assert built.state_dict()["loss.calls"] == 1

    def test_a_function_gets_its_arguments(self) -> None:
        embeddings, labels = torch.nn.functional.normalize(torch.randn(6, 4)), torch.tensor([3, 3, 8, 8, 5, 5])
        once, twice = (loss(name=f"{PARTS}:pull", args=args)(embeddings, labels) for args in ({}, {"scale": 2}))
        assert once == pull(embeddings, labels)
        assert twice == 2 * once

    def test_a_head_runs_on_the_engine(self) -> None:
        settings = {"args": {"power": 2}, "similarity_temperature": 0.1, "simix": True}
        built = loss(name=f"{PARTS}:ReciprocalRank", **settings)
        assert isinstance(built, RankingLoss)
        assert isinstance(built.head, ReciprocalRank)
        assert (built.head.power, built.similarity_temperature, built.simix is None) == (2, 0.1, False)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"name": f"{PARTS}:Proxy"}, "loss.name: tests.user_parts .* has no 'Proxy'; did you mean 'Proxies'"),
            ({"name": f"{PARTS}:Proxies", "args": {"scal": 1}}, r"loss.args: Proxies\(.*scal=1\) fails with TypeError"),
            ({"name": f"{PARTS}:NUMBER"}, "NUMBER is not a function, a class or a head, but int"),
            ({"name": f"{PARTS}:pull", "simix": True}, f"loss.simix has no effect: {PARTS}:pull is not a head"),
            ({"name": f"{PARTS}:pull", "count_query": True}, "loss.count_query has no effect"),
        ],
    )
    def test_mistakes(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            loss(**settings)

    def test_settings_of_other_losses_are_refused(self, tmp_path: Path) -> None:
        for setting in ("loss.k=[1]", "loss.miner={name: X}", "loss.bins=5", "loss.rank_temperature=2"):
            with pytest.raises(ConfigError, match=r"has no effect with tests.user_parts:pull"):
                config(tmp_path, f"loss.name={PARTS}:pull", setting)

    def test_the_same_run_as_with_the_loss_given_in_python(self, images: Path, tmp_path: Path) -> None:
        settings = [*FAST, "loss.similarity_temperature=0.05"]
        named = [f"loss.name={PARTS}:ReciprocalRank", "loss.args.power=0.5"]
        by_name = train(fast_config(images, *named), *settings, output=tmp_path / "named", report=False)
        given = ReciprocalRank(power=0.5)
        by_object = train(fast_config(images), *settings, loss=given, output=tmp_path / "given", report=False)
        assert same_weights(weights(by_name.path), weights(by_object.path))


class TestModel:
    def test_the_same_run_as_with_the_module_given_in_python(self, images: Path, tmp_path: Path) -> None:
        chosen = fast_config(images, *FAST, f"model={{backbone: {PARTS}:build, backbone_args: {{dim: 5, width: 4}}}}")
        by_name = train(chosen, output=tmp_path / "named", report=False)
        module = build_embedder(chosen).backbone  # the initial weights depend on the seed
        assert isinstance(module, Net)
        by_object = train(fast_config(images), *FAST, model=module, output=tmp_path / "given", report=False)
        assert same_weights(weights(by_name.path), weights(by_object.path))
        assert Encoder.from_run(by_name.path).dim == 5  # no module is needed

    def test_weights_of_another_run(self, tmp_path: Path) -> None:
        before = Embedder(f"{PARTS}:build", backbone_args={"dim": 3})
        folder = before.save(tmp_path / "run")
        after = Embedder(f"{PARTS}:build", backbone_args={"dim": 3}, pretrained=folder)
        assert torch.equal(before.backbone.linear.weight, after.backbone.linear.weight)
        torch.save(before.backbone.state_dict(), tmp_path / "net.pth")
        again = Embedder(f"{PARTS}:build", backbone_args={"dim": 3}, pretrained=tmp_path / "net.pth")
        assert torch.equal(before.backbone.linear.weight, again.backbone.linear.weight)
        with pytest.raises(ModelError, match=r"are not those of 'tests.user_parts:build'"):
            Embedder(f"{PARTS}:build", backbone_args={"dim": 4}, pretrained=tmp_path / "net.pth")

    def test_vectors_have_unit_length_and_images_are_normalised(self) -> None:
        embedder = Embedder(Net(), mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)).eval()
        images = torch.randint(256, (2, 3, 40, 36), dtype=torch.uint8)
        expected = torch.nn.functional.normalize(embedder.backbone((images / 255 - 0.5) / 0.25))
        torch.testing.assert_close(embedder(images), expected)
        assert [name for name, part in embedder.parts().items() if part] == ["backbone"]

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"backbone": f"{PARTS}:build"}, r"model.backbone_args: build\(\) fails with TypeError.*'dim'"),
            ({"backbone": f"{PARTS}:Met"}, "model.backbone: tests.user_parts .* has no 'Met'; did you mean 'Net'"),
            ({"backbone": f"{PARTS}:len"}, "model.backbone: tests.user_parts .* has no 'len'"),
            ({"backbone": "builtins:dict"}, "builtins:dict is a function that returns dict: name a class, or"),
            ({"backbone": "no_such_module_7:build"}, "model.backbone: there is no module 'no_such_module_7'"),
        ],
    )
    def test_mistakes(self, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
        chosen = config(tmp_path).model_copy(update={"model": ModelConfig(**settings)})
        with pytest.raises((ConfigError, ModelError), match=message):
            build_embedder(chosen)

    @pytest.mark.parametrize("setting", ["dim=3", "pooling=average", "layer_norm=false", "whitening=pca"])
    def test_settings_of_the_head_are_refused(self, setting: str, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"has no effect with tests.user_parts:build, which returns vectors"):
            config(tmp_path, f"model={{backbone: {PARTS}:build}}", f"model.{setting}")


class TestCommandLine:
    def test_a_model_and_a_head_of_the_current_folder(self, home: Path, commands: Commands) -> None:
        """The recipe contains all settings, from training to search."""
        file = recipe(
            home,
            model={"backbone": "mine:build", "backbone_args": {"dim": 5}},
            loss={"name": "mine:ReciprocalRank", "args": {"power": 0.5}},
        )
        query = home / "images" / "class 07" / "0.png"
        for command in (
            ["train", file, *FAST, "--run", "run"],
            ["evaluate", "run"],
            ["index", "run", "images", "-o", "gallery"],
            ["search", "gallery", query, "--json"],
            ["export", "run", "--torchscript", "model.ts"],
        ):
            code, out, error = commands.run(*command, cwd=home)
            assert code == 0, error
            if command[0] == "search":
                assert json.loads(out)["results"][0]["hits"][0]["path"] == str(query)
        code, _, error = commands.run("export", "run", "--package", "package", cwd=home)
        assert code == 1
        assert error.splitlines()[-1].startswith("Error: A package is loaded with timm, which does not have mine:build")
        code, _, error = commands.run("evaluate", home / "run", cwd=home / "images")
        assert code == 1
        message = "Error: model.backbone: there is no module 'mine'; install it, or start Python in the folder that"
        assert error.splitlines()[-1].startswith(message)

    def test_a_module_that_registers_a_timm_model(self, home: Path, commands: Commands) -> None:
        (home / "registers.py").write_text(REGISTERS)
        model = {"backbone": "user_net", "weights": "none", "dim": 4}
        file = recipe(home, model=model)
        code, _, error = commands.run("train", file, *FAST, "--run", "run", cwd=home)
        assert (code, "has no backbone 'user_net'" in error) == (1, True)
        file = recipe(home, model=model, imports=["registers"])
        for command in (
            ["train", file, *FAST, "--run", "run"],
            ["index", "run", "images", "-o", "gallery"],
            ["search", "gallery", "images/class 07/0.png"],
        ):
            code, _, error = commands.run(*command, cwd=home)
            assert code == 0, error

    def test_an_option_instead_of_the_recipe(self, home: Path, commands: Commands) -> None:
        (home / "registers.py").write_text(REGISTERS)
        file = recipe(home, model={"backbone": "user_net", "weights": "none", "dim": 4})
        option = ["--import", "registers"]
        code, _, error = commands.run(*option, "plan", file, "--no-measure", cwd=home)
        assert code == 0, error
        code, _, error = commands.run("train", file, *FAST, "--run", "run", *option, cwd=home)
        assert code == 0, error
        assert yaml.safe_load((home / "run" / "config.yaml").read_text())["imports"] == ["registers"]
        code, _, error = commands.run("evaluate", "run", cwd=home)  # imports the module that the run names
        assert code == 0, error

    def test_a_sweep_with_an_option_and_a_loss_of_the_user(self, home: Path, commands: Commands) -> None:
        (home / "registers.py").write_text(REGISTERS)
        model = {"backbone": "user_net", "weights": "none", "dim": 4}
        file = recipe(home, model=model, loss={"name": "mine:ReciprocalRank"})
        (home / "space.yaml").write_text("loss.args: [{power: 0.5}, {power: 2}]")
        sweep = ["sweep", file, "training.epochs=1", "--space", "space.yaml", "--trials", "1", "--out", "study"]
        code, _, error = commands.run(*sweep, "--import", "registers", cwd=home)
        assert code == 0, error
        assert commands.run("sweep", "best", "study", cwd=home)[0] == 0
        best = yaml.safe_load((home / "study" / "best.yaml").read_text())
        assert (best["imports"], best["loss"]["name"]) == (["registers"], "mine:ReciprocalRank")
        assert best["loss"]["args"]["power"] in (0.5, 2)

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            (["--import", "no_such_module_7"], "Error: --import: there is no module 'no_such_module_7'; install it,"),
            (["--import=fails"], "Error: --import: importing fails fails with ValueError: 7"),
        ],
    )
    def test_imports_that_fail(self, option: list[str], message: str, home: Path, commands: Commands) -> None:
        (home / "fails.py").write_text("raise ValueError(7)")
        code, out, error = commands.run("recipes", "list", *option, cwd=home)
        assert (code, out) == (1, "")
        assert error.startswith(message)
        assert len(error.splitlines()) == 1

    def test_an_import_of_a_recipe_that_fails(self, home: Path, commands: Commands) -> None:
        file = recipe(home, imports=["no_such_module_7"])
        code, _, error = commands.run("train", file, "--run", "run", cwd=home)
        assert code == 1
        assert error.startswith("Error: imports: there is no module 'no_such_module_7'; install it, or")
        assert not (home / "run").exists()
