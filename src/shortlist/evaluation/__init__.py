"""Retrieval performance of vectors: protocols, metrics, and confidence intervals."""

from shortlist.extras import extra

with extra("training", __name__):
    from shortlist.evaluation.intervals import Difference, Estimate, group_differences, paired_differences
    from shortlist.evaluation.judged import JudgedScores, judged_scores
    from shortlist.evaluation.protocols import evaluate
    from shortlist.evaluation.result import Evaluation, read_evaluations

__all__ = [
    "Difference",
    "Estimate",
    "Evaluation",
    "JudgedScores",
    "evaluate",
    "group_differences",
    "judged_scores",
    "paired_differences",
    "read_evaluations",
]
