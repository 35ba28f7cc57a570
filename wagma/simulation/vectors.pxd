from collectives.protocols.contribution cimport Vectors

cdef class NoVectors(Vectors):
    pass
