"""Train image embeddings so that the right answers land in the first k results."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shortlist.errors import ShortlistError
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

if TYPE_CHECKING:
    from shortlist.data.sampler import ClassBalancedSampler
    from shortlist.model.embedder import Embedder
    from shortlist.retrieval.gallery import Gallery
    from shortlist.training.large_batch import LargeBatchStep

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

_LATER = {  # imported when first asked for: `import shortlist` needs torch and nothing else
    "ClassBalancedSampler": "shortlist.data.sampler",
    "Embedder": "shortlist.model.embedder",
    "Gallery": "shortlist.retrieval.gallery",
    "LargeBatchStep": "shortlist.training.large_batch",
}


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
