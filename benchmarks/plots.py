"""Draw the existing results as PNG; nothing is measured.

python -m benchmarks --plot     beside the JSON
python -m benchmarks --figures  the papers' figures, in docs/figures; also: make figures
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from common import in_words, ratio_label, rounded

REFERENCES = {  # colors from Okabe and Ito's palette for the color-blind
    "MPI_Allreduce": "black",
    "MPI_Iallreduce": "#999999",
    "gloo": "#CC79A7",
    "memcpy": "#F0E442",
}
TRANSPORTS = {"messages": "#0072B2", "shared": "#D55E00"}
KINDS = {"paper": ":", "conserving": "-", "late": "--"}
# Bar charts: the axis, its values from the results, and whether the figures bound them.
BARS = {
    "straggler-wait": ("wait in a step, ms", lambda result: result["wait_ms"], False),
    "passive-latency": ("latency, median, µs", lambda result: 1e6 * result["median"], False),
    "idle": ("share of a core", float, True),
    "memory": ("memory beside the vector ÷ vector", lambda result: max(result.values()), True),
    "straggler-training": ("wall time, s", lambda result: result["wall_s"], False),
    "methods-wall": ("wall time ÷ bound", lambda of: of["wall_over_bound"]["median"], True),
    "overlap": ("time per step, s, with overlap", lambda result: result["overlap_s"], False),
}
# Papers' figures over a number that ends each method's name; the others are curves.
SWEEPS = {
    "figure-partial-reduce-8": "P'",
    "figure-ripples-16": "steps from one synchronization to the next",
}
PICTURES = Path(__file__).parents[1] / "docs" / "figures"


def draw_figures(results):
    """Draw the papers' figures, whose results are in a directory."""
    from matplotlib.figure import Figure

    PICTURES.mkdir(exist_ok=True)
    for path in sorted(results.glob("figure-*.json")):
        contents = json.loads(path.read_text(encoding="utf-8"))
        figure = Figure(dpi=72, layout="constrained")
        if contents["benchmark"] in SWEEPS:
            draw_sweep(figure, contents["results"], SWEEPS[contents["benchmark"]])
        else:
            draw_curves(figure, contents["results"])
        target = PICTURES / f"{contents['benchmark']}.png"
        save(figure, target)
        print(f"drawn: {target}", file=sys.stderr)


