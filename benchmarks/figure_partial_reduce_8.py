"""Partial Reduce's Figure 8 (section 5.2.3), in simulated time: group sizes from 2 to 8.

    python benchmarks/figure_partial_reduce_8.py

The settings of `figure_partial_reduce_7.py`, with constant and dynamic weights: run time, updates
and time per update, with all ranks alike (HL = 1, as in the paper) and three slow ones (HL = 3).
"""

from figure_partial_reduce_7 import LEVELS, RANKS, level
from learning_figures import Figure, main

METHODS = {
    f"{kind}, P' = {size}": f"partial-reduce:group_size={size}:weights={weights}"
    for kind, weights in {"CON": "constant", "DYN": "dynamic"}.items()
    for size in range(2, RANKS + 1)
}
FIGURE = Figure(
    "figure-partial-reduce-8",
    RANKS,
    {name: level(*LEVELS[name]) for name in ("HL = 1", "HL = 3")},
    METHODS,
    {name: int(name[-1]) for name in METHODS},
)

if __name__ == "__main__":
    main(__doc__, FIGURE)
