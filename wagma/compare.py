"""``wagma compare``: algorithms side by side, on the same data, seeds and delays, in one job."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from mpi4py import MPI

from wagma import progress
from wagma.comparison import check_target, directory_name, most, report
from wagma.job import FAILED, OK, Signals, UsageError, from_rank_0
from wagma.methods import Choice
from wagma.report.text import headline
from wagma.runs import make_directory
from wagma.tasks import contract
from wagma.train import (
    fair_threads,
    make_run,
    outcome_in_words,
    print_report,
    timeline_recorded,
)
from wagma.trainer import Trainer

PER_RANK = (
    "timely_share_of_rank",
    "staleness_of_rank",
    "seconds_of_rank",
    "bytes_sent_of_rank",
    "steps_of_rank",
    "not_finite_of_rank",
    "without_loss",
)
WARM_UP = 2  # steps


def compare(
    settings: argparse.Namespace,
    task: contract.Task,
    directory: Path,
    comm: MPI.Comm,
    signals: Signals,
) -> int:
    """Train with all algorithms, print and plot the results, return the exit status; collective.

    All algorithms are trained with one seed before the next, so that changes of the machine's load
    affect all of them.

    Args:
        settings: The command line's; `algorithms` has the choices to compare.
        task: The task to train.
        directory: For the runs' directories, ``comparison.json`` and ``comparison.png``.
        comm: The ranks that train together.
        signals: Signals that may end the comparison early.

    Raises:
        UsageError: An algorithm's options are invalid for the number of ranks.
    """
    for choice in settings.algorithms:
        try_to_make(choice, settings, comm)
    warmed = warm_up(settings_of(settings, settings.algorithms[0], settings.seed), task, comm)
    if settings.script and settings.target is not None:
        names = comm.allgather(contract.metric_names(task, warmed))
        check_target(settings.target, [name for each in names for name in each])
    summaries: dict[str, list[dict]] = {each.label: [] for each in settings.algorithms}
    firsts = [each.method.first_rank(each.options) for each in settings.algorithms]
    terminal = progress.terminal() if comm.rank in firsts else None
    status, lost = OK, False
    for seed in range(settings.seed, settings.seed + settings.seeds):
        for choice in settings.algorithms:
            label, own = choice.label, settings_of(settings, choice, seed)
            run = make_directory(directory / f"seed-{seed}", directory_name(label), comm)
            length = settings.steps, settings.seconds
            is_first = comm.rank == choice.method.first_rank(choice.options)
            shown = progress.Bar(*length, terminal) if terminal and is_first else progress.Silent()
            try:
                with timeline_recorded(own, run, comm):
                    status, summary = make_run(own, task, run, comm, signals, shown)
            except UsageError:
                raise
            except Exception as error:
                raise RuntimeError(f"training with {label} and seed {seed} failed") from error
            if status == FAILED:
                lost, status = True, OK
            if status != OK:
                break
            if comm.rank == 0:
                whole = summary
                summary = {k: v for k, v in whole.items() if k not in PER_RANK} | {
                    "seed": seed,
                    "bytes_sent": most(summary["bytes_sent_of_rank"]),
                }
                summaries[label].append(summary)
                print(f"seed {seed}: {outcome_in_words(label, summary)}", flush=True)
                print_report(run, whole, headline)
        if status != OK:
            break
    from_rank_0(lambda: report(settings, directory, comm.size, summaries), comm)
    return FAILED if lost and status == OK else status


def try_to_make(choice: Choice, settings: argparse.Namespace, comm: MPI.Comm) -> None:
    """Raise UsageError if the algorithm's options are invalid; collective."""
    model = torch.nn.Linear(1, 1, device=settings.device)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        choice.method.make(model, sgd, comm, choice.options, settings.seed).close()
    except (TypeError, ValueError) as error:
        raise UsageError(f"argument --algorithms: {choice.label}: {error}") from error


def warm_up(settings: argparse.Namespace, task: contract.Task, comm: MPI.Comm) -> contract.Prepared:
    """Make the first steps of a run, so that no run includes torch's initialization.

    Returns:
        The task, as it was prepared for that.
    """
    torch.set_num_threads(fair_threads(comm))
    length = {"steps": WARM_UP, "seconds": None, "evaluate_every_seconds": None}
    trainer = Trainer(argparse.Namespace(**vars(settings) | length), task, comm)
    for _ in trainer.steps():
        pass
    trainer.averager.close()
    return contract.Prepared(trainer.model, trainer.batches, trainer.test)


def settings_of(settings: argparse.Namespace, choice: Choice, seed: int) -> argparse.Namespace:
    """Return the settings of `wagma train` for one run."""
    given = vars(settings) | {"seed": seed, "algorithm": choice}
    for name in ("algorithms", "seeds", "target"):
        del given[name]
    return argparse.Namespace(**given)
