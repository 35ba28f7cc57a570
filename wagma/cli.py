"""The command ``wagma``: what it is asked to do, and where the mistakes in that are caught.

Whatever can be found wrong before MPI is up is found here, by each rank alone; rank 0 says it.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import wagma
from wagma import job

SPEAK_FIRST = 1.0  # seconds for rank 0: Open MPI ends the job when any rank exits with an error
DESCRIPTION = "Train with wait-avoiding group model averaging, on all ranks of an MPI job."

EXIT_STATUSES = """\
exit status:
  0    the command has done what it was asked
  1    an error: the traceback is on standard error
  2    a mistake on the command line: one line says which
  130  ended by SIGINT (Ctrl-C)
  143  ended by SIGTERM
"""

TRAIN_EXAMPLES = """\
examples:
  mpiexec -n 4 wagma train
  mpiexec -n 8 wagma train --group-size 2 --sync-period 20 --name small-groups
  mpiexec -n 4 wagma train --step-time 50 --imbalance cloud --imbalance-scale 0.5
  srun --mpi=pmi2 -n 4 wagma train --step-time 20 --slow-rank 3:5 --shards label-sorted
"""


class Parser(argparse.ArgumentParser):
    """A parser of which only the job's rank 0 prints, and errors take one line."""

    def __init__(self, **options) -> None:
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options
        )

    def error(self, message: str) -> NoReturn:
        if job.launcher_rank() > 0:
            time.sleep(SPEAK_FIRST)
        self.exit(job.USAGE, f"wagma: error: {message} (see {self.prog} --help)\n")

    def _print_message(self, message, file=None) -> None:
        if job.launcher_rank() == 0:
            super()._print_message(message, file)


class OncePerRank(argparse.Action):
    """Collect (rank, value) pairs in a dictionary, and refuse a rank's second one."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        rank, value = values
        collected = dict(getattr(namespace, self.dest))
        if rank in collected:
            raise argparse.ArgumentError(self, f"rank {rank} is given twice")
        setattr(namespace, self.dest, collected | {rank: value})


def whole(lowest: int) -> Callable[[str], int]:
    """Return a converter of whole numbers from ``lowest`` on."""

    def convert(text: str) -> int:
        if not re.fullmatch("-?[0-9]+", text) or int(text) < lowest:
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {lowest} on, not {text!r}"
            )
        return int(text)

    return convert


def number(condition: str, holds: Callable[[float], bool]) -> Callable[[str], float]:
    """Return a converter of finite numbers for which ``holds``; ``condition`` says so in words."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and holds(value)):
            raise argparse.ArgumentTypeError(f"must be a number {condition}, not {text!r}")
        return value

    return convert


not_negative = number("from 0 on", lambda value: value >= 0)


def run_name(text: str) -> str:
    """Convert a run's name: one path component."""
    if text in ("", ".", "..") or "/" in text:
        raise argparse.ArgumentTypeError(f"must be the name of one directory, not {text!r}")
    return text


def slow_rank(text: str) -> tuple[int, float]:
    """Convert "R:FACTOR" to the two numbers."""
    rank, _, factor = text.partition(":")
    try:
        return whole(0)(rank), number("from 1 on", lambda value: value >= 1)(factor)
    except argparse.ArgumentTypeError as error:
        message = f"must be R:FACTOR, a rank and a number from 1 on, not {text!r}"
        raise argparse.ArgumentTypeError(message) from error


