"""Averages over all ranks that any rank may start; the others take part in their next call."""

from cpython.buffer cimport PyBUF_WRITABLE
from mpi4py.MPI cimport Comm

from collectives.engine.collective cimport NativeCollective
from collectives.engine.calls cimport CALL, NO_VECTOR, Call, new_result
from collectives.engine.control_tree cimport ControlTree
from collectives.engine.ports cimport EnginePort
from collectives.memory.layout cimport UserVector
from collectives.memory.handover cimport Handover
from collectives.protocols.all_ranks cimport AVERAGE, JOIN
from collectives.protocols.contribution cimport SCRATCH, X
from collectives.protocols.triggered_average cimport (
    HeldContribution,
    TriggeredAverageProtocol,
    TriggeredRankProtocol,
)


cdef class TriggerTree(ControlTree):
    """The control tree with activations, of averages over all ranks."""

    cdef void _deliver(self, int k, long long number, long long detail) noexcept nogil:
        self.triggering.activate(number, k)

    cdef void send_activation(self, int dimension, long long version, long long ops) noexcept nogil:
        self._send(dimension, version, ops)


cdef class TriggeredPort(EnginePort):
    """Moves the vectors of these averages."""

    cdef bint begin_shared(self, long long number) noexcept nogil:
        """A vector that does not count is not read there, and the mean overwrites it."""
        if self.operations.operation == AVERAGE:
            return EnginePort.begin_shared(self, number)
        self.begin_in_ring(number, self.vectors.of[X if self.contribution.present else SCRATCH])
        return True

    cdef void remember(self) noexcept nogil:
        if self.reduction.compression is None:
            return
        if self.contribution.target == X:
            self.vectors.copy(SCRATCH, X)
        self.reduction.remember(self.vectors.start[SCRATCH])


cdef class TriggeredAverages(NativeCollective):
    """One rank of a `TriggeredAverageProtocol`.

    Args:
        control, data, like, others: see `Driver`.
        sync_period: τ, the number of calls after which a rank starts an average.
        weighing: the vectors' weights, as `settings.weighing` returns them.
    """

    def __init__(self, Comm control, Comm data, like, *, long long sync_period, weighing,
                 **others):
        cdef TriggerTree tree
        cdef TriggeredPort port
        cdef TriggeredAverageProtocol triggering
        NativeCollective.__init__(self, control, data, like, **others)
        triggering = TriggeredAverageProtocol(self.dimensions, sync_period)
        tree = TriggerTree(control, triggering)
        tree.triggering = triggering
        self.held = HeldContribution(self.vectors, triggering)
        port = TriggeredPort(
            self.exchange, self.vectors, self.held, self.rank, self.size)
        self.deciding = TriggeredRankProtocol(triggering, self.held)
        self.drive(self.deciding, port, tree, weighing)
        self.node.share(self.exchange, False, True)

    def compress_from_initial(self, like):
        """Send compressed vectors as differences from this initial one, which all ranks have."""
        cdef UserVector opened = UserVector(like, self.layout, 0)
        self.layout.copy(self.vectors.of[SCRATCH], opened.arrays)
        self.reduction.remember(self.vectors.start[SCRATCH])

    # The application's call

    cdef int begin(self, int what) except -1 nogil:
        if what != CALL:
            return NativeCollective.begin(self, what)
        # Averages that others have started become known here, at the latest.
        self.progress()
        self.deciding.call()
        return 0

    cdef int give(self, int what, char **arrays, double weight) except -1 nogil:
        if what != PASS_BY:
            return NativeCollective.give(self, what, arrays, weight)
        self.progress()
        if self.deciding.passes_by():
            self.held.give(self.caller.counted(CALL, weight))
            self.deciding.call()
        return 0

    cdef long long calls_made(self) noexcept nogil:
        return self.protocol.calls

    cdef result(self):
        cdef long long version = self.steps.called + self.protocol.base
        if not self.deciding.alone:
            return NativeCollective.result(self)
        return new_result((version, True, version, (self.rank,), self.deciding.weight, False))

    # What Python calls

    @property
    def calls(self):
        """How many calls the application has made."""
        return self.protocol.calls

    def call(self, vector, weight, Handover handover=None):
        """Make a call, which is an average over all ranks if one has been started."""
        return self.caller.carry_out(
            self, CALL, vector, PyBUF_WRITABLE, weight, 0, handover).result

    def pass_by(self, weight):
        """Make a call that averages nothing, for which no vector is needed, and return the `Call`.

        Return None if the call would average; then it has not been made.
        """
        cdef Call call = self.caller.carry_out(self, PASS_BY, None, NO_VECTOR, weight)
        return call if self.deciding.alone else None

    def start(self, vector, weight, Handover handover=None):
        """Begin this rank's next call, and return the `Call`.

        With a handover, the call begins once the device has checked the vector.
        """
        return self.caller.start(self, CALL, vector, PyBUF_WRITABLE, weight, 0, handover)

    def start_join(self, vector):
        """Begin to take part in the others' averages until all have joined; return the `Call`."""
        return self.caller.start(self, JOIN, vector, PyBUF_WRITABLE, None)
