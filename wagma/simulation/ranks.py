"""The ranks of a job in one process: a thread each, of which one runs at a time, in simulated time.

A rank runs what a process of the job would run, such as a training, with a communicator of this
module. It gives up its turn when it computes, waits in a call of a collective, or waits for other
ranks; `Simulation` says when it has the next one.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from wagma.simulation import steps
from wagma.simulation.core import Method, Simulation
from wagma.simulation.generators import Generators, undrawn
from wagma.simulation.machine import Machine

__all__ = ["Communicator", "Ranks", "TimeIsOver"]

T = TypeVar("T")
M = TypeVar("M", bound=Method)


PAUSE = 1e-3  # seconds between two looks whether an interrupted turn has ended
SOON = 0.5  # seconds in which a turn begins that was given


class TimeIsOver(BaseException):
    """The simulated time of the job is over: ranks compute and average no more."""


class Stopped(BaseException):
    """The job ends early, because of an error or a signal: every rank's thread raises it."""


@dataclass(frozen=True)
class Job:
    """What ranks run on.

    Attributes:
        machine: the `Machine`.
        step_times: float64 array of shape (steps, ranks): seconds of each rank's steps.
        seconds: simulated seconds after which no rank goes on; None: when all have ended.
        nbytes: length of the model, in bytes, that averages are to take the time of; None: that of
            the vectors averaged.
        absolute: whether `step_times` are the times at which steps end, unless they begin later.
        seconds_per_work: seconds that a step takes longer for each unit of its batches' work, as
            the task tells it.

    Raises:
        ValueError: steps cannot take these times, or end before the job does.
    """

    machine: Machine
    step_times: np.ndarray
    seconds: float | None = None
    nbytes: int | None = None
    absolute: bool = False
    seconds_per_work: float = 0.0

    def __post_init__(self) -> None:
        steps.check(self.step_times)
        if not 0 <= self.seconds_per_work < math.inf:
            raise ValueError(
                f"seconds_per_work must be finite, and 0 or more, not {self.seconds_per_work}"
            )
        if self.seconds is not None and not (self.step_times.sum(axis=0) >= self.seconds).all():
            rank = self.step_times.sum(axis=0).argmin()
            raise ValueError(f"the steps of rank {rank} take less than {self.seconds:g} s")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.step_times.shape[1]


