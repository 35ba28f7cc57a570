"""The command ``wagma``: what it is asked to do, and where the mistakes in that are caught.

Whatever can be found wrong before MPI is up is found here, by each rank alone; rank 0 says it.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import itertools
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import wagma
from wagma import algorithms, job, logs, progress
from wagma.arguments import (
    Once,
    assignment,
    compared,
    not_negative,
    number,
    one_of,
    run_name,
    separated,
    slow_rank,
    whole,
)

DESCRIPTION = "Train on all ranks of an MPI job, without waiting for those that are late."
DEFAULT_SHARDS = "iid"
DEFAULT_ALPHA = 0.1
EVALUATIONS = 20  # of a run of `wagma compare`; said in --help, too
# What `wagma.simulation` can simulate: --help loads neither it nor numpy.
ALGORITHMS = (
    "allreduce",
    "local-sgd",
    "wagma",
    "eager-sgd-solo",
    "eager-sgd-majority",
    "d-psgd",
    "sgp",
    "ad-psgd",
    "parameter-server",
)
# Of the options that only some algorithms have use for, those that a simulation takes.
SIMULATED_OPTIONS = ("sync_period", "groups", "wait", "clock", "neighbors", "mode", "backups")
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
)
DEFAULT_IMAGE_SIZE = 32

EXIT_STATUSES = "exit status:\n" + "".join(
    f"  {status:<3}  {meaning}\n" for status, meaning in job.EXIT_STATUSES.items()
)

EXAMPLES = """\
examples:
  mpiexec -n 4 wagma train
  mpiexec -n 4 wagma train --script my_task.py
  mpiexec -n 4 wagma compare --algorithms allreduce,wagma --imbalance cloud
  mpiexec -n 4 wagma info
  wagma simulate --ranks 64,1024 --imbalance cloud
  wagma train --help
"""


def listed(kinds: Mapping[str, algorithms.Algorithm]) -> str:
    """Return lines that say what each algorithm does, and which options it takes."""
    lines = []
    for name, algorithm in kinds.items():
        options = ", ".join("--" + option.replace("_", "-") for option in algorithm.options)
        texts = [algorithm.help, *([f"takes {options}"] if options else [])]
        wrapped = [
            line for text in texts for line in textwrap.wrap(text, 59, break_on_hyphens=False)
        ]
        lines += [
            f"  {start:<18}{line}\n"
            for start, line in zip(itertools.chain([name], itertools.repeat("")), wrapped)
        ]
    return "".join(lines)


TRAIN_ALGORITHMS = f"algorithms, by what they average:\n{listed(algorithms.ALGORITHMS)}"

REFERENCES = f"outside references, for comparisons:\n{listed(algorithms.REFERENCES)}"

TRAIN_EXAMPLES = """\
examples:
  mpiexec -n 4 wagma train
  mpiexec -n 8 wagma train --group-size 2 --sync-period 20 --name small-groups
  mpiexec -n 4 wagma train --algorithm local-sgd --sync-period 20
  mpiexec -n 4 wagma train --step-time 50 --imbalance cloud --imbalance-scale 0.5
  srun --mpi=pmi2 -n 4 wagma train --step-time 20 --slow-rank 3:5 --shards label-sorted
  mpiexec -n 4 wagma train --images flowers --image-size 64 --steps 2000
  mpiexec -n 4 wagma train --script my_task.py --batch-size 64 --log-level info
"""

COMPARE_EXAMPLES = """\
examples:
  mpiexec -n 4 wagma compare --step-time 20 --imbalance cloud --imbalance-scale 0.0625
  mpiexec -n 4 wagma compare --algorithms allreduce,ddp,wagma --seeds 5 --target 0.95
  mpiexec -n 8 wagma compare --algorithms local-sgd,wagma,wagma:group_size=8 \\
      --shards dirichlet --slow-rank 3:4 --step-time 20
