"""The tree along which activations reach all ranks: the control tree, with versions."""

from collectives.engine.control_tree cimport ControlTree

cdef enum:
    # The first integer of a message that frees versions to start; the second is the number of
    # operations before them.
    FREED = -3


cdef class ActivationTree(ControlTree):
    """The control tree with activations: a version, and the number of operations before it."""

    cdef void _deliver(self, int k, long long number, long long detail) noexcept nogil:
        if number == FREED:
            self.versions.free(detail, k)
        else:
            self.versions.activate(number, detail, k)

    cdef void send_activation(self, int dimension, long long version, long long ops) noexcept nogil:
        self._send(dimension, version, ops)

    cdef void send_free(self, int dimension, long long ops) noexcept nogil:
        self._send(dimension, FREED, ops)
