"""The results of a comparison: figures over the seeds, a table, a plot and a file."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from collectives.agreement import counted
from wagma import plots, show
from wagma.info import versions
from wagma.job import UsageError
from wagma.runs import recorded, write_json

NOTHING = "–"
HIGHER = "accuracy", "bleu", "return"  # the metrics of which more is better
LOWER = "loss", "perplexity"


def directory_name(label: str) -> str:
    """Return the name of an algorithm's directory, without colons."""
    return label.replace(":", ",")


def report(
    settings: argparse.Namespace,
    directory: Path,
    ranks: int,
    summaries: dict[str, list[dict]],
    simulated: bool = False,
) -> None:
    """Write, plot and print the results so far, of trainings over MPI or in simulated time."""
    summaries = {label: of for label, of in summaries.items() if of}
    if not summaries:
        return
    first = next(iter(summaries.values()))
    results = {label: figures(of, first, settings.target) for label, of in summaries.items()}
    record = {
        "settings": recorded(settings),
        "ranks": ranks,
        "versions": versions(mpi=not simulated),
        "results": results,
        "runs": {
            label: [
                {"directory": f"seed-{each['seed']}/{directory_name(label)}", **each} for each in of
            ]
            for label, of in summaries.items()
        },
    }
    write_json(directory / "comparison.json", record)
    show.table({"algorithm": list(results), **rows(results, settings.target)})
    metric = metric_of(first[0])
    length = f"{settings.seconds:g} s" if settings.seconds else counted(settings.steps, "step")
    parts = counted(ranks, "rank"), length, counted(len(first), "seed")
    title = f"{directory.name}: {', '.join(parts)}"
    curves = {label: [points(each, metric) for each in of] for label, of in summaries.items()}
    rates = {label: [each["samples_per_s"] for each in of] for label, of in summaries.items()}
    plots.draw_comparison(directory, curves, rates, metric or "", settings.target, title)
    print(f"results are in {directory}", flush=True)


def figures(of: list[dict], first: list[dict], target: float | None) -> dict[str, Any]:
    """Return the figures of an algorithm's runs.

    Args:
        of: The summary of each of its runs, one for each seed.
        first: Those of the algorithm that ratios are relative to.
        target: The value of the metric to reach.

    Returns:
        samples_per_s, waiting_share, mean_staleness, bytes_sent: medians over the seeds; None if
            not known.
        ratio: the median of the seeds' ratios of samples per second to the first algorithm's.
        bound_ratio: the same if both were as fast as their bounds.
        bound_over_wall: the median.
        target_s: the median of the seconds until the target was reached; None without a target,
            or if most seeds do not reach it.
        reached: number of seeds that reach it.
        metric: the name of the metric of the next two, None without test batches.
        mean, deviation: of the final averaged models' metric over the seeds; no deviation for one,
            NaN if a seed's metric is not finite.
    """
    pairs = list(zip(of, first))
    metric = metric_of(of[0])
    last = [each[metric] for each in of] if metric else []
    times = [time_to(each, metric, target) for each in of]
    middle = median(times)
    return {
        "samples_per_s": median(each["samples_per_s"] for each in of),
        "ratio": median(a["samples_per_s"] / b["samples_per_s"] for a, b in pairs),
        "bound_ratio": median(rate_of_bound(a) / rate_of_bound(b) for a, b in pairs),
        "bound_over_wall": median(each["bound_over_wall"] for each in of),
        "target_s": middle if math.isfinite(middle) else None,
        "reached": sum(map(math.isfinite, times)),
        "metric": metric,
        "mean": mean(last) if last else None,
        "deviation": deviation_of(last),
        "waiting_share": median(each["waiting_share"] for each in of),
        "mean_staleness": middle_of(of, "mean_staleness"),
        "bytes_sent": middle_of(of, "bytes_sent"),
    }


def deviation_of(values: Sequence[float]) -> float | None:
    """Return the standard deviation, None of one value; NaN if one is not finite."""
    if len(values) < 2:
        return None
    return stdev(values) if all(map(math.isfinite, values)) else math.nan  # stdev refuses these


