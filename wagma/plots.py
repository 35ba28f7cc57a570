"""A run's pictures: the loss over steps and time, and where each rank's time went."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from wagma.runs import POINTS, Curve, Tally

if TYPE_CHECKING:
    from wagma.simulation import Result

LEGEND_RANKS = 8  # more get one common entry
COLOURS = {  # Okabe and Ito's, which the colour-blind can tell apart
    "compute": "#0072B2",
    "delay": "#E69F00",
    "waiting": "#D55E00",
    "communicating": "#009E73",
    "other": "#BBBBBB",
}
LABELS = {
    "compute": "compute",
    "delay": "injected delay",
    "waiting": "wait",
    "communicating": "communication",
    "other": "other",
}

log = logging.getLogger(__name__)


def draw(run: Path, tallies: Sequence[Tally]) -> None:
    """Write a finished run's ``loss.png`` and ``time.png``, where matplotlib is installed.

    Args:
        run: The run's directory.
        tallies: Every rank's.
    """
    if importlib.util.find_spec("matplotlib") is None:
        log.warning("no loss.png and time.png: matplotlib is not installed")
        return
    draw_loss(run / "loss.png", [tally.loss for tally in tallies], run.name)
    draw_time(run / "time.png", [tally.seconds for tally in tallies], run.name)


def draw_loss(path: Path, curves: Sequence[Curve], title: str) -> None:
    """Draw every rank's training loss and the mean, over steps and over time.

    Args:
        path: The file to write.
        curves: Every rank's.
        title: The run's name.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    over_steps, over_time = figure.subplots(1, 2, sharey=True)
    points = [np.array(curve.points).T for curve in curves]  # of shape (3, n): step, time, loss
    many = len(curves) > LEGEND_RANKS
    for axes, row in ((over_steps, 0), (over_time, 1)):
        for rank, curve in enumerate(points):
            colour = "0.6" if many else f"C{rank}"
            label = f"rank {rank}" if not many else "each rank" if rank == 0 else None
            axes.plot(curve[row], curve[2], color=colour, alpha=0.6, lw=1, label=label)
        axes.plot(*mean_curve(points, row), color="black", lw=2, label="mean")
        axes.grid(alpha=0.3)
        axes.set_xlim(left=0)
    losses = np.concatenate([curve[2] for curve in points])
    finite = losses[np.isfinite(losses)]
    if finite.size and finite.min() > 0:
        over_steps.set_yscale("log")
    over_steps.set(xlabel="step", ylabel="training loss")
    over_time.set(xlabel="time in s")
    over_time.legend(fontsize="small", ncols=2 if len(curves) > 4 else 1)
    figure.suptitle(f"{title}: loss on each rank's own batches")
    figure.savefig(path)


