"""Compare the loading of images and `embed` with torchvision's ImageFolder and DataLoader, on the CPU.

    python benchmarks/input.py                   all comparisons: a few minutes on 2 cores
    python benchmarks/input.py --only loading    or embedding, or decoding
    python benchmarks/input.py --many            only embedding, once, of 50,000 images at 112 pixels: about 15 minutes
    python benchmarks/input.py --quick           few images and repeats, to test the script; nothing is written

*Loading*: images per second at 224 pixels (random resized crop and flip) from JPEGs of 500 x 375 pixels with the
spectrum of photographs. torchvision returns either float32 (`ToTensor`, as usual) or uint8 (`PILToTensor`), as
shortlist does.
*Embedding*: `embed_images` and a plain loop over a DataLoader, with the same network and test transform.
*Decoding*: processor time per file of decoders that could be used for the crop of a training image.

The methods are measured alternately, and the ratio of neighbouring measurements is taken, which is reliable on a noisy
machine. A rate is measured from the first batch to the last, so it excludes the start of the worker processes.
"""

from __future__ import annotations

import argparse
import io
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import transforms as tv
from torchvision.datasets import ImageFolder

from shortlist.data import ImageDataset, TestTransform, TrainTransform, image_chunks, open_catalog
from shortlist.data.loader import decoding_workers
from shortlist.encoding.embed import embed_images
from shortlist.model import Embedder

RESULTS = Path(__file__).parent / "results" / "input.json"
SIZE, BATCH = 224, 32
LOADING, EMBEDDING = 1.5, 1.0  # targets
DISTINCT = 64  # number of different photographs
MANY, MANY_SIZE = 50_000, 112  # images, and their size, of --many


