"""A protocol in which one rank forms arbitrary groups, and its ranks in a network without MPI.

Every rank says to rank 0 when it is ready; that one waits for as many ready ranks as it draws, and
forms groups of them by chance: of any sizes and weights, several at once, and sometimes a second
time, so that a rank is in two after one another. What `late` says becomes of ranks that compute:
they are in no group ("out"), in groups that wait for their next call ("waited for"), or in groups
that average their model meanwhile ("passive").
"""

from __future__ import annotations

import copy
import pickle
import random
from collections import deque

import numpy as np
from protocol_messages import contribution, load_source, rank_protocol

source = load_source("formed_groups", "paces", "rank_port")
group_rank = load_source("group_rank", "formed_groups", "contribution", "rank")
paces = load_source("paces")
Group = source.Group

LATE = ("out", "waited for", "passive")

# The kinds of messages: a rank is ready, or makes no calls; a group; the call's groups are over; it
# is known that the rank makes no calls, so it is in no further group.
READY, AWAY, GROUP, DONE, NOTED = range(5)


class RandomGroups(source.GroupProtocol):
    """One rank; rank 0 is the controller as well.

    Args:
        seed: of the controller's choices.
        late: one of `LATE`.
        equal: whether all weights are.
        most_awaited: how many ready ranks the controller waits for at most; None: all.

    Attributes:
        formed: of the controller: the groups as (number, members, weights), in its order.
        log: what has happened: ("call",), (number, whether in a call) of a group, ("return",).
        told: the numbers of groups that this rank was told of, in that order.
    """

    def __init__(self, port, rank, size, *, seed=0, late="out", equal=False, most_awaited=None):
        super().__init__(port, rank, size)
        self.passive = late == "passive"
        self.takes_all = late != "out"
        self.equal = equal
        self.seed = seed
        self.formed, self.log, self.told = [], [], []
        self.is_away = self.is_done = self.awaits_note = False
        # Groups that this rank is in and that wait for its next call.
        self.pending = []
        # The controller's: who is ready, who may become so, and for how many it waits.
        self.ready = []
        self.present = set(range(size))
        self.most_awaited = most_awaited or size
        self.draw_awaited()

    def call(self):
        super().call()
        self.log.append(("call",))
        self.is_away = False
        self.reduce_pending()
        self.port.send(0, [READY, self.calls])

    def reduced(self, group):
        self.log.append((group.number, self.calling))

    def returned(self):
        super().returned()
        self.is_done = False
        self.log.append(("return",))

    def pause(self):
        self.is_away = self.awaits_note = True
        # Others would wait for this rank's next call.
        self.reduce_pending()
        self.port.send(0, [AWAY, self.calls])

    def arrived(self, source, integers):
        kind = integers[0]
        if kind == READY:
            assert source not in self.ready
            self.ready.append(source)
            self.present.add(source)
        elif kind == AWAY:
            self.present.discard(source)
            if source in self.ready:
                self.ready.remove(source)
                self.port.send(source, [DONE])
            self.port.send(source, [NOTED])
        elif kind == NOTED:
            self.awaits_note = False
        elif kind == GROUP:
            group = Group(room=self.size)
            assert group.read(integers, 1) == len(integers)
            self.told.append(group.number)
            self.pending.append(group)
            if (self.calling and not self.is_done) or self.is_away or self.passive:
                self.reduce_pending()
        else:
            self.is_done = True
            self.port.return_model()
        if self.ready and len(self.ready) >= min(self.awaited, len(self.present)):
            self.form()

    def is_quiet(self):
        return super().is_quiet() and not self.awaits_note

    def waits_for(self, rank):
        return self.calling and rank != self.rank

    def reduce_pending(self):
        for group in self.pending:
            self.port.reduce(group)
        self.pending = []

    # The controller

    def draws(self):
        """Return a generator that goes on from what has been formed."""
        return random.Random(f"{self.seed} {len(self.formed)}")

    def draw_awaited(self):
        self.awaited = self.draws().randint(1, self.most_awaited)

    def form(self):
        """Put all that are ready into groups, sometimes twice."""
        draws = self.draws()
        ready, self.ready = self.ready, []
        for _ in range(draws.choice((1, 1, 2))):
            left = self.present if self.takes_all and draws.random() < 0.5 else ready
            left = draws.sample(sorted(left), len(left))
            while left:
                count = draws.randint(1, len(left))
                self.form_one(draws, left[:count])
                left = left[count:]
        for rank in ready:
            self.port.send(rank, [DONE])
        self.draw_awaited()

    def form_one(self, draws, members):
        weights = None
        if not self.equal and draws.random() < 0.7:
            weights = [draws.choice((0, 0.25, 1 / 3, 1, 7)) for _ in members]
            weights[draws.randrange(len(weights))] = 0.3
        group = Group(len(self.formed), members, weights)
        self.formed.append((group.number, *group.listed()))
        integers = source.array.array("q", [GROUP] + [0] * (3 + 2 * self.size))
        end = group.write(integers, 1)
        for member in members:
            self.port.send(member, integers[:end])


