"""The model card of a package: what the model is, what it was trained on, what was measured, and what was not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from shortlist.config import RunConfig
from shortlist.data import BENCHMARKS, Catalog
from shortlist.encoding import Encoder
from shortlist.export.origin import Origin

SHOWN = ("images", "loss", "batch", "optimizer", "schedule", "training")  # parts of a config that name no files


def model_card(encoder: Encoder, origin: Origin, check: Mapping[str, Any], license: str | None) -> str:  # noqa: A002
    """Markdown with a YAML head, as model hubs read it."""
    name = "embedder" if origin.config is None else origin.config.name
    tests: list[dict[str, Any]] = origin.read("evaluation.json") or []
    sections = [
        f"# {_text(name)}",
        _what_it_is(encoder, origin.config),
        _use(encoder, check),
        _data(origin),
        _results(tests, origin.read("evaluation-before.json") or []),
        _limits(tests, origin.catalog),
        _training(origin),
        _licence(encoder, license),
    ]
    head = yaml.safe_dump(_head(name, tests, license), sort_keys=False, allow_unicode=True)
    return f"---\n{head}---\n\n" + "\n\n".join(section.strip() for section in sections if section) + "\n"


def _head(name: str, tests: Sequence[Mapping[str, Any]], license: str | None) -> dict[str, Any]:  # noqa: A002
    head: dict[str, Any] = {
        "license": license or "unknown",
        "library_name": "timm",
        "pipeline_tag": "image-feature-extraction",
        "tags": ["image-retrieval", "metric-learning", "shortlist"],
    }
    if tests:
        head["model-index"] = [{"name": name, "results": [_indexed(test) for test in tests]}]
    return head


def _indexed(test: Mapping[str, Any]) -> dict[str, Any]:
    metrics = [{"type": metric, "value": round(100 * each["value"], 2)} for metric, each in test["metrics"].items()]
    data = {"name": test["data"], "type": test["data"], "split": test["split"]}
    return {"task": {"type": "image-retrieval"}, "dataset": data, "metrics": metrics}


def _what_it_is(encoder: Encoder, config: RunConfig | None) -> str:
    model = encoder.embedder.config
    norm = ", layer norm" if model.layer_norm else ", L2" if model.l2_pooled else ""
    linear = "" if model.dim is None else f", a linear layer to {model.dim} dimensions"
    how = "" if config is None else f" Trained with shortlist, loss `{_text(config.loss.name)}`."
    return (
        f"Maps an image to a unit vector of {encoder.dim} numbers; images of one class are meant to have a large dot "
        f"product. Backbone `{_text(model.backbone)}` of timm, `{model.pooling}` pooling{norm}{linear}, L2.{how}"
    )


def _use(encoder: Encoder, check: Mapping[str, Any]) -> str:
    size = encoder.transform.size
    shape = "of its own shape" if size is None else f"of {size} x {size} pixels"
    return f"""## Use

`load.py` needs timm, torch and Pillow, and nothing else:

```python
from PIL import Image
from load import config, embed, see

pixels = see(Image.open("one.jpg"), config["preprocessing"])  # uint8, {shape}
vectors = embed(pixels[None])  # (1, {encoder.dim})
```

