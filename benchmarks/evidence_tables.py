"""Write the tables and the plot of docs/results.md from the raw results of evidence.py: `make results`.

A table stands between two comments in the page, `<!-- begin NAME -->` and `<!-- end NAME -->`. Runs that have not
been done yet are shown as a dash. docs/results/PLAN.md defines how the verdicts follow from the results.
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import evidence
from evidence import FINETUNED, FINETUNED_STEPS, METHODS, OTHER_LOSSES, REMEDIES, REMOVED_REMEDIES, RESULTS
from scipy.special import stdtrit

from shortlist.report.study_results import PAPER

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"
PLOT = ROOT / "docs" / "images" / "results.png"
BUDGETS = {"images": "Equal images (120,000)", "steps": "Equal steps (1,000)"}
BATCHES = (16, 64, 392)
CHARACTER_BATCHES, STARTS = (16, 64, 256, 1024), ("random weights", "from glyphs")  # of Omniglot
RECIPE = "cars196-lite0-cpu"  # for two cores
FAILED = 2.0  # r@1 in percent: a run with less has learned nothing
OTHERS = "RS@k + SiMix is better than other losses, each at the batch size that is better on validation classes"
SMALL = 0.5  # points: a difference whose whole interval is smaller than this is none
Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # header and rows


# ------------------------------------------------------------------------------------------------------------ results


class Results:
    """r@1 in percent of every cell of a study, by seed, and the learning rate that was chosen.

    Args:
        study: Name of the study.
        phase: "test" for results on test classes, "validation" for a study that compares cells on validation classes.
    """

    def __init__(self, study: str, phase: str = "test") -> None:
        self.runs = evidence.results(study)
        self.tests: dict[str, dict[int, float]] = defaultdict(dict)
        self.rates: dict[str, float] = {}
        self.failed: Counter[str] = Counter()
        self.half_widths: list[float] = []  # of the 95 % interval over queries of each test
        for run in self.runs:
            if run["phase"] == phase:
                self.tests[run["cell"]["name"]][run["seed"]] = 100 * run["r@1"]
                self.rates[run["cell"]["name"]] = run["rate"]
                self.failed[run["cell"]["name"]] += 100 * run["r@1"] < FAILED
                if phase == "test":
                    deviation = (run["r@1"] * (1 - run["r@1"]) / run["test"]["queries"]) ** 0.5
                    self.half_widths.append(100 * 1.96 * deviation)

    def mean(self, cell: str) -> str:
        """Return mean and standard deviation over seeds."""
        return _mean(list(self.tests[cell].values()))

    def mean_training(self, cell: str) -> str:
        """Return the mean r@1 of the training images over seeds."""
        runs = [run for run in self.runs if run["cell"]["name"] == cell and run["phase"] == "test"]
        return f"{statistics.mean(100 * run['training r@1'] for run in runs):.1f}" if runs else "-"

    def validated(self, cell: str) -> float:
        """Return the best r@1 on validation classes over all learning rates."""
        found = [run["r@1"] for run in self.runs if run["phase"] == "validation" and run["cell"]["name"] == cell]
        return max(found, default=-1.0)

    def rate(self, cell: str) -> str:
        return f"{self.rates[cell]:g}" if cell in self.rates else "-"

    def difference(self, first: str, second: str) -> Difference | None:
        """Return first - second, paired by seed; None if fewer than two seeds have both."""
        return self.contrast([first], [second])

    def contrast(self, plus: Sequence[str], minus: Sequence[str]) -> Difference | None:
        """Return the sum of some cells minus the sum of others, by seed; None if fewer than two seeds have all."""
        seeds = set.intersection(*(set(self.tests[name]) for name in (*plus, *minus)))
        if len(seeds) < 2:
            return None
        gaps = [
            sum(self.tests[name][seed] for name in plus) - sum(self.tests[name][seed] for name in minus)
            for seed in sorted(seeds)
        ]
        return Difference(statistics.mean(gaps), half_width(gaps))


def half_width(values: Sequence[float]) -> float:
    """Return half of the width of the 95 % interval of a mean (t distribution)."""
    return float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / len(values) ** 0.5


def _mean(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.1f}" if values else "-"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


@dataclass(frozen=True)
class Difference:
    """Mean of a difference over seeds, and half of the width of its 95 % interval."""

    value: float
    half: float

    def __str__(self) -> str:
        return f"{self.value:+.1f} [{self.value - self.half:+.1f}, {self.value + self.half:+.1f}]"

    def exceeds(self, points: float) -> bool:
        """Whether the difference is larger than this, in either direction, and its interval excludes 0."""
        return abs(self.value) > max(points, self.half)

    def verdict(self) -> str:
        """Judge the claim that the difference is positive."""
        low, high = self.value - self.half, self.value + self.half
        if low > 0:
            return "holds"
        return "does not hold" if high < 0 or max(-low, high) < SMALL else "not decided"


def verdict(differences: Iterable[Difference | None]) -> str:
    """Judge a claim about several cells: it holds in most of them, and the opposite holds in none."""
    known = [each for each in differences if each is not None]
    if not known:
        return "not run"
    holds = sum(each.verdict() == "holds" for each in known)
    opposite = any(each.value + each.half < 0 for each in known)
    if 2 * holds > len(known) and not opposite:
        return "holds"
    fails = sum(each.verdict() == "does not hold" for each in known)
    return "does not hold" if not holds and 2 * fails > len(known) else "not decided"


# ------------------------------------------------------------------------------------------------------------- tables


def summary(frozen: Results, tuned: Results, characters: Results) -> Table:
    """The claims of the paper, its results, and the verdicts of each part of the plan."""
    judged = {(claim, budget): outcome for claim, budget, _, outcome in claims(frozen)[1]}
    settings = {claim: outcome for claim, _, outcome in setting_claims(frozen)[1]}

    def by_budget(claim: str) -> list[str]:
        return [judged[claim, budget] for budget in BUDGETS.values()]

    def by_start(pairs: Sequence[tuple[str, int, str, int]], outcomes: Mapping[str, str]) -> str:
        """Return the verdicts of Omniglot for pairs of a better and a worse method and batch size."""
        found = {}
        for start in STARTS:
            cells = [(f"{better}, batch {a}, {start}", f"{worse}, batch {b}, {start}") for better, a, worse, b in pairs]
            outcome = verdict(characters.difference(*names) for names in cells)
            found[start] = outcomes.get(outcome, outcome)
        return "; ".join(f"{start}: {outcome}" for start, outcome in found.items())

    larger = by_start([("RS@k", 1024, "RS@k", batch) for batch in CHARACTER_BATCHES[:-1]], {})
    mixed = by_start(
        [("RS@k + SiMix", batch, "RS@k", batch) for batch in CHARACTER_BATCHES],
        {"holds": "does not hold", "does not hold": "holds"},  # the claim is that it does not help
    )
    rows = [
        ["Larger batches help", _paper("RS@k"), *by_budget("RS@k: batch 392 is better"), "", larger],
        [
            "SiMix helps on Cars196",
            _paper("RS@k + SiMix", "RS@k"),
            *by_budget("SiMix improves RS@k"),
            verdict([tuned.difference("RS@k + SiMix", "RS@k")]),
            "",
        ],
        [
            "... most at small batches",
            "",
            *by_budget("RS@k + SiMix minus RS@k is larger at 16 than at 392"),
            "",
            "",
        ],
        [
            "SiMix does not help with many classes",
            "512 dimensions: SOP -0.7, VehicleID -0.4, iNaturalist +0.6; 128 dimensions: +0.3, -0.2, +0.3",
            *("", "", "", mixed),
        ],
        [
            "RS@k is better than SAP",
            _paper("RS@k", "SAP"),
            *by_budget("RS@k is better than SAP"),
            verdict([tuned.difference("RS@k", "SAP")]),
            "",
        ],
        ["... most at small batches", "", *by_budget("RS@k minus SAP is larger at 16 than at 392"), "", ""],
        [
            "RS@k + SiMix is better than SAP + SiMix",
            "392: +2.8",
            *by_budget("RS@k + SiMix is better than SAP + SiMix"),
            *("", ""),
        ],
        [
            "RS@k + SiMix is better than other losses",
            "88.2; others at most 86.5 (ProxyNCA++)",
            *(settings[OTHERS], ""),
            f"{verdict([tuned.difference('RS@k + SiMix', 'Multi-Similarity')])} (Multi-Similarity)",
            "",
        ],
        ["Rank temperature 1 is the best", "shown in a figure", settings["Rank temperature 1 is the best"], "", "", ""],
        ["K matters little", "stated in words", settings["K matters little"], "", "", ""],
    ]
    parts = ["frozen, equal images", "frozen, equal steps", "all weights", "Omniglot, equal steps"]
    return ["claim", "the paper's results (ResNet-50, GPU)", *parts], rows


def _paper(method: str, other: str | None = None) -> str:
    """Return the paper's r@1 on Cars196 by batch size, or the difference of two methods."""
    curves = PAPER["batch-size"]["Cars196, ResNet-50"]
    values = {batch: curves[method][str(batch)][0] for batch in BATCHES}
    if other is None:
        return "; ".join(f"{batch}: {value:.1f}" for batch, value in values.items())
    return "; ".join(f"{batch}: {value - curves[other][str(batch)][0]:+.1f}" for batch, value in values.items())