def save(figure, target):
    """Save a figure as a PNG of 256 colors, half as long as one of all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        target, optimize=True
    )


def draw_curves(figure, cases):
    """Draw accuracy over time, and over steps: a line for each method, a column for each case.

    A single case has both beside each other.
    """
    shape = (2, len(cases)) if len(cases) > 1 else (1, 2)
    figure.set_size_inches(2.3 + 4.2 * shape[1], 0.3 + 3.6 * shape[0])
    panels = figure.subplots(*shape, sharey=True, squeeze=False)
    rows = panels if len(cases) > 1 else panels.T
    names = list(dict.fromkeys(name for row in cases.values() for name in row))
    for column, (case, row) in enumerate(cases.items()):
        for axes, unit in zip((each[column] for each in rows), ("seconds", "steps")):
            for name, of in row.items():
                curve, kind = of["curve"], line_of(names.index(name))
                axes.plot(curve[unit], curve["accuracy"], label=name, linewidth=1.2, **kind)
                if unit == "seconds":
                    low, high = zip(
                        *((a - d, a + d) for a, d in zip(curve["accuracy"], curve["deviation"]))
                    )
                    axes.fill_between(curve[unit], low, high, alpha=0.08, color=kind["color"])
            axes.set(ylim=(0.3, 1.0), xlim=(0, None))
            axes.grid(alpha=0.3)
            axes.set_xlabel("simulated seconds" if unit == "seconds" else "steps of a rank, mean")
        rows[0][column].set_title(case)
    for each in panels:
        each[0].set_ylabel("accuracy, mean of the seeds")
    handles, labels = rows[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize="small")


def line_of(number):
    """Return the color and style of a line: seven colors, then the same dashed and dotted."""
    colors = ("black", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
    return {"color": colors[number % 7], "linestyle": ("-", "--", ":")[number // 7 % 3]}


def draw_sweep(figure, cases, number):
    """Draw the time to the target, what it takes, and the time of each, over a number."""
    figure.set_size_inches(10.5, 3.2 * len(cases))
    rows = figure.subplots(len(cases), 3, squeeze=False)
    for axes, (case, row) in zip(rows, cases.items()):
        counted = "updates" if any("updates" in of for of in row.values()) else "target_steps"
        kinds = list(dict.fromkeys(name.rpartition(", ")[0] for name in row))
        for index, kind in enumerate(kinds):
            points = [
                (int("".join(filter(str.isdigit, name.rpartition(", ")[2]))), of)
                for name, of in row.items()
                if name.startswith(kind) and of["target_s"] is not None
            ]
            numbers = [each for each, _ in points]
            style = {"marker": ".", "label": kind, **line_of(index)}
            spread = [of["spread_s"] or 0 for _, of in points]
            times = [of["target_s"] for _, of in points]
            counts = [of[counted] for _, of in points]
            axes[0].errorbar(numbers, times, spread, capsize=2, **style)
            axes[1].plot(numbers, counts, **style)
            axes[2].plot(numbers, [time / count for time, count in zip(times, counts)], **style)
        words = counted.removeprefix("target_")
        for each, title in zip(axes, ("seconds to the target", words, f"seconds ÷ {words}")):
            each.set(title=f"{case}: {title}", xlabel=number, ylim=(0, None))
            each.grid(alpha=0.3)
        axes[0].legend()


def draw(results, names):
    """Draw the results in a directory.

    Args:
        results: the directory of the JSON files.
        names: of the benchmarks, with which their files' names begin.
    """
    if find_spec("matplotlib") is None:
        print("no plots: matplotlib is not installed", file=sys.stderr)
        return
    from matplotlib.figure import Figure

    for name in names:
        if name != "latency" and name not in BARS:
            continue
        for path in sorted(results.glob(f"{name}-[0-9]*.json")):
            contents = json.loads(path.read_text(encoding="utf-8"))
            figure = Figure(dpi=80, layout="constrained")
            draw_latency(figure, contents) if name == "latency" else draw_bars(figure, contents)
            machine = contents["machine"]
            figure.suptitle(
                f"{name}, {contents['ranks']} ranks on {machine['cores']} cores\n"
                f"{machine['processor']}, {machine['mpi']}",
                fontsize="medium",
            )
            figure.savefig(path.with_suffix(".png"))
            print(f"drawn: {path.with_suffix('.png')}", file=sys.stderr)


def style(name):
    """Return the line style of a column of the latencies."""
    if name in REFERENCES:
        return {"color": REFERENCES[name], "marker": ".", "label": name}
    transport, kind = name.split("-")
    return {
        "color": TRANSPORTS[transport],
        "linestyle": KINDS[kind],
        "marker": ".",
        "label": f"{transport}, one rank late" if kind == "late" else f"{transport}, {kind}",
    }


def draw_latency(figure, contents):
    """Draw times over sizes, and the ratios of ours to MPI_Allreduce's."""
    figure.set_size_inches(11, 4.6)
    times, ratios = figure.subplots(1, 2)
    rows = contents["results"]
    for name in dict.fromkeys(name for row in rows for name in row["microseconds"]):
        points = [(r["bytes"], r["microseconds"][name]) for r in rows if name in r["microseconds"]]
        times.plot(*zip(*points), **style(name))
        medians = {
            size: contents["ratios"][label]["median"]
            for size, _ in points
            if (label := ratio_label(size, name, "MPI_Allreduce")) in contents["ratios"]
        }
        if medians:
            ratios.plot(list(medians), list(medians.values()), **style(name))
    ratios.axhline(1, color="black", linewidth=0.8)
    times.set(yscale="log", ylabel="µs per call, slowest rank", title="time")
    ratios.set(yscale="log", ylabel="÷ MPI_Allreduce", title="ratio, median of the rounds")
    for axes in (times, ratios):
        axes.set_xscale("log", base=4)
        axes.set_xticks([row["bytes"] for row in rows], [in_words(row["bytes"]) for row in rows])
        axes.tick_params("x", rotation=45)
        axes.grid(alpha=0.3)
        axes.set_xlabel("size of the vector")
    times.legend(fontsize="small")


def draw_bars(figure, contents):
    """Draw one bar for each result, and a line for their common bound."""
    title, value, bounded = BARS[contents["benchmark"]]
    bars = {name: value(result) for name, result in contents["results"].items()}
    figure.set_size_inches(8, 1.6 + 0.4 * len(bars))
    axes = figure.subplots()
    drawn = axes.barh(list(bars), list(bars.values()), color=TRANSPORTS["messages"])
    axes.bar_label(drawn, [rounded(value) for value in bars.values()], padding=3)
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.set_xlabel(title)
    if bounded:
        axes.axvline(contents["figures"][0]["bound"], color="black", linestyle="--", label="bound")
        axes.legend()
