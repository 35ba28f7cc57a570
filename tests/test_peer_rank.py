"""What peers do with their applications' changes where actions are late, or calls interrupted."""

from __future__ import annotations

import importlib
import itertools
import random
from collections import Counter
from fractions import Fraction

import pytest
from compiled import built, of_python, to_python
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


# One rank, whose actions are executed later


class Poison:
    """What is not finite: nothing is to be computed with it."""

    def used(self, *_):
        raise AssertionError("what is not finite is used")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = used


class One(peers.PeerProtocol):
    """Does what the test says."""

    def __init__(self, port):
        super().__init__(port, 0, 2, [])

    def call(self):
        self.calling = True


class Bench(peer_rank.PeerRankPort):
    """A rank and its application, beside what it must have: X, and what the application got.

    Attributes:
        model, apart, user: X, D and U.
        pending: the actions that are not executed yet, in order.
        right, got: what X is to be once they are; what the application last got, None where it
            lacks that.
        change: that of the call under way, until it is published; None where it does not count.
        waits: what the application waits for.
    """

    def __init__(self, driven, seed):
        self.random = random.Random(seed)
        self.model = self.user = self.right = self.got = Fraction(5)
        self.apart = None
        self.pending = []
        self.change = self.waits = self.returned = None
        self.published, self.excluded = True, 0
        self.driven = driven(self)
        self.protocol = One(self.driven)
        self.driven.attach(self.protocol)

    def draw(self):
        return Fraction(self.random.randrange(1, 1000), 7)

    # Actions

    def execute(self):
        what, *details = self.pending.pop(0)
        getattr(self, f"_{what}")(*details)

    def __getattribute__(self, name):
        """Have the actions on vectors executed later."""
        if name not in ("record", "save", "clear", "keep", "replace", "publish", "scale",
                        "keep_model", "return_model"):  # fmt: skip
            return super().__getattribute__(name)
        return lambda *details: self.pending.append((name, *details))

    def _record(self, against_model):
        self.apart = self.user - (self.model if against_model else self.apart)

    def _save(self):
        self.apart = self.model

    def _clear(self):
        self.apart = Fraction(0)

    def _keep(self):
        self.apart = self.user

    def _replace(self):
        self.model = self.user

    def _publish(self, scale):
        self.model += scale * self.apart

    def _scale(self, factor):
        self.model *= factor

    def _mix(self, keep, share, value):
        self.model = keep * self.model + share * value

    def _keep_model(self, scale):
        if scale != 1:
            self.apart = scale * self.model

    def _return_model(self, scale):
        self._keep_model(scale)
        self.user = scale * self.model

    def _send(self, value):
        assert self.apart == value, "the change that is sent"

    def mix(self, source, keep, share):
        self.pending.append(("mix", keep, share, self.value))
        return 0

    def halve(self, source, kind, number):
        self.mix(source, Fraction(1, 2), Fraction(1, 2))

    def write_change(self, kind, number):
        self.pending.append(("send", self.sent))

    def hold(self):
        assert not self.pending
        self.apart = self.user

    def load(self):
        assert not self.pending
        self.model = self.user

    def adopt(self):
        """As the engine does: it records a change out of turn, as nothing pending affects that."""
        misses = False
        for i, (what, *details) in enumerate(self.pending):
            if what == "record":
                self._record(*details)
            elif what == "replace":
                self.apart = self.user - self.model
                self.pending[i] = "publish", 1
            elif what == "return_model":
                self.pending[i] = "keep_model", *details
            misses |= what in ("keep", "return_model")
        self.pending = [each for each in self.pending if each[0] not in ("record", "keep")]
        return misses

    # What is known

    def is_change_finite(self, against_model):
        base = self.model if against_model else self.apart
        assert base == self.got, "the change is of what the application got"
        return not isinstance(self.user, Poison)

    def is_pending(self):
        return bool(self.pending)

    def answers(self):
        used = {"record", "save", "keep", "keep_model", "return_model"}
        return any(what in used for what, *_ in self.pending)

    # What happens

    def live(self, events=60):
        for _ in range(events):
            happening = self.random.choice(list(self.events()))
            happening()
        while self.pending:
            self.execute()
        assert self.model == self.right
        assert self.driven.nonfinite == self.excluded

    def events(self):
        yield self.mixes
        yield self.halves
        yield self.scales
        if self.pending:
            yield from [self.execute] * 3
        if self.protocol.calling:
            yield from [self.returns if self.published else self.publishes] * 2
            if not self.published:
                yield self.sends
        if self.waits:
            yield self.interrupted
            if self.driven.has_answered():
                yield self.ends
        elif self.driven.has_answered():
            yield from [self.calls] * 3
            yield self.publishes_alone
            if not self.pending:
                yield self.restarts
                if self.got is not None:
                    yield self.goes_on

    def changes(self, poisoned):
        """The application changes its vector: note what counts of that."""
        self.user = Poison() if poisoned else self.user + self.draw()
        known = self.got is not None and not poisoned
        self.change = self.user - self.got if known else None
        self.excluded += not known

    def calls(self):
        self.changes(self.random.random() < 0.1)
        self.waits, self.published = "call", False
        self.driven.call()

    def publishes(self):
        scale = self.random.choice((1, 1, Fraction(1, 2)))
        self.right += 0 if self.change is None else scale * self.change
        self.published = True
        self.driven.publish(scale)

    def sends(self):
        self.sent = Fraction(0) if self.change is None else self.change
        self.published = True
        self.driven.write_change(2, 0)

    def returns(self):
        scale = self.random.choice((1, 1, Fraction(1, 3)))
        self.protocol.calling = False
        self.returned = self.got = scale * self.right if self.waits else None
        self.driven.return_model(scale)

    def mixes(self):
        keep, share = self.random.choice(((1, 1), (Fraction(1, 2), Fraction(1, 2)), (0, 1)))
        self.value = self.draw()
        self.right = keep * self.right + share * self.value
        self.driven.mix(1, keep, share)

    def halves(self):
        self.value = self.draw()
        self.right = (self.right + self.value) / 2
        self.driven.halve(1, 2, 0)

    def scales(self):
        factor = self.random.choice((1, Fraction(2, 3)))
        self.right *= factor
        self.driven.scale(factor)

    def publishes_alone(self):
        self.changes(False)
        self.right += self.change or 0
        self.waits, self.returned = "publish", self.user
        self.driven.publish_change()
        self.got = self.user

    def ends(self):
        assert self.user == self.returned, "what the application gets"
        self.waits = None
        self.driven.interrupt()

    def interrupted(self):
        """The application goes on with its vector, which is to stay as it is."""
        if self.answers() and any(what in ("keep", "return_model") for what, *_ in self.pending):
            self.got = None
        self.waits = None
        self.driven.interrupt()
        if self.protocol.calling:
            self.got = None
        if self.got is None:
            self.user = self.draw() + 1000

    def goes_on(self):
        self.user = self.got = self.user + Fraction(1, 10**6)
        self.driven.go_on_from()

    def restarts(self):
        self.user = self.got = self.right = self.draw()
        self.driven.restart(3)


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


