"""Every interleaving of a small case of `protocol_network`.

What a rank does about an event depends on its own state and on the message alone. So each such step
is made once, by the very classes of `protocol_network`, and looked up from then on: a state of the
world is a tuple of numbers, one for each rank with its inbox, and one for what is known from
outside.

Most orders differ only in the order of events that commute, and are left out (partial-order
reduction with persistent sets of one event). Events of different ranks commute, since each takes
from its own inbox and appends to others' channels. An event is *urgent* if it commutes with
whatever can happen before it on its own rank, too, and goes on to. Every run can then be
reordered to begin with it; runs are finite, so nothing is put off for ever. Hence only states
without an urgent event are kept, and in those every event is tried. An application that computes
may stop for ever: its steps are never urgent, so it stops everywhere.

That urgent events commute is a property of the protocol, and wrong variants lack it. It is checked
where nothing is urgent on one rank, the `laggard`, whatever is on the others: there all orders of
that rank's events are met. If it holds with every rank as the laggard, it holds: in the shortest
run that shows the contrary on some rank, everything before commutes, so it can be reordered to one
in which that rank lags behind the others. The same goes for what compares ranks at one moment: how
far the others are ahead of a rank (NEAR) and how many messages wait for it (BOUNDED) is worst where
that rank does nothing, and the others' urgent events only make it worse. So an exploration with
each rank as the laggard is complete; one without is as far as urgent events commute there, too.

``python -m tests.protocol_explorer`` explores three versions, a synchronization, and a version for
every set of activators, and tells how many states that takes; see ``--help``.
"""

from __future__ import annotations

import argparse
import enum
import pickle
import sys
import time
from collections import Counter, defaultdict, deque
from copy import copy
from fractions import Fraction
from functools import cache
from itertools import combinations, permutations
from pathlib import Path
from typing import NamedTuple

from collectives.topology import shuffle

sys.path.insert(0, str(Path(__file__).parent))

from protocol_messages import (
    FIN,
    FREED,
    VERSION,
    Contribution,
    Invariant,
    Sum,
    Violation,
    all_ranks,
    protocol_of,
    require,
    snapshots,
    version_steps,
)
from protocol_network import Application, Rank, Stage, World, agreement, network_of
from protocol_scenarios import (
    CALL,
    CLOSE,
    INTERRUPTED_CALL,
    JOIN,
    NONFINITE_CALL,
    ONE_AT_A_TIME,
    PUBLISH,
    Load,
    Scenario,
)


class NotCommuting(AssertionError):
    """An urgent event does not commute with another one: more than that was left out."""


class Note(enum.Enum):
    """What an event tells those who look on from outside."""

    STARTS = "starts"
    BEGINS = "begins"
    SUMS = "sums"
    ENTERS = "enters"
    LEAVES = "leaves"


class _Started:
    """The versions that a rank executes: whether they have been started is checked outside."""

    def __init__(self, part):
        self.part = part

    def __contains__(self, version):
        return True

    def __getitem__(self, version):
        epoch = self.part.rank.contribution.epoch
        self.part.notes.append((Note.BEGINS, version, epoch))
        return epoch


class ExploredWorld(World):
    joining_publishes = False


