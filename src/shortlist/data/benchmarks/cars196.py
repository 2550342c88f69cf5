"""Cars196: 196 car models. Classes 1 to 98 train and 99 to 196 test; the classification split is not used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shortlist.data.benchmarks.benchmark import Benchmark, ImageCount
from shortlist.data.benchmarks.lists import check_text
from shortlist.data.catalog import Catalog
from shortlist.errors import DataError
from shortlist.extras import extra

CLASSES, TRAINING_CLASSES = 196, 98
EXPECTS = "cars_annos.mat and car_ims/, or cars_train/, cars_test/ and the devkit's .mat files"
TRAIN_ANNOTATIONS, TEST_ANNOTATIONS = "cars_train_annos.mat", "cars_test_annos_withlabels.mat"


def read(root: Path) -> Catalog:
    """Read Cars196 in either of its layouts: the original one, or the one of the newer download.

    Args:
        root: Folder with `cars_annos.mat` and `car_ims/`; or with `cars_train/`, `cars_test/`, and (in `root` or in
            `devkit/`) `cars_train_annos.mat`, `cars_test_annos_withlabels.mat` and, for class names, `cars_meta.mat`.

    Raises:
        DataError: If a file is missing or cannot be read.
    """
    paths, classes, names = _read_original(root) if (root / "cars_annos.mat").is_file() else _read_newer(root)
    return Catalog(
        name="cars196",
        root=root,
        paths=paths,
        labels=classes - 1,
        class_names=names,
        splits=np.where(classes <= TRAINING_CLASSES, "train", "test"),
    )


_Content = tuple[NDArray[np.object_], NDArray[np.int64], tuple[str, ...]]  # paths, class numbers from 1, class names


def _read_original(root: Path) -> _Content:
    file = root / "cars_annos.mat"
    if not (root / "car_ims").is_dir():
        raise DataError(f"cars196: {file} exists, but the folder car_ims with the images is not next to it.")
    content = _read_mat(file)
    paths = np.array(_file_names(file, content, "relative_im_path"), dtype=object)
    classes = _classes(file, content)
    return paths, classes, _class_names(file, content, classes)


def _read_newer(root: Path) -> _Content:
    paths: list[str] = []
    classes: list[NDArray[np.int64]] = []
    for folder, name in (("cars_train", TRAIN_ANNOTATIONS), ("cars_test", TEST_ANNOTATIONS)):
        if not (root / folder).is_dir():
            raise DataError(f"cars196: no folder {folder} in {root}; expected {EXPECTS}.")
        file = _find_annotations(root, name)
        content = _read_mat(file)
        paths += [f"{folder}/{path}" for path in _file_names(file, content, "fname")]
        classes.append(_classes(file, content))
    meta = next((file for file in (root / "cars_meta.mat", root / "devkit" / "cars_meta.mat") if file.is_file()), None)
    all_classes = np.concatenate(classes)
    names = _class_names(meta or root, {} if meta is None else _read_mat(meta), all_classes)
    return np.array(paths, dtype=object), all_classes, names


def _find_annotations(root: Path, name: str) -> Path:
    for file in (root / name, root / "devkit" / name):
        if file.is_file():
            return file
    hint = ""
    if name == TEST_ANNOTATIONS:
        hint = "; cars_test_annos.mat is not sufficient, since it has no classes"
    raise DataError(f"cars196: no {name} in {root} or {root / 'devkit'}{hint}.")


def _read_mat(file: Path) -> dict[str, Any]:
    with extra("training", "Reading Cars196"):
        from scipy.io import loadmat  # imported here because it is slow to import

    try:
        content: dict[str, Any] = loadmat(file, squeeze_me=True)
    except Exception as error:  # scipy raises almost any exception for a damaged file
        check_text(file, "cars196", file.read_bytes()[:500].decode("latin1"))
        raise DataError(f"cars196: cannot read {file}: {str(error) or type(error).__name__}") from error
    return content


def _field(file: Path, content: dict[str, Any], name: str) -> NDArray[Any]:
    table = np.asarray(content.get("annotations"))
    fields = table.dtype.names or ()
    if name not in fields:
        available = ", ".join(fields) or "no annotations"
        raise DataError(f"cars196: {file} has no field {name!r} in its annotations (it has: {available}).")
    return np.atleast_1d(table[name])


def _file_names(file: Path, content: dict[str, Any], field: str) -> list[str]:
    names: list[Any] = _field(file, content, field).tolist()
    if not all(isinstance(name, str) and name for name in names):
        raise DataError(f"cars196: the field {field!r} of {file} must contain image names.")
    return names


def _classes(file: Path, content: dict[str, Any]) -> NDArray[np.int64]:
    try:
        classes = _field(file, content, "class").astype(np.int64)  # stored as uint8
    except (TypeError, ValueError):
        classes = np.zeros(0, dtype=np.int64)
    if not len(classes) or classes.min() < 1 or classes.max() > CLASSES:
        raise DataError(f"cars196: the classes of {file} must be numbers from 1 to {CLASSES}.")
    return classes


def _class_names(file: Path, content: dict[str, Any], classes: NDArray[np.int64]) -> tuple[str, ...]:
    """Return one name per class; class numbers if the file has no names."""
    if "class_names" not in content:
        return tuple(f"class {number:03}" for number in range(1, int(classes.max()) + 1))
    names = tuple(str(name) for name in np.atleast_1d(content["class_names"]).tolist())
    if len(names) < classes.max():
        raise DataError(f"cars196: {file} names {len(names)} classes, but an image has class {classes.max()}.")
    if len(set(names)) < len(names):
        raise DataError(f"cars196: {file} has the same name for two classes.")
    return names


BENCHMARK = Benchmark(
    name="cars196",
    about="196 car models, the first 98 for training and the others for testing",
    read=read,
    protocol="leave-one-out",
    k=(1, 2, 4, 8),
    download="https://ai.stanford.edu/~jkrause/cars/car_dataset.html (offline; mirrors have either layout)",
    expects=EXPECTS,
    tree="""\
cars_annos.mat
car_ims/000001.jpg, ...
or
cars_train/00001.jpg, ...
cars_test/00001.jpg, ...
devkit/cars_train_annos.mat
devkit/cars_test_annos_withlabels.mat
devkit/cars_meta.mat""",
    markers=("cars_annos.mat", "cars_train", "cars_test"),
    counts={"train": ImageCount(8_054, 98), "test": ImageCount(8_131, 98)},
    note="The classification split, which all downloads contain, is not read.",
    lookalikes={"car_ims": "exists, but cars_annos.mat does not: put cars_annos.mat next to it"},
)