class StillThere(peer_rank.PeerRankProtocol):
    """Returns from the call that an exception has ended."""

    def interrupt(self):
        present = self.present
        super().interrupt()
        self.present = present


class Counted(peer_rank.PeerRankProtocol):
    """Counts what the application changes after an interrupted call."""

    def return_model(self, scale):
        super().return_model(scale)
        self.unreturned = False


class CountedAtOnce(peer_rank.PeerRankProtocol):
    """Counts that too where the model was about to be returned."""

    def interrupt(self):
        unreturned = self.unreturned
        super().interrupt()
        self.unreturned = unreturned


class NeverCounted(peer_rank.PeerRankProtocol):
    """Excludes what the application changes after it has published outside of any call."""

    def publish_change(self):
        unreturned = self.unreturned
        super().publish_change()
        self.unreturned = unreturned


class CountsAll(peer_rank.PeerRankProtocol):
    """Counts what is not finite."""

    def take_change(self):
        super().take_change()
        self.changed = self.unrecorded = not self.unreturned


class PublishedTwice(peer_rank.PeerRankProtocol):
    """Publishes a change again where no call has included it since."""

    def publish(self, scale):
        changed = self.changed
        super().publish(scale)
        self.changed = changed


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

    def write_change(self, kind, number):
        self.keep_apart()
        self.port.write_change(kind, number)


class ScaledIsSame(peer_rank.PeerRankProtocol):
    """Takes the application to have got the model as it is."""

    def return_model(self, scale):
        super().return_model(scale)
        self.same = not self.unreturned


class RoundedIsSame(peer_rank.PeerRankProtocol):
    """Takes what the application has rounded for the model."""

    def go_on_from(self):
        same = self.same
        super().go_on_from()
        self.same = same


class OldChange(peer_rank.PeerRankProtocol):
    """Keeps what the application had got before all restarted."""

    def restart(self, calls):
        same = self.same
        super().restart(calls)
        self.same = same


class LostAtRestart(peer_rank.PeerRankProtocol):
    """Excludes the first change after a restart."""

    def restart(self, calls):
        unreturned = self.unreturned
        super().restart(calls)
        self.unreturned = unreturned


class BoundedForEver(peer_rank.PeerRankProtocol):
    """Takes what the device has checked once for what the application has got since."""

    def take_change(self):
        bounded = self.bounded
        super().take_change()
        self.bounded = bounded


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


WRONG = [
    wrong for wrong in peer_rank.PeerRankProtocol.__subclasses__() if wrong.__module__ == __name__
]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_rank_is_caught(wrong):
    with pytest.raises(AssertionError):
        for check in CHECKS:
            check(wrong)


# A compiled rank and its source

