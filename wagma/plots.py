"""Plots of runs, comparisons and simulations, if matplotlib is installed."""

from __future__ import annotations

import importlib.util
import logging
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from collectives.agreement import counted
from wagma.methods import named
from wagma.runs import POINTS, Curve, Tally

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from wagma.simulation import Result

LEGEND_RANKS = 8  # more ranks share one entry
MOST_TICKS = 10
LABEL_WIDTH = 36  # characters per line of a label
LINE_STYLES, MARKERS = ("-", "--", ":", "-."), ("o", "s", "^")
COLOURS = {  # from Okabe and Ito's palette for the color-blind
    "compute": "#0072B2",
    "delay": "#E69F00",
    "waiting": "#D55E00",
    "communicating": "#009E73",
    "other": "#BBBBBB",
}
# Of the plots of simulations.
IDEAL = {"color": "0.5", "linestyle": "--", "label": "ideal: no rank waits"}
RATIO = "throughput ÷ ideal throughput in %"
IDLE, SHARE = "idle: waiting or communicating", "share of the ranks' time in %"
SMALL = {"fontsize": "small", "frameon": False}
LABELS = {
    "compute": "compute",
    "delay": "injected delay",
    "waiting": "wait",
    "communicating": "communication",
    "other": "other",
}

log = logging.getLogger(__name__)


def color_of(label: str) -> str:
    """Return the color of a method, also for a label with options: "wagma:group_size=2"."""
    return named(label).color


def styles(labels: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return each label's color, line style and marker; labels of one method share the color."""
    drawn: dict[str, dict[str, str]] = {}
    for label in labels:
        color = color_of(label)
        before = sum(style["color"] == color for style in drawn.values())
        line, marker = LINE_STYLES[before % len(LINE_STYLES)], MARKERS[before % len(MARKERS)]
        drawn[label] = {"color": color, "linestyle": line, "marker": marker}
    return drawn


def wrapped(label: str) -> str:
    """Return a label, broken into lines after colons if it is long."""
    text = textwrap.fill(label.replace(":", ": "), LABEL_WIDTH, break_on_hyphens=False)
    return text.replace(": ", ":")


def unit_of(metric: str | None) -> tuple[int, str]:
    """Return the factor by which to show a metric's values, and their unit."""
    return (100, " %") if metric == "accuracy" else (1, "")


def legend_below(figure: Figure, axes: Axes) -> None:
    """Add a legend of one axes' lines below a figure."""
    lines, labels = axes.get_legend_handles_labels()
    longest = max((len(line) for label in labels for line in label.split("\n")), default=0)
    columns = int(figure.get_figwidth() / (0.7 + 0.07 * longest))  # inches of handle and character
    place = {"loc": "outside lower center", "ncols": max(1, columns)}
    figure.legend(lines, labels, fontsize="small", frameon=False, **place)


def draw(run: Path, tallies: Sequence[Tally]) -> None:
    """Write a finished run's ``loss.png`` and ``time.png`` if matplotlib is installed.

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
        curves: Every rank's; without points for a rank that has made no steps.
        title: The run's name.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    over_steps, over_time = figure.subplots(1, 2, sharey=True)
    trained = {rank: curve for rank, curve in enumerate(curves) if curve.points}
    points = [np.array(curve.points).T for curve in trained.values()]  # (3, n): step, time, loss
    many = len(curves) > LEGEND_RANKS
    for axes, row in ((over_steps, 0), (over_time, 1)):
        for rank, curve in zip(trained, points):
            color = "0.6" if many else f"C{rank}"
            label = f"rank {rank}" if not many else "each rank" if rank == min(trained) else None
            axes.plot(curve[row], curve[2], color=color, alpha=0.6, lw=1, label=label)
        axes.plot(*mean_curve(points, row), color="black", lw=2, label="mean")
        axes.grid(alpha=0.3)
        axes.set_xlim(left=0)
    losses = np.concatenate([curve[2] for curve in points])
    finite = losses[np.isfinite(losses)]
    if finite.size and finite.min() > 0:
        over_steps.set_yscale("log")
    over_steps.set(xlabel="step", ylabel="training loss")
    over_time.set(xlabel="time in s")
    legend_below(figure, over_time)
    figure.suptitle(f"{title}: loss on each rank's own batches")
    figure.savefig(path)


def mean_curve(points: Sequence[np.ndarray], row: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ranks' mean loss as (x, y), over the range in which all ranks have one.

    Args:
        points: For each rank an array of shape (3, n): step, time, loss.
        row: The row of x: 0, the steps, or 1, the time.
    """
    first, last = max(curve[row, 0] for curve in points), min(curve[row, -1] for curve in points)
    x = np.linspace(first, last, POINTS)
    return x, np.mean([np.interp(x, curve[row], curve[2]) for curve in points], axis=0)


def draw_time(path: Path, seconds: Sequence[dict[str, float]], title: str) -> None:
    """Draw how each rank's time was used, as one bar for each.

    Args:
        path: The file to write.
        seconds: For each rank its seconds by use, as in `Tally.seconds`.
        title: The run's name.
    """
    from matplotlib.figure import Figure

    ranks = np.arange(len(seconds))
    figure = Figure(figsize=(9, 2.2 + min(8, 0.28 * len(ranks))), dpi=120, layout="constrained")
    axes = figure.subplots()
    left = np.zeros(len(ranks))
    for kind, color in COLOURS.items():
        width = np.array([of_rank[kind] for of_rank in seconds])
        if width.any():
            axes.barh(ranks, width, left=left, color=color, label=LABELS[kind])
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
    target: float | None,
    title: str,
) -> None:
    """Write ``comparison.png``: the averaged model's metric against time, and throughput.

    As in WAGMA-SGD's Figures 5 and 4. The curve is the mean over the seeds, and the range from the
    lowest to the highest is shaded.

    Args:
        directory: The directory of the file.
        curves: For each algorithm and seed the evaluations, (seconds, metric).
        rates: For each algorithm and seed the samples per second.
        metric: Its name; empty without test batches.
        target: The value of the metric to reach; None without one.
        title: The plot's title.
    """
    if importlib.util.find_spec("matplotlib") is None:
        log.warning("no comparison.png: matplotlib is not installed")
        return
    from matplotlib.figure import Figure

    tested = any(any(of) for of in curves.values())
    size = (12 if tested else 7, 3.5 + max(2, 0.4 * len(rates)))
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    *over_time, throughput = figure.subplots(1, 1 + tested, squeeze=False)[0]
    for axes in over_time:
        draw_metric(axes, curves, metric, target)
        legend_below(figure, axes)
    draw_rates(throughput, rates)
    figure.suptitle(title)
    figure.savefig(directory / "comparison.png")