def make_parser() -> Parser:
    """Return the parser of the whole command line."""
    parser = Parser(prog="wagma", description=DESCRIPTION, epilog=EXIT_STATUSES)
    parser.add_argument("--version", action="version", version=f"wagma {wagma.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_train(commands)
    return parser


def add_train(commands) -> None:
    """Add the command ``train``."""
    parser = commands.add_parser(
        "train",
        help="train a small network on scikit-learn's digits",
        description="Train a small convolutional network on scikit-learn's digits, each rank on "
        "its own shard, and test the average of all ranks' models.",
        epilog=f"{TRAIN_EXAMPLES}\n{EXIT_STATUSES}",
    )
    parser.set_defaults(command=run_train, needs=("rich", "sklearn", "torch"))
    add_training_options(parser.add_argument_group("training"))
    add_averaging_options(parser.add_argument_group("averaging"))
    add_imbalance_options(parser.add_argument_group("injected imbalance"))
    add_run_options(parser.add_argument_group("the run's files"))


def add_training_options(group) -> None:
    """Add what a training without averaging would have as well."""
    add = group.add_argument
    add(
        "--steps",
        type=whole(1),
        default=400,
        metavar="N",
        help="steps that every rank makes (default: %(default)s)",
    )
    add(
        "--batch-size",
        type=whole(1),
        default=32,
        metavar="N",
        help="images a rank draws at each step (default: %(default)s)",
    )
    add(
        "--lr",
        type=number("above 0", lambda value: value > 0),
        default=0.05,
        metavar="RATE",
        help="learning rate of SGD (default: %(default)s)",
    )
    add(
        "--momentum",
        type=number("from 0 to below 1", lambda value: 0 <= value < 1),
        default=0.9,
        metavar="M",
        help="momentum of SGD, which stays on its rank (default: %(default)s)",
    )
    add(
        "--shards",
        choices=("iid", "label-sorted"),
        default="iid",
        help="which part of the training set a rank has: a random one, or few of the ten digits "
        "(default: %(default)s)",
    )
    add(
        "--seed",
        type=whole(0),
        default=0,
        metavar="N",
        help="seed of the initial model, the shards, the batches and the imbalance; with --wait "
        "group the same seed gives the same model, bit for bit (default: %(default)s)",
    )


def add_averaging_options(group) -> None:
    """Add what says who averages with whom, and when."""
    add = group.add_argument
    add(
        "--group-size",
        type=whole(1),
        metavar="S",
        help="ranks that average with each other at a step (default: the square root of the "
        "number of ranks, rounded up to a power of two)",
    )
    add(
        "--sync-period",
        type=whole(1),
        default=10,
        metavar="STEPS",
        help="steps from one average over all ranks to the next (default: %(default)s)",
    )
    add(
        "--wait",
        choices=("nobody", "group"),
        default="nobody",
        help="whom a step waits for (default: %(default)s)",
    )
    add(
        "--late",
        choices=("paper", "conserving"),
        help="how the model of a rank that came late is merged (default: the library's)",
    )


def add_imbalance_options(group) -> None:
    """Add what makes steps longer than they are."""
    add = group.add_argument
    add(
        "--step-time",
        dest="step_time_ms",
        type=not_negative,
        default=0.0,
        metavar="MS",
        help="sleep in every step that stands for an accelerator's work (default: %(default)s)",
    )
    add(
        "--imbalance",
        choices=("none", "cloud"),
        default="none",
        help="cloud: two ranks, drawn anew at every step, take 320 ms longer "
        "(default: %(default)s)",
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
        action=OncePerRank,
        default={},
        metavar="R:FACTOR",
        help="rank R takes FACTOR times as long for its steps; may be given for several ranks",
    )


def add_run_options(group) -> None:
    """Add where the results go."""
    add = group.add_argument
    add("--name", type=run_name, help="name of the run (default: the date and time)")
    add(
        "--runs-dir",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="the run's files are in DIR/NAME, which must be new or empty (default: %(default)s)",
    )


def run_train(settings: argparse.Namespace, comm, signals: job.Signals) -> int:
    """Check what only the running job knows, and train."""
    from wagma import data, runs  # not at the top: --help needs no numpy

    size = comm.size
    if size > data.TRAIN_IMAGES:
        raise job.UsageError(f"{data.TRAIN_IMAGES} training images are too few for {size} ranks")
    if settings.group_size is not None and settings.group_size > size:
        raise job.UsageError(
            f"argument --group-size: groups of {settings.group_size} in a job of {ranks(size)}"
        )
    for rank in settings.slow_rank:
        if rank >= size:
            raise job.UsageError(f"argument --slow-rank: no rank {rank} in a job of {ranks(size)}")
    run = runs.make_directory(settings.runs_dir, settings.name, comm)
    from wagma.train import train

    return train(settings, run, comm, signals)


def ranks(size: int) -> str:
    """Return "1 rank" or "4 ranks"."""
    return f"{size} rank{'s' if size > 1 else ''}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on this rank and return the exit status, or raise SystemExit with it."""
    parser = make_parser()
    settings = parser.parse_args(arguments)
    command, needs = settings.command, settings.needs
    del settings.command, settings.needs
    missing = [module for module in needs if importlib.util.find_spec(module) is None]
    if missing:
        text = f"{', '.join(missing)} not installed: pip install 'wagma[train]'"
        parser.exit(job.FAILED, f"wagma: error: {text}\n")
    return job.run(command, settings)