def cell(method: str, batch: int, budget: str) -> str:
    return f"{method}, batch {batch}, equal {budget}"


def grid(found: Results, budget: str) -> Table:
    """r@1 of each method and batch size, with the learning rate that was chosen."""
    rows = [
        [
            method,
            *(
                f"{found.mean(name)} ({found.rate(name)})"
                for batch in BATCHES
                for name in [cell(method, batch, budget)]
            ),
        ]
        for method in METHODS
    ]
    return ["", *(f"batch {batch}" for batch in BATCHES)], rows


def claims(found: Results) -> Table:
    """The claims of the paper about batch sizes, SiMix and SAP, with the differences that decide them."""
    rows = []
    for budget, label in BUDGETS.items():
        for claim, pairs in _claimed(budget):
            gaps = {batch: found.difference(first, second) for batch, first, second in pairs}
            shown = "; ".join(f"{batch}: {gap or '-'}" for batch, gap in gaps.items())
            rows.append([claim, label, shown, verdict(gaps.values())])
        for better, worse in (("RS@k + SiMix", "RS@k"), ("RS@k", "SAP"), ("RS@k + SiMix", "SAP + SiMix")):
            plus = [cell(better, 16, budget), cell(worse, 392, budget)]
            minus = [cell(worse, 16, budget), cell(better, 392, budget)]
            gap = found.contrast(plus, minus)
            claim = f"{better} minus {worse} is larger at 16 than at 392"
            rows.append([claim, label, str(gap or "-"), verdict([gap])])
    return ["claim", "budget", "difference in points, by batch size", "verdict"], rows


