"""The directory of a run, its metrics, and their summary."""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import os
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives import topology
from wagma.job import UsageError, from_rank_0
from wagma.progress import added_in_words

if TYPE_CHECKING:
    from collectives.statistics import Statistics

FLUSH_EVERY = 1.0
log = logging.getLogger(__name__)
POINTS = 60  # per curve: more would show the batches' noise


def make_directory(runs_dir: Path, name: str | None, comm) -> Path:
    """Make a new run's directory and return it, the same on every rank; collective.

    Args:
        runs_dir, name: See `new_directory`.
        comm: An mpi4py communicator.

    Raises:
        UsageError: As `new_directory` does on rank 0; the same on every rank.
    """
    run = from_rank_0(lambda: new_directory(runs_dir, name), comm)
    run.mkdir(parents=True, exist_ok=True)
    return run


def new_directory(runs_dir: Path, name: str | None) -> Path:
    """Make a new run's directory, which no other job can make as well, and return it.

    Args:
        runs_dir: The directory of all runs.
        name: The run's name; None: the first free one of `default_names`.

    Raises:
        UsageError: The directory exists or cannot be made.
    """
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the directory {runs_dir}: {error.strerror}") from error
    for run in (runs_dir / each for each in ([name] if name else default_names())):
        try:
            run.mkdir()
        except FileExistsError as error:
            if name:
                raise UsageError(f"{run} exists: choose another --name, or remove it") from error
        except OSError as error:
            raise UsageError(f"cannot make the run's directory {run}: {error.strerror}") from error
        else:
            return run


def job_numbers() -> list[str]:
    """Return Slurm's number of the job, and its index in an array; nothing elsewhere."""
    job = os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ.get("SLURM_JOB_ID")
    return [part for part in (job, os.environ.get("SLURM_ARRAY_TASK_ID")) if part]


def default_names() -> Iterator[str]:
    """Yield the date and time, with Slurm's numbers of the job, then the same with -2, -3, …"""
    first = "_".join([time.strftime("%Y-%m-%d_%H-%M-%S"), *job_numbers()])
    yield first
    yield from (f"{first}-{number}" for number in itertools.count(2))


def metrics_file(run: Path, rank: int) -> Path:
    """Return the file of a rank's metrics in a run's directory."""
    return run / f"rank-{rank:04}.jsonl"


def metrics_files(run: Path) -> dict[int, Path]:
    """Return the files of metrics in a run's directory by their ranks, in the ranks' order."""
    files = {int(path.stem.removeprefix("rank-")): path for path in run.glob("rank-*.jsonl")}
    return dict(sorted(files.items()))


def recorded(settings: argparse.Namespace) -> dict[str, Any]:
    """Return the command line's settings by name, the chosen methods by label, for a record."""
    if "algorithm" in settings:
        choice = settings.algorithm
        return vars(settings) | {"algorithm": choice.label, "options": choice.options}
    compared = {each.label: each.options for each in settings.algorithms}
    return vars(settings) | {"algorithms": list(compared), "compared": compared}


def write_json(path: Path, value: dict) -> None:
    """Write a value to a file as indented JSON."""
    path.write_text(in_json(value, indent=2) + "\n", encoding="utf-8")


