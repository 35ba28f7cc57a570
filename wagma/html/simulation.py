"""The page of a simulation: of `wagma simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from wagma.html.charts import Chart, bars, lines
from wagma.html.comparison import colors_of
from wagma.html.page import Page, Section, Table, read, settings_table

FILE = "simulation.json"
COLUMNS = {
    "wall s": ("wall_s", "{:,.2f}"),
    "steps/s": ("steps_per_s", "{:,.2f}"),
    "idle": ("idle_share", "{:.1%}"),
    "timely": ("timely_share", "{:.1%}"),
}


def page(directory: Path) -> Page:
    """Return the page of a simulation."""
    record = read(directory / FILE, "settings", "results")
    results = {label: of for label, of in record["results"].items() if of}
    sizes = sorted({each["ranks"] for of in results.values() for each in of})
    made = Page(directory.resolve().name, f"simulation: {', '.join(map(str, sizes))} ranks")
    for size in sizes:
        found = {
            label: each for label, of in results.items() for each in of if each["ranks"] == size
        }
        ordered = sorted(found, key=lambda label: -found[label]["steps_per_s"])
        cells = [
            (label, *(form.format(found[label][name]) for name, form in COLUMNS.values()))
            for label in ordered
        ]
        table = Table(f"{size} ranks, fastest first", ("algorithm", *COLUMNS), cells)
        made.sections.append(Section(f"{size} ranks", tables=[table], folded=size != sizes[-1]))
    charts = over_ranks(results) if len(sizes) > 1 else of_one_size(results)
    made.sections.insert(0, Section("Throughput and idle time", charts))
    made.sections.insert(1, Section("Staleness", staleness(results)))
    tables = [
        settings_table("settings", record["settings"]),
        settings_table("machine", record["machine"]),
    ]
    made.sections.append(Section("Settings and machine", tables=tables, folded=True))
    return made


def over_ranks(results: dict[str, list[dict[str, Any]]]) -> list[Chart]:
    """Return the plots over the number of ranks."""
    charts = []
    every = [(label, each) for label, of in results.items() for each in of]
    for title, name, scale, words in (
        ("throughput over ranks", "steps_per_s", 1, "steps per second"),
        ("idle time over ranks", "idle_share", 100, "waiting or communicating, %"),
    ):
        columns = {
            "algorithm": [label for label, _ in every],
            "ranks": [each["ranks"] for _, each in every],
            "value": [scale * each[name] for _, each in every],
        }
        spec = lines(
            columns,
            ("ranks", "ranks"),
            ("value", words),
            by="algorithm",
            colors=colors_of(results),
            points=True,
            log_x=True,
            from_0=scale > 1,
        )
        charts.append(Chart(title, spec))
    return charts


def of_one_size(results: dict[str, list[dict[str, Any]]]) -> list[Chart]:
    """Return the bars of one number of ranks."""
    charts = []
    last = {label: of[-1] for label, of in results.items()}
    ordered = sorted(last, key=lambda label: -last[label]["steps_per_s"])
    for title, name, scale, words in (
        ("throughput", "steps_per_s", 1, "steps per second"),
        ("idle time", "idle_share", 100, "waiting or communicating, %"),
    ):
        values = [scale * last[label][name] for label in ordered]
        columns = {"algorithm": ordered, "value": values}
        spec = bars(columns, ("value", words), ("algorithm", ""), colors=colors_of(ordered))
        charts.append(Chart(title, spec))
    return charts


def staleness(results: dict[str, list[dict[str, Any]]]) -> list[Chart]:
    """Return the bars of the staleness of what was averaged, with most ranks."""
    charts = []
    for label, of in results.items():
        counts = np.trim_zeros(np.array(of[-1]["staleness"]), "b")
        if counts.any():
            shares = 100 * counts / counts.sum()
            columns = {"age": list(map(str, range(len(shares)))), "share": shares}
            spec = bars(columns, ("share", "share of contributions, %"), ("age", "versions"))
            charts.append(Chart(f"{label}, {of[-1]['ranks']} ranks", spec))
    return charts
