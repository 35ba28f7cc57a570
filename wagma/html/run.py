"""The page of a run of `wagma train`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from collectives.agreement import counted
from wagma.following import read_json
from wagma.html.charts import LEGEND_RANKS, Chart, bars, heat_map, lines
from wagma.html.page import Page, Section, settings_table, table_of
from wagma.plots import COLOURS, LABELS, unit_of
from wagma.report import Report, text
from wagma.report.records import columns_of
from wagma.runs import in_words, metrics_files, share

POINTS = 250  # of a rank's curve
SHARES = 25  # the same, of a curve of shares
CELLS = 8_000  # of a heat map
COLUMNS = 200  # of it at most
ROWS = 128
QUANTILES = (0.02, 0.98)  # of step times, between which colors differ
COLUMN_NAMES = ("loss", "elapsed_s", "compute_s", "delay_s", "average_s", "waiting_s")

Records = dict[str, np.ndarray]


@dataclass(frozen=True)
class Run:
    """A run's files.

    Attributes:
        directory: Their directory.
        settings: Those of ``config.json``; {} without.
        summary: That of ``summary.json``; {} while the run trains, or if it was stopped.
        records: By rank the columns of its metrics, float64 arrays of shape (steps,): those in
            `COLUMN_NAMES`, those that the task has added, and "timely", which is NaN in averages
            over all ranks.
    """

    directory: Path
    settings: dict[str, Any]
    summary: dict[str, Any]
    records: dict[int, Records]

    @property
    def wall_s(self) -> float:
        """Seconds of the run."""
        ends = [columns["elapsed_s"][-1] for columns in self.records.values()]
        return self.summary.get("wall_s", max(ends))

    @property
    def added(self) -> list[str]:
        """The names of what the task has added to the records."""
        return self.settings.get("recorded", [])


def read(directory: Path) -> Run:
    """Read a run's files."""
    settings, summary = (read_json(directory / f"{name}.json") for name in ("config", "summary"))
    run = Run(directory, settings, summary, {})
    for rank, path in metrics_files(directory).items():
        columns = metrics_of(path, run.added)
        if len(columns["elapsed_s"]):
            run.records[rank] = columns
    return run


def metrics_of(path: Path, added: Sequence[str]) -> Records:
    """Return a rank's metrics by name, with those that the task has added."""
    columns = columns_of(path, (*COLUMN_NAMES, *added, "timely", "synchronized"))
    together = columns.pop("synchronized") == 1
    return columns | {"timely": np.where(together, np.nan, columns["timely"])}


def page(directory: Path, found: Report | None) -> Page:
    """Return the page of a run, with what its report has found."""
    run = read(directory)
    settings = run.settings
    method = settings.get("algorithm", "")
    ranks = settings.get("ranks", len(run.records))
    state = "" if run.summary else "not ended, or stopped"
    subtitle = ", ".join(filter(None, [method, counted(ranks, "rank"), state]))
    made = Page(directory.resolve().name, subtitle, figures(run))
    if run.records:
        made.sections += [
            Section("Loss and results", learning(run)),
            Section("Where the time went", times(run)),
            *([] if found is None else stragglers(found)),
            Section("Timeliness and staleness", timeliness(run)),
        ]
    versions = settings.get("versions", {})
    others = {name: value for name, value in settings.items() if name != "versions"}
    tables = [settings_table("settings", others), settings_table("versions", versions)]
    made.sections.append(
        Section("Settings and versions", tables=[each for each in tables if each.rows], folded=True)
    )
    return made


def figures(run: Run) -> list[tuple[str, str]]:
    """Return the most important numbers of a run."""
    summary = run.summary
    found = [(value_of(name, summary[name]), f"test {name}") for name in summary.get("metrics", [])]
    for name in summary.get("recorded", []):
        found.append((value_of(name, summary[name]), name.replace("_", " ")))
    if run.records:
        found.append((f"{run.wall_s:,.4g} s", "wall time"))
    for name, form, words in (
        ("samples_per_s", "{:,.0f}", "samples per second"),
        ("bound_over_wall", "{:.2f}", "bound ÷ wall time"),
        ("waiting_share", "{:.1%}", "waiting"),
        ("timely_share", "{:.0%}", "timely"),
        ("mean_staleness", "{:.2f}", "mean staleness, versions"),
    ):
        if summary.get(name) is not None:
            found.append((form.format(summary[name]), words))
    return found


def value_of(name: str, value: float | None) -> str:
    """Return a test result without its name; JSON has null for one that is not finite."""
    return text.NOTHING if value is None else in_words(name, value).removeprefix(name)


def or_nan(value: float | None) -> float:
    """Return a number of a JSON file; NaN for null."""
    return math.nan if value is None else value


# Loss and results


