"""The protocols of `collectives.protocols.peers` on an in-memory network, without MPI.

A `World` is some ranks, each with a protocol's source, a model and an application that carries out
a program, and the messages under way between them. What can happen in it are single events: a step
of an application, and the delivery of a message, each pair's in the order in which they were sent.
`run` lets events happen in an order drawn from a seed, `explore` in every order.

``python -m tests.peer_network`` explores larger cases than the tests do; see ``--help``.
"""

from __future__ import annotations

import argparse
import array
import enum
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from protocol_messages import load_source

peers = load_source("peers")
peer_rank = load_source("peer_rank", "peers")
neighbor_average = load_source("neighbor_average", "peers")
push_sum = load_source("push_sum", "peers")
pairwise_average = load_source("pairwise_average", "peers")
parameter_server = load_source("parameter_server", "peers")
queued_neighbor_average = load_source("queued_neighbor_average", "peers")

# What a program consists of: a call, or one that an exception ends at once (INTERRUPTED); what all
# ranks do together, after which they go on as before (MEET) or from new models (RESTART), also
# after different numbers of calls (JOIN); no more calls, which is told to the others (LEAVE), or is
# not (STOP).
CALL = "call"
INTERRUPTED = "interrupted"
MEET = "meet"
RESTART = "restart"
JOIN = "join"
LEAVE = "leave"
STOP = "stop"

# What a protocol holds that does not change what it does.
COUNTS = {
    "port", "averagings", "passive", "refusals", "missed", "random", "dropped", "lag", "skipped",
    "withheld", "used",
}  # fmt: skip


class Violation(AssertionError):
    """What must hold does not."""


def require(condition, what: str, *details) -> None:
    """Raise a `Violation` that says what does not hold."""
    if not condition:
        raise Violation(f"not so: {what}: {' '.join(map(str, details))}")


class Stage(enum.Enum):
    """What an application does.

    It computes; waits in a call; waits until nothing of its own is under way, or for all others, in
    what all do together, twice; or has come to an end.
    """

    COMPUTES = 0
    WAITS = 1
    SETTLES = 2
    MEETS = 3
    SETTLES_AGAIN = 4
    MEETS_AGAIN = 5
    ENDED = 6


class Message(NamedTuple):
    """What is sent: `value` is None where it has no vector."""

    kind: int
    number: int
    epoch: int
    weight: float = 0
    value: Any = None

    @property
    def key(self) -> tuple:
        """All of it but the vector."""
        return self.kind, self.number, self.epoch, self.value is None


class Choose(Exception):
    """A protocol draws a number below this one."""


