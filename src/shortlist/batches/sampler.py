"""Class-balanced batches: the same for the same seed and epoch, on any number of processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import index

import torch
from torch import Tensor
from torch.utils.data import Sampler

from shortlist.errors import ConfigError
from shortlist.ranking.inputs import check_labels
from shortlist.seeds import derived_seed


class ClassBalancedSampler(Sampler[list[int]]):
    """Batches of `batch_size / per_class` classes with `per_class` different images of each.

    An epoch deals every class into groups of `per_class` images, shuffled, and spreads the groups over as many full
    batches as can be made of them. No image occurs twice per epoch; what is left over waits for the next epoch's
    shuffle. Classes with fewer than `per_class` images are left out.

    Serves as the `batch_sampler` of a DataLoader. Each iteration yields the batches of one epoch, and the next
    iteration those of the next epoch. An iterator takes its epoch when its first batch is drawn, and `epoch` is then
    advanced by one. Hence an iteration that is broken off counts as an epoch, two iterators at a time yield two
    different epochs, and an iterator that is never drawn from (DataLoader makes one when it starts workers) counts as
    nothing. To repeat an epoch or to resume from one, call `set_epoch`; `batches(epoch)` does not depend on it.

    Args:
        labels: the class of each image, any integers, (N,).
        batch_size: images per batch, a multiple of `per_class`.
        per_class: images of each class in a batch (the paper: 4).
        seed: with the epoch, all that the batches depend on.

    Raises:
        TypeError: an argument is not made of integers.
        ConfigError: no such batch can be filled; names the largest that can.

    >>> sampler = ClassBalancedSampler([0, 0, 0, 0, 1, 1, 1, 2, 2, 3], batch_size=4, per_class=2)
    >>> print(sampler)
    2 batches an epoch, each of 2 classes x 2 images: 8 of 10 images; 1 of 4 classes left out (fewer than 2 images)
    >>> sampler.batches(epoch=0).shape
    torch.Size([2, 4])
    """

    def __init__(self, labels: Tensor | Sequence[int], batch_size: int, per_class: int = 4, seed: int = 0) -> None:
        names, classes, sizes = torch.unique(_as_labels(labels), return_inverse=True, return_counts=True)
        self.batch_size = _integer("batch_size", batch_size, least=1)
        self.per_class = per_class = _integer("per_class", per_class, least=1)
        self.seed, self.epoch = _integer("seed", seed), 0
        self.number_of_images, self.number_of_classes = len(classes), len(names)
        self.left_out: list[int] = names[sizes < per_class].tolist()
        self._check(usable=len(names) - len(self.left_out))
        self._classes = classes
        self._groups = sizes // per_class  # of each class, in an epoch
        self._batches = self._most_batches()

    def _check(self, usable: int) -> None:
        largest = usable * self.per_class
        possible = (
            f"The largest batch possible is {largest}: {usable} classes have {self.per_class} images or more"
            f" ({len(self.left_out)} have fewer)."
        )
        if largest == 0:
            raise ConfigError(
                f"No class has {self.per_class} images, so no batch can be made. Set a smaller `per_class`."
            )
        if self.batch_size % self.per_class:
            raise ConfigError(
                f"`batch_size={self.batch_size}` is not a multiple of `per_class={self.per_class}`. {possible}"
            )
        if self.batch_size > largest:
            raise ConfigError(f"A batch of `batch_size={self.batch_size}` images cannot be filled. {possible}")

    def _most_batches(self) -> int:
        """The largest T for which T batches can be filled when a class gives at most one group to each.

        T batches can be filled if and only if the sum of min(groups, T) over the classes is at least T times the
        classes of a batch. The iteration falls from above and stops at the largest such T.
        """
        classes_per_batch = self.batch_size // self.per_class
        number = int(self._groups.sum()) // classes_per_batch
        while (fewer := int(self._groups.clamp(max=number).sum()) // classes_per_batch) < number:
            number = fewer
        return number

    def batches(self, epoch: int) -> Tensor:
        """Indices of the images of every batch of an epoch, (batches, batch_size); images of a class lie together."""
        epoch = _integer("epoch", epoch, least=0)
        random = torch.Generator().manual_seed(derived_seed("batches", self.seed, epoch))
        place = torch.randperm(self.number_of_classes, generator=random)  # of each class in this epoch's order
        images = torch.randperm(self.number_of_images, generator=random)
        places, order = place[self._classes[images]].sort(stable=True)
        images = images[order]  # class by class, shuffled within

        groups = torch.empty_like(self._groups)
        groups[place] = self._groups.clamp(max=self._batches)
        starts = torch.searchsorted(places, torch.arange(self.number_of_classes))
        position = torch.arange(self.number_of_images) - starts[places]
        dealt = images[position < groups[places] * self.per_class].view(-1, self.per_class)

        batch = self._deal(groups, random)
        return dealt[: len(batch)][batch.argsort(stable=True)].reshape(self._batches, self.batch_size)

    def _deal(self, groups: Tensor, random: torch.Generator) -> Tensor:
        """The batch that each group goes to, class by class, until all are full; (batches x classes a batch,).

        In each round every batch gets one group, in a random order. A class has at most as many groups as there are
        batches, so it gives no batch two, except where it goes on from one round to the next: then the batches that
        got the last groups of a round wait until the class has no more.
        """
        ends = groups.cumsum(0)
        rounds: list[Tensor] = []
        for number in range(self.batch_size // self.per_class):
            order = torch.randperm(self._batches, generator=random)
            start = number * self._batches
            last = int(torch.searchsorted(ends, start, right=True))  # the class whose turn it is
            before = start - int(ends[last] - groups[last])  # of its groups, in the round before
            if before > 0:
                fresh = order[~torch.isin(order, rounds[-1][-before:])][: int(ends[last]) - start]
                order = torch.cat((fresh, order[~torch.isin(order, fresh)]))
            rounds.append(order)
        return torch.cat(rounds)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose batches the next iteration yields."""
        self.epoch = _integer("epoch", epoch, least=0)

    def __iter__(self) -> Iterator[list[int]]:
        # A generator: DataLoader calls iter() twice when it starts workers, and draws batches from one of the two only.
        epoch, self.epoch = self.epoch, self.epoch + 1
        yield from self.batches(epoch).tolist()

    def __len__(self) -> int:
        return self._batches

    def __str__(self) -> str:
        classes = self.batch_size // self.per_class
        return (
            f"{self._batches} batches an epoch, each of {classes} classes x {self.per_class} images: "
            f"{self._batches * self.batch_size} of {self.number_of_images} images; {len(self.left_out)} of "
            f"{self.number_of_classes} classes left out (fewer than {self.per_class} images)"
        )


def _as_labels(labels: Tensor | Sequence[int]) -> Tensor:
    try:
        found = torch.as_tensor(labels).cpu()
    except (TypeError, ValueError, RuntimeError) as error:  # strings, lists of different lengths, ...
        raise TypeError(f"`labels` must be integers, one per image: {error}") from None
    if not found.numel():
        raise ConfigError("`labels` is empty: give the class of each image.")
    check_labels(found)
    return found.long()


def _integer(name: str, value: int, least: int | None = None) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"`{name}` must be an integer, not {value!r}")
    if least is not None and value < least:
        raise ConfigError(f"`{name}` must be at least {least}, not {value}.")
    return index(value)
