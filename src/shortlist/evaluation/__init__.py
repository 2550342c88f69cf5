"""How well vectors retrieve: protocols, metrics, and their intervals."""

from shortlist.extras import extra

with extra("training", __name__):
    from shortlist.evaluation.evaluation import Evaluation, evaluate
    from shortlist.evaluation.intervals import Estimate
    from shortlist.evaluation.judged import JudgedScores, judged_scores

__all__ = ["Estimate", "Evaluation", "JudgedScores", "evaluate", "judged_scores"]
