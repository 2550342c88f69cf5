"""The model card of a package: the model, its training data, results, limitations and settings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from shortlist.config import RunConfig
from shortlist.data import BENCHMARKS, Catalog
from shortlist.encoding import Encoder
from shortlist.evaluation import Estimate, Evaluation
from shortlist.export.source import ExportSource
from shortlist.training.baseline import baseline_name

CONFIG_SECTIONS = ("images", "loss", "batch", "optimizer", "schedule", "training")  # those without file names


def model_card(encoder: Encoder, source: ExportSource, check: Mapping[str, Any], license: str | None) -> str:  # noqa: A002
    """Return the card: Markdown with the YAML metadata that model hubs read."""
    name = source.name
    tests = source.evaluations()
    sections = [
        f"# {_text(name)}",
        _summary(encoder, source.config),
        _usage(encoder, check),
        _data(source),
        _results(tests, source.evaluations(before=True)),
        _limitations(tests, source.catalog),
        _training(source),
        _license(encoder, license),
    ]
    head = yaml.safe_dump(_metadata(name, tests, license), sort_keys=False, allow_unicode=True)
    return f"---\n{head}---\n\n" + "\n\n".join(section.strip() for section in sections if section) + "\n"


def _metadata(name: str, tests: Sequence[Evaluation], license: str | None) -> dict[str, Any]:  # noqa: A002
    metadata: dict[str, Any] = {
        "license": license or "unknown",
        "library_name": "timm",
        "pipeline_tag": "image-feature-extraction",
        "tags": ["image-retrieval", "metric-learning", "shortlist"],
    }
    if tests:
        metadata["model-index"] = [{"name": name, "results": [_index_entry(test) for test in tests]}]
    return metadata


def _index_entry(test: Evaluation) -> dict[str, Any]:
    metrics = [{"type": metric, "value": round(100 * value, 2)} for metric, value in test.values.items()]
    data = {"name": test.data, "type": test.data, "split": test.split}
    return {"task": {"type": "image-retrieval"}, "dataset": data, "metrics": metrics}


def _summary(encoder: Encoder, config: RunConfig | None) -> str:
    model = encoder.embedder.config
    norm = ", layer norm" if model.layer_norm else ", L2 normalisation" if model.l2_pooled else ""
    linear = "" if model.dim is None else f", linear layer to {model.dim} dimensions"
    how = "" if config is None else f" Trained with shortlist and the loss `{_text(config.loss.name)}`."
    trained = "" if config is None else "; images of the same class are trained to have a large dot product"
    return (
        f"Maps an image to a unit vector of {encoder.dim} dimensions{trained}. timm backbone "
        f"`{_text(model.backbone)}`, `{model.pooling}` pooling{norm}{linear}, L2 normalisation.{how}"
    )


def _usage(encoder: Encoder, check: Mapping[str, Any]) -> str:
    size = encoder.transform.size
    shape = "keeps its shape" if size is None else f"{size} x {size} pixels"
    return f"""## Usage

`load.py` needs only timm, torch and Pillow:

```python
from PIL import Image
from load import config, embed, formats, preprocess

image = Image.open("one.jpg", formats=formats)  # for other formats, such as EPS, Pillow would start external programs
pixels = preprocess(image, config["preprocessing"])  # uint8, {shape}
vectors = embed(pixels[None])  # (1, {encoder.dim})
```

