"""Train image embeddings so that the right answers land in the first k results."""

from shortlist.ranking import RecallAtKLoss, SiMix, SmoothAPLoss

__all__ = ["RecallAtKLoss", "SiMix", "SmoothAPLoss"]
