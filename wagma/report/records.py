"""The records of a run, as arrays: a directory of ``wagma train``, or a table of step times."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from wagma.methods import DEFAULT
from wagma.runs import metrics_files
from wagma.simulation import steps

__all__ = ["Recorded", "columns_of", "columns_of_records", "of_columns", "read"]

SYNCHRONOUS = "allreduce"  # what a table of step times is assumed to be of
UNEQUAL = 1.05  # numbers of steps that ranks have made in the same time
# What is read of each record; what older runs have not recorded is 0.
NEEDED = "compute_s", "delay_s"
OTHERS = (
    *("data_s", "optimizer_s", "cpu_s", "queued_s", "faults", "throttled_s", "gpu_reasons"),
    *("average_s", "waiting_s", "elapsed_s", "samples", "elements", "work"),
)
COLUMNS = (*NEEDED, *OTHERS)
DETAILED = "queued_s"  # is recorded together with the parts of a step
LINES = 512  # that are read at once: records take far more memory than columns


@dataclass(frozen=True)
class Recorded:
    """The steps of the ranks that trained.

    Attributes:
        path: the directory or the file.
        config: the run's ``config.json``; {} for a table.
        ranks: numbers of the ranks that made steps.
        columns: of each of them, by name as in its records, a float64 array of shape (steps,).
        wall: measured seconds of the run; None for a table.
        detailed: whether the parts of each step are recorded.
    """

    path: Path
    config: dict[str, Any]
    ranks: tuple[int, ...]
    columns: tuple[dict[str, np.ndarray], ...]
    wall: float | None
    detailed: bool

    @property
    def is_table(self) -> bool:
        """Whether it is a table of step times."""
        return self.wall is None

    @property
    def summary(self) -> dict[str, Any]:
        """The run's ``summary.json``; {} if it has none yet."""
        with contextlib.suppress(OSError, ValueError):
            summary: dict[str, Any] = json.loads((self.path / "summary.json").read_text())
            return summary
        return {}

    @property
    def algorithm(self) -> str:
        """The run's method with its options."""
        return self.config.get("algorithm", SYNCHRONOUS if self.is_table else DEFAULT)

    @property
    def limit(self) -> float | None:
        """Seconds for which all ranks trained; None: for a number of steps of each."""
        own_pace = max(self.counts) > UNEQUAL * min(self.counts)
        return self.wall if self.config.get("seconds") or own_pace else None

    @property
    def nodes(self) -> tuple[str | None, ...]:
        """The host of each rank that trained; None: not recorded."""
        names = self.config.get("node_of_rank") or []
        return tuple(names[rank] if rank < len(names) else None for rank in self.ranks)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of steps of each rank."""
        return tuple(len(columns["compute_s"]) for columns in self.columns)

    @property
    def compared(self) -> int:
        """The number of steps that every rank has made."""
        return min(self.counts)

    def column(self, name: str) -> np.ndarray:
        """Return a column of all ranks: float64 array of shape (compared steps, ranks)."""
        return np.array([columns[name][: self.compared] for columns in self.columns]).T

    def parts(self, rank: int) -> dict[str, np.ndarray]:
        """Return the seconds of a rank's steps by part, as `findings.PARTS`, and "waiting".

        Args:
            rank: the index in `ranks`.
        """
        return parts_of(self.columns[rank])

    def part(self, name: str) -> np.ndarray:
        """Return a part of all ranks' steps: float64 array of shape (compared steps, ranks)."""
        each = [parts_of(columns)[name][: self.compared] for columns in self.columns]
        return np.array(each).T

    def own(self, rank: int) -> np.ndarray:
        """Return the seconds of a rank's own steps, without waiting: shape (steps,).

        Args:
            rank: the index in `ranks`.
        """
        parts = self.parts(rank)
        del parts["waiting"]
        return np.sum([*parts.values()], axis=0)


