"""The local optimizer of a run: the script's own, or that of the command line."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from wagma.job import UsageError

if TYPE_CHECKING:
    import torch

    from wagma.tasks.contract import Task

# The options of the command line's optimizers, with their defaults.
OPTIMIZERS = {
    "sgd": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.0},
    "adamw": {"lr": 0.001, "weight_decay": 0.01},
}
DEFAULT = "sgd"
OPTIONS = ("optimizer", "lr", "momentum", "weight_decay")
# What optimizers' groups, and schedulers, have of learning rates.
RATES = ("lr", "initial_lr", "max_lr", "min_lr")
BASES = ("base_lrs", "max_lrs")


def check(settings: argparse.Namespace) -> None:
    """Refuse options that the chosen optimizer does not take."""
    takes = OPTIMIZERS[settings.optimizer or DEFAULT]
    for name in OPTIONS[1:]:
        if getattr(settings, name) is not None and name not in takes:
            settings.parser.error(
                f"argument {flag_of(name)}: not allowed with argument --optimizer "
                f"{settings.optimizer}"
            )


def resolve(settings: argparse.Namespace, task: Task) -> None:
    """Set the settings' defaults, unless the script defines an optimizer of its own.

    Raises:
        UsageError: It does, and the command line has options of an optimizer, too.
    """
    if task.optimizer is not None:
        for name in OPTIONS:
            if getattr(settings, name) is not None:
                raise UsageError(
                    f"argument {flag_of(name)}: not allowed, as {task.name} defines optimizer()"
                )
        return
    settings.optimizer = settings.optimizer or DEFAULT
    for name, default in OPTIMIZERS[settings.optimizer].items():
        if getattr(settings, name) is None:
            setattr(settings, name, default)


def flag_of(name: str) -> str:
    """Return an option's name on the command line."""
    return f"--{name.replace('_', '-')}"


def make(settings: argparse.Namespace, task: Task, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that makes this rank's own steps.

    Raises:
        UsageError: The script's function did not return an optimizer.
    """
    import torch  # not at the top: --help does not need it
    from torch.nn.utils import clip_grad_norm_

    from wagma.optim.optimizers import needs_closure

    parameters = list(model.parameters())
    if task.optimizer is not None:
        local = task.optimizer(parameters)
        if not isinstance(local, torch.optim.Optimizer):
            raise UsageError(
                f"{task.name}: optimizer() returned {type(local).__name__}, not a "
                "torch.optim.Optimizer"
            )
        if needs_closure(local):
            raise UsageError(
                f"{task.name}: optimizer() returned {type(local).__name__}, which evaluates the "
                "loss several times in a step: `wagma train` computes one gradient a step; write "
                "a training loop of your own, with a method that averages models"
            )
    else:
        kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[settings.optimizer]
        takes = OPTIMIZERS[settings.optimizer]
        local = kind(parameters, **{name: getattr(settings, name) for name in takes})
    if settings.clip_norm is not None:

        def clip(*_: Any) -> None:
            clip_grad_norm_(parameters, settings.clip_norm)

        # Clip the gradients that the step uses: their average, if gradients are averaged.
        local.register_step_pre_hook(clip)
    return local


def make_scheduler(task: Task, local: torch.optim.Optimizer) -> Any:
    """Return the learning-rate scheduler, stepped after every step; None without one.

    Raises:
        UsageError: The script's function returned something else.
    """
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    if task.scheduler is None:
        return None
    scheduler = task.scheduler(local)
    if not callable(getattr(scheduler, "step", None)) or isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            f"{task.name}: scheduler() returned {type(scheduler).__name__}, not one of "
            "torch.optim.lr_scheduler with a step() after every training step"
        )
    return scheduler


def described(*optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """Return optimizers' classes and their groups' settings, for the run's record."""
    kinds = (bool, int, float, str, type(None))
    return {
        "class": " and ".join(type(each).__name__ for each in optimizers),
        "groups": [
            {
                "parameters": sum(parameter.numel() for parameter in group["params"]),
                **{
                    name: list(value) if isinstance(value, tuple) else value
                    for name, value in group.items()
                    if isinstance(value, (*kinds, tuple))
                },
            }
            for each in optimizers
            for group in each.param_groups
        ],
    }


def scale_rates(optimizer: torch.optim.Optimizer, scheduler: Any, factor: float) -> None:
    """Multiply an optimizer's learning rates, and those that its scheduler starts from.

    Args:
        optimizer: The optimizer.
        scheduler: Its learning-rate scheduler, or None.
        factor: By which they are multiplied.
    """
    for group in optimizer.param_groups:
        for name in RATES:
            if name in group:
                group[name] *= factor
    scale_bases(scheduler, factor)


def scale_bases(scheduler: Any, factor: float) -> None:
    """Multiply the rates that a scheduler, or each one that it consists of, starts from."""
    for name in BASES:
        if hasattr(scheduler, name):
            setattr(scheduler, name, [factor * rate for rate in getattr(scheduler, name)])
    for each in getattr(scheduler, "_schedulers", ()):  # of SequentialLR and ChainedScheduler
        scale_bases(each, factor)
