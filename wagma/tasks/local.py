"""The local optimizer of a run: the script's own, or that of the command line."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from wagma.job import UsageError

if TYPE_CHECKING:
    import torch

    from wagma.tasks.contract import Task

# What an optimizer of the command line takes, and its defaults.
OPTIMIZERS = {
    "sgd": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.0},
    "adamw": {"lr": 0.001, "weight_decay": 0.01},
}
DEFAULT = "sgd"
OPTIONS = ("optimizer", "lr", "momentum", "weight_decay")


def check(settings: argparse.Namespace) -> None:
    """Refuse options that the optimizer has no use for; a script's own takes none of them."""
    takes = OPTIMIZERS[settings.optimizer or DEFAULT]
    for name in OPTIONS[1:]:
        if getattr(settings, name) is not None and name not in takes:
            settings.parser.error(
                f"argument {flag_of(name)}: not allowed with argument --optimizer "
                f"{settings.optimizer}"
            )


def resolve(settings: argparse.Namespace, task: Task) -> None:
    """Give the settings their defaults, or None where the script has an optimizer of its own.

    Raises:
        UsageError: It has, and the command line says something of one, too.
    """
    if task.optimizer is not None:
        for name in OPTIONS:
            if getattr(settings, name) is not None:
                raise UsageError(
                    f"argument {flag_of(name)}: not allowed, {task.name} defines optimizer()"
                )
        return
    settings.optimizer = settings.optimizer or DEFAULT
    for name, default in OPTIMIZERS[settings.optimizer].items():
        if getattr(settings, name) is None:
            setattr(settings, name, default)


def flag_of(name: str) -> str:
    """Return what the command line calls an option."""
    return f"--{name.replace('_', '-')}"


def make(settings: argparse.Namespace, task: Task, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that makes this rank's own steps.

    Raises:
        UsageError: The script's function returned none.
    """
    import torch  # not at the top: --help needs none
    from torch.nn.utils import clip_grad_norm_

    parameters = list(model.parameters())
    if task.optimizer is not None:
        local = task.optimizer(parameters)
        if not isinstance(local, torch.optim.Optimizer):
            raise UsageError(
                f"{task.name}: optimizer() returned {type(local).__name__}, not a "
                "torch.optim.Optimizer"
            )
    else:
        kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[settings.optimizer]
        takes = OPTIMIZERS[settings.optimizer]
        local = kind(parameters, **{name: getattr(settings, name) for name in takes})
    if settings.clip_norm is not None:

        def clip(*_: Any) -> None:
            clip_grad_norm_(parameters, settings.clip_norm)

        # What the step uses: where gradients are averaged, their average.
        local.register_step_pre_hook(clip)
    return local


def make_scheduler(task: Task, local: torch.optim.Optimizer) -> Any:
    """Return what changes the learning rate after every step, None where nothing does.

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


def described(local: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's class and its groups' settings, for a record of what was run."""
    kinds = (bool, int, float, str, type(None))
    return {
        "class": type(local).__name__,
        "groups": [
            {
                "parameters": sum(parameter.numel() for parameter in group["params"]),
                **{
                    name: list(value) if isinstance(value, tuple) else value
                    for name, value in group.items()
                    if isinstance(value, (*kinds, tuple))
                },
            }
            for group in local.param_groups
        ],
    }
