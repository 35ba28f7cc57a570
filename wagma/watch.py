"""``wagma watch``: the ranks of a run on a terminal, while it trains, without MPI."""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from wagma.following import Rank, Run
from wagma.job import OK, Interrupted, Signals, UsageError
from wagma.progress import added_in_words

if TYPE_CHECKING:
    from rich.console import RenderableType

SLOW = 1.25  # × the others' median, from which a rank's steps are long
BEHIND = 3  # steps
FIXED = 9  # lines of a frame besides those of ranks
NOTHING = "–"


class Column(NamedTuple):
    """A column of the table.

    Args:
        title: Its heading.
        value: Returns a rank's number; NaN: not known.
        shown: The format of the number.
    """

    title: str
    value: Callable[[Rank], float]
    shown: str

    def text(self, value: float) -> str:
        """Return a number as it is shown."""
        return self.shown.format(value) if math.isfinite(value) else NOTHING


def columns(ratios: dict[int, float]) -> list[Column]:
    """Return the table's columns besides the rank and its state."""
    return [
        Column("step", lambda rank: rank.steps, "{:.0f}"),
        Column("samples/s", lambda rank: rank.samples_per_s, "{:,.0f}"),
        Column("loss", lambda rank: rank.loss, "{:.4g}"),
        Column("step ms", lambda rank: 1000 * rank.own_s, "{:,.4g}"),
        Column("÷ others", lambda rank: ratios.get(rank.number, math.nan), "{:.2f}"),
        Column("wait", lambda rank: rank.waiting_share, "{:.0%}"),
        Column("stale", lambda rank: rank.staleness if rank.recent else math.nan, "{:.0f}"),
    ]


def watch(settings: argparse.Namespace, signals: Signals) -> int:
    """Show a run until it ends or a signal arrives, and return the exit status.

    Args:
        settings: The command line's.
        signals: Signals that may end the view.

    Raises:
        UsageError: The directory is not a run's.
    """
    run = find(settings.watched)
    console = Console(markup=False, highlight=False)
    if settings.once:
        console.print(frame(run, *console.size))
        return OK
    try:
        with signals.raising(), Live(console=console, screen=True, auto_refresh=False) as live:
            while not is_over(run, settings.watched):
                live.update(frame(run, *console.size), refresh=True)
                time.sleep(settings.interval)
                run.poll()
                if run.ended:
                    with contextlib.suppress(UsageError):  # the next one's files are being made
                        run = find(settings.watched)
    except Interrupted:
        pass
    console.print(frame(run, *console.size))
    return 128 + signals.received if signals.received else OK


def is_over(run: Run, directory: Path) -> bool:
    """Return whether a run has ended, and the comparison in the directory if it is of one."""
    return run.ended and (run.directory == directory or (directory / "comparison.json").exists())


def find(directory: Path) -> Run:
    """Return the run of a directory, or the newest one of a comparison's.

    Raises:
        UsageError: There is none.
    """
    if not directory.is_dir():
        raise UsageError(f"argument RUN: {directory} is not a directory")
    inside = sorted(directory.glob("seed-*/*/config.json"), key=lambda each: each.stat().st_mtime)
    run = Run(inside[-1].parent if inside else directory)
    run.poll()
    if not (run.settings or run.ranks):
        raise UsageError(
            f"argument RUN: {directory} has no config.json and no rank-*.jsonl: is it a run of "
            "wagma train?"
        )
    return run


def frame(run: Run, width: int, height: int) -> RenderableType:
    """Return what is shown of a run on a terminal of so many columns and lines."""
    ratios = run.ratios()
    parts: list[RenderableType] = [
        heading(run),
        bar(run, width),
        length(run),
        Text(),
        table(run, ratios, max(4, height - FIXED)),
        Text(),
        Text("late now: " + (", ".join(late(run, ratios)) or NOTHING), no_wrap=True),
    ]
    return Group(*parts)


def bar(run: Run, width: int) -> RenderableType:
    """Return the bar of the run's progress."""
    line = Table.grid()  # which ends it
    line.add_row(ProgressBar(total=1.0, completed=run.done or 0.0, width=width))
    return line


def heading(run: Run) -> Text:
    """Return the line with the run's state, ranks, method and directory."""
    ranks = run.settings.get("ranks") or len(run.ranks)
    state = "ended" if run.ended else "running"
    if is_silent(run):
        silent = min(rank.silent_s for rank in run.ranks.values())
        state = f"silent for {in_words(silent)}: stopped, evaluating or killed"
    method = run.settings.get("algorithm", "")
    parts = [state, f"{ranks} rank{'s' * (ranks != 1)}", method, str(run.directory)]
    return Text("  ".join(filter(None, parts)), style="bold", no_wrap=True, overflow="ellipsis")