def photograph(seed: int, width: int = 500, height: int = 375) -> Image.Image:
    """Return an image whose amplitudes fall with the frequency as in photographs, with correlated colours."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf  # no constant part
    waves = (rng.standard_normal((3, *frequency.shape, 2)) @ [1, 1j]) / frequency**1.1
    fields = np.fft.irfft2(waves, (height, width))
    light, first, second = fields / fields.std((1, 2), keepdims=True)
    colours = np.stack([light, 0.9 * light + 0.3 * first, 0.8 * light + 0.4 * second], axis=-1)
    return Image.fromarray(np.clip(110 + 55 * colours, 0, 255).astype(np.uint8))


def write_images(folder: Path, number: int) -> float:
    """Write JPEGs in four class folders, and return the bytes per pixel of their files."""
    sizes = []
    for index in range(min(DISTINCT, number)):
        file = io.BytesIO()
        image = photograph(index)
        image.save(file, "JPEG", quality=75)
        sizes.append(len(file.getvalue()) / (image.width * image.height))
        for copy in range(index, number, DISTINCT):
            path = folder / f"class{copy % 4}" / f"{copy}.jpg"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(file.getvalue())
    return statistics.mean(sizes)


# ---------------------------------------------------------------------------------------------- the compared methods


def torchvision_loader(folder: Path, transform: list[Any], workers: int, shuffle: bool) -> Iterable[Any]:
    dataset = ImageFolder(str(folder), tv.Compose(transform))
    return DataLoader(dataset, BATCH, shuffle=shuffle, num_workers=workers)


def random_crop(to_tensor: Any) -> list[Any]:
    return [tv.RandomResizedCrop(SIZE), tv.RandomHorizontalFlip(), to_tensor]


def batches_of_torchvision(folder: Path, to_tensor: Any, workers: int) -> Iterator[int]:
    for images, _ in torchvision_loader(folder, random_crop(to_tensor), workers, shuffle=True):
        yield len(images)


def batches_of_shortlist(folder: Path, workers: int) -> Iterator[int]:
    dataset = ImageDataset(open_catalog(folder), TrainTransform(SIZE))
    order = torch.randperm(len(dataset)).tolist()
    keys = [[(0, index) for index in order[start : start + BATCH]] for start in range(0, len(order), BATCH)]
    for images in image_chunks(dataset, keys, workers):
        yield len(images)


def batches_of_plain_embedding(folder: Path, model: Embedder, size: int, workers: int) -> Iterator[int]:
    steps = [tv.Resize(size * 8 // 7), tv.CenterCrop(size), tv.PILToTensor()]
    vectors: list[Tensor] = []
    with torch.inference_mode():
        for images, _ in torchvision_loader(folder, steps, workers, shuffle=False):
            vectors.append(model(images))
            yield len(images)


def rate(batches: Iterator[int]) -> float:
    """Return the number of images per second after the first batch."""
    next(batches)
    start = time.perf_counter()
    images = sum(batches)
    return images / (time.perf_counter() - start)


def embedding_rate(folder: Path, model: Embedder, size: int, workers: int) -> float:
    """Return the number of images per second of `embed_images` after the first batch."""
    times: list[tuple[int, float]] = []
    embed_images(
        model,
        open_catalog(folder),
        TestTransform(size, size * 8 // 7),
        batch_size=BATCH,
        workers=workers,
        progress=lambda done, total: times.append((done, time.perf_counter())),
    )
    (first, start), (last, end) = times[0], times[-1]
    return (last - first) / (end - start)


# -------------------------------------------------------------------------------------------------------- comparisons


def compare(methods: dict[str, Callable[[], float]], repeats: int) -> dict[str, Any]:
    """Measure the rates of all methods alternately. The first method is divided by each of the others."""
    rates: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repeats):
        for name, method in methods.items():
            rates[name].append(method())
    ours, *others = methods
    ratios = {
        name: statistics.median(mine / theirs for mine, theirs in zip(rates[ours], rates[name], strict=True))
        for name in others
    }
    return {"images_per_second": {name: statistics.median(each) for name, each in rates.items()}, "ratio": ratios}


def show(title: str, result: dict[str, Any], target: float) -> None:
    print(title)
    for name, images in result["images_per_second"].items():
        ratio = result["ratio"].get(name)
        verdict = "" if ratio is None else f"   {ratio:5.2f} x   {'met' if ratio >= target else 'MISSED'}"
        print(f"    {name:36} {images:7.1f} images/s{verdict}", flush=True)


def loading(folder: Path, workers: int, repeats: int) -> dict[str, Any]:
    methods = {
        "shortlist": lambda: rate(batches_of_shortlist(folder, workers)),
        "torchvision, float32": lambda: rate(batches_of_torchvision(folder, tv.ToTensor(), workers)),
        "torchvision, uint8": lambda: rate(batches_of_torchvision(folder, tv.PILToTensor(), workers)),
    }
    result = compare(methods, repeats)
    show(f"loading, {workers} worker(s), target {LOADING} x", result, LOADING)
    return result


def embedding(folder: Path, workers: int, repeats: int, size: int = SIZE) -> dict[str, Any]:
    model = Embedder("tf_efficientnet_lite0", dim=512, image_size=size).eval()
    methods = {
        "shortlist": lambda: embedding_rate(folder, model, size, workers),
        "plain loop": lambda: rate(batches_of_plain_embedding(folder, model, size, workers)),
    }
    result = compare(methods, repeats)
    show(f"embedding, EfficientNet-Lite0, {workers} worker(s), target {EMBEDDING} x", result, EMBEDDING)
    return result


# ----------------------------------------------------------------------------------------------------------- decoders


def decoders() -> dict[str, Callable[[bytes], Any]]:
    """Return functions that decode a file to an array or tensor of whole pixels, as far as they are installed."""

    def pillow(content: bytes, reduction: int = 1) -> Any:
        image = Image.open(io.BytesIO(content))
        image.draft("RGB", (image.width // reduction, image.height // reduction))
        return np.asarray(image)

    found: dict[str, Callable[[bytes], Any]] = {"Pillow": pillow, "Pillow, half size": partial(pillow, reduction=2)}
    try:
        import simplejpeg

        found["simplejpeg"] = simplejpeg.decode_jpeg
    except ImportError:
        print("simplejpeg is not installed")
    try:
        from torchcodec.decoders import decode_jpeg

        found["torchcodec"] = decode_jpeg
    except (ImportError, RuntimeError):
        print("torchcodec is not installed")
    return found


def decoding(folder: Path, repeats: int) -> dict[str, float]:
    """Return the milliseconds of processor time per file of each decoder."""
    contents = [file.read_bytes() for file in sorted(folder.rglob("*.jpg"))[:DISTINCT]]
    seconds: dict[str, list[float]] = {name: [] for name in decoders()}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(repeats):
        for name, decode in decoders().items():
            start = time.process_time()
            for content in contents:
                decode(content)
            seconds[name].append((time.process_time() - start) / len(contents))
    torch.set_num_threads(threads)
    result = {name: 1000 * min(each) for name, each in seconds.items()}
    print("decoding")
    for name, milliseconds in result.items():
        print(f"    {name:36} {milliseconds:7.2f} ms", flush=True)
    return result


def many(workers: int) -> None:
    """Embed many images once."""
    with tempfile.TemporaryDirectory() as name:
        write_images(Path(name), MANY)
        update({"many": {"images": MANY, "size": MANY_SIZE, **embedding(Path(name), workers, 1, MANY_SIZE)}})


def update(result: dict[str, Any]) -> None:
    """Write results, and keep others of the file."""
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**before, **result}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["loading", "embedding", "decoding"], help="make only this comparison")
    parser.add_argument("--workers", type=int, default=max(1, decoding_workers()), help="number of decoding processes")
    parser.add_argument("--images", type=int, default=1024, help="number of images per measurement")
    parser.add_argument("--repeats", type=int, default=5, help="number of measurements")
    parser.add_argument("--quick", action="store_true", help="use few images and write nothing")
    parser.add_argument("--many", action="store_true", help=f"embed {MANY:,} images at {MANY_SIZE} pixels, once")
    arguments = parser.parse_args()
    if arguments.many:
        many(arguments.workers)
        return
    images, repeats = (128, 2) if arguments.quick else (arguments.images, arguments.repeats)
    chosen = [arguments.only] if arguments.only else ["loading", "embedding", "decoding"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result: dict[str, Any] = {"images": images, "workers": arguments.workers, "machine": platform.machine()}
        result["bytes_per_pixel"] = write_images(folder, images)
        print(f"{images} files with {result['bytes_per_pixel']:.2f} bytes per pixel")
        if "loading" in chosen:
            result["loading"] = loading(folder, arguments.workers, repeats)
        if "embedding" in chosen:
            result["embedding"] = embedding(folder, arguments.workers, repeats)
        if "decoding" in chosen:
            result["decoding_ms"] = decoding(folder, repeats)
    if not arguments.quick and not arguments.only:
        update(result)


if __name__ == "__main__":
    main()
