"""``wagma svm``: train a linear model by WP-SGD and the methods that it is compared with."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from wagma import job
from wagma.arguments import Once, not_negative, number, one_of, positive, separated, whole
from wagma.commands.options import add_log_level, add_run_options
from wagma.commands.simulate import MACHINES
from wagma.parsing import EXIT_STATUSES
from wagma.wpsgd.methods import (
    DEFAULT_PRESET,
    KDD_FEATURES,
    METHODS,
    PAPER_LINKS,
    PAPER_SPEEDS,
    PRESETS,
)

DEFAULT_MACHINE = "10gbe"
DEFAULT_WORKERS = 2
SAMPLE_TIME_US = 10.0  # per simulated sample
SVM_EXAMPLES = """\
examples:
  mpiexec -n 4 wagma svm --slow-rank 1:0.5
  mpiexec -n 4 wagma svm --data real-sim.svm --preset real-sim --method wp,simuparallel
  wagma svm --cluster paper --method delay-wp,wp,simuparallel,sequential,direct --seeds 20
  wagma svm --cluster 1,1,0.5,0.25 --method wp,direct --check paper
"""
share = number("from 0 to 1", lambda value: 0 <= value <= 1)
speed = number("above 0, up to 1", lambda value: 0 < value <= 1)


def add(commands) -> None:
    """Add the command ``svm``."""
    listed = "".join(f"  {name:<14}{method.help}\n" for name, method in METHODS.items())
    parser = commands.add_parser(
        "svm",
        help="train a linear SVM on ranks of different speeds (WP-SGD)",
        description="Train a linear classifier for two classes on sparse samples by WP-SGD's "
        "methods, either on MPI ranks, each at its own speed until the fastest has consumed its "
        "samples, or on simulated nodes. The objective on the test samples is plotted over time "
        "and over samples.",
        epilog=f"methods:\n{listed}\n{SVM_EXAMPLES}\n{EXIT_STATUSES}",
    )
    parser.set_defaults(parser=parser, command=run, check=check, run=job.run)
    add_data_options(parser.add_argument_group("task"))
    add_method_options(parser.add_argument_group("methods"))
    add_node_options(parser.add_argument_group("nodes"))
    add_run_options(parser.add_argument_group("output"))
    add_log_level(parser)


def preset_default(name: str) -> str:
    """Return "(default: the preset's: 0.1 for small, …)"."""
    values = ", ".join(f"{getattr(each, name):,.10g} for {of}" for of, each in PRESETS.items())
    return f"(default: the preset's: {values})"


def add_data_options(group) -> None:
    """Add the options of the model and the samples."""
    add = group.add_argument
    add(
        "--preset",
        choices=PRESETS,
        default=DEFAULT_PRESET,
        help="default settings, and the shape of the data generated without --data: real-sim's "
        "scaled down, or the paper's for real-sim or KDD Cup 2010 (default: %(default)s)",
    )
    add(
        "--data",
        type=Path,
        metavar="FILE",
        help="samples in libsvm's format, with labels 0 and 1, or -1 and 1; 1000 of them, or a "
        "fifth if that is less, are held out for testing",
    )
    add("--test", type=Path, metavar="FILE", help="file of test samples, instead of held-out ones")
    add(
        "--features",
        type=whole(1),
        metavar="N",
        help="number of the model's parameters (default: as many as the samples of --data have, "
        f"else {', '.join(f'{each.features:,} for {name}' for name, each in PRESETS.items())}; "
        f"KDD Cup 2010 has {KDD_FEATURES:,}, which take 0.16 GB per simulated node)",
    )
    add("--loss", choices=("hinge", "logistic"), default="hinge", help="(default: %(default)s)")
    add("--lr", type=positive, metavar="RATE", help=f"learning rate η {preset_default('lr')}")
    add(
        "--l2",
        type=not_negative,
        metavar="LAMBDA",
        help=f"λ of the regularizer λ/2·‖w‖² {preset_default('l2')}",
    )
    add(
        "--start",
        type=number("that is finite", lambda value: True),
        metavar="W",
        help=f"initial value of all parameters {preset_default('start')}",
    )
    add(
        "--samples",
        type=whole(1),
        metavar="N",
        help=f"samples that the fastest node consumes {preset_default('samples')}",
    )
    add(
        "--evaluate-every",
        dest="every",
        type=whole(1),
        metavar="N",
        help=f"samples of the fastest node between evaluations {preset_default('every')}",
    )
    add("--seed", type=whole(0), default=0, metavar="N", help="random seed (default: %(default)s)")
    add(
        "--seeds",
        type=whole(1),
        metavar="N",
        help="number of seeds for the order of the samples, counted from --seed; the means are "
        f"plotted {preset_default('seeds')}",
    )


def add_method_options(group) -> None:
    """Add the options of the methods."""
    add = group.add_argument
    add(
        "--method",
        dest="methods",
        type=separated(one_of(METHODS)),
        default=["wp"],
        metavar="NAME,…",
        help="one of those below, or several to compare them (default: wp)",
    )
    add(
        "--rate",
        type=share,
        metavar="R",
        help="contraction rate r of the weights r^T; the paper's bound is 1 - RATE·LAMBDA "
        "(default: fitted)",
    )
    add(
        "--fit-contraction",
        action=argparse.BooleanOptionalAction,
        help="without --rate: fit r, before the run, to how the objective decreases in a short "
        "training by one node; otherwise it is 1 - RATE·LAMBDA (default: --fit-contraction)",
    )
    add(
        "--count-delays",
        choices=("span", "run"),
        default="span",
        help="what T counts for delay-wp: updates by which a node is behind since the last "
        "average, or in the whole run; the paper's Algorithm 5 can be read either way "
        "(default: %(default)s)",
    )
    add(
        "--span",
        type=whole(1),
        metavar="N",
        help=f"samples of the fastest node between averages of delay-wp {preset_default('span')}",
    )
    add(
        "--workers",
        type=whole(1),
        default=DEFAULT_WORKERS,
        metavar="N",
        help="workers per node, for delay and delay-wp (default: %(default)s)",
    )
    add(
        "--check",
        dest="acceptance",
        choices=("none", "paper"),
        default="none",
        help="late updates of delay and delay-wp that are applied: all, or only those that the "
        "paper's Algorithm 4 accepts, which are few (default: %(default)s)",
    )


def add_node_options(group) -> None:
    """Add the options of the nodes' speeds."""
    add = group.add_argument
    add(
        "--slow-rank",
        type=slowed,
        action=Once,
        default={},
        metavar="R:FACTOR",
        help="FACTOR ≥ 1: rank R takes that many times as long per sample; below 1: it has that "
        "share of its speed; may be given for several ranks",
    )
    add(
        "--cluster",
        type=cluster,
        metavar="SPEEDS",
        help="simulate nodes of these speeds in one process, such as 1,1,0.5; or `paper`: the "
        "paper's 20 nodes, 7 of them at 0.5 to 0.7, and 5 others with 0.1 of the bandwidth",
    )
    add(
        "--links",
        type=speeds,
        metavar="SHARES",
        help="shares of the machine's bandwidth that the simulated nodes have, such as 1,0.1,1 "
        "(default: 1 for each; with --cluster paper the paper's)",
    )
    add(
        "--machine",
        choices=MACHINES,
        help=f"the network between simulated nodes (default: {DEFAULT_MACHINE})",
    )
    add(
        "--sample-time",
        dest="sample_time_us",
        type=positive,
        metavar="US",
        help="microseconds per sample of a simulated node of speed 1 (default: "
        f"{SAMPLE_TIME_US:g}); on MPI ranks, the minimum time per sample",
    )


