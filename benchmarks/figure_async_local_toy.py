"""The toy of asynchronous local SGD's authors (Liu et al., 2024), in simulated time.

    python benchmarks/figure_async_local_toy.py

4 workers with steps of 0.58, 0.75, 1.51 and 3.33 s, 20 local steps of AdamW with batches of 32, for
2,000 s, in which the workers together make 8,000 steps if none waits; `mixture.py` is the task. The
outer rate is 1 without momentum, and 0.1 with momentum 0.9, by which an update moves the model as
far in the end. Messages take no time that counts: the network is ours, of 133,000 parameters.
"""

from pathlib import Path

import numpy as np
from learning_figures import Case, Figure, main

from wagma.simulation import MACHINES

SECONDS = 2000.0
STEPS = 0.58, 0.75, 1.51, 3.33
SERVER = "parameter-server:mode=async-local:local_steps=20"
METHODS = {
    "local SGD": "local-sgd:sync_period=20",
    "asynchronous": f"{SERVER}:outer_momentum=0",
    "dynamic steps": f"{SERVER}:outer_momentum=0:dynamic_steps",
    "delayed Nesterov": SERVER,
    "delayed Nesterov, dynamic steps": f"{SERVER}:dynamic_steps",
    "WAGMA": "wagma",
    "own pace": "wagma:pace=own",
    "AD-PSGD": "ad-psgd",
}


def step_times(seed):
    return np.tile(STEPS, (int(SECONDS / min(STEPS)) + 2, 1))


FIGURE = Figure(
    "figure-async-local-toy",
    4,
    {
        "4 workers of unequal speed": Case(
            step_times,
            MACHINES["10gbe"],
            4 * 132_356,
            {
                "seconds": SECONDS,
                "batch_size": 32,
                "evaluate_every_seconds": SECONDS / 50,
                "task": Path(__file__).parent / "mixture.py",
            },
            target=0.5,
        )
    },
    METHODS,
)

if __name__ == "__main__":
    main(__doc__, FIGURE)
