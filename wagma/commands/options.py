"""Options that several commands have."""

from __future__ import annotations

import argparse
from pathlib import Path

from wagma import logs
from wagma.arguments import Once, not_negative, number, run_name, slow_rank, whole
from wagma.tasks import kinds


def add_log_level(parser: argparse.ArgumentParser) -> None:
    """Add the option that all commands have."""
    parser.add_argument(
        "--log-level",
        choices=logs.LEVELS,
        help="lowest level of rank 0's messages on standard error; a run's log files have those "
        f"of all ranks, from info up (default: {logs.VARIABLE}, else {logs.DEFAULT_LEVEL})",
    )


def add_straggler_warnings(group) -> None:
    """Add the option of warnings while a job runs."""
    group.add_argument(
        "--straggler-warnings",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="warn of a rank that is slow, once a minute at most, from what ranks tell each other "
        "where they average over all ranks, or else have written to the run's directory "
        "(default: on)",
    )


def add_task_options(parser: argparse.ArgumentParser, title: str = "task") -> list:
    """Add the options that select the model and the data, and return their groups.

    They have no defaults here: `kinds.resolve` knows which task they are of.
    """
    group = parser.add_argument_group(title)
    group.add_argument(
        "--task",
        choices=kinds.KINDS,
        help="digits: scikit-learn's, the default; images: of --images, else these digits; "
        "translation: a Transformer on parallel text; language: a small GPT on text; control: PPO "
        "on an environment of gymnasium",
    )
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
        help="folders of images, DIR/train/CLASS and DIR/test/CLASS (or DIR/val/CLASS); without a "
        "test folder, a fifth of each class is held out; or a folder with the files of MNIST or "
        "of CIFAR's binary version",
    )
    group.add_argument(
        "--batch-by",
        choices=[unit for units in kinds.BATCH_BY.values() for unit in units],
        help="what --batch-size counts: equally many sentences, which take unequal times, or as "
        "many tokens as these have in the mean (translation); rollouts of an episode of each "
        "environment, or of equally many steps (control; default: sentences, episodes)",
    )
    group.add_argument(
        "--traceback",
        action="store_true",
        help="if a script raises, show all frames of the traceback, not only the script's",
    )
    group.add_argument(
        "--shards",
        choices=("iid", "label-sorted", "dirichlet"),
        help="how the data are divided among the ranks: at random, by label, or with "
        "class shares drawn from a Dirichlet distribution; the label of text is the file that it "
        f"is of (default: {kinds.SHARDS['shards']})",
    )
    group.add_argument(
        "--dirichlet-alpha",
        type=number("from 0.001 to 1000", lambda value: 0.001 <= value <= 1000),
        metavar="ALPHA",
        help="the smaller, the more the shards of --shards dirichlet differ "
        f"(default: {kinds.ALPHA})",
    )
    return [
        group,
        add_image_options(parser),
        add_text_options(parser),
        add_control_options(parser),
    ]


def add_image_options(parser: argparse.ArgumentParser):
    """Add the options of images, and return their group."""
    group = parser.add_argument_group("task images")
    group.add_argument(
        "--image-size",
        type=whole(8),
        metavar="PIXELS",
        help="side of the squares to which images are cropped and resized (default: 32 for those "
        "in folders, others as they are)",
    )
    group.add_argument(
        "--model",
        choices=kinds.MODELS,
        help="cnn: three convolutions; resnet8, 14, 20: residual networks with so many layers; all "
        "with batch normalization (default: cnn)",
    )
    group.add_argument(
        "--augment",
        choices=("none", "crop", "crop-flip"),
        help="change training images at random: move them by up to an eighth of a side, and mirror "
        "half of them (default: none)",
    )
    group.add_argument(
        "--augment-with",
        choices=("own", "torchvision"),
        help="whose code does that: wagma's own, or torchvision's transforms, which draw other "
        "random numbers (default: own)",
    )
    return group


