from mpi4py.libmpi cimport MPI_Comm, MPI_Request

from collectives._kernels cimport real
from collectives.protocols.schedule cimport Schedule

cdef enum:
    # Elements before the data of a vector that is sent; the first is the vector's weight.
    HEADER = 16

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *, void *)
    int pthread_mutex_lock(pthread_mutex_t *)
    int pthread_mutex_trylock(pthread_mutex_t *)
    int pthread_mutex_unlock(pthread_mutex_t *)

cdef pthread_mutex_t mpi_mutex

cdef class Exchange:
    cdef MPI_Comm comm
    cdef Schedule schedule
    cdef MPI_Request requests[2]
    cdef bint is_double, summed
    cdef int itemsize, tag, size, error
    cdef const int *members
    cdef char *source
    cdef char *target
    cdef char *copy
    cdef char *saved
    cdef char *partial
    cdef char *incoming
    cdef Py_ssize_t length, block, low, high
    cdef double weight
    cdef long long bytes_sent, moves

    cdef void begin(
        self, const int *members, int size, int me, int tag,
        char *source, char *target, char *copy, char *saved
    ) noexcept nogil
    cdef bint progress(self) noexcept nogil
    cdef void _begin_block(self) noexcept nogil
    cdef void _post(self) noexcept nogil
    cdef void _receive(self) noexcept nogil
    cdef void _finish_block(self, const char *a, const char *b) noexcept nogil
    cdef void _finish_chunk(
        self, Py_ssize_t offset, const char *a, const char *b, Py_ssize_t size
    ) noexcept nogil
    cdef void _write_mean(
        self, real *out, const real *a, const real *b, Py_ssize_t count
    ) noexcept nogil