def draw_metric(
    axes: Axes,
    curves: dict[str, Sequence[Sequence[tuple[float, float]]]],
    metric: str,
    target: float | None,
) -> None:
    """Draw the averaged models' metric against time; the arguments are `draw_comparison`'s."""
    scale, unit = unit_of(metric)
    title = f"{metric} of the averaged model"
    for label, style in styles(curves).items():
        of = [each for each in curves[label] if each]
        if not of:
            continue
        # By time, seeds may have one evaluation more or less. Both of shape (seeds, evaluations).
        shortest = min(map(len, of))
        seconds, values = np.array([each[:shortest] for each in of]).transpose(2, 0, 1)
        values, seconds = scale * values, seconds.mean(axis=0)
        axes.plot(seconds, values.mean(axis=0), label=wrapped(label), markersize=4, **style)
        if len(values) > 1:
            title = f"{metric} of the averaged model\nmean of the seeds, shaded: lowest to highest"
            low, high = values.min(axis=0), values.max(axis=0)
            axes.fill_between(seconds, low, high, color=style["color"], alpha=0.15)
    if target is not None:
        label = f"target: {scale * target:g}{unit}"
        axes.axhline(scale * target, color="0.4", linestyle=(0, (1, 1)), label=label)
    axes.set(title=title, xlabel="time in s", ylabel=f"{metric} in %" if unit else metric)
    axes.set_xlim(left=0)
    behind(axes)


def draw_rates(axes: Axes, rates: dict[str, Sequence[float]]) -> None:
    """Draw the algorithms' throughput as bars; the argument is `draw_comparison`'s."""
    names = [wrapped(label) for label in rates]
    middle = np.array([np.median(of) for of in rates.values()])
    height = 0.2 * min(4, len(rates))  # few bars are no thicker than four
    axes.barh(names, middle, height, color=[color_of(label) for label in rates])
    title = "throughput"
    if max(map(len, rates.values())) > 1:
        title = "throughput\nmedian of the seeds, line: lowest to highest"
        spread = np.array([(min(of), max(of)) for of in rates.values()]).T
        line = {"fmt": "none", "ecolor": "0.4", "capsize": 3}
        axes.errorbar(middle, names, xerr=abs(spread - middle), **line)
    axes.set(title=title, xlabel="samples per second", ylim=(len(rates) - 0.5, -0.5))
    behind(axes)


def behind(axes: Axes) -> None:
    """Draw a grid behind the data."""
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)


