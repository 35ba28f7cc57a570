"""The methods that train a linear model on unbalanced nodes, and the paper's settings.

A method is what it says here; `wagma.wpsgd.training` runs all of them alike. This module needs
neither numpy nor MPI, which the command's help would load.
"""

from __future__ import annotations

from dataclasses import dataclass

STEP, SPAN = "step", "span"


@dataclass(frozen=True)
class Method:
    """What nodes do, and how their models become one.

    Attributes:
        help: one line.
        source: in the paper.
        color: of its curves; Okabe and Ito's, which the color-blind can tell apart.
        averages: all nodes go on from their average after every "step", or after every "span" of
            the fastest node; None: there is one average, of the models at the end.
        weighted: whether a node that is behind weighs less, by Equation 6; else all alike.
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
        "nodes train alone; in the average of their models those that are behind weigh less",
        "Algorithm 1",
        "#D55E00",
        weighted=True,
    ),
    "simuparallel": Method(
        "nodes train alone on as many samples each, and their models are averaged",
        "Algorithm 2",
        "#0072B2",
        waits=True,
    ),
    "delay": Method(
        "as wp, and each node has workers whose updates are late",
        "Algorithms 3 and 4",
        "#CC79A7",
        weighted=True,
        delayed=True,
    ),
    "delay-wp": Method(
        "as delay, and nodes go on from the weighted average after every span",
        "Algorithm 5",
        "#009E73",
        averages=SPAN,
        weighted=True,
        delayed=True,
    ),
    "minibatch": Method(
        "nodes average after every sample, so that all wait for the slowest",
        "section 6.2.4",
        "#E69F00",
        averages=STEP,
        waits=True,
    ),
    "sequential": Method(
        "one node of the fastest's speed, with all samples", "section 6.2.5", "#000000", alone=True
    ),
    "direct": Method(
        "as wp, but all models count alike, however many samples they have seen",
        "section 6.2.6",
        "#999999",
    ),
}


@dataclass(frozen=True)
class Preset:
    """Settings of an experiment.

    Attributes:
        lr, l2: η and λ.
        start: what all parameters are at first.
        span: samples of the fastest node between averages.
        samples: what the fastest node consumes.
        every: samples of the fastest node between evaluations.
        seeds: orders of the samples, of which results are means.
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


# Sections 6.5 and 6.6. How long the paper trains is not said. Rows of KDD 2010 are 8,407,752, and
# generated ones have a tenth of its features by default, with which 20 nodes are 0.3 GB.
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