Its vectors were compared with the run's on {_text(check["images"])}: the largest difference of a number is
{check["largest_difference"]:.1g}. Fingerprint of weights and preprocessing: `{encoder.fingerprint}`."""


def _data(origin: Origin) -> str:
    if origin.config is None:
        return "## Training data\n\nNot known: the package was made from a model without its run."
    data, catalog, facts = origin.config.data, origin.catalog, origin.read("facts.json") or {}
    source = _text(data.source if data.source in BENCHMARKS else Path(data.source).name)
    lines = [f"## Training data\n\nSource: `{source}`. Validation: `{_text(str(data.validation))}`."]
    if catalog is None:
        lines.append("Its images were gone or changed when this card was written, so there are no counts.")
    else:
        lines.append("\n".join(_table(("split", "images", "classes"), _counts(catalog))))
    too_small, missing = len(facts.get("classes_too_small", ())), len(facts.get("missing", ()))
    unreadable = len(origin.read("unreadable.json") or ())
    lines.append(
        f"Left out: {too_small} classes with too few images for a batch, {missing} missing and {unreadable} unreadable "
        "images."
    )
    return "\n\n".join(lines)


def _counts(catalog: Catalog) -> Iterable[Sequence[str]]:
    for split in dict.fromkeys(catalog.splits.tolist()):
        part = catalog.split(split)
        yield split or "(none)", f"{len(part):,}", f"{len(part.classes()):,}"


def _results(tests: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> str:
    if not tests:
        return "## Results\n\nNone: the model was not tested."
    parts = ["## Results\n\nIn %, with 95 % intervals from a bootstrap over queries."]
    earlier = {(each["data"], each["split"]): each["metrics"] for each in before}
    for test in tests:
        first = earlier.get((test["data"], test["split"]), {})
        columns = {"before training": first, "paper": test["paper"]}
        shown = [column for column, values in columns.items() if values]
        rows = []
        for metric, each in test["metrics"].items():
            others = {"before training": _percent(first.get(metric)), "paper": str(test["paper"].get(metric, "-"))}
            rows.append((metric, _percent(each), *(others[column] for column in shown)))
        title = f"`{_text(test['data'])}`, {test['split']}, {_text(test['protocol'])}: {test['queries']:,} queries"
        parts.append(f"{title} against {test['gallery']:,} images each.")
        parts.append("\n".join(_table(("metric", "this model", *shown), rows)))
    return "\n\n".join(parts)


def _limits(tests: Sequence[Mapping[str, Any]], catalog: Catalog | None) -> str:
    tested = ", ".join(f"`{_text(test['data'])}`" for test in tests) or "nothing"
    parts = sorted(set(catalog.splits.tolist())) if catalog is not None else []
    unseen = (
        " Its test classes are none of the training's."
        if {"train", "test"} <= set(parts) and not _overlap(catalog)
        else ""
    )
    return f"""## Limits

- Tested on {tested} and on nothing else.{unseen} Images of another kind (other objects, cameras, backgrounds) may be
  found far worse; measure on yours before you rely on it.
- It ranks. A similarity is no probability, and a threshold for "the same" has to be chosen on your own images.
- What is rare in the training images, or not in them, it may confuse. Nothing was measured about people, and it is not
  made to recognise them."""


def _overlap(catalog: Catalog | None) -> bool:
    return catalog is not None and bool(set(catalog.split("train").classes()) & set(catalog.split("test").classes()))


def _training(origin: Origin) -> str:
    if origin.config is None:
        return ""
    settings = origin.config.model_dump(mode="json", exclude_none=True)
    shown = yaml.safe_dump(
        {part: settings[part] for part in SHOWN}, sort_keys=False, allow_unicode=True, default_flow_style=None
    )
    facts = origin.read("facts.json") or {}
    versions = ", ".join(f"{name} {value}" for name, value in facts.get("versions", {}).items() if value)
    began = f" Began {facts['started']}." if "started" in facts else ""
    return f"## Training\n\n{versions}.{began}\n\n```yaml\n{shown}```"


def _licence(encoder: Encoder, license: str | None) -> str:  # noqa: A002
    given = f"`{_text(license)}`." if license else "Unknown: nobody has said."
    first = encoder.embedder.config.pretrained
    weights = "timm's weights" if first is True else "other weights" if first else ""
    from_others = f" Training began from {weights}, whose licence applies as well." if weights else ""
    return f"## Licence of the weights\n\n{given}{from_others}"


def _percent(estimate: Mapping[str, float | None] | None) -> str:
    if not estimate or estimate["value"] is None:
        return "-"
    low, high = estimate.get("low"), estimate.get("high")
    interval = "" if low is None or high is None else f" [{100 * low:.1f}, {100 * high:.1f}]"
    return f"{100 * estimate['value']:.1f}{interval}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]


def _text(value: str) -> str:
    """A name of the user's, which must not end a code span, a table's cell or a line."""
    return re.sub(r"[`|<>\s]+", " ", value).strip()