class Part(ExploredWorld):
    """One rank, without the others: what it sends stays in its network, and what it tells too."""

    def __init__(self, scenario, network, number, protocol_type, rank_type, application_type):
        self.scenario = scenario
        self.publishing_type = snapshots.SnapshotProtocol
        self.driven_type = version_steps.VersionsProtocol
        self.number = number
        self.network = network
        self.started = _Started(self)
        self.sums = {}
        self.failed = set()
        self.met = set()
        self.published = self.unpublished = 0
        self.carried = {}
        self.pace = None
        self.clear()
        self.rank = rank_type(self, number, protocol_type, application_type)
        self.ranks = {number: self.rank}

    def share(self, scenario, network):
        """Be with these, which all parts have in common."""
        self.scenario = scenario
        for holder in (self, self.rank.exchange, self.rank.average):
            if holder is not None:
                holder.network = network

    def clear(self):
        """Be without messages and notes."""
        self.network.carried = self.carried
        self.network.control = {}
        self.network.data = [{} for _ in range(self.scenario.world_size)]
        self.network.waiting = [0] * self.scenario.world_size
        self.entered = defaultdict(dict)
        self.left = {}
        self.notes = []

    def forget(self):
        """Leave only what the future depends on, of the vectors whether they have changed."""
        self.clear()
        rank = self.rank
        self.sums = {
            key: result
            for key, result in self.sums.items()
            if key[0] == VERSION and key[1] >= rank.protocol.version
        }
        contributed = rank.contributed
        if contributed:
            rank.contributed = contributed[0], int(contributed[1] != rank.snapshot)
        rank.vectors.of = [0] * len(rank.vectors.of)
        rank.returned = 0

    def state(self):
        """All that the rank's future depends on, but for the vectors' values."""
        contributed = tuple(
            (key[1], part)
            for key, result in sorted(self.sums.items())
            for part in result.parts
            if part.rank == self.number
        )
        return self.number, self.rank.state(), tuple(self.rank.executed), contributed

    def fill(self, inbox):
        network = self.network
        network.control = {
            (self.number, dimension): deque(messages) for dimension, messages in inbox.control
        }
        network.data[self.number] = {key: deque(messages) for key, messages in inbox.data}
        network.waiting[self.number] = sum(len(messages) for _, messages in inbox.data)
        if inbox.agreed:
            ops, pairs = inbox.agreed
            self.entered[ops] = dict(pairs)

    def outbox(self):
        """Return what has been sent: (rank, message)."""
        sent = []
        for (rank, dimension), messages in self.network.control.items():
            if rank != self.number:
                sent += [(rank, ("control", dimension, message)) for message in messages]
        for rank, mail in enumerate(self.network.data):
            if rank != self.number:
                for key, messages in mail.items():
                    sent += [(rank, ("data", key, without_value(message))) for message in messages]
        return tuple(sent)

    def told(self, agreed):
        """Return the notes, with the operations that were entered and left."""
        notes = list(self.notes)
        for ops, entered in self.entered.items():
            if not (agreed and ops == agreed[0]):
                notes += [(Note.ENTERS, ops, pair) for pair in entered.items()]
        notes += [(Note.LEAVES, ops, state[:3]) for ops, state in self.left.items()]
        return tuple(notes)

    # What is checked outside, or depends on the vectors' values

    def start(self, version, rank):
        self.notes.append((Note.STARTS, version, rank.epoch))

    def check_sum(self, exchange, result):
        super().check_sum(exchange, result)
        key = exchange.label, tuple(sorted(exchange.members))
        self.notes.append((Note.SUMS, key, result.parts))

    def note_arrival(self, rank):
        pass

    def check_conserved(self, snapshots, details):
        pass

    def check_activation(self, message, destination):
        pass

    def check_distance(self):
        pass

    def check_highest(self, version):
        pass


def without_value(message):
    """Return a message of data that says only whose contributions are in it."""
    label, result = message
    return label, Sum(result.parts, Fraction(0), 1, Fraction(0))


class Saver:
    """Saves parts as bytes, without the scenario and the network that they have in common."""

    def __init__(self, scenario, network):
        self.common = scenario, network

    def save(self, part):
        part.share(None, None)
        saved = pickle.dumps(part, pickle.HIGHEST_PROTOCOL)
        part.share(*self.common)
        return saved

    def load(self, saved):
        part = pickle.loads(saved)
        part.share(*self.common)
        part.clear()
        return part


class Inbox(NamedTuple):
    """The messages that wait at a rank, by channel, and the agreement that it does not know yet."""

    control: tuple = ()
    data: tuple = ()
    agreed: tuple | None = None

    def put(self, message):
        kind, key, content = message
        if kind == "agreed":
            return self._replace(agreed=(key, content))
        channels = dict(getattr(self, kind))
        channels[key] = (*channels.get(key, ()), content)
        return self._replace(**{kind: tuple(sorted(channels.items()))})

    def first(self, kind, key):
        if kind == "agreed":
            return kind, *self.agreed
        return kind, key, dict(getattr(self, kind))[key][0]

    def without(self, message):
        """Return what is left when this message has been taken, the first of its channel."""
        kind, key, _ = message
        if kind == "agreed":
            return self._replace(agreed=None)
        channels = dict(getattr(self, kind))
        channels[key] = channels[key][1:]
        return self._replace(**{kind: tuple(sorted(item for item in channels.items() if item[1]))})


