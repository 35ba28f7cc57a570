from collectives.memory.allocation cimport Memory
from collectives.memory.vectors cimport HostVectors
from collectives.protocols.contribution cimport Vectors

cdef class NoVectors(Vectors):
    pass

cdef char *add_vector(HostVectors vectors, int vector) except NULL
cdef Memory new_memory(Py_ssize_t size)