def in_json(value: object, indent: int | None = None) -> str:
    """Return a value as JSON; numbers that are not finite, which JSON lacks, become null."""
    return json.dumps(_finite(value), indent=indent, default=str, allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class JsonLines:
    """A file with one JSON object per line, flushed once a second and when it is closed.

    While that fails, as on a full disk, lines stay in memory; the first time, a warning says so.

    Args:
        path: The file.
        size: Bytes of it that are kept, if it is there.
    """

    def __init__(self, path: Path, size: int = 0) -> None:
        self._file = path.open("ab", buffering=0)
        self._file.truncate(min(size, path.stat().st_size))
        self._lines = bytearray()  # not written
        self._flushed = time.monotonic()
        self._has_failed = False

    def write(self, record: dict) -> None:
        """Append a record, as `in_json` writes it."""
        self._lines += in_json(record).encode() + b"\n"
        now = time.monotonic()
        if now - self._flushed >= FLUSH_EVERY:
            self._flushed = now
            self._try_to_flush()

    def _flush(self) -> None:
        while self._lines:
            del self._lines[: self._file.write(self._lines)]

    def _try_to_flush(self) -> None:
        try:
            self._flush()
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                log.warning("cannot write %s for now: %s", self._file.name, error.strerror)

    def size(self) -> int:
        """Have all of it written to the disk, and return the file's bytes.

        Raises:
            OSError: It cannot be written.
        """
        self._flush()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Write out what is still in memory, and close the file.

        Raises:
            OSError: It cannot be written.
        """
        if self._file.closed:
            return
        with self._file:
            self._flush()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the file; what cannot be written is left out, and a warning says so."""
        try:
            self.close()
        except OSError as error:
            log.warning("%s lacks its last lines: %s", self._file.name, error.strerror)


class Curve:
    """A rank's loss over its steps, thinned to about `POINTS` means.

    Args:
        steps: Number of steps of the run; None if unknown.
        seconds: Length of the run.

    Attributes:
        points: tuples (step, elapsed seconds, loss); step, counted from 1, and time are those of
            the last step in the mean.
    """

    def __init__(self, steps: int | None, seconds: float | None = None) -> None:
        self.points: list[tuple[int, float, float]] = []
        self._by_time = steps is None
        self._width = seconds / POINTS if self._by_time else math.ceil(steps / POINTS)
        self._steps = 0
        # Of the last point: its index among evenly spaced points, and its number of steps.
        self._place, self._count = -1, 0

    def add(self, elapsed_s: float, loss: float) -> None:
        """Add the next step."""
        place = (elapsed_s if self._by_time else self._steps) // self._width
        self._steps += 1
        if place > self._place:
            self._place, self._count = place, 1
            self.points.append((self._steps, elapsed_s, loss))
            return
        self._count += 1
        part = 1 / self._count
        mean = (1 - part) * self.points[-1][2] + part * loss
        self.points[-1] = (self._steps, elapsed_s, mean)


class Tally:
    """The sums over one rank's steps.

    Args:
        steps, seconds: Number of steps of the run, or its length.

    Attributes:
        step_seconds: Time of each step on this rank itself: compute and injected delay.
        samples, work, steps_in_time: Number of samples in the steps that were completed in these
            seconds, their work if the task tells it, and number of these steps.
        earlier, before: Seconds of the run, and steps of a rank, before the first that counts.
        elapsed_s: Seconds since then.
        lost_since: The step, counted from 1, since which no loss was finite; None if the last was.
        report: The method's report on the run, see `interfaces.Averager`.
    """

    def __init__(self, steps: int | None, seconds: float | None = None) -> None:
        self.limit = math.inf if seconds is None else seconds
        self.earlier, self.before = 0.0, 0
        self.steps = 0
        self.steps_in_time = 0
        self.lost_since: int | None = None
        self.samples = 0
        self.work = 0.0
        self.group_calls = 0
        self.timely_calls = 0
        self.elapsed_s = 0.0
        self.compute_s = 0.0
        self.delay_s = 0.0
        self.waiting_s = 0.0
        self.communicating_s = 0.0
        self.bytes_sent = self.left_out = 0
        self.staleness: tuple[int, ...] = ()
        self.report: dict[str, float | None] = {}
        self.step_seconds = array("d")
        self.loss = Curve(steps, seconds)

    def begin_at(self, seconds: float, steps: int) -> None:
        """Count from here on alone: what was before is of another number of ranks."""
        self.earlier, self.before = seconds, steps
        self.limit -= seconds

    def add(self, record: dict) -> None:
        """Add one step's record, with the seconds since the run began."""
        self.step_seconds.append(record["compute_s"] + record["delay_s"])
        self.compute_s += record["compute_s"]
        self.delay_s += record["delay_s"]
        self.elapsed_s = record["elapsed_s"] - self.earlier
        self.loss.add(self.elapsed_s, record["loss"])
        self.steps += 1
        if math.isfinite(record["loss"]):
            self.lost_since = None
        elif self.lost_since is None:
            self.lost_since = self.steps
        if self.elapsed_s <= self.limit:
            self.samples += record["samples"]
            self.work += record.get("work") or 0.0
            self.steps_in_time += 1
        if not record["synchronized"]:
            self.group_calls += 1
            self.timely_calls += record["timely"]

    def add_averaging(self, statistics: Statistics) -> None:
        """Add the collective's statistics of the steps."""
        self.waiting_s += statistics.waiting
        self.communicating_s += statistics.communicating
        self.left_out += statistics.left_out
        if statistics.bytes_sent is None:  # a method of torch does not count them
            self.bytes_sent = None
        elif self.bytes_sent is not None:
            self.bytes_sent += statistics.bytes_sent
        ages = itertools.zip_longest(self.staleness, statistics.staleness, fillvalue=0)
        self.staleness = tuple(map(sum, ages))

    @property
    def timely_share(self) -> float:
        """The share of group averages, without synchronizations, that had this rank's vector."""
        return share(self.timely_calls, self.group_calls)

    @property
    def seconds(self) -> dict[str, float]:
        """This rank's seconds by use; "other" is the rest, such as writing the metrics."""
        spent = {
            "compute": self.compute_s,
            "delay": self.delay_s,
            "waiting": self.waiting_s,
            "communicating": self.communicating_s,
        }
        return {**spent, "other": max(0.0, self.elapsed_s - sum(spent.values()))}


def mean_staleness(tallies: list[Tally]) -> float | None:
    """Return the mean age of the vectors averaged, in versions; None if not counted."""
    counts = [count for tally in tallies for count in tally.staleness]
    versions = [version for tally in tallies for version in range(len(tally.staleness))]
    return float(np.average(versions, weights=counts)) if sum(counts) else None


def trimmed(counts: tuple[int, ...]) -> list[int]:
    """Return counts without the zeros at their end."""
    return list(counts[: max((age for age, count in enumerate(counts, 1) if count), default=0)])


def put_together(reports: list[dict]) -> dict:
    """Return the ranks' reports in one: lists of values per rank, and values that one rank knows.

    Replace "met", the ranks that each rank's groups were with (None if it makes no steps), by ρ.
    """
    names = dict.fromkeys(name for report in reports for name in report)
    values = {name: [report.get(name) for report in reports] for name in names}
    rho = {}
    if "met" in values:
        met = values.pop("met")
        ranks = [rank for rank, row in enumerate(met) if row is not None]
        matrix = topology.averaging_matrix_of(np.array([met[rank][ranks] for rank in ranks]))
        rho["rho"] = None if matrix is None else topology.rho(matrix)
    return rho | {
        name: of if name.endswith("_of_rank") else next((v for v in of if v is not None), None)
        for name, of in values.items()
    }


def last_recorded(recorded: list[dict[str, float | None]]) -> dict[str, Any]:
    """Return a summary's values of what a task adds to the ranks' records.

    Args:
        recorded: Of each rank what it has added to the last one, by name.

    Returns:
        "recorded": the names; by name the mean of the ranks that have a value, and NAME_of_rank.
    """
    found: dict[str, Any] = {"recorded": list(recorded[0])}
    for name in recorded[0]:
        values = [each[name] for each in recorded]
        known = [value for value in values if value is not None]
        found[name] = sum(known) / len(known) if known else None
        found[f"{name}_of_rank"] = values
    return found


def share(part: int, whole: int) -> float:
    """Return part ÷ whole, and 1 for 0 ÷ 0."""
    return part / whole if whole else 1.0


def summarize(tallies: list[Tally], bound: Callable[[list[array], float | None], float]) -> dict:
    """Return the job's summary, from the ranks' tallies.

    ``bound_s`` is the time that the job would take if averaging were free and ranks waited only for
    those that the method must wait for; ``bound_over_wall`` tells how near the job came to it. If
    ranks train for a fixed time, that is ``wall_s``, and ``bound_s`` is the time in which they
    would have made as many steps.

    Args:
        tallies: Every rank's.
        bound: Function of the seconds that every rank's steps have taken on that rank itself, and
            of a time limit. It returns ``bound_s``, or with a limit the number of steps that ranks
            would make within it if averaging were free.
    """
    seconds, limit = [each.step_seconds for each in tallies if each.step_seconds], tallies[0].limit
    if limit == math.inf:
        wall_s = max(tally.elapsed_s for tally in tallies)
        bound_s = bound(seconds, None)
    else:
        wall_s = limit
        bound_s = limit * sum(tally.steps_in_time for tally in tallies) / bound(seconds, limit)
    timely_calls = sum(tally.timely_calls for tally in tallies)
    group_calls = sum(tally.group_calls for tally in tallies)
    samples = sum(tally.samples for tally in tallies)
    return {
        "wall_s": wall_s,
        "bound_s": bound_s,
        "bound_over_wall": bound_s / wall_s,
        "samples_per_s": samples / wall_s,
        "timely_share": share(timely_calls, group_calls),
        "timely_share_of_rank": [tally.timely_share for tally in tallies],
        "waiting_share": sum(t.waiting_s for t in tallies) / sum(t.elapsed_s for t in tallies),
        "mean_staleness": mean_staleness(tallies),
        "staleness_of_rank": [trimmed(tally.staleness) for tally in tallies],
        "bytes_sent_of_rank": [tally.bytes_sent for tally in tallies],
        "steps_of_rank": [tally.steps for tally in tallies],
        "not_finite_of_rank": [tally.left_out for tally in tallies],
        "without_loss": without_loss(tallies),
        **put_together([tally.report for tally in tallies]),
        "seconds_of_rank": [tally.seconds for tally in tallies],
    }


def without_loss(tallies: list[Tally]) -> list[int]:
    """Return the ranks of which no loss was finite, if losses of others were."""
    trained = [rank for rank, tally in enumerate(tallies) if tally.steps]
    found = [rank for rank in trained if tallies[rank].lost_since == 1]
    return found if len(found) < len(trained) else []


def notes(summary: dict[str, Any]) -> Iterator[str]:
    """Yield what a run's summary has of ranks whose losses or updates were not finite, in words."""
    for rank in summary.get("without_loss", ()):
        yield f"no loss of rank {rank} was finite"
    counts = enumerate(summary.get("not_finite_of_rank", ()))
    if several := [f"{count:,} of rank {rank}" for rank, count in counts if count]:
        yield f"left out of averages, as not finite: {', '.join(several)}"


def lasting(seconds: Sequence[Sequence[float] | np.ndarray], limit: float) -> np.ndarray:
    """Return all ranks' steps, each rank's repeated until they take at least `limit`.

    Args:
        seconds: for each rank the seconds of its steps, not all 0.
        limit: in seconds.

    Returns:
        float64 array of shape (ranks, steps).
    """
    count = max(len(each) * (1 + math.ceil(limit / np.sum(each))) for each in seconds)
    return np.array([np.resize(each, count) for each in seconds])


def results_in_words(summary: dict[str, Any]) -> str:
    """Return the test results of a summary, and what the task has added to the last records."""
    tested = ", ".join(in_words(name, summary[name]) for name in summary["metrics"])
    added = {name: summary[name] for name in summary["recorded"]}
    return ", ".join([f"test {tested}" if tested else "no test batches", *added_in_words(added)])


def in_words(name: str, value: float) -> str:
    """Return "accuracy 96.11%" or "loss 0.1234"."""
    return f"{name} {value:.2%}" if name == "accuracy" else f"{name} {value:.4g}"


def lost(since: list[int | None], steps: list[int]) -> int | None:
    """Return the step since which no rank's loss was finite, None if one ended with a finite loss.

    Args:
        since: Every rank's, as in `Tally.lost_since`.
        steps: The number of steps of every rank: those that made none do not count.
    """
    trained = [step for step, made in zip(since, steps) if made]
    return None if not trained or None in trained else max(trained)
