"""Shared parts of the benchmarks of figures about learning: each is one of a paper's, simulated."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from common import parser, report
from learning import Run, over_seeds, train_all, with_former


@dataclass(frozen=True)
class Case:
    """The conditions of one panel of a figure.

    Attributes:
        step_times: function of the seed that returns the steps' seconds, of shape (steps, ranks).
        machine: the `Machine`.
        nbytes: length that the model is to have for the network.
        settings: of `wagma.simulation.train`; "shards" and "task" are those of the task.
        methods: the names of the methods that are trained here; empty: all.
        target: the accuracy that is to be reached.
    """

    step_times: Callable[[int], np.ndarray]
    machine: object
    nbytes: int
    settings: dict
    methods: tuple[str, ...] = ()
    target: float = 0.9


@dataclass(frozen=True)
class Figure:
    """A figure of a paper.

    Attributes:
        name: of the result file.
        ranks: the number of ranks, in the name of the file.
        cases: the panels, by name.
        methods: {name: algorithm}; throughput and times are divided by those of the first.
        shares: the number of ranks' steps for each update of a method, where updates are counted.
    """

    name: str
    ranks: int
    cases: dict[str, Case]
    methods: dict[str, str]
    shares: dict[str, int] = field(default_factory=dict)


def main(doc: str, figure: Figure) -> None:
    """Train by all methods in all cases, print a table for each, and write the results.

    Args:
        doc: the benchmark's docstring.
        figure: what it measures.
    """
    arguments = parser(doc)
    arguments.add_argument("--seeds", type=int, default=5)
    arguments.add_argument(
        "--methods", nargs="+", choices=figure.methods, default=list(figure.methods)
    )
    arguments = arguments.parse_args()
    runs = []
    for case, of in figure.cases.items():
        for name in chosen(of, arguments.methods):
            for seed in range(arguments.seeds):
                settings = {"batch_size": 16, **of.settings, "nbytes": of.nbytes, "seed": seed}
                times = of.step_times(seed)
                key = case, name, seed
                runs.append(Run(key, figure.methods[name], times, of.machine, settings))
    found = train_all(runs)
    rows = {
        case: {
            name: figures(
                [found[case, name, seed] for seed in range(arguments.seeds)],
                of.target,
                figure.shares.get(name),
            )
            for name in chosen(of, arguments.methods)
        }
        for case, of in figure.cases.items()
    }
    rows = with_former(arguments, figure.name, figure.ranks, rows)
    print("\n\n".join(tables(rows, figure)))
    arguments.methods = [
        name for name in figure.methods if any(name in row for row in rows.values())
    ]
    report(arguments, figure.name, figure.ranks, rows)


def tables(rows: dict, figure: Figure) -> list[str]:
    """Return a figure's tables of Markdown from its results, as docs/papers.md shows them."""
    return [
        table(case, in_order(rows[case], figure.methods), of.target)
        for case, of in figure.cases.items()
    ]


def chosen(case: Case, names: list[str]) -> list[str]:
    """Return those of these methods that are trained in a case."""
    return [name for name in names if not case.methods or name in case.methods]


def in_order(row: dict, methods: dict[str, str]) -> dict:
    """Return a row in the methods' order."""
    return {name: row[name] for name in methods if name in row}


def figures(results: list[dict], target: float, share: int | None) -> dict:
    """Return a method's figures over the seeds, and its curve.

    Args:
        results: of the runs with all seeds.
        target: the accuracy that is to be reached.
        share: the number of ranks' steps for each update, where updates are counted.
    """
    of = over_seeds(results, target)
    steps = statistics.median(steps_to(each, target) for each in results)
    of["target_steps"] = steps if of["target_s"] is not None else None
    if share:
        ranks = results[0]["ranks"]
        of["updates"] = steps * ranks / share if of["target_s"] is not None else None
    return {**of, "curve": curve(results)}


def steps_to(result: dict, target: float) -> float:
    """Return the mean number of steps of a rank up to the target; inf if it is not reached."""
    pairs = zip(result["points"], result["steps"], strict=True)
    return next((steps for (_, accuracy), steps in pairs if accuracy >= target), math.inf)


def curve(results: list[dict]) -> dict:
    """Return the seeds' mean seconds, steps and accuracy of the evaluations, and its deviation."""
    count = min(len(each["points"]) for each in results)
    seconds, accuracies = np.array([each["points"][:count] for each in results]).transpose(2, 0, 1)
    steps = np.array([each["steps"][:count] for each in results])
    deviations = accuracies.std(axis=0, ddof=1) if len(results) > 1 else np.zeros(count)
    return {
        "seconds": rounded(seconds.mean(axis=0)),
        "steps": rounded(steps.mean(axis=0)),
        "accuracy": rounded(accuracies.mean(axis=0)),
        "deviation": rounded(deviations),
    }


def rounded(values: np.ndarray) -> list[float]:
    """Return numbers of five digits, which is what a picture shows of them."""
    return [float(f"{value:.5g}") for value in values]


def table(case: str, row: dict, target: float) -> str:
    """Return a case's table of Markdown."""
    counted = any("updates" in of for of in row.values())
    head = ["", "steps/s, ÷", f"s to {target:.0%}", "÷", "steps", "accuracy, %"]
    head[5:5] = ["updates", "s per update"] if counted else []
    lines = [f"**{case}**", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    first = next(iter(row.values()))
    for name, of in row.items():
        cells = [name, f"{of['samples_per_s'] / first['samples_per_s']:.2f}", *to_target(of, first)]
        if counted:
            updates = of.get("updates")
            cells += (
                [f"{updates:.0f}", f"{of['target_s'] / updates:.3f}"] if updates else ["–", "–"]
            )
        cells.append(f"{100 * of['accuracy']:.1f} ± {100 * (of['deviation'] or 0):.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def to_target(of: dict, first: dict) -> list[str]:
    """Return the cells about the target: seconds, how much faster than the first, and steps."""
    if of["target_s"] is None:
        reached = f" ({of['reached']} of {of['seeds']})" if of["reached"] else ""
        return [f"–{reached}", "–", "–"]
    seconds = f"{of['target_s']:.3g} ± {of['spread_s'] or 0:.2g}"
    seconds += "" if of["reached"] == of["seeds"] else f" ({of['reached']} of {of['seeds']})"
    faster = f"{first['target_s'] / of['target_s']:.2f}" if first["target_s"] else "–"
    return [seconds, faster, f"{of['target_steps']:.0f}"]
