"""The MPI that the extensions are linked with, which need not be mpi4py's."""

cdef extern from "mpi.h":
    int MPI_MAX_LIBRARY_VERSION_STRING
    int MPI_Get_library_version(char *version, int *length)


def version() -> str:
    """Return what this MPI library calls itself; MPI need not be initialized."""
    cdef bytearray text = bytearray(MPI_MAX_LIBRARY_VERSION_STRING)
    cdef int length = 0
    MPI_Get_library_version(text, &length)
    return text[:length].decode()