def rate_of_bound(summary: dict) -> float:
    """Return the samples per second of a run that is as fast as its bound, by steps or by time."""
    return summary["samples_per_s"] / summary["bound_over_wall"]


def middle_of(of: list[dict], name: str) -> float | None:
    """Return the median over the runs, None if one of them has no value."""
    values = [each[name] for each in of]
    return None if None in values else median(values)


def most(values: list[int | None]) -> int | None:
    """Return the largest value, None if one is not known."""
    return None if None in values else max(values)


def metric_of(summary: dict) -> str | None:
    """Return the metric to compare: one of `HIGHER`, else one of `LOWER`, else the first."""
    names = summary["metrics"]
    return next((name for name in (*HIGHER, *LOWER) if name in names), next(iter(names), None))


def check_target(target: float | None, names: Sequence[str]) -> None:
    """Refuse a target for a metric that is not known to rise or to fall in a training.

    Args:
        target: The value to reach, None without one.
        names: Of the task's metrics.

    Raises:
        UsageError: There is a target, and the metric to compare is such a one.
    """
    metric = metric_of({"metrics": names})
    if target is not None and metric is not None and metric not in (*HIGHER, *LOWER):
        raise UsageError(
            f"argument --target: whether {metric!r} rises is not known: metrics() needs one of "
            f"{', '.join((*HIGHER, *LOWER))}"
        )


def points(summary: dict, metric: str | None) -> list[tuple[float, float]]:
    """Return a run's evaluations as (elapsed seconds, metric)."""
    return [(each["elapsed_s"], each[metric]) for each in summary["evaluations"] if metric in each]


def time_to(summary: dict, metric: str | None, target: float | None) -> float:
    """Return the seconds until an evaluation reached the target; infinity if none did.

    One of `HIGHER` reaches it from below, one of `LOWER` from above, any other metric never.
    """
    if target is None or metric not in (*HIGHER, *LOWER):
        return math.inf
    sign = 1 if metric in HIGHER else -1
    reached = (s for s, value in points(summary, metric) if sign * value >= sign * target)
    return next(reached, math.inf)


def rows(results: dict[str, dict], target: float | None) -> dict[str, list[str]]:
    """Return the table's columns by their headings, one string for each algorithm."""
    of = list(results.values())
    metric = of[0]["metric"]
    scale, unit = plots.unit_of(metric)
    columns = {
        "samples/s": [f"{each['samples_per_s']:,.0f}" for each in of],
        "ratio": [f"{each['ratio']:.2f}" for each in of],
        "of bounds": [f"{each['bound_ratio']:.2f}" for each in of],
        "bound/wall": [f"{each['bound_over_wall']:.2f}" for each in of],
        f"s to {scale * target:g}{unit}" if target is not None else "": [
            NOTHING if each["target_s"] is None else f"{each['target_s']:.2f}" for each in of
        ],
        metric or "": [
            NOTHING if each["mean"] is None else spread(each, scale) + unit for each in of
        ],
        "waiting": [f"{each['waiting_share']:.1%}" for each in of],
        "staleness": [known(each["mean_staleness"]) for each in of],
        "MB sent": [megabytes(each["bytes_sent"]) for each in of],
    }
    columns.pop("", None)
    return columns


def spread(figures: dict, scale: float) -> str:
    """Return "95.28 ± 0.51", without the deviation for one seed."""
    text = f"{scale * figures['mean']:.4g}"
    if figures["deviation"] is None:
        return text
    return f"{text} ± {scale * figures['deviation']:.2g}"


def known(value: float | None) -> str:
    """Return a number, or a dash for None."""
    return NOTHING if value is None else f"{value:.2f}"


def megabytes(nbytes: float | None) -> str:
    """Return bytes in MB with two digits that are not 0, or a dash for None and 0."""
    if not nbytes:
        return NOTHING
    decimals = max(1, 1 - math.floor(math.log10(nbytes / 1e6)))
    return f"{nbytes / 1e6:,.{decimals}f}"
