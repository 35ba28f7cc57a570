"""Options of a training: what a rank's steps are, whatever is averaged."""

from __future__ import annotations

from wagma.arguments import not_negative, number, whole
from wagma.tasks import local

DEFAULT_STEPS = 400
positive = number("above 0", lambda value: value > 0)


def add_training_options(group) -> None:
    """Add what a training without averaging would have as well."""
    add = group.add_argument
    add_length_options(group, DEFAULT_STEPS)
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
        type=positive,
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
        type=positive,
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


def add_length_options(group, default: int) -> None:
    """Add when ranks end: after so many steps, or after a time; `resolve_length` has the default.

    Whether ranks train in a job or in simulated time makes no difference.
    """
    add = group.add_mutually_exclusive_group().add_argument
    add(
        "--steps",
        type=whole(1),
        metavar="N",
        help=f"steps that every rank makes (default: {default})",
    )
    add(
        "--seconds",
        type=positive,
        metavar="S",
        help="instead: for how long every rank makes steps, of which fast ranks make more; "
        "a comparison with a rank that is always slow says something only so",
    )


def resolve_length(settings, default: int) -> None:
    """Let ranks make so many steps where the command line says neither that nor a time."""
    if settings.steps is None and settings.seconds is None:
        settings.steps = default


def add_evaluation_options(group, default: str) -> None:
    """Add when a model is evaluated; ``default`` says so in words where it is not given."""
    add = group.add_mutually_exclusive_group().add_argument
    add(
        "--evaluate-every",
        type=whole(1),
        metavar="STEPS",
        help="test the average of all ranks' models also as they were after every so many steps: "
        "ranks keep copies, which are tested after the training, outside of its time "
        f"(default: {default})",
    )
    add(
        "--evaluate-every-seconds",
        type=positive,
        metavar="S",
        help="the same, as all ranks' models were at the same time, every so many seconds",
    )


def check_length(settings) -> None:
    """Refuse an evaluation after steps of which ranks make different numbers; set the default."""
    resolve_length(settings, DEFAULT_STEPS)
    if settings.seconds is not None and settings.evaluate_every is not None:
        settings.parser.error(
            "argument --evaluate-every: not allowed with argument --seconds, in which ranks make "
            "different numbers of steps: use --evaluate-every-seconds"
        )


def defaults_of(name: str) -> str:
    """Return the defaults of an optimizer's option in words: "0.05 for sgd, 0.001 for adamw"."""
    takers = {kind: takes for kind, takes in local.OPTIMIZERS.items() if name in takes}
    return ", ".join(f"{takes[name]:g} for {kind}" for kind, takes in takers.items())
