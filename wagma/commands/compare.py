"""``wagma compare``: train by several algorithms, one after another."""

from __future__ import annotations

import argparse

from wagma import job
from wagma.arguments import number, whole
from wagma.commands.methods import add_shared_options, all_chosen, completer, listed, resolve
from wagma.commands.options import (
    add_device,
    add_imbalance_options,
    add_log_level,
    add_run_options,
    add_task_options,
    check_task,
)
from wagma.commands.preparation import prepare
from wagma.commands.training import add_evaluation_options, add_training_options, check_length
from wagma.methods import METHODS, REFERENCES
from wagma.parsing import EXIT_STATUSES

EVALUATIONS = 20  # of a run of `wagma compare`; said in --help, too
COMPARE_EXAMPLES = """\
examples:
  mpiexec -n 4 wagma compare --step-time 20 --imbalance cloud --imbalance-scale 0.0625
  mpiexec -n 4 wagma compare --algorithms allreduce,ddp,wagma --seeds 5 --target 0.95
  mpiexec -n 8 wagma compare --algorithms local-sgd,wagma,wagma:group_size=8 \\
      --shards dirichlet --slow-rank 3:4 --step-time 20
"""


def add(commands) -> None:
    """Add the command ``compare``."""
    parser = commands.add_parser(
        "compare",
        help="train by several algorithms one after another, and compare them",
        description="Train by several algorithms one after another, on the same data, seeds and "
        "delays: a table and a plot of throughput, waiting and the averaged model's accuracy over "
        "time. What is trained, and how, is said as for `wagma train`.",
        epilog=f"algorithms, by what they average:\n{listed(METHODS)}\n"
        f"outside references, for comparisons:\n{listed(REFERENCES)}\n"
        f"{COMPARE_EXAMPLES}\n{EXIT_STATUSES}",
    )
    parser.set_defaults(parser=parser, command=run, check=check, run=job.run)
    add_comparison_options(parser.add_argument_group("what is compared"))
    add_task_options(parser.add_argument_group("what is trained"))
    group = parser.add_argument_group("training, by each algorithm")
    add_training_options(group)
    add_device(group)
    add_evaluation_options(group, "twenty times")
    add_shared_options(parser.add_argument_group("averaging, by those that have use for it"))
    add_imbalance_options(parser.add_argument_group("injected imbalance"))
    add_run_options(parser.add_argument_group("the comparison's files"))
    add_log_level(parser)


def add_comparison_options(group) -> None:
    """Add what says which algorithms are compared, and how."""
    add = group.add_argument
    add(
        "--algorithms",
        type=all_chosen(METHODS | REFERENCES),
        default=",".join(sorted(METHODS, key=lambda name: name != "allreduce")),
        metavar="NAME,…",
        help="of those below, each with options of its own, such as wagma:group_size=2 or "
        "wagma:late=paper:overlap; ratios are to the first (default: all but the outside "
        "references, allreduce first)",
    ).completer = completer(METHODS | REFERENCES, several=True)
    add(
        "--seeds",
        type=whole(1),
        default=1,
        metavar="N",
        help="train with so many seeds, from --seed on (default: %(default)s)",
    )
    add(
        "--target",
        type=number("above 0", lambda value: value > 0),
        metavar="VALUE",
        help="also say how long it takes to this accuracy, a share such as 0.95; where there is "
        "none, until the loss is this low",
    )


def check(settings: argparse.Namespace) -> list[str]:
    """Refuse options that no algorithm has use for, and return the modules that are needed.

    It gives the settings `compared`: each algorithm's options, defaults resolved, by its label.
    """
    methods = settings.algorithms
    resolve(settings, methods, "none of the algorithms has use for it")
    settings.algorithms = [each.label for each in methods]
    check_length(settings)
    if settings.evaluate_every is None and settings.evaluate_every_seconds is None:
        if settings.seconds is None:
            settings.evaluate_every = max(1, settings.steps // EVALUATIONS)
        else:
            settings.evaluate_every_seconds = settings.seconds / EVALUATIONS
    return check_task(settings)


def run(settings: argparse.Namespace, comm, signals: job.Signals) -> int:
    """Check what only the running job knows, and compare."""
    task, directory = prepare(settings, comm)
    from wagma.compare import compare  # not at the top: it loads torch

    return compare(settings, task, directory, comm, signals)
