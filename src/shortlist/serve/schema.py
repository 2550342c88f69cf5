"""What is asked and answered, as OpenAPI describes it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path, Query
from pydantic import AfterValidator, BaseModel, Field

from shortlist.gallery.gallery import Hit, Item
from shortlist.serve.limits import LARGEST_ID, MOST, Limits

Id = Annotated[int, Path(ge=0, le=LARGEST_ID, description="Of an image of the gallery.")]
K = Annotated[int, Query(ge=1, le=MOST, description="How many results.")]
Label = Annotated[
    str | None,
    Query(max_length=1000, description="Only images with this label; empty: any."),
    AfterValidator(lambda label: label or None),
]
Offset = Annotated[int, Query(ge=0, le=LARGEST_ID, description="Of the first item.")]
PageLength = Annotated[int, Query(ge=1, le=MOST, description="How many items.")]


class Asked(BaseModel):
    """The fields of the search form beside its image."""

    k: int = Field(default=10, ge=1, le=MOST)
    label: str | None = Field(default=None, max_length=1000)


class Problem(BaseModel):
    """Why there is no answer."""

    detail: str = Field(description="A sentence.")


class Health(BaseModel):
    status: str = Field(description="'ok': there is no other.")
    version: str = Field(description="Of shortlist.")


class ItemFacts(BaseModel):
    """An image of the gallery."""

    id: int
    label: str | None = Field(description="Null where it has none.")
    file: str = Field(description="The file's name, and its folder's.")

    @classmethod
    def of(cls, item: Item) -> ItemFacts:
        return cls(**_facts(item))


class Result(ItemFacts):
    score: float = Field(description="Cosine similarity: 1 is the same.")

    @classmethod
    def of_hit(cls, hit: Hit) -> Result:
        return cls(**_facts(hit.item), score=hit.score)


class Results(BaseModel):
    """The nearest first."""

    query: ItemFacts | None = Field(description="The image of the gallery that was asked about, or null: an upload.")
    results: list[Result]


class Items(BaseModel):
    items: list[ItemFacts]
    more: bool = Field(description="Whether there are items after these.")


class LabelFacts(BaseModel):
    label: str
    images: int


class Bounds(BaseModel):
    """What is refused beyond."""

    bytes: int
    pixels: int
    results: int = MOST

    @classmethod
    def of(cls, limits: Limits) -> Bounds:
        return cls(bytes=limits.bytes, pixels=limits.pixels)


class Recall(BaseModel):
    """What part of the exact first results the index finds."""

    recall: float
    at: int = Field(description="How many first results.")
    queries: int = Field(description="Images of the gallery that it was measured with.")


class IndexFacts(BaseModel):
    kind: str = Field(description="flat is exact.")
    recall: Recall | None = Field(default=None, description="Null where it is exact, or not measured.")
    dim: int = Field(description="Numbers of a vector.")
    fingerprint: str = Field(description="Of the model that gives the vectors.")


class GalleryFacts(BaseModel):
    name: str
    images: int
    labels: list[LabelFacts] = Field(description="By name.")
    limits: Bounds
    index: IndexFacts


def _facts(item: Item) -> dict[str, Any]:
    return {"id": item.id, "label": item.label, "file": "/".join(item.path.parts[-2:]).lstrip("/")}


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Of an endpoint: what it may refuse. All endpoints refuse wrong hosts and other sites."""
    return {status: {"model": Problem, "description": REASONS[status]} for status in (400, 403, *statuses)}


REASONS = {
    400: "The request cannot be understood, or is for another host.",
    403: "The request comes from a page of another site.",
    404: "There is no such image in the gallery, or its file is gone.",
    408: "The upload took too long.",
    413: "The image has too many bytes or pixels.",
    415: "The request is not a form with an image.",
    422: "A value cannot be used, or the file is not an image.",
    503: "The gallery cannot be reached.",
}

SEARCH_FORM: dict[str, Any] = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["image"],
                "properties": {
                    "image": {"type": "string", "format": "binary", "description": "The file, of any usual kind."},
                    "k": {"type": "integer", "minimum": 1, "maximum": MOST, "default": 10},
                    "label": {"type": "string", "maxLength": 1000, "description": "Only images with this label."},
                },
            }
        }
    },
}
