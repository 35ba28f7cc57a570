"""Ripples' ranks in a network without MPI, whose applications also do things together, and stop."""

from __future__ import annotations

from formed_groups import World, state_of
from protocol_messages import load_source

from collectives.topology import STATIC_PERIOD, static_groups

generators = load_source("group_generator")
generated = load_source("generated_groups", "formed_groups", "paces")
static = load_source("static_groups", "formed_groups")

# What an application does: it calls; it calls and is interrupted, so that it may do the next thing
# before the call has come to its end; it does something with all ranks; it waits for them in a
# barrier that protocols know nothing of. In the end it leaves.
CALL, INTERRUPTED, MEET, BARRIER = "call", "interrupted", "meet", "barrier"

# What of a generator and of a protocol does not matter once an event is over.
SCRATCH = {"idle", "sorted", "starts", "heads", "members", "bounds", "formed", "filled"}
NOT_SEEN = {"port", "log", "formed", "record", "message", "generator"}


class Logged:
    """Writes down what the base class does.

    Attributes:
        told, log, formed: as those of `formed_groups.RandomGroups`.
    """

    def __init__(self, port, rank, size, *settings):
        super().__init__(port, rank, size, *settings)
        self.told, self.log, self.formed = [], [], []

    def call(self):
        self.log.append(("call",))
        super().call()

    def arrived(self, source, integers):
        # A group of one rank is no average.
        if integers[0] == type(self).GROUP and integers[type(self).HEADER + 1] > 1:
            self.told.append(integers[type(self).HEADER])
        super().arrived(source, integers)

    def reduced(self, group):
        self.log.append((group.number, self.calling))
        super().reduced(group)

    def returned(self):
        super().returned()
        self.log.append(("return",))


class Generated(Logged, generated.GeneratedGroupProtocol):
    """One rank with a generator."""

    GROUP, HEADER = generated.GROUP, generated.HEADER

    def answer(self, source, formed):
        super().answer(source, formed)
        for index in range(formed):
            self.generator.write(index, self.record)
            if self.record.size > 1:
                self.formed.append((self.record.number, *self.record.listed()))

    def state(self):
        """Return what happens from here on depends on."""
        generator = {n: v for n, v in vars(self.generator).items() if n not in SCRATCH}
        return seen(self), generator


class Static(Logged, static.StaticGroupProtocol):
    """One rank with a schedule."""

    GROUP, HEADER = static.GROUP, 1

    def begin_group(self, phase, iteration):
        super().begin_group(phase, iteration)
        if self.record.size > 1:
            self.formed.append((self.record.number, *self.record.listed()))

    def state(self):
        return seen(self)


def seen(protocol):
    return state_of(protocol, NOT_SEEN)


def with_generator(
    *, group_size, nodes=None, threshold=4, seed=0, controller=0, buffered=False, kind=Generated
):
    """Return what makes such ranks, of a (port, rank, size)."""

    def make(port, rank, size):
        generator = generators.GroupGenerator(
            size, group_size, seed, nodes, threshold, buffered=buffered
        )
        return kind(port, rank, size, generator, controller)

    return make


def with_schedule(*, local_size, kind=Static):
    """Return what makes such ranks, of a (port, rank, size)."""

    def make(port, rank, size):
        schedule = [static_groups(size, local_size, i) for i in range(STATIC_PERIOD)]
        own = [next((group for group in groups if rank in group), ()) for groups in schedule]
        return kind(port, rank, size, own)

    return make


class Programs(World):
    """Ranks whose applications do what their programs say, and then leave.

    Args:
        programs: for each rank a list of CALL, MEET, BARRIER and, as the last, INTERRUPTED.
        make: of a (port, rank, size), its protocol.
        limits: `spurious` and `overdue` of `World`.
    """

    def __init__(self, programs, make, change, **limits):
        super().__init__(len(programs), 0, change, make, **limits)
        self.programs = programs
        for port, program in zip(self.ports, programs):
            port.calls = len(program) - program.count(MEET) - program.count(BARRIER)
            port.done = 0
            port.meets = port.has_met = port.in_barrier = False

    def events(self):
        for event, what in super().events():
            if event != self._act or not self.protocols[what].leaving:
                yield event, what
        if all(map(self._has_paused, range(len(self.ports)))):
            yield self._meet, None
        if all(port.in_barrier for port in self.ports):
            yield self._end_barrier, None
        for rank, port in enumerate(self.ports):
            if port.has_met:
                yield self._go_on, rank

    def _act(self, rank):
        port, protocol, program = self.ports[rank], self.protocols[rank], self.programs[rank]
        what = program[port.done] if port.done < len(program) else None
        port.done += 1
        port.computes = what == INTERRUPTED
        port.driven.interrupt()
        if what == MEET:
            protocol.pause()
            port.meets = True
        elif what == BARRIER:
            port.in_barrier = True
        elif what is None:
            protocol.leave()
        else:
            self._call(rank)

    def _has_paused(self, rank):
        port = self.ports[rank]
        return port.meets and not port.steps and self.protocols[rank].is_quiet()

    def _meet(self, _):
        """All do something together, and each goes on once it has done its part of that."""
        for port in self.ports:
            port.meets, port.has_met = False, True

    def _end_barrier(self, _):
        for port in self.ports:
            port.in_barrier, port.computes = False, True

    def _go_on(self, rank):
        self.ports[rank].has_met = False
        self.ports[rank].computes = True
        self.protocols[rank].resume()

    def key(self):
        ranks = [
            (
                [step and step.number for step in port.steps],
                (port.averaging, port.computes, port.done, port.meets, port.has_met),
                port.in_barrier,
                protocol.state(),
            )
            for port, protocol in zip(self.ports, self.protocols)
        ]
        channels = sorted((pair, list(sent)) for pair, sent in self.channels.items() if sent)
        begun = {number: sorted(given) for number, given in self.begun.items()}
        limits = self.spurious, self.overdue, self.passes, self.time
        return repr((ranks, channels, begun, limits))

    @property
    def formed(self):
        """All groups, as (number, members, weights)."""
        return sorted(group for protocol in self.protocols for group in protocol.formed)

    def check_end(self):
        """See that all have left, each once it was in every group of its, in the groups' order."""
        formed = self.formed
        assert len({number for number, *_ in formed}) == len(formed)
        for rank, (port, protocol) in enumerate(zip(self.ports, self.protocols)):
            assert not port.steps, f"rank {rank} waits for group {port.steps[0]}"
            assert protocol.leaving, f"rank {rank} waits after {protocol.log}"
            assert protocol.calls == port.calls
            assert protocol.is_quiet()
            own = [number for number, members, _ in formed if rank in members]
            assert protocol.told == own
            assert [event for event, *_ in protocol.log if isinstance(event, int)] == own