def _claimed(budget: str) -> Iterator[tuple[str, list[tuple[int, str, str]]]]:
    """Yield each claim, and for each batch size the cell that is claimed to be better and the other one."""

    def at(batch: int, method: str) -> str:
        return cell(method, batch, budget)

    for method in ("RS@k", "RS@k + SiMix"):
        yield f"{method}: batch 392 is better", [(small, at(392, method), at(small, method)) for small in (16, 64)]
    for base in ("RS@k", "SAP"):
        yield f"SiMix improves {base}", [(batch, at(batch, f"{base} + SiMix"), at(batch, base)) for batch in BATCHES]
    for end in ("", " + SiMix"):
        yield (
            f"RS@k{end} is better than SAP{end}",
            [(batch, at(batch, f"RS@k{end}"), at(batch, f"SAP{end}")) for batch in BATCHES],
        )


def variations(found: Results) -> Table:
    """RS@k at batch 392 with one setting changed."""
    plain, mixed = cell("RS@k", 392, "images"), cell("RS@k + SiMix", 392, "images")
    rows = [["RS@k (K 1 to 16, rank temperature 1)", found.mean(plain), ""]]
    rows.append(["RS@k + SiMix (its K, 1 to 32)", found.mean(mixed), str(found.difference(mixed, plain) or "-")])
    names = [each.name for each in evidence.variations()]
    rows += [[name, found.mean(name), str(found.difference(name, plain) or "-")] for name in names]
    return ["batch 392, equal images", "r@1", "difference from the first row"], rows


