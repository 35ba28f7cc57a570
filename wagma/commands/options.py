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
    """Add the option that all commands have."""
    parser.add_argument(
        "--log-level",
        choices=logs.LEVELS,
        help="lowest level of rank 0's messages on standard error; a run's log files have those "
        f"of all ranks, from info up (default: {logs.VARIABLE}, else {logs.DEFAULT_LEVEL})",
    )


def add_straggler_warnings(group) -> None:
    """Add the option of warnings while a job runs."""
    group.add_argument(
        "--straggler-warnings",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="warn of a rank that is slow, once a minute at most, from what ranks tell each other "
        "where they average over all ranks, or else have written to the run's directory "
        "(default: on)",
    )


def add_task_options(group) -> None:
    """Add the options that select the model and the data."""
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
        help="folders of images, DIR/train/CLASS and DIR/test/CLASS (or DIR/val/CLASS); without a "
        "test folder, a fifth of each class is held out",
    )
    group.add_argument(
        "--traceback",
        action="store_true",
        help="if a script raises, show all frames of the traceback, not only the script's",
    )
    group.add_argument(
        "--image-size",
        type=whole(8),
        metavar="PIXELS",
        help="side of the squares to which the images of --images are cropped and resized "
        f"(default: {DEFAULT_IMAGE_SIZE})",
    )
    group.add_argument(
        "--shards",
        choices=("iid", "label-sorted", "dirichlet"),
        help="how the digits or images are divided among the ranks: at random, by label, or with "
        f"class shares drawn from a Dirichlet distribution (default: {DEFAULT_SHARDS})",
    )
    group.add_argument(
        "--dirichlet-alpha",
        type=number("from 0.001 to 1000", lambda value: 0.001 <= value <= 1000),
        metavar="ALPHA",
        help="the smaller, the more the shards of --shards dirichlet differ "
        f"(default: {DEFAULT_ALPHA})",
    )


def add_device(group) -> None:
    """Add the option that selects the device."""
    group.add_argument(
        "--device",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="where to train: cuda (assigns the GPUs of a node to its ranks in turn) or cpu; "
        "auto is cuda if torch finds a GPU, else cpu (default: %(default)s)",
    )


def add_imbalance_options(group) -> None:
    """Add the options that make steps longer."""
    group.add_argument(
        "--step-time",
        dest="step_time_ms",
        type=not_negative,
        default=0.0,
        metavar="MS",
        help="milliseconds to sleep in every step, in place of an accelerator's work "
        "(default: %(default)s)",
    )
    add_delay_options(group)


def add_delay_options(group) -> None:
    """Add the options of the papers' injected delays."""
    add = group.add_argument
    add(
        "--imbalance",
        choices=("none", "cloud", "random"),
        default="none",
        help="cloud: at every step two random ranks are delayed by 320 ms; random: each step of "
        "each rank takes six times as long with probability 1/ranks (default: %(default)s)",
    )
    add(
        "--imbalance-scale",
        type=not_negative,
        default=1.0,
        metavar="FACTOR",
        help="factor by which the delays of --imbalance are multiplied (default: %(default)s)",
    )
    add(
        "--slow-rank",
        type=slow_rank,
        action=Once,
        default={},
        metavar="R:FACTOR",
        help="steps of rank R take FACTOR times as long; may be given for several ranks",
    )


def add_run_options(group) -> None:
    """Add the options of the output directory."""
    add = group.add_argument
    add(
        "--name",
        type=run_name,
        help="name of the run (default: the date and time, and the IDs of Slurm's job)",
    )
    add(
        "--runs-dir",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="write the run's files to DIR/NAME, which must be new (default: %(default)s)",
    )


def add_timeline(group) -> None:
    """Add the option that records a timeline."""
    group.add_argument(
        "--timeline",
        action="store_true",
        help="record what every rank does when, for `wagma timeline RUN`",
    )


def check_task(settings: argparse.Namespace) -> list[str]:
    """Refuse options that conflict, and return the modules that the task needs."""
    parser = settings.parser
    local.check(settings)
    if settings.script and settings.shards:
        parser.error(
            "argument --shards: not allowed with argument --script: the script's data() "
            "divides the data"
        )
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