def slowed(text: str) -> tuple[int, float]:
    """Convert "R:FACTOR" to the rank and the factor by which it takes longer."""
    rank, _, factor = text.partition(":")
    try:
        value = positive(factor)
        return whole(0)(rank), value if value >= 1 else 1 / value
    except argparse.ArgumentTypeError as error:
        message = f"must be R:FACTOR, a rank and a number above 0, not {text!r}"
        raise argparse.ArgumentTypeError(message) from error


def speeds(text: str) -> list[float]:
    """Convert "1,1,0.5" to numbers."""
    return [speed(part.strip()) for part in text.split(",")]


def cluster(text: str) -> list[float]:
    """Convert "1,1,0.5" or "paper" to the nodes' speeds."""
    return list(PAPER_SPEEDS) if text == "paper" else speeds(text)


def check(settings: argparse.Namespace) -> list[str]:
    """Refuse options that conflict, and return the modules that are needed.

    Set options that are not given to the preset's values.
    """
    parser, preset = settings.parser, PRESETS[settings.preset]
    if settings.test and not settings.data:
        parser.error("argument --test: not allowed without argument --data")
    if settings.cluster:
        if settings.slow_rank:
            parser.error("argument --slow-rank: not allowed with argument --cluster")
        settings.command, settings.run = run_simulated, job.run_alone
        settings.machine = settings.machine or DEFAULT_MACHINE
        settings.sample_time_us = settings.sample_time_us or SAMPLE_TIME_US
        nodes, paper = len(settings.cluster), settings.cluster == list(PAPER_SPEEDS)
        settings.links = settings.links or (list(PAPER_LINKS) if paper else [1.0] * nodes)
        if len(settings.links) != nodes:
            parser.error(f"argument --links: {len(settings.links)} shares for {nodes} nodes")
    for name in ("machine", "links"):
        if getattr(settings, name) and not settings.cluster:
            parser.error(f"argument --{name}: not allowed without argument --cluster")
    if settings.fit_contraction and settings.rate is not None:
        parser.error("argument --fit-contraction: not allowed with argument --rate")
    if settings.fit_contraction is None:
        settings.fit_contraction = settings.rate is None
    generates = {"features", "rows", "nonzeros"}
    for field in fields(preset):
        if field.name not in generates and getattr(settings, field.name) is None:
            setattr(settings, field.name, getattr(preset, field.name))
    if settings.lr * settings.l2 >= 1:
        parser.error("argument --l2: must be below 1 / RATE, or the model grows at every step")
    return ["rich", "scipy", *(["sklearn"] if settings.data else [])]


def run(settings: argparse.Namespace, comm, signals: job.Signals) -> int:
    """Train on the ranks of a job."""
    from wagma import svm  # not at the top: --help needs no numpy

    return svm.train_on_ranks(settings, comm, signals)


def run_simulated(settings: argparse.Namespace, signals: job.Signals) -> int:
    """Train in modelled time, in one process."""
    from wagma import svm

    return svm.train_simulated(settings, signals)
