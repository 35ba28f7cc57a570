"""Ranks in simulated time: an event heap, their applications, and a LogGP network between them.

Events of equal time happen in the order in which they were caused: a simulation is a function of
its arguments.
"""

from cpython.exc cimport PyErr_CheckSignals
from libc.math cimport INFINITY
from libc.stdlib cimport free, realloc

import numpy as np

from collectives.protocols.schedule cimport Schedule
from collectives.protocols.slicing cimport Slicing, suits

# The stages of an event. A message's first byte arrives, its last byte arrives, it is noticed by the
# engine, and taken: it happens. All other events begin at the last stage.
cdef enum:
    HAPPENS
    COMES
    ARRIVES
    NOTICED

cdef enum:
    # The application of a rank has computed a step, or has its model back from a call; methods'
    # event kinds are 0 or more.
    COMPUTED = -1
    RETURNED = -2
    # Bytes up to which MPICH prefers recursive doubling.
    SHORT = 2048
    # Events between checks for signals, such as Ctrl-C's.
    SIGNALS = 1 << 16


cdef class Simulation:
    """The applications of some ranks, each of which calls its method after every step.

    A method is told of each call and answers it by `returns`; until then it schedules events:
    `later`, or on arrival of a message that one rank's engine `send`s to another's.

    Args:
        method: the `Method` that all ranks use.
        machine: the `machine.Machine` that they run on. Each of the method's servers is on a node
            of its own, behind those of the ranks.
        step_times: float64 array of shape (iterations, ranks): the seconds that each of a rank's
            steps takes before its call. A rank that skips iterations makes fewer steps. If it is
            in C order it is not copied, and the time of a step may be changed until that begins.
        seconds: when the simulation ends; each rank's steps must take at least as long. None: when
            all applications have made all steps.
        applications: what the ranks do between calls: `computed(rank)` and `returned(rank)` are
            called when a step or a call has ended, and begin what is next by `compute`, `call` and
            `finish`. None: a rank calls after each step, and computes after each call.
        absolute: whether `step_times` are the times at which steps end, unless they begin later.

    Attributes:
        now: the simulated time, in seconds.
        ranks, engines: numbers of ranks, and of ranks and servers.
        made: int64 array of shape (ranks,): number of calls of each application that have returned.
        reached: int64 array of shape (ranks,): iteration number of each rank; equal to `made`
            unless it has skipped iterations.
        waited: float64 array of shape (ranks,): seconds that each application waited in calls.
        ended: float64 array of shape (ranks,): when each application's last call returned.
        events, messages: numbers of events and messages simulated.

    Raises:
        ValueError: the steps of a rank take less than `seconds`.

    Source of the network model: Alexandrov et al., LogGP, 1995, and for the rest `machine.Machine`.
    """

    def __init__(self, Method method not None, machine, step_times, seconds=None,
                 applications=None, absolute=False):
        cdef int rank
        self.step_times = np.ascontiguousarray(step_times, dtype=np.float64)
        self.seconds = INFINITY if seconds is None else seconds
        if seconds is not None and not (np.sum(self.step_times, axis=0) >= seconds).all():
            rank = np.argmin(np.sum(self.step_times, axis=0))
            raise ValueError(f"the steps of rank {rank} take less than {seconds:g} s")
        self.iterations, self.ranks = self.step_times.shape[0], self.step_times.shape[1]
        self.waited = np.zeros(self.ranks)
        self.ended = np.zeros(self.ranks)
        self.made = np.zeros(self.ranks, dtype=np.int64)
        self.reached = np.zeros(self.ranks, dtype=np.int64)
        self.waits, self.ends, self.returned = self.waited, self.ended, self.made
        self.iterations_of = self.reached
        self.called_at = np.zeros(self.ranks)
        self.engines = self.ranks + method.servers
        self.engine_free, self.port_free, self.port_open = np.zeros((3, self.engines))
        self.machine = machine = machine.for_job(self.ranks, method.servers)
        self.node_of = machine.node_of(self.ranks, method.servers)
        self.node_free, self.node_open = np.zeros((2, self.node_of[self.engines - 1] + 1))
        self.steps, self.begun = np.zeros((2, self.ranks), dtype=np.intc)
        self.done = np.zeros(self.engines, dtype=np.int64)
        self.done[self.ranks:] = self.iterations
        # A server has no application that could compute.
        self.computing = np.ones(self.engines, dtype=np.uint8)
        self.computing[self.ranks:] = False
        self.overhead, self.latency, self.gap = machine.overhead, machine.latency, machine.gap
        self.byte_gap, self.node_byte_gap = machine.byte_gap, 1 / machine.injection
        self.local_latency, self.local_byte_gap = machine.within
        self.response = machine.response
        self.unfinished = self.ranks
        self.applications, self.absolute = applications, absolute
        self.method = method
        method.simulation = self
        method.begin()
        if applications is None:
            for rank in range(self.ranks):
                self._begin_step(rank, 0)

    def __dealloc__(self):
        free(self.heap)

    def run(self):
        """Process events until every application has made its steps, or the time is over.

        Raises:
            RuntimeError: an application waits, and no event is left.
        """
        cdef Event event
        cdef int rank
        while self.unfinished:
            if self.count == 0:
                raise RuntimeError(
                    f"{self.unfinished} of {self.ranks} ranks wait at {self.now:g} s for something "
                    "that will not happen"
                )
            if self.heap[0].time > self.seconds:
                break
            event = self._pop()
            self.now = event.time
            self._take(&event)
        if self.unfinished:
            self.now = self.seconds
            for rank in range(self.ranks):
                if not self.computing[rank]:
                    self.waits[rank] += self.now - self.called_at[rank]

    cdef void _take(self, Event *event):
        if event.stage == COMES:
            self._receive(event)
            return
        self.events += 1
        if self.events % SIGNALS == 0:
            PyErr_CheckSignals()
        if event.kind == COMPUTED and self.applications is None:
            self.call(event.rank)
        elif event.kind == COMPUTED:
            self.applications.computed(event.rank)
        elif event.kind == RETURNED:
            self.applications.returned(event.rank)
        elif event.stage != HAPPENS:
            self._arrive(event)
        else:
            self.method.happens(event.kind, event.rank, event.a, event.b)

    cdef void _receive(self, Event *event):
        """Schedule a message's arrival: its engine's port and its node receive one at a time."""
        cdef int node = self.node_of[event.rank]
        cdef double at = max(self.now, self.port_open[event.rank])
        if node != event.node:
            at = max(at, self.node_open[node])
            self.node_open[node] = at + event.nbytes * self.node_byte_gap
        event.time = event.last + (at - self.now)
        self.port_open[event.rank] = event.time + self.gap
        event.stage = ARRIVES
        self._put(event)

    cdef void _arrive(self, Event *event):
        """Schedule when the engine takes a message: once it has noticed it and is free."""
        cdef double at = self.now
        if event.stage == ARRIVES and self.computing[event.rank] and self.response > 0:
            self._push(at + self.response, event.kind, event.rank, event.a, event.b, NOTICED)
            return
        at = max(at, self.engine_free[event.rank]) + self.overhead
        self.engine_free[event.rank] = at
        self._push(at, event.kind, event.rank, event.a, event.b, HAPPENS)

    # Calls by methods

    cpdef void later(self, double delay, int kind, int rank, long long a=0, long long b=0):
        """Schedule a call of `Method.happens` with these arguments in `delay` seconds.

        Raises:
            ValueError: a negative delay or kind, or no such rank.
        """
        self._check(rank, delay, kind)
        self._push(self.now + delay, kind, rank, a, b, HAPPENS)

    cpdef void send(
        self, int source, int destination, long long nbytes, int kind, long long a=0, long long b=0
    ):
        """Send a message; once the receiving engine has taken it, `Method.happens` is called.

        It costs each of the two engines o. An engine sends one message at a time, and receives one
        at a time; the next begins at least g after the end of the last. Messages that leave a node
        share the node's injection limit, and those that enter it a limit of the same size.

        Raises:
            ValueError: a negative kind, less than a byte, or no such rank or server.
        """
        cdef int node
        cdef Event event
        cdef double at, wire, latency
        self._check(source, 0, kind)
        self._check(destination, 0, kind)
        node = self.node_of[source]
        if nbytes < 1:
            raise ValueError(f"rank {source} sends {nbytes} bytes: a message has at least one")
        at = max(self.now, self.engine_free[source]) + self.overhead
        self.engine_free[source] = at
        at = max(at, self.port_free[source])
        if node != self.node_of[destination]:
            at = max(at, self.node_free[node])
            self.node_free[node] = at + nbytes * self.node_byte_gap
            wire = max((nbytes - 1) * self.byte_gap, nbytes * self.node_byte_gap)
            latency = self.latency
        else:
            wire, latency = (nbytes - 1) * self.local_byte_gap, self.local_latency
        self.port_free[source] = at + wire + self.gap
        self.messages += 1
        event = Event(
            at + latency, self.pushed, a, b, at + wire + latency, nbytes, node, kind, destination,
            COMES)
        self.pushed += 1
        self._put(&event)

    cpdef void returns(self, int rank, double delay=0, int iterations=1):
        """Let the application's call return in `delay` seconds; then its next step begins.

        Args:
            iterations: number by which the rank's iteration number grows: more than one if it skips
                iterations.

        Raises:
            ValueError: a negative delay, no such rank, or less than one iteration.
            RuntimeError: the rank's application is not in a call.
        """
        cdef double at = self.now + delay
        self._check(rank, delay, 0)
        if rank >= self.ranks:
            raise ValueError(f"rank {rank} is a server, which makes no calls")
        if iterations < 1:
            raise ValueError(f"rank {rank} goes on by {iterations} iterations, not 1 or more")
        if self.computing[rank]:
            raise RuntimeError(f"rank {rank} is not in a call at {self.now:g} s")
        self.waits[rank] += min(at, self.seconds) - self.called_at[rank]
        self.ends[rank] = at
        self.steps[rank] += 1
        self.done[rank] += iterations
        if at <= self.seconds:
            self.returned[rank] += 1
            self.iterations_of[rank] = self.done[rank]
        # Until its next call; after its last step there is none.
        self.computing[rank] = True
        if self.applications is not None:
            self._push(at, RETURNED, rank, 0, 0, HAPPENS)
        elif self.is_done(rank):
            self.unfinished -= 1
        else:
            self._begin_step(rank, at)

    cdef bint is_done(self, int rank) noexcept:
        """Return whether the application has made its last step, after which it leaves."""
        return self.applications is None and self.done[rank] >= self.iterations

    # Calls by applications

    cpdef void call(self, int rank):
        """Call the method, for a rank's application; `returns` ends the call."""
        self.enter(rank)
        self.method.arrives(rank)

    cpdef void enter(self, int rank):
        """Note that a rank's application has begun to wait in a call, or for one."""
        self.computing[rank] = False
        self.called_at[rank] = self.now

    cpdef void compute(self, int rank):
        """Begin the next step of a rank, which ends with `computed`.

        Raises:
            IndexError: the rank has made all its steps.
        """
        if self.begun[rank] >= self.step_times.shape[0]:
            if self.seconds < INFINITY:
                return  # the sum of its steps was rounded: it ends only after the time
            raise IndexError(f"rank {rank} has {self.step_times.shape[0]} steps, and begins more")
        self._begin_step(rank, self.now)

    cpdef void finish(self, int rank):
        """Note that a rank's application has ended."""
        self.unfinished -= 1

    cdef void _check(self, int rank, double delay, int kind):
        if not 0 <= rank < self.engines:
            raise ValueError(f"no rank {rank} among {self.engines}")
        if not (delay >= 0 and kind >= 0):
            raise ValueError(f"rank {rank}: delay {delay} and kind {kind} must be 0 or more")

    cdef void _begin_step(self, int rank, double at):
        cdef double time = self.step_times[self.begun[rank], rank]
        self.begun[rank] += 1
        at = max(at, time) if self.absolute else at + time
        self._push(at, COMPUTED, rank, 0, 0, HAPPENS)

    # The heap

    cdef void _push(
        self, double time, int kind, int rank, long long a, long long b, int stage
    ):
        cdef Event event = Event(time, self.pushed, a, b, 0, 0, 0, kind, rank, stage)
        self.pushed += 1
        self._put(&event)

    cdef void _put(self, Event *event):
        """Add an event; among events of equal time, the one of lower order comes first."""
        cdef Py_ssize_t place, parent
        cdef Event *heap
        if self.count == self.room:
            heap = <Event *>realloc(self.heap, max(2 * self.room, 1024) * sizeof(Event))
            if heap == NULL:
                raise MemoryError
            self.heap, self.room = heap, max(2 * self.room, 1024)
        place = self.count
        self.count += 1
        while place > 0:
            parent = (place - 1) // 4
            if not is_before(event, &self.heap[parent]):
                break
            self.heap[place] = self.heap[parent]
            place = parent
        self.heap[place] = event[0]

    cdef Event _pop(self) noexcept:
        """Remove and return the earliest event of a 4-ary heap."""
        cdef Event first = self.heap[0], last
        cdef Py_ssize_t place = 0, child, other, end
        self.count -= 1
        last = self.heap[self.count]
        while 4 * place + 1 < self.count:
            child = 4 * place + 1
            end = min(child + 4, self.count)
            for other in range(child + 1, end):
                if is_before(&self.heap[other], &self.heap[child]):
                    child = other
            if not is_before(&self.heap[child], &last):
                break
            self.heap[place] = self.heap[child]
            place = child
        self.heap[place] = last
        return first


