from mpi4py.libmpi cimport MPI_Comm

# Revokes a communicator, if a job goes on without a rank whose process has ended; else NULL.
ctypedef int (*Revoke)(MPI_Comm) noexcept nogil

cdef Revoke revoke
