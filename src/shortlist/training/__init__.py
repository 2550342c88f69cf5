"""Training, evaluation and ablation studies of runs."""

from shortlist.extras import extra

with extra("training", __name__):
    import tensorboard  # noqa: F401 - accelerate imports it only when training starts

    from shortlist.batches import LargeBatchStep, StepOutput
    from shortlist.progress import Display
    from shortlist.training.ablation import ablate, collect
    from shortlist.training.folder import RunFolder
    from shortlist.training.loop import resume, train
    from shortlist.training.plan import Plan, describe, make_plan
    from shortlist.training.run_evaluation import evaluate_run, open_embedder, open_encoder

__all__ = [
    "Display",
    "LargeBatchStep",
    "Plan",
    "RunFolder",
    "StepOutput",
    "ablate",
    "collect",
    "describe",
    "evaluate_run",
    "make_plan",
    "open_embedder",
    "open_encoder",
    "resume",
    "train",
]
