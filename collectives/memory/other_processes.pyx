"""Copies from and to the memory of other processes of the node, by the kernel (CMA).

Linux allows them between processes of one user, unless Yama, a seccomp filter, or separate pid
namespaces of containers forbid it; only a copy that succeeds shows that.
"""

import os
import warnings

VARIABLE = "WAGMA_COPY_MINIMUM"
NEVER = "never"
# On these processors copies by the kernel are faster than two through shared memory, from so many
# bytes on; on AMD's they are slower (docs/figures.md).
FASTER_FROM = {"GenuineIntel": 4 << 20}

cdef extern from "<sys/uio.h>" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len
    ssize_t process_vm_readv(
        int, const iovec *, unsigned long, const iovec *, unsigned long, unsigned long)
    ssize_t process_vm_writev(
        int, const iovec *, unsigned long, const iovec *, unsigned long, unsigned long)

cdef extern from "<sys/prctl.h>" nogil:
    int prctl(int, unsigned long, unsigned long, unsigned long, unsigned long)
    int PR_SET_PTRACER
    unsigned long PR_SET_PTRACER_ANY

cdef enum:
    TOKEN = 16

# What other processes try to read.
cdef bytes token = os.urandom(TOKEN)
# For tests: whether this process has no permission.
refuses = False


def from_environment():
    """Return the bytes of the shortest vector for which the kernel copies; None: for none."""
    given = os.environ.get(VARIABLE)
    if not given:
        return FASTER_FROM.get(processor())
    if given.isdecimal():
        return int(given)
    if given != NEVER:
        warnings.warn(
            f"{VARIABLE} is {given!r}, neither a number of bytes nor {NEVER!r}: there are no such "
            "copies")
    return None


def processor(path="/proc/cpuinfo"):
    """Return who made this machine's processors, as x86 names them; None: that is not known."""
    try:
        with open(path) as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == "vendor_id":
                    return value.strip()
    except OSError:
        pass
    return None


shortest = from_environment()


cdef bint copy_from(int process, char *to, const char *source, Py_ssize_t size) noexcept nogil:
    """Copy from another process's memory; return whether that succeeded."""
    return _move(process, to, <char *>source, size, True)


cdef bint copy_to(int process, char *to, const char *source, Py_ssize_t size) noexcept nogil:
    """Copy to another process's memory; return whether that succeeded."""
    return _move(process, <char *>source, to, size, False)


cdef bint _move(int process, char *here, char *there, Py_ssize_t size, bint reads) noexcept nogil:
    cdef iovec local, remote
    cdef ssize_t moved
    while size > 0:
        local.iov_base, local.iov_len = here, size
        remote.iov_base, remote.iov_len = there, size
        if reads:
            moved = process_vm_readv(process, &local, 1, &remote, 1, 0)
        else:
            moved = process_vm_writev(process, &local, 1, &remote, 1, 0)
        if moved <= 0:
            return False
        here += moved
        there += moved
        size -= moved
    return True


def is_restricted():
    """Return whether Yama lets a process access its descendants only."""
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope") as file:
            return file.read().strip() == "1"
    except OSError:
        return False


def offer():
    """Return what another process needs to find out whether it may access this one's memory."""
    if is_restricted():
        # Yama knows no narrower exception than one for all processes of this user.
        prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0)
    return os.getpid(), <size_t><char *>token, token


def may_access(offered):
    """Return whether this process may access the memory of the one that has offered that.

    None: that one has not offered it.
    """
    cdef char found[TOKEN]
    cdef size_t address
    if refuses or offered is None:
        return False
    process, address, expected = offered
    return copy_from(process, found, <char *>address, TOKEN) and found[:TOKEN] == expected
