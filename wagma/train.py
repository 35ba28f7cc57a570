"""``wagma train``: train one model on all ranks of a job.

Importing it loads torch and MPI; the command line calls `train` on every rank.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

import torch
from mpi4py import MPI

import collectives
from collectives import timeline
from collectives.agreement import counted
from wagma import devices, plots, progress, report
from wagma.evaluation import (
    State,
    bytes_of,
    copy_of,
    evaluate,
    evaluate_kept,
    mean_over_ranks,
)
from wagma.info import versions
from wagma.job import (
    FAILED,
    OK,
    Interrupted,
    Signals,
    UsageError,
    complain,
    from_rank_0,
    meet,
)
from wagma.report.exchanged import Exchange
from wagma.report.live import Watch, evenly
from wagma.report.text import advice
from wagma.runs import (
    JsonLines,
    Tally,
    last_recorded,
    lost,
    metrics_file,
    notes,
    recorded,
    results_in_words,
    summarize,
    write_json,
)
from wagma.tasks import contract, local
from wagma.trainer import Trainer

if TYPE_CHECKING:
    from wagma.continuing import Continuing

SILENCE = 20.0  # seconds that rank 0 waits for others to stop before it prints a message
PRICED = 30_000  # steps of all ranks, which are read and simulated in a second or two

log = logging.getLogger(__name__)


def train(
    settings: argparse.Namespace, task: contract.Task, run: Path, comm: MPI.Comm, signals: Signals
) -> int:
    """Train on this rank, write the run's files, and return the exit status; collective.

    Args:
        settings: The command line's.
        task: The task to train.
        run: The run's directory, which is empty.
        comm: The ranks that train together.
        signals: Signals that may end the training early.
    """
    first = settings.algorithm.method.first_rank(settings.algorithm.options)
    shown = progress.start(comm.rank, settings.steps, settings.seconds, first=first)
    with timeline_recorded(settings, run, comm):
        status, summary = make_run(settings, task, run, comm, signals, shown)
    if summary:
        print(
            f"{outcome_in_words(settings.algorithm.label, summary)}\n"
            f"metrics, model and configuration are in {run}",
            *notes(summary),
            sep="\n",
            flush=True,
        )
        print_report(run, summary, advice, "which rank is slow, and what would help?")
    return status


def print_report(
    run: Path, summary: dict, tell: Callable[[report.Report], str | None], otherwise: str = ""
) -> None:
    """Print a line of a finished run's report, if there is one.

    Args:
        run: The run's directory.
        summary: The run's summary.
        tell: Returns the line.
        otherwise: The line if the run is too long to be read now, or has no report.
    """
    line: str | None = otherwise
    if sum(summary["steps_of_rank"]) <= PRICED:
        try:
            line = tell(report.of(run))
        except Exception as error:  # the training has succeeded: a report must never fail a job
            log.info("no report of %s: %s", run, error, exc_info=True)
    if line:
        print(f"{line} (wagma report {run})", flush=True)


@contextmanager
def timeline_recorded(settings: argparse.Namespace, run: Path, comm: MPI.Comm) -> Iterator[None]:
    """Record a run's timeline in the block, if the settings ask for it; collective.

    Raises:
        UsageError: its files cannot be written.
    """
    if not settings.timeline:
        yield
        return
    with ExitStack() as stack:
        # Where ranks may have died, clocks are compared by their collectives only.
        record = timeline.begun if getattr(settings, "survive", None) else timeline.recorded
        try:
            stack.enter_context(record(run, comm))
        except (OSError, ValueError, RuntimeError) as error:
            raise UsageError(f"argument --timeline: {error}") from error
        yield


def make_run(
    settings: argparse.Namespace,
    task: contract.Task,
    run: Path,
    comm: MPI.Comm,
    signals: Signals,
    shown: progress.Silent,
) -> tuple[int, dict | None]:
    """Train on this rank, and write the run's files; collective.

    Args:
        settings, task, run, comm, signals: As for `train`.
        shown: The display of the progress.

    Returns:
        The exit status, and on rank 0 the summary if all ranks have finished.
    """
    torch.set_num_threads(fair_threads(comm))
    trainer = Trainer(settings, task, comm)
    averager = trainer.averager
    tally = Tally(settings.steps, settings.seconds)
    placed = devices.record(trainer.device, comm, averager.collective)
    goes_on = None
    if getattr(settings, "resumable", False):
        goes_on = resumed(trainer, tally, run, comm, signals)
    if comm.rank == 0:
        more = {"resumed": goes_on.resumed} if goes_on else {}
        write_json(run / "config.json", configuration(settings, run, trainer, placed) | more)
    log_beginning(trainer)

    trained = closed = None
    comm.Barrier()
    try:
        with goes_on.interruptible() if goes_on else signals.raising(), trainer.until_all_end():
            run_steps(trainer, tally, run, shown, goes_on)
            tally.add_averaging(trainer.statistics())
        if not (goes_on and goes_on.stopped):
            with goes_on.in_time() if goes_on else signals.raising():
                trained = evaluate(trainer)
                tally.report = getattr(averager, "report", dict)()
                if "skipped_of_rank" in tally.report:  # also before this job
                    tally.report["skipped_of_rank"] = trainer.skipped
    except Interrupted:
        if goes_on and not goes_on.complete:
            goes_on.give_up()
    except collectives.ClosedError as error:
        closed = error
    except collectives.CollectiveError:
        raise  # it is raised on all ranks
    except Exception as error:
        averager.collective.fail(error)
        raise
    alone = trained is None and goes_on is None
    with keeping_own(trainer.model, run, comm.rank) if alone else nullcontext():
        averager.close()
        if trainer.recoveries:  # the other ranks have died
            comm = averager.comm
        meet(comm)
    log_end(tally, comm.size)

    summary = None
    finished = all(comm.allgather(trained is not None))
    if finished:
        if settings.seconds is not None and not any(comm.allgather(tally.steps_in_time)):
            raise UsageError(
                f"argument --seconds: no step was completed within {settings.seconds:g} s"
            )
        state, measured = trained
        if trainer.total is not None:  # ranks made different numbers of steps in the same time
            tally.limit = comm.allreduce(tally.elapsed_s, MPI.MAX)
        evaluations, whole = evaluate_kept(
            trainer, comm, lambda: signals.received or (goes_on and goes_on.pauses.is_due)
        )
        received = comm.allgather(signals.received)
        if goes_on and (any(received) or not whole):
            return goes_on.ended(received), None
        measured, tallies = comm.gather(measured), comm.gather(tally)
        added = comm.gather(trainer.recorded)
        if comm.rank == 0:
            measured = contract.all_ranks(measured)
            summary = {**measured, **summarize(tallies, trainer.bound)}
            if task.work is not None:
                work = sum(each.work for each in tallies)
                name, each_one = task.reported or (task.unit, 1)
                summary[f"{name}_per_s"] = work / each_one / summary["wall_s"]
            steps = tally.before + mean(filter(None, summary["steps_of_rank"]))
            elapsed = tally.earlier + summary["wall_s"]
            last = {"step": steps, "elapsed_s": elapsed, **measured}
            summary["metrics"] = list(measured)
            summary |= last_recorded(added)
            if trainer.recoveries:
                summary["recoveries"] = [asdict(each) for each in trainer.recoveries]
            summary["evaluations"] = [*evaluations, last]
        from_rank_0(lambda: write_run(run, state, summary, tallies), comm)
        if comm.rank == 0 and getattr(settings, "tensorboard", False):
            from wagma.scalars import add_evaluations  # not at the top: it needs tensorboard

            add_evaluations(run, summary["evaluations"], summary["metrics"])
        lost_since = lost(comm.allgather(tally.lost_since), comm.allgather(tally.steps))
    received = comm.allgather(signals.received)
    if goes_on and not finished:
        due = any(comm.allgather(goes_on.pauses.is_due))
        if goes_on.stopped or any(received) or due:
            return goes_on.ended(received), None
    if any(received) and not goes_on:
        if not finished:
            state = mean_over_ranks(copy_of(trainer.model), comm, trainer.trains)
            from_rank_0(lambda: save(run, state), comm)
        if comm.rank == 0:
            complain(farewell(received, tally, run))
        return 128 + next(filter(None, received)), summary
    if closed:
        raise closed
    if finished and lost_since and not settings.allow_nan:
        if comm.rank == 0:
            complain(
                f"error: {settings.algorithm.label}: since step {lost_since} the loss of no rank "
                "is finite: use a lower --lr, or --allow-nan"
            )
        return FAILED, summary
    return OK, summary


def resumed(
    trainer: Trainer, tally: Tally, run: Path, comm: MPI.Comm, signals: Signals
) -> Continuing:
    """Return what saves and continues a training, which goes on from its last checkpoint."""
    from wagma.continuing import Continuing  # not at the top: it needs safetensors

    try:
        goes_on = Continuing(trainer, tally, run, comm, signals)
        goes_on.resume()
    except UsageError:  # on all ranks
        trainer.averager.close()
        raise
    return goes_on


@contextmanager
def keeping_own(model: torch.nn.Module, run: Path, rank: int) -> Iterator[None]:
    """Save rank 0's model before waiting for the other ranks, and report a long wait."""
    if rank != 0:
        yield
        return
    save(run, copy_of(model))
    waiting = threading.Timer(
        SILENCE, complain, [f"waiting for the other ranks to stop: rank 0's own model is in {run}"]
    )
    waiting.daemon = True
    waiting.start()
    try:
        yield
    finally:
        waiting.cancel()


