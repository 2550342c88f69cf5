"""Train image embeddings so that the right answers land in the first k results."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shortlist.batches import ClassBalancedSampler, LargeBatchStep
    from shortlist.errors import ShortlistError
    from shortlist.gallery import Gallery
    from shortlist.model import Embedder
    from shortlist.ranking import (
        RecallAtKLoss,
        SiMix,
        SmoothAPLoss,
        VirtualBatch,
        query_scores,
        recall_at_k_loss,
        retrieval_metrics,
        smooth_ap_loss,
    )

    __version__: str

__all__ = [
    "ClassBalancedSampler",
    "Embedder",
    "Gallery",
    "LargeBatchStep",
    "RecallAtKLoss",
    "ShortlistError",
    "SiMix",
    "SmoothAPLoss",
    "VirtualBatch",
    "__version__",
    "query_scores",
    "recall_at_k_loss",
    "retrieval_metrics",
    "smooth_ap_loss",
]

_MODULES = {  # imported on first use, so that each needs only its own packages, and `shortlist --help` not even torch
    "shortlist.batches": ("ClassBalancedSampler", "LargeBatchStep"),
    "shortlist.errors": ("ShortlistError",),
    "shortlist.model": ("Embedder",),
    "shortlist.ranking": (
        *("RecallAtKLoss", "SiMix", "SmoothAPLoss", "VirtualBatch"),
        *("query_scores", "recall_at_k_loss", "retrieval_metrics", "smooth_ap_loss"),
    ),
    "shortlist.gallery": ("Gallery",),
}
_LATER = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return __all__


def _version() -> str:
    """Of the installed package; a source tree that nobody installed has none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("shortlist")
    except PackageNotFoundError:
        return "0+unknown"
