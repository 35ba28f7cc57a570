"""The end of another rank's process, where MPI tells of it: see `collectives.survival`.

An error of MPI is then such an end, of which the others are to be told at once: the first rank
that sees it revokes the collective's communicators, and every rank's requests there end.
"""

import os

from mpi4py.libmpi cimport MPI_SUCCESS, MPI_STATUS_IGNORE, MPI_Comm, MPI_Request, MPI_Test
from mpi4py.MPI cimport Comm

from mpi4py import MPI

from collectives.exchange.mutex cimport mpi_mutex, pthread_mutex_lock, pthread_mutex_unlock

ctypedef int (*Iagree)(MPI_Comm, int *, MPI_Request *) noexcept nogil

cdef Iagree iagree = NULL

cdef extern from "<dlfcn.h>" nogil:
    int RTLD_LAZY
    void *dlopen(const char *, int)
    void *dlsym(void *, const char *)


cdef void *_find(bytes name) except? NULL:
    """Return what the MPI library has by this name, NULL if it has nothing."""
    # Not linked: MPI 4 has no such function, and other implementations may lack it. What mpi4py's
    # module is linked with is searched, too.
    cdef bytes module = os.fsencode(MPI.__file__)
    cdef void *library = dlopen(module, RTLD_LAZY)
    return NULL if library == NULL else dlsym(library, name)


def find_revoke():
    """Revoke communicators from now on after an error; return whether this MPI can."""
    global revoke, iagree
    revoke = <Revoke>_find(b"MPIX_Comm_revoke")
    iagree = <Iagree>_find(b"MPIX_Comm_iagree")
    return revoke != NULL and iagree != NULL


def let_finalize_end():
    """Have Open MPI's MPI_Finalize end also where a rank has died shortly before.

    With ULFM all that live meet there in MPI itself. Afterwards Open MPI has its launcher wait for
    all processes, which now and then waits for a dead one, for ever. This switch, the parameter
    `async_mpi_finalize` of its, leaves that out; parameters are read in MPI_Init, which has been.
    """
    cdef char *switch = <char *>_find(b"ompi_async_mpi_finalize")
    if switch != NULL:
        switch[0] = 1


# Agreements that MPI still writes to, also where an exception has interrupted who looks at them.
unfinished = set()


cdef class Agreement:
    """An agreement of a communicator's ranks on the bits that all have in common; begun here.

    No other thread of this process's collectives is in MPI meanwhile: Open MPI 5 may complete an
    agreement, or the next one that has its memory, twice, and with another result, if one thread
    begins it while another one makes progress.

    Args:
        comm: the communicator.
        bits: this rank's.
    """

    cdef int _bits
    cdef MPI_Request _request

    def __init__(self, Comm comm not None, int bits):
        cdef MPI_Comm handle = comm.ob_mpi
        cdef int code
        self._bits = bits
        with nogil:
            pthread_mutex_lock(&mpi_mutex)
            code = iagree(handle, &self._bits, &self._request)
            pthread_mutex_unlock(&mpi_mutex)
        if code != MPI_SUCCESS:
            raise MPI.Exception(code)
        unfinished.add(self)

    def look(self):
        """Return the bits once all ranks that live have said theirs; None: not yet.

        Raises:
            MPI.Exception: a process has ended of which not all had taken note; on all ranks.
        """
        cdef int done = 0
        cdef int code
        with nogil:
            pthread_mutex_lock(&mpi_mutex)
            code = MPI_Test(&self._request, &done, MPI_STATUS_IGNORE)
            pthread_mutex_unlock(&mpi_mutex)
        if done or code != MPI_SUCCESS:
            unfinished.discard(self)
        if code != MPI_SUCCESS:
            raise MPI.Exception(code)
        return self._bits if done else None
