"""A run as typed, validated data."""

from shortlist.extras import extra

with extra("training", __name__):
    from shortlist.config.reading import read_config, read_yaml, validated
    from shortlist.config.schema import (
        PAPER_K,
        PAPER_K_WITH_SIMIX,
        LossConfig,
        OptimizerConfig,
        RunConfig,
        ScheduleConfig,
    )

__all__ = [
    "PAPER_K",
    "PAPER_K_WITH_SIMIX",
    "LossConfig",
    "OptimizerConfig",
    "RunConfig",
    "ScheduleConfig",
    "read_config",
    "read_yaml",
    "validated",
]
