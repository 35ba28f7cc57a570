"""Hop with stragglers that sleep: graphs, backup workers, staleness, skipping, beside others.

    python benchmarks/hop.py

Runs `wagma compare` with `--seconds` on eight ranks: the digits network, undisturbed, with every
rank 6 times as slow with probability 1/8 at every step (Hop, section 7.3.1), and with one rank that
always takes 4 times as long (7.3.5); and a linear model with log loss, with the paper's rate,
momentum, weight decay and batches (7.2). Steps sleep, so that ranks wait for each other and not for
processors. All ranks are on one machine, so their placement makes no difference.

"others/s" are the steps per second of a rank that is not always slow; times of the linear model
are to an accuracy of 0.85.
"""

import json
import tempfile
from pathlib import Path
from statistics import mean, median

from common import compare, parser, report

GRAPHS = tuple(
    f"hop:graph={graph}{options}"
    for graph in ("ring", "ring-based", "double-ring")
    for options in ("", ":backup=1", ":staleness=5")
)
OTHERS = ("allreduce", "parameter-server:mode=bsp", "d-psgd:graph=ring-based", "ad-psgd")
SKIPPING = tuple(
    f"hop:graph=ring-based{options}"
    for options in (
        "",
        ":backup=1",
        ":backup=1:max_skip=2",
        ":backup=1:max_skip=10",
        ":staleness=5",
        ":staleness=5:max_skip=10",
    )
)
RANDOM = ("--imbalance", "random")
LINEAR = (
    *("--script", str(Path(__file__).with_name("linear.py")), "--batch-size", "128"),
    *("--lr", "10", "--momentum", "0.9", "--weight-decay", "1e-7", "--target", "0.85"),
)
DIGITS = ("--batch-size", "16", "--target", "0.9")
CASES = {
    "undisturbed": ((*OTHERS, *GRAPHS), DIGITS),
    "random, 6 × slow": ((*OTHERS, *GRAPHS), (*DIGITS, *RANDOM)),
    "one 4 × slow": ((*OTHERS, *SKIPPING), (*DIGITS, "--slow-rank", "0:4")),
    "linear": ((*OTHERS[:2], *SKIPPING[:2], SKIPPING[4]), LINEAR),
    "linear, random": ((*OTHERS[:2], *SKIPPING[:2], SKIPPING[4]), (*LINEAR, *RANDOM)),
    "linear, one 4 × slow": ((*OTHERS[:2], *SKIPPING), (*LINEAR, "--slow-rank", "0:4")),
}


def steps_of_others(directory, runs):
    """Return the number of steps of a rank other than the first, as a median over the runs."""
    paths = [Path(directory) / "runs" / run["directory"] / "summary.json" for run in runs]
    return median(mean(json.loads(path.read_text())["steps_of_rank"][1:]) for path in paths)


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=8)
    arguments.add_argument("--seconds", type=float, default=8.0)
    arguments.add_argument("--step-time-ms", type=float, default=60.0)
    arguments.add_argument("--seeds", type=int, default=1)
    arguments = arguments.parse_args()
    results = {}
    print(
        f"# {arguments.ranks} ranks, {arguments.seconds:g} s, steps of {arguments.step_time_ms:g} "
        f"ms\n{'':<22}{'method':<48}{'samples/s':>10}{'÷ standard':>12}{'of bounds':>11}"
        f"{'others/s':>10}{'s to 0.9':>10}{'accuracy':>10}",
        flush=True,
    )
    for case, (methods, options) in CASES.items():
        with tempfile.TemporaryDirectory() as directory:
            runs, figures = compare(arguments, arguments.ranks, methods, options, directory)
            steps = {label: steps_of_others(directory, made) for label, made in runs.items()}
        standard = figures["hop:graph=ring-based"]["samples_per_s"]
        for label, of in figures.items():
            found = {name: of[name] for name in ("samples_per_s", "bound_ratio", "target_s")}
            found["accuracy"] = of["mean"]
            found["speed_up"] = of["samples_per_s"] / standard
            found["steps_of_others_per_s"] = steps[label] / arguments.seconds
            results[f"{case}: {label}"] = found
            print(f"{case:<22}{label:<48}{line(found)}", flush=True)
    report(arguments, "hop", arguments.ranks, results)


def line(found):
    """Return the table's line of a method's results."""
    reached = "–" if found["target_s"] is None else f"{found['target_s']:.1f}"
    return (
        f"{found['samples_per_s']:10.0f}{found['speed_up']:12.2f}{found['bound_ratio']:11.2f}"
        f"{found['steps_of_others_per_s']:10.2f}{reached:>10}{found['accuracy']:10.1%}"
    )


if __name__ == "__main__":
    main()
