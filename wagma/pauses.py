"""When all ranks of a training pause together, to save a checkpoint, to stop, or at the end.

Ranks tell each other by rounds: in each, every rank says what it wishes and whether it still makes
steps, and all learn the same. A round is an operation of MPI that nobody waits for while it makes
steps. Where all ranks average every few steps they say so after each such average, and read it
after the next one, so that all pause after the same step. Otherwise, and where such averages take
long to come, each pauses after its own step, and takes part in the others' until all have.
"""

from __future__ import annotations

import argparse
import enum
import functools
import math
import operator
import os
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

import collectives
from wagma.arguments import Every
from wagma.job import Signals
from wagma.optim.joining import join_blocks

if TYPE_CHECKING:  # importing it initializes MPI
    from mpi4py import MPI

    from wagma.trainer import Trainer

NEAR = 90.0  # seconds before Slurm ends the job, besides some steps and writing, to stop it
STUCK = 30.0  # seconds in which a rank has to stop, besides some steps
STOPPING = 3  # steps in which all ranks have stopped: the present one, and those of a round
RARE = 5.0  # seconds between common averages after which ranks do not wait for the next one
LOOK_EVERY = 0.001  # seconds between two looks of a rank that waits for others
AWAKE = 100  # looks before it sleeps
END_TIME = "SLURM_JOB_END_TIME"


class Said(enum.IntFlag):
    """What ranks say in a round, all together."""

    SAVE = 1
    STOP = 2
    GOING = 4  # a rank still makes steps
    AT_COUNT = 8  # a rank has made the steps after which all save


WISHES = Said.SAVE | Said.STOP


class Rounds:
    """The rounds in which ranks tell each other what they wish.

    Args:
        comm: of all ranks; it is duplicated.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        from mpi4py import MPI

        self._comm, self._operation = comm.Dup(), MPI.BOR
        self._mine, self._all = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self._request: MPI.Request | None = None

    def say(self, what: Said) -> None:
        """Begin this rank's part in the next round."""
        self._mine[0] = what
        self._request = self._comm.Iallreduce(self._mine, self._all, op=self._operation)

    def heard(self) -> Said | None:
        """Return what all have said, once all have; None: not yet, or nothing was said."""
        if self._request is None or not self._request.Test():
            return None
        self._request = None
        return Said(int(self._all[0]))

    def wait(self) -> Said | None:
        """Return what all have said in the round that was begun, asleep if that takes long."""
        looks = 0
        while self._request is not None:
            if (heard := self.heard()) is not None:
                return heard
            looks += 1
            time.sleep(LOOK_EVERY * (looks > AWAKE))
        return None

    @property
    def begun(self) -> bool:
        """Whether this rank is in a round."""
        return self._request is not None


