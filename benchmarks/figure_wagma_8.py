"""WAGMA-SGD's Figure 8 (section V-C), in simulated time: 16 ranks, sequences of unequal lengths.

    python benchmarks/figure_wagma_8.py

The settings of Figure 7's simulation (`scaling_figures.py`): Piz Daint, a Transformer's 61.4
million parameters, log-normal steps of 0.5 s in the median, σ = 0.3; τ = 10, S = 4. All ranks make
the same number of steps, as the paper's make 10 epochs, but train the digits' network by batches of
16; so accuracy takes the place of BLEU. ❷ fixed groups; ❸ one group of all; ❹ groups of 2.
"""

from figure_wagma_5 import by_steps
from learning_figures import Figure, main
from scaling_figures import TRANSFORMER

RANKS = 16
METHODS = {
    "Allreduce": "allreduce",
    "local SGD, τ = 1": "local-sgd:sync_period=1",
    "D-PSGD": "d-psgd:clock=global",
    "SGP, 1 neighbor": "sgp",
    "SGP, 2 neighbors": "sgp:neighbors=2",
    "AD-PSGD": "ad-psgd",
    "WAGMA, paper rule": "wagma:late=paper",
    "WAGMA, conserving": "wagma",
    "❷ fixed groups": "wagma:late=paper:groups=fixed",
    "❸ S = 16": "wagma:late=paper:group_size=16",
    "❹ S = 2": "wagma:late=paper:group_size=2",
}
FIGURE = Figure("figure-wagma-8", RANKS, by_steps(TRANSFORMER, RANKS), METHODS)

if __name__ == "__main__":
    main(__doc__, FIGURE)
