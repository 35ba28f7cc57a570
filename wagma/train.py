"""``wagma train``: train one model on all ranks of a job.

Importing it loads torch and MPI; the command line calls `train` on every rank.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import os
import signal
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from mpi4py import MPI

import collectives
from collectives.agreement import counted
from wagma import devices, imbalance, plots, progress
from wagma.evaluation import Kept, State, copy_of, evaluate, evaluate_kept, mean_over_ranks
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
    together,
)
from wagma.runs import JsonLines, Tally, recorded, summarize, write_json
from wagma.stopwatch import Stopwatch
from wagma.tasks import contract, local

if TYPE_CHECKING:
    from wagma.optim.interfaces import AveragingOptimizer

SILENCE = 20.0  # seconds that rank 0 waits for others to stop before it prints a message
ALMOST = 1 - 1e-9  # tolerance for rounding

log = logging.getLogger(__name__)


class Trainer:
    """One rank's model, optimizer and data; its construction is collective."""

    def __init__(self, settings: argparse.Namespace, task: contract.Task, comm: MPI.Comm) -> None:
        self.settings, self.task, self.rank, self.size = settings, task, comm.rank, comm.size
        self.method, self.options = settings.algorithm.method, settings.algorithm.options
        # A rank that makes no steps has no part of the data, but needs the same model.
        idle = self.method.idle_rank(self.options)
        self.some_idle, self.trains = idle is not None, idle != comm.rank
        self.trainers = comm.size - self.some_idle
        place = min(comm.rank - (self.some_idle and comm.rank > idle), self.trainers - 1)
        self.model, self.batches, self.test = together(
            lambda: contract.prepare(
                task, place, self.trainers, settings.batch_size, settings.seed
            ),
            comm,
        )
        self.device = devices.device_of(self.model)
        if not self.trains:
            self.test = ()
        self.local, self.scheduler = together(self.make_local, comm)
        self.stopwatch = Stopwatch(self.local)
        try:
            self.optimizer = self.method.make(
                self.local, self.model, comm, self.options, settings.seed
            )
        except (TypeError, ValueError) as error:  # the model, or its optimizer, on all ranks
            raise UsageError(f"{task.name}: {error}") from error
        self.kept: list[Kept] = []

    def make_local(self) -> tuple[torch.optim.Optimizer, Any]:
        """Return this rank's local optimizer and its learning-rate scheduler."""
        optimizer = local.make(self.settings, self.task, self.model)
        return optimizer, local.make_scheduler(self.task, optimizer)

    def bound(self, seconds: list[array], limit: float | None) -> float:
        """Return the least wall time of ranks whose steps take this long.

        With a time limit, return the number of steps that they make within it. The steps of a rank
        that has too few, such as one that has skipped iterations, are repeated.
        """
        options = self.options | self.optimizer.settings
        if limit is None:
            made = [np.resize(each, self.settings.steps) for each in seconds]
            return self.method.bound(np.array(made), options)
        return self.method.bound_of_steps(lasting(seconds, limit), options, limit)

    def steps(self) -> Iterator[dict]:
        """Make all steps, and yield each one's metrics record once its average is complete.

        The clock is stopped while a model is copied for evaluation.
        """
        self.started = time.perf_counter()
        records = deque()
        for step in itertools.count():
            if not self.goes_on(step):
                break
            self.stopwatch.start()
            batches = [next(self.batches) for _ in range(self.settings.accumulate)]
            loss = self.compute_gradient(batches)
            self.hold_up(step)
            self.keep_by_time(step)
            self.optimizer.step()
            self.stopwatch.averaged()
            if self.scheduler is not None:
                self.scheduler.step()
            record = {
                "step": step,
                "loss": loss,
                "samples": sum(
                    contract.samples(batch) or self.settings.batch_size for batch in batches
                ),
                "compute_s": self.stopwatch.compute,
                "delay_s": self.stopwatch.delay,
                "average_s": self.stopwatch.average,
                "elapsed_s": self.elapsed,
            }
            records.append(record)
            self.keep_by_steps(step + 1)
            self.keep_by_time(step + 1)
            for result in self.optimizer.results:
                yield records.popleft() | outcome(result)
        if records:
            self.optimizer.complete()
            self.stopwatch.averaged()
            record["average_s"] = self.stopwatch.average
            record["elapsed_s"] = self.elapsed
            yield record | outcome(self.optimizer.result)

    @property
    def elapsed(self) -> float:
        """Seconds since the first step began, without those in which a model was copied."""
        return time.perf_counter() - self.started

    def goes_on(self, steps: int) -> bool:
        """Return whether this rank makes another step after this number of steps."""
        if not self.trains:
            return False
        if self.settings.seconds is None:
            return self.iteration(steps) < self.settings.steps
        own = self.elapsed < self.settings.seconds
        # torch's own methods cannot continue without a rank.
        any_goes_on = getattr(self.optimizer, "any_goes_on", None)
        return any_goes_on(own) if any_goes_on else own

    def iteration(self, steps: int) -> int:
        """Return this rank's iteration number after `steps`: higher if it has skipped some."""
        return steps + getattr(self.optimizer.collective, "skipped", 0)

    def until_all_end(self) -> AbstractContextManager:
        """Return a block for the steps: `join` if ranks will make different numbers of steps."""
        if self.settings.seconds is None and not self.some_idle:
            return nullcontext()
        return self.optimizer.join()

    def keep_by_steps(self, steps: int) -> None:
        """Keep the model after `steps`, once for each iteration to evaluate that has been passed.

        The last iteration is not among these.
        """
        every = self.settings.evaluate_every
        if every is None:
            return
        over = min(self.iteration(steps), self.settings.steps - 1) // every - len(self.kept)
        if over > 0:
            with self.clock_stopped() as elapsed:
                self.kept += [Kept(steps, elapsed, copy_of(self.model))] * over

    def keep_by_time(self, steps: int) -> None:
        """Keep the model after `steps`, once for each time to evaluate it that has passed.

        Called before a step's average, it keeps the model of that time; if the time fell within an
        average, the model after it.
        """
        if self.settings.evaluate_every_seconds is None or self.next_time() > self.elapsed:
            return
        with self.clock_stopped() as elapsed:
            state = copy_of(self.model)
            while self.next_time() <= elapsed:
                self.kept.append(Kept(steps, self.next_time(), state))

    def next_time(self) -> float:
        """Return the next time to evaluate the model before the end of the training."""
        at = self.settings.evaluate_every_seconds * (len(self.kept) + 1)
        return at if at < (self.settings.seconds or math.inf) * ALMOST else math.inf

    @contextmanager
    def clock_stopped(self) -> Iterator[float]:
        """Stop the training's clock in the block; yield the elapsed time."""
        elapsed = self.elapsed
        yield elapsed
        self.started += self.elapsed - elapsed
        self.stopwatch.skip()

    def compute_gradient(self, batches: list) -> float:
        """Compute the mean gradient on these batches, and return the mean loss."""
        self.optimizer.zero_grad()
        # A method of torch may have wrapped the model in a module, and wait in the backward pass.
        model = getattr(self.optimizer, "module", self.model)
        backward = getattr(self.optimizer, "backward", torch.Tensor.backward)
        total = 0.0
        for batch in batches:
            loss = self.task.loss(model, batch) / len(batches)
            waited = backward(loss)
            self.stopwatch.computed(waited or 0.0)
            total += loss.detach()
        devices.wait_for(self.device)  # else its computation would count as waiting for ranks
        time.sleep(self.settings.step_time_ms / 1000)
        self.stopwatch.computed()
        return float(total)

    def hold_up(self, step: int) -> None:
        """Sleep for the time by which the injected imbalance delays this rank's step."""
        settings = self.settings
        compute = self.stopwatch.compute
        drawn = imbalance.delay(
            settings.imbalance, settings.seed, step, self.rank, self.size, compute
        )
        factor = settings.slow_rank.get(self.rank, 1.0)
        slow = imbalance.slow_rank_delay(factor, compute)
        seconds = drawn * settings.imbalance_scale + slow
        if seconds > 0:
            time.sleep(seconds)
            self.stopwatch.delayed()