"""

CONTRACT = """\
a script defines:
  model()             returns the torch.nn.Module to train
  data(rank, size, batch_size, seed)
                      returns two iterables of batches: this rank's to train on,
                      started again when exhausted, and those to test with
  loss(model, batch)  returns the mean loss, a scalar tensor
and may define:
  metrics(model, batch)
                      returns what to report of a test batch, numbers by name;
                      without it that is the loss
"""

INFO_EXAMPLES = """\
examples:
  wagma info
  mpiexec -n 4 wagma info
  srun --mpi=pmi2 -N 2 -n 8 wagma info
"""


SIMULATE_EXAMPLES = """\
examples:
  wagma simulate --ranks 4,16,64,256 --imbalance cloud
  wagma simulate --ranks 16,1024 --step-times long-tailed --sync-period 8
  wagma simulate --ranks 64 --trace runs/mine --machine 10gbe --set ranks_per_node=4
"""


def help_formatter() -> type[argparse.HelpFormatter]:
    """Return what lays help out: in color on a terminal, where rich-argparse is installed."""
    output = progress.terminal()
    if output is None or importlib.util.find_spec("rich_argparse") is None:
        return argparse.RawDescriptionHelpFormatter
    from rich.console import Console
    from rich_argparse import RawDescriptionRichHelpFormatter

    class Colored(RawDescriptionRichHelpFormatter):
        group_name_formatter = str
        help_markup = text_markup = False
        highlights = [
            *RawDescriptionRichHelpFormatter.highlights,
            r"(?m)^(?P<groups>[a-z ]+:)$",
            r"(?m)^  (?P<syntax>(mpiexec|srun|wagma) .*)$",
        ]

        def __init__(self, *arguments, **options) -> None:
            super().__init__(*arguments, console=Console(file=output), **options)

    return Colored


class Parser(argparse.ArgumentParser):
    """A parser of which only the job's rank 0 prints, and errors take one line."""

    def __init__(self, description: str, **options) -> None:
        super().__init__(
            allow_abbrev=False,
            description=textwrap.fill(description, 79),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **options,
        )

    def format_help(self) -> str:
        self.formatter_class = help_formatter()  # not sooner: it may load rich
        return super().format_help()

    def parse_args(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        settings, unknown = self.parse_known_args(arguments)
        if unknown:
            settings.parser.refuse(unknown)
        return settings

    def refuse(self, unknown: list[str]) -> NoReturn:
        """Say which arguments are none of this parser's, and which option is nearest to them."""
        known = {
            option.lstrip("-"): option for each in self._actions for option in each.option_strings
        }
        words = [word.partition("=")[0].lstrip("-") for word in unknown if word.startswith("-")]
        nearest = [match for word in words for match in difflib.get_close_matches(word, known, n=1)]
        meant = "".join(f", did you mean {known[match]}?" for match in nearest[:1])
        self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")

    def error(self, message: str) -> NoReturn:
        job.let_rank_0_speak()
        self.exit(job.USAGE, f"wagma: error: {message} (see {self.prog} --help)\n")

    def _print_message(self, message, file=None) -> None:
        if job.launcher_rank() == 0:
            super()._print_message(message, file)


def make_parser() -> Parser:
    """Return the parser of the whole command line."""
    parser = Parser(prog="wagma", description=DESCRIPTION, epilog=f"{EXAMPLES}\n{EXIT_STATUSES}")
    parser.add_argument("--version", action="version", version=f"wagma {wagma.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_train(commands)
    add_compare(commands)
    add_info(commands)
    add_simulate(commands)
    return parser


def add_train(commands) -> None:
    """Add the command ``train``."""
    parser = commands.add_parser(
        "train",
        help="train a model: on digits, on folders of images, or your own",
        description="Train a model, each rank on its own part of the data, and test the average "
        "of all ranks' models. Without --images or --script, that is a small convolutional "
        "network on scikit-learn's digits.",
        epilog=f"{TRAIN_ALGORITHMS}\n{CONTRACT}\n{TRAIN_EXAMPLES}\n{EXIT_STATUSES}",
    )
    parser.set_defaults(parser=parser, command=run_train, check=check_train, run=job.run)
    add_task_options(parser.add_argument_group("what is trained"))
    group = parser.add_argument_group("training")
    add_training_options(group)
    add_evaluation_option(group, "only after the last step")
    group = parser.add_argument_group("averaging")
    add_algorithm_option(group)
    add_averaging_options(group)
    add_imbalance_options(parser.add_argument_group("injected imbalance"))
    add_run_options(parser.add_argument_group("the run's files"))
    add_log_level(parser)


def add_compare(commands) -> None:
    """Add the command ``compare``."""
    parser = commands.add_parser(
        "compare",
        help="train by several algorithms one after another, and compare them",
        description="Train by several algorithms one after another, on the same data, seeds and "
        "delays: a table and a plot of throughput, waiting and the averaged model's accuracy over "
        "time. What is trained, and how, is said as for `wagma train`.",
        epilog=f"{TRAIN_ALGORITHMS}\n{REFERENCES}\n{COMPARE_EXAMPLES}\n{EXIT_STATUSES}",
    )
    parser.set_defaults(parser=parser, command=run_compare, check=check_compare, run=job.run)
    add_comparison_options(parser.add_argument_group("what is compared"))
    add_task_options(parser.add_argument_group("what is trained"))
    group = parser.add_argument_group("training, by each algorithm")
    add_training_options(group)
    add_evaluation_option(group, "twenty times")
    add_averaging_options(parser.add_argument_group("averaging, by those that have use for it"))
    add_imbalance_options(parser.add_argument_group("injected imbalance"))
    add_run_options(parser.add_argument_group("the comparison's files"))
    add_log_level(parser)


def add_comparison_options(group) -> None:
    """Add what says which algorithms are compared, and how."""
    add = group.add_argument
    names = [*algorithms.ALGORITHMS, *algorithms.REFERENCES]
    add(
        "--algorithms",
        type=compared(names),
        default=",".join(sorted(algorithms.ALGORITHMS, key=lambda name: name != "allreduce")),
        metavar="NAME,…",
        help="of those below, each with options of its own, such as wagma:group_size=2 or "
        "wagma:late=paper:overlap; ratios are to the first (default: all but the outside "
        "references, allreduce first)",
    )
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


def add_info(commands) -> None:
    """Add the command ``info``."""
    parser = commands.add_parser(
        "info",
        help="show the MPI, nodes, engine and versions that a job runs with",
        description="Show what a job that is started like this one runs with: the MPI library, "
        "its thread level, the ranks on each node, the engine's mode, whether MPI takes GPU "
        "memory, and versions.",
        epilog=f"{INFO_EXAMPLES}\n{EXIT_STATUSES}",
    )
    parser.set_defaults(parser=parser, command=run_info, check=lambda settings: [], run=job.run)
    add_log_level(parser)


def add_simulate(commands) -> None:
    """Add the command ``simulate``."""
    parser = commands.add_parser(
        "simulate",
        help="predict throughput and waiting at other numbers of ranks",
        description="Run the methods' protocols in simulated time, on a machine described by "
        "LogGP's parameters, and compare throughput, idle time and staleness. One process; "
        "no MPI job.",
        epilog=f"{SIMULATE_EXAMPLES}\n{EXIT_STATUSES}",
    )
    parser.set_defaults(
        parser=parser, command=run_simulate, check=check_simulate, run=job.run_alone
    )
    add_simulation_options(parser.add_argument_group("what is simulated"))
    add_grouping_options(parser.add_argument_group("averaging"))
    add_peer_options(parser.add_argument_group("who sends to whom"))
    parser.set_defaults(**{name: algorithms.DEFAULTS[name] for name in SIMULATED_OPTIONS})
    group = parser.add_argument_group("steps")
    add_step_time_options(group)
    add_delay_options(group)
    add_run_options(parser.add_argument_group("the results' files"))
    add_log_level(parser)


def add_simulation_options(group) -> None:
    """Add what says which methods run where, and for how long."""
    add = group.add_argument
    add(
        "--algorithms",
        type=separated(one_of(ALGORITHMS)),
        default=list(ALGORITHMS),
        metavar="NAME,…",
        help=f"of {', '.join(ALGORITHMS)}; ratios are to the first (default: all)",
    )
    add(
        "--ranks",
        type=separated(whole(1)),
        default=[4, 16, 64, 256, 1024],
        metavar="N,…",
        help="numbers of ranks (default: 4,16,64,256,1024)",
    )
    add(
        "--steps",
        type=whole(1),
        default=100,
        metavar="N",
        help="steps that every rank makes (default: %(default)s)",
    )
    add(
        "--parameters",
        type=whole(1),
        default=25_559_081,
        metavar="N",
        help="the model's parameters (default: ResNet-50's, %(default)s)",
    )
    add(
        "--itemsize",
        type=whole(1),
        default=4,
        metavar="BYTES",
        help="bytes of a parameter (default: %(default)s)",
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
        help=f"another value of the machine, in seconds or bytes per second; may be given "
        f"several times, for {', '.join(MACHINE_VALUES)}",
    )
    add(
        "--seed",
        type=whole(0),
        default=0,
        metavar="N",
        help="seed of the steps' lengths and of the imbalance (default: %(default)s)",
    )


def add_log_level(parser: Parser) -> None:
    """Add what is common to all commands."""
    parser.add_argument(
        "--log-level",
        choices=logs.LEVELS,
        help=f"which of rank 0's messages appear on standard error; a run's log files have those "
        f"of all ranks, from info on (default: {logs.VARIABLE}, else {logs.DEFAULT_LEVEL})",
    )


def add_task_options(group) -> None:
    """Add what says which model learns from which data."""
    task = group.add_mutually_exclusive_group()
    task.add_argument(
        "--script",
        type=Path,
        metavar="FILE",
        help="a Python file that defines the model, the data and the loss: see below",
    )
    task.add_argument(
        "--images",
        type=Path,
        metavar="DIR",
        help="folders of images, DIR/train/CLASS and DIR/test/CLASS (or DIR/val/CLASS); without "
        "a folder to test with, a fifth of each class is held out",
    )
    group.add_argument(
        "--image-size",
        type=whole(8),
        metavar="PIXELS",
        help="side of the squares that the images of --images are cropped and resized to "
        f"(default: {DEFAULT_IMAGE_SIZE})",
    )
    group.add_argument(
        "--shards",
        choices=("iid", "label-sorted", "dirichlet"),
        help="which part of the digits or images a rank has: a random one, few of the classes, or "
        f"of each class what a Dirichlet draw gives it (default: {DEFAULT_SHARDS})",
    )
    group.add_argument(
        "--dirichlet-alpha",
        type=number("from 0.001 to 1000", lambda value: 0.001 <= value <= 1000),
        metavar="ALPHA",
        help="the smaller, the less alike the shards of --shards dirichlet "
        f"(default: {DEFAULT_ALPHA})",
    )


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
        "--lr",
        type=number("above 0", lambda value: value > 0),
        default=0.05,
        metavar="RATE",
        help="learning rate of SGD (default: %(default)s)",
    )
    add(
        "--momentum",
        type=number("from 0 to below 1", lambda value: 0 <= value < 1),
        default=0.9,
        metavar="M",
        help="momentum of SGD, which stays on its rank (default: %(default)s)",
    )
    add(
        "--seed",
        type=whole(0),
        default=0,
        metavar="N",
        help="seed of the initial model, the shards, the batches and the imbalance; with --wait "
        "group the same seed gives the same model, bit for bit (default: %(default)s)",
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


def add_grouping_options(group) -> None:
    """Add what says who averages with whom, and when."""
    add = group.add_argument
    add(
        "--group-size",
        type=whole(1),
        metavar="S",
        help="ranks that average with each other at a step (default: the square root of the "
        "number of ranks, rounded up to a power of two)",
    )
    add(
        "--sync-period",
        type=whole(1),
        metavar="STEPS",
        help="steps from one average over all ranks to the next (default: "
        f"{algorithms.DEFAULTS['sync_period']})",
    )
    add(
        "--groups",
        choices=("changing", "fixed"),
        help="new ones at every step, or always the same "
        f"(default: {algorithms.DEFAULTS['groups']})",
    )
    add(
        "--wait",
        choices=("nobody", "group"),
        help=f"whom a step waits for (default: {algorithms.DEFAULTS['wait']})",
    )


def add_algorithm_option(group) -> None:
    """Add which algorithm trains."""
    group.add_argument(
        "--algorithm",
        choices=algorithms.ALGORITHMS,
        default=algorithms.DEFAULT,
        metavar="NAME",
        help="one of those listed below (default: %(default)s)",
    )


def add_averaging_options(group) -> None:
    """Add how ranks average; `resolve_algorithm` says which of it an algorithm takes."""
    add = group.add_argument
    add_grouping_options(group)
    add(
        "--late",
        choices=("paper", "conserving"),
        help="how the model of a rank that came late is merged (default: conserving)",
    )
    add(
        "--wire-dtype",
        choices=("float16", "bfloat16"),
        help="send wider numbers as these (default: as they are)",
    )
    add(
        "--trigger",
        choices=("solo", "majority"),
        help="whom eager-sgd's averages wait for: the first rank, or one drawn for each (default: "
        f"{algorithms.DEFAULTS['trigger']})",
    )
    add(
        "--transport",
        choices=("shared", "messages"),
        help="how the ranks of a node exchange models: in memory that they share, or by messages "
        "(default: shared where it can be)",
    )
    add(
        "--overlap",
        action="store_true",
        default=None,
        help="compute the next gradient while the model is averaged: gradients are one step staler",
    )
    add_peer_options(group)


def add_peer_options(group) -> None:
    """Add how ranks send each other models."""
    add = group.add_argument
    add(
        "--clock",
        choices=("neighbors", "global"),
        help="whom a step waits for with neighbors in a ring: these, or all ranks "
        f"(default: {algorithms.DEFAULTS['clock']})",
    )
    add(
        "--neighbors",
        type=whole(1),
        metavar="N",
        help="ranks that each rank pushes to in a step, at distances that are powers of two "
        f"(default: {algorithms.DEFAULTS['neighbors']})",
    )
    add(
        "--mode",
        choices=("bsp", "backup", "asp", "hete"),
        help="whom a parameter server waits for: all ranks; all but --backups; nobody; nobody, and "
        f"updates to old models count less (default: {algorithms.DEFAULTS['mode']})",
    )
    add(
        "--backups",
        type=whole(0),
        metavar="B",
        help="ranks that a round of --mode backup does not wait for "
        f"(default: {algorithms.DEFAULTS['backups']})",
    )


def add_imbalance_options(group) -> None:
    """Add what makes steps longer than they are."""
    group.add_argument(
        "--step-time",
        dest="step_time_ms",
        type=not_negative,
        default=0.0,
        metavar="MS",
        help="sleep in every step that stands for an accelerator's work (default: %(default)s)",
    )
    add_delay_options(group)


def add_step_time_options(group) -> None:
    """Add how long a simulated step takes."""
    add = group.add_argument
    times = group.add_mutually_exclusive_group()
    times.add_argument(
        "--step-times",
        choices=("constant", "log-normal", "long-tailed"),
        default="log-normal",
        help="all alike; log-normal; or like reinforcement learning's, from 1.7 s to 43.5 s "
        "(default: %(default)s)",
    )
    times.add_argument(
        "--trace",
        type=Path,
        metavar="PATH",
        help="as they were recorded: a directory of `wagma train`, or a text file of seconds with "
        "one step a line and one column a rank",
    )
    add(
        "--step-time",
        dest="step_time_ms",
        type=not_negative,
        metavar="MS",
        help="the median of constant or log-normal steps (default: 500)",
    )
    add(
        "--sigma",
        type=not_negative,
        metavar="S",
        help="standard deviation of log-normal steps' logarithm (default: 0.05)",
    )


def add_delay_options(group) -> None:
    """Add the papers' injected delays."""
    add = group.add_argument
    add(
        "--imbalance",
        choices=("none", "cloud", "random"),
        default="none",
        help="cloud: two ranks, drawn anew at every step, take 320 ms longer; random: each rank "
        "takes six times as long with probability 1/ranks (default: %(default)s)",
    )
    add(
        "--imbalance-scale",
        type=not_negative,
        default=1.0,
        metavar="FACTOR",
        help="makes that delay shorter or longer (default: %(default)s)",
    )
    add(
        "--slow-rank",
        type=slow_rank,
        action=Once,
        default={},
        metavar="R:FACTOR",
        help="rank R takes FACTOR times as long for its steps; may be given for several ranks",
    )


def add_run_options(group) -> None:
    """Add where the results go."""
    add = group.add_argument
    add(
        "--name",
        type=run_name,
        help="name of the run (default: the date and time, and the numbers of Slurm's job)",
    )
    add(
        "--runs-dir",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="the run's files are in DIR/NAME, which must be new (default: %(default)s)",
    )


def check_train(settings: argparse.Namespace) -> list[str]:
    """Refuse options that do not go together, and return the modules that training needs."""
    resolve_algorithm(settings)
    return check_task(settings)


def check_task(settings: argparse.Namespace) -> list[str]:
    """Refuse options that do not go together, and return the modules that the task needs."""
    parser = settings.parser
    if settings.script and settings.shards:
        parser.error("argument --shards: not allowed with argument --script: data() shares out")
    if settings.dirichlet_alpha and settings.shards != "dirichlet":
        parser.error("argument --dirichlet-alpha: not allowed without argument --shards dirichlet")
    if settings.image_size and not settings.images:
        parser.error("argument --image-size: not allowed without argument --images")
    if settings.images:
        settings.image_size = settings.image_size or DEFAULT_IMAGE_SIZE
    if settings.script:
        return ["rich", "torch"]
    settings.shards = settings.shards or DEFAULT_SHARDS
    if settings.shards == "dirichlet":
        settings.dirichlet_alpha = settings.dirichlet_alpha or DEFAULT_ALPHA
    return ["PIL", "rich", "torch"] if settings.images else ["rich", "sklearn", "torch"]


def resolve_algorithm(settings: argparse.Namespace) -> None:
    """Refuse options that the algorithm has no use for, and give the others their defaults."""
    takes = algorithms.ALGORITHMS[settings.algorithm].options
    for name, default in algorithms.DEFAULTS.items():
        given = getattr(settings, name) is not None
        if given and name not in takes:
            option = f"--{name.replace('_', '-')}"
            settings.parser.error(
                f"argument {option}: not allowed with argument --algorithm {settings.algorithm}"
            )
        if name in takes and not given:
            setattr(settings, name, default)


class SpecificParser(argparse.ArgumentParser):
    """A parser of one algorithm's own options."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def check_compare(settings: argparse.Namespace) -> list[str]:
    """Refuse options that no algorithm has use for, and return the modules that are needed.

    It gives the settings `compared`: each algorithm's options, defaults resolved, by its label.
    """
    given = {n: v for n in algorithms.DEFAULTS if (v := getattr(settings, n)) is not None}
    settings.compared = {}
    for label, (name, words) in settings.algorithms.items():
        try:
            settings.compared[label] = specific_options(name, words, given)
        except ValueError as error:
            settings.parser.error(f"argument --algorithms: {label}: {error}")
    takers = [algorithms.named(name).options for name, _ in settings.algorithms.values()]
    for name in given:
        if not any(name in takes for takes in takers):
            option = f"--{name.replace('_', '-')}"
            settings.parser.error(f"argument {option}: none of the algorithms has use for it")
    if settings.evaluate_every is None:
        settings.evaluate_every = max(1, settings.steps // EVALUATIONS)
    return check_task(settings)


def specific_options(name: str, words: list[str], given: dict) -> dict:
    """Return an algorithm's options, defaults resolved, and None for what it has no use for.

    Args:
        name: The algorithm's.
        words: Its own options, as a command line has them.
        given: Options that are common to all algorithms that take them.

    Raises:
        ValueError: It has no such option, or not with this value.
    """
    takes = algorithms.named(name).options
    parser = SpecificParser(prog=name, allow_abbrev=False, add_help=False)
    add_averaging_options(parser)
    own, unknown = parser.parse_known_args(words)
    refused = unknown + [
        f"--{option.replace('_', '-')}"
        for option, value in vars(own).items()
        if value is not None and option not in takes
    ]
    if refused:
        offered = ", ".join(takes) or "none"
        word = refused[0].removeprefix("--").partition("=")[0].replace("-", "_")
        raise ValueError(f"{name} has no option {word!r}: it has {offered}")
    own = {option: value for option, value in vars(own).items() if value is not None}
    options = {option: (algorithms.DEFAULTS | given | own)[option] for option in takes}
    return dict.fromkeys(algorithms.DEFAULTS) | {"algorithm": name} | options


def run_compare(settings: argparse.Namespace, comm, signals: job.Signals) -> int:
    """Check what only the running job knows, and compare."""
    task, directory = prepare(settings, comm)
    from wagma.compare import compare  # not at the top: it loads torch

    return compare(settings, task, directory, comm, signals)


def run_train(settings: argparse.Namespace, comm, signals: job.Signals) -> int:
    """Check what only the running job knows, and train."""
    task, run = prepare(settings, comm)
    from wagma.train import train  # not at the top: it loads torch

    return train(settings, task, run, comm, signals)


def prepare(settings: argparse.Namespace, comm):
    """Return the task and the directory, where every rank's log is then; collective.

    Raises:
        UsageError: The job cannot do what it was asked.
    """
    from wagma import runs  # not at the top: --help needs no numpy

    logs.start(settings.log_level, comm.rank)
    check_ranks(settings, comm.size)
    if comm.size == 1:
        print("one process trains alone: start more of them with mpiexec or srun", flush=True)
    found = find_data(settings, comm)
    run = runs.make_directory(settings.runs_dir, settings.name, comm)
    logs.to_file(run, comm.rank)
    return load_task(settings, found, comm), run


def check_ranks(settings: argparse.Namespace, size: int) -> None:
    """Raise UsageError for options that a job of so many ranks cannot have."""
    if settings.group_size is not None and settings.group_size > size:
        raise job.UsageError(
            f"argument --group-size: groups of {settings.group_size} in a job of {ranks(size)}"
        )
    hops = max(1, (size - 1).bit_length())
    if settings.neighbors is not None and settings.neighbors > hops:
        raise job.UsageError(
            f"argument --neighbors: {settings.neighbors} in a job of {ranks(size)}, which has "
            f"{hops} distances that are powers of two"
        )
    if settings.backups is not None and settings.backups >= size:
        raise job.UsageError(
            f"argument --backups: {settings.backups} in a job of {ranks(size)}: one must be left"
        )
    for rank in settings.slow_rank:
        if rank >= size:
            raise job.UsageError(f"argument --slow-rank: no rank {rank} in a job of {ranks(size)}")


def find_data(settings: argparse.Namespace, comm):
    """Return the `folders.Folders` of --images, None without; collective.

    Raises:
        UsageError: What is to be trained is not there, or is too little.
    """
    from wagma import data
    from wagma.tasks import folders

    if settings.script:
        job.together(lambda: check_file(settings.script), comm)
        return None
    found, images = None, data.TRAIN_IMAGES
    if settings.images:
        found = job.from_rank_0(lambda: folders.scan(settings.images), comm)
        images = len(found.train.paths)
    if comm.size > images:
        raise job.UsageError(f"{images} training images are too few for {ranks(comm.size)}")
    return found


def check_file(path: Path) -> None:
    """Raise UsageError where a script cannot be read."""
    try:
        path.open().close()
    except OSError as error:
        raise job.UsageError(f"argument --script: cannot read {path}: {error.strerror}") from error


def load_task(settings: argparse.Namespace, found, comm):
    """Return the task that the settings name; collective.

    Args:
        settings: The command line's.
        found: What `find_data` returned.
        comm: An mpi4py communicator.
    """
    from wagma.tasks import digits, images, script  # not at the top: they load torch

    if settings.script:
        return job.together(lambda: script.load(settings.script), comm)
    if settings.images:
        return images.task(found, settings.image_size, settings.shards, settings.dirichlet_alpha)
    return digits.task(settings.shards, comm, settings.dirichlet_alpha)


def run_info(settings: argparse.Namespace, comm, signals: job.Signals) -> int:
    """Print what the job runs with."""
    from wagma.info import info

    logs.start(settings.log_level, comm.rank)
    info(comm)
    return job.OK


def check_simulate(settings: argparse.Namespace) -> list[str]:
    """Refuse options that do not go together, or that no simulated number of ranks has use for."""
    parser = settings.parser
    drawn = "--trace" if settings.trace else f"--step-times {settings.step_times}"
    if settings.step_time_ms is not None and drawn in ("--trace", "--step-times long-tailed"):
        parser.error(f"argument --step-time: not allowed with argument {drawn}")
    if settings.sigma is not None and drawn != "--step-times log-normal":
        parser.error(f"argument --sigma: not allowed with argument {drawn}")
    for rank in settings.slow_rank:
        if rank >= max(settings.ranks):
            most = ranks(max(settings.ranks))
            parser.error(f"argument --slow-rank: no rank {rank} in a job of {most}")
    return []


def run_simulate(settings: argparse.Namespace, signals: job.Signals) -> int:
    """Simulate, in one process."""
    from wagma import simulate  # not at the top: --help needs no numpy

    logs.start(settings.log_level, 0)
    return simulate.run(settings, signals)


def ranks(size: int) -> str:
    """Return "1 rank" or "4 ranks"."""
    return f"{size} rank{'s' if size > 1 else ''}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on this rank and return the exit status, or raise SystemExit with it."""
    parser = make_parser()
    settings = parser.parse_args(arguments)
    settings.log_level = log_level(settings)
    missing = [
        module for module in settings.check(settings) if importlib.util.find_spec(module) is None
    ]
    if missing:
        text = f"{', '.join(missing)} not installed: pip install 'wagma[train]'"
        parser.exit(job.FAILED, f"wagma: error: {text}\n")
    command, run = settings.command, settings.run
    if command in (run_train, run_compare):
        job.announce(settings.parser.prog.removeprefix("wagma "))
    del settings.command, settings.check, settings.parser, settings.run
    return run(command, settings)


def log_level(settings: argparse.Namespace) -> str:
    """Return the level that the option, else the variable, else nobody asks for."""
    level = settings.log_level or os.environ.get(logs.VARIABLE, "").lower() or logs.DEFAULT_LEVEL
    if level not in logs.LEVELS:
        settings.parser.error(
            f"{logs.VARIABLE} must be one of {', '.join(logs.LEVELS)}, not {level!r}"
        )
    return level
