"""Ripples' Figures 17 to 19 (sections 7.3, 7.4), in simulated time: speed-ups, with a slow rank.

    python benchmarks/figure_ripples_17.py

16 ranks on 4 nodes and VGG-16, as in `simulated_ripples.py`: undisturbed, and with one rank that
sleeps 2 or 5 step times at every step. The ranks train the digits' network by batches of 16. The
server is on a node of its own in the paper; here it is on rank 0, as no other can be trained in
simulated time. Speed-ups are over Parameter Server in the same case; in Figure 19 the paper's are
over the undisturbed one.
"""

from figure_ripples_16 import homogeneous
from learning_figures import Figure, main
from simulated_ripples import NODES, RANKS, SMART

METHODS = {
    "Parameter Server": "parameter-server",
    "All-Reduce": "allreduce",
    "AD-PSGD": "ad-psgd",
    "random": "ripples:groups=random",
    "buffered": "ripples:groups=buffered",
    "static": f"ripples:groups=static{NODES}",
    "smart": SMART,
    "smart, all one node": f"ripples:groups=smart:ranks_per_node={RANKS}",
}
FIGURE = Figure(
    "figure-ripples-17",
    RANKS,
    {
        "undisturbed": homogeneous("VGG-16", 12.0),
        "one sleeps 2 step times": homogeneous("VGG-16", 18.0, 2.0),
        "one sleeps 5 step times": homogeneous("VGG-16", 30.0, 5.0),
    },
    METHODS,
)

if __name__ == "__main__":
    main(__doc__, FIGURE)