def taken() -> threading.Lock:
    """Return a lock that is taken."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Ranks(Generic[T]):
    """The ranks of a job, which `run` starts.

    Attributes:
        job: the `Job`.
        simulation: the `Simulation`, once the ranks have made a collective; else None.
        over: whether the simulated time is over.
        answer: function that is called when a rank's step ends, with the rank, and the work of all
            that compute as a dict by rank; it may do some of it. None: ranks do it themselves.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.size = job, job.size
        self.simulation: Simulation | None = None
        self.over = False
        self.answer: Callable[[int, dict[int, Any]], None] | None = None
        self._work: dict[int, Any] = {}
        # The simulation reads a step's time when it begins, and this array until then.
        self._step_times = np.array(job.step_times, np.float64, order="C")
        self._steps_begun = [0] * self.size
        # Locks as signals: one wakes each rank's thread, and one the thread that gives turns.
        self._turns = [taken() for _ in range(self.size)]
        self._back = taken()
        self._begun = self._ended_turns = 0
        self._ready: deque[int] = deque()
        self._ended = [False] * self.size
        self._results: list[T | None] = [None] * self.size
        self._error: BaseException | None = None
        self._stopping = False
        self._generators = [Generators() for _ in range(self.size)]
        self._drawing = -1
        self._values: list[Any] = [None] * self.size
        self._arrived = self._meeting = 0
        self._gathered: list[list[Any]] = [[]] * self.size

    def run(self, function: Callable[[Communicator], T]) -> list[T]:
        """Call a function on every rank with its communicator; return what they return, by rank.

        Raises:
            RuntimeError: ranks wait for something that will not happen.
            BaseException: what the function has raised on a rank first.
        """
        threads = [
            threading.Thread(target=self._live, args=(rank, function), daemon=True)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        with undrawn(), self._hearing_of_errors():
            try:
                self._run_all()
            finally:
                self._stop()
                for thread in threads:
                    thread.join()
        return self._results  # type: ignore[return-value]

    def _run_all(self) -> None:
        self._ready.extend(range(self.size))
        self._give_turns()
        if self.simulation is not None:
            try:
                self.simulation.run()
            finally:
                if self._error is not None:
                    raise self._error
            self.over = True
        waiting = [rank for rank in range(self.size) if not self._ended[rank]]
        self._ready.extend(rank for rank in waiting if rank not in self._ready)
        self._give_turns()
        waiting = [rank for rank in range(self.size) if not self._ended[rank]]
        if waiting:
            raise RuntimeError(f"{len(waiting)} of {self.size} ranks wait for others, which end")

    def _live(self, rank: int, function: Callable[[Communicator], T]) -> None:
        """Run a rank, in its thread."""
        self._begin_turn(rank)
        try:
            if not self._stopping:
                self._results[rank] = function(Communicator(self, rank))
        except Stopped:
            pass
        except BaseException as error:
            if hasattr(error, "add_note"):  # since Python 3.11
                error.add_note(f"raised on simulated rank {rank}")
            self._error = self._error or error
        self._ended[rank] = True
        if self.simulation is not None and not self.over:
            self.simulation.finish(rank)
        self._end_turn()

    def _stop(self) -> None:
        """Let every thread that has not ended raise `Stopped`, until it has."""
        self._stopping = True
        for rank in range(self.size):
            while not self._ended[rank]:
                self._take_turn(rank)

    @contextlib.contextmanager
    def _hearing_of_errors(self) -> Iterator[None]:
        """Note errors in compiled functions that cannot raise, which Python would only print."""

        def note(raised: sys.UnraisableHookArgs) -> None:
            self._error = self._error or raised.exc_value

        before, sys.unraisablehook = sys.unraisablehook, note
        try:
            yield
        finally:
            sys.unraisablehook = before

    # Turns

    def _give_turns(self) -> None:
        """Give turns to the ranks that can go on, until none can."""
        while self._ready:
            self._give_turn(self._ready.popleft())

    def _give_turn(self, rank: int) -> None:
        """Let a rank run until it waits or has ended; raise the first error of any."""
        self._draw_as(rank)
        self._take_turn(rank)
        if self._error is not None:
            raise self._error

    def _take_turn(self, rank: int) -> None:
        begun = self._begun
        try:
            self._turns[rank].release()
            self._back.acquire()
        except BaseException:  # of a signal handler: a turn that was given goes on until its end
            if not self._turns[rank].acquire(blocking=False):
                limit = time.monotonic() + SOON
                while self._begun == begun and time.monotonic() < limit:
                    time.sleep(PAUSE)
                while self._ended_turns < self._begun:
                    time.sleep(PAUSE)
            self._back.acquire(blocking=False)
            raise

    def _begin_turn(self, rank: int) -> None:
        self._turns[rank].acquire()
        self._begun += 1

    def _end_turn(self) -> None:
        self._ended_turns += 1
        self._back.release()

    def _draw_as(self, rank: int) -> None:
        """Continue from the states of a rank's generators."""
        if self._drawing == rank:
            return
        if self._drawing >= 0:
            self._generators[self._drawing].save()
        self._generators[rank].restore()
        self._drawing = rank

    def wait(self, rank: int) -> None:
        """Give up a rank's turn, in its thread, until it has the next one.

        Raises:
            TimeIsOver: the simulated time is over.
        """
        over = self.over
        self._end_turn()
        self._begin_turn(rank)
        if self._stopping:
            raise Stopped
        if self.over and not over:
            raise TimeIsOver

    # What a rank does in its turn

    def now(self) -> float:
        """Return the simulated time, in seconds."""
        return 0.0 if self.simulation is None else self.simulation.now

    def compute(self, rank: int, work: Any = None, longer: float = 0.0) -> None:
        """Compute the next step, at whose end the work may be done: see `answer`.

        Args:
            rank: which one.
            work: what `answer` is given.
            longer: seconds that the step takes in addition to its time in the job.

        Raises:
            TimeIsOver: the simulated time is over before that.
        """
        if self.over:
            raise TimeIsOver
        assert self.simulation is not None, "a job without a collective has no time"
        self._work[rank] = work
        step = self._steps_begun[rank]
        self._steps_begun[rank] += 1
        if step < len(self._step_times):  # else the simulation refuses it, or its time is over
            self._step_times[step, rank] += longer
        self.simulation.compute(rank)
        try:
            self.wait(rank)
        finally:
            del self._work[rank]

    def enter(self, rank: int) -> Simulation:
        """Begin to wait in a call, or for one; return the simulation, whose event will end that.

        Raises:
            TimeIsOver: the simulated time is over.
        """
        if self.over:
            raise TimeIsOver
        assert self.simulation is not None
        self.simulation.enter(rank)
        return self.simulation

    def gather(self, rank: int, value: Any) -> list[Any]:
        """Wait until all ranks have called this function; return all values, by rank."""
        self._values[rank] = value
        self._arrived += 1
        meeting = self._meeting
        if self._arrived < self.size:
            while meeting == self._meeting:
                with contextlib.suppress(TimeIsOver):
                    self.wait(rank)
        else:
            self._arrived = 0
            self._meeting += 1
            everything = list(self._values)
            for other in range(self.size):
                self._gathered[other] = everything
                if other != rank:
                    self._ready.append(other)
        return self._gathered[rank]

    def method(self, kind: type[M], make: Callable[[], M]) -> M:
        """Return the method that the ranks' collective is; the first rank makes it, for all.

        Raises:
            NotImplementedError: they have made another one already.
        """
        if self.simulation is None:
            job = self.job
            self.simulation = Simulation(
                make(), job.machine, self._step_times, job.seconds, self, job.absolute
            )
        method = self.simulation.method
        if not isinstance(method, kind):
            raise NotImplementedError("a simulated job has one collective")
        return method

    # Events of the simulation

    def computed(self, rank: int) -> None:
        """Let a rank go on, whose step has ended."""
        if self.answer is not None and self._work[rank] is not None:
            self.answer(rank, self._work)
        self._go_on(rank)

    def returned(self, rank: int) -> None:
        """Let a rank go on, whose call has returned."""
        self._go_on(rank)

    def _go_on(self, rank: int) -> None:
        self._give_turn(rank)
        self._give_turns()


class Communicator:
    """What a rank of a simulated job has in place of an mpi4py intracommunicator.

    It offers the operations that setting up and ending a training need; they take no time.

    Attributes:
        rank, size: this rank, and how many there are.
        place: see `collectives.process.place_of`.
        ranks: the `Ranks`.
    """

    def __init__(self, ranks: Ranks[Any], rank: int) -> None:
        from wagma.simulation.parts import Place

        self.ranks, self.rank, self.size = ranks, rank, ranks.size
        self.place = Place(self)
        self.handle = id(self)

    def Get_rank(self) -> int:
        """Return this rank."""
        return self.rank

    def Get_size(self) -> int:
        """Return the number of ranks."""
        return self.size

    def Get_attr(self, key: int) -> int:
        """Return the largest tag."""
        return 1 << 20

    def Dup(self) -> Communicator:
        """Return this communicator: nothing is sent by it that could be confused."""
        return self

    def Free(self) -> None:
        """Do nothing."""

    def Iprobe(self, source: int, tag: int) -> bool:
        """Return that no message has arrived."""
        return False

    def Barrier(self) -> None:
        """Wait for all ranks."""
        self.ranks.gather(self.rank, None)

    def Ibarrier(self) -> Communicator:
        """Return a request whose `Test` waits for all ranks."""
        return self

    def Test(self) -> bool:
        """Wait for all ranks, and return True."""
        self.Barrier()
        return True

    def allgather(self, value: Any) -> list[Any]:
        """Return every rank's value."""
        return list(self.ranks.gather(self.rank, value))

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        """Return every rank's value on one rank."""
        values = self.allgather(value)
        return values if self.rank == root else None

    def bcast(self, value: Any = None, root: int = 0) -> Any:
        """Return one rank's value, the same object on every rank."""
        return self.allgather(value)[root]

    def allreduce(self, value: Any) -> Any:
        """Return the sum of every rank's value."""
        return sum(self.allgather(value))

    def Bcast(self, array: np.ndarray, root: int = 0) -> None:
        """Copy one rank's array to every rank's."""
        source = self.allgather(array)[root]
        if self.rank != root:
            array[...] = source
        self.Barrier()
