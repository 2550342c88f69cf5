"""Draw the figures of docs/loss.md with the library itself: `python docs/figures.py [--out docs/images]`."""

from __future__ import annotations

import argparse
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from PIL import Image
from torch import Tensor

from shortlist.ranking import Ranks, RecallAtKLoss, RecallHead, query_scores, ranking_loss

# Okabe and Ito's palette: distinguishable with any colour vision.
BLUE, VERMILLION, GREEN = "#0072B2", "#D55E00", "#009E73"
INK, MUTED, FAINT, PALE = "#222222", "#666666", "#B8B8B8", "#ECECEC"
LOOK = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": PALE,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "lines.linewidth": 2.2,
    "lines.solid_capstyle": "round",
    "savefig.dpi": 150,
    "savefig.facecolor": "white",
}

RANK_TEMPERATURE, SIMILARITY_TEMPERATURE = 1.0, 0.01


# Values to draw: all smooth values and derivatives are computed by the library.


@dataclass(frozen=True)
class SmoothRank:
    """A head that is not a loss: it returns the smooth rank of a query's first positive."""

    def __call__(self, ranks: Ranks) -> Tensor:
        return ranks.overall[:, 0]

    def reach(self, width: float) -> float:
        return math.inf


@dataclass(frozen=True)
class RankedList:
    """The similarities of a query to one positive whose similarity varies, one fixed positive, and the negatives."""

    moving: float
    staying: float = 0.70
    negatives: tuple[float, ...] = (0.64, 0.58, 0.53, 0.47, 0.41, 0.33)

    @property
    def similarities(self) -> Tensor:
        return torch.tensor((self.moving, self.staying, *self.negatives), dtype=torch.float64)

    @property
    def positive(self) -> Tensor:
        return torch.arange(2 + len(self.negatives)) < 2

    @property
    def order(self) -> list[int]:
        """The items, most similar first; item 0 is the moving positive."""
        return self.similarities.argsort(descending=True).tolist()

    def recall(self, k: int) -> float:
        """Exact recall@k."""
        return query_scores(*self._query, k, *self._database).recall_at_k.item()

    def smooth_recall(self, k: int) -> float:
        """rs@k: 1 - the training loss of the query, which is the plain smooth recall because |P| = 2 <= k."""
        loss = RecallAtKLoss(k, RANK_TEMPERATURE, SIMILARITY_TEMPERATURE)
        database, labels = self._database
        return 1 - loss(*self._query, ref_emb=database, ref_labels=labels).item()

    @property
    def _query(self) -> tuple[Tensor, Tensor]:
        return torch.ones(1, 1, dtype=torch.float64), torch.tensor([1])  # in one dimension, an item is its similarity

    @property
    def _database(self) -> tuple[Tensor, Tensor]:
        return self.similarities[:, None], self.positive.long()

    def smooth_rank(self) -> float:
        """Smooth rank of the moving positive."""
        competitors = (self.staying, *self.negatives)
        return smooth_rank(torch.tensor(competitors, dtype=torch.float64) - self.moving).item()


def smooth_rank(differences: Tensor) -> Tensor:
    """Smooth rank of a positive: 1 + the sum of the similarity sigmoids of the differences to its competitors."""
    items = torch.cat((torch.zeros(1, dtype=differences.dtype), differences))[:, None]
    return ranking_loss(
        SmoothRank(),
        torch.ones(1, 1, dtype=differences.dtype),
        torch.tensor([1]),
        similarity_temperature=SIMILARITY_TEMPERATURE,
        ref_emb=items,
        ref_labels=(torch.arange(len(items)) == 0).long(),
    )


def recall_loss(ranks: Tensor, k: Sequence[int]) -> Tensor:
    """Loss of queries that have one positive each, at the given ranks."""
    one = torch.ones(len(ranks), 1, dtype=ranks.dtype)
    head = RecallHead(tuple(k), RANK_TEMPERATURE)
    return head(Ranks(ranks[:, None], one, one.bool(), one[:, 0]))


