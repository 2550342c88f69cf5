"""Training and evaluation of runs, ablation studies, and sweeps over hyper-parameters."""

from shortlist.extras import extra

with extra("training", __name__):
    import tensorboard  # noqa: F401 - accelerate imports it only when training starts

    from shortlist.progress import Display
    from shortlist.training.ablation import ablate, collect
    from shortlist.training.components import Given, build_loss
    from shortlist.training.datasets import EvalImages
    from shortlist.training.folder import RunFolder
    from shortlist.training.loop import resume_run, train_run
    from shortlist.training.plan import Plan, make_plan
    from shortlist.training.plan_description import describe_plan
    from shortlist.training.requirements import Requirements, find_requirements
    from shortlist.training.run_evaluation import (
        embed_run_shard,
        evaluate_encoder,
        evaluate_run,
        open_embedder,
        open_encoder,
    )
    from shortlist.training.sweeps import SweepResult, TrialResult, sweep, write_best_recipe

__all__ = [
    "Display",
    "EvalImages",
    "Given",
    "Plan",
    "Requirements",
    "RunFolder",
    "SweepResult",
    "TrialResult",
    "ablate",
    "build_loss",
    "collect",
    "describe_plan",
    "embed_run_shard",
    "evaluate_encoder",
    "evaluate_run",
    "find_requirements",
    "make_plan",
    "open_embedder",
    "open_encoder",
    "resume_run",
    "sweep",
    "train_run",
    "write_best_recipe",
]