class Local(NamedTuple):
    """A rank's state, and what is asked of it from outside.

    Attributes:
        part: the `Part`, of which no event is tried.
        saved: the same, pickled: every event is tried on a copy.
        awaits: the rank that is drawn to start what this one waits for, if it waits for that.
    """

    part: Part
    saved: bytes
    next: int
    left: bool
    waits: bool
    computes: bool
    awaits: int | None
    executed: tuple


class Effect(NamedTuple):
    """What becomes of a rank in an event: its next state, and what it sends and tells."""

    local: int
    sent: tuple
    notes: tuple
    urgent: bool
    sure: bool


class Move(NamedTuple):
    """An event of a rank with its inbox."""

    event: tuple
    after: int
    sent: tuple
    notes: tuple
    advances: bool
    urgent: bool
    sure: bool


class Outside(NamedTuple):
    """What is known from outside, in sorted pairs.

    Attributes:
        started: version and epoch.
        entered: operation and who has entered it, until all have.
        left: operation and the state in which all leave it.
        sums: the parts of a sum, and how many members have it, until all have.
    """

    started: tuple = ()
    entered: tuple = ()
    left: tuple = ()
    sums: tuple = ()


class Numbers(dict):
    """Numbers for things, and things by number."""

    def __init__(self):
        self.things = []

    def __missing__(self, thing):
        number = self[thing] = len(self.things)
        self.things.append(thing)
        return number


