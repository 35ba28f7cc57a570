"""The methods that train a linear model on unbalanced nodes, and the paper's settings.

A method is a set of properties; `wagma.wpsgd.training` runs all methods by these. This module
needs neither numpy nor MPI, which the command's help would otherwise load.
"""

from __future__ import annotations

from dataclasses import dataclass

STEP, SPAN = "step", "span"


@dataclass(frozen=True)
class Method:
    """How nodes train, and how their models are combined.

    Attributes:
        help: one line.
        source: its source in the paper.
        color: color of its curves, from Okabe and Ito's palette for the color-blind.
        averages: all nodes continue from their average after every "step", or after every "span" of
            the fastest node; None: there is one average, of the final models.
        weighted: whether nodes that are behind have less weight, by Equation 6; else all have the
            same.
        waits: whether all nodes consume as many samples as the fastest.
        delayed: whether a node has several workers, whose updates are late.
        alone: whether one node trains, with all samples.
    """

    help: str
    source: str
    color: str
    averages: str | None = None
    weighted: bool = False
    waits: bool = False
    delayed: bool = False
    alone: bool = False


METHODS = {
    "wp": Method(
        "nodes train alone, and their models are averaged, with less weight for slower nodes",
        "Algorithm 1",
        "#D55E00",
        weighted=True,
    ),
    "simuparallel": Method(
        "nodes train alone, all on the same number of samples, and their models are averaged",
        "Algorithm 2",
        "#0072B2",
        waits=True,
    ),
    "delay": Method(
        "like wp, and each node has workers whose updates are late",
        "Algorithms 3 and 4",
        "#CC79A7",
        weighted=True,
        delayed=True,
    ),
    "delay-wp": Method(
        "like delay, and nodes continue from the weighted average after every span",
        "Algorithm 5",
        "#009E73",
        averages=SPAN,
        weighted=True,
        delayed=True,
    ),
    "minibatch": Method(
        "nodes average after every sample, so all wait for the slowest",
        "section 6.2.4",
        "#E69F00",
        averages=STEP,
        waits=True,
    ),
    "sequential": Method(
        "one node, as fast as the fastest, with all samples", "section 6.2.5", "#000000", alone=True
    ),
    "direct": Method(
        "like wp, but all models have the same weight",
        "section 6.2.6",
        "#999999",
    ),
}


@dataclass(frozen=True)
class Preset:
    """Settings of an experiment.

    Attributes:
        lr, l2: η and λ.
        start: initial value of all parameters.
        span: samples of the fastest node between averages.
        samples: samples that the fastest node consumes.
        every: samples of the fastest node between evaluations.
        seeds: number of orders of the samples; results are means over these.
        features, rows, nonzeros: of generated data.
    """

    lr: float
    l2: float
    start: float
    span: int
    samples: int
    every: int
    seeds: int
    features: int
    rows: int
    nonzeros: int


# Sections 6.5 and 6.6. The paper does not state the length of its trainings. KDD 2010 has 8,407,752
# rows; generated ones have a tenth of its features by default, with which 20 nodes need 0.3 GB.
KDD_FEATURES = 20_216_830
PRESETS = {
    "small": Preset(0.1, 0.001, 100.0, 1000, 100_000, 5000, 1, 20_958, 10_000, 60),
    "real-sim": Preset(0.1, 0.001, 100.0, 1000, 500_000, 1000, 20, 20_958, 72_309, 60),
    "kdd2010": Preset(
        1e-4, 0.01, 4.0, 1000, 10_000_000, 100_000, 20, KDD_FEATURES // 10, 200_000, 35
    ),
}
DEFAULT_PRESET = "small"
TEST_SAMPLES = 1000
# Table 1 and section 6.2.1: 20 nodes, and the 7 with an E5-2640 have 50 % to 70 % of the speed.
PAPER_SPEEDS = (*[1.0] * 13, *(0.5 + 0.2 * node / 6 for node in range(7)))
# Table 1: the node with an E3-1225 and the 4 with an E5-2680, which are fast, have 1 Gbit/s, the
# others 10. That nodes of one server may share its link is not modelled.
PAPER_LINKS = (*[0.1] * 5, *[1.0] * 15)
