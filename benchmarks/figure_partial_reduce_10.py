"""Partial Reduce's Figures 7(b) and 10 (section 5.3), in simulated time: a shared cluster.

    python benchmarks/figure_partial_reduce_10.py

16 ranks with ResNet-34's 21.8 million parameters (7b), 32 with those of ResNet-18 and of VGG-16
(10); one rank on a node, Ethernet of 10 Gbit/s; steps of 0.3 s in the median, 0.6 s with VGG-16.
The paper shows how unequal its containers are in a picture only (Figure 9): here each rank has a
pace of its own, log-normal with σ = 0.4, and each step varies by σ = 0.3 (our choice). The ranks
train the digits' network by batches of 16.
"""

import numpy as np
from learning_figures import Case, Figure, main

from wagma.simulation import MACHINES, steps

PACE, SIGMA = 0.4, 0.3
METHODS = {
    "AR": "allreduce",
    "CON, P' = 4": "partial-reduce:group_size=4",
    "DYN, P' = 4": "partial-reduce:group_size=4:weights=dynamic",
}


def shared_cluster(ranks, parameters, step, seconds):
    """Return the case of so many ranks with steps of so many seconds in the median."""

    def step_times(seed):
        pace = np.random.default_rng([seed, 2]).lognormal(0, PACE, ranks)
        times = steps.log_normal(int(8 * seconds / step), ranks, step, SIGMA, seed)
        return times * pace

    settings = {"seconds": seconds, "evaluate_every_seconds": seconds / 60}
    return Case(step_times, MACHINES["10gbe"], 4 * parameters, settings)


FIGURE = Figure(
    "figure-partial-reduce-10",
    32,
    {
        "7b: 16 ranks, ResNet-34": shared_cluster(16, 21_797_672, 0.3, 90.0),
        "10a: 32 ranks, ResNet-18": shared_cluster(32, 11_689_512, 0.3, 90.0),
        "10b: 32 ranks, VGG-16": shared_cluster(32, 138_357_544, 0.6, 180.0),
    },
    METHODS,
)

if __name__ == "__main__":
    main(__doc__, FIGURE)
