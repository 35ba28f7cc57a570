"""One rank of a simulated method in which groups are formed: its requests, messages and vectors.

It does what `collectives.engine.group_port` does over MPI.
"""

import array
from collections import deque

from cpython.buffer cimport PyBUF_WRITABLE
from libc.math cimport ceil

from collectives.memory.layout cimport Layout, UserVector
from collectives.memory.vectors cimport HostVectors
from collectives.protocols.contribution cimport RESULT, SCRATCH, SNAPSHOT, X
from collectives.protocols.formed_groups cimport Group, GroupProtocol
from collectives.protocols.group_rank cimport GroupRankProtocol
from collectives.protocols.paces cimport NEVER
from collectives.protocols.rank cimport CONTRIBUTE, RETURN, WAIT
from wagma.simulation.core cimport Simulation
from wagma.simulation.values cimport Average
from wagma.simulation.vectors cimport NoVectors, add_vector


cdef class GroupsMethod(Method):
    """The method of all ranks, as their ports see it: a base class."""

    cdef void take_part(self, Group group):
        """Take part in an average; the last member begins it for all."""
        raise NotImplementedError

    cdef void end_call(self, SimulatedGroupPort port):
        """Return from the application's call."""
        raise NotImplementedError


cdef class SimulatedGroupPort(GroupRankPort):
    """The actions of one rank's engine.

    Attributes:
        protocol: the rank's protocol.
        steps: queue of actions: groups to average in, and None for the return of the call.
        exchanged: whether the first of these groups has averaged.
        total: the weight of its mean.
        told_at: the time of the next event PASSED, in nanoseconds.
        values: the vectors of a rank that trains; None: they have no values.
        given: the application's vector, whose memory it keeps alive.
        pausing: whether the application waits until the rank takes part in no group.
        met: for each rank, the sum of 1/|S| over the groups S with both it and this one.
    """

    def __init__(self, Simulation simulation, int rank, Layout layout):
        self.simulation, self.rank = simulation, rank
        self.steps, self.coming = deque(), {}
        self.told_at, self.total = NEVER, 1
        self.met = [0.0] * simulation.ranks
        if layout is not None:
            self.values = HostVectors(layout)
            add_vector(self.values, SCRATCH)
        self.deciding = GroupRankProtocol(
            NoVectors() if layout is None else self.values, simulation.ranks)

    # What applications that train call, by `wagma.simulation.group_parts`

    def attach(self, GroupProtocol protocol, like):
        """Set the rank's protocol, and begin it; a passive rank's model is `like` then."""
        self.protocol = protocol
        self.deciding.attach(self, protocol)
        if protocol.passive:
            add_vector(self.values, RESULT)
            add_vector(self.values, SNAPSHOT)
            self.give(like, 0)
        self.deciding.begin()
        self.proceed()

    def begin_call(self, vector):
        """Begin a call with this vector."""
        self.give(vector, PyBUF_WRITABLE)
        self.simulation.method.arrives(self.rank)

    def pause(self):
        """Pause, in a call of the application that ends once this rank takes part in no group."""
        self.pausing = True
        self.protocol.passed(self.now())
        self.protocol.pause()
        self.proceed()

    def resume(self):
        """Let the application make calls again."""
        self.protocol.passed(self.now())
        self.protocol.resume()
        self.proceed()

    def restart(self, long long calls):
        """Continue with this number of calls made, once all ranks have paused."""
        self.protocol.restart(calls)

    def add_moved(self, vector):
        """Add to the vector what averages changed since the last call, as a call would."""
        self.give(vector, PyBUF_WRITABLE)
        self.deciding.continue_with()

    def go_on_from(self, vector):
        """Take this vector, from which the application continues, as the model."""
        self.give(vector, 0)
        self.deciding.go_on_from()

    def leave(self):
        """Note that the application makes no more calls."""
        self.protocol.passed(self.now())
        self.protocol.leave()
        self.proceed()

    cdef int give(self, vector, int flags) except -1:
        """Set the application's vector."""
        self.given = UserVector(vector, self.values.layout, flags)
        self.values.of[X] = self.given.arrays
        return 0

    cdef void proceed(self):
        """Take the next steps, and note when the protocol is to be told the time."""
        self.deciding.advance()
        if self.pausing and not self.steps and self.protocol.is_quiet():
            self.pausing = False
            self.simulation.returns(self.rank)
        if self.protocol.due < self.told_at:
            self.told_at = self.protocol.due
            self.simulation.later(
                max(self.told_at * 1e-9 - self.simulation.now, 0), PASSED, self.rank)

    # Requests

    cdef void send(self, int destination, long long[::1] integers) noexcept nogil:
        with gil:
            self._send(destination, array.array("q", integers))

    cdef void _send(self, int destination, object integers):
        cdef SimulatedGroupPort other = (<GroupsMethod>self.simulation.method).ports[destination]
        other.coming.setdefault(self.rank, deque()).append(integers)
        self.simulation.send(self.rank, destination, 8 * len(integers), CAME, self.rank)

    cdef void reduce(self, Group group) noexcept nogil:
        with gil:
            self.steps.append(copy_of(group))

    cdef bint under_way(self, Group group) noexcept nogil:
        with gil:
            return self._under_way(group)

    cdef bint _under_way(self, Group group):
        cdef Group first
        cdef int i
        if not self.steps or self.steps[0] is None:
            return False
        first = self.steps[0]
        group.clear(first.number)
        for i in range(first.size):
            group.add(first.members[i], first.weights[i])
        return True

    cdef void return_model(self) noexcept nogil:
        with gil:
            self.steps.append(None)

    cdef int requested(self) noexcept nogil:
        with gil:
            if not self.steps:
                return WAIT
            return RETURN if self.steps[0] is None else CONTRIBUTE

    cdef void finish(self) noexcept nogil:
        with gil:
            self.steps.popleft()
            self.exchanged = False

    cdef bint is_under_way(self) noexcept nogil:
        with gil:
            return len(self.steps) > 0

    cdef long long now(self) noexcept nogil:
        return nanoseconds(self.simulation.now)

    cdef void begin_pass(self, int step, bint moves) noexcept nogil:
        pass

    cdef bint end_pass(self, int step, bint moves) noexcept nogil:
        """Return whether the pass has ended; a group of one rank ends in an event of its own."""
        with gil:
            if step == RETURN or self.steps[0].size > 1:
                return True
            self._take_part()
        return False

    cdef bint is_here(self) noexcept nogil:
        return True

    cdef bint knows_finite(self) noexcept nogil:
        return True

    cdef bint is_in_place(self) noexcept nogil:
        return False

    cdef void begin_average(self, long long number) noexcept nogil:
        with gil:
            self._take_part()

    cdef void _take_part(self):
        (<GroupsMethod>self.simulation.method).take_part(self.steps[0])

    cdef bint is_exchanged(self) noexcept nogil:
        return self.exchanged

    cdef double total_weight(self) noexcept nogil:
        return self.total

    cdef void contribute(self, Average average) noexcept nogil:
        """Add what the rank's group averages of it to the average."""
        cdef int source = X if self.deciding.lent else self.deciding.source
        average.add(self.values.of[source], self.deciding.weight, NULL)

    cdef void take(self, Average average) noexcept nogil:
        """Store the mean where it goes; until the exchange is complete nothing else is there."""
        self.total = average.weight
        average.write(self.values.arrays(self.deciding.target), NULL, NULL, NULL, NULL)

    cdef void changed(self) noexcept nogil:
        pass

    cdef void executed(self, long long number) noexcept nogil:
        if self.values is not None:
            with gil:
                self._meet(self.steps[0])

    cdef void _meet(self, Group group):
        cdef int i
        if group.size > 1:
            for i in range(group.size):
                self.met[group.members[i]] += 1 / <double>group.size

    cdef void returns(self, bint in_group) noexcept nogil:
        """Return after its vector is back from the engine's memory; after its last call it leaves.
        """
        with gil:
            (<GroupsMethod>self.simulation.method).end_call(self)


cdef long long nanoseconds(double seconds) noexcept nogil:
    """Return a time as protocols have it, rounded up lest it be before one that they wait for."""
    return <long long>ceil(seconds * 1e9)


cdef Group copy_of(Group group):
    """Return a copy of the group's record."""
    cdef Group copy = Group(group.number, room=group.size)
    cdef int i
    for i in range(group.size):
        copy.add(group.members[i], group.weights[i])
    return copy
