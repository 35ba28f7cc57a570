"""What a rank does in formed groups where an exception ends its call, or it averages meanwhile."""

from __future__ import annotations

import numpy as np
import pytest
from formed_groups import Arrays, PlannedGroups, World, group_rank, source
from protocol_messages import contribution, rank_protocol

X = contribution.X

# An interrupted call


class Interrupted(World):
    """Ranks of `PlannedGroups`, of which rank 0 is interrupted in its first call, at any time.

    From then on its application changes its vector to 7 at once, and calls again when it may.
    """

    def __init__(self, in_place, driven):
        plan = [[(0, (0, 1), (3, 1)), (1, (0, 2))], [(2, (0, 1, 2))]]
        super().__init__(3, 2, give, PlannedGroups, driven=driven, plan=plan)
        for port in self.ports:
            port.in_place = in_place
        self.own, self.interruptions = None, 1

    def events(self):
        yield from super().events()
        first = self.protocols[0].calls == 0
        if first and self.interruptions and self.ports[0].driven.present:
            yield self._interrupt, 0

    def _interrupt(self, rank):
        port = self.ports[rank]
        port.driven.interrupt()
        self.interruptions = 0
        self.own = port.vectors.of[X] = np.array([7.0])

    def possible(self):
        """Return what can happen, and see that nothing writes to what the application has."""
        port = self.ports[0]
        if self.own is not None and not port.driven.present and self.protocols[0].calls < 2:
            np.testing.assert_array_equal(port.vectors.of[X], self.own)
        return super().possible()

    def key(self):
        driven = [
            {name: value for name, value in vars(port.driven).items() if isinstance(value, int)}
            for port in self.ports
        ]
        vectors = [list(map(float, np.ravel(port.vectors.of))) for port in self.ports]
        return super().key() + repr((driven, vectors, self.interruptions, self.means))

    def check_end(self):
        if self.interruptions:
            return
        second = 7, (3 * 4 + 8) / 4, ((3 * 4 + 8) / 4 + 12) / 2
        for port in self.ports:
            np.testing.assert_allclose(port.vectors.of[X], sum(second) / 3, rtol=1e-14)


def give(rank, call):
    """What the application begins with; it changes it only where it is interrupted."""
    return np.array([4.0 * rank + 4 if call < 0 else 0.0])


def explore_interruptions(driven):
    for in_place in (False, True):
        assert Interrupted(in_place, driven).explore() > 100


# One rank, whose exchanges have the means that the test says


class One(source.GroupProtocol):
    """Requests what the test says."""

    def __init__(self, port, passive):
        super().__init__(port, 0, 2)
        self.passive = passive


class Bench(group_rank.GroupRankPort):
    """One of two ranks, and its application, which has one number.

    Attributes:
        given: what the last average took from the rank, and its weight; None without weight.
    """

    def __init__(self, driven, passive=False, in_place=False, start=1.0):
        self.requests, self.in_place = [], in_place
        self.vectors = Arrays([start])
        self.driven = driven(self.vectors, 2)
        self.driven.attach(self, One(self, passive))
        self.driven.begin()

    def under_way(self, group):
        group.clear(0)
        group.add(0, 1.0)
        group.add(1, 1.0)
        return True

    def requested(self):
        return self.requests[0] if self.requests else rank_protocol.WAIT

    def finish(self):
        del self.requests[0]

    def is_under_way(self):
        return bool(self.requests)

    def now(self):
        return 0

    def begin_pass(self, step, moves):
        assert moves or step == rank_protocol.RETURN

    def end_pass(self, step, moves):
        return True

    def is_here(self):
        return True

    knows_finite = is_here

    def is_in_place(self):
        return self.in_place

    def begin_average(self, number):
        driven = self.driven
        vector = driven.target if self.in_place else X if driven.lent else driven.source
        self.given = self.vectors.of[vector][0] if driven.weight else None
        if not (driven.weight or self.in_place):
            assert self.vectors.of[vector][0] == 0

    def is_exchanged(self):
        return self.mean is not None

    def total_weight(self):
        if self.driven.target != contribution.NOWHERE:
            self.vectors.of[self.driven.target] = np.array([self.mean])
        return 1

    def changed(self):
        pass

    def executed(self, number):
        pass

    def returns(self, in_group):
        pass

    def adopt(self):
        self.vectors.copy(contribution.SCRATCH, X)

    def redirect(self):
        pass

    # What tests do

    def call(self, value):
        self.vectors.of[X] = np.array([value])
        self.driven.call()

    def begin(self):
        """Begin an average, and return what it takes from the rank."""
        self.requests.append(rank_protocol.CONTRIBUTE)
        self.mean = None
        self.driven.advance()
        assert self.driven.begun
        return self.given

    def end(self, mean):
        self.mean = mean
        self.driven.advance()
        assert not self.driven.begun

    def average(self, mean):
        given = self.begin()
        self.end(mean)
        return given

    def interrupt(self, value):
        """Interrupt the call; the application goes on with another value."""
        self.driven.interrupt()
        self.vectors.of[X] = np.array([value])

    def complete(self):
        self.requests.append(rank_protocol.RETURN)
        self.driven.advance()
        assert self.driven.done
        assert not self.driven.is_busy()
        return self.vectors.of[X][0]