class PlannedGroups(source.GroupProtocol):
    """One rank of which everybody knows the groups: those of its t-th call are plan[t].

    Args:
        plan: for each call the groups, as arguments of `Group`.
    """

    def __init__(self, port, rank, size, *, plan):
        super().__init__(port, rank, size)
        self.plan = [[Group(*group) for group in groups] for groups in plan]

    def call(self):
        super().call()
        for group in self.plan[self.calls]:
            if group.index_of(self.rank) >= 0:
                self.port.reduce(group)
        self.port.return_model()


def replay(formed, logs, vectors, change):
    """Return what the ranks have in the end, computed from who was in which groups.

    Not where ranks are passive: when an application calls while its rank averages is not logged.

    Args:
        formed: the controller's groups.
        logs: of each rank.
        vectors: float64 array of shape (ranks, length), what they have at first.
        change: function of (rank, call) that returns what the application changes before it.
    """
    vectors = [np.array(vector) for vector in vectors]
    logs = [deque(log) for log in logs]
    calls = [0] * len(logs)

    def advance(rank, number):
        """Go through a rank's log up to this group; return whether it gives its vector to it."""
        while logs[rank]:
            event, *details = logs[rank].popleft()
            if event == number:
                return details[0]
            assert event in ("call", "return"), f"group {event} before {number} on rank {rank}"
            if event == "call":
                vectors[rank] += change(rank, calls[rank])
                calls[rank] += 1
        assert number is None, f"rank {rank} was not in group {number}"
        return False

    for number, members, weights in formed:
        gives = [advance(member, number) for member in members]
        total = sum(weight for weight, given in zip(weights, gives) if given)
        if total == 0:
            continue
        mean = sum(
            weight / total * vectors[member]
            for member, weight, given in zip(members, weights, gives)
            if given
        )
        for member, given in zip(members, gives):
            if given:
                vectors[member] = np.array(mean)
    for rank in range(len(logs)):
        advance(rank, None)
    return np.array(vectors)


# A network without MPI


class Arrays(contribution.Vectors):
    """A rank's vectors as numpy arrays."""

    def __init__(self, start):
        self.of = [np.array(start, float) for _ in range(4)]

    def copy(self, to, source):
        self.of[to] = self.of[source].copy()

    def zero(self, vector):
        self.of[vector] = np.zeros_like(self.of[vector])

    def all_finite(self, vector):
        return bool(np.isfinite(self.of[vector]).all())

    def add_change(self, to):
        x, snapshot, base = self.of[:3]
        self.of[to] = snapshot + (x - base)


