"""A rank between peers whose actions are executed later, beside what it must have then."""

from __future__ import annotations

import random
from fractions import Fraction

from peer_network import peer_rank, peers


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
        model, earlier, apart, user: X, S, D and U; before: what S is to be.
        pending: the actions that are not executed yet, in order.
        right, got: what X is to be once they are; what the application last got, None where it
            lacks that.
        change: that of the call under way, until it is published; None where it does not count.
        waits: what the application waits for.
    """

    def __init__(self, driven, seed):
        self.random = random.Random(seed)
        self.model = self.user = self.right = self.got = Fraction(5)
        self.earlier = self.before = Fraction(5)
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
                        "look_ahead", "keep_model", "return_model"):  # fmt: skip
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

    def _look_ahead(self, momentum):
        earlier, self.earlier = self.earlier, self.model
        self.model += momentum * (self.model - earlier)

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

    def write_change(self, kind, number, weight):
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
        yield self.looks_ahead
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
        self.driven.write_change(2, 0, 0)

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

    def looks_ahead(self):
        momentum = self.random.choice((0, Fraction(1, 2)))
        before, self.before = self.before, self.right
        self.right += momentum * (self.right - before)
        self.driven.look_ahead(momentum)

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
