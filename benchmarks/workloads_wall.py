"""Episodes of unequal lengths, by time: methods on 4 and 8 ranks, nothing injected.

    python benchmarks/workloads_wall.py --ranks 4

`wagma compare --task control`, 4 environments a rank, played by whole episodes. Where ranks share
cores their computation would compete, and be unequal by that; so each step of a rank's environments
sleeps for 4 ms in place of a simulator, which takes most of the time. Each training is written when
it has ended, and a later run goes on from there. Each takes 10 seconds, and all methods with a seed
one to two minutes.
"""

from __future__ import annotations

import argparse
import tempfile

from common import compare, parser, report
from workloads import METHODS, read, table

CHOSEN = ("Allreduce", "WAGMA", "WAGMA, own pace", "AD-PSGD")
SLEEP_MS = 4.0  # for a step of a rank's environments
EVALUATIONS = 10


def train_one(arguments, ranks, method, seed):
    """Train over MPI; return the figures and evaluations of `workloads.train_one`."""
    every = arguments.seconds / EVALUATIONS
    length = argparse.Namespace(seeds=1, step_time_ms=0.0, seconds=arguments.seconds)
    options = [
        *("--task", "control", "--environment-time", SLEEP_MS, "--batch-size", 4),
        *("--seed", seed, "--evaluate-every-seconds", every, "--no-straggler-warnings"),
    ]
    with tempfile.TemporaryDirectory() as directory:
        label = METHODS[method]
        found, _ = compare(length, ranks, [label], map(str, options), directory)
    (run,) = found[label]
    return {
        "samples_per_s": run["samples_per_s"],
        "steps": run["evaluations"][-1]["step"],
        "computing": 1 - run["waiting_share"],
        "seconds": [each["elapsed_s"] for each in run["evaluations"]],
        "return": [each["return"] for each in run["evaluations"]],
    }


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    arguments.add_argument("--seconds", type=float, default=10.0)
    arguments.add_argument("--seeds", type=int, default=5)
    arguments.add_argument("--methods", nargs="+", choices=CHOSEN, default=list(CHOSEN))
    arguments = arguments.parse_args()
    for ranks in arguments.ranks:
        for seed in range(arguments.seeds):
            for method in arguments.methods:
                results = read(arguments, ranks, "workloads-wall") or {"control": {"runs": {}}}
                runs = results["control"]["runs"]
                if str(seed) in runs.setdefault(method, {}):
                    continue
                runs[method][str(seed)] = train_one(arguments, ranks, method, seed)
                results["control"]["runs"] = {each: runs[each] for each in CHOSEN if each in runs}
                report(arguments, "workloads-wall", ranks, results)
        print(table("control", ranks, read(arguments, ranks, "workloads-wall")))


if __name__ == "__main__":
    main()
