"""The model and the change of a simulated rank of a method whose ranks send each other vectors."""

from cpython.buffer cimport PyBUF_WRITABLE
from libc.stdlib cimport free

from collectives.memory.allocation cimport Memory, zeroed
from collectives.memory.layout cimport Layout, UserVector
from wagma.simulation.vectors cimport new_memory


cdef class PeerVectors:
    """Does at once, on whole vectors, what `collectives.engine.peer_vectors` does in steps.

    The arithmetic is that of `collectives.memory.blocks`.

    Args:
        layout, like: of the model, and the model at the start.
    """

    def __init__(self, Layout layout, like):
        cdef int count = layout.count
        self.layout = layout
        self.model = <char **>zeroed(4 * count, sizeof(char *))
        if self.model == NULL:
            raise MemoryError
        self.change, self.received = self.model + count, self.model + 2 * count
        self.earlier = self.model + 3 * count
        self.model_memory = new_memory(layout.size)
        self.change_memory = new_memory(layout.size)
        layout.locate(self.model, self.model_memory.address)
        layout.locate(self.change, self.change_memory.address)
        self.give(like)
        layout.copy(self.model, self.user.arrays)
        self.user = None

    def __dealloc__(self):
        free(self.model)

    cdef int give(self, vector) except -1:
        """Set the application's vector."""
        self.user = UserVector(vector, self.layout, PyBUF_WRITABLE)
        return 0

    # Messages

    cdef Memory copy_of(self, bint changes):
        """Return a copy of the change, or of the model, to send."""
        cdef Memory copy = new_memory(self.layout.size)
        self.layout.space.copy(
            copy.address, (self.change_memory if changes else self.model_memory).address,
            self.layout.size)
        return copy

    cdef void mix(self, Memory vector, double keep, double share):
        """model = keep · model + share · vector"""
        self.layout.locate(self.received, vector.address)
        if keep == 0 and share == 1:
            self.layout.copy(self.model, self.received)
        else:
            self.layout.combine(self.model, keep, self.received, share)

    cdef Memory halve(self, Memory vector):
        """Return half of the model minus the vector, in its memory, and subtract it from the model.
        """
        self.layout.locate(self.received, vector.address)
        self.layout.combine(self.received, -0.5, self.model, 0.5)
        self.layout.combine(self.model, 1, self.received, -1)
        return vector

    cdef void look_ahead(self, double momentum):
        """model, earlier = model + momentum · (model − earlier), model"""
        cdef char **x = self.model
        cdef char **s = self.earlier
        if self.earlier_memory is None:
            self.earlier_memory = new_memory(self.layout.size)
            self.layout.locate(s, self.earlier_memory.address)
        if momentum == 0:
            self.layout.copy(s, x)
            return
        self.combine(s, s, -1, x, 1)
        self.combine(x, x, 1, s, momentum)
        self.combine(s, x, 1, s, -momentum)

    # Passes

    cdef void combine(
        self, char **to, char **x, double share_x, char **m, double share_m
    ) noexcept nogil:
        """to = share_x · x + share_m · m"""
        cdef int i
        for i in range(self.layout.count):
            self.layout.space.combine(
                i, to[i], x[i], share_x, m[i], share_m, self.layout.length[i])

    cdef void scale(self, char **to, char **source, double factor) noexcept nogil:
        """to = factor · source"""
        if factor != 1:
            self.combine(to, source, factor, source, 0)
        else:
            self.layout.copy(to, source)

    cdef void record(self, bint against_model) noexcept nogil:
        """Set the change to the application's of the model, or of what it last got."""
        self.combine(
            self.change, self.model if against_model else self.change, -1, self.user.arrays, 1)

    cdef bint is_change_finite(self, bint against_model) noexcept nogil:
        cdef char **got = self.model if against_model else self.change
        return self.layout.finite_change(got, self.user.arrays, got)

    cdef void return_model(self, double factor, bint present) noexcept nogil:
        """Give the application the model, if it is in a call; keep that unless it is the model."""
        if factor != 1:
            self.scale(self.change, self.model, factor)
        if present:
            self.layout.copy(self.user.arrays, self.model if factor == 1 else self.change)

    cdef void read_model(self, double factor) noexcept nogil:
        """Give the application the model outside of calls, as these return it."""
        self.scale(self.user.arrays, self.model, factor)
