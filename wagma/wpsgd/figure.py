"""The plot of a comparison: the objective over time and samples, and Corollary 4."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from wagma.plots import behind, legend_below
from wagma.wpsgd.methods import METHODS

log = logging.getLogger(__name__)
MARKERS = 12  # per curve


def draw(path: Path, curves: Mapping[str, np.ndarray], title: str) -> None:
    """Write the plot if matplotlib is installed; it is like WP-SGD's Figures 6 to 9.

    Args:
        path: the file to write.
        curves: for each method an array of shape (points, 4), the fields of its `Point`s.
        title: the plot's title.
    """
    if importlib.util.find_spec("matplotlib") is None:
        log.warning("no %s: matplotlib is not installed", path.name)
        return
    from matplotlib.figure import Figure

    weighted = any(METHODS[name].weighted for name in curves)
    figure = Figure(figsize=(14 if weighted else 10, 4.8), dpi=100, layout="constrained")
    over_time, over_samples, *bounds = figure.subplots(1, 2 + weighted)
    for place, (name, points) in enumerate(curves.items()):
        every = max(1, len(points) // MARKERS)
        style = {
            **{"color": METHODS[name].color, "label": name, "markersize": 4},
            **{"marker": "os^Dv<>"[place % 7], "markevery": (place % every, every)},
        }
        over_time.plot(points[:, 1], points[:, 2], **style)
        over_samples.plot(points[:, 0], points[:, 2], **style)
        for axes in bounds if METHODS[name].weighted else ():
            axes.plot(points[:, 0], points[:, 3], **style)
    slowest = max(points[-1, 1] for points in curves.values())
    fastest = min(points[-1, 1] for points in curves.values())
    if slowest > 10 * fastest > 0:
        over_time.set_xscale("log")
    over_time.set(xlabel="time in s", ylabel="objective on test samples", yscale="log")
    over_samples.set(xlabel="samples that the fastest node has consumed", yscale="log")
    for axes in bounds:
        axes.axhline(1, color="0.4", linestyle="--")
        axes.set(
            title="Corollary 4 (a bound): above 1 the average\nbeats the fastest node alone",
            xlabel="samples that the fastest node has consumed",
            ylabel="2 Σ r^T ÷ (√k + k)",
            ylim=(0, None),
        )
    for axes in (over_time, over_samples, *bounds):
        behind(axes)
    legend_below(figure, over_samples)
    figure.suptitle(title)
    figure.savefig(path)