def parts_of(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the seconds of a rank's steps by part, from its records."""
    known = columns["compute_s"] + columns["delay_s"] + columns["average_s"]
    between = np.diff(columns["elapsed_s"], prepend=0.0) - known
    inside = np.minimum(columns["waiting_s"], columns["average_s"])
    return {
        "data": columns["data_s"],
        "gradient": columns["compute_s"] - columns["data_s"] - columns["optimizer_s"],
        "delay": columns["delay_s"],
        "optimizer": columns["optimizer_s"],
        "averaging": columns["average_s"] - inside,
        "other": np.maximum(0.0, between - (columns["waiting_s"] - inside)),
        "waiting": columns["waiting_s"],
    }


def read(path: Path) -> Recorded:
    """Return the records of a run, also of one that has not ended.

    Args:
        path: a directory of ``wagma train``, or a text file with a line for each step and a column
            for each rank, in seconds.

    Raises:
        ValueError: it is neither, or has no steps; the message names the file, and the line.
        OSError: it cannot be read.
    """
    if not path.is_dir():
        return of_table(path, steps.read_trace(path))
    files = metrics_files(path)
    if not files:
        raise ValueError(f"{path} has no rank-*.jsonl: is it a run of wagma train?")
    config_file = path / "config.json"
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{config_file} is damaged: {error}") from error
    made = {}
    for rank, file in files.items():
        columns = columns_of(file)
        if len(columns["compute_s"]):
            made[rank] = columns
    if not made:
        raise ValueError(f"{path} has no steps")
    return of_columns(path, config, made)


def of_columns(
    path: Path,
    config: dict[str, Any],
    made: dict[int, dict[str, np.ndarray]],
    since_first: bool = False,
) -> Recorded:
    """Return the records of a run.

    Args:
        path, config: as of `Recorded`.
        made: of each rank that has made steps `COLUMNS`, as `columns_of` returns them.
        since_first: whether the steps are the last ones only; of the first of them, it is not known
            when it began, and it is left out.
    """
    detailed = not any(np.isnan(each[DETAILED][0]) for each in made.values())
    columns = tuple(cleaned(each, detailed, since_first) for each in made.values())
    wall = max(each["elapsed_s"][-1] for each in columns)
    if config.get("seconds"):
        wall = min(config["seconds"], wall)  # it may still train, or was stopped
    return Recorded(path, config, tuple(made), columns, float(wall), detailed)


def cleaned(
    columns: dict[str, np.ndarray], detailed: bool, since_first: bool
) -> dict[str, np.ndarray]:
    """Return a rank's columns without NaN.

    Args:
        columns, since_first: as for `of_columns`.
        detailed: as of `Recorded`; else averaging counts as waiting.
    """
    made = {
        name: compact(np.nan_to_num(of)) if np.isnan(of).any() else of
        for name, of in columns.items()
    }
    if not detailed:
        made["waiting_s"] = made["average_s"]
    if since_first:
        made["elapsed_s"] = made["elapsed_s"] - made["elapsed_s"][0]
        made = {name: of[1:] for name, of in made.items()}
    return made


def compact(column: np.ndarray) -> np.ndarray:
    """Return a column, without memory for its steps if all have one value, or NaN."""
    if len(column) and np.array_equal(column, np.broadcast_to(column[0], column.shape), True):
        return np.broadcast_to(column[0].copy(), column.shape)
    return column


def of_table(path: Path, times: np.ndarray) -> Recorded:
    """Return a table's records, in which ranks have nothing but step times.

    Args:
        path: its file.
        times: seconds, a float64 array of shape (steps, ranks).
    """
    nothing = np.zeros(len(times))
    columns = tuple(
        {**dict.fromkeys(OTHERS, nothing), "compute_s": own, "delay_s": nothing} for own in times.T
    )
    return Recorded(path, {}, tuple(range(times.shape[1])), columns, None, False)


def columns_of(file: Path, names: Sequence[str] = COLUMNS) -> dict[str, np.ndarray]:
    """Return columns of a rank's records, with at most 8 bytes for each step and name.

    The last line may be incomplete while the rank is writing.

    Args:
        file: the rank's.
        names: fields of the records.

    Returns:
        By name a float64 array of shape (steps,): NaN for null, and where it is not recorded.

    Raises:
        ValueError: a line is no record; the message names it.
        OSError: the file cannot be read.
    """
    parts, before = [columns_of_records([], names)], 0
    with file.open("rb") as lines:
        while some := list(itertools.islice(lines, LINES)):
            # What is written meanwhile continues this line.
            incomplete = not some[-1].endswith(b"\n")
            if incomplete:
                some.pop()
            parts.append(columns_of_records(records_of(some, file, before), names))
            before += len(some)
            if incomplete:
                break
    return {name: compact(np.concatenate([each.pop(name) for each in parts])) for name in names}


def records_of(lines: Sequence[bytes], file: Path, before: int) -> list[dict[str, Any]]:
    """Return the records of some lines.

    Args:
        lines: all of which are whole.
        file, before: theirs, and how many lines are before them, for an error.
    """
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return checked(json.loads(b"[%s]" % b",".join(lines)))  # faster than line by line
    for number, line in enumerate(lines, before + 1):
        try:
            checked([json.loads(line)])
        except (ValueError, KeyError, TypeError) as error:
            needed = " and ".join(NEEDED)
            raise ValueError(f"{file}, line {number}: no record with {needed}") from error
    raise ValueError(f"{file}: lines {before + 1} to {before + len(lines)} are no records")


def checked(records: list[Any]) -> list[dict[str, Any]]:
    """Return records, each of which has what is needed, or raise."""
    for name in NEEDED:
        for each in records:
            float(each[name])
    return records


def columns_of_records(
    records: Sequence[dict[str, Any]], names: Sequence[str] = COLUMNS
) -> dict[str, np.ndarray]:
    """Return records as columns, see `columns_of`."""
    return {
        name: np.array([each.get(name) for each in records], dtype=np.float64) for name in names
    }