def setting_claims(found: Results) -> Table:
    """The claims about rank temperature, K and other losses; docs/results/PLAN.md states what refutes them."""
    plain = cell("RS@k", 392, "images")
    temperatures = {
        value: found.difference(plain, f"RS@k, rank temperature {value}") for value in evidence.TEMPERATURES
    }
    sets = [plain, *(f"RS@k, K {k}" for k in evidence.K_SETS)]
    pairs = {(one, other): found.difference(one, other) for one, other in combinations(sets, 2)}
    (one, other), widest = max(pairs.items(), key=lambda pair: abs(pair[1].value) if pair[1] else -1.0)
    names = {name: name.rpartition("K ")[2] for name in sets} | {plain: "[1, 2, 4, 8, 16]"}
    ours = _better_batch(found, "RS@k + SiMix", ", equal images")
    others = {name: found.difference(ours, _better_batch(found, name)) for name in OTHER_LOSSES}
    rows = [
        ["Rank temperature 1 is the best", _listed(temperatures), _unless_opposite(temperatures.values())],
        [
            "K matters little",
            f"largest: {names[one]} minus {names[other]}: {widest or '-'}",
            _within_a_point(pairs.values()),
        ],
        [
            OTHERS,
            _listed(others),
            _unless_opposite(others.values()),
        ],
    ]
    return ["claim", "differences in points", "verdict"], rows


def _within_a_point(gaps: Iterable[Difference | None]) -> str:
    """Judge the claim that no difference is larger than a point."""
    known = [gap for gap in gaps if gap is not None]
    if not known:
        return "not run"
    if any(gap.exceeds(1) for gap in known):
        return "does not hold"
    return "holds" if all(abs(gap.value) + gap.half <= 1 for gap in known) else "not decided"


def _better_batch(found: Results, method: str, end: str = "") -> str:
    return max((f"{method}, batch {batch}{end}" for batch in (392, 64)), key=found.validated)


def _listed(gaps: Mapping[Any, Difference | None]) -> str:
    return "; ".join(f"{name}: {gap or '-'}" for name, gap in gaps.items())


def _unless_opposite(gaps: Iterable[Difference | None]) -> str:
    """Judge the claim that every difference is positive: one that is negative refutes it."""
    known = [gap for gap in gaps if gap is not None]
    if not known:
        return "not run"
    if any(gap.value + gap.half < 0 for gap in known):
        return "does not hold"
    return "holds" if all(gap.verdict() == "holds" for gap in known) else "not decided"


def losses(found: Results) -> Table:
    """RS@k with SiMix and other losses, with the same head and budget."""
    rows = []
    for batch in (392, 64):
        ours = cell("RS@k + SiMix", batch, "images")
        rows.append([f"RS@k + SiMix, batch {batch}", found.rate(ours), found.mean(ours), ""])
        rows += [
            [
                name.removesuffix(", equal images"),
                found.rate(name),
                found.mean(name),
                str(found.difference(ours, name) or "-"),
            ]
            for name in (*(cell(each, batch, "images") for each in ("RS@k", "SAP", "SAP + SiMix")), *_others(batch))
        ]
    return ["loss", "learning rate", "r@1", "RS@k + SiMix minus this loss"], rows


def _others(batch: int) -> list[str]:
    return [f"{name}, batch {batch}" for name in OTHER_LOSSES]


def finetuned(found: Results) -> Table:
    """All weights trained."""

    def minus(first: str, second: str) -> str:
        return "" if first == second else str(found.difference(first, second) or "-")

    rows = [
        [
            *(name, found.rate(name), found.mean_training(name), found.mean(name)),
            *(minus(name, "RS@k"), minus("RS@k + SiMix", name)),
        ]
        for name in FINETUNED
    ]
    header = [f"all weights, batch 392, {FINETUNED_STEPS} steps", "learning rate", "r@1 of training images", "r@1"]
    return [*header, "this loss minus RS@k", "RS@k + SiMix minus this loss"], rows


