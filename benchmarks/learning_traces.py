"""Methods under the step times of three production jobs: throughput and time to 90 %.

    python benchmarks/learning_traces.py

Each rank's steps take as long as those of one replica of a job that ByteDance published
(`benchmarks/traces/`): 32 replicas of a job on 128 GPUs, with unequal sequence lengths; 4 replicas
on 64 GPUs, one of them slow; 2 replicas on 8 GPUs, which are alike. All ranks train the digits'
network for the same time, that of `--steps` mean steps, by batches of 16 on an HDR network; only
the imbalance is that of the jobs. Medians over the seeds, as in `learning_stragglers.py`; with
another seed ranks begin at other steps of the trace.
"""

from pathlib import Path

import numpy as np
from common import parser
from learning import Run, tabulate, train_all

from wagma.simulation import MACHINES, steps

TRACES = {
    "128 GPUs, unequal lengths": "bytedance-SE.csv",
    "64 GPUs, one slow worker": "bytedance-AR.csv",
    "8 GPUs, alike": "bytedance-ST.csv",
}
METHODS = {
    "Allreduce": "allreduce",
    "1 backup": "parameter-server:mode=backup:backups=1",
    "server, asp": "parameter-server:mode=asp",
    "AD-PSGD": "ad-psgd",
    "D-PSGD": "d-psgd",
    "SGP": "sgp",
    "local SGD": "local-sgd",
    "eager, majority": "eager-sgd:trigger=majority",
    "WAGMA": "wagma",
    "own pace": "wagma:pace=own",
    "P-Reduce": "partial-reduce",
    "dynamic": "partial-reduce:weights=dynamic",
    "Ripples, smart": "ripples:groups=smart:ranks_per_node=1",
    "Hop, 1 backup": "hop:backup=1",
}


def begun_anywhere(trace, count, seed):
    """Return `count` steps of each replica, from a step on that is drawn for all."""
    begin = np.random.default_rng(seed).integers(len(trace))
    return trace[(begin + np.arange(count)) % len(trace)]


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--seeds", type=int, default=5)
    arguments.add_argument("--target", type=float, default=0.9)
    arguments.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    arguments = arguments.parse_args()
    runs = []
    for job, file in TRACES.items():
        trace = steps.read_trace(Path(__file__).parent / "traces" / file)
        seconds = arguments.steps * float(trace.mean())
        count = int(np.ceil(seconds / trace.min())) + len(trace)
        for name in arguments.methods:
            if trace.shape[1] < 3 and name == "Hop, 1 backup":
                continue  # it would have no neighbor left
            for seed in range(arguments.seeds):
                settings = {
                    "seconds": seconds,
                    "batch_size": 16,
                    "seed": seed,
                    "evaluate_every_seconds": seconds / 50,
                }
                made = begun_anywhere(trace, count, seed)
                key = job, name, seed
                runs.append(Run(key, METHODS[name], made, MACHINES["hdr"], settings))
    tabulate(arguments, "learning-traces", 32, train_all(runs), TRACES, METHODS)


if __name__ == "__main__":
    main()