def learning(run: Run) -> list[Chart]:
    """Return the plots of the loss and of the evaluations."""
    note = "Means of each rank's own batches."
    if len(run.records) > LEGEND_RANKS:
        note = f"Mean of {len(run.records)} ranks' own batches; shaded: lowest to highest."
    charts = [
        Chart("training loss over steps", training_metric(run, "loss", by_time=False), note),
        Chart("training loss over time", training_metric(run, "loss", by_time=True), note),
        *(
            Chart(f"{name.replace('_', ' ')} over time", training_metric(run, name, by_time=True))
            for name in run.added
            if any(np.isfinite(columns[name]).any() for columns in run.records.values())
        ),
    ]
    evaluations = run.summary.get("evaluations", [])
    if len(evaluations) > 1:
        for metric in run.summary["metrics"]:
            scale, unit = unit_of(metric)
            title = f"{metric}, %" if unit else metric
            values = {metric: [scale * or_nan(each[metric]) for each in evaluations]}
            if np.isnan(values[metric]).all():
                continue
            for place, words in (("step", "step"), ("elapsed_s", "time, s")):
                at = {place: [each[place] for each in evaluations]}
                spec = lines(at | values, (place, words), (metric, title), points=True)
                over = "steps" if place == "step" else "time"
                charts.append(Chart(f"{metric} of the averaged model over {over}", spec))
    return charts


def training_metric(run: Run, name: str, by_time: bool) -> dict[str, Any]:
    """Return the plot of a metric of the ranks' training over steps or time."""
    places = {
        rank: columns["elapsed_s"] if by_time else 1.0 + np.arange(len(columns[name]))
        for rank, columns in run.records.items()
    }
    values = {rank: columns[name] for rank, columns in run.records.items()}
    x = ("x", "time, s" if by_time else "step")
    title = name.replace("_", " ") if name in run.added else f"training {name}"
    return curves(places, values, x, ("y", title))


def curves(
    places: dict[int, np.ndarray],
    values: dict[int, np.ndarray],
    x: tuple[str, str],
    y: tuple[str, str],
    points: int = POINTS,
) -> dict[str, Any]:
    """Return the plot of a value of all ranks; of many, the mean between lowest and highest.

    Args:
        places: By rank, ascending: array of shape (steps,).
        values: By rank, as many.
        x, y: Column and title of each axis.
        points: Of a curve at most: means over equal parts of x.
    """
    last = max(each[-1] for each in places.values())
    edges = np.linspace(0, last, points + 1)
    means = {rank: binned(places[rank], values[rank], edges) for rank in places}
    if len(means) > LEGEND_RANKS:
        everyone = np.array(list(means.values()))
        shown = np.isfinite(everyone).any(axis=0)
        columns = {
            "x": edges[1:][shown],
            "y": np.nanmean(everyone[:, shown], axis=0),
            "low": np.nanmin(everyone[:, shown], axis=0),
            "high": np.nanmax(everyone[:, shown], axis=0),
        }
        return lines(columns, x, y, band=("low", "high"))
    found = {rank: np.isfinite(mean) for rank, mean in means.items()}
    columns = {
        "x": np.concatenate([edges[1:][found[rank]] for rank in means]),
        "y": np.concatenate([mean[found[rank]] for rank, mean in means.items()]),
        "rank": [f"rank {rank}" for rank in means for _ in range(found[rank].sum())],
    }
    return lines(columns, x, y, by="rank")


