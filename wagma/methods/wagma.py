"""WAGMA-SGD (Li et al.)."""

from dataclasses import replace

from wagma.methods.method import Method, Option, on_or_off
from wagma.methods.shared import (
    AVERAGE_STATE,
    CONTRACTION,
    CORRECTION,
    CORRECTION_EVERY,
    GROUP_SIZE,
    SYNC_PERIOD,
    TRANSPORT,
    WEIGHTS,
    WIRE_DTYPE,
    period,
)

METHOD = Method(
    "wagma",
    "models in changing groups, without waiting for stragglers; over all ranks every --sync-period "
    "steps",
    optimizer="wagma.optim.WAGMA",
    simulated="wagma.simulation.methods.wagma",
    options=(
        GROUP_SIZE,
        SYNC_PERIOD,
        Option(
            "groups",
            "new groups at every step, or always the same",
            "changing",
            choices=("changing", "fixed"),
        ),
        Option(
            "pace",
            "common: all ranks make the same number of steps, and wait for each other every "
            "--sync-period of them; own: no rank ever waits for another's step",
            "common",
            choices=("common", "own"),
        ),
        Option(
            "wait",
            "ranks that a step waits for: none, or its group",
            "nobody",
            choices=("nobody", "group"),
        ),
        Option(
            "late",
            "how a late rank's model is merged",
            choices=("paper", "conserving"),
            otherwise="conserving",
        ),
        Option(
            "overlap",
            "compute the next gradient while the model is averaged; gradients are one step staler",
            False,
            convert=on_or_off,
        ),
        replace(
            AVERAGE_STATE,
            help=f"{AVERAGE_STATE.help}; N: in every N-th version only",
            convert=period,
            metavar="N|all-ranks",
            otherwise="off",
            switch=True,
        ),
        CORRECTION,
        CORRECTION_EVERY,
        WEIGHTS,
        CONTRACTION,
        WIRE_DTYPE,
        TRANSPORT,
    ),
    color="#D55E00",
)