cdef inline bint is_before(const Event *one, const Event *other) noexcept nogil:
    return one.time < other.time or one.time == other.time and one.order < other.order


cdef class Method:
    """The ranks' engines: a protocol, driven in simulated time.

    A subclass implements `arrives`, the effects of an application's call, and `happens`, those of
    the events that it has scheduled; it must answer each call by `Simulation.returns` once.

    Attributes:
        staleness: int64 array, empty if no rank takes part with an older vector; entry k: number of
            times that a rank took part in a group's average with a vector k calls old; the last
            entry counts older vectors as well.
        calls, timely: number of calls that average in a group, and of those whose vector was in its
            average.
        updates: averages of several ranks that have been completed, each of which is one update of
            the models (Partial Reduce's equation 3); −1 if they are not counted.
        servers: number of engines without an application, numbered after the ranks; 0 unless set
            before the simulation is made.
    """

    def __cinit__(self):
        self.staleness = np.zeros(0, dtype=np.int64)
        self.updates = -1

    cpdef begin(self):
        """Prepare the ranks of `self.simulation`, which begin to compute."""

    cpdef arrives(self, int rank):
        """Handle the call of a rank's application, which has computed a step."""
        raise NotImplementedError

    cpdef happens(self, int kind, int rank, long long a, long long b):
        """Handle a scheduled event, or a message that has arrived."""
        raise NotImplementedError