def check_passive(driven):
    """What averages change while the application computes is added in its next call."""
    for in_place in (False, True):
        rank = Bench(driven, True, in_place)
        assert rank.average(3.0) == 1
        assert rank.average(5.0) == 3
        rank.call(2.0)  # it has added 1 meanwhile
        assert rank.average(10.0) == 6
        assert rank.complete() == 10
        assert rank.average(20.0) == 10
        rank.call(11.0)
        assert rank.complete() == 21
        assert rank.driven.changed
        assert (rank.driven.averages, rank.driven.passive) == (4, 3)


def check_interrupted_passive(driven):
    """After an interrupted call the rank averages what that ended with, and adds none of it."""
    for in_place in (False, True):
        rank = Bench(driven, True, in_place)
        rank.call(2.0)
        rank.begin()
        rank.interrupt(100.0)
        rank.end(10.0)
        assert rank.average(20.0) == 10
        assert rank.complete() == 100
        assert rank.average(30.0) == 20
        rank.call(101.0)
        assert rank.average(50.0) == 101
        assert rank.complete() == 50
        assert rank.average(60.0) == 50
        rank.call(51.0)
        assert rank.complete() == 61


def check_interrupted_meanwhile(driven):
    """A call that is interrupted while its rank still averages outside it keeps its vector."""
    for in_place in (False, True):
        rank = Bench(driven, True, in_place)
        assert rank.begin() == 1
        rank.call(2.0)
        rank.interrupt(100.0)
        rank.end(3.0)
        assert rank.average(4.0) == 2
        assert rank.complete() == 100


def check_left_out(driven):
    """A vector that is not finite is not contributed, interrupted or not."""
    for in_place in (False, True):
        rank = Bench(driven, in_place=in_place)
        rank.call(np.nan)
        assert rank.average(3.0) is None
        assert not rank.driven.timely
        assert rank.average(4.0) == 3
        assert rank.driven.timely
        assert rank.complete() == 4
        rank.call(np.inf)
        rank.interrupt(1.0)
        assert rank.average(5.0) is None
        assert rank.complete() == 1
        assert rank.average(6.0) is None  # outside calls, it contributes nothing
        assert rank.driven.nonfinite == 1


def check_passive_left_out(driven):
    """Nor is one that is not finite contributed outside calls, where the mean does not reach it."""
    for in_place in (False, True):
        rank = Bench(driven, True, in_place)
        rank.call(np.nan)
        rank.complete()
        assert rank.average(3.0) is None
        assert rank.average(4.0) is None
        rank.call(5.0)
        assert rank.complete() == 5
        assert rank.average(6.0) == 5
        rank.call(np.nan)
        assert rank.average(7.0) is None
        assert rank.complete() == 7
        assert rank.average(8.0) == 7
        rank.call(7.5)
        assert rank.complete() == 8.5
        rank.vectors.of[X] = np.array([np.inf])
        rank.driven.go_on_from()
        assert rank.average(9.0) is None
        assert rank.driven.nonfinite == 4


