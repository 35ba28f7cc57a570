"""Trainings with stragglers, simulated and measured: throughput, time to 90 %, accuracy.

    python benchmarks/learning_wall.py

`wagma compare` on 4 and 8 ranks of this machine, in steps that sleep, with the stragglers of
`stragglers.py`; and each run again in simulated time, with the step times that it recorded, on
ranks of one node. Medians over the seeds of simulated ÷ measured samples per second, and of the
times to an accuracy of 90 %; the difference of the mean accuracies, and the deviation over the
seeds, in percent. A machine with other load gives no figures. It takes half an hour.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from common import compare, figure, parser, report
from learning import Run, time_to, train_all

from wagma.simulation import MACHINES

METHODS = ("allreduce", "wagma", "ad-psgd", "partial-reduce:group_size=3")
CASES = {
    "undisturbed": (),
    "one sleeps 2 step times": ("--slow-rank", "0:3"),
    "one sleeps 5 step times": ("--slow-rank", "0:6"),
    "each 6 × slow, at random": ("--imbalance", "random"),
    "three 1.87 × slow": tuple(
        word for rank in range(3) for word in ("--slow-rank", f"{rank}:1.87")
    ),
}
LENGTHS = {4: (40.0, 6.0), 8: (60.0, 8.0)}  # milliseconds of a step's sleep, seconds of a run
BATCH = 16


def step_times_of(run, seconds):
    """Return a run's recorded steps, each rank's repeated to last, of shape (steps, ranks)."""
    columns = []
    for file in sorted(run.glob("rank-*.jsonl")):
        records = map(json.loads, file.read_text().splitlines())
        columns.append(np.array([each["compute_s"] + each["delay_s"] for each in records]))
    most = max(int(np.ceil(len(each) * (1.1 * seconds / each.sum() + 1))) for each in columns)
    return np.array([np.resize(each, most) for each in columns]).T


def measure(arguments, ranks):
    """Return {case: {method: its figures}}."""
    step_time_ms, seconds = LENGTHS[ranks]
    every = seconds / 20
    of = argparse.Namespace(seeds=arguments.seeds, step_time_ms=step_time_ms, seconds=seconds)
    options = ("--batch-size", str(BATCH), "--evaluate-every-seconds", str(every))
    machine = replace(MACHINES["hdr"], ranks_per_node=ranks)
    rows = {}
    for case, delays in CASES.items():
        with tempfile.TemporaryDirectory() as directory:
            measured, _ = compare(of, ranks, METHODS, (*options, *delays), directory)
            runs = []
            for label, found in measured.items():
                for each in found:
                    made = step_times_of(Path(directory) / "runs" / each["directory"], seconds)
                    settings = {
                        "seconds": seconds,
                        "batch_size": BATCH,
                        "seed": each["seed"],
                        "evaluate_every_seconds": every,
                    }
                    runs.append(Run((label, each["seed"]), label, made, machine, settings))
            simulated = train_all(runs)
        rows[case] = {
            label: figures(
                [with_points(each) for each in measured[label]],
                [simulated[label, each["seed"]] for each in measured[label]],
                arguments.target,
            )
            for label in METHODS
        }
        for label, row in rows[case].items():
            print(f"{ranks} ranks, {case}, {label}: {in_words(row)}", flush=True)
    return rows


def with_points(summary):
    """Return a measured run's summary with its evaluations as (seconds, accuracy)."""
    points = [(each["elapsed_s"], each["accuracy"]) for each in summary["evaluations"]]
    return {**summary, "points": points}


def figures(measured, simulated, target):
    """Return what is compared, of one method's runs with all seeds."""
    ratios = [s["samples_per_s"] / m["samples_per_s"] for m, s in zip(measured, simulated)]
    times = [[time_to(each, target) for each in of] for of in (measured, simulated)]
    middles = [statistics.median(each) for each in times]
    finite = all(np.isfinite(middles))
    accuracies = [[each["accuracy"] for each in of] for of in (measured, simulated)]
    means = [statistics.mean(each) for each in accuracies]
    return {
        "throughput": statistics.median(ratios),
        "time": middles[1] / middles[0] if finite else None,
        "times_s": [each if np.isfinite(each) else None for each in middles],
        "accuracy": means[1] - means[0],
        "accuracies": means,
        "deviation": max(map(statistics.stdev, accuracies)) if len(measured) > 1 else None,
    }


def in_words(row):
    """Return a line about a method."""
    time = "–" if row["time"] is None else f"{row['time']:.2f}"
    return (
        f"throughput {row['throughput']:.2f}, time {time} of {seconds(row['times_s'][0])}, "
        f"accuracy {100 * row['accuracy']:+.1f} of {100 * row['accuracies'][0]:.1f} ± "
        f"{100 * (row['deviation'] or 0):.1f} %"
    )


def seconds(value):
    """Return seconds as text, with a dash for None."""
    return "–" if value is None else f"{value:.1f} s"


def table(results):
    """Return the table of Markdown, of the results of all numbers of ranks."""
    lines = [f"| simulated ÷ measured | {' | '.join(METHODS)} |", "|---" * (1 + len(METHODS)) + "|"]
    for ranks, rows in results.items():
        for case, row in rows.items():
            cells = [row[label] for label in METHODS]
            lines.append(f"| {ranks} ranks, {case} | {' | '.join(map(cell, cells))} |")
    return "\n".join(lines)


def cell(row):
    """Return "1.02, 0.91, 96.1 − 0.2 ± 1.0 %"."""
    time = "–" if row["time"] is None else f"{row['time']:.2f}"
    more = 100 * row["accuracy"]
    sign = "−" if more < 0 else "+"
    accuracy = f"{100 * row['accuracies'][0]:.1f} {sign} {abs(more):.1f}"
    return f"{row['throughput']:.2f}, {time}, {accuracy} ± {100 * row['deviation']:.1f} %"


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, nargs="+", default=list(LENGTHS))
    arguments.add_argument("--seeds", type=int, default=5)
    arguments.add_argument("--target", type=float, default=0.9)
    arguments = arguments.parse_args()
    for ranks in arguments.ranks:
        rows = measure(arguments, ranks)
        of = [row for case in rows.values() for row in case.values()]
        off = [abs(row["throughput"] - 1) for row in of]
        late = [abs(row["time"] - 1) for row in of if row["time"] is not None]
        spread = [abs(row["accuracy"]) / row["deviation"] for row in of if row["deviation"]]
        held = [
            figure(f"{ranks} ranks: throughput, most off", max(off), 0.10),
            figure(f"{ranks} ranks: time to {arguments.target:g}, most off", max(late), 0.15),
            figure(f"{ranks} ranks: accuracy, most off ÷ deviation", max(spread), 1.0),
        ]
        report(arguments, "learning-wall", ranks, rows, figures=held)


if __name__ == "__main__":
    main()
