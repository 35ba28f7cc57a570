"""What an averager does where ranks may die, and the others go on: see `survival`."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

import collectives
from collectives import process
from collectives.agreement import is_on_all_ranks
from collectives.result import Result
from collectives.survival import Survivors, rebuilding
from wagma.optim.last_models import LastModels
from wagma.optim.survival import (
    Facts,
    Recovery,
    average,
    describe_lost,
    equalize,
    estates,
)

if TYPE_CHECKING:
    from mpi4py import MPI

    from wagma.optim.averaging import Averaging

log = logging.getLogger(__name__)
T = TypeVar("T")


class NoRecovery:
    """All ranks live, or the job ends."""

    survives = False
    first_size: int | None = None  # the number of ranks at first, if they may die

    def __init__(self, averager: Averaging):
        self._averager: Averaging = weakref.proxy(averager)  # which has this

    def is_behind(self) -> bool:
        """Begin a step's average; return whether the others have made it without this rank."""
        return False

    def average_step(self, call: Callable[[], T]) -> T | None:
        """Return a call's result for the step that `is_behind` has begun.

        After a recovery, which takes the place of the step's average, return None.
        """
        return call()

    def together(self, call: Callable[[], T], own: Any) -> tuple[T | None, Any]:
        """Return the result of a call that averages the models of all ranks.

        After a recovery it is made again, unless another rank had completed it: then the average of
        the recovery takes its place, and the result is None. Returned is also the rank's `own`
        model, from `Averager._save`, which a recovery replaces.
        """
        return call(), own

    def carried_out(self, call: Callable[[], T]) -> T:
        """Return the result of a call in which all ranks communicate outside of steps; collective.

        If ranks die meanwhile, all that live go on without them, and then make it again, also those
        that had completed it. No rank may have joined.

        Args:
            call: uses the averager, and its `comm`.
        """
        return call()

    def taking_part(self) -> Any:
        """Return a block in which the others' steps are taken part in, until all have joined."""
        return self._averager._taking_part()

    def loaded(self) -> None:
        """Note that all ranks go on from a state that they have loaded."""

    def leave(self) -> None:
        """Close the collective; where ranks survive others, until all have."""
        self._averager.collective.close()


