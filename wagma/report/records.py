"""The records of a run, as arrays: a directory of ``wagma train``, or a table of step times."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from wagma.methods import DEFAULT
from wagma.simulation import steps

__all__ = ["Recorded", "of_records", "read"]

SYNCHRONOUS = "allreduce"  # what a table of step times is assumed to be of
UNEQUAL = 1.05  # numbers of steps that ranks have made in the same time
# What is read of each record; what older runs have not recorded is 0.
NEEDED = "compute_s", "delay_s"
OTHERS = (
    *("data_s", "optimizer_s", "cpu_s", "queued_s", "faults"),
    *("average_s", "waiting_s", "elapsed_s", "samples", "elements", "work"),
)
DETAILED = "queued_s"  # is recorded together with all others


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

    @cached_property
    def parts(self) -> tuple[dict[str, np.ndarray], ...]:
        """The seconds of each rank's steps by part, as `findings.PARTS`, and "waiting"."""
        return tuple(map(parts_of, self.columns))

    def part(self, name: str) -> np.ndarray:
        """Return a part of all ranks' steps: float64 array of shape (compared steps, ranks)."""
        return np.array([parts[name][: self.compared] for parts in self.parts]).T

    def own(self, rank: int) -> np.ndarray:
        """Return the seconds of a rank's own steps, without waiting: shape (steps,).

        Args:
            rank: the index in `ranks`.
        """
        own = [seconds for name, seconds in self.parts[rank].items() if name != "waiting"]
        return np.sum(own, axis=0)


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
    files = sorted(path.glob("rank-*.jsonl"), key=lambda file: (len(file.name), file.name))
    if not files:
        raise ValueError(f"{path} has no rank-*.jsonl: is it a run of wagma train?")
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    everything = {int(file.stem.removeprefix("rank-")): records_of(file) for file in files}
    made = {rank: records for rank, records in everything.items() if records}
    if not made:
        raise ValueError(f"{path} has no steps")
    return of_records(path, config, made)


def of_records(
    path: Path,
    config: dict[str, Any],
    made: dict[int, list[dict[str, Any]]],
    since_first: bool = False,
) -> Recorded:
    """Return the records of a run.

    Args:
        path, config: as of `Recorded`.
        made: the records of each rank that has made steps.
        since_first: whether the steps are the last ones only; of the first of them, it is not known
            when it began, and it is left out.
    """
    detailed = all(DETAILED in records[0] for records in made.values())
    columns = tuple(columns_of(records, detailed) for records in made.values())
    if since_first:
        for each in columns:
            each["elapsed_s"] -= each["elapsed_s"][0]
        columns = tuple({name: of[1:] for name, of in each.items()} for each in columns)
    wall = config.get("seconds") or max(each["elapsed_s"][-1] for each in columns)
    return Recorded(path, config, tuple(made), columns, float(wall), detailed)


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


def records_of(file: Path) -> list[dict[str, Any]]:
    """Return a rank's records; the last line may be incomplete while the rank is writing."""
    lines = file.read_text(encoding="utf-8").split("\n")[:-1]
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            for name in NEEDED:
                float(record[name])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file}, line {number}: no record with {' and '.join(NEEDED)}"
            ) from error
        records.append(record)
    return records


def columns_of(records: list[dict[str, Any]], detailed: bool) -> dict[str, np.ndarray]:
    """Return a rank's columns; of a run without parts, averaging counts as waiting."""
    names = (*NEEDED, *OTHERS)
    columns = {
        name: np.array([each.get(name) or 0.0 for each in records], dtype=np.float64)
        for name in names
    }
    if not detailed:
        columns["waiting_s"] = columns["average_s"]
    return columns
