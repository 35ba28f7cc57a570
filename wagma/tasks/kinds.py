"""What the command line knows of the tasks of `--task`, without loading them."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from wagma.tasks import local

SHARDS = {"shards": "iid", "dirichlet_alpha": None}


class Kind(NamedTuple):
    """A task of `--task`.

    Args:
        modules: What must be installed besides torch.
        options: Its own options, with their defaults.
        optimizer: Its optimizer of a rank's own steps, unless the command line names one.
        lr: The learning rate with that, unless it is named; None: the optimizer's own default.
    """

    modules: tuple[str, ...]
    options: Mapping[str, Any]
    optimizer: str = local.DEFAULT
    lr: float | None = None


KINDS = {
    "digits": Kind(("sklearn",), SHARDS),
    "images": Kind(
        (),
        {
            **SHARDS,
            "images": None,
            "image_size": None,
            "model": "cnn",
            "augment": "none",
            "augment_with": "own",
        },
    ),
    "translation": Kind(
        ("sacrebleu", "sentencepiece"), {"text": None, "batch_by": "sentences"}, "adamw", 3e-3
    ),
    "language": Kind(
        (), {**SHARDS, "text": None, "sequence_length": 128, "packing": True}, "adamw", 3e-3
    ),
    "control": Kind(
        ("gymnasium",),
        {"environment": "CartPole-v1", "environment_time_ms": 0.0, "batch_by": "episodes"},
        "adamw",
        3e-3,
    ),
}
MODELS = "cnn", "resnet8", "resnet14", "resnet20"
# What the batches of --batch-by are equal in: those of the first take unequal times.
BATCH_BY = {"translation": ("sentences", "tokens"), "control": ("episodes", "steps")}
EXTRA = {"gymnasium", "sacrebleu", "sentencepiece"}  # are in the extra `tasks` only
ALPHA = 0.1  # of --shards dirichlet
OWN = sorted({name for kind in KINDS.values() for name in kind.options})


def resolve(settings: argparse.Namespace) -> list[str]:
    """Refuse options that conflict, set the task's defaults, return the modules that it needs."""
    if settings.script:
        if settings.task:
            settings.parser.error("argument --task: not allowed with argument --script")
        refuse(settings, (), "argument --script, which has its own model and data")
        local.check(settings)
        return ["rich", "torch"]
    settings.task = settings.task or ("images" if settings.images else "digits")
    kind = KINDS[settings.task]
    refuse(settings, kind.options, f"argument --task {settings.task}")
    for name, default in kind.options.items():
        if getattr(settings, name) is None:
            setattr(settings, name, default)
    check(settings)
    if settings.shards == "dirichlet":
        settings.dirichlet_alpha = settings.dirichlet_alpha or ALPHA
    if kind.lr is not None and settings.optimizer in (None, kind.optimizer):
        settings.optimizer, settings.lr = kind.optimizer, settings.lr or kind.lr
    local.check(settings)
    modules = list(kind.modules)
    if settings.task == "images":
        modules.append("PIL" if settings.images else "sklearn")
    return sorted([*modules, "rich", "torch"], key=str.lower)


def check(settings: argparse.Namespace) -> None:
    """Refuse values of the tasks' options that do not fit the task, or each other."""
    parser, task = settings.parser, settings.task
    if settings.dirichlet_alpha and settings.shards != "dirichlet":
        parser.error("argument --dirichlet-alpha: not allowed without argument --shards dirichlet")
    units = BATCH_BY.get(task)
    if units and settings.batch_by not in units:
        parser.error(
            f"argument --batch-by: {task} has {' and '.join(units)}, not {settings.batch_by}"
        )
    if settings.augment_with == "torchvision":
        if settings.augment == "none":
            parser.error("argument --augment-with: not allowed without argument --augment")
        if importlib.util.find_spec("torchvision") is None:
            parser.error("argument --augment-with: not installed: pip install torchvision")
    if task == "translation" and settings.text and len(settings.text) != 2:
        parser.error(
            "argument --text: translation needs two files, which are each other's translation, "
            f"not {len(settings.text)}"
        )


def counts_samples(settings: argparse.Namespace) -> bool:
    """Return whether a batch of the task has --batch-size samples, as far as is known."""
    return settings.task != "control" and settings.batch_by != "tokens"


def refuse(settings: argparse.Namespace, taken: Collection[str], by: str) -> None:
    """Refuse the tasks' options that are not taken."""
    for name in OWN:
        if getattr(settings, name) is not None and name not in taken:
            settings.parser.error(f"argument {flag_of(name)}: not allowed with {by}")


def flag_of(name: str) -> str:
    """Return an option's name on the command line, which has no unit."""
    return local.flag_of(name.removesuffix("_ms"))
