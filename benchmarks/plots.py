"""Draw the existing results as PNG beside the JSON; nothing is measured.

python -m benchmarks --plot
"""

import json
import sys
from importlib.util import find_spec

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