class Explorer:
    """All states of a scenario, as far as they have been explored.

    Args:
        reduced: whether events that only commute are not tried in every order.
        laggard: the rank on which nothing is urgent; None: there is none.
        symmetric: whether states that differ only in the ranks' numbers count as one.
        types: variants of the protocol, the rank, or the application.

    Attributes:
        seen: the states that have been met (of `symmetric` ones, their images' numbers); where
            `reduced`, only those without an urgent event.
        ends: the states in which nothing more can happen.
        apart: the largest distance between two ranks' next versions.
    """

    def __init__(
        self,
        scenario,
        reduced=True,
        laggard=None,
        symmetric=False,
        protocol_type=None,
        rank_type=Rank,
        application_type=Application,
    ):
        assert is_supported(scenario), scenario
        self.scenario = scenario
        self.reduced = reduced
        self.laggard = laggard
        self.network = network_of(scenario)
        self.saver = Saver(scenario, self.network)
        self.near = self.network.gap if self.network.bounded else sys.maxsize
        self.locals = []
        self.local_states = Numbers()
        self.possible = {}
        self.effects = {}
        self.messages = Numbers()
        self.places = Numbers()
        self.next = []
        self.data_at = []
        self.found = {}
        self.moves = {}
        self.deliveries = {}
        self.outside = Numbers()
        self.outside_after = {}
        self.shifts = shifts(scenario) if symmetric else ()
        self.images = {shift: ({}, {}) for shift in self.shifts}
        self.local_images = {}
        self.image_numbers = Numbers()
        self.apart = 0
        self.seen = set()
        self.ends = set()
        ranks = range(scenario.world_size)
        protocol_type = protocol_type or protocol_of(scenario)
        parts = [
            Part(scenario, self.network, rank, protocol_type, rank_type, application_type)
            for rank in ranks
        ]
        self.first = (
            *(self.place(self.local(part), Inbox()) for part in parts),
            self.outside[Outside()],
        )

    def lagging(self, laggard):
        """Return an explorer with this laggard; a step that one of them has made, both know."""
        other = copy(self)
        other.laggard = laggard
        other.moves, other.seen, other.ends, other.apart = {}, set(), set(), 0
        return other

    @property
    def waiting(self):
        """The most data messages that have waited at a rank."""
        return max(self.data_at[place] for place in self.moves)

    # One rank

    def local(self, part):
        """Return the number of a part's state."""
        part.forget()
        state = part.state()
        local = self.local_states[state]
        if local == len(self.locals):
            rank = part.rank
            self.locals.append(
                Local(
                    part,
                    self.saver.save(part),
                    rank.protocol.next,
                    rank.left,
                    rank.application.waits_in_group_call(),
                    rank.application.computes(),
                    part.drawn_to_start(rank),
                    tuple(rank.executed),
                )
            )
        return local

    def place(self, local, inbox):
        """Return the number of a rank's state together with its inbox."""
        place = self.places[local, inbox]
        if place == len(self.next):
            self.next.append(self.locals[local].next)
            self.data_at.append(sum(len(messages) for _, messages in inbox.data))
        return place

    def moves_of(self, place):
        """Return all that can happen on a rank, or one urgent event if there is any."""
        if place not in self.moves:
            found = self.all_moves(place)
            urgent = [
                move
                for move in found
                if self.reduced and move.urgent and move.event[0] != self.laggard
            ]
            self.moves[place] = bool(urgent), urgent[:1] or found
        return self.moves[place]

    def all_moves(self, place):
        if place not in self.found:
            self.found[place] = self.make_moves(place)
        return self.found[place]

    def make_moves(self, place):
        local, inbox = self.places.things[place]
        found = []
        for event, kind, key in self.events(local, inbox):
            message = inbox.first(kind, key) if kind else None
            effect = self.effect(local, event, message)
            found.append(
                Move(
                    event,
                    self.place(effect.local, inbox.without(message) if message else inbox),
                    effect.sent,
                    effect.notes,
                    self.locals[effect.local].next != self.locals[local].next,
                    effect.urgent,
                    effect.sure,
                )
            )
        return found

    def events(self, local, inbox):
        """Return what can happen, each with the kind and the key of the message that it takes."""
        there = tuple(channel for channel, _ in inbox.control), tuple(key for key, _ in inbox.data)
        key = local, there, bool(inbox.agreed)
        if key not in self.possible:
            part = self.locals[local].part
            part.clear()
            part.fill(inbox)
            self.possible[key] = [(event, *source_of(event, part)) for event in part.rank.events()]
        return self.possible[key]

    def effect(self, local, event, message):
        key = local, event, message
        if key not in self.effects:
            part = self.saver.load(self.locals[local].saved)
            inbox = Inbox().put(message) if message else Inbox()
            part.fill(inbox)
            sure = not part.may_never_happen(event)
            urgent, executed = is_urgent(part, event), len(part.rank.executed)
            try:
                part.happen(event)
            except Violation as violation:
                violation.event = event
                raise
            # What is received in the midst of a version concerns nothing else.
            urgent = urgent or (event[1] == "receive" and len(part.rank.executed) == executed)
            sent = tuple((rank, self.messages[sent]) for rank, sent in part.outbox())
            notes = part.told(inbox.agreed)
            self.effects[key] = Effect(self.local(part), sent, notes, urgent, sure)
        return self.effects[key]

    def deliver(self, place, message):
        """Return the place of a rank after a message has come to its inbox."""
        key = place, message
        if key not in self.deliveries:
            local, inbox = self.places.things[place]
            kind, _, content = self.messages.things[message]
            if kind == "control" and content != FIN and content[0] != FREED:
                allowed = self.locals[local].next + self.network.far
                require(content[0] <= allowed, Invariant.BOUNDED, content, "comes", allowed)
            inbox = inbox.put(self.messages.things[message])
            after = self.place(local, inbox)
            waiting = self.data_at[after]
            require(waiting <= self.network.data_bound, Invariant.BOUNDED, waiting, inbox.data)
            self.deliveries[key] = after
        return self.deliveries[key]

    # What is known from outside

    def tell(self, outside, notes):
        """Check what is told; return what is known then, and the agreements reached by it."""
        key = outside, notes
        if key not in self.outside_after:
            started, entered, left, sums = map(dict, self.outside.things[outside])
            agreed = []
            for note, what, content in notes:
                if note == Note.STARTS:
                    started.setdefault(what, content)
                elif note == Note.BEGINS:
                    require(what in started, Invariant.IN_ORDER, "nobody has started", what)
                    require(started[what] == content, Invariant.EPOCH, what, started, content)
                elif note == Note.ENTERS:
                    entered[what] = tuple(sorted((*entered.get(what, ()), content)))
                    if len(entered[what]) == self.scenario.world_size:
                        agreed.append(self.messages["agreed", what, entered.pop(what)])
                elif note == Note.LEAVES:
                    last = max(started, default=-1)
                    highest = what in left or content[0] == last + 1
                    require(highest or not self.scenario.own_pace, Invariant.HIGHEST, content, last)
                    first = left.setdefault(what, content)
                    require(first == content, Invariant.TOGETHER, what, first, content)
                else:
                    parts, members = sums.pop(what, (content, 0))
                    require(parts == content, Invariant.ONE_EACH, what, parts, content)
                    if members + 1 < len(what[1]):
                        sums[what] = parts, members + 1
            known = (tuple(sorted(pairs.items())) for pairs in (started, entered, left, sums))
            self.outside_after[key] = self.outside[Outside(*known)], agreed
        return self.outside_after[key]

    # All ranks

    def after(self, state, move):
        """Return the state after an event."""
        after = list(state)
        after[move.event[0]] = move.after
        for to, message in move.sent:
            after[to] = self.deliver(after[to], message)
        if move.notes:
            after[-1], agreed = self.tell(after[-1], move.notes)
            for message in agreed:
                for to in range(self.scenario.world_size):
                    after[to] = self.deliver(after[to], message)
        if move.advances:
            versions = [self.next[place] for place in after[:-1]]
            self.apart = max(self.apart, max(versions) - min(versions))
            require(self.apart <= self.near, Invariant.NEAR, versions)
        return after

    def options(self, state):
        """Return whether anything is urgent, and that, or all that can happen."""
        options = []
        for place in state[:-1]:
            urgent, moves = self.moves.get(place) or self.moves_of(place)
            if urgent:
                return True, moves
            options += moves
        return False, options

    def settle(self, state, met=None):
        """Let urgent events happen until there are none; return the state and all that can."""
        while True:
            urgent, options = self.options(state)
            if not urgent:
                return tuple(state), options
            if met is not None:
                met.append(options[0].event)
            state = self.after(state, options[0])

    def explore(self, most=None):
        """Explore everything, or until there are so many states; return whether it is all.

        Raises:
            Violation: of the first run that breaks an invariant; its attribute `events` says how,
                as `replay` takes them.
        """
        path = []
        try:
            self.reach(self.first, path)
            while path and (most is None or len(self.seen) < most):
                state, options, tried = path[-1]
                if tried == len(options):
                    path.pop()
                else:
                    path[-1][2] += 1
                    self.reach(self.after(state, options[tried]), path)
        except Violation as violation:
            violation.events = self.events_of(path)
            violation.args = (f"{violation}\n{self.scenario}\nafter {violation.events}",)
            raise
        if not path:
            self.check_commuting()
        return not path

    def check_commuting(self):
        """Check that urgent events commute on all ranks of which every order has been met."""
        for place, (_, moves) in self.moves.items():
            if self.reduced and moves and moves[0].event[0] != self.laggard:
                continue
            for urgent, other in permutations(moves, 2):
                if urgent.urgent and not self.commute(urgent, other):
                    inbox = self.places.things[place][1]
                    raise NotCommuting(f"{urgent.event}, {other.event}: {inbox}")

    def commute(self, urgent, other):
        """Whether both orders have the same effect, and the urgent event stays urgent."""
        first, second = self.following(urgent, other), self.following(other, urgent)
        return (
            first is not None
            and second is not None
            and second.urgent
            and first.after == second.after
            and self.channels(urgent, first) == self.channels(other, second)
            and Counter(urgent.notes + first.notes) == Counter(other.notes + second.notes)
        )

    def following(self, first, second):
        """Return a move as it is after another one; None where it is not possible then."""
        moves = self.all_moves(first.after)
        return next((move for move in moves if move.event == second.event), None)

    def channels(self, *moves):
        """Return what goes over each channel, in order."""
        channels = defaultdict(list)
        for move in moves:
            for rank, message in move.sent:
                channels[rank, self.messages.things[message][:2]].append(message)
        return channels

    def reach(self, state, path):
        """Settle a state; if it is a new one, the path goes on from there."""
        state, options = self.settle(state)
        key = self.key(state) if self.shifts else state
        if key in self.seen:
            return
        self.seen.add(key)
        if not options:
            self.check_end(state)
            self.ends.add(state)
        else:
            if not any(move.sure for move in options):
                self.check_nobody_waits(state)
            path.append([state, options, 0])

    def events_of(self, path):
        """Return the events of the run along this path, and on until something breaks."""
        met = []
        try:
            self.settle(self.first, met)
            for state, options, tried in path:
                met.append(options[tried - 1].event)
                self.settle(self.after(state, options[tried - 1]), met)
        except Violation as violation:
            # What breaks something is found out before it is tried.
            if hasattr(violation, "event"):
                met.append(violation.event)
        return met

    def check_nobody_waits(self, state):
        if not self.scenario.passive:
            return
        locals_ = [self.locals[self.places.things[place][0]] for place in state[:-1]]
        for local in locals_:
            if local.waits and not (local.awaits is not None and locals_[local.awaits].computes):
                raise Violation(Invariant.WAIT_AVOIDING, self.describe(state))

    def check_end(self, state):
        started = tuple(version for version, _ in self.outside.things[state[-1]].started)
        for place in state[:-1]:
            local, inbox = self.places.things[place]
            left, executed = self.locals[local].left, self.locals[local].executed
            if not left:
                raise Violation(Invariant.ENDS, self.describe(state))
            require(inbox == Inbox(), Invariant.DRAINED, inbox)
            require(executed == started, Invariant.IN_ORDER, executed, "of", started)

    def world_state(self, state):
        """Return the same state as `World.state` does."""
        ranks, control, data = [], set(), set()
        for number, place in enumerate(state[:-1]):
            local, inbox = self.places.things[place]
            ranks.append(self.local_states.things[local][1])
            control |= {((number, dimension), sent) for dimension, sent in inbox.control}
            for key, messages in inbox.data:
                parts = tuple((label, result.parts) for label, result in messages)
                data.add((number, key, parts))
        return tuple(ranks), frozenset(control), frozenset(data)

    def describe(self, state):
        ranks = (self.places.things[place] for place in state[:-1])
        return "; ".join(f"{self.locals[local].part.rank} {inbox}" for local, inbox in ranks)

    # Symmetry

    def key(self, state):
        """Return what tells this state from others, but not from its images."""
        *places, outside = state
        keys = []
        for shift, (ranks, outsides) in self.images.items():
            key = []
            for rank in range(len(places)):
                place = places[rank ^ shift]
                if place not in ranks:
                    ranks[place] = self.image(place, shift)
                key.append(ranks[place])
            if outside not in outsides:
                image = image_of_outside(self.outside.things[outside], shift)
                outsides[outside] = self.image_numbers[image]
            keys.append((*key, outsides[outside]))
        return min(keys)

    def image(self, place, shift):
        local, inbox = self.places.things[place]
        if (local, shift) not in self.local_images:
            image = image_of_local(self.local_states.things[local], shift)
            self.local_images[local, shift] = self.image_numbers[image]
        image = self.local_images[local, shift], image_of_inbox(inbox, shift)
        return self.image_numbers[image]


