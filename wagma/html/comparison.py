"""The page of a comparison: of `wagma compare`, or of `wagma simulate --train`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from collectives.agreement import counted
from wagma.comparison import metric_of, points, rows
from wagma.following import read_json
from wagma.html import run as of_run
from wagma.html.charts import Chart, bars, lines
from wagma.html.page import Page, Section, Table, read, settings_table
from wagma.plots import COLOURS, LABELS, color_of, unit_of

FILE = "comparison.json"
POINTS = 120  # of a curve
SHADED = "Mean of the seeds; shaded: lowest to highest."


def page(directory: Path) -> Page:
    """Return the page of a comparison."""
    record = read(directory / FILE, "settings", "results", "runs")
    settings, results, runs = record["settings"], record["results"], record["runs"]
    seeds = max(map(len, runs.values()))
    length = counted(settings["steps"], "step") if settings["steps"] else f"{settings['seconds']} s"
    parts = [counted(record["ranks"], "rank"), length, counted(seeds, "seed")]
    made = Page(directory.resolve().name, f"comparison: {', '.join(parts)}")
    columns = rows(results, settings.get("target"))
    cells = list(zip(results, *columns.values()))
    made.sections = [
        Section("Results", tables=[Table("", ("algorithm", *columns), cells)]),
        Section("Accuracy and loss", learning(directory, settings, runs)),
        Section("Throughput and time", times(directory, results, runs)),
    ]
    tables = [
        settings_table("settings", settings),
        settings_table("versions", record.get("versions", {})),
    ]
    made.sections.append(Section("Settings and versions", tables=tables, folded=True))
    return made


def colors_of(labels: Iterable[str]) -> dict[str, str]:
    """Return a color for each label: its method's, or if that is taken another one."""
    colors: dict[str, str] = {}
    others = iter(("#E377C2", "#17BECF", "#BCBD22", "#8C564B", "#9467BD", "#7F7F7F"))
    for label in labels:
        color = color_of(label)
        if color == "#000000":
            color = "currentColor"  # on a dark page as well
        colors[label] = next(others, color) if color in colors.values() else color
    return colors


def learning(directory: Path, settings: dict[str, Any], runs: dict[str, Any]) -> list[Chart]:
    """Return the plots of the averaged models' metric, and of the training loss."""
    charts = []
    metric = metric_of(next(iter(runs.values()))[0])
    if metric:
        scale, unit = unit_of(metric)
        target = settings.get("target")
        curves = {
            label: [
                [(at, scale * of_run.or_nan(value)) for at, value in points(each, metric)]
                for each in of
            ]
            for label, of in runs.items()
        }
        title = f"{metric}, %" if unit else metric
        spec = banded(curves, ("x", "time, s"), ("y", title), target and scale * target)
        note = SHADED + (f" Dotted: the target, {scale * target:g}{unit}." if target else "")
        charts.append(Chart(f"{metric} of the averaged model over time", spec, note))
    everything = {
        label: [of_run.read(directory / each["directory"]) for each in of]
        for label, of in runs.items()
    }
    for by_time in (False, True):
        curves = {
            label: [loss_of(each, by_time) for each in of if each.records]
            for label, of in everything.items()
        }
        curves = {label: of for label, of in curves.items() if of}
        if curves:
            x = ("x", "time, s" if by_time else "step")
            spec = banded(curves, x, ("y", "training loss"))
            over = "time" if by_time else "steps"
            note = f"Mean of all ranks' own batches. {SHADED}"
            charts.append(Chart(f"training loss over {over}", spec, note))
    return charts


def loss_of(run: of_run.Run, by_time: bool) -> list[tuple[float, float]]:
    """Return the ranks' mean loss over steps or time, in points."""
    ends = [c["elapsed_s"][-1] if by_time else len(c["loss"]) for c in run.records.values()]
    edges = np.linspace(0, min(ends), 1 + min(POINTS, min(map(len_of, run.records.values()))))
    means = [
        of_run.binned(
            columns["elapsed_s"] if by_time else 1.0 + np.arange(len(columns["loss"])),
            columns["loss"],
            edges,
        )
        for columns in run.records.values()
    ]
    known = np.isfinite(means).all(axis=0)
    middle = np.mean(np.array(means)[:, known], axis=0)
    return list(zip(edges[1:][known].tolist(), middle.tolist()))


