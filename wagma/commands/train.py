"""``wagma train``: train a model with one algorithm."""

from __future__ import annotations

import argparse
import importlib.util

from wagma import job
from wagma.commands.checkpoints import (
    add_checkpoint_options,
    check_checkpoints,
    check_survive,
)
from wagma.commands.methods import add_shared_options, chosen, completer, listed, resolve
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
    add_survive,
    add_training_options,
    check_length,
    check_limits,
    check_samples,
    check_total,
)
from wagma.methods import DEFAULT, METHODS
from wagma.parsing import EXIT_STATUSES
from wagma.tasks import kinds

CONTRACT = """\
a script defines:
  model()             returns the torch.nn.Module to train
  data(rank, size, batch_size, seed)
                      returns two iterables of batches: this rank's training
                      data, restarted when exhausted, and the test data
  loss(model, batch)  returns the mean loss, a scalar tensor
and may define:
  metrics(model, batch)
                      returns a dictionary of numbers to report for a test batch;
                      without this function the loss is reported
  optimizer(parameters)
                      returns the torch.optim.Optimizer of a rank's own steps,
                      with one parameter group or several; replaces --optimizer
  scheduler(optimizer)
                      returns its learning-rate scheduler, stepped after every
                      training step
  work(batch)         returns how much work a training batch is, such as its
                      tokens, if batches differ: `wagma report` compares ranks
                      by it
  log(record)         is called after each step of a rank with its record, a
                      line of rank-*.jsonl and "rank", for other tools
"""
TRAIN_EXAMPLES = """\
examples:
  mpiexec -n 4 wagma train
  mpiexec -n 8 wagma train --group-size 2 --sync-period 20 --name small-groups
  mpiexec -n 4 wagma train --algorithm local-sgd --sync-period 20
  mpiexec -n 4 wagma train --step-time 50 --imbalance cloud --imbalance-scale 0.5
  srun --mpi=pmi2 -n 4 wagma train --step-time 20 --slow-rank 3:5 --shards label-sorted
  mpiexec -n 4 wagma train --images flowers --image-size 64 --steps 2000
  mpiexec -n 4 wagma train --task translation --evaluate-every 80
  mpiexec -n 4 wagma train --script my_task.py --batch-size 64 --log-level info
"""


def add(commands) -> None:
    """Add the command ``train``."""
    parser = commands.add_parser(
        "train",
        help="train a model: on digits, images, text or episodes, or by your own script",
        description="Train a model, each rank on its own part of the data, and test the average "
        "of all ranks' models. The default task is a small convolutional network on scikit-learn's "
        "digits.",
        epilog=f"algorithms, by what they average:\n{listed(METHODS)}\n{CONTRACT}\n"
        f"{TRAIN_EXAMPLES}\n{EXIT_STATUSES}",
    )
    parser.set_defaults(parser=parser, command=run, check=check, run=job.run)
    add_task_options(parser)
    group = parser.add_argument_group("training")
    add_training_options(group, totals=True)
    add_device(group)
    add_survive(group)
    add_evaluation_options(group, "only after the last step")
    group = parser.add_argument_group("averaging")
    group.add_argument(
        "--algorithm",
        type=chosen(METHODS),
        default=DEFAULT,
        metavar="NAME",
        help="an algorithm listed below, with its own options, such as wagma:late=paper:overlap "
        "(default: %(default)s)",
    ).completer = completer(METHODS, several=False)
    add_shared_options(group)
    add_imbalance_options(parser.add_argument_group("injected imbalance"))
    add_checkpoint_options(parser.add_argument_group("checkpoints and the job's end"))
    group = parser.add_argument_group("output")
    add_run_options(group)
    add_straggler_warnings(group)
    group.add_argument(
        "--tensorboard",
        action="store_true",
        help="also write DIR/NAME/tensorboard: step times of every rank, losses and rates of "
        "rank 0, and test results (needs tensorboard)",
    )
    add_timeline(group)
    add_log_level(parser)


def check(settings: argparse.Namespace) -> list[str]:
    """Refuse options that conflict, and return the modules that training needs."""
    choice = settings.algorithm
    refusal = f"not allowed with argument --algorithm {choice.label}"
    (settings.algorithm,) = resolve(settings, [choice], refusal)
    check_limits(settings, [settings.algorithm])
    check_total(settings)
    check_checkpoints(settings)
    check_survive(settings)
    if settings.tensorboard and importlib.util.find_spec("tensorboard") is None:
        settings.parser.error("argument --tensorboard: not installed: pip install tensorboard")
    if settings.total_steps is None:
        check_length(settings)
    modules = kinds.resolve(settings)
    check_samples(settings)
    return [*modules, *(["safetensors"] if settings.resumable else [])]


def run(settings: argparse.Namespace, comm, signals: job.Signals) -> int:
    """Check the settings against the running job, and train."""
    from collectives.survival import why_not  # not at the top: it loads numpy

    reason = settings.survive and why_not()
    if reason:
        raise job.UsageError(f"argument --survive: {reason}")
    task, directory = prepare(settings, comm)
    if settings.total_steps is not None:
        settings.steps = -(-settings.total_steps // comm.size)  # in the mean
    from wagma.train import train  # not at the top: it loads torch

    return train(settings, task, directory, comm, signals)