def fair_threads(comm: MPI.Comm) -> int:
    """Return this rank's share of the cores that it may run on, in threads; collective.

    A rank that is bound to its own cores does not share them.
    """
    cores = os.sched_getaffinity(0)
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    sharers = sum(bool(cores & others) for others in node.allgather(cores))
    node.Free()
    return max(1, len(cores) // sharers)


def log_beginning(trainer: Trainer) -> None:
    """Log this rank's place and the settings of the algorithm."""
    threads = counted(torch.get_num_threads(), "thread")
    log.info(
        "rank %d of %d on %s, process %d, %s, %s: %s",
        *(trainer.rank, trainer.size, MPI.Get_processor_name(), os.getpid()),
        *(devices.name_of(trainer.device), threads, trainer.task.name),
    )
    settings = trainer.averager.settings.items()
    given = [f", {name}: {value}" for name, value in settings if value is not None]
    log.info("algorithm: %s%s", trainer.settings.algorithm.label, "".join(given))


def log_end(tally: Tally, ranks: int) -> None:
    """Log how many steps this rank made, and how many of its averages were timely."""
    log.info("made %s in %.1f s", counted(tally.steps, "step"), tally.elapsed_s)
    if tally.timely_calls < tally.group_calls:
        log.info(
            "timely in %d of %d group averages, late for the others: over all ranks, "
            "about 1 in %d is normal",
            *(tally.timely_calls, tally.group_calls, ranks),
        )


def run_steps(
    trainer: Trainer,
    tally: Tally,
    run: Path,
    shown: progress.Silent,
    goes_on: Continuing | None = None,
) -> None:
    """Make all steps, and record, count and show them."""
    rank, finite = trainer.rank, True
    exchange = exchange_of(trainer)
    look = watch(trainer, run, exchange)
    with ExitStack() as stack:
        stack.enter_context(closing(shown))
        size = goes_on.recorded if goes_on else 0
        metrics = stack.enter_context(JsonLines(metrics_file(run, rank), size))
        takers = [metrics.write, tally.add, *others(trainer, run, stack)]
        takers += [] if exchange is None else [exchange.add]
        for record in trainer.steps() if goes_on is None else goes_on.steps(metrics):
            for take in takers:
                take(record)
            if finite and not math.isfinite(record["loss"]):
                finite = False
                log.warning("rank %d: the loss is %f at step %d", rank, record["loss"], tally.steps)
            samples_per_s = trainer.trainers * tally.samples / min(tally.elapsed_s, tally.limit)
            iteration = trainer.iteration(tally.before + tally.steps)
            elapsed = tally.earlier + tally.elapsed_s
            shown.update(iteration, elapsed, record["loss"], samples_per_s, trainer.recorded)
            look()


def others(trainer: Trainer, run: Path, stack: ExitStack) -> Iterator[Callable[[dict], object]]:
    """Yield what else takes this rank's records: TensorBoard's files, and the script's log()."""
    if getattr(trainer.settings, "tensorboard", False):
        from wagma.scalars import Scalars  # not at the top: it needs tensorboard

        yield stack.enter_context(closing(Scalars(run, trainer.rank))).add
    tell = trainer.task.log
    if tell is not None:
        yield lambda record: tell({"rank": trainer.rank, **record})


def exchange_of(trainer: Trainer) -> Exchange | None:
    """Return what tells all ranks of this one's steps; None without warnings, or an engine.

    None as well where a collective may be replaced, because a rank has died.
    """
    native = getattr(trainer.averager.collective, "native", None)
    settings = trainer.settings
    if native is None or not settings.straggler_warnings or getattr(settings, "survive", None):
        return None
    return Exchange(native, evenly(trainer.size) if trainer.is_first else [])


def watch(trainer: Trainer, run: Path, exchange: Exchange | None) -> Callable[[], None]:
    """Return a function to call after each step: on the first rank it may warn of stragglers."""
    if not trainer.is_first or not trainer.settings.straggler_warnings:
        return lambda: None
    return Watch(run, exchange).look


def configuration(settings: argparse.Namespace, run: Path, trainer: Trainer, placed: dict) -> dict:
    """Return everything that a run depends on, with the defaults resolved."""
    return {
        **recorded(settings),
        "name": run.name,
        "recorded": list(trainer.task.recorded),
        "ranks": trainer.size,
        "model_bytes": bytes_of(trainer.model),
        **placed,
        **trainer.averager.settings,
        "local_optimizer": local.described(trainer.local),
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }


def write_run(run: Path, state: State, summary: dict, tallies: list[Tally]) -> None:
    """Write the finished run's model, summary and plots."""
    save(run, state)
    write_json(run / "summary.json", summary)
    plots.draw(run, tallies)


def save(run: Path, state: State) -> None:
    """Write a model's state to the run's ``model.pt`` atomically, so that it is never partial."""
    torch.save(state, run / "model.pt.part")
    os.replace(run / "model.pt.part", run / "model.pt")


def outcome_in_words(algorithm: str, summary: dict) -> str:
    """Return a line about a finished run."""
    end = "_per_s"
    rates = [
        f"{value:,.0f} {name.removesuffix(end).replace('_', ' ')}/s, "
        for name, value in summary.items()
        if name.endswith(end)
    ]
    return (
        f"{results_in_words(summary)}, "
        f"wall time {summary['wall_s']:.2f} s, "
        f"{''.join(rates)}"
        f"bound/wall {summary['bound_over_wall']:.2f}, algorithm {algorithm}"
    )


def farewell(received: list[int], tally: Tally, run: Path) -> str:
    """Return the line about a job that was ended by the signals that ranks received (0: none)."""
    names = sorted({signal.Signals(signum).name for signum in received if signum})
    ranks = [rank for rank, signum in enumerate(received) if signum]
    where = f" on rank {ranks[0]}" if len(ranks) == 1 < len(received) else ""
    return (
        f"stopped by {' and '.join(names)}{where} after {counted(tally.steps, 'step')}: "
        f"the average of the current models is in {run}"
    )