def is_supported(scenario):
    """Whether what the ranks do depends on nothing but their states and messages."""
    loads = any(isinstance(each, Load) for program in scenario.programs for each in program)
    return scenario.sends != ONE_AT_A_TIME and not (scenario.failing or scenario.frozen or loads)


def source_of(event, part):
    """Return the kind and the key of the message that an event takes from the inbox, if any."""
    action = event[1]
    if action == "hear":
        return "control", event[2]
    if action == "receive":
        return "data", part.rank.exchange.awaited()
    if action == "receive_average":
        return "data", part.rank.average.awaited()
    if action == "agree":
        return "agreed", part.rank.protocol.ops
    return None, None


def is_urgent(part, event):
    """Whether an event commutes with all that can happen before it on its rank, also later.

    An own call is what does not commute with the others: whether it is timely, and what it
    publishes for, depends on what is running, and on what runs next. And at the end, what comes in
    is forwarded only until it is known that all close.
    """
    rank, action = part.rank, event[1]
    protocol, application = rank.protocol, rank.application
    computes = application.stage == Stage.COMPUTING
    drawn = rank.world.scenario.seed is not None
    if application.interruptible or (drawn and INTERRUPTED_CALL in application.program[:1]):
        return False
    if action == "step":
        # The application has the vectors, or is alone concerned, but for what it may send then.
        sends = application.stage == Stage.HANDING_OVER or protocol.joined
        return not (computes or (drawn and sends))
    if action == "receive":
        return not (computes and calls_next(rank))
    if action == "agree":
        forwards = protocol.dimensions > 1 or drawn
        entered, own_pace = part.entered[protocol.ops].values(), rank.world.scenario.own_pace
        return not (forwards and agreement(entered, own_pace)[0] == CLOSE)
    if action == "hear":
        message = part.network.control[part.number, event[2]][0]
        if message == FIN or protocol.fin_at >= 0:
            return True
        higher = range(event[2] + 1, protocol.dimensions)
        if message[0] == FREED:
            forwarded = all(protocol.freed_sent >> k & 1 for k in higher)
            known = message[1] == protocol.freed and forwarded
            return message[1] < protocol.freed or known
        if any(protocol.sent[k] < message[0] for k in higher):
            return False
        # With what is free, which comes first says who starts the version.
        calls = calls_next(rank) or (drawn and has_called(rank))
        return message[0] <= protocol.started or not calls
    return action in ("receive_average", "leave")


