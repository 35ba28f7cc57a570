"""One rank's part in a training: its model, optimizer, averager and data, and its steps."""

from __future__ import annotations

import argparse
import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from wagma import devices, imbalance
from wagma.evaluation import Kept, copy_of
from wagma.job import UsageError, complain, together
from wagma.runs import lasting
from wagma.stopwatch import Stopwatch, Thread
from wagma.tasks import contract, local

if TYPE_CHECKING:  # importing it initializes MPI
    from mpi4py import MPI

    from wagma.optim.survival import Recovery
    from wagma.pauses import Pauses

ALMOST = 1 - 1e-9  # tolerance for rounding
RECENT = 100  # steps whose times are kept


class Trainer:
    """One rank's model, optimizer and data; its construction is collective.

    Args:
        settings: the command line's.
        task: the task to train.
        comm: the ranks that train together.
        clock: function that returns the time, in seconds.
        thread: see `Stopwatch`.

    Attributes:
        local: the optimizer of the rank's own steps.
        averager: what averages beside it.
    """

    def __init__(
        self,
        settings: argparse.Namespace,
        task: contract.Task,
        comm: MPI.Comm,
        clock: Callable[[], float] = time.perf_counter,
        thread: Thread | None = None,
    ) -> None:
        self.settings, self.task, self.rank, self.size = settings, task, comm.rank, comm.size
        self.recoveries: list[Recovery] = []
        self.method, self.options = settings.algorithm.method, settings.algorithm.options
        # A rank that makes no steps has no part of the data, but needs the same model.
        idle = self.method.idle_rank(self.options)
        self.some_idle, self.trains = idle is not None, idle != comm.rank
        self.trainers = comm.size - self.some_idle
        self.place = min(comm.rank - (self.some_idle and comm.rank > idle), self.trainers - 1)
        self.model, self.batches, self.test = together(
            lambda: contract.prepare(
                *(task, self.place, self.trainers, settings.batch_size, settings.seed),
                keeps_position=getattr(settings, "resumable", False),
            ),
            comm,
        )
        self.device = devices.device_of(self.model)
        if not self.trains:
            self.test = ()
        self.local, self.scheduler = together(self.make_local, comm)
        self.scheduled = 0
        self.clock = clock
        self.stopwatch = Stopwatch([self.local], self.device, clock, thread)
        self.recorded: dict[str, float | None] = dict.fromkeys(task.recorded)  # of the last step
        try:
            self.averager = self.method.make(
                *(self.model, self.local, comm, self.options, settings.seed),
                survive=getattr(settings, "survive", None) and self.go_on,
            )
        except (TypeError, ValueError) as error:  # the model, or its optimizer, on all ranks
            raise UsageError(f"{task.name}: {error}") from error
        self.waited = 0.0  # seconds that the steps so far have waited for other ranks
        self.kept: list[Kept] = []
        self.made = 0  # steps of this rank
        self.lasted: deque[float] = deque(maxlen=RECENT)  # seconds of steps, with their averages
        self.started: float | None = None
        self.earlier = 0.0  # seconds of the steps before this job
        self.pauses: Pauses | None = None
        self.recovered: Callable[[], None] | None = None  # what is done after a recovery

    @property
    def is_first(self) -> bool:
        """Whether this is the first of the ranks that train."""
        return self.rank == self.method.first_rank(self.options)

    def go_on(self, recovery: Recovery) -> None:
        """Go on without ranks that have died: take a part of their data, and the rate asked for.

        The part is new from the next pass over the training data on, and in tests.
        """
        if self.averager.comm.rank == 0 < self.rank:  # else the log's lines are seen
            complain(str(recovery))
        self.recoveries.append(recovery)
        self.trainers = recovery.size
        batches, self.test = contract.deal(
            *(self.task, self.averager.comm.rank, self.trainers),
            *(self.settings.batch_size, self.settings.seed),
        )
        self.batches.renew(batches)
        if self.settings.survive == "scale":
            local.scale_rates(self.local, self.scheduler, recovery.size / recovery.size_before)
        if self.recovered is not None:
            self.recovered()

    def make_local(self) -> tuple[torch.optim.Optimizer, Any]:
        """Return this rank's local optimizer and its learning-rate scheduler."""
        optimizer = local.make(self.settings, self.task, self.model)
        return optimizer, local.make_scheduler(self.task, optimizer)

    def bound(self, seconds: list[array], limit: float | None) -> float:
        """Return the least wall time of ranks whose steps take this long.

        With a time limit, return the number of steps that they make within it. The steps of a rank
        that has too few, such as one that has skipped iterations, are repeated.
        """
        options = self.options | self.averager.settings
        if limit is None:
            made = [np.resize(each, self.settings.steps) for each in seconds]
            return self.method.bound(np.array(made), options)
        return self.method.bound_of_steps(lasting(seconds, limit), options, limit)

    def steps(self) -> Iterator[dict]:
        """Make steps until the last one or a pause, and yield records as averages are complete.

        The clock is stopped while a model is copied for evaluation.
        """
        if self.started is None:
            self.started = self.clock() - self.earlier
        records, first = deque(), self.made
        while self.goes_on(self.made):
            step, began = self.made, self.clock()
            self.stopwatch.start()
            batches = [next(self.batches) for _ in range(self.settings.accumulate)]
            self.stopwatch.loaded()
            loss, computed = self.compute_gradient(step, batches)
            self.keep_by_time(step)
            self.local.step()
            self.made += 1
            self.stopwatch.averaged()
            self.step_scheduler(self.made)
            record = self.record(step, loss, batches[:computed])
            records.append(record)
            self.keep_by_steps(self.made)
            self.keep_by_time(self.made)
            for result in self.averager.results:
                yield records.popleft() | outcome(result)
            if step > first:  # which may have compiled the model
                self.lasted.append(self.clock() - began)
            if self.pauses is not None and self.pauses.due():
                break
        if records:
            self.averager.complete()
            self.stopwatch.averaged()
            waited = record["waiting_s"]
            record |= self.averaging()
            record["waiting_s"] += waited
            yield record | outcome(self.averager.result)

    def record(self, step: int, loss: float, batches: list) -> dict:
        """Return the metrics of a step: its loss, its work and its times."""
        task = self.task
        self.recorded = {name: of(batches[-1]) for name, of in task.recorded.items()}
        return {
            "step": step,
            "loss": loss,
            "samples": sum(contract.samples(each) or self.settings.batch_size for each in batches),
            "elements": sum(map(contract.elements, batches)),
            "work": None if task.work is None else sum(float(task.work(each)) for each in batches),
            **self.recorded,
            **self.stopwatch.times(),
            **self.averaging(),
        }

    def averaging(self) -> dict[str, float]:
        """Return the times of a step's average so far; of waiting only what is new."""
        waited = self.waited
        self.waited = self.statistics().waiting
        return {
            "average_s": self.stopwatch.average,
            "waiting_s": self.waited - waited,
            "elapsed_s": self.elapsed,
        }

    def statistics(self) -> Any:
        """Return the statistics of the averages so far, also of those before ranks have died."""
        averager = self.averager
        return getattr(averager, "statistics", averager.collective.statistics)()

    @property
    def elapsed(self) -> float:
        """Seconds since the first step began, without those in which a model was copied."""
        return self.clock() - self.started

    def goes_on(self, steps: int) -> bool:
        """Return whether this rank makes another step after this number of steps."""
        if not self.trains:
            return False
        if self.total is not None:
            return self.averager.total_steps < self.total
        if self.settings.seconds is None:
            return self.iteration(steps) < self.settings.steps
        own = self.elapsed < self.settings.seconds
        # torch's own methods cannot continue without a rank.
        any_goes_on = getattr(self.averager, "any_goes_on", None)
        return any_goes_on(own) if any_goes_on else own

    def iteration(self, steps: int) -> int:
        """Return this rank's iteration number after `steps`: higher if it has skipped some."""
        if self.total is not None:
            return self.progress(steps)
        return steps + self.skipped

    @property
    def skipped(self) -> int:
        """The iterations that this rank has skipped, also those that it skipped by a checkpoint.

        From a checkpoint all ranks go on at the iteration of the one that was farthest.
        """
        averaging = self.averager.collective
        return averaging.version - self.made if hasattr(averaging, "skipped") else 0

    @property
    def longest(self) -> float:
        """The seconds of the longest recent step of this job."""
        return max(self.lasted, default=0.0)

    def until_all_end(self) -> AbstractContextManager:
        """Return a block for the steps: `join` if ranks will make different numbers of steps."""
        alike = self.settings.seconds is None and self.total is None and not self.some_idle
        if alike or self.pauses is not None:  # which let ranks join
            return nullcontext()
        return self.averager.join()

    @property
    def total(self) -> int | None:
        """The number of steps of all ranks together with which the training ends; None: no such."""
        return getattr(self.settings, "total_steps", None)

    def progress(self, steps: int) -> int:
        """Return how far the job is after this rank's `steps`, in steps of a rank.

        At their own pace, ranks go by the steps of all of them: their mean, as far as it is known.
        """
        if self.options.get("pace") != "own":
            return steps
        return int(self.averager.total_steps / self.size)

    def step_scheduler(self, steps: int) -> None:
        """Bring the learning rate to where the job is after this rank's `steps`."""
        while self.scheduler is not None and self.scheduled < self.progress(steps):
            self.scheduler.step()
            self.scheduled += 1

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
                self.keep([Kept(steps, elapsed, copy_of(self.model))] * over)

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
                self.keep([Kept(steps, self.next_time(), state)])

    def keep(self, models: list[Kept]) -> None:
        """Keep models for their evaluation after the training."""
        self.kept += models

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

    @property
    def limited(self) -> bool:
        """Whether a step's time limits its batches; the averager then divides their gradients."""
        return self.options.get("compute_limit") is not None

    def compute_gradient(self, step: int, batches: list) -> tuple[float, int]:
        """Compute the gradient, and wait as long as the step is delayed.

        Returns:
            The mean loss, and the number of batches: with a limit not all may begin in time.
        """
        self.local.zero_grad()
        if not self.limited:
            return float(self.compute(step, batches, 1)), len(batches)
        losses = [
            self.compute(step, [batch], len(batches))
            for batch in self.averager.within_limit(batches)
        ]
        return float(sum(losses)) / len(losses), len(losses)

    def compute(self, step: int, batches: list, parts: int) -> torch.Tensor | float:
        """Compute one of the equal parts of a step, with its part of the delays."""
        before = self.stopwatch.compute
        total = self.gradient_of(batches)
        devices.wait_for(self.device)  # else its computation would count as waiting for ranks
        self.sleep(batches, before, parts)
        self.stopwatch.computed()
        self.hold_up(step, self.stopwatch.compute - before, parts)
        return total

    def sleep(self, batches: list, before: float, parts: int) -> None:
        """Sleep in place of an accelerator's work on one of the equal parts of a step.

        Args:
            batches: the part's.
            before: the seconds that the step had computed when the part began.
            parts: the number of the step's parts.
        """
        settings = self.settings
        seconds = settings.step_time_ms / 1000 / parts
        if settings.step_time_per_work_ms:
            seconds += settings.step_time_per_work_ms / 1000 * self.task.work_of(batches)
            self.stopwatch.computed()
            seconds -= self.stopwatch.compute - before
        time.sleep(max(0.0, seconds))

    def gradient_of(self, batches: list) -> torch.Tensor | float:
        """Add the mean gradient on these batches, or with a limit their sum; return the loss."""
        # A method of torch may have wrapped the model in a module, and wait in the backward pass.
        model = getattr(self.averager, "module", self.model)
        backward = getattr(self.averager, "backward", torch.Tensor.backward)
        no_sync = getattr(self.averager, "no_sync", nullcontext)
        total: torch.Tensor | float = 0.0
        for number, batch in enumerate(batches, 1):
            with nullcontext() if number == len(batches) else no_sync():
                loss = self.task.loss(model, batch) / self.divisor(batches)
                waited = backward(loss)
            self.stopwatch.computed(waited or 0.0)
            total += loss.detach()
        return total

    def divisor(self, batches: list) -> int:
        """Return what the losses of a step's batches are divided by."""
        return 1 if self.limited else len(batches)

    def hold_up(self, step: int, seconds: float, parts: int) -> None:
        """Sleep for the time by which the injected imbalance delays a part of this rank's step.

        Args:
            step: the step.
            seconds: the time that the part has taken.
            parts: the number of the step's parts.
        """
        settings = self.settings
        compute = parts * seconds
        drawn = imbalance.delay(
            settings.imbalance, settings.seed, step, self.rank, self.size, compute
        )
        factor = settings.slow_rank.get(self.rank, 1.0)
        slow = imbalance.slow_rank_delay(factor, compute)
        delay = (drawn * settings.imbalance_scale + slow) / parts
        if delay > 0:
            time.sleep(delay)
            self.stopwatch.delayed()


def outcome(result: Any) -> dict:
    """Return the metrics' fields of a `Result`."""
    return {
        "version": result.version,
        "timely": result.timely,
        "source": result.source,
        "synchronized": result.synchronized,
        "group": list(result.group),
    }
