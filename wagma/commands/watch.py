"""``wagma watch``: look at a run while it trains."""

from __future__ import annotations

import argparse
from pathlib import Path

from wagma import job
from wagma.arguments import number
from wagma.commands.options import add_log_level
from wagma.parsing import EXIT_STATUSES

WATCH_EXAMPLES = """\
examples:
  wagma watch runs/mine
  wagma watch runs/mine --once
"""


def add(commands) -> None:
    """Add the command ``watch``."""
    parser = commands.add_parser(
        "watch",
        help="show the ranks of a run in the terminal while it trains",
        description="Show the ranks of a run while it trains: steps, throughput, loss, the time of "
        "a rank's own steps against the others', the share of its time spent waiting, and who is "
        "late. "
        "It reads the files in the run's directory, on any machine that sees them, needs no MPI, "
        "and ends with the run.",
        epilog=f"{WATCH_EXAMPLES}\n{EXIT_STATUSES}",
    )
    parser.set_defaults(parser=parser, command=run, check=lambda settings: ["rich"])
    parser.set_defaults(run=job.run_alone)
    add = parser.add_argument
    add(
        "watched",
        type=Path,
        metavar="RUN",
        help="directory of a run or comparison, such as runs/mine",
    )
    add("--once", action="store_true", help="print one view, and end")
    add(
        "--interval",
        type=number("of at least 0.1", lambda value: value >= 0.1),
        default=1.0,
        metavar="S",
        help="seconds between views; ranks write at most once a second (default: %(default)s)",
    )
    add_log_level(parser)


def run(settings: argparse.Namespace, signals: job.Signals) -> int:
    """Show the run."""
    from wagma.watch import watch  # not at the top: it loads rich

    return watch(settings, signals)
