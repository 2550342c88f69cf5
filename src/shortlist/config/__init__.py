"""The configuration of a run: typed, validated data that is read from YAML and command-line overrides."""

from shortlist.extras import extra

with extra("training", __name__):
    from shortlist.config.reading import dotted_key, flatten, read_config, read_yaml_file, validate_config
    from shortlist.config.schema import (
        CONFIG_KEYS,
        PAPER_K,
        PAPER_K_WITH_SIMIX,
        LossConfig,
        OptimizerConfig,
        RunConfig,
        ScheduleConfig,
    )

__all__ = [
    "CONFIG_KEYS",
    "PAPER_K",
    "PAPER_K_WITH_SIMIX",
    "LossConfig",
    "OptimizerConfig",
    "RunConfig",
    "ScheduleConfig",
    "dotted_key",
    "flatten",
    "read_config",
    "read_yaml_file",
    "validate_config",
]
