"""The metrics of a run's ranks while these write them; it loads neither MPI nor torch nor numpy."""

from __future__ import annotations

import json
import math
import time
from bisect import bisect_left
from collections import deque
from pathlib import Path
from statistics import mean, median
from typing import Any

from wagma.runs import metrics_files

RECENT = 20  # steps of a rank
TAIL = 1 << 17  # bytes of a file that is long already: more than RECENT records
SILENCE = 5.0  # seconds, or
SILENT_STEPS = 10.0  # so many of its steps, after which a rank is silent

Record = dict[str, Any]


class Lines:
    """The JSON objects of a file with one a line, as it grows; of a long one at first the last.

    Args:
        path: The file.

    Attributes:
        damaged: Number of lines that are none, such as of a node that has crashed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at: int | None = None
        self._begun = b""
        self.damaged = 0

    def read(self) -> list[Record]:
        """Return those completed since the last call; [] if the file cannot be read now."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                if self._at is None or size < self._at:  # at first, or cut by a job that resumes
                    self._at, self._begun = max(0, size - TAIL), b""
                    file.seek(self._at)
                    self._at += len(file.readline()) if self._at else 0
                file.seek(self._at)
                new = file.read()
        except OSError:
            return []
        self._at += len(new)
        *lines, self._begun = (self._begun + new).split(b"\n")
        records = [record for line in lines if (record := record_of(line)) is not None]
        self.damaged += len(lines) - len(records)
        return records


class Rank:
    """What a rank has recorded of its last steps.

    Args:
        number: The rank.
        path: The file of its metrics.

    Attributes:
        recent: The records of its last steps, the newest last.
    """

    def __init__(self, number: int, path: Path) -> None:
        self.number = number
        self.recent: deque[Record] = deque(maxlen=RECENT)
        self._lines = Lines(path)
        try:
            self._grew = time.monotonic() - max(0.0, time.time() - path.stat().st_mtime)
        except OSError:
            self._grew = time.monotonic()

    def poll(self) -> None:
        """Read what the rank has written since the last call."""
        first = not self.recent
        records = self._lines.read()
        if records and records[0]["step"] < self.steps:  # of a job that resumes from before
            self.recent.clear()
        self.recent.extend(records)
        if records and not first:
            self._grew = time.monotonic()

    @property
    def damaged(self) -> int:
        """Number of lines of its file that are no records, and left out."""
        return self._lines.damaged

    @property
    def steps(self) -> int:
        """Number of its steps."""
        return self.recent[-1]["step"] + 1 if self.recent else 0

    @property
    def elapsed_s(self) -> float:
        """Seconds from its first step to the end of its last."""
        return self.recent[-1]["elapsed_s"] if self.recent else 0.0

    @property
    def own_s(self) -> float:
        """The median seconds of its recent steps on the rank itself: compute and delay."""
        times = [each["compute_s"] + each["delay_s"] for each in self.recent]
        return median(times) if times else math.nan

    @property
    def whole_s(self) -> float:
        """The mean seconds of its recent steps from one to the next; NaN for fewer than two."""
        if len(self.recent) < 2:
            return math.nan
        return (self.elapsed_s - self.recent[0]["elapsed_s"]) / (len(self.recent) - 1)

    @property
    def samples_per_s(self) -> float:
        """Samples per second in the recent steps; NaN for fewer than two."""
        spent = self.whole_s * (len(self.recent) - 1)
        samples = [each["samples"] or 0 for each in self.recent]
        return sum(samples[1:]) / spent if spent > 0 else math.nan

    @property
    def loss(self) -> float:
        """The mean of the recent losses that are known and finite; NaN without any."""
        losses = [each["loss"] for each in self.recent if each["loss"] is not None]
        return mean(losses) if losses else math.nan

    def last(self, name: str) -> float:
        """A field of its newest record that is a number; NaN without any."""
        value = self.recent[-1].get(name) if self.recent else None
        return math.nan if value is None else value

    @property
    def waiting_share(self) -> float:
        """The share of the recent time in which it waited for other ranks."""
        whole = sum(each["compute_s"] + each["delay_s"] + each["average_s"] for each in self.recent)
        # Runs of earlier versions have not recorded what part of an average it was.
        waited = sum(
            each["waiting_s"] if "waiting_s" in each else each["average_s"] for each in self.recent
        )
        return waited / whole if whole else math.nan

    @property
    def staleness(self) -> int:
        """How many of its last steps were late: not in the average of their version."""
        late = 0
        for each in reversed(self.recent):
            if each["timely"] or each["synchronized"]:
                break
            late += 1
        return late

    @property
    def silent_s(self) -> float:
        """Seconds since it has written."""
        return time.monotonic() - self._grew

    @property
    def is_silent(self) -> bool:
        """Whether that is longer than it should take."""
        usual = self.whole_s if len(self.recent) > 1 else 0.0
        return self.silent_s > max(SILENCE, SILENT_STEPS * usual)


class Run:
    """A run's settings and ranks, as far as they are written.

    Args:
        directory: The run's.

    Attributes:
        settings: Those in its ``config.json``; {} until it is there.
        ranks: By number.
        ended: Whether the run is complete, or was stopped by a signal.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.settings: dict[str, Any] = {}
        self.ranks: dict[int, Rank] = {}
        self.ended = False

    def poll(self) -> None:
        """Read what was written since the last call."""
        ended = (self.directory / "summary.json").exists() or (self.directory / "model.pt").exists()
        if not self.settings:
            self.settings = read_json(self.directory / "config.json")
        for number, path in metrics_files(self.directory).items():
            if number not in self.ranks:
                self.ranks[number] = Rank(number, path)
        self.ranks = dict(sorted(self.ranks.items()))
        for rank in self.ranks.values():
            rank.poll()
        self.ended = ended  # looked at before the last lines, so that these are read

    @property
    def elapsed_s(self) -> float:
        """Seconds from the first step to the last one recorded."""
        return max((rank.elapsed_s for rank in self.ranks.values()), default=0.0)

    @property
    def steps(self) -> float:
        """Steps that count for the run's end: the slowest rank's, or of a common total the mean."""
        made = [rank.steps for rank in self.ranks.values() if rank.recent]
        if not made:
            return 0
        return mean(made) if self.settings.get("total_steps") else min(made)

    @property
    def done(self) -> float | None:
        """The share of the run that is done, from 0 to 1; None if its length is not known."""
        seconds, steps = self.settings.get("seconds"), self.settings.get("steps")
        if self.ended:
            return 1.0
        if seconds:
            return min(1.0, self.elapsed_s / seconds)
        return min(1.0, self.steps / steps) if steps else None

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the run's end, if it goes on as until now; None if not known."""
        return self.elapsed_s * (1 / self.done - 1) if self.done else None

    def ratios(self) -> dict[int, float]:
        """Return by rank the time of its recent steps ÷ the median of the other ranks' times."""
        times = {number: rank.own_s for number, rank in self.ranks.items() if rank.recent}
        ascending = sorted(times.values())
        if len(times) < 2:
            return dict.fromkeys(times, math.nan)
        ratios = {}
        for number, own in times.items():
            place = bisect_left(ascending, own)
            middle = median(ascending[:place] + ascending[place + 1 :])
            ratios[number] = own / middle if middle else math.nan
        return ratios


def record_of(line: bytes) -> Record | None:
    """Return the object of a line; None if it is damaged."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; {} if there is none, or it is not yet complete."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
