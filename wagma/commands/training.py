"""Options of the training that do not depend on the algorithm."""

from __future__ import annotations

from wagma.arguments import not_negative, number, whole
from wagma.tasks import local

DEFAULT_STEPS = 400
positive = number("above 0", lambda value: value > 0)


def add_training_options(group) -> None:
    """Add the options of each rank's own training."""
    add = group.add_argument
    add_length_options(group, DEFAULT_STEPS)
    add(
        "--batch-size",
        type=whole(1),
        default=32,
        metavar="N",
        help="samples per rank and batch (default: %(default)s)",
    )
    add(
        "--optimizer",
        choices=local.OPTIMIZERS,
        help="optimizer of a rank's own steps, unless a script defines optimizer() "
        f"(default: {local.DEFAULT})",
    )
    add(
        "--lr",
        type=positive,
        metavar="RATE",
        help=f"learning rate (default: {defaults_of('lr')})",
    )
    add(
        "--momentum",
        type=number("of at least 0 and below 1", lambda value: 0 <= value < 1),
        metavar="M",
        help=f"momentum, which is not averaged (default: {defaults_of('momentum')})",
    )
    add(
        "--weight-decay",
        type=not_negative,
        metavar="W",
        help=f"weight decay (default: {defaults_of('weight_decay')})",
    )
    add(
        "--clip-norm",
        type=positive,
        metavar="NORM",
        help="clip the gradient of a step to this norm, after averaging if the algorithm averages "
        "gradients (default: no clipping)",
    )
    add(
        "--allow-nan",
        action="store_true",
        help="end with status 0 even if the loss of all ranks ends as NaN or infinity",
    )
    add(
        "--accumulate",
        type=whole(1),
        default=1,
        metavar="N",
        help="batches per step, which uses their mean gradient (default: %(default)s)",
    )
    add(
        "--seed",
        type=whole(0),
        default=0,
        metavar="N",
        help="seed of the initial model, the shards, the batches and the imbalance; with "
        "wagma:wait=group the same seed gives the same model, bit for bit (default: %(default)s)",
    )


def add_length_options(group, default: int) -> None:
    """Add the options that end a training, or a simulated one: a number of steps, or a time.

    `resolve_length` sets the default.
    """
    add = group.add_mutually_exclusive_group().add_argument
    add(
        "--steps",
        type=whole(1),
        metavar="N",
        help=f"steps of every rank (default: {default})",
    )
    add(
        "--seconds",
        type=positive,
        metavar="S",
        help="train for S seconds instead, in which fast ranks make more steps; needed to compare "
        "algorithms with a rank that is always slow",
    )


def resolve_length(settings, default: int) -> None:
    """Set the number of steps if the command line has neither that nor a time."""
    if settings.steps is None and settings.seconds is None:
        settings.steps = default


def add_evaluation_options(group, default: str) -> None:
    """Add the options that select when to evaluate; ``default`` is the default in words."""
    add = group.add_mutually_exclusive_group().add_argument
    add(
        "--evaluate-every",
        type=whole(1),
        metavar="STEPS",
        help="also evaluate the average of all ranks' models as they were after every STEPS steps: "
        "ranks keep copies, which are evaluated after the training and outside its time "
        f"(default: {default})",
    )
    add(
        "--evaluate-every-seconds",
        type=positive,
        metavar="S",
        help="the same for the models as they were at the same time on all ranks, every S seconds",
    )


def check_length(settings) -> None:
    """Refuse --evaluate-every with --seconds, and set the default length."""
    resolve_length(settings, DEFAULT_STEPS)
    if settings.seconds is not None and settings.evaluate_every is not None:
        settings.parser.error(
            "argument --evaluate-every: not allowed with argument --seconds, as ranks make "
            "different numbers of steps: use --evaluate-every-seconds"
        )


def defaults_of(name: str) -> str:
    """Return the defaults of an optimizer's option in words: "0.05 for sgd, 0.001 for adamw"."""
    takers = {kind: takes for kind, takes in local.OPTIMIZERS.items() if name in takes}
    return ", ".join(f"{takes[name]:g} for {kind}" for kind, takes in takers.items())
