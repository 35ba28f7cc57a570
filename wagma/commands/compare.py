"""``wagma compare``: train with several algorithms, one after another."""

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
    add_straggler_warnings,
    add_task_options,
    add_timeline,
)
from wagma.commands.preparation import prepare
from wagma.commands.training import (
    add_evaluation_options,
    add_training_options,
    check_length,
    check_limits,
    resolve_evaluations,
)
from wagma.methods import METHODS, REFERENCES
from wagma.parsing import EXIT_STATUSES
from wagma.tasks import kinds

EVALUATIONS = 20  # of a run of `wagma compare`; --help has the same number
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
        help="train with several algorithms one after another, and compare them",
        description="Train with several algorithms one after another, on the same data, seeds and "
        "delays, and compare throughput, waiting time and the averaged model's accuracy over time "
        "in a table and a plot. The task and the training have the options of `wagma train`.",
        epilog=f"algorithms, by what they average:\n{listed(METHODS)}\n"
        f"outside references, for comparisons:\n{listed(REFERENCES)}\n"
        f"{COMPARE_EXAMPLES}\n{EXIT_STATUSES}",
    )
    parser.set_defaults(parser=parser, command=run, check=check, run=job.run)
    add_comparison_options(parser.add_argument_group("comparison"))
    add_task_options(parser)
    group = parser.add_argument_group("training with each algorithm")
    add_training_options(group)
    add_device(group)
    add_evaluation_options(group, "twenty times")
    add_shared_options(parser.add_argument_group("averaging, for algorithms that take these"))
    add_imbalance_options(parser.add_argument_group("injected imbalance"))
    group = parser.add_argument_group("output")
    add_run_options(group)
    add_straggler_warnings(group)
    add_timeline(group)
    add_log_level(parser)


def add_comparison_options(group) -> None:
    """Add the options of the comparison itself."""
    add = group.add_argument
    add(
        "--algorithms",
        type=all_chosen(METHODS | REFERENCES),
        default=",".join(sorted(METHODS, key=lambda name: name != "allreduce")),
        metavar="NAME,…",
        help="algorithms listed below, each with its own options, such as wagma:group_size=2 or "
        "wagma:late=paper:overlap; ratios are relative to the first (default: all except the "
        "outside references, allreduce first)",
    ).completer = completer(METHODS | REFERENCES, several=True)
    add_repetition_options(group)


def add_repetition_options(group) -> None:
    """Add the options of the seeds, and of what is reported over them."""
    add = group.add_argument
    add(
        "--seeds",
        type=whole(1),
        default=1,
        metavar="N",
        help="number of seeds to train with, counted from --seed (default: %(default)s)",
    )
    add(
        "--target",
        type=number("above 0", lambda value: value > 0),
        metavar="VALUE",
        help="also report the time to this accuracy, a fraction such as 0.95, this BLEU or this "
        "return, or to this loss or perplexity if the task has none of them; other metrics of a "
        "script have no target, as it is not known whether they rise",
    )


def check(settings: argparse.Namespace) -> list[str]:
    """Refuse options that no algorithm takes, and return the modules that are needed."""
    settings.algorithms = resolve(settings, settings.algorithms, "none of the algorithms takes it")
    check_limits(settings, settings.algorithms)
    check_length(settings)
    resolve_evaluations(settings, EVALUATIONS)
    return kinds.resolve(settings)


def run(settings: argparse.Namespace, comm, signals: job.Signals) -> int:
    """Check the settings against the running job, and compare."""
    task, directory = prepare(settings, comm)
    from wagma.compare import compare  # not at the top: it loads torch

    return compare(settings, task, directory, comm, signals)
