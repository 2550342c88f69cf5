"""Learning-rate schedules as functions of the step, so that there is no state to save and restore."""

from __future__ import annotations

import math

from shortlist.config import ScheduleConfig


def learning_rate_factor(schedule: ScheduleConfig, step: int, steps_per_epoch: int, total_steps: int) -> float:
    """Compute the factor by which the learning rate is multiplied in a step.

    The multistep and exponential schedules change between epochs; warm-up and the cosine schedule change in every step.

    Args:
        schedule: Configuration of the schedule.
        step: Number of the step, from 0.
        steps_per_epoch: Number of steps per epoch.
        total_steps: Number of steps of the run.

    Example:
        >>> multistep = ScheduleConfig(name="multistep", milestones=(2, 3), gamma=0.1)
        >>> [round(learning_rate_factor(multistep, step, 10, 40), 3) for step in (0, 19, 20, 30)]
        [1.0, 1.0, 0.1, 0.01]
    """
    epoch = step // steps_per_epoch
    warmup = schedule.warmup * steps_per_epoch
    rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
    if schedule.name == "multistep":
        return rise * schedule.gamma ** sum(epoch >= milestone for milestone in schedule.milestones)
    if schedule.name == "exponential":
        return rise * schedule.gamma**epoch
    if schedule.name == "cosine":
        progress = max(0.0, step - warmup) / max(1.0, total_steps - warmup)
        return rise * (1 + math.cos(math.pi * progress)) / 2
    return rise
