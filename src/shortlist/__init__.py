"""Train image embeddings so that the right answers land in the first k results."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shortlist.ranking import RecallAtKLoss, SiMix, SmoothAPLoss

if TYPE_CHECKING:
    from shortlist.data.sampler import ClassBalancedSampler
    from shortlist.model.embedder import Embedder
    from shortlist.retrieval.gallery import Gallery
    from shortlist.training.large_batch import LargeBatchStep

__all__ = ["ClassBalancedSampler", "Embedder", "Gallery", "LargeBatchStep", "RecallAtKLoss", "SiMix", "SmoothAPLoss"]

_LATER = {  # imported when first asked for: `import shortlist` needs torch and nothing else
    "ClassBalancedSampler": "shortlist.data.sampler",
    "Embedder": "shortlist.model.embedder",
    "Gallery": "shortlist.retrieval.gallery",
    "LargeBatchStep": "shortlist.training.large_batch",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)
