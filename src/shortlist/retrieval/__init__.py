"""From an embedder to answers."""

from shortlist.retrieval.embed import embed_images
from shortlist.retrieval.evaluate import Estimate, Evaluation, evaluate

__all__ = ["Estimate", "Evaluation", "embed_images", "evaluate"]