class WithRecovery(NoRecovery):
    """The others go on if the process of a rank ends.

    Args:
        averager: the averager, of which all ranks construct this.
        told: is called with each `Recovery`.

    Attributes:
        survivors: the ranks that go on; members: who they are, their ranks at first by those now.
        identity, first_size: this rank at first, and how many there were.
        lets_through: whether errors in calls are not for the call itself to cope with.
        steps, done: those of this rank, and those whose average it has.
        behind: the steps that it makes without an average, to get where others are.
        joins, joined: how many `join` blocks it has left, and how many any rank has.
        completed, others_completed: how many averages of all models outside of steps it has made,
            and how many any rank had at the last recovery.
    """

    survives = True

    def __init__(self, averager: Averaging, told: Callable[[Recovery], object] | None):
        super().__init__(averager)
        self.survivors = Survivors(averager.comm)
        self.members = self._living = list(range(averager.comm.size))
        self.first_size, self.identity = averager.comm.size, averager.comm.rank
        self.lets_through = False
        self._told = told
        self._last = LastModels(self.survivors.comm, self._published)
        self.steps = self.done = self.behind = 0
        self.joins = self.joined = 0
        self.completed = self.others_completed = 0
        self._publish()

    @property
    def _published(self) -> list[torch.Tensor]:
        """The vectors of which the others need a copy if this rank dies."""
        return [] if self._averager._has_equal_models else self._averager._memory

    def _publish(self) -> None:
        """Keep a copy of the rank's vectors that outlives it."""
        self._last.publish(self._published, self.steps)

    def _go_to(self, step: int) -> None:
        """Note that all ranks are at the same step."""
        self.steps = self.done = step
        self.behind = 0

    def is_behind(self) -> bool:
        self.steps += 1
        self._publish()
        if self.behind == 0:
            return False
        self.behind -= 1
        self.done = self.steps
        rank, step = self._averager.collective.rank, self.steps - 1
        self._averager._note(Result(step, False, step, (rank,), 1.0, False))
        return True

    def average_step(self, call: Callable[[], T]) -> T | None:
        result, recovered = self._surviving(call, self._restore_published)
        self.done = self.steps
        if recovered:
            size, step = self._averager.collective.size, self.steps - 1
            self._averager._note(Result(step, True, step, tuple(range(size)), float(size), True))
        return result

    def together(self, call: Callable[[], T], own: Any) -> tuple[T | None, Any]:
        averager = self._averager
        if self.lets_through:
            return call(), own
        own = averager._save() if own is None else own
        result, recovered = self._surviving(call, partial(averager._restore, own))
        while recovered:
            own = averager._save()
            if self.others_completed > self.completed:
                break
            result, recovered = self._surviving(call, partial(averager._restore, own))
        self.completed += 1
        return result, own

    def carried_out(self, call: Callable[[], T]) -> T:
        averager = self._averager
        if self.lets_through or averager.closed:
            return call()
        from mpi4py import MPI

        while True:
            own, got = averager._save(), list[T]()
            error: Exception | None = None
            self.lets_through = True
            try:
                got.append(call())
            except (collectives.RankDiedError, MPI.Exception) as problem:
                log.debug("rank %d: %s", averager.collective.rank, problem)
                averager.collective.abandon()
                self.survivors.revoke()
            except Exception as problem:
                if not is_on_all_ranks(problem):
                    raise
                error = problem
            finally:
                self.lets_through = False
            if self.survivors.agree(bool(got or error)):
                if error is not None:
                    raise error
                return got[0]
            self._recover(partial(averager._restore, own), asked=True)

    def heard(self, bits: int) -> int:
        """Return the bits that any rank says; collective, between steps.

        All that live hear the same, also if ranks die meanwhile.
        """
        while (heard := self.survivors.hear(bits)) is None:
            self._recover(lambda: None, asked=True)
        return heard

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        from mpi4py import MPI

        averager = self._averager
        own = averager._save()
        begun = False
        while self.joined <= self.joins:
            try:
                with averager._taking_part():
                    if not begun:
                        begun = True
                        yield
                break
            except (collectives.RankDiedError, MPI.Exception):
                self._recover(partial(averager._restore, own))
                own = averager._save()
        if not begun:
            yield
        self.joins += 1
        self.joined = self.joins
        self._go_to(averager.collective.version)

    def loaded(self) -> None:
        self._go_to(self._averager.collective.version)
        self._publish()  # a rank may die before its next step

    def leave(self) -> None:
        averager = self._averager
        while not averager.closed and not self.survivors.agree(self._closes()):
            self._recover(partial(averager._restore, averager._save()), asked=True)

    def _closes(self) -> bool:
        """Close the collective, and return whether that has succeeded."""
        try:
            self._averager.collective.close()
        except collectives.RankDiedError:
            return False
        return True

    @torch.no_grad()
    def _restore_published(self) -> None:
        if self._published:
            for vector, own in zip(self._averager._memory, self._last.own, strict=True):
                vector.copy_(own)

    def _surviving(
        self, call: Callable[[], T], restore: Callable[[], None]
    ) -> tuple[T | None, bool]:
        """Return the result of a call; if ranks die meanwhile, go on without them instead.

        Args:
            call: calls the collective.
            restore: puts this rank's own values back into vectors that it has partly averaged.

        Returns:
            The result, None if there was a recovery; and whether there was one.
        """
        if self.lets_through:
            return call(), False
        from mpi4py import MPI

        try:
            return call(), False
        except (collectives.RankDiedError, MPI.Exception) as error:
            log.debug("rank %d: %s", self._averager.collective.rank, error)
        self._recover(restore)
        return None, True

    def _recover(self, restore: Callable[[], None], *, asked: bool = False) -> None:
        """Go on without the ranks that have died, from the average of all models; collective.

        Args:
            restore: see `_surviving`.
            asked: whether the ranks have just agreed to do so.
        """
        began = time.monotonic()
        try:
            recovery = self._go_on(restore, asked)
        except BaseException as error:  # the others would wait for this rank forever
            process.print_cause(error, self._averager.collective.rank)
            process.end_job(self.survivors.comm, 1)
            raise
        recovery = replace(recovery, seconds=time.monotonic() - began)
        if not recovery.dead:  # an agreement can fail although all live, by an error that is late
            log.debug("went on with the same ranks: %s", recovery)
            return
        log.log(logging.INFO if self._averager.comm.rank else logging.WARNING, "%s", recovery)
        if self._told is not None:
            self._told(recovery)

    def _go_on(self, restore: Callable[[], None], asked: bool) -> Recovery:
        """Do what `_recover` says, except telling of it."""
        averager, survivors = self._averager, self.survivors
        size = survivors.comm.size
        averager.collective.abandon()
        survivors.revoke()
        if not asked:
            survivors.agree(False)
        restore()  # only now: the others have written into this rank's vectors until then
        own = [vector.clone() for vector in averager._memory]
        recovery = self._rebuild(own, size)
        while not survivors.agree(recovery is not None):
            recovery = self._rebuild(own, size)
        assert recovery is not None
        self.members = self._living  # no rank of before is asked about again
        self._publish()
        return recovery

    def _rebuild(self, own: list[torch.Tensor], size: int) -> Recovery | None:
        """Average the models of those that live, and make their collective; collective.

        Args:
            own: this rank's vectors.
            size: the number of ranks before.

        Returns:
            None if it has failed because a rank has died meanwhile.
        """
        from mpi4py import MPI

        survivors = self.survivors
        self._averager.collective.abandon()
        survivors.shrink()
        comm = survivors.comm
        try:
            with rebuilding(comm):
                return self._build_again(own, size)
        except (collectives.RankDiedError, MPI.Exception) as error:
            log.debug("recovery on %d ranks: %s", comm.size, error)
            survivors.revoke()
            return None

    def _build_again(self, own: list[torch.Tensor], size: int) -> Recovery:
        """Do what `_rebuild` says, or raise what a collective or MPI raises."""
        averager = self._averager
        comm = self.survivors.comm
        facts, dead = self._gather(getattr(averager, "total_steps", 0.0))
        readers = estates(comm, self._last, dead) if self._published else {}
        newest = self.done == max(each.done for each in facts)
        models = [own] if newest or not averager._has_equal_models else []
        models += [
            last[1]
            for each, (reader, _) in readers.items()
            if reader == comm.rank and (last := self._last.of(each))
        ]
        average(comm, averager._memory, models)
        if averager._has_equal_models:
            equalize(comm, averager.optimizers.given, [each.done for each in facts])
        version = max(each.steps for each in facts)
        total = max(each.total for each in facts)
        self._make_collective(comm)
        averager._go_on_from({"version": version, "total": total, "ranks": comm.size})
        averager._changed()
        for extra in averager._extras:
            extra.joined()
        averager._rebuilt()
        at_own_pace = getattr(averager.collective, "pace", None) == "own"
        self.behind = 0 if at_own_pace else version - self.steps
        self.joined = max(each.joins for each in facts)
        self.others_completed = max(each.completed for each in facts)
        recovery = Recovery(
            tuple(sorted(map(self.members.index, dead))),
            tuple(sorted(map(self.members.index, readers))),
            *(size, comm.size, version, self.behind),
            describe_lost(self.members, dead, readers),
            0.0,
        )
        comm.Barrier()
        return recovery

    def _make_collective(self, comm: MPI.Intracomm) -> None:
        """Give the averager a collective of these ranks; collective."""
        averager = self._averager
        averager.comm = comm
        averager.flat.zeros = averager._make_zeros()
        averager._past.append(averager.collective.statistics())
        arguments = {**averager._arguments, **averager._options}
        if arguments.get("group_size") is not None:
            arguments["group_size"] = min(arguments["group_size"], comm.size)
        averager.collective = averager._make_collective(comm, **arguments)
        averager._excluded = 0
        averager.collective._is_abandoned = True

    def _gather(self, total: float) -> tuple[list[Facts], list[int]]:
        """Return what all ranks tell, and who has died; collective."""
        mine = Facts(self.identity, self.steps, self.done, total, self.joins, self.completed)
        facts = self.survivors.comm.allgather(mine)
        self._living = [each.identity for each in facts]
        return facts, [each for each in self.members if each not in self._living]
