"""Options of checkpoints, of continuing from them, and of the job's end."""

from __future__ import annotations

import argparse
from pathlib import Path

from wagma.arguments import duration, every, whole
from wagma.job import REQUEUE

LATEST = "latest"
# With any of these a run can be continued.
CHECKPOINTING = "checkpoint_every", "resume", "time_limit", "requeue"


def add_checkpoint_options(group) -> None:
    """Add the options that save checkpoints and continue from them."""
    add = group.add_argument
    add(
        "--checkpoint-every",
        type=every,
        metavar="N|S s",
        help="save a checkpoint after every N steps of a rank, or every so many seconds, such as "
        "60s (also m, h), to DIR/NAME/checkpoints; a signal or --time-limit then ends the job with "
        "a checkpoint (default: none)",
    )
    add(
        "--checkpoint-keep",
        type=whole(1),
        default=2,
        metavar="K",
        help="number of checkpoints to keep (default: %(default)s)",
    )
    add(
        "--resume",
        nargs="?",
        const=LATEST,
        metavar="DIR",
        help="continue the run in the directory DIR from its newest good checkpoint; latest, also "
        "without DIR: the run of this --name, or else the last one in --runs-dir that has not "
        "ended (of this job under Slurm); begin a new run if there is none",
    )
    add(
        "--time-limit",
        type=duration,
        metavar="S",
        help="stop S seconds (also m, h) after the start, with a checkpoint; under Slurm also "
        "before the job's own limit (default: none)",
    )
    add(
        "--requeue",
        type=whole(1),
        metavar="STATUS",
        help="exit status of a job that SIGTERM, SIGUSR1 or a time limit has stopped, and that "
        f"--resume continues (default: {REQUEUE})",
    )


def check_checkpoints(settings: argparse.Namespace) -> None:
    """Refuse options that conflict, and say whether the run is one that can be continued."""
    error = settings.parser.error
    if settings.requeue is not None and settings.requeue > 255:
        error(f"argument --requeue: must be from 1 to 255, not {settings.requeue}")
    if settings.resume not in (None, LATEST):
        if settings.name:
            error("argument --name: not allowed with argument --resume DIR, which names the run")
        settings.resume = Path(settings.resume)
    settings.resumable = any(getattr(settings, name) is not None for name in CHECKPOINTING)
    settings.requeue = settings.requeue or REQUEUE


def check_survive(settings: argparse.Namespace) -> None:
    """Refuse checkpoints of ranks that go on without others, and make different steps."""
    apart = None
    if settings.algorithm.options.get("pace") == "own":
        apart = f"--algorithm {settings.algorithm.label}"
    elif settings.seconds is not None:
        apart = "--seconds"
    if settings.survive and settings.resumable and apart:
        settings.parser.error(
            f"argument --survive: with checkpoints not allowed with argument {apart}, with which "
            "ranks make different numbers of steps"
        )