Its vectors were compared with those of the run on {_text(check["images"])}: the largest difference of a component is
{check["largest_difference"]:.1g}. Fingerprint of weights and preprocessing: `{encoder.fingerprint}`."""


def _data(source: ExportSource) -> str:
    if source.config is None:
        return "## Training data\n\nUnknown: the package was exported from a saved model without its run."
    data, catalog, facts = source.config.data, source.catalog, source.facts()
    name = _text(data.source if data.source in BENCHMARKS else Path(data.source).name)
    lines = [f"## Training data\n\nSource: `{name}`. Validation: `{_text(str(data.validation))}`."]
    if catalog is None:
        lines.append("The images were missing or had changed when this card was written, so there are no counts.")
    else:
        lines.append("\n".join(_table(("split", "images", "classes"), _counts(catalog))))
    too_small, missing = len(facts.get("classes_too_small", ())), len(facts.get("missing", ()))
    unreadable = source.unreadable()
    lines.append(
        f"Excluded: {too_small} classes with too few images for a batch, {missing} missing and {unreadable} unreadable "
        "images."
    )
    return "\n\n".join(lines)


def _counts(catalog: Catalog) -> Iterable[Sequence[str]]:
    for split in dict.fromkeys(catalog.splits.tolist()):
        part = catalog.split(split)
        yield split or "(none)", f"{len(part):,}", f"{len(part.classes()):,}"


def _results(tests: Sequence[Evaluation], before: Sequence[Evaluation]) -> str:
    if not tests:
        return "## Results\n\nNone: the model was not evaluated."
    parts = ["## Results\n\nIn %, with 95 % confidence intervals from a bootstrap over queries."]
    baseline = baseline_name([remark for each in before for remark in each.remarks])
    earlier = {(each.data, each.split): each.metrics for each in before}
    for test in tests:
        others: dict[str, Mapping[str, Estimate | float]] = {
            baseline: earlier.get((test.data, test.split), {}),
            "paper": test.paper,
        }
        columns = {"this model": test.metrics, **{name: values for name, values in others.items() if values}}
        rows = [(metric, *(str(values.get(metric, "-")) for values in columns.values())) for metric in test.metrics]
        title = f"`{_text(test.data)}`, {test.split}, {_text(test.protocol)}: {test.queries:,} queries"
        parts.append(f"{title} against {test.gallery:,} images each.")
        parts.append("\n".join(_table(("metric", *columns), rows)))
    return "\n\n".join(parts)


def _limitations(tests: Sequence[Evaluation], catalog: Catalog | None) -> str:
    tested = ", ".join(f"`{_text(test.data)}`" for test in tests) or "nothing"
    unseen = " None of the test classes were used for training." if _tests_other_classes(catalog) else ""
    return f"""## Limitations

- Tested only on {tested}.{unseen} Results on images of another kind (other objects, cameras, backgrounds) may be far
  worse; evaluate the model on your own images before you rely on it.
- The model ranks images. A similarity is not a probability; choose any decision threshold on your own images.
- Objects that are rare or absent in the training images may be confused. The model was not evaluated on images of
  people and is not intended to recognise them."""


def _tests_other_classes(catalog: Catalog | None) -> bool:
    """Return whether there are training and test images, and no class has both."""
    if catalog is None or not {"train", "test"} <= set(catalog.splits.tolist()):
        return False
    return set(catalog.split("train").classes()).isdisjoint(catalog.split("test").classes())


def _training(source: ExportSource) -> str:
    if source.config is None:
        return ""
    settings = source.config.model_dump(mode="json", include=set(CONFIG_SECTIONS), exclude_none=True)
    ordered = {section: settings[section] for section in CONFIG_SECTIONS}
    shown = yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True, default_flow_style=None)
    facts = source.facts()
    versions = ", ".join(f"{name} {value}" for name, value in facts.get("versions", {}).items() if value)
    started = f" Started {facts['started']}." if "started" in facts else ""
    return f"## Training\n\n{versions}.{started}\n\n```yaml\n{shown}```"


def _license(encoder: Encoder, license: str | None) -> str:  # noqa: A002
    stated = f"`{_text(license)}`." if license else "Unknown: none was given at export."
    first = encoder.embedder.config.pretrained
    weights = "timm's weights" if first is True else "other weights" if first else ""
    from_others = f" Training started from {weights}, whose license applies as well." if weights else ""
    return f"## License of the weights\n\n{stated}{from_others}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]


def _text(value: str) -> str:
    """Remove characters from a user's text that could end a code span, a table cell or a line."""
    return re.sub(r"[`|<>\s]+", " ", value).strip()