class Port(group_rank.GroupRankPort):
    """One rank: what it is to do, and its application, which makes some calls and leaves.

    Attributes:
        steps: what the protocol wants done: groups, and None for the return.
        vectors, driven: the rank's vectors, and what decides what it does next.
        in_place: whether the rank's averages are in memory that all share.
    """

    def __init__(self, world, rank, calls, vector):
        self.world, self.rank, self.calls = world, rank, calls
        self.steps = deque()
        self.computes = True
        self.in_place = False
        self.vectors = Arrays(vector)

    def attach(self, protocol, kind, size):
        self.driven = kind(self.vectors, size)
        self.driven.attach(self, protocol)
        self.driven.begin()

    @property
    def averaging(self):
        """Whether the first step's average is under way."""
        return self.driven.begun or self.driven.passing != rank_protocol.WAIT

    @property
    def vector(self):
        """What the application has, with what averages have changed since its last call.

        Or what a call has ended with that was interrupted.
        """
        x, snapshot, base, kept = self.vectors.of
        if self.driven.kept or self.driven.unreturned:
            return kept if self.driven.kept else self.ended
        return snapshot + (x - base) if self.driven.moved else x

    # What the protocol requests

    def send(self, destination, integers):
        channel = self.world.channels.setdefault((self.rank, destination), deque())
        channel.append(source.array.array("q", integers))

    def reduce(self, group):
        assert self.rank in group.listed()[0]
        self.steps.append(copy.copy(group))

    def return_model(self):
        self.steps.append(None)

    def under_way(self, group):
        if not self.steps or self.steps[0] is None:
            return False
        members, weights = self.steps[0].listed()
        group.clear(self.steps[0].number)
        for member, weight in zip(members, weights):
            group.add(member, weight)
        return True

    def requested(self):
        if not self.steps:
            return rank_protocol.WAIT
        return rank_protocol.RETURN if self.steps[0] is None else rank_protocol.CONTRIBUTE

    def finish(self):
        self.steps.popleft()

    def now(self):
        return self.world.time

    # Steps

    def begin_pass(self, step, moves):
        if self.is_alone(step):
            self.world.begun[self.steps[0].number] = {self.rank: 1}

    def end_pass(self, step, moves):
        return not self.is_alone(step)

    def is_alone(self, step):
        """Return whether this is a group of one rank, which ends in an event of its own, too."""
        return step == rank_protocol.CONTRIBUTE and self.steps[0].size == 1

    def is_here(self):
        return True

    def knows_finite(self):
        return True

    def is_in_place(self):
        return self.in_place

    def begin_average(self, number):
        given = self.world.begun.setdefault(number, {})
        assert self.rank not in given, f"rank {self.rank} averages group {number} twice"
        given[self.rank] = self.driven.weight
        if len(given) == self.steps[0].size:
            self.world.average(number)

    def given(self):
        """Return what an average takes from this rank."""
        driven = self.driven
        if self.in_place:
            return self.vectors.of[driven.target]
        return self.vectors.of[contribution.X if driven.lent else driven.source]

    def is_exchanged(self):
        return self.steps[0].number in self.world.means

    def total_weight(self):
        """Store the mean as well: only now does the rank look."""
        total, mean = self.world.means[self.steps[0].number]
        if total > 0 and self.driven.target != contribution.NOWHERE:
            self.vectors.of[self.driven.target] = mean
        return total

    def changed(self):
        pass

    def executed(self, number):
        pass

    def returns(self, in_group):
        self.computes = True
        self.ended = self.vectors.of[contribution.SCRATCH]

    def adopt(self):
        if not self.is_exchanged():
            self.vectors.copy(contribution.SCRATCH, contribution.X)

    def redirect(self):
        pass


