"""``wagma simulate --train``: compare methods' trainings in simulated time."""

from __future__ import annotations

import argparse
import logging
import time
from typing import Any

import numpy as np

from collectives.agreement import counted
from wagma import progress
from wagma.commands.preparation import check_ranks, find_data, load_task
from wagma.comparison import check_target, report
from wagma.job import FAILED, OK, Interrupted, Signals, UsageError, complain
from wagma.methods import Choice
from wagma.runs import new_directory, results_in_words
from wagma.simulate import job_in_words, machine_in_words, machine_of, read_trace, step_times_of
from wagma.simulation import Machine
from wagma.simulation.learning import Learned, learn
from wagma.simulation.memory import Need, available
from wagma.simulation.ranks import Job
from wagma.tasks import contract, local

log = logging.getLogger(__name__)


class Alone:
    """What the only process of the command has in place of a communicator."""

    rank, size = 0, 1

    def Ibarrier(self) -> Alone:
        """Return a request that is complete."""
        return self

    def Test(self) -> bool:
        """Return True."""
        return True

    def bcast(self, value: Any) -> Any:
        """Return the value."""
        return value

    def allgather(self, value: Any) -> list[Any]:
        """Return the value in a list."""
        return [value]


def run(settings: argparse.Namespace, signals: Signals) -> int:
    """Train with every algorithm, number of ranks and seed; print, plot, return the exit status.

    Args:
        settings: The command line's.
        signals: Signals that may end the trainings early.

    Raises:
        UsageError: The settings cannot be simulated.
    """
    machine, trace = machine_of(settings), read_trace(settings)
    task = load(settings)
    for ranks in settings.ranks:
        for choice in settings.algorithms:
            check_ranks(settings_of(settings, choice), ranks)
    directory = new_directory(settings.runs_dir, settings.name)
    print(f"# {job_in_words(settings, task)}\n# {machine_in_words(settings, machine)}")
    need = Need.of(settings, task)
    print(f"# {need.in_words(max(settings.ranks))}", flush=True)
    need.check(max(settings.ranks), available())
    several = len(settings.ranks) > 1
    status = OK
    for ranks in sorted(settings.ranks):
        place = directory / f"{ranks}-ranks" if several else directory
        place.mkdir(exist_ok=True)
        summaries: dict[str, list[dict[str, Any]]] = {
            each.label: [] for each in settings.algorithms
        }
        if several:
            print(f"# {counted(ranks, 'rank')}", flush=True)
        try:
            with signals.raising():
                train_all(settings, task, machine, trace, ranks, summaries)
        except Interrupted:
            complain(f"stopped: the results of trainings that have ended are in {directory}")
            status = 128 + signals.received
        finally:
            report(settings, place, ranks, summaries, simulated=True)
        if status > FAILED:
            break
        if not settings.allow_nan and any(
            each["lost_since"] for of in summaries.values() for each in of
        ):
            status = FAILED
    return status


def load(settings: argparse.Namespace) -> contract.Task:
    """Return the task that the settings name, and set the local optimizer's defaults."""
    alone = Alone()
    task = load_task(settings, find_data(settings, alone, max(settings.ranks)), alone)
    local.resolve(settings, task)
    if settings.script and settings.target is not None:
        ranks = max(settings.ranks)
        prepared = contract.prepare(task, 0, ranks, settings.batch_size, settings.seed)
        check_target(settings.target, contract.metric_names(task, prepared))
    return task


def train_all(
    settings: argparse.Namespace,
    task: contract.Task,
    machine: Machine,
    trace: np.ndarray | None,
    ranks: int,
    summaries: dict[str, list[dict[str, Any]]],
) -> None:
    """Train with all algorithms and seeds on this number of ranks, and collect the summaries."""
    for seed in range(settings.seed, settings.seed + settings.seeds):
        drawn = argparse.Namespace(**vars(settings) | {"seed": seed})
        nbytes = settings.parameters and settings.parameters * (settings.itemsize or 4)
        try:
            step_times = step_times_of(drawn, trace, ranks)
            longer = settings.step_time_per_work_ms / 1000
            job = Job(machine, step_times, settings.seconds, nbytes, seconds_per_work=longer)
        except (ValueError, OverflowError, MemoryError) as error:
            reason = str(error) or "not enough memory"
            raise UsageError(f"cannot simulate {counted(ranks, 'rank')}: {reason}") from error
        for choice in settings.algorithms:
            began = time.perf_counter()
            learned = train(settings_of(drawn, choice), task, job, settings.one_by_one)
            log.info("%s: trained in %.1f s", choice.label, time.perf_counter() - began)
            summaries[choice.label].append(summary_of(learned, seed))
            print(f"seed {seed}: {outcome(choice, learned)}", flush=True)
            since = learned.summary["lost_since"]
            if since and not settings.allow_nan:
                complain(
                    f"error: {choice.label}, seed {seed}: since step {since} the loss of no rank "
                    "is finite: use a lower --lr, or --allow-nan"
                )


def train(settings: argparse.Namespace, task: contract.Task, job: Job, one_by_one: bool) -> Learned:
    """Train with one algorithm.

    Raises:
        UsageError: It cannot be trained in simulated time.
    """
    terminal = progress.terminal()
    length = settings.steps, settings.seconds
    shown = progress.Bar(*length, terminal) if terminal else progress.Silent()
    try:
        return learn(settings, task, job, batched=not one_by_one, shown=shown)
    except NotImplementedError as error:
        label = settings.algorithm.label
        raise UsageError(f"{label} cannot be trained in simulated time: {error}") from error


def settings_of(settings: argparse.Namespace, choice: Choice) -> argparse.Namespace:
    """Return the settings of `wagma train` for one training."""
    taken = {"algorithm": choice, "device": "cpu", "step_time_ms": 0.0, "imbalance": "none"}
    given = {name: value for name, value in vars(settings).items() if name != "algorithms"}
    return argparse.Namespace(**given | taken | {"slow_rank": {}})


def summary_of(learned: Learned, seed: int) -> dict[str, Any]:
    """Return a training's summary as a comparison takes it."""
    per_rank = [name for name in learned.summary if name.endswith("_of_rank")]
    kept = {name: value for name, value in learned.summary.items() if name not in per_rank}
    return {**kept, "seed": seed, "bytes_sent": None}


def outcome(choice: Choice, learned: Learned) -> str:
    """Return a line about a training."""
    summary = learned.summary
    return (
        f"{results_in_words(summary)}, "
        f"simulated time {summary['wall_s']:.2f} s, {summary['samples_per_s']:,.0f} samples/s, "
        f"algorithm {choice.label}"
    )
