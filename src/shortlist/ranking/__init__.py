"""The paper's mathematics: losses on smooth ranks, and the exact metrics they stand for."""

from shortlist.ranking.losses import RankingLoss, ranking_loss
from shortlist.ranking.metrics import QueryScores, query_scores, retrieval_metrics
from shortlist.ranking.recall import RecallAtKLoss, RecallHead, recall_at_k_loss
from shortlist.ranking.simix import SiMix, VirtualBatch
from shortlist.ranking.smooth_ap import SmoothAPHead, SmoothAPLoss, smooth_ap_loss
from shortlist.ranking.tiles import Engine, Head, Ranks

__all__ = [
    "Engine",
    "Head",
    "QueryScores",
    "RankingLoss",
    "Ranks",
    "RecallAtKLoss",
    "RecallHead",
    "SiMix",
    "SmoothAPHead",
    "SmoothAPLoss",
    "VirtualBatch",
    "query_scores",
    "ranking_loss",
    "recall_at_k_loss",
    "retrieval_metrics",
    "smooth_ap_loss",
]
