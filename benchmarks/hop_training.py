"""Hop's settings with stragglers that sleep, by time: iterations, samples, and time to an accuracy.

    python benchmarks/hop_training.py

Runs `wagma compare` with `--seconds` on eight ranks. Undisturbed; every rank takes 6 times as long
with probability 1/8 (Hop, section 7.3.1); one rank always takes 4 times as long (7.3.5). Steps
sleep, so that ranks do not wait for processors rather than for each other. An iteration is one of
the ranks that are not slow for good: what they take for one is divided by the standard setting's on
the same graph with the same stragglers (speed-up) and without any (slow-down).
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

from common import mpiexec, parser, report

CASES = {
    "undisturbed": (),
    "random, 6 × slow": ("--imbalance", "random"),
    "one 4 × slow": ("--slow-rank", "0:4"),
}
GRAPHS = ("ring", "ring-based", "double-ring")
SETTINGS = ("", ":backup=1", ":staleness=5")
SKIPPING = (":backup=1:max_skip=2", ":backup=1:max_skip=10")
METHODS = (
    "allreduce",
    "parameter-server:mode=bsp",
    *(f"hop:graph={graph}{setting}" for graph in GRAPHS for setting in SETTINGS),
    *(f"hop:graph=ring-based{setting}" for setting in SKIPPING),
)


def compare(arguments, options, directory):
    """Return what `wagma compare` has found, and each method's summary of its first run."""
    command = [
        *mpiexec(), "-n", str(arguments.ranks), sys.executable, "-m", "wagma", "compare",
        "--algorithms", ",".join(METHODS), "--seconds", str(arguments.seconds),
        "--target", str(arguments.target), "--batch-size", "16",
        "--step-time", str(arguments.step_time_ms), *options,
        "--runs-dir", directory, "--name", "runs",
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=3600)
    runs = Path(directory) / "runs"
    found = json.loads((runs / "comparison.json").read_text())
    places = {label: runs / of[0]["directory"] for label, of in found["runs"].items()}
    return found["results"], {
        label: json.loads((place / "summary.json").read_text()) for label, place in places.items()
    }


def measured(figures, summary):
    """Return what one method has done in a run."""
    steps = summary["steps_of_rank"]
    skipped = summary.get("skipped_of_rank", [0] * len(steps))
    reached = [sum(each) for each in zip(steps, skipped)]
    return {
        "samples_per_s": summary["samples_per_s"],
        "to_allreduce": figures["ratio"],
        "iteration_ms": 1000 * summary["wall_s"] / mean(reached[1:]),
        "steps_of_rank_0": steps[0],
        "skipped_by_rank_0": skipped[0],
        "target_s": figures["target_s"],
        "accuracy": figures["mean"],
    }


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=8)
    arguments.add_argument("--seconds", type=float, default=8.0)
    arguments.add_argument("--step-time-ms", type=float, default=60.0)
    arguments.add_argument("--target", type=float, default=0.9)
    arguments = arguments.parse_args()
    print(
        f"# {arguments.ranks} ranks, {arguments.seconds:g} s, steps of {arguments.step_time_ms:g} "
        f"ms\n{'':<20}{'method':<38}{'÷ allreduce':>12}{'ms':>8}{'slow-down':>10}{'speed-up':>9}"
        f"{'skipped':>8}{f's to {arguments.target:g}':>9}{'accuracy':>9}",
        flush=True,
    )
    results, undisturbed = {}, {}
    for case, options in CASES.items():
        with tempfile.TemporaryDirectory() as directory:
            figures, summaries = compare(arguments, options, directory)
        found = {label: measured(figures[label], summaries[label]) for label in METHODS}
        undisturbed = undisturbed or found
        for label, each in found.items():
            standard = found.get(":".join(label.split(":")[:2]), each)
            each["slow_down"] = each["iteration_ms"] / undisturbed[label]["iteration_ms"]
            each["speed_up"] = standard["iteration_ms"] / each["iteration_ms"]
            results[f"{case}: {label}"] = each
            reached = "–" if each["target_s"] is None else f"{each['target_s']:.1f}"
            print(
                f"{case:<20}{label:<38}{each['to_allreduce']:12.2f}{each['iteration_ms']:8.0f}"
                f"{each['slow_down']:10.2f}{each['speed_up']:9.2f}{each['skipped_by_rank_0']:8}"
                f"{reached:>9}{each['accuracy']:9.1%}",
                flush=True,
            )
    report(arguments, "hop-training", arguments.ranks, results)


if __name__ == "__main__":
    main()
