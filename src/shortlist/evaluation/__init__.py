"""Retrieval performance of vectors: protocols, metrics, and confidence intervals."""

from shortlist.extras import extra

with extra("training", __name__):
    from shortlist.evaluation.intervals import Estimate
    from shortlist.evaluation.judged import JudgedScores, judged_scores
    from shortlist.evaluation.protocols import evaluate
    from shortlist.evaluation.result import Evaluation, read_evaluations

__all__ = ["Estimate", "Evaluation", "JudgedScores", "evaluate", "judged_scores", "read_evaluations"]
