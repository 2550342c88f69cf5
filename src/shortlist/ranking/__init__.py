"""The paper's mathematics: losses on smooth ranks, and the exact metrics they stand for."""

from shortlist.ranking.binned_ap import BinnedAPLoss, binned_ap_loss
from shortlist.ranking.blackbox_ap import BlackboxAPLoss, blackbox_ap_loss
from shortlist.ranking.listwise import Lists, ListwiseLoss, Ranked, listwise_loss
from shortlist.ranking.losses import RankingLoss, ranking_loss
from shortlist.ranking.metrics import QueryScores, query_scores, retrieval_metrics
from shortlist.ranking.recall import RecallAtKLoss, RecallHead, recall_at_k_loss
from shortlist.ranking.simix import SiMix, VirtualBatch
from shortlist.ranking.smooth_ap import SmoothAPHead, SmoothAPLoss, smooth_ap_loss
from shortlist.ranking.tiles import Engine, Head, Ranks

__all__ = [
    "BinnedAPLoss",
    "BlackboxAPLoss",
    "Engine",
    "Head",
    "Lists",
    "ListwiseLoss",
    "QueryScores",
    "Ranked",
    "RankingLoss",
    "Ranks",
    "RecallAtKLoss",
    "RecallHead",
    "SiMix",
    "SmoothAPHead",
    "SmoothAPLoss",
    "VirtualBatch",
    "binned_ap_loss",
    "blackbox_ap_loss",
    "listwise_loss",
    "query_scores",
    "ranking_loss",
    "recall_at_k_loss",
    "retrieval_metrics",
    "smooth_ap_loss",
]
