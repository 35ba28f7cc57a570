from mpi4py.libmpi cimport MPI_SUCCESS

cdef inline void check(int *error, int code) noexcept nogil:
    """Note the code that a function of MPI returned if it is an error."""
    if code != MPI_SUCCESS:
        error[0] = code