def length(run: Run) -> Text:
    """Return the line with the steps and times, the throughput and the loss."""
    goal = run.settings.get("steps")
    made = f"step {run.steps:.0f}" + (f" of {goal}" if goal else "")
    seconds = run.settings.get("seconds")
    elapsed = in_words(run.elapsed_s) + (f" of {in_words(seconds)}" if seconds else "")
    parts = [made, elapsed]
    if run.remaining_s is not None and not run.ended:
        parts.append(f"{in_words(run.remaining_s)} remaining")
    rate = sum(known(rank.samples_per_s for rank in run.ranks.values()))
    parts.append(f"{rate:,.0f} samples/s")
    losses = known(rank.loss for rank in run.ranks.values())
    if losses:
        parts.append(f"loss {sum(losses) / len(losses):.4g}")
    for name in run.settings.get("recorded", ()):
        values = known(rank.last(name) for rank in run.ranks.values())
        parts += added_in_words({name: sum(values) / len(values) if values else None})
    damaged = sum(rank.damaged for rank in run.ranks.values())
    if damaged:
        parts.append(f"{damaged} damaged line{'s' * (damaged != 1)} left out")
    return Text(", ".join(parts), no_wrap=True, overflow="ellipsis")


def table(run: Run, ratios: dict[int, float], lines: int) -> Table:
    """Return the ranks' table: all that fit, else those to look at first, and all ranks' medians.

    Args:
        run: The run.
        ratios: Its step times ÷ the others'.
        lines: How many ranks fit.
    """
    shown = list(run.ranks.values())
    summary = len(shown) > lines
    if summary:
        shown = sorted(shown, key=lambda rank: concern(run, rank, ratios))[: lines - 3]
    each = columns(ratios)
    made = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim", expand=True)
    made.add_column("rank", justify="right", no_wrap=True)
    for column in each:
        made.add_column(column.title, justify="right", no_wrap=True)
    made.add_column("", no_wrap=True, ratio=1)
    for rank in shown:
        state, style = state_of(run, rank, ratios)
        values = [column.text(column.value(rank)) for column in each]
        made.add_row(str(rank.number), *values, state, style=style)
    if summary:
        made.add_section()
        of_all = [known(map(column.value, run.ranks.values())) for column in each]
        for name, of in (("least", min), ("median", median), ("most", max)):
            values = [
                column.text(of(values)) if values else NOTHING
                for column, values in zip(each, of_all)
            ]
            made.add_row(name, *values, f"of all {len(run.ranks)}", style="dim")
    return made


def concern(run: Run, rank: Rank, ratios: dict[int, float]) -> tuple[float, ...]:
    """Return what ranks are sorted by, so that those to look at come first."""
    ratio = ratios.get(rank.number, math.nan)
    ratio = ratio if math.isfinite(ratio) else 1.0
    silent = rank.is_silent and not run.ended
    return (not silent, -max(ratio, SLOW), rank.steps, -ratio, rank.number)


def state_of(run: Run, rank: Rank, ratios: dict[int, float]) -> tuple[str, str]:
    """Return a rank's state in words, and its style."""
    if run.ended:
        return "", ""
    if rank.is_silent:
        return f"silent {in_words(rank.silent_s)}", "red"
    if ratios.get(rank.number, math.nan) >= SLOW:
        return "slow", "yellow"
    behind = max(each.steps for each in run.ranks.values()) - rank.steps
    return (f"{behind} behind", "yellow") if behind >= BEHIND else ("", "")


def late(run: Run, ratios: dict[int, float]) -> list[str]:
    """Return who keeps the others waiting now, the worst first, and why."""
    if run.ended or is_silent(run):
        return []
    found = []
    for rank in sorted(run.ranks.values(), key=lambda rank: concern(run, rank, ratios)):
        if rank.is_silent:
            found.append(f"rank {rank.number} has not written for {in_words(rank.silent_s)}")
        elif ratios.get(rank.number, math.nan) >= SLOW:
            found.append(f"rank {rank.number} takes {ratios[rank.number]:.1f} × the others' time")
    return found


def is_silent(run: Run) -> bool:
    """Return whether no rank of a run that has not ended writes."""
    return not run.ended and bool(run.ranks) and all(r.is_silent for r in run.ranks.values())


def known(values: Iterable[float]) -> list[float]:
    """Return those that are finite."""
    return [value for value in values if math.isfinite(value)]


def in_words(seconds: float) -> str:
    """Return "7 s", "2:07 min" or "3:02 h"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"
