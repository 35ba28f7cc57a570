"""WAGMA-SGD (Li et al.)."""

from wagma.methods.method import Method, Option, on_or_off
from wagma.methods.shared import (
    CONTRACTION,
    GROUP_SIZE,
    SYNC_PERIOD,
    TRANSPORT,
    WEIGHTS,
    WIRE_DTYPE,
)

METHOD = Method(
    "wagma",
    "models in changing groups that wait for nobody, all of them every --sync-period",
    optimizer="wagma.optim.WAGMA",
    simulated="wagma.simulation.methods.wagma",
    options=(
        GROUP_SIZE,
        SYNC_PERIOD,
        Option(
            "groups",
            "new ones at every step, or always the same",
            "changing",
            choices=("changing", "fixed"),
        ),
        Option("wait", "whom a step waits for", "nobody", choices=("nobody", "group")),
        Option(
            "late",
            "how the model of a rank that came late is merged",
            choices=("paper", "conserving"),
            otherwise="conserving",
            simulated=False,
        ),
        Option(
            "overlap",
            "compute the next gradient while the model is averaged: gradients are one step staler",
            False,
            convert=on_or_off,
        ),
        WEIGHTS,
        CONTRACTION,
        WIRE_DTYPE,
        TRANSPORT,
    ),
    color="#D55E00",
)
