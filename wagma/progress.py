"""The job's progress, on one rank: a bar on a terminal, else a line at intervals."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TextIO

LAUNCHERS = ("mpiexec", "mpirun", "orterun", "orted", "prterun", "prted")
WORDS = "step", "loss"  # the unit counted, and the value shown with it
LINES = 10
REDRAW_EVERY = 0.1
NOTHING: Mapping[str, float | None] = MappingProxyType({})


def terminal() -> TextIO | None:
    """Return the user's terminal, or None if output goes elsewhere.

    The launcher's output decides: MPICH's gives its ranks a pipe and Open MPI's a pseudo-terminal,
    wherever their output goes from there.
    """
    try:
        pid = os.getpid()
        while pid > 1:
            name, pid, parent = _process(pid)
            if name in LAUNCHERS:
                output = os.open(f"/proc/{pid}/fd/1", os.O_WRONLY | os.O_NOCTTY)
                return os.fdopen(output, "w") if os.isatty(output) else None
            pid = parent
    except OSError:
        return None
    return sys.stdout if sys.stdout.isatty() else None


def _process(pid: int) -> tuple[str, int, int]:
    """Return a process's name, up to the first dot, its id, and its parent's id."""
    before, _, after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    return before.partition("(")[2].partition(".")[0], pid, int(after.split()[1])


class Silent:
    """The progress of the other ranks: nothing is shown."""

    def update(
        self,
        step: int,
        elapsed_s: float,
        loss: float,
        samples_per_s: float,
        recorded: Mapping[str, float | None] = NOTHING,
    ) -> None:
        """Show that ``step`` steps are done after ``elapsed_s`` seconds.

        Args:
            step, elapsed_s: These.
            loss, samples_per_s: Of the last step, and so far.
            recorded: What the task has added to the last step's record.
        """

    def close(self) -> None:
        """End the display."""


class Lines(Silent):
    """Progress in about ten lines over the run, for logs and pipes."""

    def __init__(
        self, steps: int | None, seconds: float | None = None, words: tuple[str, str] = WORDS
    ) -> None:
        self.steps, self.seconds, self.words = steps, seconds, words
        self.every = seconds / LINES if steps is None else max(1, steps // LINES)
        self.shown = 0

    def update(
        self,
        step: int,
        elapsed_s: float,
        loss: float,
        samples_per_s: float,
        recorded: Mapping[str, float | None] = NOTHING,
    ) -> None:
        part = (elapsed_s if self.steps is None else step) // self.every
        if part > self.shown or step == self.steps:
            self.shown = part
            unit, measure = self.words
            done = f"{unit} {step}/{self.steps}"
            if self.steps is None:
                done = f"{unit} {step}  {elapsed_s:.1f} of {self.seconds:g} s"
            print(f"{done}  {figures(measure, loss, samples_per_s, recorded)}", flush=True)


class Bar(Silent):
    """A progress bar, redrawn ten times a second; it has no thread that would take the GIL."""

    def __init__(
        self,
        steps: int | None,
        seconds: float | None,
        output: TextIO,
        words: tuple[str, str] = WORDS,
    ) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self.steps, self.total = steps, seconds if steps is None else steps
        self.measure, self.drawn = words[1], 0.0
        counts = [TextColumn(words[0]), MofNCompleteColumn()]
        if steps is None:
            counts = [TextColumn(f"{{task.completed:.1f}} of {seconds:g} s")]
        self.bar = Progress(
            *counts,
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=Console(file=output),
            auto_refresh=False,
        )
        self.task = self.bar.add_task("", total=self.total, figures="")

    def update(
        self,
        step: int,
        elapsed_s: float,
        loss: float,
        samples_per_s: float,
        recorded: Mapping[str, float | None] = NOTHING,
    ) -> None:
        now = time.monotonic()
        done = step if self.steps is not None else min(elapsed_s, self.total)
        if now - self.drawn >= REDRAW_EVERY or done == self.total:
            self.drawn = now
            self.bar.start()  # not sooner: what fails before the first step leaves no bar behind
            text = figures(self.measure, loss, samples_per_s, recorded)
            self.bar.update(self.task, completed=done, figures=text, refresh=True)

    def close(self) -> None:
        self.bar.stop()


def figures(
    measure: str, loss: float, samples_per_s: float, recorded: Mapping[str, float | None]
) -> str:
    """Return the figures shown at a step of the training."""
    parts = [f"{measure} {loss:.4f}", f"{samples_per_s:,.0f} samples/s", *added_in_words(recorded)]
    return "  ".join(parts)


def added_in_words(recorded: Mapping[str, float | None]) -> list[str]:
    """Return ["training return 123.4"] and so on: what a task has added to records, where known."""
    return [
        f"{name.replace('_', ' ')} {value:.4g}"
        for name, value in recorded.items()
        if value is not None
    ]


def start(
    rank: int,
    steps: int | None,
    seconds: float | None = None,
    words: tuple[str, str] = WORDS,
    first: int = 0,
) -> Silent:
    """Return the display of a rank's progress: update it after each step, and close it.

    Args:
        rank: This process's rank.
        steps: Number of steps that it will make; None if unknown.
        seconds: Seconds for which it will make steps; None if unlimited.
        words: Names of the unit counted and of the value shown.
        first: The rank that shows its progress.
    """
    if rank != first:
        return Silent()
    output = terminal()
    return Bar(steps, seconds, output, words) if output else Lines(steps, seconds, words)
