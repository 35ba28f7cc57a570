"""A picture of a window of timelines, rank by rank."""

from __future__ import annotations

import math
from pathlib import Path

from wagma.timeline.merge import APPLICATION, OWN, Rank, Timeline

# Colors from Okabe and Ito's palette for the color-blind, of spans by name and of other kinds.
COLORS = {
    "compute": "#0072B2",
    "loading": "#56B4E9",
    "local optimizer": "#332288",
    "injected delay": "#E69F00",
    "averaging": "#009E73",
    "call": "#009E73",
    "copy": "#CC79A7",
    "exchange": "#F0E442",
    "wait": "#D55E00",
}
LABELS = {
    "call": "in a call",
    "averaging": "averaging",
    "copy": "copying",
    "exchange": "exchanging",
    "wait": "waiting for other ranks",
    "other": "other spans",
}
OTHER = "#BBBBBB"
SECOND = 1e-9
LEGEND_COLUMNS = 6  # at most: more are wider than the picture


def draw(timelines: dict[str, Timeline], path: Path, begin: float, end: float | None) -> None:
    """Draw what the ranks' applications do, by matplotlib.

    Args:
        timelines: by their titles, one above the other.
        path: of the picture.
        begin, end: the window, in seconds since the timelines' zero; None: all.
    """
    from matplotlib.figure import Figure

    rows = max(len(each.ranks) for each in timelines.values())
    height = 1 + len(timelines) * (0.4 + 0.3 * min(rows, 40))
    figure = Figure(figsize=(10, height), dpi=120, layout="constrained")
    grid = figure.subplots(len(timelines), sharex=True, squeeze=False)[:, 0]
    drawn = {}
    for axes, (title, timeline) in zip(grid, timelines.items(), strict=True):
        for row, (_, rank) in enumerate(timeline.ranks.items()):
            for kind, spans in bars(rank, begin, end).items():
                color = COLORS.get(kind, OTHER)
                drawn[LABELS.get(kind, kind)] = axes.broken_barh(
                    spans, (row - 0.4, 0.8), color=color, lw=0
                )
        labels = [
            f"{number}{'' if rank.clock.aligned else ' (not aligned)'}"
            for number, rank in timeline.ranks.items()
        ]
        axes.set(ylabel="rank", title=title, ylim=(len(labels) - 0.4, -0.6))
        axes.set_yticks(range(len(labels)), labels)
    axes.set(xlabel="time in s", xlim=(begin, end))
    if drawn:
        columns = math.ceil(len(drawn) / math.ceil(len(drawn) / LEGEND_COLUMNS))
        figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=columns)
    figure.savefig(path)


def bars(rank: Rank, begin: float, end: float | None) -> dict[str, list[tuple[float, float]]]:
    """Return what a rank's application does in a window: by kind, pairs of begin and length in s.

    In the order in which they are to be drawn: what is within something else comes later.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for each in rank.slices:
        if each.track != APPLICATION or each.name == OWN:
            continue
        first, last = each.begin * SECOND, each.end * SECOND
        if last < begin or (end is not None and first > end):
            continue
        kind = each.kind
        if kind in ("span", "lap"):
            kind = each.name if each.name in COLORS else "other"
            if each.name == "step":  # its parts are drawn
                continue
        found.setdefault(kind, []).append((first, last - first))
    order = ["other", *COLORS]
    return {kind: found[kind] for kind in order if kind in found}
