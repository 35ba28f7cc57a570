"""Averages that any rank may start: all orders of small cases, and drawn ones of larger cases.

The ranks run the protocol's source over a network in memory, and their vectors are exact numbers.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections import deque
from fractions import Fraction

import pytest
from protocol_messages import (
    FIN,
    NOTICE,
    all_ranks,
    contribution,
    load_source,
    rank_port,
    rank_protocol,
)
from protocol_network import Numbers

from collectives.topology import activation_peers

source = load_source("triggered_average", "all_ranks", "contribution", "rank")

CALL, JOIN, CLOSE = "call", "join", "close"


class Wrong(AssertionError):
    """Something does not hold that must."""


def require(condition, *what):
    if not condition:
        raise Wrong(" ".join(map(str, what)))


class Rank(rank_port.RankPort):
    """One rank: its protocol, what it contributes, and a program of calls."""

    def __init__(self, world, number, program, types):
        self.world, self.number, self.program = world, number, deque(program)
        self.peers = activation_peers(number, world.size)
        self.protocol = types["protocol"](len(self.peers), world.period)
        self.protocol.attach(self)
        self.vectors = Numbers()
        self.held = types["held"](self.vectors, self.protocol)
        self.held.weigh_by(contribution.WORK if world.by_work else contribution.GIVEN, 0, 0)
        self.driven = types["driven"](self.protocol, self.held)
        self.driven.attach(self)
        self.waiting = self.left = False
        self.work, self.joined_before = 0, False

    # The ports

    def begin_pass(self, step, moves):
        pass

    def end_pass(self, step, moves):
        return True

    def is_here(self):
        return True

    def remember(self):
        pass

    def begin_average(self, number):
        """Contribute to the average; who has joined before counts no more."""
        weight = self.work if self.world.by_work else 1
        weight = 0 if self.joined_before else weight
        require(self.held.weight == weight, self, "weighs", self.held.weight, "not", weight)
        value = self.vectors.contributed(self.held)
        self.world.given.setdefault(self.protocol.ops, {})[self.number] = value, weight

    def is_exchanged(self):
        return len(self.world.given.get(self.protocol.ops, ())) == self.world.size

    def total_weight(self):
        """Store the mean as well."""
        given = self.world.given[self.protocol.ops].values()
        total = sum(weight for _, weight in given)
        if total == 0:  # all have joined before: all have the same
            self.mean = next(value for value, _ in given)
            require(all(value == self.mean for value, _ in given), self, "differ", given)
        else:
            self.mean = sum(value * weight for value, weight in given) / Fraction(total)
        self.vectors.of[self.held.target] = self.mean
        if self.held.copy != contribution.NOWHERE:
            self.vectors.of[self.held.copy] = self.mean
        return total or 1  # repeating an average of what is the same everywhere changes nothing

    def number_from(self, first, shift):
        pass

    def returns(self, in_group):
        self.held.forget()
        self.waiting = False

    def send_activation(self, dimension, version, ops):
        self.world.channel(self.peers[dimension][0], dimension).append(version)

    def send_fin(self, dimension):
        self.world.channel(self.peers[dimension][0], dimension).append(FIN)

    def send_failure(self, dimension, rank):
        self.world.channel(self.peers[dimension][0], dimension).append((NOTICE, rank))

    # Events

    def events(self):
        protocol, world = self.protocol, self.world
        if self.left:
            return
        for k in range(len(self.peers)):
            if world.channel(self.number, k):
                yield "hear", k
            if protocol.due_on() >> k & 1:
                yield "send", k
        if not self.waiting and self.program:
            yield ("step",)
        if protocol.stage == all_ranks.AGREEING and len(world.entered[protocol.ops]) == world.size:
            yield ("agree",)
        step = self.driven.next_step()
        if step != rank_protocol.WAIT:
            yield ("begin" if step == rank_protocol.CONTRIBUTE else "end",)
        if protocol.may_leave():
            yield ("leave",)

    def hear(self, k):
        message = self.world.channel(self.number, k).popleft()
        if message == FIN:
            self.protocol.fin(k)
        else:
            self.protocol.activate(message, k)

    def send(self, k):
        self.protocol.send_on(k)

    def step(self):
        """Compute, and do what comes next in the program."""
        what, protocol = self.program.popleft(), self.protocol
        if what == CLOSE:
            self.enter(all_ranks.CLOSE)
            return
        if what == JOIN:
            self.held.give(self.held.published_weight)
            self.enter(all_ranks.JOIN)
            return
        self.work += 1
        self.vectors.of[contribution.X] += 1 + self.number
        known = protocol.started >= protocol.version
        averages = known or protocol.made + 1 == self.world.period
        require(self.driven.passes_by() != averages, self, "does not know what it will do")
        self.held.give(self.held.worked(1))
        self.waiting = True
        self.driven.call()
        require(protocol.made <= self.world.period, self, "makes too many calls alone")
        require(self.driven.alone != averages, self, "averages not")
        require(self.driven.done != averages, self, "returns before it averages")
        if averages:
            self.note_entered()

    def enter(self, operation):
        self.waiting = True
        self.driven.enter(operation)
        self.note_entered()

    def note_entered(self):
        entered = self.world.entered.setdefault(self.protocol.ops, {})
        entered[self.number] = self.protocol.operation, self.protocol.version

    def agree(self):
        entered = self.world.entered[self.protocol.ops]
        records = [number for rank in sorted(entered) for number in entered[rank]]
        self.driven.agreed(records, len(entered), 0, False, False)
        require(not self.protocol.broken, self, "disagrees:", entered)
        if self.protocol.stage == all_ranks.AGREEING:
            self.note_entered()

    def begin(self):
        self.driven.take(rank_protocol.CONTRIBUTE)

    def end(self):
        protocol = self.protocol
        finishes = protocol.operation == all_ranks.FINISH
        self.driven.take(rank_protocol.END_AVERAGE)
        require(self.vectors.of[contribution.X] == self.mean, self, "has not got the mean")
        require(protocol.made == 0, self, "counts on")
        self.work, self.joined_before = 0, protocol.joined
        require(not (finishes and protocol.joined), self, "is joined for ever")
        if protocol.joined:
            self.note_entered()

    def leave(self):
        self.left = True

    def state(self):
        protocol = {k: v for k, v in vars(self.protocol).items() if k not in ("port", "calls")}
        held = {k: v for k, v in vars(self.held).items() if k not in ("vectors", "operations")}
        return (
            tuple(protocol.values()),
            tuple(held.values()),
            tuple(self.vectors.of),
            (len(self.program), self.waiting, self.driven.begun, self.left, self.work),
        )

    def __repr__(self):
        return f"rank {self.number} in average {self.protocol.version}, made {self.protocol.made},"


class World:
    """All ranks, and the channels between them."""

    def __init__(self, calls, period, by_work=True, epochs=1, **types):
        self.size, self.period, self.by_work = len(calls), period, by_work
        self.channels, self.entered, self.given = {}, {}, {}
        types = {
            "protocol": source.TriggeredAverageProtocol,
            "held": source.HeldContribution,
            "driven": source.TriggeredRankProtocol,
        } | types
        self.ranks = [
            Rank(self, number, ([CALL] * count + [JOIN]) * epochs + [CLOSE], types)
            for number, count in enumerate(calls)
        ]

    def channel(self, rank, dimension):
        return self.channels.setdefault((rank, dimension), deque())

    def events(self):
        return [(rank.number, *event) for rank in self.ranks for event in rank.events()]

    def happen(self, event):
        number, what, *arguments = event
        getattr(self.ranks[number], what)(*arguments)
        self.check_heard()

    def check_heard(self):
        """Where nothing is under way, all know what has been started, unless all are leaving."""
        if any(self.channels.values()) or any(rank.protocol.due_on() for rank in self.ranks):
            return
        if any(rank.protocol.fin_at >= 0 for rank in self.ranks):
            return
        newest = max(rank.protocol.started for rank in self.ranks)
        for rank in self.ranks:
            done = rank.protocol.version > newest
            require(done or rank.protocol.started == newest, rank, "has not heard of", newest)

    def check_end(self):
        require(all(rank.left for rank in self.ranks), "nothing goes on:", self.ranks)
        require(not any(self.channels.values()), "left over:", self.channels)
        require(len({rank.protocol.version for rank in self.ranks}) == 1, "versions differ")
        require(
            len({rank.vectors.of[contribution.X] for rank in self.ranks}) == 1, "vectors differ"
        )

    def state(self):
        entered = tuple(sorted((ops, *sorted(all_.items())) for ops, all_ in self.entered.items()))
        sent = tuple(sorted((key, *channel) for key, channel in self.channels.items() if channel))
        given = tuple(sorted((ops, *sorted(all_.items())) for ops, all_ in self.given.items()))
        return tuple(rank.state() for rank in self.ranks), sent, str(entered), str(given)


def explore(*arguments, **types):
    """Let everything happen in every order; return how many states that takes."""
    seen, stack = set(), [World(*arguments, **types)]
    while stack:
        world = stack.pop()
        events = world.events()
        if not events:
            world.check_end()
        # What follows from all ranks having come commutes with whatever else can happen.
        certain = [event for event in events if event[1] in ("agree", "begin", "end")]
        for event in certain[:1] or events:
            following = copy.deepcopy(world)
            following.happen(event)
            state = hash(following.state())
            if state not in seen:
                seen.add(state)
                stack.append(following)
    return len(seen)


def run_seed(seed, **types):
    """Let everything happen in an order that is drawn; return how many averages there were."""
    generator = random.Random(seed)
    size = generator.randint(1, 9)
    longest = generator.choice((3, 12))
    calls = [generator.randint(0, longest) for _ in range(size)]
    world = World(
        calls, generator.randint(1, 5), generator.random() < 0.7, generator.randint(1, 2), **types
    )
    speeds = [generator.choice((0.05, 1, 5)) for _ in range(size)]
    for _ in range(100_000):
        events = world.events()
        if not events:
            world.check_end()
            return world.ranks[0].protocol.version
        weights = [speeds[event[0]] for event in events]
        world.happen(generator.choices(events, weights)[0])
    raise Wrong("it does not end")


@pytest.mark.parametrize("calls", [(0, 2), (2, 2), (3, 1), (1, 0, 1)])
@pytest.mark.parametrize("by_work", (True, False))
def test_all_orders_of_small_cases(calls, by_work):
    assert explore(calls, 2, by_work) > 50


@pytest.mark.slow
def test_drawn_orders_of_larger_cases():
    averages = [run_seed(seed) for seed in range(300)]
    assert sum(averages) > 300 and 0 in averages


class TellsNobody(source.TriggeredAverageProtocol):
    """An average is started without a word to the others."""

    def activate(self, version, dimension):
        self.started = max(self.started, version)


class ForwardsNothing(source.TriggeredAverageProtocol):
    """What comes in is not passed on."""

    def activate(self, version, dimension):
        if dimension < 0:
            super().activate(version, dimension)
        else:
            self.started = max(self.started, version)


class BelievesOldNews(source.TriggeredAverageProtocol):
    """What comes in late is of the average that is next."""

    def activate(self, version, dimension):
        super().activate(max(version, self.version), dimension)


class CountsOn(source.TriggeredAverageProtocol):
    """The calls before an average that another rank has started count for the next one."""

    def reduced(self):
        made = self.made
        super().reduced()
        self.made = made % self.sync_period


class LeavesAtOnce(source.TriggeredAverageProtocol):
    """A rank leaves before it has passed on what was started."""

    def send_on(self, dimension):
        due, self.due = self.due, 0
        super().send_on(dimension)
        self.due = due & ~(1 << dimension) if due else 0


class JoinedCountsOn(source.HeldContribution):
    """What a rank that has joined has shared counts again."""

    def end_average(self):
        weight = self.given_weight
        super().end_average()
        self.given_weight = weight


class JoinedGivesNothing(source.HeldContribution):
    """What a rank did since its last average is lost when it joins."""

    def begin_average(self):
        if self.operations.joined:
            self.contribute(False)
            self.aim_average()
        else:
            super().begin_average()


class WorkGoesOn(source.HeldContribution):
    """Work that an average has shared counts in the next one."""

    def restart_work(self):
        pass


class PassesBy(source.TriggeredRankProtocol):
    """A call averages nothing although others wait."""

    def passes_by(self):
        return self.triggering.made + 1 < self.triggering.sync_period


class ForgetsItsWeight(source.TriggeredRankProtocol):
    """What a rank did since its last average does not count when it joins."""

    def call(self):
        before = self.held.published_weight
        super().call()
        self.held.published_weight = before


MUTANTS = (
    TellsNobody,
    ForwardsNothing,
    BelievesOldNews,
    CountsOn,
    LeavesAtOnce,
    JoinedCountsOn,
    JoinedGivesNothing,
    WorkGoesOn,
    PassesBy,
    ForgetsItsWeight,
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_wrong_variants_are_caught(mutant):
    bases = {"protocol": source.TriggeredAverageProtocol, "held": source.HeldContribution}
    name = next((name for name, base in bases.items() if issubclass(mutant, base)), "driven")
    with pytest.raises((Wrong, KeyError)):
        for seed in itertools.count():
            assert seed < 100, "no seed has caught it"
            run_seed(seed, **{name: mutant})
