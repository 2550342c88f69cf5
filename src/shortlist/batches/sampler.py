"""Class-balanced batches that depend only on the seed and the epoch, not on the number of processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import index
from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import Sampler

from shortlist.errors import ConfigError
from shortlist.ranking.inputs import check_labels
from shortlist.seeds import derived_seed

RELEASE_ORDERS = 16  # random orders of the classes from which the length of the release's epochs is estimated


class ClassBalancedSampler(Sampler[list[int]]):
    """Batch sampler that yields `batch_size / per_class` classes per batch, with `per_class` different images of each.

    In each epoch, the images of every class are shuffled and divided into groups of `per_class` images, and the groups
    are distributed over the largest possible number of full batches. No image occurs twice in an epoch. The images that
    remain can be drawn again in the next epoch. Classes with fewer than `per_class` images are left out.

    Use it as the `batch_sampler` of a DataLoader. Each iteration yields the batches of one epoch, and the next
    iteration those of the next epoch. An iterator takes its epoch when its first batch is drawn, and `epoch` is then
    incremented. Hence an interrupted iteration counts as an epoch, two simultaneous iterators yield two different
    epochs, and an iterator from which no batch is drawn (DataLoader creates one when it starts workers) does not count.
    To repeat an epoch or to resume from one, call `set_epoch`; `batches(epoch)` does not depend on it.

    Args:
        labels: Class of each image as an integer, of shape (N,).
        batch_size: Number of images per batch, a multiple of `per_class`.
        per_class: Number of images of each class in a batch (4 in the paper).
        seed: Random seed. The batches depend only on the labels and sizes, the seed and the epoch.
        epoch_length: "full" for the largest possible number of batches per epoch; "release" for that of the authors'
            release, which is smaller, for schedules that count its epochs. See `release_epoch_length`.

    Raises:
        TypeError: If an argument does not consist of integers.
        ConfigError: If no such batch can be filled. The message contains the largest possible batch size.

    Example:
        >>> sampler = ClassBalancedSampler([0, 0, 0, 0, 1, 1, 1, 2, 2, 3], batch_size=4, per_class=2)
        >>> print(sampler)
        2 batches per epoch, each of 2 classes x 2 images: 8 of 10 images; 1 of 4 classes left out (fewer than 2 images)
        >>> sampler.batches(epoch=0).shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        labels: Tensor | Sequence[int],
        batch_size: int,
        per_class: int = 4,
        seed: int = 0,
        epoch_length: Literal["full", "release"] = "full",
    ) -> None:
        if epoch_length not in ("full", "release"):
            raise ConfigError(f'`epoch_length` must be "full" or "release", not {epoch_length!r}.')
        names, classes, sizes = torch.unique(_as_labels(labels), return_inverse=True, return_counts=True)
        self.batch_size = _integer("batch_size", batch_size, minimum=1)
        self.per_class = per_class = _integer("per_class", per_class, minimum=1)
        self.seed, self.epoch = _integer("seed", seed), 0
        self.number_of_images, self.number_of_classes = len(classes), len(names)
        self.left_out: list[int] = names[sizes < per_class].tolist()
        self._check(usable=len(names) - len(self.left_out))
        self._classes = classes
        self._groups = sizes // per_class  # number of groups of each class in an epoch
        self._batches = (
            self._largest_number_of_batches() if epoch_length == "full" else self._mean_batches_of_the_release()
        )

    def _check(self, usable: int) -> None:
        largest = usable * self.per_class
        possible = (
            f"The largest batch possible is {largest}: {usable} classes have {self.per_class} images or more"
            f" ({len(self.left_out)} have fewer)."
        )
        if largest == 0:
            raise ConfigError(
                f"No class has {self.per_class} images, so no batch can be filled. Set a smaller `per_class`."
            )
        if self.batch_size % self.per_class:
            raise ConfigError(
                f"`batch_size={self.batch_size}` is not a multiple of `per_class={self.per_class}`. {possible}"
            )
        if self.batch_size > largest:
            raise ConfigError(f"A batch of `batch_size={self.batch_size}` images cannot be filled. {possible}")

    def _largest_number_of_batches(self) -> int:
        """Compute the largest T for which T batches can be filled if each gets at most one group of a class.

        T batches can be filled if and only if the sum of min(groups, T) over the classes is at least T times the
        number of classes per batch. The iteration decreases monotonically to the largest such T.
        """
        classes_per_batch = self.batch_size // self.per_class
        number = int(self._groups.sum()) // classes_per_batch
        while (fewer := int(self._groups.clamp(max=number).sum()) // classes_per_batch) < number:
            number = fewer
        return number

    def _mean_batches_of_the_release(self) -> int:
        """Compute the mean length of the release's epochs, rounded; it does not depend on the seed."""
        random = torch.Generator().manual_seed(derived_seed("orders of the release"))
        orders = (torch.randperm(self.number_of_classes, generator=random) for _ in range(RELEASE_ORDERS))
        lengths = [release_epoch_length(self._groups[order], self.batch_size // self.per_class) for order in orders]
        return round(sum(lengths) / len(lengths))

    def batches(self, epoch: int) -> Tensor:
        """Return the image indices of all batches of an epoch.

        Returns:
            Indices of shape (batches, batch_size). In each batch, the images of a class are adjacent.
        """
        epoch = _integer("epoch", epoch, minimum=0)
        random = torch.Generator().manual_seed(derived_seed("batches", self.seed, epoch))
        new_class = torch.randperm(self.number_of_classes, generator=random)  # number of each class in this epoch
        images = torch.randperm(self.number_of_images, generator=random)
        classes, order = new_class[self._classes[images]].sort(stable=True)
        images = images[order]  # class by class, shuffled within each class

        groups = torch.empty_like(self._groups)
        groups[new_class] = self._groups.clamp(max=self._batches)
        starts = torch.searchsorted(classes, torch.arange(self.number_of_classes))
        position = torch.arange(self.number_of_images) - starts[classes]  # of each image in its class
        grouped = images[position < groups[classes] * self.per_class].view(-1, self.per_class)

        batch = self._deal(groups, random)
        return grouped[: len(batch)][batch.argsort(stable=True)].reshape(self._batches, self.batch_size)

    def _deal(self, groups: Tensor, random: torch.Generator) -> Tensor:
        """Assign a batch to each group, class by class, until all batches are full.

        In each round, every batch gets one group, in random order. No class has more groups than there are batches,
        so a batch could get two groups of the same class only if the class continues from one round into the next. In
        that case, the batches that got its groups in the first round are placed after its remaining groups in the
        second round.

        Args:
            groups: Number of groups of each class, in the order of this epoch.
            random: Random number generator.

        Returns:
            Batch of each group, of shape (batches * classes per batch,).
        """
        ends = groups.cumsum(0)
        rounds: list[Tensor] = []
        for number in range(self.batch_size // self.per_class):
            order = torch.randperm(self._batches, generator=random)
            start = number * self._batches
            current = int(torch.searchsorted(ends, start, right=True))  # class of the first group of this round
            before = start - int(ends[current] - groups[current])  # number of its groups in the previous round
            if before > 0:
                fresh = order[~torch.isin(order, rounds[-1][-before:])][: int(ends[current]) - start]
                order = torch.cat((fresh, order[~torch.isin(order, fresh)]))
            rounds.append(order)
        return torch.cat(rounds)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose batches the next iteration yields."""
        self.epoch = _integer("epoch", epoch, minimum=0)

    def __iter__(self) -> Iterator[list[int]]:
        # A generator, because DataLoader calls iter() twice when it starts workers but draws from one iterator only.
        epoch, self.epoch = self.epoch, self.epoch + 1
        yield from self.batches(epoch).tolist()

    def __len__(self) -> int:
        return self._batches

    def __str__(self) -> str:
        classes = self.batch_size // self.per_class
        batches = "1 batch" if self._batches == 1 else f"{self._batches} batches"
        return (
            f"{batches} per epoch, each of {classes} classes x {self.per_class} images: "
            f"{self._batches * self.batch_size} of {self.number_of_images} images; {len(self.left_out)} of "
            f"{self.number_of_classes} classes left out (fewer than {self.per_class} images)"
        )


def release_epoch_length(groups: Tensor, classes_per_batch: int) -> int:
    """Count the batches in an epoch of the authors' release, for one order of the classes.

    The release shuffles the classes once per epoch. Each batch takes one group of each of the first classes that have
    a group left, and the epoch ends when these are too few for a batch. Most groups of the last classes remain unused.

    Args:
        groups: Number of groups of each class, in the order of the epoch.
        classes_per_batch: Number of classes per batch.

    Example:
        >>> release_epoch_length(torch.tensor([1, 1, 2]), 2), release_epoch_length(torch.tensor([2, 1, 1]), 2)
        (1, 2)
    """
    left, number = groups.clone(), 0
    while len(first := left.nonzero().squeeze(1)[:classes_per_batch]) == classes_per_batch:
        same = int(left[first].min())  # number of batches until one of these classes has no group left
        left[first] -= same
        number += same
    return number


def _as_labels(labels: Tensor | Sequence[int]) -> Tensor:
    try:
        tensor = labels.cpu() if isinstance(labels, Tensor) else torch.tensor(labels)
    except (TypeError, ValueError, RuntimeError) as error:  # strings, lists of different lengths, ...
        raise TypeError(f"`labels` must be integers, one per image: {error}") from None
    if not tensor.numel():
        raise ConfigError("`labels` is empty: pass the class of each image.")
    check_labels(tensor)
    return tensor.long()


def _integer(name: str, value: int, minimum: int | None = None) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"`{name}` must be an integer, not {value!r}")
    if minimum is not None and value < minimum:
        raise ConfigError(f"`{name}` must be at least {minimum}, not {value}.")
    return index(value)
