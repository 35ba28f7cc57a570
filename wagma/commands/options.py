"""Options that several commands have."""

from __future__ import annotations

import argparse
from pathlib import Path

from wagma import logs
from wagma.arguments import Once, not_negative, number, run_name, slow_rank, whole
from wagma.tasks import local

DEFAULT_SHARDS = "iid"
DEFAULT_ALPHA = 0.1
DEFAULT_IMAGE_SIZE = 32


def add_log_level(parser: argparse.ArgumentParser) -> None:
    """Add what is common to all commands."""
    parser.add_argument(
        "--log-level",
        choices=logs.LEVELS,
        help=f"which of rank 0's messages appear on standard error; a run's log files have those "
        f"of all ranks, from info on (default: {logs.VARIABLE}, else {logs.DEFAULT_LEVEL})",
    )


def add_task_options(group) -> None:
    """Add what says which model learns from which data."""
    task = group.add_mutually_exclusive_group()
    task.add_argument(
        "--script",
        type=Path,
        metavar="FILE",
        help="a Python file that defines the model, the data and the loss: see below",
    )
    task.add_argument(
        "--images",
        type=Path,
        metavar="DIR",
        help="folders of images, DIR/train/CLASS and DIR/test/CLASS (or DIR/val/CLASS); without "
        "a folder to test with, a fifth of each class is held out",
    )
    group.add_argument(
        "--image-size",
        type=whole(8),
        metavar="PIXELS",
        help="side of the squares that the images of --images are cropped and resized to "
        f"(default: {DEFAULT_IMAGE_SIZE})",
    )
    group.add_argument(
        "--shards",
        choices=("iid", "label-sorted", "dirichlet"),
        help="which part of the digits or images a rank has: a random one, few of the classes, or "
        f"of each class what a Dirichlet draw gives it (default: {DEFAULT_SHARDS})",
    )
    group.add_argument(
        "--dirichlet-alpha",
        type=number("from 0.001 to 1000", lambda value: 0.001 <= value <= 1000),
        metavar="ALPHA",
        help="the smaller, the less alike the shards of --shards dirichlet "
        f"(default: {DEFAULT_ALPHA})",
    )


def add_device(group) -> None:
    """Add where models are trained."""
    group.add_argument(
        "--device",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="where models are trained: cuda, the ranks of a node on its GPUs in turn, or cpu; "
        "auto: cuda where torch sees a GPU, else cpu (default: %(default)s)",
    )


def add_imbalance_options(group) -> None:
    """Add what makes steps longer than they are."""
    group.add_argument(
        "--step-time",
        dest="step_time_ms",
        type=not_negative,
        default=0.0,
        metavar="MS",
        help="sleep in every step that stands for an accelerator's work (default: %(default)s)",
    )
    add_delay_options(group)


def add_delay_options(group) -> None:
    """Add the papers' injected delays."""
    add = group.add_argument
    add(
        "--imbalance",
        choices=("none", "cloud", "random"),
        default="none",
        help="cloud: two ranks, drawn anew at every step, take 320 ms longer; random: each rank "
        "takes six times as long with probability 1/ranks (default: %(default)s)",
    )
    add(
        "--imbalance-scale",
        type=not_negative,
        default=1.0,
        metavar="FACTOR",
        help="makes that delay shorter or longer (default: %(default)s)",
    )
    add(
        "--slow-rank",
        type=slow_rank,
        action=Once,
        default={},
        metavar="R:FACTOR",
        help="rank R takes FACTOR times as long for its steps; may be given for several ranks",
    )


def add_run_options(group) -> None:
    """Add where the results go."""
    add = group.add_argument
    add(
        "--name",
        type=run_name,
        help="name of the run (default: the date and time, and the numbers of Slurm's job)",
    )
    add(
        "--runs-dir",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="the run's files are in DIR/NAME, which must be new (default: %(default)s)",
    )


def check_task(settings: argparse.Namespace) -> list[str]:
    """Refuse options that do not go together, and return the modules that the task needs."""
    parser = settings.parser
    local.check(settings)
    if settings.script and settings.shards:
        parser.error("argument --shards: not allowed with argument --script: data() shares out")
    if settings.dirichlet_alpha and settings.shards != "dirichlet":
        parser.error("argument --dirichlet-alpha: not allowed without argument --shards dirichlet")
    if settings.image_size and not settings.images:
        parser.error("argument --image-size: not allowed without argument --images")
    if settings.images:
        settings.image_size = settings.image_size or DEFAULT_IMAGE_SIZE
    if settings.script:
        return ["rich", "torch"]
    settings.shards = settings.shards or DEFAULT_SHARDS
    if settings.shards == "dirichlet":
        settings.dirichlet_alpha = settings.dirichlet_alpha or DEFAULT_ALPHA
    return ["PIL", "rich", "torch"] if settings.images else ["rich", "sklearn", "torch"]
