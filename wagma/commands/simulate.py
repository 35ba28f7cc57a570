"""``wagma simulate``: run the methods in simulated time."""

from __future__ import annotations

import argparse
from pathlib import Path

from wagma import job, logs
from wagma.arguments import Once, assignment, not_negative, separated, whole
from wagma.commands.compare import EVALUATIONS, add_repetition_options
from wagma.commands.methods import add_shared_options, all_chosen, completer, listed, resolve
from wagma.commands.options import (
    add_delay_options,
    add_log_level,
    add_run_options,
    add_step_time_per_work,
    add_task_options,
)
from wagma.commands.preparation import ranks
from wagma.commands.training import (
    DEFAULT_STEPS as DEFAULT_TRAINING_STEPS,
)
from wagma.commands.training import (
    add_evaluation_options,
    add_learning_options,
    add_length_options,
    check_limits,
    resolve_evaluations,
    resolve_length,
)
from wagma.methods import METHODS
from wagma.parsing import EXIT_STATUSES
from wagma.tasks import kinds

# Allreduce first, and eager-SGD with both of its triggers.
NAMES = sorted(METHODS, key=lambda name: name != "allreduce")
SIMULATED = ",".join([*NAMES, "eager-sgd:trigger=majority"])
SERVER = "parameter-server"
PARAMETERS, ITEMSIZE = 25_559_081, 4  # those of ResNet-50 in single precision
DEFAULT_STEPS = 100
RANKS, TRAINED_RANKS = [4, 16, 64, 256, 1024], [8]
# The names in `wagma.simulation`, which --help does not load.
MACHINES = ("10gbe", "aries", "hdr")
MACHINE_VALUES = (
    "latency",
    "overhead",
    "gap",
    "byte_gap",
    "injection",
    "memory",
    "staging",
    "response",
    "ranks_per_node",
    "local_latency",
    "local_byte_gap",
)
SIMULATE_EXAMPLES = """\
examples:
  wagma simulate --ranks 4,16,64,256 --imbalance cloud
  wagma simulate --ranks 16,1024 --step-times long-tailed --sync-period 8
  wagma simulate --ranks 64 --trace runs/mine --machine 10gbe --set ranks_per_node=4
  wagma simulate --train --ranks 8,64 --algorithms allreduce,wagma --imbalance cloud \\
      --seeds 5 --target 0.9
  wagma simulate --train --script my_task.py --ranks 16 --seconds 60 --slow-rank 3:4
  wagma simulate --train --task translation --step-times constant --step-time 5 \\
      --step-time-per-work 0.024
"""


def add(commands) -> None:
    """Add the command ``simulate``."""
    parser = commands.add_parser(
        "simulate",
        help="predict throughput and waiting at other numbers of ranks",
        description="Run the methods' protocols in simulated time, on a machine described by "
        "LogGP's parameters, and compare throughput, idle time and staleness; with --train also "
        "train a model on the simulated ranks, and compare its accuracy over simulated time. It "
        "runs in one process, without MPI.",
        epilog=f"algorithms:\n{listed(METHODS, simulated=True)}\n{SIMULATE_EXAMPLES}\n"
        f"{EXIT_STATUSES}",
    )
    parser.set_defaults(parser=parser, command=run, check=check, run=job.run_alone)
    add_simulation_options(parser.add_argument_group("simulation"))
    group = parser.add_argument_group("averaging, for algorithms that take these")
    add_shared_options(group, simulated=True)
    group = parser.add_argument_group("steps")
    add_step_time_options(group)
    add_delay_options(group)
    add_trained_options(parser)
    add_run_options(parser.add_argument_group("output"))
    add_log_level(parser)


def add_simulation_options(group) -> None:
    """Add the options of the methods, the machine and the length."""
    add = group.add_argument
    add(
        "--algorithms",
        type=all_chosen(METHODS),
        default=SIMULATED,
        metavar="NAME,…",
        help="algorithms listed below, each with its own options, such as wagma:wait=group; "
        "ratios are relative to the first (default: all)",
    ).completer = completer(METHODS, several=True)
    add(
        "--ranks",
        type=separated(whole(1)),
        metavar="N,…",
        help="numbers of ranks (default: 4,16,64,256,1024; with --train 8)",
    )
    add_length_options(group, DEFAULT_STEPS)
    add(
        "--parameters",
        type=whole(1),
        metavar="N",
        help=f"number of the model's parameters (default: ResNet-50's, {PARAMETERS}; with --train "
        "those of the model that is trained)",
    )
    add(
        "--itemsize",
        type=whole(1),
        metavar="BYTES",
        help="bytes per parameter (default: 4)",
    )
    add(
        "--machine",
        choices=MACHINES,
        default="aries",
        help="the network between the ranks (default: %(default)s)",
    )
    add(
        "--set",
        type=assignment(MACHINE_VALUES),
        action=Once,
        default={},
        metavar="NAME=VALUE",
        help=f"change a value of the machine, in seconds or bytes per second; may be given several "
        f"times, for {', '.join(MACHINE_VALUES)}",
    )
    add(
        "--dedicated-server",
        action="store_true",
        help="run parameter-server's server alone on a further node, instead of on rank 0, which "
        "trains as well",
    )
    add(
        "--seed",
        type=whole(0),
        default=0,
        metavar="N",
        help="seed of the step times and of the imbalance (default: %(default)s)",
    )