cpdef double allreduce_time(machine, int size, long long nbytes, bint doubling=False):
    """Return the seconds from the last member's arrival to the result, in the engine's schedules.

    The last member's data reaches all members in the last phase: all have the result then. (If the
    number of members is not a power of two, some have it up to a step before.) The choice of the
    schedule, and its steps, are those of `collectives.protocols`.

    Args:
        machine: the `machine.Machine`, whose nodes share their injection limit among their ranks.
        size: number of members.
        nbytes: length of the vector, in bytes.
        doubling: whether long vectors use recursive doubling, too.
    """
    cdef Slicing slicing = Slicing()
    cdef double message = 2 * machine.overhead + machine.latency
    cdef double wire, engine
    if size == 1:
        return 0
    if doubling or not suits(nbytes, size):
        return doubling_time(machine, size, nbytes)
    slicing.begin(nbytes, size)
    # In a block a member sends a slice to each other member and receives one, twice.
    wire = 2 * (size - 1) * (
        slicing.blocks * machine.gap + machine.shared_byte_gap * nbytes / size)
    engine = 4 * (size - 1) * slicing.blocks * machine.overhead + nbytes / machine.memory
    return max(wire, engine) + 2 * message


cpdef double placed_allreduce_time(
    machine, nodes, long long nbytes, bint doubling=False, sharing=None
):
    """Return the seconds of `allreduce_time` for members on these nodes.

    On a machine of one level the nodes make no difference.

    Args:
        machine: the `machine.Machine`, for the job.
        nodes: the node of each member, in the order of their ranks.
        nbytes: length of the vector, in bytes.
        doubling: whether long vectors use recursive doubling, too.
        sharing: {node: number of its ranks that share its injection limit meanwhile}; None: as many
            as a node has.
    """
    cdef Slicing slicing = Slicing()
    cdef int size = len(nodes), most = 1, crossing
    cdef double latency, byte_gap, message, wire, engine, time = 0, exchanged
    if not machine.has_two_levels:
        return allreduce_time(machine, size, nbytes, doubling)
    if size == 1:
        return 0
    latency, byte_gap = machine.within
    counts = {node: nodes.count(node) for node in nodes}
    shared = {node: machine.ranks_per_node if sharing is None else sharing[node] for node in counts}
    most = max(shared.values())
    exchanged = max(machine.byte_gap, most / <double>machine.injection)
    if doubling or not suits(nbytes, size):
        return placed_doubling_time(machine, nodes, nbytes, exchanged)
    slicing.begin(nbytes, size)
    message = 2 * machine.overhead + (machine.latency if len(counts) > 1 else latency)
    engine = 4 * (size - 1) * slicing.blocks * machine.overhead + nbytes / machine.memory
    for node, count in counts.items():
        crossing = size - count
        exchanged = max(machine.byte_gap, shared[node] / machine.injection)
        wire = 2 * (count - 1) * (slicing.blocks * machine.gap + byte_gap * nbytes / size)
        wire += 2 * crossing * (slicing.blocks * machine.gap + exchanged * nbytes / size)
        time = max(time, wire)
    return max(time, engine) + 2 * message