def omniglot(found: Results) -> Table:
    """Omniglot, by batch size and initial weights."""
    rows = []
    for start in STARTS:
        for batch in CHARACTER_BATCHES:
            plain, mixed = (f"{method}, batch {batch}, {start}" for method in ("RS@k", "RS@k + SiMix"))
            gap = found.difference(mixed, plain)
            rows.append([start, str(batch), *(_with_failures(found, name) for name in (plain, mixed)), str(gap or "-")])
    return ["start", "batch", "RS@k", "RS@k + SiMix", "gain of SiMix"], rows


def _with_failures(found: Results, cell: str) -> str:
    """Return the mean, and how many runs failed."""
    failed = f" ({found.failed[cell]} of {len(found.tests[cell])} failed)" if found.failed[cell] else ""
    return found.mean(cell) + failed


def remedies(cars: Results, characters: Results) -> Table:
    """Remedies on the validation classes of both data sets, and whether they win on both."""
    rows = []
    for name in (*REMEDIES, *REMOVED_REMEDIES):
        base = "SiMix" if name.startswith("SiMix,") else "none"
        gaps = [] if name == base else [found.difference(name, base) for found in (cars, characters)]
        shown = [str(gap or "-") for gap in gaps] or ["", ""]
        wins = "" if not gaps or None in gaps else "yes" if all(g.verdict() == "holds" for g in gaps if g) else "no"
        rows.append([name, cars.mean(name), shown[0], _with_failures(characters, name), shown[1], wins])
    header = ["remedy", "Cars196, frozen", "difference", "Omniglot, random weights", "difference", "wins on both"]
    return header, rows


# Settings that differ between most trials, or that all of them have; the table names all others.
TUNED_SETTINGS = (
    *("images.size", "images.resize", "batch.size", "batch.chunk_size"),
    *("loss.simix", "training.epochs"),
)


def tuning() -> Table:
    """Settings that were tried for the recipe of two cores, on validation classes."""
    rows = []
    for line in (RESULTS.parent / "tuning.jsonl").read_text(encoding="utf-8").splitlines():
        trial = json.loads(line)
        settings = dict(setting.split("=") for setting in trial["settings"])
        side, recall = settings.get("images.size", "112"), {size: 100 * value for size, value in trial["r@1"].items()}
        best = max(recall, key=recall.__getitem__)
        others = [f"{name}: {value}" for name, value in settings.items() if name not in TUNED_SETTINGS]
        rows.append(
            [
                *(side, settings.get("batch.size", "196"), ", ".join(others), str(trial["steps"])),
                f"{trial['seconds'] / 60:.0f}",
                *(f"{recall[side]:.1f}" if side in recall else "-", best, f"{recall[best]:.1f}"),
            ]
        )
    header = ["training images, pixels", "batch", "other settings", "steps", "minutes"]
    header += ["r@1 at this size", "best size", "r@1"]
    return header, rows


def recipe() -> Table:
    """The tests of the recipe of two cores."""
    names = ("r@1", "r@2", "r@4", "r@8", "mAP@R")
    runs = json.loads((RESULTS.parent / f"{RECIPE}.json").read_text(encoding="utf-8"))["runs"]
    measured = [run["after"][0]["metrics"] for run in runs]
    means = [_mean([100 * metrics[name]["value"] for metrics in measured]) for name in names]
    rows = []
    for run, metrics in zip(runs, measured, strict=True):
        first, *others = ([100 * metrics[name][each] for each in ("value", "low", "high")] for name in names)
        recall = "{:.1f} [{:.1f}, {:.1f}]".format(*first)
        values = [recall, *(f"{other[0]:.1f}" for other in others)]
        rows.append([f"seed {run['seed']}", *values, str(run["cores"]), f"{run['training_minutes']:.0f}"])
    rows.append(["mean", *means, "", ""])
    if len(runs) > 1:
        recalls = [100 * metrics["r@1"]["value"] for metrics in measured]
        mean, half = statistics.mean(recalls), half_width(recalls)
        rows.append(["95 % interval of the mean", f"[{mean - half:.1f}, {mean + half:.1f}]", *[""] * 6])
    return ["", *names, "cores", "minutes of training"], rows


