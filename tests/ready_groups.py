"""Partial Reduce's controller as sets and lists say it, and its ranks in a network without MPI."""

from __future__ import annotations

import statistics
from collections import deque

import numpy as np
from formed_groups import World, state_of
from protocol_messages import load_source

source = load_source("ready_groups", "formed_groups", "paces")
controllers = load_source("ready_controller", "formed_groups", "paces")

Controller = controllers.PartialReduceController

# What an application does: it calls, calls and is interrupted, averages with all other ranks, or
# waits for them in a barrier that protocols know nothing of.
CALL, INTERRUPTED, AVERAGE, BARRIER = "ciab"


def settings(group_size, history, dynamic=False, alpha=0.5, nearest=True, each=False):
    """Return the arguments of a controller but for the number of ranks."""
    return group_size, history, dynamic, alpha, nearest, None, each


def components(groups):
    """Return the sets of ranks that groups connect."""
    found = []
    for group in groups:
        group = set(group)
        for other in [each for each in found if each & group]:
            group |= other
            found.remove(other)
        found.append(group)
    return found


class Expected:
    """The controller's decisions as sets and lists say them.

    Args:
        size, group_size, history: those of the controller.

    Attributes:
        queue: those that are ready, oldest first; groups: all of several ranks so far.
        there: those that groups may wait for.
        now: the time. held: whether a group is held.
    """

    def __init__(self, size, group_size, history):
        self.ranks, self.group_size, self.history = set(range(size)), group_size, history
        self.queue, self.groups = [], []
        self.away, self.left, self.late = set(), set(), set()
        self.now = 0
        self.since = dict.fromkeys(self.ranks, 0)
        self.times = {rank: [] for rank in self.ranks}
        self.held, self.held_until, self.holds_from = False, None, 0

    @property
    def there(self):
        return self.ranks - self.away - self.left - self.late

    def usual(self, rank):
        return statistics.median_low(self.times[rank][-5:]) if self.times[rank] else -1

    def signal(self, rank, all_have_paused):
        if all_have_paused:
            self.since = dict.fromkeys(self.ranks, self.now)
        else:
            self.times[rank].append(self.now - self.since[rank])
        self.late.discard(rank)
        self.queue.append(rank)

    def form(self):
        """Return the next group, or None."""
        if 0 < len(self.queue) < min(self.group_size, len(self.there)):
            self.late |= {rank for rank in self.there - set(self.queue) if self.is_late(rank)}
        count = min(self.group_size, len(self.there))
        group = None
        if self.queue and len(self.queue) >= count:
            group = self.chosen(count)
            self.held = group is None
        else:
            self.held = False
        if group:
            self.end(group)
        return group

    def is_late(self, rank):
        usual = self.usual(rank)
        if not self.times[rank]:
            usual = max(map(self.usual, self.ranks))
        return self.now >= self.since[rank] + max(10**9, 8 * usual)

    def chosen(self, count):
        """Return the members of the next group, or None where it is held."""
        first = list(self.queue[:count])
        if len(self.groups) < self.history:
            return first
        window = [set(group) & self.there for group in self.groups[-self.history :]]
        parts = components(group for group in window if len(group) > 1)
        met = [part for part in parts if part & set(first)]
        if len(met) > 1 or (met and len(parts) == 1):
            return first
        home = met[0] if met else set()
        others = set().union(*parts) - home
        replacement = next((rank for rank in self.queue if rank in others), None)
        if replacement is not None:
            alone = len(home & set(first)) == 1 and first[-1] in home
            del first[-2 if alone else -1]
            return [*first, replacement]
        return None if self.holds(first, others) else first

    def holds(self, first, others):
        if self.held:
            return self.now < self.held_until
        own = min(map(self.usual, first))
        coming = [self.since[rank] + self.usual(rank) for rank in others]
        if len(self.groups) < self.holds_from or not coming or min(coming) - self.now > own // 2:
            return False
        self.held_until, self.holds_from = self.now + max(own, 1), len(self.groups) + self.history
        return True

    def end(self, group):
        for rank in group:
            self.queue.remove(rank)
            self.since[rank] = self.now
        if len(group) > 1:
            self.groups.append(tuple(group))


def variant(**methods):
    """Return a controller with other methods."""
    return type("Wrong", (Controller,), methods)