def lasting(seconds: list[array], limit: float) -> np.ndarray:
    """Return all ranks' steps, each rank's repeated until they take at least `limit`.

    Args:
        seconds: for each rank the seconds of its steps, not all 0.
        limit: in seconds.

    Returns:
        float64 array of shape (ranks, steps).
    """
    count = max(len(each) * (1 + math.ceil(limit / sum(each))) for each in seconds)
    return np.array([np.resize(each, count) for each in seconds])


def outcome(result: Any) -> dict:
    """Return the metrics' fields of a `Result`."""
    return {
        "version": result.version,
        "timely": result.timely,
        "source": result.source,
        "synchronized": result.synchronized,
        "group": list(result.group),
    }


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
    shown = progress.start(comm.rank, settings.steps, settings.seconds)
    status, summary = make_run(settings, task, run, comm, signals, shown)
    if summary:
        print(
            f"{outcome_in_words(settings.algorithm.label, summary)}\n"
            f"metrics, model and configuration are in {run}",
            flush=True,
        )
    return status


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
    optimizer = trainer.optimizer
    tally = Tally(settings.steps, settings.seconds)
    placed = devices.record(trainer.device, comm, optimizer.collective)
    if comm.rank == 0:
        write_json(run / "config.json", configuration(settings, run, comm.size, optimizer, placed))
    log_beginning(trainer)

    trained = closed = None
    comm.Barrier()
    try:
        with signals.raising():
            with trainer.until_all_end():
                run_steps(trainer, tally, run, shown)
                tally.add_averaging(optimizer.collective.statistics())
            trained = evaluate(trainer)
            tally.report = getattr(optimizer, "report", dict)()
    except Interrupted:
        pass
    except collectives.ClosedError as error:
        closed = error
    except collectives.CollectiveError:
        raise  # it is raised on all ranks
    except Exception as error:
        optimizer.collective.fail(error)
        raise
    with keeping_own(trainer.model, run, comm.rank) if trained is None else nullcontext():
        optimizer.close()
        meet(comm)
    log_end(tally, comm.size)

    summary = None
    finished = all(comm.allgather(trained is not None))
    if finished:
        if not any(comm.allgather(tally.steps_in_time)):
            raise UsageError(
                f"argument --seconds: no step was completed within {settings.seconds:g} s"
            )
        state, measured = trained
        evaluations = evaluate_kept(trainer, comm, signals)
        measured, tallies = comm.gather(measured), comm.gather(tally)
        if comm.rank == 0:
            measured = contract.all_ranks(measured)
            summary = {**measured, **summarize(tallies, trainer.bound)}
            steps = mean(filter(None, summary["steps_of_rank"]))
            last = {"step": steps, "elapsed_s": summary["wall_s"], **measured}
            summary["metrics"] = list(measured)
            summary["evaluations"] = [*evaluations, last]
        from_rank_0(lambda: write_run(run, state, summary, tallies), comm)
        lost_since = lost(comm.allgather(tally.lost_since), comm.allgather(tally.steps))
    received = comm.allgather(signals.received)
    if any(received):
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


