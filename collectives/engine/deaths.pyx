"""The end of another rank's process, where MPI tells of it: see `collectives.survival`.

An error of MPI is then such an end, of which the others are to be told at once: the first rank
that sees it revokes the collective's communicators, and every rank's requests there end.
"""

import os

from mpi4py import MPI

cdef extern from "<dlfcn.h>" nogil:
    int RTLD_LAZY
    void *dlopen(const char *, int)
    void *dlsym(void *, const char *)


def find_revoke():
    """Revoke communicators from now on after an error; return whether this MPI can."""
    global revoke
    # Not linked: MPI 4 has no such function, and other implementations may lack it. What mpi4py's
    # module is linked with is searched, too.
    cdef bytes module = os.fsencode(MPI.__file__)
    cdef void *library = dlopen(module, RTLD_LAZY)
    if library != NULL:
        revoke = <Revoke>dlsym(library, b"MPIX_Comm_revoke")
    return revoke != NULL
