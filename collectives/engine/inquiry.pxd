from mpi4py.libmpi cimport MPI_Comm, MPI_Request

cdef enum:
    # What a rank answers: its next version, its next version to be executed, its operation, whether
    # its application is in the call of a version, and in the join() of which collective it is.
    ANSWER = 5

cdef class Inquiry:
    cdef MPI_Comm comm
    cdef int rank, size, tag, error
    # The questions received and asked so far.
    cdef readonly long long received, asked
    cdef long long answer[ANSWER]
    cdef MPI_Request reply
    cdef int asking
    cdef MPI_Request *sends
    cdef MPI_Request *receives
    cdef long long *answers
    cdef bint *answered
    cdef bint stale

    cdef void progress(self, const long long *answer) noexcept nogil
    cdef void ask(self) noexcept nogil
    cdef bint quiet(self) noexcept nogil
    cdef void _check(self, int rc) noexcept nogil