def check_interrupted_without_room(driven):
    """The vector of an interrupted call does not enter the average that contributes nothing."""
    for passive, in_place in ((False, False), (False, True), (True, False), (True, True)):
        rank = Bench(driven, passive, in_place, start=np.nan)
        assert rank.begin() is None
        rank.call(2.0)
        rank.interrupt(100.0)
        assert in_place or rank.vectors.of[contribution.SCRATCH] == 0
        rank.end(3.0)
        assert rank.average(4.0) == (2 if in_place else None)
        assert rank.average(5.0) == 4
        assert rank.complete() == 100
        assert rank.average(6.0) == (5 if passive else None)


def check_interrupted_without_result(driven):
    """What an interrupted call has not contributed is not contributed after it, either."""
    for in_place, value in ((False, 2.0), (False, np.nan), (True, np.nan)):
        rank = Bench(driven, True, in_place, start=np.nan)
        assert rank.begin() is None
        rank.call(value)
        rank.interrupt(100.0)
        rank.end(3.0)
        assert rank.complete() == 100
        assert rank.average(4.0) is None


CHECKS = (
    check_passive,
    check_interrupted_passive,
    check_interrupted_meanwhile,
    check_left_out,
    check_passive_left_out,
    check_interrupted_without_room,
    check_interrupted_without_result,
    explore_interruptions,
)


@pytest.mark.parametrize(
    "check", [*CHECKS[:-1], pytest.param(explore_interruptions, marks=pytest.mark.slow)]
)
def test_a_rank_does_what_it_must(check):
    check(group_rank.GroupRankProtocol)


# Wrong variants


class StillLent(group_rank.GroupRankProtocol):
    """Leaves the application's vector to the exchange that an exception interrupts."""

    def interrupt(self):
        lent = self.lent
        super().interrupt()
        self.lent = lent


class StillReplaced(group_rank.GroupRankProtocol):
    """Lets that exchange write to the application's vector."""

    def interrupt(self):
        target = self.target
        super().interrupt()
        self.target = target


class NotKept(group_rank.GroupRankProtocol):
    """Forgets the vector of the interrupted call."""

    def interrupt(self):
        super().interrupt()
        self.kept = False


class AddedAnyway(group_rank.GroupRankProtocol):
    """Takes the application to have what its interrupted call ended with."""

    def end_call(self):
        super().end_call()
        self.unreturned = False


class AddedTwice(group_rank.GroupRankProtocol):
    """Adds what averages have changed, and does not note that."""

    def add_moved(self):
        moved = self.moved
        super().add_moved()
        self.moved = moved


class DecidedLate(group_rank.GroupRankProtocol):
    """Takes an average for one of the call that has begun meanwhile."""

    def call(self):
        super().call()
        self.in_call = True


class CountsAll(group_rank.GroupRankProtocol):
    """Counts what is not finite."""

    def contribute(self):
        super().contribute()
        self.weight = 1


class Unchecked(group_rank.GroupRankProtocol):
    """Contributes what the application last got, finite or not."""

    def contribute(self):
        super().contribute()
        if self.forming.passive and not (self.in_call or self.gives):
            self.source, self.target = contribution.RESULT, contribution.SNAPSHOT
            self.vectors.copy(contribution.SNAPSHOT, contribution.RESULT)
            self.weight = 1


class InUse(group_rank.GroupRankProtocol):
    """Keeps an interrupted call's vector where an average outside calls has its own."""

    def interrupt(self):
        x = self.vectors.of[X]
        super().interrupt()
        self.vectors.of[contribution.SCRATCH] = x
        self.gives = bool(np.isfinite(x).all())


class Emptied(group_rank.GroupRankProtocol):
    """Contributes after an interrupted call what was in place of a vector that did not count."""

    def end_call(self):
        if self.forming.passive and self.kept:
            self.vectors.copy(contribution.RESULT, contribution.SCRATCH)
        super().end_call()


WRONG = (
    *(StillLent, StillReplaced, NotKept, AddedAnyway, AddedTwice, DecidedLate, CountsAll),
    *(Unchecked, InUse, Emptied),
)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_rank_is_caught(wrong):
    with pytest.raises(AssertionError):
        for check in CHECKS:
            check(wrong)
