"""Shared parts of the benchmarks that train in simulated time: runs in parallel, and tables."""

from __future__ import annotations

import functools
import math
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import numpy as np
from common import former, report


class Run(NamedTuple):
    """A training, and what it is compared by.

    Attributes:
        name: of the row and column of a table, and other keys, as a tuple.
        label: the algorithm.
        step_times: float64 array of shape (steps, ranks), in seconds.
        machine: the `Machine`.
        settings: of `wagma.simulation.train`.
    """

    name: tuple
    label: str
    step_times: np.ndarray
    machine: object
    settings: dict


def train(run: Run) -> dict:
    """Train on the digits or a script, alone in its process; return figures and evaluations."""
    import torch

    from wagma.simulated_training import Alone
    from wagma.simulation import train
    from wagma.simulation.gradients import threads
    from wagma.tasks import digits

    settings = dict(run.settings)
    shards = settings.pop("shards", "iid"), settings.pop("dirichlet_alpha", None)
    path, model = settings.pop("task", None), settings.pop("model", None)
    task = scripted(path) if path else digits.task(shards[0], Alone(), shards[1])
    task = task._replace(model=model) if model else task
    began = time.perf_counter()
    torch.set_num_threads(1)
    with threads(1):
        learned = train(task, run.label, run.step_times, run.machine, **settings)
    summary = learned.summary
    return {
        **{name: summary[name] for name in summary["metrics"]},
        "evaluations": summary["evaluations"],
        "wall_s": summary["wall_s"],
        "samples_per_s": summary["samples_per_s"],
        "waiting_share": summary["waiting_share"],
        "timely_share": summary["timely_share"],
        "points": [(each["elapsed_s"], each.get("accuracy")) for each in summary["evaluations"]],
        "steps": [each["step"] for each in summary["evaluations"]],
        "ranks": len(summary["steps_of_rank"]),
        "took_s": time.perf_counter() - began,
    }


@functools.cache
def scripted(path: Path):
    """Return a script's task, which a process can load only once."""
    from wagma.tasks import script

    return script.load(path)


def train_all(runs: list[Run]) -> dict[tuple, dict]:
    """Train all, as many at a time as there are cores; return the results by name."""
    results = {}
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        pending = {pool.submit(train, run): run for run in runs}
        for number, done in enumerate(as_completed(pending), 1):
            run = pending[done]
            results[run.name] = done.result()
            if number % 20 == 0 or number == len(runs):
                print(f"{number} of {len(runs)} trainings", file=sys.stderr, flush=True)
    return {run.name: results[run.name] for run in runs}


def with_former(arguments, name: str, ranks: int, rows: dict) -> dict:
    """Return the rows with the columns of other methods that a former run has written."""
    columns = former(arguments, name, ranks)
    return {row: {**columns.get(row, {}), **of} for row, of in rows.items()}


def tabulate(
    arguments, name: str, ranks: int, found: dict[tuple, dict], cases, methods, corner: str = ""
) -> dict:
    """Print the table of all trainings over their seeds, write it, and return its rows.

    Args:
        arguments: with `seeds`, `target` and `methods`, which it sets to those of the table.
        name, ranks: of the result file.
        found: what `train_all` returns, by (case, method, seed).
        cases, methods: of the table, in order; not every method has been trained in each case.
        corner: the table's first heading.
    """
    rows = {}
    for case in cases:
        names = [method for method in arguments.methods if (case, method, 0) in found]
        of = {each: [found[case, each, seed] for seed in range(arguments.seeds)] for each in names}
        rows[case] = {each: over_seeds(runs, arguments.target) for each, runs in of.items()}
    rows = with_former(arguments, name, ranks, rows)
    arguments.methods = [method for method in methods if method in next(iter(rows.values()))]
    show(corner, rows, arguments.methods)
    report(arguments, name, ranks, rows)
    return rows


def show(corner: str, rows: dict, methods: list[str]) -> None:
    """Print a table, of ratios to the first of these methods that a row has."""
    print(f"| {corner} | {' | '.join(methods)} |")
    print("|---" * (1 + len(methods)) + "|")
    for name, row in rows.items():
        first = next(row[method] for method in methods if method in row)
        cells = [cell(row[method], first) if method in row else "–" for method in methods]
        print(f"| {name} | {' | '.join(cells)} |")


def time_to(result: dict, target: float) -> float:
    """Return the simulated seconds to the first evaluation that reaches the target; else inf."""
    return next((at for at, accuracy in result["points"] if accuracy >= target), math.inf)


def over_seeds(results: list[dict], target: float) -> dict:
    """Return the figures of one algorithm's runs with several seeds."""
    times = [time_to(each, target) for each in results]
    reached = [each for each in times if math.isfinite(each)]
    accuracies = [each["accuracy"] for each in results]
    middle = statistics.median(times)
    return {
        "samples_per_s": statistics.median(each["samples_per_s"] for each in results),
        "accuracy": statistics.mean(accuracies),
        "deviation": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        "target_s": middle if math.isfinite(middle) else None,
        "spread_s": statistics.stdev(reached) if len(reached) > 1 else None,
        "reached": len(reached),
        "seeds": len(results),
    }


def cell(figures: dict, first: dict) -> str:
    """Return "1.23, 4.5 ± 0.3 s", with a dash if most seeds do not reach the target."""
    ratio = figures["samples_per_s"] / first["samples_per_s"]
    if figures["target_s"] is None:
        missed = f" ({figures['reached']} of {figures['seeds']})" if figures["reached"] else ""
        return f"{ratio:.2f}, –{missed}"
    text = f"{ratio:.2f}, {figures['target_s']:.1f}"
    if figures["spread_s"] is not None:
        text += f" ± {figures['spread_s']:.1f}"
    few = "" if figures["reached"] == figures["seeds"] else f" ({figures['reached']})"
    return f"{text} s{few}"
