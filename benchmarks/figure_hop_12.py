"""Hop's Figures 12 to 15 (sections 7.3.1 to 7.3.3), in simulated time: graphs, backup workers.

    python benchmarks/figure_hop_12.py

16 workers on four machines and VGG11, as in `simulated_hop.py`: undisturbed, and with every worker
6 times as slow with probability 1/16 in each iteration. The workers train the digits' network by
batches of 16 (the paper's CNN), and a linear model with log loss by batches of 128 (its SVM; rate
10, momentum 0.9, weight decay 1e-7; digits in place of webspam, target 85 %). The server (BSP) is
on a machine of its own in the paper; here it is on worker 0.
"""

from pathlib import Path

from learning_figures import Case, Figure, main
from simulated_hop import CLUSTER, GRAPHS, PARAMETERS, STEP, step_times

RANKS, SECONDS = 16, 200 * STEP
METHODS = {
    "ring-based": "hop:graph=ring-based",
    **{graph: f"hop:graph={graph}" for graph in GRAPHS if graph != "ring-based"},
    "ring-based, 1 backup": "hop:graph=ring-based:backup=1",
    "double-ring, 1 backup": "hop:graph=double-ring:backup=1",
    "server, BSP": "parameter-server:mode=bsp",
}
LINEAR = {
    "task": Path(__file__).parent / "linear.py",
    "batch_size": 128,
    "lr": 10.0,
    "momentum": 0.9,
    "weight_decay": 1e-7,
}


def case(slow, target, settings):
    """Return a case, in which workers are slow at random or never."""
    times = {"seconds": SECONDS, "evaluate_every_seconds": SECONDS / 100}
    return Case(
        lambda seed: step_times(400, RANKS, slow, seed),
        CLUSTER,
        4 * PARAMETERS,
        times | settings,
        target=target,
    )


FIGURE = Figure(
    "figure-hop-12",
    RANKS,
    {
        f"{task}, {words}": case(slow, target, settings)
        for task, target, settings in (("CNN", 0.9, {}), ("linear", 0.85, LINEAR))
        for words, slow in {"undisturbed": None, "random 6 × slow": "random"}.items()
    },
    METHODS,
)

if __name__ == "__main__":
    main(__doc__, FIGURE)
