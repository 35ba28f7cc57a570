"""Trainings in simulated time: of real models, with the methods' protocols, in one process.

``wagma simulate --train`` is the command for it.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from wagma import progress
from wagma.commands.methods import chosen
from wagma.evaluation import State, evaluate
from wagma.job import UsageError
from wagma.methods import METHODS
from wagma.runs import Tally, last_recorded, lost, summarize
from wagma.simulation.gradients import Batched, threads
from wagma.simulation.ranks import Communicator, Job, Ranks, TimeIsOver
from wagma.simulation.steps import begun_within
from wagma.simulation.trainer import Evaluations, SimulatedTrainer, last_of
from wagma.tasks import contract, local, script

__all__ = ["Learned", "learn", "loaded", "settings_of"]

OUTCOME = "version", "timely", "source", "synchronized", "group"
# The settings of a training that do not depend on the job; None: the local optimizer's default.
DEFAULTS: dict[str, Any] = {
    "batch_size": 32,
    "accumulate": 1,
    "optimizer": None,
    "lr": None,
    "momentum": None,
    "weight_decay": None,
    "clip_norm": None,
    "seed": 0,
    "evaluate_every": None,
    "evaluate_every_seconds": None,
}


class Learned(NamedTuple):
    """The results of a training in simulated time.

    Attributes:
        summary: as that of `wagma train`.
        state: the state of the ranks' mean model at the end.
        losses: each rank's losses, by step.
        outcomes: what each rank's calls returned, by step: version, timely, source, synchronized
            and group, as in the metrics of `wagma train`.
    """

    summary: dict[str, Any]
    state: State
    losses: list[list[float]]
    outcomes: list[list[dict[str, Any]]]


class Lived(NamedTuple):
    """What a rank knows at the end: see `Learned`."""

    tally: Tally
    trainer: SimulatedTrainer
    state: State | None
    measured: contract.Means | None
    losses: list[float]
    outcomes: list[dict[str, Any]]


def learn(
    settings: argparse.Namespace,
    task: contract.Task,
    job: Job,
    *,
    batched: bool = True,
    shown: progress.Silent | None = None,
) -> Learned:
    """Train on the ranks of a job, in simulated time.

    Args:
        settings: those of `wagma train`.
        task: the task to train.
        job: the ranks, and how long their steps take.
        batched: whether gradients of several ranks may be computed at once. They then differ from
            those computed one by one in rounding; a training that is to have the bits of a real one
            computes them one by one.
        shown: the display of the progress.

    Raises:
        UsageError: no rank has completed a step in time, or steps take time by their work, which
            the task does not tell.
        NotImplementedError: the method leaves out what takes too long of steps whose time is known
            only when they begin.
    """
    if job.seconds_per_work:
        task.check_work()
        if settings.algorithm.options.get("compute_limit") is not None:
            raise NotImplementedError("its steps are limited in time, which work adds to")
    shown = shown or progress.Silent()
    with closing(shown), threads(1), collected():
        return _learn(settings, task, job, Batched(task).answer if batched else None, shown)


@contextmanager
def collected() -> Iterator[None]:
    """Free at the end what the block's ranks had: vectors in cycles, whose size Python ignores.

    Collections do not look at what is there already: that is torch's, and takes them longer than a
    hundred steps of a small model.
    """
    freezes = gc.get_freeze_count() == 0
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        if freezes:
            gc.unfreeze()


def _learn(
    settings: argparse.Namespace,
    task: contract.Task,
    job: Job,
    answer: Callable[[int, dict[int, Any]], None] | None,
    shown: progress.Silent,
) -> Learned:
    limit = settings.algorithm.options.get("compute_limit")
    begun, step_times = begun_within(limit, job.step_times, settings.accumulate)
    ranks: Ranks[Lived] = Ranks(replace(job, step_times=step_times))
    ranks.answer = answer
    algorithm = settings.algorithm
    some_idle = algorithm.method.idle_rank(algorithm.options) is not None
    evaluations = Evaluations(task, job.size, job.size - some_idle)

    def live(comm: Communicator) -> Lived:
        trainer = SimulatedTrainer(settings, task, comm, evaluations, begun)
        return train_rank(trainer, shown if trainer.is_first else progress.Silent())

    return put_together(ranks.run(live), evaluations)


def train_rank(trainer: SimulatedTrainer, shown: progress.Silent) -> Lived:
    """Train on one rank until all have ended, and evaluate."""
    settings, averager = trainer.settings, trainer.averager
    tally, losses, outcomes = Tally(settings.steps, settings.seconds), [], []
    try:
        for record in trainer.steps():
            tally.add(record)
            losses.append(record["loss"])
            outcomes.append({name: record[name] for name in OUTCOME})
            rate = trainer.trainers * tally.samples / max(tally.elapsed_s, 1e-9)
            shown.update(
                *(trainer.iteration(tally.steps), tally.elapsed_s, record["loss"], rate),
                trainer.recorded,
            )
    except TimeIsOver:
        trainer.keep_by_time(tally.steps)
    if settings.seconds is not None:
        tally.elapsed_s = settings.seconds
        if not tally.steps and trainer.trains:
            tally.step_seconds.append(settings.seconds)  # its first step takes at least as long
    tally.add_averaging(trainer.statistics())
    state = measured = None
    if settings.seconds is None:
        state, measured = evaluate(trainer)
        if trainer.rank != 0:
            state = None
    elif trainer.trains:
        state = trainer.evaluations.finish(last_of(trainer, tally.steps, settings.seconds), trainer)
    tally.report = getattr(averager, "report", dict)()
    averager.close()
    return Lived(tally, trainer, state, measured, losses, outcomes)


def settings_of(
    label: str, job: Job, given: dict[str, Any], options: dict[str, Any] | None = None
) -> argparse.Namespace:
    """Return the settings of a training with an algorithm, as the command line has them.

    Args:
        label: the algorithm with its options.
        job: the job that it is for.
        given: settings other than the defaults.
        options: values of the algorithm's options that the label does not set.

    Raises:
        TypeError: there is no such setting.
        ValueError: the algorithm is invalid, or one of its options is.
    """
    try:
        choice = chosen(METHODS)(label).resolved(options or {})
    except argparse.ArgumentTypeError as error:
        raise ValueError(str(error)) from None
    choice.method.check(choice.options, job.size)
    unknown = given.keys() - DEFAULTS.keys()
    if unknown:
        raise TypeError(f"no setting {', '.join(sorted(unknown))}: {', '.join(DEFAULTS)}")
    values = DEFAULTS | given
    if values["optimizer"] not in (None, *local.OPTIMIZERS):
        raise ValueError(
            f"optimizer is {values['optimizer']!r}, not one of {', '.join(local.OPTIMIZERS)}"
        )
    for name in ("batch_size", "accumulate", "evaluate_every", "evaluate_every_seconds"):
        if values[name] is not None and not values[name] > 0:
            raise ValueError(f"{name} is {values[name]!r}, not above 0")
    length = {"steps": len(job.step_times) if job.seconds is None else None}
    return argparse.Namespace(
        algorithm=choice, seconds=job.seconds, step_time_ms=0.0, **length, **values
    )


def loaded(task: contract.Task | Path | str, settings: argparse.Namespace) -> contract.Task:
    """Return the task, from a script if it is a path, and set the local optimizer's defaults."""
    if isinstance(task, (str, Path)):
        task = script.load(Path(task))
    local.resolve(settings, task)
    return task


def put_together(lived: list[Lived], evaluations: Evaluations) -> Learned:
    """Return the results of all ranks in one."""
    tallies = [each.tally for each in lived]
    if not any(tally.steps_in_time for tally in tallies):
        limit = lived[0].trainer.settings.seconds
        raise UsageError(f"argument --seconds: no step was completed within {limit:g} s")
    summary = summarize(tallies, lived[0].trainer.bound)
    results = evaluations.results
    if lived[0].measured is None:
        last = results.pop()
        metrics = {k: v for k, v in last.items() if k not in ("step", "elapsed_s")}
    else:
        metrics = contract.all_ranks([each.measured for each in lived if each.measured])
    steps = [tally.steps for tally in tallies if tally.steps]
    last = {"step": sum(steps) / len(steps), "elapsed_s": summary["wall_s"], **metrics}
    summary = {**metrics, **summary, "metrics": list(metrics)}
    summary |= last_recorded([each.trainer.recorded for each in lived])
    summary["lost_since"] = lost([each.lost_since for each in tallies], [t.steps for t in tallies])
    summary["evaluations"] = [*results, last]
    state = next(each.state for each in lived if each.state is not None)
    return Learned(
        summary, state, [each.losses for each in lived], [each.outcomes for each in lived]
    )
