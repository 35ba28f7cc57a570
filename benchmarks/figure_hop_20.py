"""Hop's Figure 20 (section 7.3.6), in simulated time: graphs for machines with 4, 2 and 2 workers.

    python benchmarks/figure_hop_20.py

8 workers and VGG11 on Ethernet of 1 Gbit/s, as in `simulated_hop.py`: steps of 3.4 s, undisturbed
and with every worker 6 times as slow with probability 1/8 in each iteration (7.3.6 says
"heterogeneous" only), and steps of 0.43 s, where the network takes most of the time. The workers
train the digits' network by batches of 16.
"""

from dataclasses import replace

from learning_figures import Case, Figure, main
from simulated_hop import CLUSTER, PARAMETERS, PLACED, STEP, step_times

RANKS, STEPS = 8, 150
MACHINE = replace(CLUSTER, ranks_per_node=1, node_sizes=(4, 2, 2))
METHODS = {graph: f"hop:graph={graph}" for graph in PLACED}


def case(slow, step, seconds):
    """Return the case of these steps."""
    return Case(
        lambda seed: step_times(int(2 * seconds / step), RANKS, slow, seed, step),
        MACHINE,
        4 * PARAMETERS,
        {"seconds": seconds, "evaluate_every_seconds": seconds / 100},
    )


FIGURE = Figure(
    "figure-hop-20",
    RANKS,
    {
        "steps of 3.4 s": case(None, STEP, STEPS * STEP),
        "steps of 3.4 s, random 6 × slow": case("random", STEP, 3 * STEPS * STEP),
        "steps of 0.43 s": case(None, STEP / 8, 4 * STEPS * STEP / 8),
    },
    METHODS,
)

if __name__ == "__main__":
    main(__doc__, FIGURE)
