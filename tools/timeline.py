"""Draw the first steps of runs of `wagma compare`, rank by rank: computing, delayed, averaging.

Usage: python tools/timeline.py PICTURE RUN...    (runs/NAME/seed-0/ALGORITHM)
"""

import json
import sys
from pathlib import Path

STEPS = 20
SPENT = {  # the picture's names of the times in `rank-0000.jsonl`, in the order of a step
    "compute_s": ("compute", "#0072B2"),
    "delay_s": ("injected delay", "#E69F00"),
    "average_s": ("averaging and waiting", "#D55E00"),
}


def intervals(records):
    """Return for each kind of time a list of (begin, duration) in s.

    Args:
        records: the records of a rank's steps; `elapsed_s` is the time at which each ended.
    """
    found = {kind: [] for kind in SPENT}
    for record in records:
        begin = record["elapsed_s"] - sum(record[kind] for kind in SPENT)
        for kind in SPENT:
            found[kind].append((begin, record[kind]))
            begin += record[kind]
    return found


def first_steps(run):
    """Return the records of each rank's first steps."""
    files = sorted(run.glob("rank-*.jsonl"))
    return [[json.loads(line) for line in file.open()][:STEPS] for file in files]


def draw(picture, runs):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1 + 1.6 * len(runs)), dpi=120, layout="constrained")
    for axes, run in zip(figure.subplots(len(runs), sharex=True, squeeze=False)[:, 0], runs):
        for rank, records in enumerate(first_steps(run)):
            for kind, spans in intervals(records).items():
                label, color = SPENT[kind]
                axes.broken_barh(spans, (rank - 0.4, 0.8), color=color, lw=0, label=label)
            ends = [record["elapsed_s"] for record in records]
            axes.vlines(ends, rank - 0.4, rank + 0.4, color="white", lw=0.8)
        axes.set(ylabel="rank", title=run.name, ylim=(rank + 0.6, -0.6), yticks=range(rank + 1))
    axes.set(xlabel="time in s", xlim=0)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[: len(SPENT)], labels[: len(SPENT)], loc="outside lower center", ncols=3)
    figure.savefig(picture)


if __name__ == "__main__":
    draw(sys.argv[1], [Path(run) for run in sys.argv[2:]])
