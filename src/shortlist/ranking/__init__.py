"""The paper's mathematics: ranking losses on smooth ranks, SiMix, and exact retrieval metrics."""

from shortlist.ranking.binned_ap import BinnedAPLoss, binned_ap_loss
from shortlist.ranking.blackbox_ap import BlackboxAPLoss, blackbox_ap_loss
from shortlist.ranking.calibration import CalibrationLoss, calibration_loss
from shortlist.ranking.combined import CombinedLoss
from shortlist.ranking.listwise import Lists, ListwiseLoss, ListwiseResult, listwise_loss
from shortlist.ranking.losses import RankingLoss, ranking_loss
from shortlist.ranking.metrics import QueryScores, query_scores, retrieval_metrics
from shortlist.ranking.recall import RecallAtKLoss, RecallHead, median_rank, recall_at_k_loss
from shortlist.ranking.schedules import MedianRank, Schedule
from shortlist.ranking.simix import SiMix, VirtualBatch
from shortlist.ranking.smooth_ap import SmoothAPHead, SmoothAPLoss, smooth_ap_loss
from shortlist.ranking.tail import LinearTail
from shortlist.ranking.tiles import Engine, Head, Ranks

__all__ = [
    "BinnedAPLoss",
    "BlackboxAPLoss",
    "CalibrationLoss",
    "CombinedLoss",
    "Engine",
    "Head",
    "LinearTail",
    "Lists",
    "ListwiseLoss",
    "ListwiseResult",
    "MedianRank",
    "QueryScores",
    "RankingLoss",
    "Ranks",
    "RecallAtKLoss",
    "RecallHead",
    "Schedule",
    "SiMix",
    "SmoothAPHead",
    "SmoothAPLoss",
    "VirtualBatch",
    "binned_ap_loss",
    "blackbox_ap_loss",
    "calibration_loss",
    "listwise_loss",
    "median_rank",
    "query_scores",
    "ranking_loss",
    "recall_at_k_loss",
    "retrieval_metrics",
    "smooth_ap_loss",
]
