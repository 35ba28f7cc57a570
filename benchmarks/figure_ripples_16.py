"""Ripples' Figure 16 (section 7.2), in simulated time: steps between two synchronizations.

    python benchmarks/figure_ripples_16.py

16 ranks on 4 nodes and VGG-16, as in `simulated_ripples.py`; smart groups, and Partial Reduce's,
after every step or every 2nd to 16th (the section length). The ranks train the digits' network by
batches of 16.
"""

from learning_figures import Case, Figure, main
from simulated_ripples import MACHINES, MODELS, RANKS, SIGMA, SMART

from wagma.simulation import steps

SECONDS = 12.0
LENGTHS = (1, 2, 4, 8, 16)
METHODS = {
    f"{name}, {length}": f"{label}:sync_every={length}"
    for name, label in {"smart": SMART, "P-Reduce": "partial-reduce:group_size=3"}.items()
    for length in LENGTHS
}


def homogeneous(model, seconds, slow=None, **settings):
    """Return the case of a model, with one rank that sleeps so many step times or none."""
    nbytes, step = MODELS[model]

    def step_times(seed):
        times = steps.log_normal(int(2 * seconds / step), RANKS, step, SIGMA, seed)
        if slow:
            times[:, 0] *= 1 + slow
        return times

    settings = {"seconds": seconds, "evaluate_every_seconds": seconds / 80, **settings}
    return Case(step_times, MACHINES["two levels"], nbytes, settings)


FIGURE = Figure("figure-ripples-16", RANKS, {"VGG-16": homogeneous("VGG-16", SECONDS)}, METHODS)

if __name__ == "__main__":
    main(__doc__, FIGURE)