class Logged(source.ReadyGroupProtocol):
    """A rank that says what has happened to it.

    Attributes:
        formed: of the controller: the groups as (number, members, weights).
        newest: of the controller: the iteration of each group's members from then on.
        log: ("call",), (number, whether in a call) of a group, ("return",).
        told: the numbers of the groups that this rank was told of.
    """

    def __init__(self, port, rank, size, controller_rank, settings, kind=Controller):
        controller = kind(size, *settings) if rank == controller_rank else None
        super().__init__(port, rank, size, controller_rank, controller)
        self.formed, self.newest, self.log, self.told = [], [], [], []

    def call(self):
        self.log.append(("call",))
        super().call()

    def reduced(self, group):
        self.log.append((group.number, self.calling))

    def returned(self):
        super().returned()
        self.log.append(("return",))

    def arrived(self, source_rank, integers):
        if integers[0] == source.GROUP:
            assert self.calling and not self.grouped, "a rank is in two groups at a time"
            self.told.append(integers[3])
        super().arrived(source_rank, integers)

    def broadcast(self):
        group = self.controller.group
        self.formed.append((group.number, *group.listed()))
        self.newest.append(self.controller.newest)
        super().broadcast()


def stepwise(rank, call):
    """What an application changes before its calls, where nobody looks."""
    return np.zeros(1)


class ReadyWorld(World):
    """Ranks of Partial Reduce with their applications.

    Args:
        programs: of each rank a text of what it does; all have as many averages and barriers, and
            leave at the end.
        others: see `World`.
    """

    def __init__(
        self, programs, given, change=stepwise, controller_rank=0, protocol=Logged, **others
    ):
        super().__init__(
            len(programs),
            None,
            change,
            protocol,
            controller_rank=controller_rank,
            settings=given,
            **others,
        )
        self.controlling = self.protocols[controller_rank]
        for port, program in zip(self.ports, programs):
            port.program, port.calls = deque(program), sum(step in "ci" for step in program)
            port.averages, port.is_paused, port.has_left = 0, False, False
            port.in_barrier = False

    def events(self):
        yield from super().events()
        averages = min(port.averages for port in self.ports)
        for rank, port in enumerate(self.ports):
            if port.is_paused and self.protocols[rank].is_quiet() and port.averages <= averages:
                yield self._go_on, rank
        if all(port.in_barrier for port in self.ports):
            yield self._end_barrier, None

    def _act(self, rank):
        port, protocol = self.ports[rank], self.protocols[rank]
        port.computes = False
        port.driven.interrupt()
        if not port.program:
            port.has_left = True
            protocol.leave()
        elif port.program[0] == BARRIER:
            port.program.popleft()
            port.in_barrier = True
        elif port.program[0] == AVERAGE:
            port.program.popleft()
            port.is_paused = True
            port.averages += 1
            protocol.pause()
        else:
            # Whoever is interrupted goes on before its call has returned; only leaving may come.
            port.computes = port.program.popleft() == INTERRUPTED
            assert not port.computes or not port.program
            self._call(rank)

    def _begin_step(self, rank):
        super()._begin_step(rank)
        self.ports[rank].computes &= not self.ports[rank].has_left

    def _end_barrier(self, _):
        for port in self.ports:
            port.in_barrier, port.computes = False, True

    def _go_on(self, rank):
        port = self.ports[rank]
        port.is_paused, port.computes = False, True
        self.protocols[rank].resume()

    def key(self):
        ranks = [
            (
                [step and step.number for step in port.steps],
                (port.averaging, port.computes, port.averages, port.is_paused, port.has_left),
                port.in_barrier,
                list(port.program),
                state_of(protocol, {"port", "log", "controller"}),
            )
            for port, protocol in zip(self.ports, self.protocols)
        ]
        channels = sorted((pair, list(sent)) for pair, sent in self.channels.items() if sent)
        begun = {number: sorted(given) for number, given in self.begun.items()}
        limits = self.spurious, self.overdue, self.passes, self.time
        controller = state_of(self.controlling.controller, {"due"})
        return repr((ranks, channels, begun, limits, controller))

    def check_end(self):
        for port, protocol in zip(self.ports, self.protocols):
            assert not port.steps
            assert protocol.calls == port.calls, "a rank waits for ever"
            assert protocol.leaving
            assert protocol.is_quiet()
        self.check_groups()

    def check_groups(self):
        """See that each rank was in all its groups, in the same order, one for each call."""
        iterations = [0] * len(self.ports)
        for (_, members, _), newest in zip(self.controlling.formed, self.controlling.newest):
            for member in members:
                iterations[member] += 1
            assert newest == max(iterations[member] for member in members)
            for member in members:
                iterations[member] = newest
        for rank, protocol in enumerate(self.protocols):
            own = [number for number, members, _ in self.controlling.formed if rank in members]
            assert protocol.told == own
            assert [event for event, *_ in protocol.log if isinstance(event, int)] == own
            assert len(own) == protocol.calls
            assert protocol.iteration == iterations[rank]
