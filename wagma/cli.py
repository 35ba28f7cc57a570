# PYTHON_ARGCOMPLETE_OK
"""The command ``wagma``.

Each rank checks the command line before MPI is initialized; rank 0 reports the error.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Sequence

import wagma
from wagma import job, logs, mps
from wagma.commands import compare, info, report, simulate, svm, timeline, train, watch
from wagma.parsing import EXIT_STATUSES, Parser
from wagma.tasks import kinds

DESCRIPTION = "Data-parallel training on the ranks of an MPI job, without waiting for stragglers."
EXAMPLES = """\
examples:
  mpiexec -n 4 wagma train
  mpiexec -n 4 wagma train --script my_task.py
  mpiexec -n 4 wagma compare --algorithms allreduce,wagma --imbalance cloud
  wagma watch runs/mine
  wagma report runs/mine
  mpiexec -n 4 wagma info
  wagma simulate --ranks 64,1024 --imbalance cloud
  mpiexec -n 4 wagma svm --slow-rank 1:0.5
  wagma train --help
"""


def make_parser() -> Parser:
    """Return the parser of the whole command line."""
    parser = Parser(prog="wagma", description=DESCRIPTION, epilog=f"{EXAMPLES}\n{EXIT_STATUSES}")
    parser.add_argument("--version", action="version", version=f"wagma {wagma.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (train, compare, watch, report, timeline, info, simulate, svm):
        command.add(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on this rank and return the exit status, or raise SystemExit with it."""
    parser = make_parser()
    complete(parser)
    settings = parser.parse_args(arguments)
    settings.log_level = log_level(settings)
    missing = [
        module for module in settings.check(settings) if importlib.util.find_spec(module) is None
    ]
    if missing:
        extra = "tasks" if kinds.EXTRA.intersection(missing) else "train"
        text = f"{', '.join(missing)} not installed: pip install 'wagma[{extra}]'"
        parser.exit(job.FAILED, f"wagma: error: {text}\n")
    command, run = settings.command, settings.run
    if command in (train.run, compare.run):
        give_streams_queues()
        job.announce(settings.parser.prog.removeprefix("wagma "))
    del settings.command, settings.check, settings.parser, settings.run
    return run(command, settings)


def give_streams_queues() -> None:
    """Let each of a process's streams have a queue of the device, so that none waits for another.

    The driver reads the variable when it is initialized; its default, 8, is less than the
    collectives and torch have streams. Under MPS all processes of a device take their queues out of
    one pool, of which 32 for each of four are too many.
    """
    if not mps.is_running():
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def complete(parser: Parser) -> None:
    """Complete a command line for the shell, if argcomplete is installed."""
    if "_ARGCOMPLETE" in os.environ and importlib.util.find_spec("argcomplete"):
        import argcomplete

        argcomplete.autocomplete(parser)


def log_level(settings: argparse.Namespace) -> str:
    """Return the log level of the option, else of the variable, else the default."""
    level = settings.log_level or os.environ.get(logs.VARIABLE, "").lower() or logs.DEFAULT_LEVEL
    if level not in logs.LEVELS:
        settings.parser.error(
            f"{logs.VARIABLE} must be one of {', '.join(logs.LEVELS)}, not {level!r}"
        )
    return level
