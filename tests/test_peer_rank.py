"""What peers do with their applications' changes where actions are late, or calls interrupted."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from late_peer import Bench
from peer_network import (
    CALL,
    LEAVE,
    Rank,
    Stage,
    World,
    explore,
    neighbor_average,
    parameter_server,
    peer_rank,
    peers,
    push_sum,
    require,
)

# An interrupted call, in every order


class Owner(Rank):
    """One whose application uses its vector again as soon as its call is interrupted.

    Attributes:
        own: what the application has then; None while the rank may write to its vector.
    """

    own = None

    def change(self, change):
        self.user, self.own = (self.got if self.own is None else self.own) + change, None

    def _key(self):
        own = self.model, self.kept_apart, self.user, self.own
        driven = [value for value in vars(self.driven).values() if isinstance(value, int)]
        return *super()._key(), own, tuple(driven)


class Interrupted(World):
    """Ranks of which rank 0 is interrupted in its first call, at any time, and calls when it may.

    Args:
        expected: function of (whether it was interrupted) that returns all models in the end.
    """

    def __init__(self, ranks, programs, expected):
        super().__init__(ranks, programs, change, self.check_vectors)
        self.expected, self.interruptions = expected, 1

    @property
    def key(self):
        return self.interruptions, *super().key

    def events(self):
        found = super().events()
        rank = self.ranks[0]
        if self.interruptions and rank.position == 0 and rank.stage == Stage.WAITS:
            found.append((-1, 0))
        return found

    def after(self, event, choice=None):
        return super().after(event, choice) if event != (-1, 0) else self._interrupt()

    def _interrupt(self):
        world = self.copy()
        world.interruptions = 0
        rank = world.ranks[0] = self.ranks[0].copy()
        rank.driven.interrupt()
        rank.user = rank.own = Fraction(1000)
        rank.stage, rank.position = Stage.COMPUTES, 1
        world._collect(rank)
        return world

    def _can_act(self, rank):
        """With the rule that a call that was interrupted is completed first."""
        begins = rank.stage == Stage.COMPUTES and not rank.driven.has_answered()
        return not begins and super()._can_act(rank)

    def check_vectors(self, before, world, rank):
        require(rank.own in (None, rank.user), "nothing writes to what the application has")

    def require_end(self):
        super().require_end()
        models = [rank.model for rank in self.ranks]
        require(models == self.expected(not self.interruptions), "changes count once", models)


def change(rank, call):
    return Fraction(10 ** (3 * rank + call))


def averaging(port, rank, size):
    others = [other for other in range(size) if other != rank]
    protocol = neighbor_average.NeighborAverageProtocol(
        port, rank, size, others, [0] * len(others), 0, others, False
    )
    protocol.own = Fraction(1, size)
    protocol.shares = (Fraction(1, size),) * len(others)
    return protocol


def averaged(changes):
    """Return the models of D-PSGD's recurrence where all average with all."""
    models = [Fraction(0)] * len(changes)
    for made in zip(*changes):
        models = [sum(models) / len(models) + own for own in made]
    return models


def pushing(port, rank, size):
    everybody = [[other for other in range(size) if other != rank]]
    return push_sum.PushSumProtocol(port, rank, size, everybody, everybody, 1)


def pushed(changes):
    models = [Fraction(0)] * len(changes)
    for made in zip(*changes):
        models = [(sum(models) + sum(made)) / len(models)] * len(models)
    return models


def asking(port, rank, size):
    return parameter_server.ParameterServerProtocol(port, rank, size, "bsp", 0, 0)


def served(changes):
    return [sum(map(sum, changes)) / len(changes)] * len(changes)


def explore_interruptions(driven):
    """What an interrupted call has begun with counts; what changes until the next does not."""
    for make, models in ((averaging, averaged), (pushing, pushed), (asking, served)):

        def expected(interrupted, models=models):
            changes = [[change(rank, call) for call in range(3)] for rank in range(2)]
            changes[0][1] *= not interrupted
            return models(changes)

        ranks = [Owner(rank, Fraction(0)) for rank in range(2)]
        for number, rank in enumerate(ranks):
            rank.driven = driven(rank)
            rank.attach(make(rank.driven, number, 2))
        programs = [(CALL, CALL, CALL, LEAVE)] * 2
        assert explore(Interrupted(ranks, programs, expected)) > 50


def live(driven):
    for seed in range(300):
        Bench(driven, seed).live()


def check_device(driven):
    """A call whose vector is arriving begins as soon as no pass over all of it is needed."""

    class Device(Bench):
        def is_checked(self):
            return checked

        def knows_change(self, bounded):
            self.bounded = bounded
            return knows

        def takes_whole(self):
            return whole

        def is_here(self):
            return here

        def is_lost(self):
            return lost

    for checked, knows, whole, here, lost in itertools.product((False, True), repeat=5):
        rank = Device(driven, 0)
        rank.waits = "call"
        rank.driven.await_vector()
        settled = checked and (here or (knows and not whole))
        assert rank.driven.begin_awaited() == settled
        assert rank.driven.began == rank.protocol.calling == (settled and not lost)
        if not settled:
            continue
        assert not rank.bounded
        if rank.protocol.calling:
            rank.publishes()
            rank.returns()
            while rank.pending:
                rank.execute()
            rank.driven.interrupt()
            rank.driven.returned_checked()
            rank.driven.begin_awaited()
            assert rank.bounded
            assert not rank.driven.bounded