class World:
    """Ranks of `RandomGroups`, the messages between them, and the groups under way.

    What can happen in it are single events; `happen` lets one of them do so.

    Args:
        size, calls: how many ranks there are, and how many calls each one makes.
        spurious, overdue: how often a call may have waited for long while something else can
            happen, and where nothing can.
        passes: how often so much time may pass as a rank waits for, where nothing else can happen.
        tick: the most nanoseconds that pass between two events of `run`.
        driven: what decides for a rank.
        settings: of `RandomGroups`.
    """

    def __init__(
        self,
        size,
        calls,
        change,
        protocol=RandomGroups,
        spurious=0,
        overdue=0,
        passes=0,
        tick=0,
        driven=group_rank.GroupRankProtocol,
        **settings,
    ):
        self.change, self.spurious, self.overdue = change, spurious, overdue
        self.passes, self.tick, self.time = passes, tick, 0
        self.channels = {}
        # Of each group that some member has begun: their weights; and once all have, the mean.
        self.begun, self.means = {}, {}
        self.ports = [
            Port(self, rank, calls, np.array(change(rank, -1), float)) for rank in range(size)
        ]
        self.protocols = [
            protocol(port, rank, size, **settings) for rank, port in enumerate(self.ports)
        ]
        for port, forming in zip(self.ports, self.protocols):
            port.attach(forming, driven, size)

    def events(self):
        """Return what can happen, as functions."""
        for rank, port in enumerate(self.ports):
            if port.computes:
                yield self._act, rank
            if not port.averaging and port.steps:
                yield self._begin_step, rank
            if self._can_finish(port.driven):
                yield self._finish, rank
        for pair, channel in self.channels.items():
            if channel:
                yield self._deliver, pair

    def possible(self):
        """Return these, and that calls have waited for long."""
        events = list(self.events())
        for rank, protocol in enumerate(self.protocols):
            if protocol.due <= self.time:
                events.append((self._fall_due, rank))
        if self.passes and not events and self._next_due() < paces.NEVER:
            events.append((self._pass_until_due, None))
        if self.spurious or (self.overdue and not events):
            waiting = [rank for rank, protocol in enumerate(self.protocols) if protocol.calling]
            events += [(self._wait_long, rank) for rank in waiting]
        return events

    def _wait_long(self, rank):
        if self.spurious:
            self.spurious -= 1
        else:
            self.overdue -= 1
        self.protocols[rank].overdue()

    def _next_due(self):
        return min(protocol.due for protocol in self.protocols)

    def _pass_until_due(self, _):
        self.passes -= 1
        self.pass_until(self._next_due())

    def pass_until(self, time):
        """Let the time be this."""
        self.time = time
        for rank, protocol in enumerate(self.protocols):
            protocol.passed(time)
            if protocol.due <= time:
                self._fall_due(rank)

    def _fall_due(self, rank):
        self.protocols[rank].fell_due()

    def _act(self, rank):
        port, protocol = self.ports[rank], self.protocols[rank]
        port.computes = False
        if protocol.calls < port.calls:
            self._call(rank)
        else:
            protocol.leave()

    def _call(self, rank):
        """Change the application's vector, and begin its call."""
        port = self.ports[rank]
        x = port.vectors.of[contribution.X]
        port.vectors.of[contribution.X] = x + self.change(rank, self.protocols[rank].calls)
        port.driven.call()

    def _deliver(self, pair):
        self.protocols[pair[1]].arrived(pair[0], self.channels[pair].popleft())

    def _begin_step(self, rank):
        driven = self.ports[rank].driven
        step = driven.next_step()
        assert step == rank_protocol.CONTRIBUTE or driven.forming.calling
        driven.take(step)

    def _can_finish(self, driven):
        passing = driven.passing != rank_protocol.WAIT
        return passing or driven.next_step() == rank_protocol.END_AVERAGE

    def _finish(self, rank):
        driven = self.ports[rank].driven
        if driven.passing != rank_protocol.WAIT:
            driven.passed()
        else:
            driven.take(rank_protocol.END_AVERAGE)

    def average(self, number):
        """Average a group that all members have begun."""
        weights = self.begun[number]
        total = sum(weights.values())
        given = [(weight, self.ports[rank]) for rank, weight in weights.items() if weight > 0]
        mean = sum(weight / total * port.given() for weight, port in given)
        self.means[number] = total, mean

    def run(self, seed):
        """Let events happen in a drawn order until none can, and see that all came to an end."""
        generator = random.Random(seed)
        while events := self.possible():
            event, what = generator.choice(events)
            event(what)
            if self.tick:
                self.pass_until(self.time + generator.randrange(self.tick))
        self.check_end()

    def explore(self):
        """Let events happen in every order, and return how many states there are."""
        seen, left = {self.key()}, [self]
        while left:
            world = left.pop()
            events = world.possible()
            if not events:
                world.check_end()
            kept = pickle.dumps(world)  # faster than deepcopy
            for number in range(len(events)):
                after = pickle.loads(kept)
                event, what = after.possible()[number]
                event(what)
                if (key := after.key()) not in seen:
                    seen.add(key)
                    left.append(after)
        return len(seen)

    def key(self):
        """Return all that what happens from here on depends on, but for vectors."""
        ranks = [
            (
                [step and step.number for step in port.steps],
                port.averaging,
                port.computes,
                state_of(protocol, {"port", "log"}),
            )
            for port, protocol in zip(self.ports, self.protocols)
        ]
        channels = sorted((pair, list(sent)) for pair, sent in self.channels.items() if sent)
        begun = {number: sorted(given) for number, given in self.begun.items()}
        return repr((ranks, channels, begun))

    def check_end(self):
        for port, protocol in zip(self.ports, self.protocols):
            assert not port.steps
            assert protocol.calls == port.calls
        check_end(self.protocols)


def state_of(thing, hidden):
    """Return an object's attributes, and those of its paces, but for some that do not matter."""
    return {
        name: vars(value) if isinstance(value, paces.Paces) else value
        for name, value in vars(thing).items()
        if name not in hidden
    }


def check_end(protocols):
    """See that all ranks have left, each once it was in every group of its, in the same order."""
    formed = protocols[0].formed
    for rank, protocol in enumerate(protocols):
        assert protocol.leaving
        assert protocol.is_quiet()
        assert not protocol.pending
        own = [number for number, members, _ in formed if rank in members]
        assert protocol.told == own
        assert [event for event, *_ in protocol.log if isinstance(event, int)] == own
