"""Parameters and responses of the JSON API, from which its OpenAPI description is generated."""

from __future__ import annotations

from typing import Annotated, Any, Self

from fastapi import Path, Query
from pydantic import AfterValidator, BaseModel, Field

from shortlist.gallery.gallery import Item
from shortlist.gallery.manifest import Recall
from shortlist.serve.limits import MAX_ID, MAX_RESULTS

Id = Annotated[int, Path(ge=0, le=MAX_ID, description="Id of an image of the gallery.")]
Label = Annotated[
    str | None,
    Query(max_length=1000, description="Return only images with this label. If empty, return all."),
    AfterValidator(lambda label: label or None),
]
Offset = Annotated[int, Query(ge=0, le=MAX_ID, description="Number of items to skip.")]
PageLength = Annotated[int, Query(ge=1, le=MAX_RESULTS, description="Maximum number of items.")]


class SearchOptions(BaseModel):
    """The parameters of a search, and the fields of the search form in addition to the image."""

    k: int = Field(default=10, ge=1, le=MAX_RESULTS, description="Number of results.")
    label: Label = None
    min_score: float | None = Field(
        default=None,
        ge=-1,
        le=1,
        description="Leave out results with a lower score. Default: min_score of the gallery; -1 returns all results.",
    )


class Problem(BaseModel):
    """An error."""

    detail: str = Field(description="What is wrong, as a sentence.")


class Health(BaseModel):
    """State of the server."""

    status: str = Field(description="Always 'ok'.")
    version: str = Field(description="Version of shortlist.")


class Readiness(BaseModel):
    """Whether searches can be answered."""

    status: str = Field(description="Always 'ready'; otherwise, the HTTP status is 503.")


class ItemFacts(BaseModel):
    """An image of the gallery."""

    id: int
    label: str | None = Field(description="Null if the image has no label. Several are separated by commas.")
    labels: list[str] = Field(description="All labels.")
    fields: dict[str, str | float | int | bool | None] = Field(
        description="Other columns of the table that listed the image."
    )
    file: str = Field(description="Name of the file and of its folder.")

    @classmethod
    def of(cls, item: Item, **others: Any) -> Self:
        file = "/".join(item.path.parts[-2:]).lstrip("/")
        labels, fields = list(item.labels), dict(item.fields)
        return cls(id=item.id, label=item.label, labels=labels, fields=fields, file=file, **others)


class Result(ItemFacts):
    """A search result."""

    score: float = Field(description="Cosine similarity to the query, at most 1.")


class Results(BaseModel):
    """Search results in descending order of their scores."""

    query: ItemFacts | None = Field(description="The image of the gallery that was the query; null for an upload.")
    results: list[Result]
    min_score: float | None = Field(description="Minimum score that was applied; null: no minimum.")
    below_min_score: int = Field(description="Number of the k most similar images that were left out for their score.")


class Items(BaseModel):
    """A page of the gallery."""

    items: list[ItemFacts]
    more: bool = Field(description="Whether there are more items after these.")


class LabelFacts(BaseModel):
    """A label and the number of its images."""

    label: str
    images: int


class Bounds(BaseModel):
    """Limits of requests."""

    bytes: int = Field(description="Maximum size of an upload.")
    pixels: int = Field(description="Maximum number of pixels of an uploaded or gallery image.")
    results: int = Field(default=MAX_RESULTS, description="Maximum number of results.")


class IndexDescription(BaseModel):
    """The index of the gallery."""

    kind: str = Field(description="flat, hnsw or ivfpq; flat is exact.")
    recall: Recall | None = Field(default=None, description="Null if the index is exact, or if it was not measured.")
    dim: int = Field(description="Dimension of the vectors.")
    fingerprint: str = Field(description="Fingerprint of the model that computed the vectors.")


class GalleryFacts(BaseModel):
    """The gallery."""

    name: str
    images: int
    labels: list[LabelFacts] = Field(description="Sorted by label.")
    min_score: float | None = Field(description="Default minimum score of the results of a search; null: no minimum.")
    limits: Bounds
    index: IndexDescription


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI description of an endpoint's errors. Every endpoint can answer 400, 403 and 503."""
    return {status: {"model": Problem, "description": REASONS[status]} for status in (400, 403, *statuses, 503)}


REASONS = {
    400: "The request is malformed, or is for another host.",
    401: "The token is missing or wrong.",
    403: "The request comes from a page of another site.",
    404: "The gallery has no such image, or its file can no longer be read.",
    408: "The upload is too slow.",
    413: "The image has too many bytes or pixels.",
    415: "The request is not a form with an image.",
    422: "A value is invalid, or the file is not an image.",
    503: "The gallery is not available, the server is busy or being stopped, or the work takes too long.",
}


def _form_field(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the OpenAPI description of a field of a form, which is omitted instead of null."""
    facts = {**facts, **facts.get("anyOf", [{}])[0]}
    return {name: value for name, value in facts.items() if name not in ("anyOf", "title") and value is not None}


_OPTIONS = SearchOptions.model_json_schema()["properties"]
SEARCH_FORM: dict[str, Any] = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["image"],
                "properties": {
                    "image": {"type": "string", "format": "binary", "description": "An image file."},
                    **{name: _form_field(each) for name, each in _OPTIONS.items()},
                },
            }
        }
    },
}
