"""The records of one's own loop, in the files of `wagma train`: ``averager.record(directory)``."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from collectives.agreement import raise_collectively
from wagma import devices
from wagma.evaluation import bytes_of
from wagma.info import versions
from wagma.methods import METHODS
from wagma.methods.method import Method, load
from wagma.runs import JsonLines, Tally, summarize, write_json
from wagma.stopwatch import Stopwatch
from wagma.tasks import contract, local
from wagma.trainer import outcome

if TYPE_CHECKING:
    from array import array
    from types import TracebackType

    from typing_extensions import Self

    from collectives.statistics import Statistics
    from wagma.optim.averager import Averager

Batch = TypeVar("Batch")

log = logging.getLogger(__name__)

PATIENCE = 30.0  # seconds after which ranks that do not end a recording are not waited for
MANY = 10**9  # steps, if their number is not known: no loss.png is drawn of them


class Recording:
    """A block in which the steps of an averager are recorded, each rank's in its own file.

    Make it by `averager.record`. The time from one step to the next counts as computing, except
    what `batches` takes. When the averager is closed, rank 0 writes the summary, if all ranks have
    left their blocks without an exception.

    Args:
        averager: the averager, of which all ranks call this.
        directory: for the files; new, the same on all ranks.
        steps: number of steps that each rank will make; None: not known.

    Attributes:
        directory: as given.
    """

    def __init__(self, averager: Averager, directory: str | Path, steps: int | None = None) -> None:
        self.directory, self._averager = Path(directory), averager
        self._tally = Tally(steps or MANY)
        self._steps, self._length = 0, steps
        # Records of steps whose average is not complete, and averages of steps that go on.
        self._waiting: deque[dict[str, Any]] = deque()
        self._results: deque[Any] = deque()
        self._told: dict[str, Any] = {}
        self._ending = self._ended = False

    def __enter__(self) -> Self:
        """Make the directory, and begin to record; collective."""
        averager, comm = self._averager, self._averager.comm
        with averager.averaged():  # ranks come here while others still make steps
            pass
        device = averager.flat.device
        placed = devices.record(device, comm, averager.collective)
        self._together(self._make_directory)
        self._together(self._make_files, placed)
        self._before = averager.statistics()
        self._waited = self._before.waiting
        self._started = time.perf_counter()
        self._stopwatch = Stopwatch(averager.optimizers.given, device)
        averager._recording = self
        averager._recorded.append(self)
        return self

    def _together(self, make: Callable[..., None], *arguments: Any) -> None:
        """Make files on every rank, or raise on all what has failed on one; collective."""
        error: Exception | None = None
        try:
            make(*arguments)
        except OSError as problem:
            error = type(problem)(f"cannot make {self.directory}: {problem.strerror}")
        except Exception as problem:  # else the others would wait for this rank
            error = problem
        raise_collectively(self._averager.comm, error)

    def _make_directory(self) -> None:
        if self._averager.comm.rank == 0:
            self.directory.mkdir(parents=True)

    def _make_files(self, placed: dict[str, Any]) -> None:
        rank = self._averager.comm.rank
        self.directory.mkdir(parents=True, exist_ok=True)  # where disks are not shared
        if rank == 0:
            write_json(self.directory / "config.json", self._configuration(placed))
        self._file = JsonLines(self.directory / f"rank-{rank:04}.jsonl")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the recording, which keeps what was recorded until then."""
        try:
            if kind is None:
                self._complete()
                self._ended = True
        finally:
            self._averager._recording = None
            self._stopwatch.close()
            self._file.close()

    def batches(self, iterable: Iterable[Batch]) -> Iterator[Batch]:
        """Iterate over batches, and record each one's samples, elements and time to load.

        Args:
            iterable: of tensors or arrays, or of tuples, lists or dicts of these.

        Returns:
            An iterator over the same batches.
        """
        batches = iter(iterable)
        while True:
            self._stopwatch.computed()
            batch = next(batches, self)
            self._stopwatch.loaded()
            if batch is self:
                return
            samples, elements = contract.samples(batch) or 0, contract.elements(batch)
            self._told["samples"] = self._told.get("samples", 0) + samples
            self._told["elements"] = self._told.get("elements", 0) + elements
            yield batch  # type: ignore[misc]

    def note(self, **fields: float) -> None:
        """Add numbers to the record of the next step: `loss`, `samples`, `work`, or any other.

        Args:
            **fields: by name, whatever `float` takes; `work` is how much work the step is, in any
                unit, if steps differ.
        """
        for name, value in fields.items():  # a tensor would keep what it was computed from
            self._told[name] = value if isinstance(value, int) else float(value)

    # What the averager calls

    def step_begins(self) -> None:
        """Count the time since the last step as this rank's own work, except waiting in it."""
        waited = self._averager.statistics().waiting - self._waited
        self._stopwatch.computed(waited)

    def step_ends(self, loss: Any) -> None:
        """Record a step whose average is complete, and keep the others' records until theirs are.

        Args:
            loss: what a closure has returned, or None.
        """
        self._stopwatch.averaged()
        value = loss.detach() if isinstance(loss, torch.Tensor) else loss
        known: dict[str, Any] = {"loss": math.nan if value is None else float(value)}
        known |= {"samples": 0, "elements": 0, "work": None}
        self._waiting.append(
            {
                **(known | self._told),
                "step": self._steps,
                **self._stopwatch.times(),
                **self._averaging(),
            }
        )
        self._steps += 1
        self._told = {}
        self._write_complete()
        self._stopwatch.start()

    def completed(self, result: Any) -> None:
        """Note that a step's average is complete, maybe before the step ends.

        Args:
            result: the call's `collectives.Result`.
        """
        self._results.append(result)
        if not self._ending:
            self._write_complete()

    def finish(self) -> None:
        """Gather what the ranks have recorded, and write the summary; collective.

        Ranks that do not come, because they have failed or never close, are not waited for long.
        """
        comm = self._averager.comm
        arrived, began = comm.Ibarrier(), time.monotonic()
        while not arrived.Test():
            if time.monotonic() - began > PATIENCE:
                log.warning("no summary of %s: not all ranks have ended it", self.directory)
                return
            time.sleep(0.001)
        gathered = comm.gather(self._tally if self._ended else None) or ()
        tallies = [each for each in gathered if each is not None]
        if len(tallies) == comm.size and any(each.steps for each in tallies):
            summary = summarize(tallies, self._bound)
            nothing: dict[str, list[Any]] = {"metrics": [], "evaluations": []}
            write_json(self.directory / "summary.json", summary | nothing)

    # Its parts

    def _complete(self) -> None:
        """Complete the last average, and take over the collective's statistics."""
        self._stopwatch.computed()
        self._ending = True
        self._averager.complete()
        self._stopwatch.averaged()
        if self._waiting:
            last, rest = self._waiting[-1], self._averaging()
            for name in ("average_s", "waiting_s"):
                rest[name] += last[name]
            last |= rest
        self._write_complete()
        self._tally.add_averaging(since(self._before, self._averager.statistics()))

    def _averaging(self) -> dict[str, float]:
        """Return the times of a step's average so far; of waiting only what is new."""
        before, self._waited = self._waited, self._averager.statistics().waiting
        return {
            "average_s": self._stopwatch.average,
            "waiting_s": self._waited - before,
            "elapsed_s": time.perf_counter() - self._started,
        }

    def _write_complete(self) -> None:
        """Write the records of steps whose averages are complete."""
        while self._waiting and self._results:
            record = self._waiting.popleft() | outcome(self._results.popleft())
            self._file.write(record)
            self._tally.add(record)

    def _configuration(self, placed: dict[str, Any]) -> dict[str, Any]:
        """Return everything that is known of the run."""
        averager, method = self._averager, method_of(self._averager)
        return {
            "algorithm": type(averager).__name__ if method is None else method.name,
            "name": self.directory.name,
            "ranks": averager.comm.size,
            "steps": self._length,
            "seconds": None,
            "model_bytes": bytes_of(averager.flat.model),
            **placed,
            **averager.settings,
            "local_optimizer": local.described(*averager.optimizers.given),
            "versions": versions(),
        }

    def _bound(self, seconds: list[array[float]], limit: float | None) -> float:
        """Return the least wall time of ranks whose steps take this long; NaN if not known."""
        method = method_of(self._averager)
        if method is None:
            return math.nan
        steps = max(map(len, seconds))
        made = np.array([np.resize(each, steps) for each in seconds])
        return method.bound(made, method.resolved(self._averager.settings))


def since(before: Statistics, now: Statistics) -> Statistics:
    """Return the statistics of what was between two calls, except counts of calls."""
    ages = zip_longest(now.staleness, before.staleness, fillvalue=0)
    return now._replace(
        waiting=now.waiting - before.waiting,
        communicating=now.communicating - before.communicating,
        bytes_sent=now.bytes_sent - before.bytes_sent,
        left_out=now.left_out - before.left_out,
        staleness=tuple(new - old for new, old in ages),
    )


def method_of(averager: Averager) -> Method | None:
    """Return the method whose averager it is, None for a class of the user's own."""
    kind = type(averager)
    alike = [each for each in METHODS.values() if each.averager.endswith(f".{kind.__name__}")]
    return next((each for each in alike if load(each.averager) is kind), None)
