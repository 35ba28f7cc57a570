"""Options of the training that do not depend on the algorithm."""

from __future__ import annotations

from wagma.arguments import not_negative, number, positive, whole
from wagma.tasks import kinds, local

DEFAULT_STEPS = 400


def add_training_options(group, totals: bool = False) -> None:
    """Add the options of each rank's own training, maybe with those that end it by a total."""
    length = add_length_options(group, DEFAULT_STEPS)
    if totals:
        add_total_options(length)
    add_learning_options(group)
    group.add_argument(
        "--seed",
        type=whole(0),
        default=0,
        metavar="N",
        help="seed of the initial model, the shards, the batches and the imbalance; with "
        "wagma:wait=group the same seed gives the same model, bit for bit (default: %(default)s)",
    )


def add_survive(group) -> None:
    """Add the option of ranks that go on without others."""
    group.add_argument(
        "--survive",
        nargs="?",
        const="keep",
        choices=("keep", "scale"),
        metavar="keep|scale",
        help="if the process of a rank ends, the others go on without it, with the same learning "
        "rate, or scaled to their number; needs mpiexec --with-ft ulfm of Open MPI 5 (default: the "
        "job ends)",
    )


def add_learning_options(group) -> None:
    """Add the options of a rank's batches, and of its own steps."""
    add = group.add_argument
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
        f"(default: {local.DEFAULT}; {defaults_of_tasks()})",
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


def add_total_options(length) -> None:
    """Add the options that end a training by what all ranks have done together."""
    why = "for ranks at their own pace (wagma:pace=own), of which fast ones make more steps"
    length.add_argument(
        "--total-steps",
        type=whole(1),
        metavar="N",
        help=f"train until all ranks together have made N steps, {why}",
    )
    length.add_argument(
        "--total-samples",
        type=whole(1),
        metavar="N",
        help="the same for the samples in these steps",
    )


def check_total(settings) -> None:
    """Refuse a total with an algorithm whose ranks do not know it; make it a number of steps."""
    flag = "--total-steps" if settings.total_steps else "--total-samples"
    if settings.total_samples:
        settings.total_steps = -(
            -settings.total_samples // (settings.batch_size * settings.accumulate)
        )
    if settings.total_steps is None:
        return
    if settings.algorithm.options.get("pace") != "own":
        settings.parser.error(
            f"argument {flag}: not allowed with argument --algorithm {settings.algorithm.label}: "
            "only ranks at their own pace (wagma:pace=own) know their total; --steps is each rank's"
        )
    refuse_evaluations_by_steps(settings, flag)


def check_samples(settings) -> None:
    """Refuse a number of samples with a task whose batches have others than --batch-size."""
    if settings.total_samples and not kinds.counts_samples(settings):
        settings.parser.error(
            "argument --total-samples: not allowed where batches have other numbers of samples "
            "than --batch-size, with --task control or --batch-by tokens: use --total-steps"
        )


def check_limits(settings, choices) -> None:
    """Refuse limits within steps that have no batches to leave out."""
    for each in choices:
        if each.options.get("compute_limit") is not None and settings.accumulate == 1:
            settings.parser.error(
                f"argument --accumulate: {each.label} needs 2 or more batches per step, of which "
                "it leaves out those that do not begin in time"
            )


def add_length_options(group, default: int):
    """Add the options that end a training, or a simulated one: a number of steps, or a time.

    `resolve_length` sets the default. Return their group.
    """
    length = group.add_mutually_exclusive_group()
    add = length.add_argument
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
    return length


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


def resolve_evaluations(settings, count: int) -> None:
    """Set when to evaluate, this number of times, unless the command line says when."""
    check_evaluations(settings)
    if settings.evaluate_every is None and settings.evaluate_every_seconds is None:
        if settings.seconds is None:
            settings.evaluate_every = max(1, settings.steps // count)
        else:
            settings.evaluate_every_seconds = settings.seconds / count


def check_length(settings) -> None:
    """Refuse --evaluate-every with --seconds, and set the default length."""
    resolve_length(settings, DEFAULT_STEPS)
    check_evaluations(settings)


def check_evaluations(settings) -> None:
    """Refuse --evaluate-every with --seconds."""
    if settings.seconds is not None:
        refuse_evaluations_by_steps(settings, "--seconds")


def refuse_evaluations_by_steps(settings, flag: str) -> None:
    """Refuse --evaluate-every with an option by which ranks make different numbers of steps."""
    if settings.evaluate_every is not None:
        settings.parser.error(
            f"argument --evaluate-every: not allowed with argument {flag}, as ranks make different "
            "numbers of steps: use --evaluate-every-seconds"
        )


def defaults_of_tasks() -> str:
    """Return the tasks' own optimizers in words: "adamw with --lr 0.003 for …, …"."""
    tasks: dict[tuple[str, float], list[str]] = {}
    for name, kind in kinds.KINDS.items():
        if kind.lr is not None:
            tasks.setdefault((kind.optimizer, kind.lr), []).append(name)
    return "; ".join(
        f"{kind} with --lr {rate:g} for {', '.join(names)}" for (kind, rate), names in tasks.items()
    )


def defaults_of(name: str) -> str:
    """Return the defaults of an optimizer's option in words: "0.05 for sgd, 0.001 for adamw"."""
    takers = {kind: takes for kind, takes in local.OPTIMIZERS.items() if name in takes}
    return ", ".join(f"{takes[name]:g} for {kind}" for kind, takes in takers.items())
