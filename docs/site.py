"""Hooks of mkdocs: pages of the site that are generated, and links to files outside docs/.

The home page is the README, the API reference has one page per package, and the table of recipes is read from the
recipes themselves. Results in benchmarks/results that a page links to are copied into the site.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import shortlist

ROOT = Path(__file__).parents[1]
PACKAGES = (
    *("ranking", "batches", "distributed", "data", "model", "encoding", "search", "evaluation", "gallery"),
    *("runs", "config", "recipes", "training", "report", "export", "serve", "progress", "errors"),
    "pytorch_metric_learning",
)
MODULES = {  # on the pages of their packages, which do not export these names: most of them need an extra
    "data.benchmarks.glyphs": ("glyphs",),
    "encoding.parquet": ("EmbedResult", "embed_to_table"),
    "evaluation.torchmetrics_metric": ("RetrievalMetrics",),
    "report.contact_sheet": ("draw_hits",),
    "report.study_results": ("draw", "read_results", "table"),
    "training.metric_learning": ("REFUSED_LOSSES",),
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {
        "index.md": _read("README.md").replace("](docs/", "]("),
        "generated/changelog.md": _read("CHANGELOG.md"),
        "generated/contributing.md": _read("CONTRIBUTING.md"),
        "generated/security.md": _read("SECURITY.md").replace("](docs/", "](../"),
        "generated/recipes.md": _recipes(),
        "api/index.md": _api_overview(),
        **{f"api/{name}.md": _api_page(name) for name in PACKAGES},
    }
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    for result in sorted((ROOT / "benchmarks" / "results").glob("*.*")):
        files.append(File.generated(config, f"benchmarks/results/{result.name}", content=result.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return markdown.replace("](../benchmarks/results/", "](benchmarks/results/")


def _read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _api_overview() -> str:
    lines = ["# API reference", "", "| package | |", "|---|---|"]
    lines += [f"| [`shortlist.{name}`]({name}.md) | {_summary(name)} |" for name in PACKAGES]
    lines += ["", "The most common names can be imported from `shortlist` itself:", ""]
    lines += [f"- `{name}`" for name in shortlist.__all__ if not name.startswith("__")]
    return "\n".join([*lines, ""])


def _api_page(name: str) -> str:
    lines = [f"# shortlist.{name}", "", f"::: shortlist.{name}", ""]
    for module, members in MODULES.items():
        if module.startswith(f"{name}."):
            options = ["    options:", "      heading_level: 3", f"      members: [{', '.join(members)}]"]
            lines += [f"## shortlist.{module}", "", f"::: shortlist.{module}", *options, ""]
    return "\n".join(lines)


def _summary(name: str) -> str:
    """The first line of the docstring of a package or module, which is not imported."""
    file = ROOT / "src" / "shortlist" / f"{name}.py"
    tree = ast.parse((file if file.exists() else file.with_suffix("") / "__init__.py").read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").split("\n")[0]


def _recipes() -> str:
    from shortlist.recipes import describe_recipes

    lines = [
        "# All recipes",
        "",
        "The first figure of each test, as the paper reports it and as measured with this code.",
    ]
    lines += ["", "| recipe | about | paper | measured |", "|---|---|---|---|"]
    for recipe in describe_recipes():
        about = re.sub(r"\s+", " ", recipe["about"]).replace("|", "\\|")
        figures = (_figures(recipe.get(kind) or {}) for kind in ("paper", "measured"))
        lines.append(f"| `{recipe['name']}` | {about} | {' | '.join(figures)} |")
    return "\n".join(lines) + "\n"


def _figures(tests: dict[str, dict[str, float]]) -> str:
    first = ((test, *next(iter(figures.items()))) for test, figures in tests.items() if figures)
    return "; ".join(f"{test} {metric} {value}" for test, metric, value in first)