def add_step_time_options(group) -> None:
    """Add the options of the step times."""
    add = group.add_argument
    times = group.add_mutually_exclusive_group()
    times.add_argument(
        "--step-times",
        choices=("constant", "log-normal", "long-tailed"),
        default="log-normal",
        help="distribution of step times; long-tailed: from 1.7 s to 43.5 s, as in reinforcement "
        "learning (default: %(default)s)",
    )
    times.add_argument(
        "--trace",
        type=Path,
        metavar="PATH",
        help="use recorded step times: a directory of `wagma train`, or a text file of seconds "
        "with one line per step and one column per rank",
    )
    add(
        "--step-time",
        dest="step_time_ms",
        type=not_negative,
        metavar="MS",
        help="median of constant or log-normal step times (default: 500)",
    )
    add(
        "--sigma",
        type=not_negative,
        metavar="S",
        help="standard deviation of the logarithm of log-normal step times (default: 0.05)",
    )


def add_trained_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of trainings, of which the first one turns them on."""
    training = parser.add_argument_group("training")
    training.add_argument(
        "--train",
        action="store_true",
        help="train a model on the simulated ranks, with the options below; each step takes the "
        "time that the simulation gives it",
    )
    add_step_time_per_work(
        training, "time that a step takes longer for each unit of its batches' work"
    )
    add_learning_options(training)
    add_repetition_options(training)
    add_evaluation_options(training, "twenty times")
    training.add_argument(
        "--one-by-one",
        action="store_true",
        help="compute the ranks' gradients one by one, as `wagma train` does: where runs of that "
        "repeat bit for bit, the simulated one has the same bits (default: at once if possible, "
        "which is faster and differs by rounding)",
    )
    groups = [training, *add_task_options(parser, "task of the training")]
    parser.set_defaults(
        trained_options=[
            action for group in groups for action in group._group_actions if action.dest != "train"
        ]
    )


def check_trained(settings: argparse.Namespace) -> list[str]:
    """Set the defaults of trainings, refuse what conflicts, return the modules that are needed."""
    parser, actions = settings.parser, settings.trained_options
    del settings.trained_options
    if not settings.train:
        limited = any(each.options.get("compute_limit") for each in settings.algorithms)
        for action in actions:
            if limited and action.dest == "accumulate":
                continue
            if getattr(settings, action.dest) != action.default:
                parser.error(f"argument {action.option_strings[0]}: not allowed without --train")
            delattr(settings, action.dest)
        del settings.train
        settings.parameters = settings.parameters or PARAMETERS
        settings.itemsize = settings.itemsize or ITEMSIZE
        return []
    if settings.dedicated_server:
        parser.error("argument --dedicated-server: not allowed with argument --train")
    if settings.itemsize and not settings.parameters:
        parser.error("argument --itemsize: with --train not allowed without argument --parameters")
    if settings.environment_time_ms:
        parser.error(
            "argument --environment-time: not allowed in simulated time, in which steps take "
            "--step-time and --step-time-per-work: playing takes none"
        )
    resolve_evaluations(settings, EVALUATIONS)
    return kinds.resolve(settings)


def refuse_unsimulated(settings: argparse.Namespace) -> None:
    """Refuse an algorithm's own options that have no effect on its simulated times."""
    for each in settings.algorithms:
        for name in each.options.keys() - set(each.method.simulated_options):
            settings.parser.error(
                f"argument --algorithms: {each.label}: {name} is not simulated without --train"
            )


def check(settings: argparse.Namespace) -> list[str]:
    """Refuse options that conflict, or that are invalid for all of the numbers of ranks."""
    parser = settings.parser
    settings.ranks = settings.ranks or (TRAINED_RANKS if settings.train else RANKS)
    if not settings.train:
        refuse_unsimulated(settings)
    choices = resolve(settings, settings.algorithms, "none of the algorithms takes it")
    settings.algorithms = choices
    check_limits(settings, choices)
    if settings.dedicated_server and not any(each.method.name == SERVER for each in choices):
        parser.error(f"argument --dedicated-server: {SERVER} is not among the algorithms")
    resolve_length(settings, DEFAULT_TRAINING_STEPS if settings.train else DEFAULT_STEPS)
    drawn = "--trace" if settings.trace else f"--step-times {settings.step_times}"
    if settings.step_time_ms is not None and drawn in ("--trace", "--step-times long-tailed"):
        parser.error(f"argument --step-time: not allowed with argument {drawn}")
    if settings.sigma is not None and drawn != "--step-times log-normal":
        parser.error(f"argument --sigma: not allowed with argument {drawn}")
    for rank in settings.slow_rank:
        if rank >= min(settings.ranks):
            least = ranks(min(settings.ranks))
            parser.error(f"argument --slow-rank: no rank {rank} in a job of {least}")
    return check_trained(settings)


def run(settings: argparse.Namespace, signals: job.Signals) -> int:
    """Simulate, in one process."""
    from wagma import simulate  # not at the top: --help needs no numpy

    logs.start(settings.log_level, 0)
    if "train" not in settings:
        return simulate.run(settings, signals)
    from wagma import simulated_training

    return simulated_training.run(settings, signals)
