from mpi4py.libmpi cimport MPI_Comm, MPI_Request

from collectives._vectors cimport Layout
from collectives.protocols.schedule cimport Schedule

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *, void *)
    int pthread_mutex_lock(pthread_mutex_t *)
    int pthread_mutex_trylock(pthread_mutex_t *)
    int pthread_mutex_unlock(pthread_mutex_t *)

cdef pthread_mutex_t mpi_mutex

cdef enum:
    # Steps of one exchange at most: a fold, 31 of doubling, an unfold.
    PHASES = 34

cdef class Exchange:
    cdef MPI_Comm comm
    cdef Schedule schedule
    cdef Layout layout
    cdef MPI_Request requests[2]
    cdef bint summed
    cdef int tag, size, error
    cdef const int *members
    cdef char *source
    cdef char **target
    cdef char **copy
    cdef char **saved
    # Two blocks: what has been averaged so far, and what comes in.
    cdef char *partial
    cdef char *incoming
    cdef Py_ssize_t low, high
    # The weights that meet in each step, known from the first block on.
    cdef double ours[PHASES]
    cdef double theirs[PHASES]
    cdef double weight
    cdef readonly Py_ssize_t block
    # busy_ns: nanoseconds spent on messages that had come.
    cdef long long bytes_sent, moves, busy_ns

    cdef void begin(
        self, const int *members, int size, int me, int tag,
        char *source, char **target, char **copy, char **saved
    ) noexcept nogil
    cdef bint progress(self) noexcept nogil
    cdef void _begin_block(self) noexcept nogil
    cdef char *_mean(self) noexcept nogil
    cdef void _post(self) noexcept nogil
    cdef void _receive(self) noexcept nogil
    cdef void _combine(self, double share_ours, double share_theirs) noexcept nogil
    cdef void _finish_block(
        self, const char *a, double share_a, const char *b, double share_b) noexcept nogil
    cdef void _finish_array(
        self, int i, Py_ssize_t low, Py_ssize_t high,
        const char *a, double share_a, const char *b, double share_b) noexcept nogil
