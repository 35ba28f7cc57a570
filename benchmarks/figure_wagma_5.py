"""WAGMA-SGD's Figure 5 and its ablations (section V-B), in simulated time: 64 ranks, two slow.

    python benchmarks/figure_wagma_5.py

The settings of Figure 4's simulation (`scaling_figures.py`): Piz Daint, ResNet-50's 25.6 million
parameters, steps of 0.61 s, and two random ranks 320 ms longer at every step; τ = 10, S = 8. All
ranks make the same number of steps, as the paper's make 90 epochs, but train the digits' network:
64 shards of 22 images, batches of 16. ❶ no group averages, which is local SGD; ❷ fixed groups;
❸ one group of all; ❹ groups of 4; local SGD averages at every step, as the paper's in Figure 5.
"""

from functools import partial

from learning_figures import Case, Figure, main
from scaling_figures import RESNET, step_times

RANKS = 64
METHODS = {
    "Allreduce": "allreduce",
    "local SGD, τ = 1": "local-sgd:sync_period=1",
    "D-PSGD": "d-psgd:clock=global",
    "SGP, 2 neighbors": "sgp:neighbors=2",
    "AD-PSGD": "ad-psgd",
    "WAGMA, paper rule": "wagma:late=paper",
    "WAGMA, conserving": "wagma",
    "❶ no groups": "local-sgd:sync_period=10",
    **{
        f"{name}, {words}": f"wagma:late={rule}:{option}"
        for name, option in {
            "❷ fixed groups": "groups=fixed",
            "❸ S = 64": "group_size=64",
            "❹ S = 4": "group_size=4",
        }.items()
        for rule, words in {"paper": "paper rule", "conserving": "conserving"}.items()
    },
}


def by_steps(case, ranks):
    """Return the panel in which all ranks make the steps of a case of the scaling figures."""
    settings = {"evaluate_every": 5}
    made = partial(step_times, case, ranks)
    return {f"{ranks} ranks": Case(made, case.machine, 4 * case.parameters, settings)}


FIGURE = Figure("figure-wagma-5", RANKS, by_steps(RESNET, RANKS), METHODS)

if __name__ == "__main__":
    main(__doc__, FIGURE)
