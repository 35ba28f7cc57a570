"""Training with stragglers: how much of the wall time is the slowest rank's own work?

    python benchmarks/straggler_training.py

Runs `wagma train` on four ranks with a step time of 50 ms and the cloud imbalance scaled to it
(two random ranks of the job are delayed at every step), WAGMA-SGD beside synchronous averaging
(--sync-period 1). If ranks waited only at synchronizations, the wall time would be the sum over
synchronization periods of the slowest rank's own compute and delay in that period; it must be at
most a ninth longer.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common import figure, mpiexec, parser, quartiles, report

BOUND = 1 / 0.90
VARIANTS = {"WAGMA-SGD": [], "synchronous, every step": ["--sync-period", "1"]}


def train(ranks, steps, step_time_ms, options, directory):
    command = [
        *mpiexec(), "-n", str(ranks), sys.executable, "-m", "wagma", "train",
        "--steps", str(steps), "--step-time", str(step_time_ms), "--imbalance", "cloud",
        "--imbalance-scale", str(step_time_ms / 320), "--runs-dir", directory, "--name", "run",
        *options,
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
    return json.loads((Path(directory) / "run" / "summary.json").read_text())


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=4)
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--step-time-ms", type=float, default=50.0)
    arguments = arguments.parse_args()
    print(
        f"# {arguments.ranks} ranks, {arguments.steps} steps of {arguments.step_time_ms} ms, "
        "two random ranks +1 step time at every step"
    )
    results = {}
    for name, options in VARIANTS.items():
        with tempfile.TemporaryDirectory() as directory:
            summary = train(
                arguments.ranks, arguments.steps, arguments.step_time_ms, options, directory
            )
        results[name] = summary
        print(
            f"{name:24} wall {summary['wall_s']:6.2f} s, {summary['samples_per_s']:6.0f} "
            f"samples/s, accuracy {summary['accuracy']:.4f}, "
            f"slowest rank's own work {summary['bound_s']:6.2f} s"
        )
    name = "WAGMA-SGD: wall time ÷ the slowest rank's own work"
    ratio = results["WAGMA-SGD"]["wall_s"] / results["WAGMA-SGD"]["bound_s"]
    report(
        arguments,
        "straggler-training",
        arguments.ranks,
        results,
        ratios={name: quartiles([ratio])},
        figures=[figure(name, ratio, BOUND)],
    )


if __name__ == "__main__":
    main()
