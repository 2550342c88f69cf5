"""Embedding in shards: independent jobs each embed a part of a catalog, and the parts are merged."""

from __future__ import annotations

import glob
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from shortlist.data import Catalog, ImageDataset
from shortlist.data.loader import decoding_workers
from shortlist.distributed import current_processes
from shortlist.encoding.embed import (
    NoReadableImageError,
    append_embeddings,
    combined_digest,
    digest,
    embed_to_file,
    network_digest,
)
from shortlist.encoding.encoder import Encoder
from shortlist.encoding.vector_file import NO_FILE, VectorFile, left_out_images, read_note
from shortlist.errors import ConfigError, DataError, shorten_list
from shortlist.files import exclusive_write
from shortlist.locations import absolute_path, join, size_and_mtime
from shortlist.progress import Display, Progress, default_display
from shortlist.search.vectors import StackedVectors, open_vectors

_ROWS = 8_192  # number of rows copied at a time


@dataclass(frozen=True, order=True)
class Shard:
    """One of several jobs that embed a catalog.

    Args:
        index: Its number, from 0.
        number: Number of all shards.
    """

    index: int
    number: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read a shard that is written as I/N.

        Raises:
            ConfigError: The text does not have this form, or I is not one of 0 to N - 1.
        """
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
        if match is None or int(match[1]) >= int(match[2]):
            raise ConfigError(f"`shard` is I/N with I from 0 to N - 1, such as 0/4, 1/4, 2/4 and 3/4; not {text!r}.")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.number}"

    def images(self, number: int, batch_size: int) -> range:
        """Return the indices of its images in a catalog: whole batches, so that vectors equal those of a single job."""
        batches = math.ceil(number / batch_size)
        first, end = (batches * index // self.number * batch_size for index in (self.index, self.index + 1))
        return range(min(first, number), min(end, number))


class IncompletePartsError(DataError):
    """Parts are missing, or do not belong together.

    Args:
        problem: What is wrong.
        shards: Shards to run again.
    """

    def __init__(self, problem: str, shards: Sequence[Shard] = ()) -> None:
        super().__init__(problem, shards)  # both arguments, so that the exception can be pickled
        self.problem, self.shards = problem, tuple(shards)

    def __str__(self) -> str:
        return self.problem


class Parts:
    """The vectors of a catalog in a folder, one file per shard, each with a note of what it contains.

    Args:
        folder: Folder of the files, which may also contain parts of other catalogs.
        encoder: Encoder that computes the vectors.
        catalog: All images.
        dtype: Data type of the vectors.
    """

    def __init__(self, folder: Path | str, encoder: Encoder, catalog: Catalog, dtype: DTypeLike = np.float32) -> None:
        self.folder, self.encoder, self.catalog, self.dtype = Path(folder), encoder, catalog, np.dtype(dtype)

    def embed(
        self, shard: Shard, *, on_missing: str = "skip", workers: int | None = None, progress: Progress | None = None
    ) -> Path:
        """Embed the images of a shard. A complete part is kept, and an interrupted one is resumed.

        Args:
            shard: The shard.
            on_missing: What to do with images that cannot be read: "skip" leaves them out, "error" raises an error.
            workers: See `embed_images`.
            progress: Called with the number of images done and their total number.

        Returns:
            Path of the part.

        Raises:
            DataError: An image cannot be read and `on_missing` is "error".
            RunError: Another process is working on the same shard.
            NonFiniteError: The embeddings are not finite.
        """
        file = self._file(shard)
        if not file.done:
            dataset = ImageDataset(self._images(shard), self.encoder.transform)
            with exclusive_write(file.path), file:
                batch_size = self.encoder.batch_size
                append_embeddings(self.encoder.network, dataset, file, on_missing, batch_size, workers, progress)
                file.finish()
        return file.path

    def copy(self, path: Path, images: Sequence[int], progress: Progress | None = None) -> Path:
        """Write the vectors of images of the catalog to the file that `embed_to_file` would write for them.

        Args:
            path: Path of the file.
            images: Indices of the images.
            progress: Called with the number of images done and their total number.

        Raises:
            IncompletePartsError: A part is missing, or the parts were not made by this encoder from this catalog.
            NoReadableImageError: None of the images can be read.
        """
        encoder, chosen = self.encoder, self.catalog.subset(images)
        file = VectorFile(path, digest(encoder.network, chosen, encoder.transform, self.dtype), self.dtype)
        if file.done:
            return path
        with exclusive_write(path), file:
            for start in range(file.note.seen, len(images), _ROWS):
                indices = np.asarray(images[start : start + _ROWS])
                rows = self._rows[indices]
                paths = [str(self.catalog.file(index)) for index in indices[rows < 0].tolist()]
                file.leave_out({path: self._left_out[path] for path in paths})
                file.append(self._vectors[rows[rows >= 0]], start + len(indices))
                if progress is not None:
                    progress(file.note.seen, len(images))
            if not file.note.rows:
                raise NoReadableImageError(self.catalog.name, file.note.left_out)
            file.finish()
        return path

    def remove(self) -> None:
        """Delete the parts of this catalog, and the folder if it is then empty."""
        for file in [path for _, path in self._found()]:
            for each in (file, file.with_name(f"{file.name}.json"), file.with_name(f".{file.name}.lock")):
                each.unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()

    @cached_property
    def _network(self) -> str:
        return network_digest(self.encoder.network, self.encoder.transform, self.dtype)

    @cached_property
    def _facts(self) -> dict[str, Any]:
        """Facts that are the same in all parts."""
        return {"catalog": self.catalog.fingerprint(), "network": self._network}

    def _images(self, shard: Shard) -> Catalog:
        return self.catalog.subset(shard.images(len(self.catalog), self.encoder.batch_size))

    def _file(self, shard: Shard) -> VectorFile:
        path = self.folder / f"{self.catalog.name}.{shard.index}-of-{shard.number}.npy"
        facts = {"shard": [shard.index, shard.number], **self._facts}
        return VectorFile(path, combined_digest(self._network, self._images(shard)), self.dtype, facts)

    def _found(self) -> Iterator[tuple[Shard, Path]]:
        """Yield all complete parts of catalogs with this name."""
        for note in sorted(self.folder.glob(f"{glob.escape(self.catalog.name)}.*.npy.json")):
            path = note.with_suffix("")
            if path.is_file() and (shard := read_note(path).shard):
                yield Shard(*shard), path

    @cached_property
    def _parts(self) -> dict[Shard, VectorFile]:
        """All parts in the order of the catalog, after a check that they contain every image once."""
        paths: dict[Shard, Path] = {}
        for shard, path in self._found():
            if shard in paths:
                raise IncompletePartsError(f"Shard {shard} exists twice, as {paths[shard]} and {path}: delete one.")
            paths[shard] = path
        numbers = sorted({shard.number for shard in paths})
        if len(numbers) != 1:
            problem = f"has no complete part of {self.catalog.name}: run its shards first, with `shard`"
            if numbers:
                counts = " and ".join(map(str, numbers))
                problem = f"has parts of {self.catalog.name} for {counts} shards: delete those of one number"
            raise IncompletePartsError(f"{self.folder} {problem}")
        files = {shard: self._file(shard) for shard in (Shard(index, numbers[0]) for index in range(numbers[0]))}
        problems = {shard: found for shard, file in files.items() if (found := self._problem(file))}
        if problems:
            details = shorten_list([f"shard {shard} {problem}" for shard, problem in problems.items()])
            raise IncompletePartsError(f"{self.folder} is not complete: {details}.", sorted(problems))
        return files

    def _problem(self, file: VectorFile) -> str | None:
        note = read_note(file.path)
        if not note.digest or not file.path.is_file():
            return "is missing or not finished"
        if note.network != self._facts["network"]:
            return "has vectors of another model"
        if note.catalog != self._facts["catalog"]:
            return "was made from another list of images"
        return None if file.done else "is damaged, or its images have changed since"

    @cached_property
    def _vectors(self) -> StackedVectors:
        vectors = [open_vectors(file.path) for file in self._parts.values() if read_note(file.path).rows]
        return StackedVectors(vectors, self.encoder.dim)

    @cached_property
    def _left_out(self) -> dict[str, str]:
        """Images that cannot be read, and the reasons."""
        notes = [read_note(file.path) for file in self._parts.values()]
        return {path: reason for note in notes for path, reason in note.left_out.items()}

    @cached_property
    def _rows(self) -> NDArray[np.int64]:
        """Row of each image of the catalog in the concatenated parts, or -1 if it cannot be read (n,)."""
        readable = np.ones(len(self.catalog), dtype=bool)
        for shard, file in self._parts.items():
            images, note = shard.images(len(self.catalog), self.encoder.batch_size), read_note(file.path)
            if note.left_out:
                readable[images] = [str(self.catalog.file(index)) not in note.left_out for index in images]
            if readable[images].sum() != note.rows:
                raise DataError(f"{file.path}: an image with several boxes can be read for only some of them.")
        return np.where(readable, np.cumsum(readable) - 1, -1)


@dataclass(frozen=True)
class EmbeddedShard:
    """Result of `embed_shard`.

    Args:
        part: Path of the part.
        embedded: Number of images in the part.
        unreadable: Paths of images that cannot be read, and the reasons.
    """

    part: str
    embedded: int
    unreadable: dict[str, str]


def embed_shard(
    encoder: Encoder,
    catalog: Catalog,
    shard: Shard,
    folder: Path | str,
    *,
    workers: int | None = None,
    display: Display | None = None,
) -> EmbeddedShard:
    """Embed the images of a shard, and write a part; see `Parts.embed`.

    Args:
        encoder: Encoder that computes the vectors.
        catalog: All images.
        shard: The shard.
        folder: Folder of the parts.
        workers: Number of processes that decode images. Default: chosen by the number of cores and images.
        display: Shows the progress.
    """
    if workers is None:
        workers = decoding_workers(len(catalog) // shard.number, current_processes().on_this_machine)
    with (display or default_display()).task(f"embedding {catalog.name}, shard {shard}", "images") as progress:
        path = Parts(folder, encoder, catalog).embed(shard, workers=workers, progress=progress)
    note = read_note(path)
    return EmbeddedShard(str(path), note.rows, note.left_out)


def choose_parts(
    shard: str | None, merge: bool, parts: Path | None, default: Path | None
) -> tuple[Shard | None, Path, Path | None]:
    """Return the shard to embed, the folder for its part, and the same folder if the parts are to be merged.

    Args:
        shard: Shard to embed, written as I/N. None: all images are embedded, or the parts are merged.
        merge: Whether to merge the parts.
        parts: Folder of the parts.
        default: Default of `parts`. None: `parts` is required.

    Raises:
        ConfigError: The arguments cannot be combined, or `parts` is missing.
    """
    if shard is not None and merge:
        raise ConfigError("`shard` embeds one part, and `merge` uses all of them: give one of the two options.")
    chosen = None if shard is None else Shard.parse(shard)
    if parts is not None and chosen is None and not merge:
        raise ConfigError("`parts` is for `shard` and `merge`.")
    if parts is None and default is None and (merge or chosen):
        raise ConfigError("A Milvus collection has no folder: give `parts`, a folder for the parts of all shards.")
    folder = parts or default or Path()
    return chosen, folder, folder if merge else None


def encode_to_file(
    encoder: Encoder,
    catalog: Catalog,
    path: Path,
    *,
    images: Sequence[int] | None = None,
    dtype: DTypeLike = np.float32,
    on_missing: str = "skip",
    workers: int | None = None,
    progress: Progress | None = None,
    parts: Parts | None = None,
) -> Path:
    """Call `embed_to_file` with an encoder's settings, or copy the vectors from parts.

    Only the images with the indices `images` are embedded. `parts` contains the vectors of the whole catalog, with the
    same encoder and data type. See `embed_to_file` for the other arguments.
    """
    if parts is not None:
        return parts.copy(path, range(len(catalog)) if images is None else images, progress)
    return embed_to_file(
        encoder.network,
        catalog if images is None else catalog.subset(images),
        encoder.transform,
        path,
        dtype=dtype,
        on_missing=on_missing,
        batch_size=encoder.batch_size,
        workers=workers,
        progress=progress,
    )


def encode_readable(
    encoder: Encoder, catalog: Catalog, path: Path, images: Sequence[int], unreadable: dict[str, str], **settings: Any
) -> NDArray[np.float32]:
    """Embed images to a file, and return the vectors of those that can be read, (n, d).

    Args:
        encoder: Encoder that computes the vectors.
        catalog: Catalog of the images.
        path: Path of the file.
        images: Indices of the images in the catalog.
        unreadable: Gets the absolute paths of the other images, and the reasons.
        **settings: Further arguments of `encode_to_file`.
    """
    vectors = np.empty((0, encoder.dim), dtype=np.float32)
    if images:
        try:
            vectors = open_vectors(encode_to_file(encoder, catalog, path, images=images, **settings))
            left_out = left_out_images(path)
        except NoReadableImageError as error:
            left_out = error.left_out
        unreadable |= dict(sorted((absolute_path(image), reason) for image, reason in left_out.items()))
    return vectors


def existing_files(catalog: Catalog, unreadable: dict[str, str]) -> Iterator[tuple[int, str, tuple[int, int]]]:
    """Yield the index, absolute path, and size and modification time of each image of a catalog.

    Args:
        catalog: The images.
        unreadable: Gets the absolute paths of the images whose files do not exist, and the reason.
    """
    unreadable |= {absolute_path(join(catalog.root, path)): NO_FILE for path in catalog.missing}
    for index in range(len(catalog)):
        path = absolute_path(catalog.file(index))
        stamp = size_and_mtime(Path(path))
        if stamp is None:
            unreadable[path] = NO_FILE
        else:
            yield index, path, stamp