def draw_simulation(directory: Path, results: Mapping[str, Sequence[Result]], title: str) -> None:
    """Write ``simulation.png``: throughput, idle share, and the staleness.

    Curves against the number of ranks; bars if all results are of one number. Throughput is divided
    by that of ranks which never wait and whose messages take no time: if all make equally many
    steps, the throughput that the slowest rank's own steps allow.

    Args:
        directory: The directory of the file.
        results: Every algorithm's, by number of ranks.
        title: The job and the machine.
    """
    if importlib.util.find_spec("matplotlib") is None:
        log.warning("no simulation.png: matplotlib is not installed")
        return
    results = {name: of for name, of in results.items() if of}
    if not results:
        return
    from matplotlib.figure import Figure

    stale = {name: of[-1] for name, of in results.items() if of[-1].staleness.any()}
    sizes = {each.ranks for of in results.values() for each in of}
    height = 5.5 if len(sizes) > 1 else 1.6 + max(1.2, 0.33 * len(results), 1.2 * len(stale))
    figure = Figure(figsize=(16 if stale else 13, height), dpi=100, layout="constrained")
    rows = [["throughput", "idle", name] for name in stale] or [["throughput", "idle"]]
    axes = figure.subplot_mosaic(rows, width_ratios=(4, 4, 3) if stale else None)
    draw = draw_over_ranks if len(sizes) > 1 else draw_of_one_size
    draw(axes.pop("throughput"), axes.pop("idle"), results)
    draw_staleness(axes, stale)
    width = int(12 * figure.get_figwidth())  # in characters
    lines = [textwrap.fill(line, width) for line in title.split("\n")]
    figure.suptitle("\n".join(lines), fontsize="medium")
    figure.savefig(directory / "simulation.png")


def draw_over_ranks(throughput: Axes, idle: Axes, results: dict[str, Sequence[Result]]) -> None:
    """Draw the algorithms' throughput ÷ the ideal, and their idle share, against ranks."""
    drawn = styles(results)
    throughput.axhline(100, **IDEAL)
    for name in sorted(results, key=lambda name: -results[name][-1].idle_share):
        of = results[name]
        ranks = [each.ranks for each in of]
        ratios = [ratio_to_ideal(each) for each in of]
        throughput.plot(ranks, ratios, label=name, markersize=4, **drawn[name])
        idle.plot(ranks, [100 * each.idle_share for each in of], markersize=4, **drawn[name])
    throughput.set(title="throughput", ylabel=RATIO)
    idle.set(title=IDLE, ylabel=SHARE)
    idle.set_ylim(bottom=0)
    ticks = spaced(sorted({each.ranks for of in results.values() for each in of}))
    for axes in (throughput, idle):
        axes.set_xlabel("ranks")
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, ticks)
        behind(axes)
    lines = throughput.get_legend_handles_labels()
    idle.legend(*lines, loc="upper left", bbox_to_anchor=(1, 1), **SMALL)


def draw_of_one_size(throughput: Axes, idle: Axes, results: dict[str, Sequence[Result]]) -> None:
    """Draw the algorithms' throughput ÷ the ideal, and their idle share, as bars, fastest first."""
    ratios = {name: ratio_to_ideal(of[-1]) for name, of in results.items()}
    names = sorted(results, key=lambda name: -ratios[name])
    rows = range(len(names))
    shares = [100 * results[name][-1].idle_share for name in names]
    throughput.axvline(100, **IDEAL)
    for axes, values in ((throughput, [ratios[name] for name in names]), (idle, shares)):
        axes.barh(rows, values, 0.2 * min(4, len(names)), color=list(map(color_of, names)))
        axes.set(xlim=(0, 1.15 * max(100, *values)), ylim=(len(names) - 0.5, -0.5))
        behind(axes)
        at = {"x": 0.985, "transform": axes.get_yaxis_transform(), "ha": "right", "va": "center"}
        for row, value in zip(rows, values):
            axes.text(y=row, s=f"{value:.1f}", fontsize="small", **at)
    throughput.set_yticks(rows, [wrapped(name) for name in names])
    idle.set_yticks(rows, [""] * len(names))
    ranks = counted(results[names[0]][-1].ranks, "rank")
    throughput.set(title=f"throughput, {ranks}", xlabel=RATIO)
    idle.set(title=IDLE, xlabel=SHARE)
    legend_below(throughput.figure, throughput)


def ratio_to_ideal(result: Result) -> float:
    """Return the throughput ÷ that of ranks which never wait, in percent."""
    return 100 * result.ideal_wall / result.wall


def spaced(ranks: Sequence[int]) -> list[int]:
    """Return those of ascending numbers whose labels have room on a logarithmic axis."""
    room = (ranks[-1] / ranks[0]) ** (1 / MOST_TICKS)
    kept = [ranks[0]]
    for each in ranks:
        if each > kept[-1] and each / kept[-1] >= room:
            kept.append(each)
    return kept


def draw_staleness(axes: dict[str, Axes], results: dict[str, Result]) -> None:
    """Draw the staleness of the vectors in group averages, on separate axes per algorithm."""
    shares = {
        name: 100 * np.trim_zeros(result.staleness, "b") / result.staleness.sum()
        for name, result in results.items()
    }
    highest = max(map(len, shares.values()), default=1) - 1
    for name, of in shares.items():
        axes[name].bar(range(len(of)), of, color=color_of(name))
        ranks = counted(results[name].ranks, "rank")
        axes[name].set_title(f"{name}, {ranks}", fontsize="medium")
        axes[name].set(
            xlabel="staleness in versions",
            ylabel="share in %",
            xlim=(-0.6, max(1, highest) + 0.6),
            ylim=(0, 105),
        )
        axes[name].xaxis.get_major_locator().set_params(integer=True)
        behind(axes[name])