def queries(studies: Mapping[str, Results]) -> Table:
    """Half of the widths of the intervals over queries."""
    rows = [
        [name, str(len(found.half_widths)), f"{min(found.half_widths):.1f} to {max(found.half_widths):.1f}"]
        for name, found in studies.items()
        if found.half_widths
    ]
    return ["runs", "number", "half width"], rows


def tables() -> dict[str, str]:
    """Return the tables of the page in Markdown, by name."""
    frozen, tuned, characters = Results("frozen"), Results("finetune"), Results("omniglot")
    found = {
        "summary": summary(frozen, tuned, characters),
        "frozen grid, equal images": grid(frozen, "images"),
        "frozen grid, equal steps": grid(frozen, "steps"),
        "frozen claims": claims(frozen),
        "frozen variations": variations(frozen),
        "frozen losses": losses(frozen),
        "frozen setting claims": setting_claims(frozen),
        "finetune": finetuned(tuned),
        "omniglot": omniglot(characters),
        "remedies": remedies(Results("remedies-frozen", "validation"), Results("remedies-omniglot", "validation")),
        "tuning": tuning(),
        "recipe": recipe(),
        "queries": queries({"frozen, Cars196": frozen, "all weights, Cars196": tuned, "Omniglot": characters}),
    }
    return {name: _markdown(*table) for name, table in found.items()}


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fill(page: str, contents: dict[str, str]) -> str:
    """Replace the tables of a page.

    Raises:
        ValueError: The page lacks a table, or has one that is not known.
    """
    names = set(re.findall(r"<!-- begin (.+?) -->", page))
    if names != contents.keys():
        raise ValueError(f"the page and the tables differ: {sorted(names ^ contents.keys())}")
    for name, text in contents.items():
        pattern = rf"(<!-- begin {re.escape(name)} -->\n).*?(<!-- end {re.escape(name)} -->)"
        page = re.sub(pattern, lambda match, text=text: f"{match[1]}\n{text}\n\n{match[2]}", page, flags=re.DOTALL)
    return page


# --------------------------------------------------------------------------------------------------------------- plot


Curve = dict[int, tuple[float, float]]  # batch size -> mean and standard deviation over seeds


def curves(found: Results, budget: str) -> dict[str, Curve]:
    """Return r@1 of each method by batch size."""
    tests = {method: {batch: found.tests[cell(method, batch, budget)] for batch in BATCHES} for method in METHODS}
    return {
        method: {
            batch: (statistics.mean(seeds.values()), statistics.stdev(seeds.values()))
            for batch, seeds in by_batch.items()
            if len(seeds) > 1
        }
        for method, by_batch in tests.items()
    }


def digest_of_curves(found: Results) -> str:
    """Return a digest of the plotted results, which is stored in the PNG file."""
    text = json.dumps([curves(found, budget) for budget in BUDGETS])
    return hashlib.sha256(text.encode()).hexdigest()


def draw(found: Results, path: Path) -> None:
    """Draw r@1 against batch size for every method, with the standard deviation over seeds, for both budgets."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    styles = dict(zip(METHODS, (("#0072B2", "--"), ("#0072B2", "-"), ("#D55E00", "--"), ("#D55E00", "-")), strict=True))
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.8), sharey=True, layout="constrained")
    for axis, (budget, label) in zip(axes, BUDGETS.items(), strict=True):
        for method, curve in curves(found, budget).items():
            colour, line = styles[method]
            means, spread = [mean for mean, _ in curve.values()], [deviation for _, deviation in curve.values()]
            positions = [BATCHES.index(batch) for batch in curve]
            axis.errorbar(positions, means, spread, color=colour, linestyle=line, marker="o", capsize=3, label=method)
        axis.set_xticks(range(len(BATCHES)), [str(batch) for batch in BATCHES])
        axis.set_xlabel("batch size")
        axis.set_title(label, loc="left", fontsize=10.5, fontweight="bold")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#ECECEC")
    axes[0].set_ylabel("r@1 on the test classes, %")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=150, metadata={"Software": None, "Comment": digest_of_curves(found)})


def main() -> None:
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), tables()), encoding="utf-8")
    draw(Results("frozen"), PLOT)


if __name__ == "__main__":
    main()
