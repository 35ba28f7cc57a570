"""``wagma timeline``: put the ranks' timelines together."""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

from wagma import job, logs
from wagma.arguments import not_negative, positive
from wagma.commands.options import add_log_level
from wagma.parsing import EXIT_STATUSES

TIMELINE_EXAMPLES = """\
examples:
  mpiexec -n 4 wagma train --timeline --name mine
  wagma timeline runs/mine
  wagma timeline runs/mine --png mine.png --from 0.5 --to 0.8
  WAGMA_TIMELINE=runs/job mpiexec -n 4 python my_script.py
  wagma timeline runs/job
"""


def add(commands) -> None:
    """Add the command ``timeline``."""
    parser = commands.add_parser(
        "timeline",
        help="put together what the ranks of a job did when, to look at in a browser",
        description="Put the timelines that the ranks of a job have recorded on one clock, and "
        "write them as RUN/timeline.json.gz, which https://ui.perfetto.dev and chrome://tracing "
        "open. Ranks record by --timeline of wagma train and compare, by the environment variable "
        "WAGMA_TIMELINE=RUN, or by `with optimizer.timeline(RUN)`.",
        epilog=f"{TIMELINE_EXAMPLES}\n{EXIT_STATUSES}",
    )
    parser.set_defaults(parser=parser, command=run, check=check, run=job.run_alone)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="a directory that was recorded into")
    group = parser.add_argument_group("picture")
    add = group.add_argument
    add(
        "--png",
        type=Path,
        metavar="FILE",
        help="also draw what the ranks' applications do, of several runs one above the other",
    )
    add(
        "--from",
        dest="begin",
        type=not_negative,
        default=0.0,
        metavar="S",
        help="begin of the picture, in seconds since the first call or span (default: 0)",
    )
    add("--to", dest="end", type=positive, metavar="S", help="its end (default: the last event)")
    add_log_level(parser)


def check(settings: argparse.Namespace) -> list[str]:
    """Refuse options that conflict, and return the modules that are needed."""
    if settings.end is not None and settings.end <= settings.begin:
        settings.parser.error(
            f"argument --to: {settings.end:g} s is not after --from, {settings.begin:g} s"
        )
    if settings.png is None and (settings.end is not None or settings.begin):
        settings.parser.error("argument --from, --to: not allowed without argument --png")
    return ["matplotlib"] if settings.png else []


def run(settings: argparse.Namespace, signals: job.Signals) -> int:
    """Write each run's timeline, and the picture."""
    # Among millions of events, looking for garbage takes most of the time.
    collects = gc.isenabled()
    gc.disable()
    try:
        return put_together(settings)
    finally:
        if collects:
            gc.enable()


def put_together(settings: argparse.Namespace) -> int:
    """Write each run's timeline, and the picture; return the exit status."""
    from wagma.timeline import merge, trace  # not at the top: --help needs no numpy

    logs.start(settings.log_level, 0)
    if settings.png:
        check_picture(settings.png)
    timelines = {}
    for directory in settings.runs:
        timeline = merge.load(directory)
        name = directory.resolve().name
        timelines[str(directory) if name in timelines else name] = timeline
        path = directory / "timeline.json.gz"
        try:
            count = trace.write(timeline, path)
        except OSError as error:
            raise job.UsageError(f"cannot write {path}: {error.strerror}") from error
        print(
            f"{path}: {count:,} events of {len(timeline.ranks)} ranks; open it in "
            "https://ui.perfetto.dev"
        )
        for line in remarks(timeline):
            print(line)
    if settings.png:
        from wagma.timeline import picture

        try:
            picture.draw(timelines, settings.png, settings.begin, settings.end)
        except OSError as error:
            raise job.UsageError(f"cannot write {settings.png}: {error.strerror}") from error
        print(f"drawn in {settings.png}")
    return job.OK


def check_picture(path: Path) -> None:
    """Raise UsageError, before all is read, if no picture can have this path."""
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix and path.suffix.lower().removeprefix(".") not in known:
        raise job.UsageError(
            f"argument --png: no picture is written as {path.suffix}, but as {', '.join(known)}"
        )
    if not path.parent.is_dir():
        raise job.UsageError(f"argument --png: there is no directory {path.parent}")


def remarks(timeline) -> list[str]:
    """Return lines about clocks, and about what is missing."""
    worst = max(rank.clock.error for rank in timeline.ranks.values())
    lines = [f"clocks are compared to ±{worst / 1000:.1f} µs"]
    for number, rank in timeline.ranks.items():
        if not rank.clock.aligned:
            lines.append(
                f"rank {number} is not aligned with the others: its clock was not compared"
            )
        if rank.ring.dropped:
            lines.append(
                f"rank {number} has dropped its oldest {rank.ring.dropped:,} events: keep more by "
                "WAGMA_TIMELINE_MIB"
            )
        if rank.ring.torn:
            lines.append(f"rank {number} was ended while it recorded {rank.ring.torn} events")
    for ring in timeline.former:
        lines.append(f"{ring.path} is of a former job, and left out")
    missing = sorted(
        set(range(next(iter(timeline.ranks.values())).ring.about["ranks"])) - set(timeline.ranks)
    )
    if missing:
        lines.append(
            f"there is no file of rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        )
    return lines