def mean_curve(points: Sequence[np.ndarray], row: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ranks' mean loss as (x, y), where all ranks have one.

    Args:
        points: For each rank an array of shape (3, n): step, time, loss.
        row: Which is x: 0, the steps, or 1, the time.
    """
    first, last = max(curve[row, 0] for curve in points), min(curve[row, -1] for curve in points)
    x = np.linspace(first, last, POINTS)
    return x, np.mean([np.interp(x, curve[row], curve[2]) for curve in points], axis=0)


def draw_time(path: Path, seconds: Sequence[dict[str, float]], title: str) -> None:
    """Draw where each rank's time went, as one bar for each.

    Args:
        path: The file to write.
        seconds: For each rank its seconds by what they were spent on, as in `Tally.seconds`.
        title: The run's name.
    """
    from matplotlib.figure import Figure

    ranks = np.arange(len(seconds))
    figure = Figure(figsize=(9, 2.2 + min(8, 0.28 * len(ranks))), dpi=120, layout="constrained")
    axes = figure.subplots()
    left = np.zeros(len(ranks))
    for kind, colour in COLOURS.items():
        width = np.array([of_rank[kind] for of_rank in seconds])
        if width.any():
            axes.barh(ranks, width, left=left, color=colour, label=LABELS[kind])
            left += width
    axes.set(xlabel="time in s", ylabel="rank", ylim=(len(ranks) - 0.4, -0.6))
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=len(COLOURS), fontsize="small", frameon=False)
    axes.set_title(f"{title}: where each rank's time went")
    figure.savefig(path)


def draw_comparison(
    directory: Path,
    curves: dict[str, Sequence[Sequence[tuple[float, float]]]],
    rates: dict[str, Sequence[float]],
    metric: str,
) -> None:
    """Write ``comparison.png``: the averaged model's metric against time, and throughput.

    As in WAGMA-SGD's Figures 5 and 4. The curve is the mean over the seeds, and what lies between
    the best and the worst is shaded.

    Args:
        directory: Where it goes.
        curves: For each algorithm and seed the evaluations, (seconds, metric).
        rates: For each algorithm and seed the samples per second.
        metric: Its name; empty where nothing was tested.
    """
    if importlib.util.find_spec("matplotlib") is None:
        log.warning("no comparison.png: matplotlib is not installed")
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 2.5 + max(2.5, 0.3 * len(rates))), dpi=120, layout="constrained")
    over_time, throughput = figure.subplots(1, 2)
    for number, (name, of) in enumerate(curves.items()):
        if not any(of):
            continue
        seconds, values = np.array(of).transpose(2, 0, 1)  # of shape (seeds, evaluations)
        colour, style = f"C{number % 10}", ("-", "--", ":")[number // 10 % 3]
        line = {"color": colour, "linestyle": style, "marker": "."}
        over_time.plot(seconds.mean(axis=0), values.mean(axis=0), label=name, **line)
        if len(of) > 1:
            low, high = values.min(axis=0), values.max(axis=0)
            over_time.fill_between(seconds.mean(axis=0), low, high, color=colour, alpha=0.15)
    over_time.set(xlabel="time in s", ylabel=f"{metric} of the averaged model")
    over_time.set_xlim(left=0)
    if over_time.has_data():
        over_time.legend(fontsize="small")
    middle = np.array([np.median(of) for of in rates.values()])
    spread = np.array([(min(of), max(of)) for of in rates.values()]).T
    colours = [f"C{number % 10}" for number in range(len(rates))]
    throughput.barh(list(rates), middle, xerr=abs(spread - middle), color=colours, capsize=3)
    throughput.invert_yaxis()
    throughput.set(xlabel="samples per second, median, lowest and highest of the seeds")
    for axes in (over_time, throughput):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    figure.savefig(directory / "comparison.png")


def draw_simulation(directory: Path, results: dict[str, Sequence[Result]]) -> None:
    """Write ``simulation.png``: throughput and idle share against ranks, and the staleness.

    Args:
        directory: Where it goes.
        results: Every algorithm's, by ranks.
    """
    if importlib.util.find_spec("matplotlib") is None:
        log.warning("no simulation.png: matplotlib is not installed")
        return
    longest = max(results.values(), key=len)
    if not longest:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), dpi=120, layout="constrained")
    throughput, idle, staleness = figure.subplots(1, 3)
    ranks = [each.ranks for each in longest]
    ideal = [each.ranks**2 * each.steps / each.compute.sum() for each in longest]
    throughput.plot(ranks, ideal, "--", color="0.6", label="no waiting, no communication")
    for name, of in results.items():
        ranks = [each.ranks for each in of]
        throughput.plot(ranks, [each.throughput for each in of], "o-", label=name)
        idle.plot(ranks, [100 * each.idle_share for each in of], "o-", label=name)
        for each in of[-1:]:
            if each.staleness.any():
                shares = 100 * np.trim_zeros(each.staleness, "b") / each.staleness.sum()
                staleness.bar(range(len(shares)), shares, label=f"{name}, {each.ranks} ranks")
    throughput.set(ylabel="steps per second", yscale="log")
    idle.set(ylabel="share of time not computing in %")
    idle.set_ylim(bottom=0)
    for axes in (throughput, idle):
        axes.set_xscale("log", base=2)
        axes.set_xticks([each.ranks for each in longest], [each.ranks for each in longest])
        axes.set_xlabel("ranks")
    staleness.xaxis.get_major_locator().set_params(integer=True)
    staleness.set(xlabel="staleness in versions", ylabel="share of contributions in %")
    for axes in (throughput, idle, staleness):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        if axes.has_data():
            axes.legend(fontsize="small")
    figure.savefig(directory / "simulation.png")
