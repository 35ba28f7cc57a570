"""Partial Reduce's Table 1 and Figure 7(a) (section 5.2), in simulated time: 8 ranks, some slow.

    python benchmarks/figure_partial_reduce_7.py

8 ranks as 2 × 4 on a Cray Aries network, ResNet-34's 21.8 million parameters, log-normal steps of
0.2 s in the median; σ = 0.2, with which both group sizes have the paper's throughput
(`simulated_partial_reduce.py`). HL = 1: all alike; 2: two ranks take 1.55 times as long (what
sharing an accelerator costs DenseNet-121 with All-Reduce in the paper); 3: three take 1.87 times as
long (ResNet-34). The ranks train the digits' network by batches of 16. The steps of all 8 ranks are
one update of All-Reduce, Eager-Reduce and the synchronous servers, of which the one with 3 backup
workers drops three; P' steps are one of Partial Reduce, and each step is one of the others.
"""

from dataclasses import replace

from learning_figures import Case, Figure, main
from simulated_partial_reduce import BACKUP, NODE, PARAMETERS, STEP

from wagma.simulation import MACHINES, steps

RANKS, SIGMA, SECONDS = 8, 0.2, 60.0
LEVELS = {"HL = 1": (0, 1.0), "HL = 2": (2, 1.55), "HL = 3": (3, 1.87)}
METHODS = {
    "AR": "allreduce",
    "ER": "eager-sgd:trigger=majority",
    "AD": "ad-psgd",
    "PS, BSP": "parameter-server:mode=bsp",
    "PS, ASP": "parameter-server:mode=asp",
    "PS, HETE": "parameter-server:mode=hete",
    "PS, BK": BACKUP,
    "CON, P' = 3": "partial-reduce:group_size=3",
    "DYN, P' = 3": "partial-reduce:group_size=3:weights=dynamic",
    "CON, P' = 5": "partial-reduce:group_size=5",
    "DYN, P' = 5": "partial-reduce:group_size=5:weights=dynamic",
}
SHARES = dict.fromkeys(METHODS, RANKS) | {"AD": 1, "PS, ASP": 1, "PS, HETE": 1}
SHARES |= {name: int(name[-1]) for name in METHODS if "P'" in name}


def level(slow, factor, seconds=SECONDS):
    """Return the case in which so many ranks take so many times as long."""

    def step_times(seed):
        times = steps.log_normal(int(2.5 * seconds / STEP), RANKS, STEP, SIGMA, seed)
        times[:, :slow] *= factor
        return times

    settings = {"seconds": seconds, "evaluate_every_seconds": 1.0}
    machine = replace(MACHINES["aries"], ranks_per_node=NODE)
    return Case(step_times, machine, 4 * PARAMETERS, settings)


FIGURE = Figure(
    "figure-partial-reduce-7",
    RANKS,
    {name: level(*of) for name, of in LEVELS.items()},
    METHODS,
    SHARES,
)

if __name__ == "__main__":
    main(__doc__, FIGURE)
