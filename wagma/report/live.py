"""Warnings of stragglers while a job runs, without a message for them.

They are from what the ranks tell each other where they average over all ranks, and where they do
not, from what they have written to the run's directory.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from wagma.report import slow, text
from wagma.report.analysis import compared
from wagma.report.exchanged import Exchange
from wagma.report.findings import Straggler
from wagma.report.records import Recorded, columns_of_records, of_columns

__all__ = ["Watch", "evenly"]

EVERY = 60.0  # seconds
LAST = 200  # steps that are compared
RANKS = 64  # that are looked at, at most: it is rank 0's training that waits for it
LINES = 4096  # bytes at the end of a file, in which records are counted to tell their length
MORE = 1.2  # times that length: records differ
MATTERS = 0.1  # of a step, in the mean

log = logging.getLogger(__name__)


class Watch:
    """Looks for stragglers once a minute, on one rank, among all ranks or `RANKS` of them.

    Args:
        run: the run's directory.
        exchange: has what the ranks tell each other; None: all ranks write in the directory.
        clock: function that returns the time, in seconds.
    """

    def __init__(
        self,
        run: Path,
        exchange: Exchange | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run, self.exchange, self.clock = run, exchange, clock
        self.next = clock() + EVERY
        self.heard = False
        self.config: dict[str, Any] | None = None

    def look(self) -> None:
        """Log a warning of the slowest rank, if a minute is over and one is slow; after each step.

        Only then is all that ranks tell each other noticed.
        """
        if self.exchange is not None:
            self.heard = self.exchange.look() or self.heard
        if self.clock() < self.next:
            return
        try:
            found, steps = self.stragglers()
        except Exception as error:  # the ranks may have other disks; it must never fail a job
            log.info("no look for stragglers: %s", error, exc_info=True)
            found = []
        if found:
            log.warning("in the last steps, %s", text.slowness(max(found, key=severity), steps))
        self.next, self.heard = self.clock() + EVERY, False

    def stragglers(self) -> tuple[list[Straggler], str]:
        """Return those of the last steps, and what it is that they take longer for."""
        recorded, steps = self.recorded()
        if recorded is None:
            return [], steps
        found = compared(recorded).stragglers
        return [each for each in found if severity(each) >= MATTERS], steps

    def recorded(self) -> tuple[Recorded | None, str]:
        """Return records of the last steps, or None if they are few, and what has one record."""
        if self.config is None:
            self.config = json.loads((self.run / "config.json").read_text(encoding="utf-8"))
        if self.exchange is not None and self.heard:
            told = self.exchange.recorded(self.run, self.config)
            if told is not None and told[0].compared > slow.ENOUGH:
                recorded, steps = told
                return recorded, "steps" if steps == 1 else f"periods of {steps:g} steps"
        return self.written(self.config), "steps"

    def written(self, config: dict[str, Any]) -> Recorded | None:
        """Return the last steps that all ranks have made and written; None if they are few.

        At their own pace ranks may have come so far apart that these are the last ones of each.
        """
        looked_at = evenly(config["ranks"])
        ends = {rank: end_of(self.run / f"rank-{rank:04}.jsonl") for rank in looked_at}
        made = {rank: records for rank, records in ends.items() if records}  # some make none
        numbers = [{each["step"] for each in records} for records in made.values()]
        common = set.intersection(*numbers) if numbers else set()
        if len(common) > slow.ENOUGH:
            made = {
                rank: [each for each in records if each["step"] in common]
                for rank, records in made.items()
            }
        count = min(map(len, made.values()), default=0)
        if count <= slow.ENOUGH:
            return None
        chosen = {rank: columns_of_records(records[-count:]) for rank, records in made.items()}
        return of_columns(self.run, config, chosen, since_first=True)


def severity(each: Straggler) -> float:
    """Return the excess of a straggler as a share of the others' steps."""
    return each.share * (each.ratio - 1)


def evenly(ranks: int) -> list[int]:
    """Return the ranks to look at of so many, always the same."""
    count = min(ranks, RANKS)
    return [place * ranks // count for place in range(count)]


def end_of(file: Path) -> list[dict[str, Any]]:
    """Return the last whole records of a rank, [] if it has none."""
    with file.open("rb") as lines:
        size, wanted = lines.seek(0, 2), LINES
        while len(read := whole_lines(lines, size, wanted)) < LAST and wanted < size:
            wanted = math.ceil(wanted * (MORE * LAST / len(read) if read else 2))
    return [json.loads(line) for line in read[-LAST:]]


def whole_lines(lines: BinaryIO, size: int, wanted: int) -> list[bytes]:
    """Return the lines that are whole in the last bytes of a file.

    Args:
        lines: the file.
        size: its bytes, of which it may have more by now.
        wanted: how many of them are read.
    """
    begin = max(0, size - wanted)
    lines.seek(begin)
    read = lines.read(size - begin).split(b"\n")[:-1]
    return read[1:] if begin else read