def lost(since: list[int | None], steps: list[int]) -> int | None:
    """Return the step since which no rank's loss was finite, None if one ended with a finite loss.

    Args:
        since: Every rank's, as in `Tally.lost_since`.
        steps: The number of steps of every rank: those that made none do not count.
    """
    trained = [step for step, made in zip(since, steps) if made]
    return None if not trained or None in trained else max(trained)


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
    settings = [f", {name}: {value}" for name, value in trainer.optimizer.settings.items()]
    log.info("algorithm: %s%s", trainer.settings.algorithm.label, "".join(settings))


def log_end(tally: Tally, ranks: int) -> None:
    """Log how many steps this rank made, and how many of its averages were timely."""
    log.info("made %s in %.1f s", counted(tally.steps, "step"), tally.elapsed_s)
    if tally.timely_calls < tally.group_calls:
        log.info(
            "timely in %d of %d group averages, late for the others: over all ranks, "
            "about 1 in %d is normal",
            *(tally.timely_calls, tally.group_calls, ranks),
        )


def run_steps(trainer: Trainer, tally: Tally, run: Path, shown: progress.Silent) -> None:
    """Make all steps, and record, count and show them."""
    rank, finite = trainer.rank, True
    with JsonLines(run / f"rank-{rank:04}.jsonl") as metrics, closing(shown):
        for record in trainer.steps():
            metrics.write(record)
            tally.add(record)
            if finite and not math.isfinite(record["loss"]):
                finite = False
                log.warning("rank %d: the loss is %f at step %d", rank, record["loss"], tally.steps)
            samples_per_s = trainer.trainers * tally.samples / min(tally.elapsed_s, tally.limit)
            iteration = trainer.iteration(tally.steps)
            shown.update(iteration, tally.elapsed_s, record["loss"], samples_per_s)


def configuration(
    settings: argparse.Namespace,
    run: Path,
    size: int,
    optimizer: AveragingOptimizer,
    placed: dict,
) -> dict:
    """Return everything that a run depends on, with the defaults resolved."""
    return {
        **recorded(settings),
        "name": run.name,
        "ranks": size,
        **placed,
        **optimizer.settings,
        "local_optimizer": local.described(optimizer.optimizer),
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
    results = ", ".join(in_words(name, summary[name]) for name in summary["metrics"])
    return (
        f"{'test ' + results if results else 'no test batches'}, "
        f"wall time {summary['wall_s']:.2f} s, "
        f"{summary['samples_per_s']:,.0f} samples/s, "
        f"bound/wall {summary['bound_over_wall']:.2f}, algorithm {algorithm}"
    )


def in_words(name: str, value: float) -> str:
    """Return "accuracy 96.11%" or "loss 0.1234"."""
    return f"{name} {value:.2%}" if name == "accuracy" else f"{name} {value:.4g}"


def farewell(received: list[int], tally: Tally, run: Path) -> str:
    """Return the line about a job that was ended by the signals that ranks received (0: none)."""
    names = sorted({signal.Signals(signum).name for signum in received if signum})
    ranks = [rank for rank, signum in enumerate(received) if signum]
    where = f" on rank {ranks[0]}" if len(ranks) == 1 < len(received) else ""
    return (
        f"stopped by {' and '.join(names)}{where} after {counted(tally.steps, 'step')}: "
        f"the average of the current models is in {run}"
    )
