"""Train image embeddings so that the right answers land in the first k results."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shortlist.batches import ClassBalancedSampler, LargeBatchStep
    from shortlist.model import Embedder
    from shortlist.ranking import RecallAtKLoss, SiMix, SmoothAPLoss
    from shortlist.retrieval import Gallery

__all__ = ["ClassBalancedSampler", "Embedder", "Gallery", "LargeBatchStep", "RecallAtKLoss", "SiMix", "SmoothAPLoss"]

_LATER = {  # imported on first use, so that each needs only its own packages, and `shortlist --help` not even torch
    "ClassBalancedSampler": "shortlist.batches",
    "Embedder": "shortlist.model",
    "Gallery": "shortlist.retrieval",
    "LargeBatchStep": "shortlist.batches",
    "RecallAtKLoss": "shortlist.ranking",
    "SiMix": "shortlist.ranking",
    "SmoothAPLoss": "shortlist.ranking",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
