"""Train image embeddings for retrieval by optimising recall@k."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shortlist.batches import ClassBalancedSampler, LargeBatchStep
    from shortlist.encoding import Encoder
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
    from shortlist.runs import evaluate, plan, resume, train

    __version__: str

__all__ = [
    "ClassBalancedSampler",
    "Embedder",
    "Encoder",
    "Gallery",
    "LargeBatchStep",
    "RecallAtKLoss",
    "ShortlistError",
    "SiMix",
    "SmoothAPLoss",
    "VirtualBatch",
    "__version__",
    "evaluate",
    "plan",
    "query_scores",
    "recall_at_k_loss",
    "resume",
    "retrieval_metrics",
    "smooth_ap_loss",
    "train",
]

# Modules are imported on first use: each needs only its own dependencies, and `shortlist --help` does not import torch.
_MODULES = {
    "shortlist.batches": ("ClassBalancedSampler", "LargeBatchStep"),
    "shortlist.encoding": ("Encoder",),
    "shortlist.errors": ("ShortlistError",),
    "shortlist.model": ("Embedder",),
    "shortlist.ranking": (
        *("RecallAtKLoss", "SiMix", "SmoothAPLoss", "VirtualBatch"),
        *("query_scores", "recall_at_k_loss", "retrieval_metrics", "smooth_ap_loss"),
    ),
    "shortlist.gallery": ("Gallery",),
    "shortlist.runs": ("evaluate", "plan", "resume", "train"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__


def _version() -> str:
    """Return the version of the installed package, or "0+unknown" for a source tree that is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("shortlist")
    except PackageNotFoundError:
        return "0+unknown"