def has_called(rank):
    """Whether the application has called a version that this rank does not know to be started."""
    calls = rank.application.stage in (Stage.HANDING_OVER, Stage.COLLECTING)
    return rank.protocol.awaited() >= 0 or (calls and rank.protocol.started < rank.protocol.version)


def calls_next(rank):
    """Whether the application publishes once more before it next agrees on an operation."""
    protocol, application = rank.protocol, rank.application
    if application.stage == Stage.AGREEING or not application.program:
        return False
    following = application.program[0]
    if following not in (CALL, INTERRUPTED_CALL, NONFINITE_CALL):
        return following == PUBLISH
    if rank.world.scenario.own_pace:
        return True
    t = protocol.version + protocol.base
    if application.stage in (Stage.HANDING_OVER, Stage.COLLECTING) or (
        application.stage == Stage.REDUCING and protocol.operation == all_ranks.SYNC
    ):
        t += 1
    return (t + 1) % rank.world.scenario.sync_period != 0


# Symmetry


def shifts(scenario):
    """Return by which numbers all ranks' numbers can be changed (XOR) without another effect."""
    size, programs = scenario.world_size, scenario.programs
    if scenario.seed is not None:
        return (0,)
    return tuple(
        shift
        for shift in shifts_of_groups(size, scenario.group_size)
        if all(programs[rank ^ shift] == programs[rank] for rank in range(size))
    )


