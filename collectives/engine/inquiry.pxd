from mpi4py.libmpi cimport MPI_Comm, MPI_Request

cdef enum:
    # Integers of an answer: calls made, next version to be executed, operation and purpose, whether
    # the application is in a call, and the collective in whose join() it waits (0: none).
    ANSWER = 5

cdef class Inquiry:
    cdef MPI_Comm comm
    cdef int rank, size, error
    # Number of questions received and asked so far.
    cdef readonly long long received, asked
    # The rank whose question this one answers, and the answer.
    cdef int asker
    cdef long long answer[ANSWER]
    cdef MPI_Request reply
    cdef int asking
    cdef MPI_Request *sends
    cdef MPI_Request *receives
    cdef long long *answers
    cdef bint *answered
    cdef bint stale

    cdef bint progress(self) noexcept nogil
    cdef void reply_to_asker(self) noexcept nogil
    cdef void ask(self) noexcept nogil
    cdef bint quiet(self) noexcept nogil