class Rank(peer_rank.PeerRankPort):
    """One rank: the port of what decides for it, which is done at once, and its application.

    Attributes:
        driven: its `PeerRankProtocol`.
        model, kept_apart, user: X, D and U.
        got: what the application last got.
        position, stage: how far the program has come.
        published: the sum of all changes that are in models by now.
        taken: what the application got in the last event, None where it got nothing.
        gave_up: whether it waited for a rank that had left.
    """

    message = Message

    def __init__(self, number: int, model):
        self.number = number
        self.model = self.got = self.user = model
        self.kept_apart = None
        self.driven = peer_rank.PeerRankProtocol(self)
        self.kept: dict[int, tuple[Message, ...]] = {}
        self.written = None
        self.outbox: list[tuple[int, Message]] = []
        self.position = self.meetings = 0
        self.stage = Stage.COMPUTES
        self.published = 0 * model
        self.taken = None
        self.contributions = ()
        self.gave_up = False
        self.choice = None

    def attach(self, protocol):
        self.protocol = protocol
        self.driven.attach(protocol)
        self.key = self._key()

    def copy(self) -> Rank:
        """Return a copy with a protocol of its own."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.kept = dict(self.kept)
        other.outbox = []
        protocol = object.__new__(type(self.protocol))
        for name, value in vars(self.protocol).items():
            setattr(protocol, name, value[:] if isinstance(value, array.array) else value)
        driven = other.driven = object.__new__(type(self.driven))
        driven.__dict__.update(vars(self.driven), port=other, exchanging=protocol)
        protocol.port = driven
        other.protocol = protocol
        other.taken = None
        return other

    def _key(self):
        """Everything that what happens from here on depends on, but for vectors."""
        state = tuple(
            value.tobytes() if isinstance(value, array.array) else value
            for name, value in vars(self.protocol).items()
            if name not in COUNTS
        )
        kept = tuple((source, len(messages)) for source, messages in sorted(self.kept.items()))
        return self.position, self.stage, self.meetings, self.epoch, self.gave_up, kept, state

    @property
    def epoch(self):
        return self.driven.epoch

    def done(self):
        """Note what the rank is in, after an event."""
        self.key = self._key()

    # The port

    def write(self, kind, number):
        self.written = self.message(kind, number, self.epoch)

    def write_model(self, kind, number, weight):
        self.written = self.message(kind, number, self.epoch, weight, self.model)

    def write_change(self, kind, number, weight):
        self.written = self.message(kind, number, self.epoch, weight, self.kept_apart)
        # It is in the server's hands now.
        self.published = self.published + self.kept_apart

    def post(self, destination):
        require(destination != self.number, "nobody sends itself messages", self.number)
        self.outbox.append((destination, self.written))

    def mix(self, source, keep, share):
        message = self._remove_from(source)
        self.model = keep * self.model + share * message.value
        return message.weight

    def halve(self, source, kind, number):
        half = (self.model - self._remove_from(source).value) / 2
        self.model = self.model - half
        self.outbox.append((source, self.message(kind, number, self.epoch, 0, half)))

    def drop(self, source):
        self._remove_from(source)

    def scale(self, factor):
        self.model = factor * self.model

    def look_ahead(self, momentum):
        earlier = self.earlier if momentum else self.model
        self.model, self.earlier = self.model + momentum * (self.model - earlier), self.model

    def publish(self, scale):
        self.model = self.model + scale * self.kept_apart
        self.published = self.published + self.kept_apart

    def return_model(self, scale):
        self.taken = self.got = self.user = scale * self.model
        self.keep_model(scale)

    def record(self, against_model):
        self.kept_apart = self.user - (self.model if against_model else self.kept_apart)

    def save(self):
        self.kept_apart = self.model

    def clear(self):
        self.kept_apart = 0 * self.model

    def replace(self):
        self.published = self.published + (self.user - self.model)
        self.model = self.user

    def keep_model(self, scale):
        if scale != 1:
            self.kept_apart = scale * self.model

    def load(self):
        self.model = self.user
        self.kept = {}

    def adopt(self):
        return False

    def is_change_finite(self, against_model):
        return True

    def answers(self):
        return False

    # Its application

    def change(self, change):
        """Change U, in place of what it was after the application last got a model."""
        self.user = self.got + change

    def _remove_from(self, source):
        first, *rest = self.kept.pop(source)
        if rest:
            self.kept[source] = tuple(rest)
        return first


class World:
    """Some ranks and the messages between them.

    Args:
        ranks: of `Rank`'s type, with protocols.
        programs: for each rank, what its application does, of `CALL`, `MEET` and so on.
        change: function of (rank, call) that returns what an application changes.
        check: function of (world before, world, the rank in which something happened), which raises
            `Violation` where that must not be.
    """

    def __init__(self, ranks, programs, change: Callable, check: Callable | None = None):
        self.ranks = ranks
        self.programs = programs
        self.change = change
        self.check = check
        self.channels: dict[tuple[int, int], tuple[Message, ...]] = {}
        for rank in ranks:
            rank.protocol.begin()
            self._collect(rank)

    @property
    def key(self):
        messages = sorted(
            (pair, *(message.key for message in sent)) for pair, sent in self.channels.items()
        )
        return tuple(messages), *(rank.key for rank in self.ranks)

    def copy(self) -> World:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.ranks = list(self.ranks)
        other.channels = dict(self.channels)
        return other

    def events(self) -> list[tuple]:
        """Return what can happen: (rank,), or (source, destination) of a message."""
        found: list[tuple] = [(rank.number,) for rank in self.ranks if self._can_act(rank)]
        for pair, messages in self.channels.items():
            receiver = self.ranks[pair[1]]
            if messages[0].epoch <= receiver.epoch:
                found.append(pair)
        return found

    def after(self, event: tuple, choice: int | None = None) -> World:
        """Return the world after an event, with this draw; raise `Choose` where one is missing."""
        world = self.copy()
        rank = world.ranks[event[-1]] = self.ranks[event[-1]].copy()
        rank.choice = choice
        if len(event) == 1:
            world._act(rank)
        else:
            world._deliver(event[0], rank)
        world._collect(rank)
        if self.check is not None:
            self.check(self, world, rank)
        return world

    def all_after(self, event: tuple) -> Iterator[World]:
        """Yield the world after an event, with each draw."""
        try:
            yield self.after(event)
        except Choose as chance:
            for choice in range(chance.args[0]):
                yield self.after(event, choice)

    def _collect(self, rank):
        for destination, message in rank.outbox:
            pair = rank.number, destination
            self.channels[pair] = (*self.channels.get(pair, ()), message)
        rank.outbox = []
        rank.done()

    def _deliver(self, source, rank):
        pair = source, rank.number
        message, *rest = self.channels.pop(pair)
        if rest:
            self.channels[pair] = tuple(rest)
        if not rank.driven.counts(message.kind, message.epoch):
            return
        if message.value is not None:
            rank.kept[source] = (*rank.kept.get(source, ()), message)
        rank.protocol.arrived(source, message.kind, message.number, message.weight)
        self._return(rank)

    # Applications

    def _can_act(self, rank):
        if rank.stage == Stage.COMPUTES:
            program = self.programs[rank.number]
            return rank.position < len(program) and program[rank.position] != STOP
        if rank.stage == Stage.WAITS:
            return rank.protocol.missing >= 0
        if rank.stage in (Stage.SETTLES, Stage.SETTLES_AGAIN):
            return rank.protocol.is_quiet() and not rank.protocol.calling
        if rank.stage in (Stage.MEETS, Stage.MEETS_AGAIN):
            return all(other.meetings >= rank.meetings for other in self.ranks)
        return False

    def _act(self, rank):
        if rank.stage == Stage.COMPUTES:
            self._begin(rank, self.programs[rank.number][rank.position])
        elif rank.stage == Stage.WAITS:
            rank.gave_up = True
            self._leave(rank)
        elif rank.stage == Stage.SETTLES:
            self._meet(rank, Stage.MEETS)
        elif rank.stage == Stage.MEETS:
            self._meet_again(rank)
            rank.stage = Stage.SETTLES_AGAIN
        elif rank.stage == Stage.SETTLES_AGAIN:
            if self.programs[rank.number][rank.position] == JOIN:
                rank.driven.caught_up()
            self._meet(rank, Stage.MEETS_AGAIN)
        else:
            self._go_on(rank)

    def _begin(self, rank, action):
        if action == CALL:
            rank.stage = Stage.WAITS
            rank.change(self.change(rank.number, rank.protocol.calls))
            rank.driven.call()
            self._return(rank)
        elif action == INTERRUPTED:
            rank.change(self.change(rank.number, rank.protocol.calls))
            rank.driven.call()
            rank.driven.interrupt()
            rank.position += 1
        elif action == LEAVE:
            self._leave(rank)
        else:
            if action == JOIN:
                rank.driven.join()
            else:
                rank.protocol.pause()
            rank.stage = Stage.SETTLES

    def _return(self, rank):
        if rank.taken is not None and rank.stage == Stage.WAITS:
            rank.stage = Stage.COMPUTES
            rank.position += 1

    def _leave(self, rank):
        rank.protocol.leave(failed=False)
        rank.stage = Stage.ENDED

    def _meet_again(self, rank):
        if self.programs[rank.number][rank.position] == JOIN:
            rank.protocol.catch_up(self._most_calls(rank.meetings))
        else:
            rank.protocol.pause()

    def _most_calls(self, meeting):
        return max(rank.contributions[meeting - 1][2] for rank in self.ranks)

    def _meet(self, rank, stage):
        rank.stage = stage
        rank.meetings += 1
        given = rank.model, getattr(rank.protocol, "weight", 1), rank.protocol.calls
        rank.contributions = (*rank.contributions, given)

    def _go_on(self, rank):
        if self.programs[rank.number][rank.position] != MEET:
            rank.got = rank.user = self.common(rank.meetings)
            rank.driven.restart(self._most_calls(rank.meetings))
        rank.protocol.resume()
        rank.stage = Stage.COMPUTES
        rank.position += 1

    def common(self, meeting: int):
        """Return what all ranks go on from after a `RESTART` that ended with this meeting."""
        given = [rank.contributions[meeting - 1] for rank in self.ranks]
        server = getattr(self.ranks[0].protocol, "server", None)
        if server is not None:
            return given[server][0]
        models, weights, _ = zip(*given)
        return sum(models) / sum(weights)

    # What can be said of it

    def has_ended(self) -> bool:
        """Whether every application has come to the end of its program, or to a STOP."""
        return all(
            rank.stage == Stage.ENDED
            or (
                rank.stage == Stage.COMPUTES
                and self.programs[rank.number][rank.position :][:1] in ((), (STOP,))
            )
            for rank in self.ranks
        )

    def messages(self) -> Iterator[Message]:
        """Yield all that are under way, or kept."""
        yield from itertools.chain(*self.channels.values())
        for rank in self.ranks:
            yield from itertools.chain(*rank.kept.values())

    def require_end(self) -> None:
        """Raise `Violation` where nothing can happen, but should."""
        require(
            self.has_ended()
            and not self.channels
            and all(rank.protocol.is_quiet() and not rank.gave_up for rank in self.ranks)
            and not any(rank.protocol.calling for rank in self.ranks),
            "everybody comes to an end",
            [(rank.stage.name, rank.position, rank.protocol.is_quiet()) for rank in self.ranks],
            self.channels,
        )


def run(world: World, generator, most: int = 100_000) -> World:
    """Let events happen in a drawn order until none can; return the world then.

    Args:
        generator: a `random.Random`.
        most: events after which it must have come to an end.
    """
    for _ in range(most):
        events = world.events()
        if not events:
            return world
        world = world.after(generator.choice(events))
    raise Violation(f"not so: everybody comes to an end: not within {most} events")


def explore(world: World) -> int:
    """Let events happen in every order and with every draw; return how many states there are.

    What can happen depends on no vector, so states that differ in vectors only are one; the checks
    are made with those that are met first.
    """
    names, worlds = {world.key: 0}, [world]

    def successors(number):
        events = worlds[number].events()
        if not events:
            worlds[number].require_end()
        for after in itertools.chain.from_iterable(map(worlds[number].all_after, events)):
            if names.setdefault(after.key, len(names)) == len(worlds):
                worlds.append(after)
            yield names[after.key]

    return _depth_first(0, successors)


def _depth_first(first, successors: Callable) -> int:
    """Return how many states can be reached, once it is shown that no run goes on for ever.

    That is one in which a state is met again while those that follow from it are gone through.
    """
    is_open = {first: True}
    path = [(first, iter(successors(first)))]
    while path:
        state = next(path[-1][1], None)
        if state is None:
            is_open[path.pop()[0]] = False
        elif state not in is_open:
            is_open[state] = True
            path.append((state, iter(successors(state))))
        else:
            require(not is_open[state], "everybody comes to an end", "a run goes on for ever")
    return len(is_open)


class Parts:
    """Every order again, by what each rank does in each of its states, which is worked out once.

    A state of the world is a tuple of numbers: of each rank's state, and of each rank's inbox. No
    vectors are kept: the checks are the ports', of what one rank does in one event.

    Args:
        world: the first one.
    """

    def __init__(self, world: World):
        self.world = world
        self.size = len(world.ranks)
        self.ranks, self.names = [], {}
        self.inboxes, self.inbox_names = [()], {(): 0}
        self.steps, self.appended = {}, {}

    def explore(self) -> int:
        """Return how many states there are, as the function does."""
        inboxes = [0] * self.size
        for (source, destination), messages in self.world.channels.items():
            for message in messages:
                inboxes[destination] = self._append(inboxes[destination], source, message.key)
        return _depth_first((*map(self._name, self.world.ranks), *inboxes), self._successors)

    def _name(self, rank):
        key = rank.number, rank.key
        if key not in self.names:
            self.names[key] = len(self.ranks)
            self.ranks.append(rank)
        return self.names[key]

    def _append(self, inbox, source, message):
        key = inbox, source, message
        if key not in self.appended:
            self.appended[key] = self._inbox([*self.inboxes[inbox], (source, message)])
        return self.appended[key]

    def _inbox(self, messages):
        messages = tuple(sorted(messages, key=lambda each: each[0]))
        if messages not in self.inbox_names:
            self.inbox_names[messages] = len(self.inboxes)
            self.inboxes.append(messages)
        return self.inbox_names[messages]

    def _successors(self, state):
        size = self.size
        found = []
        for number in range(size):
            steps = self.steps.get((state[number], state[size + number]))
            if steps is None:
                steps = self._work_out(state[number], state[size + number])
            for meeting, name, inbox, sent in steps:
                if meeting and any(self.ranks[other].meetings < meeting for other in state[:size]):
                    continue
                after = list(state)
                after[number], after[size + number] = name, inbox
                for destination, message in sent:
                    place = size + destination
                    after[place] = self._append(after[place], number, message)
                found.append(tuple(after))
        if not found:
            self._world(state).require_end()
        return found

    def _world(self, state):
        world = self.world.copy()
        world.ranks = [self.ranks[name] for name in state[: self.size]]
        world.channels = {
            (source, number): (Message(*key[:3]),)
            for number, inbox in enumerate(state[self.size :])
            for source, key in self.inboxes[inbox]
        }
        return world

    def _work_out(self, name, inbox):
        """Return (meetings needed, rank's next state, its inbox, what it sends) for its events."""
        rank, messages = self.ranks[name], self.inboxes[inbox]
        number = rank.number
        world = self.world.copy()
        # As if all others were in any meeting; whether they are is looked at later.
        world.ranks = [rank] * self.size
        world.check = None
        world.channels = {}
        for source, (kind, count, epoch, is_short) in messages:
            message = rank.message(kind, count, epoch, 0, None if is_short else 11 + source)
            pair = source, number
            world.channels[pair] = (*world.channels.get(pair, ()), message)
        events = [event for event in world.events() if len(event) > 1]
        if world._can_act(rank):
            events.append((number,))
        found = []
        for event in events:
            left = list(messages)
            if len(event) > 1:
                left.remove(next(each for each in messages if each[0] == event[0]))
            meets = len(event) == 1 and rank.stage in (Stage.MEETS, Stage.MEETS_AGAIN)
            for after in world.all_after(event):
                sent = [
                    (destination, message.key)
                    for (source, destination), messages_of in after.channels.items()
                    if source == number
                    for message in messages_of
                ]
                check_step(rank, after.ranks[number], world, after)
                meeting = rank.meetings if meets else 0
                found.append((meeting, self._name(after.ranks[number]), self._inbox(left), sent))
        self.steps[name, inbox] = found
        return found


def check_step(before: Rank, rank: Rank, world: World, after: World) -> None:
    """What a pair's rank has, and sends or has got in halves, changes by its changes alone."""
    if not isinstance(rank, PairRank) or rank.epoch != before.epoch:
        return
    total = sum(
        message.value for message in after.messages() if message.kind == pairwise_average.HALF
    ) - sum(message.value for message in world.messages() if message.kind == pairwise_average.HALF)
    total += rank.model - rank.published
    require(total == before.model - before.published, CONSERVED, total)


# Pairs


class PairLetter(Message):
    """One whose number means nothing."""

    @property
    def key(self) -> tuple:
        return self.kind, 0, self.epoch, self.value is None


class PairRank(Rank):
    """One that takes part in no other average while one is under way.

    Attributes:
        pledged: None; or to whom the rank has granted an average, and what its model was then.
    """

    message = PairLetter
    pledged = None

    def write_model(self, kind, number, weight):
        require(self.pledged is None, ATOMIC, self.number, "grants two averages at once")
        super().write_model(kind, number, weight)
        self.pledged = self.protocol.peer, self.model, self.published

    def halve(self, source, kind, number):
        require(self.pledged is None, ATOMIC, self.number, "is in two averages at once")
        (message, *_), before = self.kept[source], self.model
        super().halve(source, kind, number)
        require(2 * self.model == before + message.value, ATOMIC, self.number, "has no mean")

    def mix(self, source, keep, share):
        (message, *_) = self.kept[source]
        require(self.pledged is not None, ATOMIC, self.number, "gets half of nothing")
        peer, model, published = self.pledged
        require(peer == source, ATOMIC, self.number, "gets half of another average")
        super().mix(source, keep, share)
        mean = model + message.value
        require(self.model == mean + self.published - published, ATOMIC, "rank", self.number)
        self.pledged = None
        return message.weight

    def _key(self):
        """With its queue from its first place on; messages' numbers mean nothing to pairs."""
        protocol = self.protocol
        first, size = protocol.first_waiting, protocol.size
        waiting = [protocol.waiting[(first + i) % size] for i in range(protocol.count_waiting)]
        application = self.position, self.stage, self.meetings, self.epoch
        return (
            *application, protocol.state, protocol.state and protocol.peer, protocol.attempts,
            protocol.paused, self.pledged is None, tuple(waiting),
        )  # fmt: skip


ATOMIC = "a pair is averaged in one step"
CONSERVED = "the sum of all models changes by the changes alone"


class Chosen(pairwise_average.PairwiseAverageProtocol):
    """Asks a neighbor that is chosen from outside."""

    def draw(self, count):
        if self.port.port.choice is None:
            raise Choose(count)
        return self.port.port.choice


def pairs(edges, programs, protocol_type=Chosen, seed=0) -> World:
    """Return ranks that average in pairs, of a graph's edges (both directions)."""
    size = len(programs)
    ranks = [PairRank(number, _distinct(number)) for number in range(size)]
    for number, rank in enumerate(ranks):
        neighbors = sorted(b for a, b in edges if a == number)
        rank.attach(protocol_type(rank.driven, number, size, neighbors, seed))
    return World(ranks, programs, lambda rank, call: _distinct(rank + size), check_pairs)


def _distinct(number):
    """Whole numbers of which no few have the same sum or mean."""
    return Fraction(3**number)


def check_pairs(before: World, world: World, rank: Rank) -> None:
    """The sum of all models and halves under way is that of all changes."""
    if len({each.epoch for each in world.ranks}) > 1:
        return
    total = sum(each.model - each.published for each in world.ranks)
    total += sum(
        message.value for message in world.messages() if message.kind == pairwise_average.HALF
    )
    expected = sum(_distinct(number) for number in range(len(world.ranks)))
    require(total == expected, CONSERVED, total, expected)


def connected_graphs(size: int) -> Iterator[frozenset]:
    """Yield every connected graph of so many numbered ranks, as edges in both directions."""
    pairs = list(itertools.combinations(range(size), 2))
    for chosen in itertools.chain.from_iterable(
        itertools.combinations(pairs, count) for count in range(size - 1, len(pairs) + 1)
    ):
        reached = {0}
        for _ in range(size):
            reached |= {b for pair in chosen for a, b in (pair, pair[::-1]) if a in reached}
        if len(reached) == size:
            yield frozenset(edge for a, b in chosen for edge in ((a, b), (b, a)))


def main():
    """Explore pairs on every connected graph."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--calls", type=int, default=2)
    parser.add_argument("--action", choices=(MEET, RESTART), help="after the first call, besides")
    parser.add_argument("--stay", action="store_true", help="nobody leaves")
    arguments = parser.parse_args()
    calls = [CALL] * arguments.calls
    calls[1:1] = [arguments.action] if arguments.action else []
    end = [] if arguments.stay else [LEAVE]
    for edges in connected_graphs(arguments.ranks):
        began = time.monotonic()
        states = Parts(pairs(edges, ((*calls, *end),) * arguments.ranks)).explore()
        lines = sorted((a, b) for a, b in edges if a < b)
        print(f"{states:9} states, {time.monotonic() - began:6.1f} s: {lines}", flush=True)


if __name__ == "__main__":
    main()
