"""``wagma report``: where the time of a run went."""

from __future__ import annotations

import argparse
from pathlib import Path

from wagma import job, logs
from wagma.commands.options import add_log_level
from wagma.commands.simulate import MACHINES
from wagma.parsing import EXIT_STATUSES

REPORT_EXAMPLES = """\
examples:
  wagma report runs/mine
  wagma report runs/mine --json
  wagma report runs/mine --html
  wagma report benchmarks/traces/bytedance-AR.csv --machine hdr
"""


def add(commands) -> None:
    """Add the command ``report``."""
    parser = commands.add_parser(
        "report",
        help="say which rank is slow, what that costs, and what would help",
        description="Say from a run's records which ranks or nodes are slow, in which pattern and "
        "in which part of a step, what that costs the job, and how fast other methods would be "
        "with the same steps. Costs are from simulated time, beside which the simulation's own "
        "error is shown; nothing is said about accuracy.",
        epilog=f"{REPORT_EXAMPLES}\n{EXIT_STATUSES}",
    )
    parser.set_defaults(parser=parser, command=run, check=lambda settings: [], run=job.run_alone)
    parser.add_argument(
        "path",
        type=Path,
        metavar="RUN",
        help="a directory of `wagma train`, also while it is running, or a text file of step times "
        "in seconds with one line per step and one column per rank",
    )
    add = parser.add_mutually_exclusive_group().add_argument
    add("--json", action="store_true", help="print everything as JSON")
    add(
        "--html",
        action="store_true",
        help="also write RUN/report.html, one file with interactive plots that loads nothing; RUN "
        "may then be a directory of `wagma compare` or `wagma simulate` as well",
    )
    parser.add_argument(
        "--machine",
        choices=MACHINES,
        help="the network that other methods would use (default: one on which an exchange takes as "
        "long as the run's own)",
    )
    add_log_level(parser)


def run(settings: argparse.Namespace, signals: job.Signals) -> int:
    """Print the report, in one process, and write its page."""
    if settings.html:
        from wagma import html  # not at the top: it loads numpy

        html.check(settings.path)
        if not html.is_run(settings.path):
            print(f"report is in {html.write(settings.path)}")
            return job.OK
    from wagma import report, runs, show  # not at the top: --help needs no numpy
    from wagma.report import text

    logs.start(settings.log_level, 0)
    try:
        with signals.raising():
            found = report.of(settings.path, settings.machine)
    except OSError as error:
        reason = error.strerror or error
        raise job.UsageError(f"cannot read {error.filename or settings.path}: {reason}") from error
    except ValueError as error:
        raise job.UsageError(str(error)) from error
    except job.Interrupted:
        return 128 + signals.received
    if settings.json:
        print(runs.in_json(found.as_dict(), indent=2))
        return job.OK
    for line in text.lines(found):
        print(line)
    print()
    show.table(text.columns(found))
    if found.remedies:
        print("\nin simulated time; says nothing about accuracy:")
        show.table(text.remedy_columns(found))
    if settings.html:
        print(f"\nreport is in {html.write(settings.path, found)}")
    return job.OK