def with_slope(function: Callable[[Tensor], Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
    """Values of an elementwise function and, by autograd, its derivative."""
    at = at.detach().requires_grad_()
    values = function(at)
    (slope,) = torch.autograd.grad(values.sum(), at)
    return values.detach(), slope


def rank_sigmoid(u: Tensor) -> Tensor:
    """Contribution of a positive at rank k - u to smooth recall."""
    k = 9
    return 1 - recall_loss(k - u, [k])


def similarity_sigmoid(u: Tensor) -> Tensor:
    """Contribution of a competitor to a rank if it is more similar to the query by u."""
    return torch.stack([smooth_rank(difference[None]) for difference in u]) - 1


# Figure 1

K_COLOURS = {2: VERMILLION, 4: BLUE}
FIRST, PITCH, SIDE = 1.02, 0.475, 0.3  # first square of a list, distance and side of squares, in inches
Column = str | tuple[str, int]
COLUMNS: dict[Column, float] = {
    "rank": 5.0,
    "smooth": 5.56,
    ("recall", 2): 6.26,
    ("rs", 2): 6.82,
    ("recall", 4): 7.5,
    ("rs", 4): 8.06,
}


def draw_recall_and_surrogate() -> Figure:
    """A ranked list for growing similarities of one positive, with recall@k and rs@k beside it, and as curves below."""
    rows = dict(zip("ABCDE", map(RankedList, (0.44, 0.465, 0.50, 0.60, 0.67)), strict=True))
    figure = plt.figure(figsize=(8.4, 7.6))
    lists = figure.add_axes((0.0, 0.46, 1.0, 0.54), xlim=(0, 8.4), ylim=(0, 0.54 * 7.6))  # in inches
    lists.axis("off")
    _draw_header(lists)
    before: dict[Column, str] = {}
    for number, (name, ranked) in enumerate(rows.items()):
        y = 3.15 - 0.62 * number
        _draw_items(lists, name, ranked, y)
        before = _draw_values(lists, ranked, y, before)
    curves = figure.add_axes((0.06, 0.135, 0.86, 0.305))
    _draw_curves(curves, rows)
    figure.text(
        0.06,
        0.018,
        "rs@k = sum over the positives of sigmoid(k \N{MINUS SIGN} smooth rank), divided by |P|. Here |P| = 2 ≤ k, "
        "so 1 \N{MINUS SIGN} rs@k is\nthe training loss too: min(k, |P|) = |P|, and the clip at k changes nothing.",
        fontsize=8.5,
        color=MUTED,
        linespacing=1.5,
    )
    return figure


def _draw_header(axes: Axes) -> None:
    """Names of the columns, the cut-offs, and the key."""
    small = {"fontsize": 9, "va": "center"}
    axes.text(0.12, 3.92, "query", color=MUTED, **small)
    axes.text(FIRST - SIDE / 2, 3.92, "database, most similar first", color=MUTED, **small)
    axes.text(5.28, 3.92, "moving positive", color=MUTED, ha="center", **small)
    for column, x in COLUMNS.items():
        axes.text(x, 3.64, column if isinstance(column, str) else column[0], ha="center", **small)
    for k, colour in K_COLOURS.items():
        middle = (COLUMNS["recall", k] + COLUMNS["rs", k]) / 2
        axes.text(middle, 3.92, f"k = {k}", color=colour, weight="bold", ha="center", va="center")
        edge = FIRST + (k - 0.5) * PITCH
        axes.plot((edge, edge), (0.3, 3.53), color=colour, lw=1.2, ls=(0, (4, 3)), zorder=0)
        axes.text(edge, 3.64, f"top {k}", color=colour, ha="center", **small)
    key = {"fontsize": 8.5, "color": MUTED, "va": "center"}
    axes.text(FIRST - SIDE / 2, 0.16, "+ positive    \N{MINUS SIGN} negative    framed: the one that moves", **key)
    axes.text(4.86, 0.16, "bold: changed from the row above", **key)


def _draw_items(axes: Axes, name: str, ranked: RankedList, y: float) -> None:
    """The query and its list as squares (plus: positive, minus: negative), with the similarities below."""
    axes.text(0.12, y, name, weight="bold", fontsize=11, va="center_baseline")
    axes.text(0.54, y, "q", style="italic", fontsize=11, ha="center", va="center_baseline")
    axes.add_patch(plt.Circle((0.54, y), 0.17, fill=False, ec=INK, lw=1.2))
    for place, item in enumerate(ranked.order):
        x, moving, positive = FIRST + place * PITCH, item == 0, bool(ranked.positive[item])
        axes.add_patch(_square(x, y, 0, fc=GREEN if positive else "#E2E2E2", ec="none"))
        if moving:
            axes.add_patch(_square(x, y, 0.045, fill=False, ec=INK, lw=1.6))
        stroke = {"color": "white" if positive else MUTED, "lw": 2, "solid_capstyle": "butt"}
        axes.plot((x - 0.06, x + 0.06), (y, y), **stroke)
        if positive:
            axes.plot((x, x), (y - 0.06, y + 0.06), **stroke)
        value = f"{ranked.similarities[item]:.3f}".removesuffix("0")
        ink, weight = INK if positive else MUTED, "bold" if moving else "normal"
        axes.text(x, y - 0.285, value, fontsize=8, color=ink, weight=weight, ha="center", va="center")


def _square(x: float, y: float, pad: float, **style: object) -> FancyBboxPatch:
    corner = (x - SIDE / 2, y - SIDE / 2)
    return FancyBboxPatch(corner, SIDE, SIDE, boxstyle=f"round,pad={pad},rounding_size={0.06 + pad}", **style)


def _draw_values(axes: Axes, ranked: RankedList, y: float, before: dict[Column, str]) -> dict[Column, str]:
    """Draw the numbers of a row, in bold if they differ from the previous row. Return them for the next row."""
    cells: dict[Column, str] = {"rank": f"{ranked.order.index(0) + 1}", "smooth": f"{ranked.smooth_rank():.2f}"}
    for k in K_COLOURS:
        cells["recall", k] = f"{ranked.recall(k):.2f}"
        cells["rs", k] = f"{ranked.smooth_recall(k):.2f}"
    for column, cell in cells.items():
        changed = before.get(column, cell) != cell
        weight, ink = "bold" if changed else "normal", MUTED if before and not changed else INK
        axes.text(COLUMNS[column], y, cell, ha="center", va="center_baseline", weight=weight, color=ink)
    return cells


def _draw_curves(axes: Axes, rows: dict[str, RankedList]) -> None:
    """recall@k as a step and rs@k as a smooth line against the similarity of the moving positive."""
    similarity = torch.linspace(0.3007, 0.6893, 500, dtype=torch.float64).tolist()
    lists = [RankedList(moving) for moving in similarity]
    axes.set(xlim=(0.30, 0.69), ylim=(0.27, 1.05), yticks=(0.4, 0.6, 0.8, 1.0))
    axes.set_xlabel("similarity of the moving positive (grey lines: the negatives)")
    axes.vlines(lists[0].negatives, 0.27, 1.05, color="#DADADA", lw=1.2, zorder=0)
    beside = {2: 0.70, 4: 0.85}  # height of the name of each step
    for k, colour in K_COLOURS.items():
        exact = [ranked.recall(k) for ranked in lists]
        smooth = [ranked.smooth_recall(k) for ranked in lists]
        lift = 0.006 * (k - 3)  # both steps go from 0.5 to 1, so one line would cover the other
        axes.plot(
            similarity, [value + lift for value in exact], color=colour, lw=1.3, ls=(0, (4, 2)), drawstyle="steps"
        )
        axes.plot(similarity, smooth, color=colour)
        points = [(ranked.moving, ranked.smooth_recall(k)) for ranked in rows.values()]
        axes.scatter(*zip(*points, strict=True), s=34, color=colour, ec="white", lw=1.2, zorder=3)
        axes.text(0.693, smooth[-1], f"rs@{k}", color=colour, weight="bold", va="center")
        axes.text(similarity[exact.index(1.0)] - 0.004, beside[k], f"recall@{k}", color=colour, ha="right", va="center")
    for name, ranked in rows.items():
        axes.text(ranked.moving, 0.315, name, weight="bold", ha="center", va="center", fontsize=9.5)


# Figure 2

RISE = math.log(199)  # sigmoid(RISE) - sigmoid(-RISE) = 0.99


def draw_two_sigmoids() -> Figure:
    """The rank sigmoid and the similarity sigmoid, each above its derivative."""
    figure, panels = plt.subplots(2, 2, figsize=(8.4, 5.4), sharex="col", height_ratios=(1.15, 1))
    figure.subplots_adjust(left=0.065, right=0.98, top=0.89, bottom=0.15, wspace=0.15, hspace=0.15)
    left, right = panels.T
    places = torch.linspace(-8, 8, 401, dtype=torch.float64)
    similarities = torch.linspace(-1, 1, 1001, dtype=torch.float64)
    _draw_sigmoid(left, rank_sigmoid, places, BLUE, RANK_TEMPERATURE)
    _draw_sigmoid(right, similarity_sigmoid, similarities, VERMILLION, SIMILARITY_TEMPERATURE)
    right[1].set_xticks((-1, -0.5, 0, 0.5, 1))
    insets = right[0].inset_axes((0.13, 0.27, 0.33, 0.48)), right[1].inset_axes((0.635, 0.3, 0.33, 0.48))
    _draw_sigmoid(insets, similarity_sigmoid, similarities * 0.08, VERMILLION, SIMILARITY_TEMPERATURE)
    for inset in insets:
        inset.set_xticks((-0.05, 0, 0.05))
        inset.tick_params(labelsize=8)
        inset.set_title("near 0", fontsize=8.5, weight="normal", loc="center", color=MUTED)
    _title(left[0], "Is the positive in the first k?", f"rank sigmoid, temperature {RANK_TEMPERATURE:g}")
    _title(right[0], "Is the rival ahead of it?", f"similarity sigmoid, temperature {SIMILARITY_TEMPERATURE:g}")
    left[0].text(1.9, 0.72, "sigmoid", color=BLUE, weight="bold")
    left[0].text(0.3, 0.1, "step", color=MUTED)
    left[1].text(1.4, 0.19, "derivative", color=BLUE, weight="bold")
    _label(left[1], "u = k \N{MINUS SIGN} rank", RANK_TEMPERATURE)
    _label(right[1], "u = similarity of the rival \N{MINUS SIGN} of the positive", SIMILARITY_TEMPERATURE)
    return figure


def _title(axes: Axes, question: str, answer: str) -> None:
    axes.text(0, 1.13, question, transform=axes.transAxes, weight="bold", fontsize=10.5)
    axes.text(0, 1.045, answer, transform=axes.transAxes, color=MUTED, fontsize=9)


def _label(axes: Axes, argument: str, temperature: float) -> None:
    axes.set_xlabel(argument)
    note = f"shaded: 99 % of the rise, within ±{RISE * temperature:.2g}"
    axes.text(0.5, -0.34, note, transform=axes.transAxes, color=MUTED, fontsize=9, ha="center", va="center")


def _draw_sigmoid(
    panels: Sequence[Axes], sigmoid: Callable[[Tensor], Tensor], u: Tensor, colour: str, temperature: float
) -> None:
    """A sigmoid and the step that it approximates, above its derivative. The shaded part contains 99 % of the rise."""
    above, below = panels
    values, slopes = with_slope(sigmoid, u)
    rise = RISE * temperature
    for axes in panels:
        axes.axvspan(-rise, rise, color=colour, alpha=0.09, lw=0)
        axes.set_xlim(u[0], u[-1])
        axes.grid(visible=False)
    above.plot((u[0], 0, 0, u[-1]), (0, 0, 1, 1), color=MUTED, lw=1.2, ls=(0, (4, 2)))
    above.plot(u, values, color=colour)
    below.plot(u, slopes, color=colour)
    peak = 0.25 / temperature
    above.set(ylim=(-0.04, 1.06), yticks=(0, 0.5, 1))
    below.set(ylim=(-0.04 * peak, 1.1 * peak), yticks=(0, 0.4 * peak, 0.8 * peak))


# Figure 3


def draw_gradient_by_rank() -> Figure:
    """Gradient by the rank of a positive."""
    figure, axes = plt.subplots(figsize=(8.4, 3.9))
    figure.subplots_adjust(left=0.075, right=0.985, top=0.97, bottom=0.135)
    lines = {(1,): (BLUE, 2.2), (2,): (VERMILLION, 2.2), (4,): (GREEN, 2.2), (1, 2, 4): (INK, 2.8)}
    places = {(1,): (1.06, 0.265), (2,): (2.0, 0.265), (4,): (4.0, 0.265), (1, 2, 4): (3.15, 0.505)}
    names = {(1,): "k = 1", (2,): "k = 2", (4,): "k = 4", (1, 2, 4): "K = {1, 2, 4}: the sum of the three"}
    fine = torch.linspace(1, 10, 361, dtype=torch.float64)
    whole = torch.arange(1, 11, dtype=torch.float64)
    for k, (colour, width) in lines.items():
        axes.plot(fine, _gradient(fine, k), color=colour, lw=width)
        axes.scatter(whole, _gradient(whole, k), s=26, color=colour, ec="white", lw=1.0, zorder=3, clip_on=False)
        axes.text(*places[k], names[k], color=colour, weight="bold", ha="left" if len(k) > 1 or k == (1,) else "center")
    axes.set(xlim=(1, 10), ylim=(0, 0.6), xticks=range(1, 11))
    axes.set(xlabel="rank of the positive", ylabel="gradient of the loss by the rank")
    return figure


def _gradient(ranks: Tensor, k: Sequence[int]) -> Tensor:
    """Gradient by the rank, summed over k as in the paper; the loss itself takes the mean over k."""
    _, slope = with_slope(lambda at: len(k) * recall_loss(at, k), ranks)
    return slope


FIGURES: dict[str, Callable[[], Figure]] = {
    "recall-and-surrogate.png": draw_recall_and_surrogate,
    "two-sigmoids.png": draw_two_sigmoids,
    "gradient-by-rank.png": draw_gradient_by_rank,
}


def save(figure: Figure, path: Path) -> None:
    """Write a small PNG. Reproducible: no version or date."""
    pixels = io.BytesIO()
    figure.savefig(pixels, format="png")
    picture = Image.open(pixels).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    picture.save(path, optimize=True, dpi=(150, 150))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images", help="folder for the pictures")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(LOOK):
        for name, draw in FIGURES.items():
            figure = draw()
            save(figure, out / name)
            plt.close(figure)


if __name__ == "__main__":
    main()
