"""Options of a training: what a rank's steps are, whatever is averaged."""

from __future__ import annotations

from wagma.arguments import not_negative, number, whole
from wagma.tasks import local


def add_training_options(group) -> None:
    """Add what a training without averaging would have as well."""
    add = group.add_argument
    add(
        "--steps",
        type=whole(1),
        default=400,
        metavar="N",
        help="steps that every rank makes (default: %(default)s)",
    )
    add(
        "--batch-size",
        type=whole(1),
        default=32,
        metavar="N",
        help="samples that a rank draws at each step (default: %(default)s)",
    )
    add(
        "--optimizer",
        choices=local.OPTIMIZERS,
        help="what makes a rank's own steps, unless a script defines optimizer() "
        f"(default: {local.DEFAULT})",
    )
    add(
        "--lr",
        type=number("above 0", lambda value: value > 0),
        metavar="RATE",
        help=f"learning rate (default: {defaults_of('lr')})",
    )
    add(
        "--momentum",
        type=number("from 0 to below 1", lambda value: 0 <= value < 1),
        metavar="M",
        help=f"momentum, which stays on its rank (default: {defaults_of('momentum')})",
    )
    add(
        "--weight-decay",
        type=not_negative,
        metavar="W",
        help=f"weight decay (default: {defaults_of('weight_decay')})",
    )
    add(
        "--clip-norm",
        type=number("above 0", lambda value: value > 0),
        metavar="NORM",
        help="scale the gradient that a step uses down to this norm, where it is longer; that is "
        "the averaged one, where gradients are averaged (default: leave it)",
    )
    add(
        "--accumulate",
        type=whole(1),
        default=1,
        metavar="N",
        help="batches whose mean gradient a step uses (default: %(default)s)",
    )
    add(
        "--seed",
        type=whole(0),
        default=0,
        metavar="N",
        help="seed of the initial model, the shards, the batches and the imbalance; with "
        "wagma:wait=group the same seed gives the same model, bit for bit (default: %(default)s)",
    )


def add_evaluation_option(group, default: str) -> None:
    """Add when a model is evaluated; ``default`` says so in words where it is not given."""
    group.add_argument(
        "--evaluate-every",
        type=whole(1),
        metavar="STEPS",
        help="test the average of all ranks' models also as they were after every so many steps: "
        "ranks keep copies, which are tested after the training, outside of its time "
        f"(default: {default})",
    )


def defaults_of(name: str) -> str:
    """Return the defaults of an optimizer's option in words: "0.05 for sgd, 0.001 for adamw"."""
    takers = {kind: takes for kind, takes in local.OPTIMIZERS.items() if name in takes}
    return ", ".join(f"{takes[name]:g} for {kind}" for kind, takes in takers.items())