class Pauses:
    """One rank's part in the pauses of a training.

    Args:
        trainer: the rank's.
        comm: the ranks that train together.
        signals: which may stop the training.
        settings: the command line's.

    Attributes:
        saved_steps: steps of this rank before the last checkpoint.
        writing: seconds that the checkpoint of this job took which took longest to be written.
    """

    def __init__(
        self, trainer: Trainer, comm: MPI.Comm, signals: Signals, settings: argparse.Namespace
    ) -> None:
        self.trainer, self.signals = trainer, signals
        self.every: Every = settings.checkpoint_every or Every()
        self.writing = 0.0
        self._limit, self._end = limit_of(settings, signals.began), end_of_job()
        self._comm, self._rounds = comm, Rounds(comm)
        self._period = common_period(trainer)
        self._alike = makes_equal_steps(trainer)
        self.saved()

    def said_by_all(self, mine: Said) -> Said:
        """Return what ranks say, each something, all together; collective."""
        said: Said = functools.reduce(operator.or_, self._comm.allgather(mine))
        return said

    def _count_anew(self) -> None:
        self._saved_at, self.saved_steps = time.monotonic(), self.trainer.made
        self._together_at = self._saved_at  # when all ranks were together last
        self._agreed: Said | None = None

    def saved(self) -> None:
        """Count steps and seconds from now on until the next checkpoint; collective."""
        self._count_anew()
        if len(set(self._comm.allgather(self.trainer.made))) > 1:  # so that ranks end apart
            self._alike, self._period = False, None

    @property
    def stopping(self) -> float:
        """Seconds of the steps until all ranks have stopped."""
        return STOPPING * self.trainer.longest

    @property
    def deadline(self) -> float:
        """When the training is to stop, as `time.time` has it."""
        return min(self._limit, self._end - NEAR - self.stopping - self.writing)

    @property
    def is_due(self) -> bool:
        """Whether the training is to stop because its time is over."""
        return time.time() >= self.deadline

    @property
    def patience(self) -> float:
        """Seconds in which a rank that is to stop has to come out of its steps."""
        return STUCK + self.stopping

    @property
    def wish(self) -> Said:
        """What this rank wishes now."""
        wish = Said(0)
        if self.signals.received or self.is_due:
            wish |= Said.STOP
        since = time.monotonic() - self._saved_at
        # One rank measures, so that all mean the same time.
        seconds = self.every.seconds if self.trainer.averager.comm.rank == 0 else None
        if seconds is not None and since >= seconds:
            wish |= Said.SAVE
        steps = self.trainer.made - self.saved_steps
        if self.every.steps is not None and not self._alike and steps >= self.every.steps:
            wish |= Said.SAVE
        return wish

    def due(self) -> bool:
        """Return whether this rank pauses after the step that it has made."""
        if self.at_count():
            return True
        together = self._period and not self.trainer.averager.collective.version % self._period
        since, now = self._together_at, time.monotonic()
        if together:  # where all are, and none waits long however rare it is
            self._together_at = now
            self._take_part(self._rounds.wait())
        elif not self._period or now - since > RARE:
            self._take_part(self._rounds.heard())
        return self._agreed is not None

    def _take_part(self, heard: Said | None) -> None:
        """Note what all have said, if anyone wishes something; else take part in the next round."""
        if heard is not None and heard & WISHES:
            self._agreed = heard
        elif not self._rounds.begun:
            self._rounds.say(self.wish | Said.GOING)

    def at_count(self) -> bool:
        """Return whether all ranks save after this rank's present step."""
        trainer, every = self.trainer, self.every.steps
        if every is None or not self._alike or trainer.made == self.saved_steps:
            return False
        return trainer.made % every == 0 and trainer.goes_on(trainer.made)

    def meet(self) -> Said:
        """Wait until all ranks pause, and return why: 0 if they have made all steps; collective.

        Meanwhile this rank takes part in the steps of others that go on.
        """
        with ExitStack() as joined:
            if self._period is None:
                self._join(joined)
            agreed = self._agreed or self._until_all_pause()
            if self._period is not None and agreed & WISHES:
                self._join(joined)
        return agreed

    def _join(self, joined: ExitStack) -> None:
        """Take part in others' steps from now on; wait for them when `joined` is closed."""
        joined.enter_context(join_blocks.enter())
        with self.trainer.averager.join():
            pass

    def _until_all_pause(self) -> Said:
        """Take part in rounds until all ranks pause."""
        place = Said.AT_COUNT if self.at_count() else Said(0)
        while True:
            if not self._rounds.begun:
                self._rounds.say(self.wish | place)
            heard = self._rounds.wait()
            assert heard is not None
            if heard & WISHES or not heard & Said.GOING:
                return heard


class PausesOfSurvivors(Pauses):
    """The pauses of ranks that go on without others, and make equal steps.

    All agree, by what survives deaths, after each of their common averages, in which they have
    waited for each other anyway; and when they pause. So they always pause after the same step.
    """

    def said_by_all(self, mine: Said) -> Said:
        """Return what ranks say, each something, all together; collective."""
        return Said(self.trainer.averager._recovery.heard(int(mine)))

    @property
    def stopping(self) -> float:
        """Seconds of the steps until all ranks have stopped, after their next common average."""
        return (STOPPING + (self._period or 0)) * self.trainer.longest

    def saved(self) -> None:
        """Count steps and seconds from now on until the next checkpoint."""
        self._count_anew()

    def due(self) -> bool:
        """Return whether this rank pauses after the step that it has made."""
        if self.at_count():
            return True
        # After a recovery a rank makes steps of which others have made the averages.
        if self._period and not self.trainer.made % self._period:
            heard = self.said_by_all(self.wish | Said.GOING)
            self._agreed = heard if heard & WISHES else None
        return self._agreed is not None

    def meet(self) -> Said:
        """Return why all ranks pause after this step: 0 if they have made all; collective."""
        if self._agreed is not None:
            return self._agreed
        return self.said_by_all(self.wish | (Said.AT_COUNT if self.at_count() else Said(0)))


def limit_of(settings: argparse.Namespace, began: float) -> float:
    """Return when the time of `--time-limit` is over, as `time.time` has it.

    Args:
        settings: the command line's, with `time_limit` in seconds or None.
        began: when the command began, as `time.monotonic` has it.
    """
    if settings.time_limit is None:
        return math.inf
    limit: float = settings.time_limit
    return time.time() - time.monotonic() + began + limit


def end_of_job() -> float:
    """Return when Slurm ends the job, as `time.time` has it."""
    end = os.environ.get(END_TIME, "")
    return int(end) if end.isdigit() else math.inf


def makes_equal_steps(trainer: Trainer) -> bool:
    """Return whether all ranks make the same number of steps."""
    options: dict[str, Any] = trainer.options
    skips = options.get("max_skip") or 0
    by_steps = trainer.settings.seconds is None and trainer.total is None
    return by_steps and not trainer.some_idle and skips <= 1


def common_period(trainer: Trainer) -> int | None:
    """Return after how many steps all ranks average, each time after the same step; None: never."""
    averaging: Any = trainer.averager.collective
    if not makes_equal_steps(trainer) or isinstance(averaging, collectives.TriggeredAverage):
        return None
    if getattr(averaging, "pace", "common") != "common":
        return None
    period: int | None = getattr(averaging, "sync_period", None)
    return period
