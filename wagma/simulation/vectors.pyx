"""The vectors of simulated ranks."""

from collectives.memory.allocation cimport Memory, resized
from collectives.memory.vectors cimport HostVectors
from collectives.protocols.contribution cimport Vectors


cdef class NoVectors(Vectors):
    """A simulated rank's vectors, which have no values, and passes over which take no time."""

    cdef void copy(self, int to, int source) noexcept nogil:
        pass

    cdef void zero(self, int vector) noexcept nogil:
        pass

    cdef bint all_finite(self, int vector) noexcept nogil:
        return True

    cdef void add_change(self, int to) noexcept nogil:
        pass


cdef char *add_vector(HostVectors vectors, int vector) except NULL:
    """Give a simulated rank memory for this vector; return where it begins."""
    cdef Memory memory = new_memory(vectors.layout.size)
    vectors.memories.append(memory)
    vectors.place(vector, memory.address)
    return memory.address


cdef Memory new_memory(Py_ssize_t size):
    """Return memory for a vector; on huge pages, those of many ranks would take far more."""
    cdef Memory memory = Memory()
    memory.address = <char *>resized(NULL, size)
    if memory.address == NULL:
        raise MemoryError(f"cannot allocate {size} bytes for the vectors of simulated ranks")
    return memory