cdef double placed_doubling_time(machine, nodes, long long nbytes, double crossing_gap):
    """Return the seconds of recursive doubling; a step is as slow as its slowest pair."""
    cdef Schedule schedule = Schedule()
    cdef int place, step, size = len(nodes)
    cdef double latency, byte_gap, within, between
    latency, byte_gap = machine.within
    crosses = [False] * steps_of(size)
    for place in range(size):
        schedule.begin(size, place)
        step = 0
        while not schedule.done:
            if nodes[schedule.peer] != nodes[place] and step < len(crosses):
                crosses[step] = True
            step += 1
            schedule.advance()
    within = latency + (nbytes - 1) * byte_gap
    between = machine.latency + (nbytes - 1) * crossing_gap
    return sum(
        2 * machine.overhead + (between if crossing else within) + nbytes / machine.memory
        for crossing in crosses
    )


cpdef double mpi_allreduce_time(machine, int size, long long nbytes):
    """Return the seconds from the last rank's arrival to MPI_Allreduce's result.

    Recursive doubling up to 2 KiB; above, recursive halving and doubling, as in MPICH. Ranks are on
    the machine's nodes in their order.

    Args: those of `allreduce_time`.

    Source: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in
    MPICH, 2005, section 4.5.
    """
    cdef double message = 2 * machine.overhead + machine.latency
    cdef double byte_gap = machine.shared_byte_gap
    cdef double local_latency, local_byte_gap, local_message
    cdef long long core = 1
    cdef int phases = 0, within = 0
    cdef double moved, kept = 0, time
    while 2 * core <= size:
        core *= 2
        phases += 1
    if size == 1:
        return 0
    # Partners are near first, at distances 1, 2, 4, …: in these phases they are on the same node.
    local_latency, local_byte_gap = machine.within
    local_message = 2 * machine.overhead + local_latency
    if machine.has_two_levels:
        while within < phases and (
            size <= machine.ranks_per_node or machine.ranks_per_node % (2 << within) == 0
        ):
            within += 1
    if nbytes <= SHORT:
        return within * (
            local_message + (nbytes - 1) * local_byte_gap + nbytes / machine.memory
        ) + (steps_of(size) - within) * doubling_step(machine, nbytes)
    moved = nbytes * (1 - 1 / <double>core)
    if within:
        kept = nbytes * (1 - 1 / <double>(1 << within))
    time = 2 * ((phases - within) * message + (moved - kept) * byte_gap) + moved / machine.memory
    time += 2 * (within * local_message + kept * local_byte_gap)
    if core != size:
        # Surplus ranks are folded onto others, and receive the result from them.
        if within == phases:
            message, byte_gap = local_message, local_byte_gap
        time += 2 * (message + nbytes * byte_gap) + nbytes / machine.memory
    return time


cdef double doubling_time(machine, int size, long long nbytes):
    """Return the seconds of recursive doubling: in every step the vector is sent and added."""
    return steps_of(size) * doubling_step(machine, nbytes)


cdef double doubling_step(machine, long long nbytes):
    """Return the seconds of a step of recursive doubling between nodes."""
    return (2 * machine.overhead + machine.latency
            + (nbytes - 1) * machine.shared_byte_gap + nbytes / machine.memory)


cdef int steps_of(int size):
    """Return the number of steps of recursive doubling."""
    cdef Schedule schedule = Schedule()
    cdef int steps = 0
    schedule.begin(size, 0)
    while not schedule.done:
        steps += 1
        schedule.advance()
    return steps