@cache
def shifts_of_groups(size, group_size):
    """Return those that leave the tree and all groups as they are, and who meets in each phase."""
    if size & (size - 1):
        return (0,)
    groups = shuffle(size, group_size)
    versions = range(max(map(len, groups.cycle)))
    return tuple(
        shift
        for shift in range(size)
        if all(
            is_shifted(groups.members(rank, version), groups.members(rank ^ shift, version), shift)
            for rank in range(size)
            for version in versions
        )
    )


def is_shifted(members, image, shift):
    """Whether members that meet in a phase do so after the shift, too: places change by XOR."""
    if {rank ^ shift for rank in members} != set(image) or len(members) & (len(members) - 1):
        return False
    return len({place ^ image.index(rank ^ shift) for place, rank in enumerate(members)}) == 1


def shifted(pairs, shift):
    """Change the numbers of the ranks that these pairs begin with."""
    return tuple(sorted((rank ^ shift, content) for rank, content in pairs))


def renamed(thing, shift):
    """Change the numbers of the ranks in all contributions."""
    if isinstance(thing, Contribution):
        return thing._replace(rank=thing.rank ^ shift)
    if isinstance(thing, (tuple, frozenset)):
        kind = frozenset if isinstance(thing, frozenset) else tuple
        return kind(renamed(each, shift) for each in thing)
    return thing


def image_of_local(state, shift):
    number, *rest = state
    return number ^ shift, renamed(tuple(rest), shift)


def image_of_inbox(inbox, shift):
    data = sorted(((source ^ shift, tag), sent) for (source, tag), sent in inbox.data)
    agreed = inbox.agreed and (inbox.agreed[0], shifted(inbox.agreed[1], shift))
    return inbox.control, renamed(tuple(data), shift), agreed


def image_of_outside(outside, shift):
    entered = tuple((ops, shifted(pairs, shift)) for ops, pairs in outside.entered)
    sums = []
    for (label, members), sum_so_far in outside.sums:
        members = tuple(sorted(rank ^ shift for rank in members))
        sums.append(((label, members), renamed(sum_so_far, shift)))
    return outside.started, entered, outside.left, tuple(sorted(sums))


