"""Tiny copies of all benchmarks, in the format of the real ones on disk, including their peculiarities.

`miniature(name, folder)` writes a benchmark and returns the folder to open. Images are real JPEGs (arrays for
Omniglot): each class has a colour, and each image has its own pattern and size.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

Write = Callable[[Path, int, int], None]


def miniature(name: str, folder: Path, classes: int = 6, images: int = 5) -> Path:
    """Write the benchmark `name` to `folder`, and return the folder.

    Args:
        name: Any of BENCHMARKS; glyphs need no files and get an empty folder.
        folder: Folder that is created.
        classes: Number of classes per split, or of queries for a benchmark without classes.
        images: Number of images per class; with queries and a gallery, about half of them have each role.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    writers = {
        "cars196": _cars196,
        "sop": _sop,
        "inaturalist": _inaturalist,
        "cub": _cub,
        "inshop": _inshop,
        "gldv1": _gldv1,
        "gldv2-clean": _gldv2,
        "roxford5k": lambda *size: _revisited("roxford5k", *size),
        "rparis6k": lambda *size: _revisited("rparis6k", *size),
        "r1m": _r1m,
        "sfm120k-val": _sfm120k,
        "omniglot": _omniglot,
        "glyphs": lambda *size: None,
    }
    writer = _vehicleid if name.startswith("vehicleid-") else writers[name]
    writer(folder, classes, images)
    return folder


def image(file: Path, label: int, number: int, kind: str = "JPEG") -> None:
    """Write an image of class `label`, which determines its colour; its pattern and size are its own."""
    rng = np.random.default_rng([label, number])
    colour = np.random.default_rng(label).integers(40, 216, 3)
    coarse = np.clip(colour + rng.integers(-40, 41, (4, 5, 3)), 0, 255).astype(np.uint8)
    size = (48 + 4 * (number % 3), 40 + 4 * (label % 3))
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(file, kind)