def add_text_options(parser: argparse.ArgumentParser):
    """Add the options of text, and return their group."""
    group = parser.add_argument_group("tasks translation and language")
    group.add_argument(
        "--text",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="text files in UTF-8 to learn from; for translation two, with a sentence in each line "
        "of the first and its translation in the same line of the second (default: generated "
        "sentences; for language the help topics that Python ships)",
    )
    group.add_argument(
        "--sequence-length",
        type=whole(2),
        metavar="BYTES",
        help="longest sequence of language "
        f"(default: {kinds.KINDS['language'].options['sequence_length']})",
    )
    group.add_argument(
        "--packing",
        action=argparse.BooleanOptionalAction,
        help="cut files of language into sequences of equal length; without it a sequence is a "
        "paragraph, and steps take unequal times (default: on)",
    )
    return group


def add_control_options(parser: argparse.ArgumentParser):
    """Add the options of reinforcement learning, and return their group."""
    group = parser.add_argument_group("task control")
    group.add_argument(
        "--environment",
        metavar="ID",
        help="environment of gymnasium, of which each rank has --batch-size side by side (default: "
        f"{kinds.KINDS['control'].options['environment']})",
    )
    group.add_argument(
        "--environment-time",
        dest="environment_time_ms",
        type=not_negative,
        metavar="MS",
        help="milliseconds to sleep for each step of a rank's environments, in place of their "
        "physics (default: 0)",
    )
    return group


def add_device(group) -> None:
    """Add the option that selects the device."""
    group.add_argument(
        "--device",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="where to train: cuda (assigns the GPUs of a node to its ranks in turn) or cpu; "
        "auto is cuda if torch finds a GPU, else cpu (default: %(default)s)",
    )


def add_imbalance_options(group) -> None:
    """Add the options that make steps longer."""
    group.add_argument(
        "--step-time",
        dest="step_time_ms",
        type=not_negative,
        default=0.0,
        metavar="MS",
        help="milliseconds to sleep in every step, in place of an accelerator's work "
        "(default: %(default)s)",
    )
    add_step_time_per_work(
        group,
        "a step takes at least --step-time, and MS for each unit of its batches' work; ranks sleep "
        "for what their own computation leaves of that",
    )
    add_delay_options(group)


def add_step_time_per_work(group, meaning: str) -> None:
    """Add the option by which steps take time by their batches' work; ``meaning`` says how."""
    group.add_argument(
        "--step-time-per-work",
        dest="step_time_per_work_ms",
        type=not_negative,
        default=0.0,
        metavar="MS",
        help=f"{meaning}; work is that of the task, such as tokens, or of the script's "
        "work(batch) (default: 0)",
    )


def add_delay_options(group) -> None:
    """Add the options of the papers' injected delays."""
    add = group.add_argument
    add(
        "--imbalance",
        choices=("none", "cloud", "random"),
        default="none",
        help="cloud: at every step two random ranks are delayed by 320 ms; random: each step of "
        "each rank takes six times as long with probability 1/ranks (default: %(default)s)",
    )
    add(
        "--imbalance-scale",
        type=not_negative,
        default=1.0,
        metavar="FACTOR",
        help="factor by which the delays of --imbalance are multiplied (default: %(default)s)",
    )
    add(
        "--slow-rank",
        type=slow_rank,
        action=Once,
        default={},
        metavar="R:FACTOR",
        help="steps of rank R take FACTOR times as long; may be given for several ranks",
    )


def add_run_options(group) -> None:
    """Add the options of the output directory."""
    add = group.add_argument
    add(
        "--name",
        type=run_name,
        help="name of the run (default: the date and time, and the IDs of Slurm's job)",
    )
    add(
        "--runs-dir",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="write the run's files to DIR/NAME, which must be new (default: %(default)s)",
    )


def add_timeline(group) -> None:
    """Add the option that records a timeline."""
    group.add_argument(
        "--timeline",
        action="store_true",
        help="record what every rank does when, for `wagma timeline RUN`",
    )
