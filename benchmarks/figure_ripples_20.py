"""Ripples' Figure 20 (section 7.5), in simulated time: 32 ranks for the same time.

    python benchmarks/figure_ripples_20.py

32 ranks on 8 nodes, with the network and ResNet-50 of `simulated_ripples.py`, undisturbed, for the
same time; in the paper 10 hours, here 200 steps of a rank that never waits. The ranks train the
digits' network by batches of 16: iterations and accuracy at the end.
"""

from learning_figures import Case, Figure, main
from simulated_ripples import MACHINES, MODELS, NODES, SIGMA, SMART

from wagma.simulation import steps

RANKS, STEPS = 32, 200
METHODS = {
    "All-Reduce": "allreduce",
    "AD-PSGD": "ad-psgd",
    "static": f"ripples:groups=static{NODES}",
    "smart": SMART,
}
NBYTES, STEP = MODELS["ResNet-50"]
SECONDS = STEPS * STEP
FIGURE = Figure(
    "figure-ripples-20",
    RANKS,
    {
        "32 ranks": Case(
            lambda seed: steps.log_normal(2 * STEPS, RANKS, STEP, SIGMA, seed),
            MACHINES["two levels"],
            NBYTES,
            {"seconds": SECONDS, "evaluate_every_seconds": SECONDS / 60},
        )
    },
    METHODS,
)

if __name__ == "__main__":
    main(__doc__, FIGURE)
