"""Memory for vectors: private to this process, or shared with other processes of its node."""

import os

from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcmp, memcpy

cdef extern from "<sys/mman.h>" nogil:
    int madvise(void *, size_t, int)
    void *mmap(void *, size_t, int, int, int, long)
    int munmap(void *, size_t)
    int MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_FIXED, MAP_NORESERVE, MAP_POPULATE, MAP_PRIVATE
    int MAP_SHARED, PROT_NONE, PROT_READ, PROT_WRITE
    void *MAP_FAILED

cdef extern from "<stdlib.h>" nogil:
    int posix_memalign(void **, size_t, size_t)

cdef enum:
    TOKEN = 16
    # Linux 6.1's, which older C libraries do not declare: use huge pages now.
    MADV_COLLAPSE = 25

# For tests: how many allocations succeed before one (`once`) or all fail; −1: all succeed.
cdef long long countdown = -1
cdef bint once = False


def fail_after(long long successes, bint only_once=False):
    """Let the allocation after `successes` others fail, and unless `only_once` all later ones.

    For tests. −1: none fails. Return what is left of the previous number; −2: one has failed.
    """
    global countdown, once
    left = countdown
    countdown, once = successes, only_once
    return left


cdef bint fails() noexcept nogil:
    """Return whether a test wants this allocation to fail."""
    global countdown
    if countdown == -1:
        return False
    if countdown > 0:
        countdown -= 1
        return False
    if once and countdown == -2:
        return False
    countdown = -2
    return True


cdef void *zeroed(size_t count, size_t size) noexcept nogil:
    """Return zeroed memory, as `calloc` does; NULL: there is none."""
    return NULL if fails() else calloc(count, size)


cdef void *resized(void *memory, size_t size) noexcept nogil:
    """Return this memory with another size, as `realloc` does; NULL: it is unchanged."""
    return NULL if fails() else realloc(memory, size)


cdef char *allocate(Py_ssize_t size) except NULL:
    """Return memory for vectors; raise MemoryError if there is none."""
    cdef char *memory = try_to_allocate(size)
    if memory == NULL:
        raise MemoryError(f"cannot allocate {size} bytes for the vectors of a collective")
    return memory


cdef char *try_to_allocate(Py_ssize_t size) noexcept nogil:
    """Return memory, on huge pages unless it is small: peers read these twice as fast."""
    cdef void *memory = NULL
    cdef bint huge = size >= HUGE_PAGE // 8
    if fails():
        return NULL
    if huge:
        size = round_up(size, HUGE_PAGE)
    if posix_memalign(&memory, HUGE_PAGE if huge else LINE, size) != 0:
        return NULL
    if huge:
        madvise(memory, size, MADV_HUGEPAGE)
    return <char *>memory


cdef void *aligned_place(size_t size) noexcept:
    """Return addresses for a mapping that begins where a huge page does; NULL: there are none."""
    cdef size_t end = round_up(size, PAGE)
    cdef char *begin
    cdef char *place
    cdef void *reserved = mmap(NULL, end + HUGE_PAGE, PROT_NONE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    if reserved == MAP_FAILED:
        return NULL
    begin = <char *>reserved
    place = begin + (HUGE_PAGE - <size_t>begin % HUGE_PAGE) % HUGE_PAGE
    if place > begin:
        munmap(begin, place - begin)
    munmap(place + end, begin + end + HUGE_PAGE - (place + end))
    return place


cdef class Memory:
    """Uninitialized memory for vectors, freed with this object."""

    def __dealloc__(self):
        free(self.address)


cdef class Segment:
    """Zeroed memory that other processes can map, freed when the last of them unmaps it.

    It has no name in any file system, so nothing is left behind however the processes end. Other
    processes open it by the creator's process id and descriptor, and verify a token at its start.

    Args:
        size: bytes, of which the token takes the first `LINE`.
        handle: the handle of another process's segment; None creates a new segment.
        huge: whether to map it on huge pages, if it is large and the kernel has them.

    Raises:
        OSError: there is no memory left, or the segment cannot be mapped.
    """

    def __init__(self, Py_ssize_t size, handle=None, bint huge=False):
        cdef void *place = NULL
        cdef void *address
        huge = huge and size >= HUGE_PAGE
        self.size = size
        self.descriptor = -1
        if fails():
            raise OSError(f"there are no {size} bytes of memory that processes can share")
        if handle is None:
            self.descriptor = os.memfd_create("wagma")
            # Allocate now: at a first touch the kernel could only report a failure by a signal.
            os.posix_fallocate(self.descriptor, 0, size)
            self.token = os.urandom(TOKEN)
        else:
            process, descriptor, self.token = handle
            self.descriptor = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
            if os.fstat(self.descriptor).st_size != size:
                raise OSError(
                    f"descriptor {descriptor} of process {process} is not the expected memory")
        # Map all pages now, not by faults in the first averages.
        if huge:
            place = aligned_place(size)
        address = mmap(
            place, size, PROT_READ | PROT_WRITE,
            MAP_SHARED | MAP_POPULATE | (MAP_FIXED if place != NULL else 0), self.descriptor, 0)
        if address == MAP_FAILED:
            if place != NULL:
                munmap(place, size)
            raise OSError(f"cannot map {size} bytes of shared memory")
        self.address = <char *>address
        if huge:
            madvise(address, size, MADV_COLLAPSE)
        if handle is None:
            memcpy(self.address, <char *>self.token, TOKEN)
        else:
            self.close()
            if memcmp(self.address, <char *>self.token, TOKEN) != 0:
                raise OSError(
                    f"descriptor {descriptor} of process {process} is not the expected memory")

    def __dealloc__(self):
        if self.address != NULL:
            munmap(self.address, self.size)
        if self.descriptor >= 0:
            os.close(self.descriptor)

    @property
    def handle(self):
        """The argument by which another process of this node maps the segment, until `close`."""
        return os.getpid(), self.descriptor, self.token

    cdef int make_private(self) except -1:
        """Map the segment so that this process, a forked child, changes a copy of its own."""
        if mmap(self.address, self.size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED,
                self.descriptor, 0) == MAP_FAILED:
            raise OSError(f"cannot map {self.size} bytes privately in a forked process")
        return 0

    def close(self):
        """Let no further process map the segment."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