def lines(file: Path, rows: list[str], end: str = "\n", last: bool = True) -> None:
    """Write a text file with these lines; `last` is whether the last line has a line ending."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes((end.join(rows) + (end if last else "")).encode())


def digest(*parts: object) -> str:
    """Return 32 hexadecimal digits that look like the names of real images."""
    return hashlib.md5("/".join(map(str, parts)).encode()).hexdigest()


def _each(classes: int, images: int) -> Iterator[tuple[int, int]]:
    return ((label, number) for label in range(classes) for number in range(images))


# MATLAB's format


def strings(values: list[str]) -> np.ndarray:
    """Return a MATLAB cell array of strings, 1 x n."""
    return np.array([np.array([value]) for value in values] + [None], dtype=object)[None, :-1]


def annotations(**fields: list[object]) -> np.ndarray:
    """Return a MATLAB struct array, 1 x n, with the fields of Cars196."""
    box = ["bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2"]
    number = len(next(iter(fields.values())))
    table = np.empty((1, number), dtype=[(name, object) for name in [*box, *fields]])
    for name in box:
        table[name][0] = [np.array([[7]], dtype=np.uint8)] * number
    for name, values in fields.items():
        for index, value in enumerate(values):
            table[name][0, index] = np.array([value]) if isinstance(value, str) else np.array([[value]], dtype=np.uint8)
    return table


# The benchmarks


def _cars196(root: Path, classes: int, images: int) -> None:
    """Original layout. The classification split divides every class, and classes are not in order."""
    numbers = [number for number, _ in _each(classes, images)]
    numbers = [1 + number for number in numbers] + [99 + number for number in numbers]
    numbers = [numbers[index] for index in np.random.default_rng(0).permutation(len(numbers))]
    paths = [f"car_ims/{index:06}.jpg" for index in range(1, len(numbers) + 1)]
    for index, (path, number) in enumerate(zip(paths, numbers, strict=True)):
        image(root / path, number, index)
    from scipy.io import savemat

    table = annotations(relative_im_path=paths, **{"class": numbers}, test=[i % 2 for i in range(len(paths))])
    names = [f"Maker Model {number} 2012" for number in range(1, 197)]
    savemat(root / "cars_annos.mat", {"annotations": table, "class_names": strings(names)})


def _sop(root: Path, classes: int, images: int) -> None:
    """A header and upper-case extensions; the second list has CRLF line endings, and none after its last line."""
    index = 0
    for name, first in (("Ebay_train.txt", 1), ("Ebay_test.txt", 11319)):
        rows = ["image_id class_id super_class_id path"]
        for label, number in _each(classes, images):
            index += 1
            path = f"{('bicycle', 'sofa')[label % 2]}_final/{111085122871 + label}_{number}.JPG"
            if first > 1:
                path = path.replace("_final/", "_final/2")
            image(root / path, first + label, number)
            rows.append(f"{index} {first + label} {1 + label % 2} {path}")
        lines(root / name, rows, *(("\n", True) if first == 1 else ("\r\n", False)))


def _inaturalist(root: Path, classes: int, images: int) -> None:
    """No header and no last line ending; the same number occurs in two kingdoms."""
    for part, first in (("train", 7477), ("test", 100)):
        rows = []
        for label, number in _each(classes, images):
            kingdom = ("Plantae", "Aves")[label % 2]
            path = f"train_val2018/{kingdom}/{first + label // 2}/{digest(part, label, number)}.jpg"
            image(root / path, first + label, number)
            rows.append(path)
        lines(root / "Inat_dataset_splits" / f"Inaturalist_{part}_set1.txt", rows, last=False)


def _vehicleid(root: Path, classes: int, images: int) -> None:
    """No header; images are numbers of 7 digits with leading zeros. The large lists include the smaller ones."""
    index = 279029
    rows: dict[str, list[str]] = {name: [] for name in ("train_list", "test_list_800", "test_list_1600")}
    rows["test_list_2400"] = []
    for part, first, smaller in (("train_list", 23781, ()), ("test_list_2400", 5, ("test_list_800", "test_list_1600"))):
        for label, number in _each(classes, images):
            index += 1
            image(root / "image" / f"{index:07}.jpg", first + label, number)
            for name in (part, *smaller):
                rows[name].append(f"{index:07} {first + label}")
    for name, listed in rows.items():
        lines(root / "train_test_split" / f"{name}.txt", listed, last=name != "test_list_800")


def _cub(root: Path, classes: int, images: int) -> None:
    """Includes the classification split, which divides every class."""
    named, labelled, split = [], [], []
    for first in (1, 101):
        for label, number in _each(classes, images):
            index = len(named) + 1
            path = f"{first + label:03}.Black_footed_Albatross/Black_Footed_Albatross_{index:04}_{number}.jpg"
            image(root / "images" / path, first + label, number)
            named.append(f"{index} {path}")
            labelled.append(f"{index} {first + label}")
            split.append(f"{index} {number % 2}")
    lines(root / "images.txt", named)
    lines(root / "image_class_labels.txt", labelled)
    lines(root / "train_test_split.txt", split)


def _inshop(root: Path, classes: int, images: int) -> None:
    """A count, a header, and columns padded with spaces; even test images are queries, and odd ones are gallery."""
    rows = []
    for first, statuses in ((1, ("train", "train")), (5001, ("query", "gallery"))):
        for label, number in _each(classes, images):
            item = f"id_{first + label:08}"
            path = f"img/WOMEN/{('Tees_Tanks', 'Denim')[label % 2]}/{item}/{number + 1:02}_{number % 7}_front.jpg"
            image(root / path, first + label, number)
            rows.append(f"{path:71} {item} {statuses[number % 2]:10}")
    lines(root / "list_eval_partition.txt", [str(len(rows)), "image_name item_id evaluation_status", *rows])


def _gldv1(root: Path, classes: int, images: int) -> None:
    """Quoted values, URLs with commas, and one withdrawn photograph."""
    rows = ['"id","url","landmark_id"']
    for label, number in _each(classes, images):
        name = digest("gldv1", label, number)[:16]
        image(root / "train" / f"{name}.jpg", label, number)
        rows.append(f'"{name}","http://lh4.example.com/-a,b/{number}/s1600/","{6347 + label}"')
    rows.append(f'"{digest("withdrawn")[:16]}","None","None"')
    lines(root / "train.csv", rows)


def _gldv2(root: Path, classes: int, images: int) -> None:
    """One landmark per line."""
    rows = ["landmark_id,images"]
    for label in range(classes):
        names = [digest("gldv2", label, number)[:16] for number in range(images)]
        for number, name in enumerate(names):
            image(root / "train" / name[0] / name[1] / name[2] / f"{name}.jpg", label, number)
        rows.append(f"{1 + 3 * label},{' '.join(names)}")
    lines(root / "train_clean.csv", rows)


def _revisited(name: str, root: Path, classes: int, images: int) -> None:
    """One query per class; its images are easy, hard, easy, junk in turn, and all hard for the last class."""
    gnd = []
    names = [
        f"{('ashmolean', 'radcliffe_camera')[label % 2]}_{label:03}{number:03}"
        for label, number in _each(classes, images)
    ]
    for index, (label, number) in enumerate(_each(classes, images)):
        image(root / "jpg" / f"{names[index]}.jpg", label, number)
    for label in range(classes):
        image(root / "jpg" / f"query_{label:06}.jpg", label, images)
        own = range(label * images, (label + 1) * images)
        parts = {"easy": list(own[0::4]) + list(own[2::4]), "hard": list(own[1::4]), "junk": list(own[3::4])}
        if label == classes - 1:
            parts = {"easy": [], "hard": list(own), "junk": []}
        gnd.append({"bbx": [4.5, 2.25, 40, 36.5], **parts})
    content = {"gnd": gnd, "imlist": names, "qimlist": [f"query_{label:06}" for label in range(classes)]}
    (root / f"gnd_{name}.pkl").write_bytes(pickle.dumps(content, protocol=2))


def _r1m(root: Path, classes: int, images: int) -> None:
    """Paths relative to jpg/, some extensions in upper case, and no last line ending."""
    rows = []
    for label, number in _each(classes, images):
        path = f"{label}/{digest('r1m', label, number)}.{('jpg', 'JPG')[number % 2]}"
        image(root / "jpg" / path, label, number)
        rows.append(path)
    lines(root / "revisitop1m.txt", rows, last=False)


def _sfm120k(root: Path, classes: int, images: int) -> None:
    """Names without an extension; the first image of each class is a query, and some queries have no junk."""
    cids = [digest("sfm", label, number) for label, number in _each(classes, images)]
    for cid, (label, number) in zip(cids, _each(classes, images), strict=True):
        image(root / "ims" / cid[-2:] / cid[-4:-2] / cid[-6:-4] / cid, label, number)
    qidx = [label * images for label in range(classes)]
    gnd = [
        {"ok": [own + number for number in range(1, images - 1)], "junk": [own, own + images - 1] if own else []}
        for own in qidx
    ]
    content = {"cids": cids, "qidx": qidx, "gnd": gnd}
    (root / "retrieval-SfM-120k-val-eccv2020.pkl").write_bytes(pickle.dumps(content, protocol=4))


def _omniglot(root: Path, classes: int, images: int) -> None:
    """Arrays of black and white drawings; True is blank paper."""
    for part, first in (("images_background", 0), ("images_evaluation", 1000)):
        drawn = [
            np.random.default_rng([first, label, number]).random((105, 105)) > 0.1
            for label, number in _each(classes, images)
        ]
        labels = np.repeat(np.arange(classes), images).reshape(classes, images)
        np.savez_compressed(
            root / f"{part}.npz", images=np.stack(drawn).reshape(classes, images, 105, 105), labels=labels
        )
