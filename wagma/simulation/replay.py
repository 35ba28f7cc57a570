"""Recorded trainings once more: the same averages of the same vectors, in simulated time.

A run of ``wagma train`` whose ranks do not wait for each other does not repeat: who is late depends
on the machine. Its metrics say which calls were timely, and in which groups. A job whose steps end
at suitable times makes the same averages, and so the same models, bit for bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from wagma.simulation.learning import DEFAULTS, OUTCOME, Learned, learn, loaded, settings_of
from wagma.simulation.machine import FREE, Machine
from wagma.simulation.ranks import Job
from wagma.tasks.contract import Task

__all__ = ["replay", "times_by_groups", "times_by_versions"]

Records = list[list[dict[str, Any]]]

LATE = 0.5  # of the time from one version to the next
LATENCY = 1e-3  # of that: shorter than LATE by more than the hops of an activation


def times_by_versions(records: Records) -> np.ndarray:
    """Return when steps of a wait-avoiding method end: a float64 array of shape (steps, ranks).

    Version v begins at time v, by all timely calls of it. A late call is made after the version
    that it returned, and before the next one.

    Args:
        records: every rank's, by step.
    """
    return np.array(
        [
            [each["version"] if is_timely(each) else each["source"] + LATE for each in of_rank]
            for of_rank in records
        ]
    ).T


def is_timely(record: dict[str, Any]) -> bool:
    """Return whether a call took part in its version, or was one of all ranks."""
    return bool(record["timely"] or record["synchronized"])


def times_by_groups(records: Records) -> np.ndarray:
    """Return when steps of Partial Reduce end: its groups form one after the other.

    Args:
        records: every rank's, by step.

    Returns:
        float64 array of shape (steps, ranks).

    Raises:
        ValueError: the records do not fit together.
    """
    made = [0] * len(records)
    times = np.zeros((len(records[0]), len(records)))
    number = 0

    def next_group(rank: int) -> list[int] | None:
        of_rank = records[rank]
        return of_rank[made[rank]]["group"] if made[rank] < len(of_rank) else None

    while any(next_group(rank) is not None for rank in range(len(records))):
        found = next(
            (
                group
                for rank in range(len(records))
                if (group := next_group(rank)) is not None
                and all(next_group(other) == group for other in group)
            ),
            None,
        )
        if found is None:
            raise ValueError("the recorded groups do not fit together: some calls are missing")
        number += 1
        for rank in found:
            times[made[rank], rank] = number
            made[rank] += 1
    return times


# How the calls of each method that can be replayed are ordered.
ORDERS: dict[str, Callable[[Records], np.ndarray]] = {
    "wagma": times_by_versions,
    "eager-sgd": times_by_versions,
    "partial-reduce": times_by_groups,
}


def replay(run: Path, task: Task | Path | str, machine: Machine | None = None) -> Learned:
    """Train as a recorded run did, with the same averages of the same vectors.

    Args:
        run: the directory of a run of ``wagma train``, of a number of steps.
        task: what it trained: a `Task`, or the path of its script.
        machine: how many ranks were on a node, `ranks_per_node`, on which the order of additions
            depends; None: all were on one.

    Returns:
        A `Learned`, as of `wagma.simulation.train`.

    Raises:
        ValueError: the run's method cannot be replayed, or the replay made other averages.
        OSError: the run's files cannot be read.
    """
    config = json.loads((run / "config.json").read_text())
    label = config["algorithm"]
    order = ORDERS.get(label.split(":")[0])
    if order is None:
        raise ValueError(
            f"{run} was trained with {label}: its records do not say which averages it made; of "
            f"runs that do not repeat, those of {', '.join(ORDERS)} can be replayed"
        )
    records = read(run, config["ranks"])
    if config["seconds"] is not None or len({len(each) for each in records}) > 1:
        raise ValueError(f"{run} was not trained for a number of steps")
    nodes = config["ranks"] if machine is None else machine.ranks_per_node
    network = Machine(LATENCY, 0, 0, 0, math.inf, memory=FREE.memory, ranks_per_node=nodes)
    job = Job(network, order(records), absolute=True)
    given = {name: config[name] for name in DEFAULTS if name in config}
    settings = settings_of(label, job, given, config["options"])
    learned = learn(settings, loaded(task, settings), job, batched=False)
    check(run, records, learned)
    return learned


def read(run: Path, ranks: int) -> Records:
    """Return every rank's records, by step."""
    return [
        [json.loads(line) for line in (run / f"rank-{rank:04}.jsonl").read_text().splitlines()]
        for rank in range(ranks)
    ]


def check(run: Path, records: Records, learned: Learned) -> None:
    """Raise ValueError if the replay made other averages than the run."""
    for rank, (of_rank, made) in enumerate(zip(records, learned.outcomes, strict=True)):
        for step, (one, other) in enumerate(zip(of_rank, made, strict=True)):
            for name in OUTCOME:
                if one[name] != other[name]:
                    raise ValueError(
                        f"{run}: in step {step} of rank {rank} the {name} was {one[name]}, and is "
                        f"{other[name]} in the replay"
                    )