def laggards(scenario):
    """Return one of the ranks that differ only in their numbers, for all of them."""
    moves = shifts(scenario)
    ranks = range(scenario.world_size)
    return [rank for rank in ranks if rank == min(rank ^ shift for shift in moves)]


def explore_completely(scenario, **types):
    """Explore with every rank as the laggard; return what has been explored, by rank."""
    explorer = Explorer(scenario, **types)
    explored = [explorer.lagging(rank) for rank in laggards(scenario)]
    for each in explored:
        each.explore()
    return explored


# The same, without any cleverness


def explore_naively(scenario, **types):
    """Run a scenario in every order, world by world; return all states and those at the end.

    This takes much longer, and does with every scenario.
    """
    first = ExploredWorld(scenario, **types)
    seen, ends, unexplored = {first.state()}, set(), [pickle.dumps(first)]
    while unexplored:
        saved = unexplored.pop()
        world = pickle.loads(saved)
        events = world.events()
        if not events:
            world.check_end()
            ends.add(world.state())
        check_stop(world, events)
        for number, event in enumerate(events):
            if number:
                world = pickle.loads(saved)
            world.happen(event)
            state = world.state()
            if state not in seen:
                seen.add(state)
                unexplored.append(pickle.dumps(world))
    return seen, ends


def check_stop(world, events):
    """Where only applications that compute could go on, they may all have stopped for ever."""
    if all(world.may_never_happen(event) for event in events):
        world.check_nobody_waits()


def run_events(scenario, events, watch=None, **types):
    """Let these events happen, and check what can be checked at the end of them."""
    world = ExploredWorld(scenario, **types)
    for event in events:
        if watch:
            watch(event, world)
        world.happen(event)
    events = world.events()
    if not events:
        world.check_end()
    check_stop(world, events)


# Three versions and a synchronization


def case(world_size, group_size, activators, versions=3):
    """Some ranks make the calls, the others have joined and only take part.

    There are so many versions, the synchronization, and one version after it.
    """
    calls = (CALL,) * (versions + 2)
    everybody = len(activators) == world_size
    active, passive = (*calls, CLOSE) if everybody else (*calls, JOIN, CLOSE), (JOIN, CLOSE)
    programs = tuple(active if rank in activators else passive for rank in range(world_size))
    return Scenario(world_size, group_size, versions + 1, programs)


def sets_of_activators(world_size, group_size):
    """Return every set of activators, but for those that are another one with other numbers."""
    shifts = shifts_of_groups(world_size, group_size)
    return [
        ranks
        for count in range(1, world_size + 1)
        for ranks in combinations(range(world_size), count)
        if ranks == min(tuple(sorted(rank ^ shift for rank in ranks)) for shift in shifts)
    ]


def cases(world_sizes=(2, 3, 4)):
    """Return the arguments of `case` for every group size and set of activators, easy ones first.

    There are groups of at least two. Groups of three of four ranks are those of two.
    """
    found = [
        (world_size, group_size, activators)
        for world_size in world_sizes
        for group_size in range(2, world_size + 1)
        if shuffle(world_size, group_size).bounds != shuffle(world_size, group_size - 1).bounds
        for activators in sets_of_activators(world_size, group_size)
    ]
    return sorted(found, key=lambda each: (len(each[2]), each[0]))


def main():
    """Explore every case, or those of some numbers of ranks; print what it takes."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("ranks", nargs="*", type=int, default=(2, 3, 4))
    parser.add_argument("--versions", type=int, default=3, help="before the synchronization")
    parser.add_argument("--activators", type=int, default=4, help="at the most")
    parser.add_argument("--lag", action="store_true", help="with every rank as the laggard")
    arguments = parser.parse_args()
    print("ranks  group  activators      laggard      states    ends  seconds")
    for world_size, group_size, activators in cases(arguments.ranks):
        if len(activators) > arguments.activators:
            continue
        scenario = case(world_size, group_size, activators, arguments.versions)
        for laggard in laggards(scenario) if arguments.lag else (None,):
            began = time.monotonic()
            explorer = Explorer(scenario, laggard=laggard, symmetric=not arguments.lag)
            explorer.explore()
            print(
                f"{world_size:5}  {group_size:5}  {' '.join(map(str, activators)):10}"
                f"{'-' if laggard is None else laggard:>13}{len(explorer.seen):12,}"
                f"{len(explorer.ends):8,}{time.monotonic() - began:9.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