def len_of(columns: of_run.Records) -> int:
    """Return the number of a rank's steps."""
    return len(columns["loss"])


def banded(
    curves: dict[str, list[list[tuple[float, float]]]],
    x: tuple[str, str],
    y: tuple[str, str],
    rule: float | None = None,
) -> dict[str, Any]:
    """Return the plot of each algorithm's curves, one for each seed, as their mean and range.

    Args:
        curves: By label and seed the points; those of a label may differ in number and place.
        x, y: Column and title of each axis.
        rule: A value to draw a line at.
    """
    columns: dict[str, list[Any]] = {name: [] for name in ("algorithm", "x", "y", "low", "high")}
    for label, of in curves.items():
        arrays = [np.array(each).T for each in of if each]
        if not arrays:
            continue
        place = np.mean([each[0][: min(map(shortest, arrays))] for each in arrays], axis=0)
        values = np.array([np.interp(place, *each) for each in arrays])
        columns["algorithm"] += len(place) * [label]
        for name, column in (
            ("x", place),
            ("y", values.mean(axis=0)),
            ("low", values.min(axis=0)),
            ("high", values.max(axis=0)),
        ):
            columns[name] += column.tolist()
    several = any(len(of) > 1 for of in curves.values())
    band = ("low", "high") if several else None
    colors = colors_of(curves)
    return lines(columns, x, y, by="algorithm", colors=colors, band=band, rule=rule)


def shortest(array: np.ndarray) -> int:
    """Return the number of points of a curve."""
    return array.shape[1]


def times(directory: Path, results: dict[str, Any], runs: dict[str, Any]) -> list[Chart]:
    """Return the bars of the throughput, and of where the ranks' time went."""
    rates = {label: [each["samples_per_s"] for each in of] for label, of in runs.items()}
    columns = {
        "algorithm": list(rates),
        "rate": [median(of) for of in rates.values()],
        "low": [min(of) for of in rates.values()],
        "high": [max(of) for of in rates.values()],
    }
    several = any(len(of) > 1 for of in rates.values())
    spec = bars(
        columns,
        ("rate", "samples per second"),
        ("algorithm", ""),
        colors=colors_of(rates),
        span=("low", "high") if several else None,
    )
    note = "Median of the seeds; line: lowest to highest." if several else ""
    charts = [Chart("throughput", spec, note)]
    spent = {label: shares(directory, of) for label, of in runs.items()}
    spent = {label: of for label, of in spent.items() if of}
    if spent:
        kinds = [kind for kind in COLOURS if any(of[kind] for of in spent.values())]
        rows = [(label, kind) for label in spent for kind in kinds]
        columns = {
            "algorithm": [label for label, _ in rows],
            "use": [LABELS[kind] for _, kind in rows],
            "share": [100 * spent[label][kind] for label, kind in rows],
        }
        colors = {LABELS[kind]: COLOURS[kind] for kind in kinds}
        spec = bars(
            columns,
            ("share", "share of the ranks' time, %"),
            ("algorithm", ""),
            by="use",
            colors=colors,
            most=100,
        )
        charts.append(Chart("where the ranks' time went", spec, "Of all ranks and seeds."))
    return charts


def shares(directory: Path, runs: list[dict[str, Any]]) -> dict[str, float]:
    """Return the shares of all ranks' time by use, of an algorithm's runs; {} if not recorded."""
    total: dict[str, float] = {}
    for each in runs:
        summary = read_json(directory / each["directory"] / "summary.json")
        for of_rank in summary.get("seconds_of_rank", []):
            for kind, seconds in of_rank.items():
                total[kind] = total.get(kind, 0.0) + seconds
    whole = sum(total.values())
    return {kind: seconds / whole for kind, seconds in total.items()} if whole else {}