def binned(places: np.ndarray, values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return the means of the finite values between edges; NaN where there are none.

    Places after the last edge are left out; those before the first one count as after it.
    """
    finite = np.isfinite(values) & (places <= edges[-1])
    number = np.clip(np.searchsorted(edges, places[finite], side="left") - 1, 0, len(edges) - 2)
    count = np.bincount(number, minlength=len(edges) - 1)
    total = np.bincount(number, weights=values[finite], minlength=len(edges) - 1)
    return np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0)


# Times


def times(run: Run) -> list[Chart]:
    """Return the plots of the ranks' times."""
    spec, note = step_times(run)
    return [
        Chart("where each rank's time went", uses(run)),
        Chart("time of a rank's own steps", spread(run), SPREAD),
        Chart("own steps of every rank", spec, note, wide=True),
    ]


SPREAD = (
    "Without waiting and communication. Bar: median; line: from the 5th to the 95th percentile."
)


def uses(run: Run) -> dict[str, Any]:
    """Return the bars of the ranks' seconds by use."""
    seconds = run.summary.get("seconds_of_rank")
    by_rank = dict(enumerate(seconds)) if seconds else {r: used(c) for r, c in run.records.items()}
    kinds = [kind for kind in COLOURS if any(of[kind] for of in by_rank.values())]
    rows = [(rank, kind) for rank in by_rank for kind in kinds]
    columns = {
        "rank": [str(rank) for rank, _ in rows],
        "use": [LABELS[kind] for _, kind in rows],
        "seconds": [by_rank[rank][kind] for rank, kind in rows],
    }
    colors = {LABELS[kind]: COLOURS[kind] for kind in kinds}
    return bars(columns, ("seconds", "time, s"), ("rank", "rank"), by="use", colors=colors)


def used(columns: Records) -> dict[str, float]:
    """Return a rank's seconds by use, as in `Tally.seconds`, from its metrics."""
    total = {name: float(np.nansum(columns[name])) for name in COLUMN_NAMES}
    waiting = min(total["waiting_s"], total["average_s"])
    spent = {
        "compute": total["compute_s"],
        "delay": total["delay_s"],
        "waiting": waiting,
        "communicating": total["average_s"] - waiting,
    }
    return spent | {"other": max(0.0, columns["elapsed_s"][-1] - sum(spent.values()))}


def own_ms(columns: Records) -> np.ndarray:
    """Return the milliseconds of a rank's own steps."""
    return 1000 * (columns["compute_s"] + columns["delay_s"])


def spread(run: Run) -> dict[str, Any]:
    """Return the bars of the ranks' step times."""
    ends = [np.quantile(own_ms(each), (0.05, 0.5, 0.95)) for each in run.records.values()]
    low, middle, high = np.array(ends).T
    columns = {"rank": [str(rank) for rank in run.records], "ms": middle, "low": low, "high": high}
    return bars(columns, ("ms", "ms"), ("rank", "rank"), span=("low", "high"))


def step_times(run: Run) -> tuple[dict[str, Any], str]:
    """Return the heat map of the step times, and its note."""
    own = {rank: own_ms(columns) for rank, columns in run.records.items()}
    ranks = list(own)
    together = -(-len(ranks) // ROWS)
    groups = [ranks[start : start + together] for start in range(0, len(ranks), together)]
    steps = max(map(len, own.values()))
    width = -(-steps // max(1, min(COLUMNS, CELLS // len(groups))))
    columns: dict[str, list[float]] = {name: [] for name in ("rank", "last", "first", "end", "ms")}
    for group in groups:
        for first in range(0, steps, width):
            parts = [own[rank][first : first + width] for rank in group]
            if any(map(len, parts)):
                end = min(first + width, steps)
                cell = (group[0], group[-1], first, end, max(p.mean() for p in parts if len(p)))
                for name, value in zip(columns, cell):
                    columns[name].append(float(value))
    if together == 1:
        del columns["last"]
    note = f"Mean of {width} steps in each cell. " if width > 1 else "A cell for each step. "
    if together > 1:
        note += f"{together} ranks in each row, of which the slowest is shown. "
    low, high = np.quantile(columns["ms"], QUANTILES)
    note += f"Colors end at {low:,.4g} and {high:,.4g} ms."
    return heat_map(columns, len(groups), (float(low), float(high))), note


def stragglers(found: Report) -> list[Section]:
    """Return who is slow, what that costs, and what would help; and the ranks in numbers."""
    remedies = table_of(
        "in simulated time; says nothing about accuracy", text.remedy_columns(found)
    )
    _, *lines = text.lines(found)
    ranks = table_of("means of a step", text.columns(found))
    return [
        Section("Stragglers", tables=[remedies] if found.remedies else [], lines=lines),
        Section("Ranks in numbers", tables=[ranks], folded=found.size > LEGEND_RANKS),
    ]


# Timeliness


def timeliness(run: Run) -> list[Chart]:
    """Return the plots of who was late in group averages, and of what was averaged instead."""
    charts = []
    in_groups = {r: c for r, c in run.records.items() if np.isfinite(c["timely"]).any()}
    if any((columns["timely"] == 0).any() for columns in in_groups.values()):
        places = {rank: 1.0 + np.arange(len(c["timely"])) for rank, c in in_groups.items()}
        values = {rank: 100 * columns["timely"] for rank, columns in in_groups.items()}
        spec = curves(places, values, ("x", "step"), ("y", "timely, %"), SHARES)
        note = "Share of a rank's group averages that had its current model or gradient."
        charts.append(Chart("timeliness over steps", spec, note))
        shares = [
            share(int(np.nansum(c["timely"])), int(np.isfinite(c["timely"]).sum()))
            for c in in_groups.values()
        ]
        columns = {"rank": list(map(str, in_groups)), "share": [100 * each for each in shares]}
        spec = bars(columns, ("share", "timely, %"), ("rank", "rank"), most=100)
        charts.append(Chart("timeliness of each rank", spec))
    counts = run.summary.get("staleness_of_rank") or []
    total = staleness_of(counts)
    if total.sum():
        columns = {"age": list(map(str, range(len(total)))), "share": 100 * total / total.sum()}
        spec = bars(columns, ("share", "share of contributions, %"), ("age", "versions"))
        charts.append(Chart("staleness of what was averaged", spec))
    return charts


def staleness_of(counts: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the number of contributions of each age, of all ranks together."""
    total = np.zeros(max(map(len, counts), default=0), dtype=np.int64)
    for each in counts:
        total[: len(each)] += each
    return np.trim_zeros(total, "b")