DECIDED = (
    *("call", "await_vector", "begin_awaited", "publish_change", "hand_in", "join", "caught_up"),
    *("go_on_from", "returned_checked", "restart", "interrupt"),
    *("counts", "takes_ahead", "takes_all", "has_answered"),
)
TOLD = "begin", "arrived", "leave", "pause", "resume", "catch_up"
COMPILED = f"""# cython: language_level=3
from collectives.protocols.peers cimport PeerProtocol
from collectives.protocols.peer_rank cimport PeerRankProtocol
{of_python(("peers", "Port"), ("peer_rank", "PeerRankPort"))}
cdef class CompiledRank:
    cdef readonly PeerRankProtocol driven
    cdef readonly PeerProtocol exchanging
    def __init__(self, port, make):
        self.driven = PeerRankProtocol(PythonPeerRankPort(port))
        self.exchanging = make(self.driven, 1, 3)
        self.driven.attach(self.exchanging)
{to_python("peer_rank", "PeerRankProtocol", "driven", *DECIDED)}
{to_python("peers", "PeerProtocol", "exchanging", *TOLD)}
"""


class SourceRank:
    """One rank of the protocols' sources, with the methods of a compiled one."""

    def __init__(self, port, make):
        self.driven = peer_rank.PeerRankProtocol(port)
        self.exchanging = make(self.driven, 1, 3)
        self.driven.attach(self.exchanging)
        for names, protocol in (DECIDED, self.driven), (TOLD, self.exchanging):
            for name in names:
                setattr(self, name, getattr(protocol, name))


class Recorder:
    """A rank's port, which notes its actions, and answers by chance."""

    def __init__(self, seed):
        self.random, self.actions = random.Random(seed), []

    def __getattr__(self, action):
        if action.startswith("__"):
            raise AttributeError(action)

        def execute(*details):
            answer = self.random.choice((0.5, 1.0) if action == "mix" else (True, False))
            self.actions.append((action, *details, answer))
            return answer

        return execute


def protocols_of(averages, pushes, server):
    """Return what makes rank 1 of 3, for each kind of protocol, of the modules of these."""
    everybody = [[0, 2]] * 2
    return (
        lambda *rank: averages.NeighborAverageProtocol(*rank, [0, 2], [0.25] * 2, 0.5, [0], False),
        lambda *rank: pushes.PushSumProtocol(*rank, everybody, everybody, 1),
        lambda *rank: server.ParameterServerProtocol(*rank, "backup", 1, 1),
        lambda *rank: server.ParameterServerProtocol(*rank, "asp", 0, 0),
    )


def life(kind, seed, make, is_client):
    """Return the actions in a rank's life, whose events a seed draws, and what it becomes.

    `is_client`: whether rank 0, a server, sends it nothing but answers.
    """
    port, drawn = Recorder(seed), random.Random(seed)
    rank = kind(port, make)
    driven, exchanging = rank.driven, rank.exchanging
    rank.begin()
    for _ in range(80):
        noted = [rank.has_answered(), rank.takes_ahead(), rank.takes_all()]
        noted.append(rank.counts(drawn.choice((peers.LEAVE, 2)), drawn.randrange(3)))
        port.actions.append(noted)
        event = drawn.choice(("act", "act", "message", "message", "message", "interrupt", "all"))
        if event == "message" and not is_client:
            what = drawn.choice((peers.LEAVE, peers.AWAY, *[2] * 10))
            rank.arrived(drawn.choice((0, 2)), what, drawn.randrange(9), drawn.choice((0.5, 1.0)))
        elif event == "message" and exchanging.calling:
            rank.arrived(0, parameter_server.PULL, drawn.randrange(9), 0.0)
        elif event == "interrupt":
            rank.interrupt()
        elif event == "all":
            what = drawn.choice(("pause", "resume", "restart", "join", "caught_up", "catch_up"))
            counted = what in ("restart", "catch_up")
            getattr(rank, what)(*[exchanging.calls + drawn.randrange(2)][:counted])
        elif event == "act" and not exchanging.calling:
            calls = ("call",) * 4 + ("await_vector", "begin_awaited", "returned_checked")
            getattr(rank, drawn.choice((*calls, "publish_change", "hand_in", "go_on_from")))()
    names = (
        "present",
        "same",
        "changed",
        "unrecorded",
        "unreturned",
        "bounded",
        "began",
        "nonfinite",
    )
    return port.actions, [getattr(driven, name) for name in names], exchanging.calls


def test_a_compiled_rank_has_the_same_actions_executed_as_its_source():
    compiled = built("compiled_peer_rank", COMPILED).CompiledRank
    names = "neighbor_average", "push_sum", "parameter_server"
    modules = [importlib.import_module(f"collectives.protocols.{name}") for name in names]
    sources = protocols_of(neighbor_average, push_sum, parameter_server)
    happened = Counter()
    kinds = enumerate(zip(sources, protocols_of(*modules)))
    for (number, (source, make)), seed in itertools.product(kinds, range(75)):
        actions, *end = life(SourceRank, seed, source, number == 3)
        assert (actions, *end) == life(compiled, seed, make, number == 3), (number, seed)
        happened.update(action[0] for action in actions if isinstance(action, tuple))
    asked = {name for name in vars(peer_rank.PeerRankPort) if not name.startswith("_")}
    assert asked - set(happened) == set()