def check_messages(driven):
    """Messages of an earlier epoch do not count, unless their rank leaves; and what is received."""
    rank = Bench(driven, 0)
    rank.driven.restart(0)
    assert rank.driven.counts(2, 1)
    assert not rank.driven.counts(2, 0)
    assert rank.driven.counts(peers.LEAVE, 0)
    protocol = rank.protocol
    for queues, paused, joined, follows in itertools.product((False, True), repeat=4):
        protocol.queues, protocol.paused = queues, paused
        protocol.joined, protocol.follows = joined, follows
        assert rank.driven.takes_all() == (queues or (paused and not (joined and follows)))
        for rank.pending in [], [("scale", 1)]:
            assert rank.driven.takes_ahead() == (queues or not rank.pending)


def check_join(driven):
    """What has changed since the last call is published, at the latest when all have joined."""
    for follows in (False, True):
        rank = Bench(driven, 0)
        rank.protocol.follows = follows
        rank.user += 3
        assert rank.driven.join() != follows
        rank.driven.interrupt()
        rank.user = None
        rank.driven.caught_up()
        rank.driven.caught_up()
        while rank.pending:
            rank.execute()
        assert rank.model == 8


CHECKS = live, check_device, check_messages, check_join, explore_interruptions


@pytest.mark.parametrize("check", CHECKS)
def test_a_rank_does_what_it_must(check):
    check(peer_rank.PeerRankProtocol)


# Wrong variants


class NotSaved(peer_rank.PeerRankProtocol):
    """Takes the model for what the application last got, whatever has become of it."""

    def keep_apart(self):
        if self.unrecorded:
            super().keep_apart()


class NotApart(peer_rank.PeerRankProtocol):
    """Mixes in half of a difference before it records the change."""

    def halve(self, source, kind, number):
        self.port.halve(source, kind, number)


class NotRecorded(peer_rank.PeerRankProtocol):
    """Leaves the change in the application's vector when the call is interrupted."""

    def interrupt(self):
        self.present = False
        self.port.adopt()


class Counted(peer_rank.PeerRankProtocol):
    """Counts what the application changes after an interrupted call."""

    def return_model(self, scale):
        super().return_model(scale)
        self.unreturned = False


class CountsAll(peer_rank.PeerRankProtocol):
    """Counts what is not finite."""

    def take_change(self):
        super().take_change()
        self.changed = self.unrecorded = not self.unreturned


class ReplacedAlways(peer_rank.PeerRankProtocol):
    """Replaces the model by the application's vector although others' have come in between."""

    def take_change(self):
        super().take_change()
        self.against_model = True


class ReplacedInPart(peer_rank.PeerRankProtocol):
    """Replaces the model where only a part of the change is to be added."""

    def publish(self, scale):
        super().publish(1)


class SentNotFinite(peer_rank.PeerRankProtocol):
    """Sends what it has in place of a change that does not count."""

    def write_change(self, kind, number, weight):
        self.keep_apart()
        self.port.write_change(kind, number, weight)


class ScaledIsSame(peer_rank.PeerRankProtocol):
    """Takes the application to have got the model as it is."""

    def return_model(self, scale):
        super().return_model(scale)
        self.same = not self.unreturned


class BeginsBlindly(peer_rank.PeerRankProtocol):
    """Begins before the whole vector that it needs has arrived."""

    def begin_awaited(self):
        self.began = self.port.is_checked() and not self.port.is_lost()
        if self.began:
            self.call()
        return self.port.is_checked()


class BeginsLost(peer_rank.PeerRankProtocol):
    """Begins with a vector that will never arrive."""

    def begin_awaited(self):
        settled = super().begin_awaited()
        if settled and not self.began:
            self.call()
        return settled


class OldMessages(peer_rank.PeerRankProtocol):
    """Counts messages from before a restart."""

    def counts(self, kind, epoch):
        return True


class DeafToWhoLeaves(peer_rank.PeerRankProtocol):
    """Counts none of them."""

    def counts(self, kind, epoch):
        return epoch == self.epoch


class LostInJoin(peer_rank.PeerRankProtocol):
    """Drops the change that no call for the others has included."""

    def caught_up(self):
        pass


def unchanged(doc, method, attribute):
    """Return a wrong variant that leaves an attribute as it was before a method."""

    def wrong(self, *details):
        before = getattr(self, attribute)
        answer = getattr(peer_rank.PeerRankProtocol, method)(self, *details)
        setattr(self, attribute, before)
        return answer

    name = f"{method}_leaves_{attribute}"
    return type(name, (peer_rank.PeerRankProtocol,), {"__doc__": doc, method: wrong})


WRONG = (
    *peer_rank.PeerRankProtocol.__subclasses__(),
    unchanged("Returns from the call that an exception has ended.", "interrupt", "present"),
    unchanged("Counts what follows a call interrupted as it returned.", "interrupt", "unreturned"),
    unchanged(
        "Excludes the change after one published outside of calls.",
        "publish_change",
        "unreturned",
    ),
    unchanged("Publishes a change a second time.", "publish", "changed"),
    unchanged("Takes what the application has rounded for the model.", "go_on_from", "same"),
    unchanged("Keeps what the application had got before all restarted.", "restart", "same"),
    unchanged("Excludes the first change after a restart.", "restart", "unreturned"),
    unchanged(
        "Takes what a device has checked once for what is got since.",
        "take_change",
        "bounded",
    ),
)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_rank_is_caught(wrong):
    with pytest.raises(AssertionError):
        for check in CHECKS:
            check(wrong)
