"""Windows: memory for the application's arrays that the processes of a node share.

Processes make a family of windows together, one each, and map each other's. A window has its
number and a place in it, by which other processes find the array that a rank averages. They may use
it only while that rank is in a call.
"""

import os

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES
from collectives.memory.allocation cimport LINE, PAGE, Segment, resized

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *, void *)
    int pthread_mutex_lock(pthread_mutex_t *)
    int pthread_mutex_unlock(pthread_mutex_t *)

cdef extern from "<sys/mman.h>" nogil:
    void *mmap(void *, size_t, int, int, int, long)
    int munmap(void *, size_t)
    int MAP_FIXED, MAP_PRIVATE, MAP_SHARED, PROT_READ, PROT_WRITE
    void *MAP_FAILED

cdef extern from "<unistd.h>" nogil:
    int getpid()

cdef enum:
    # Offsets in a segment, after its token: whether its process has released it; and its first
    # array, away from where the engine's vectors begin in their pages (see `allocation.apart`).
    RELEASED = LINE
    FIRST = PAGE + PAGE // 4

cdef struct Mapping:
    unsigned long long family
    int process, descriptor
    char *address
    Py_ssize_t size
    # Whether this mapping is the second one of this process: see `move_away`.
    bint moved

# All mapped segments of all families, and this process's number.
cdef pthread_mutex_t mutex
cdef Mapping *mappings = NULL
cdef int count = 0, room = 0
cdef int own_process = getpid()
pthread_mutex_init(&mutex, NULL)

cdef char *BYTES = b"B"

# The families that are mapped here, by number.
families = {}


cdef unsigned long long family_at(
    const char *address, Py_ssize_t size, Py_ssize_t *offset
) noexcept nogil:
    """Return the family of this process's window that has these bytes, and set where; 0: none."""
    cdef unsigned long long found = 0
    cdef Mapping *each
    cdef int i
    if count == 0:
        return 0
    pthread_mutex_lock(&mutex)
    for i in range(count):
        each = mappings + i
        if (each.process == own_process and each.address <= address
                and address + size <= each.address + each.size):
            found = each.family
            offset[0] = address - each.address
            break
    pthread_mutex_unlock(&mutex)
    return found


cdef char *address_of(unsigned long long family, int process) noexcept nogil:
    """Return where a process's window begins here; NULL: it is not mapped."""
    cdef char *found = NULL
    cdef int i
    pthread_mutex_lock(&mutex)
    for i in range(count):
        if mappings[i].family == family and mappings[i].process == process:
            found = mappings[i].address
            break
    pthread_mutex_unlock(&mutex)
    return found


cdef bint move_away(unsigned long long family) noexcept nogil:
    """Let other processes write to this one's window, but no longer to the application's arrays.

    These keep their addresses and what they hold; the window is mapped elsewhere. Return whether
    the system had the memory for that.
    """
    cdef Mapping *own = NULL
    cdef volatile char *page
    cdef void *address
    cdef Py_ssize_t offset = 0
    cdef bint moved = False
    cdef int i
    pthread_mutex_lock(&mutex)
    for i in range(count):
        if mappings[i].family == family and mappings[i].process == own_process:
            own = mappings + i
    if own != NULL and not own.moved:
        address = mmap(NULL, own.size, PROT_READ | PROT_WRITE, MAP_SHARED, own.descriptor, 0)
        if address != MAP_FAILED and mmap(
                own.address, own.size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED,
                own.descriptor, 0) != MAP_FAILED:
            page = own.address
            while offset < own.size:
                page[offset] = page[offset]  # a private page is copied when it is written
                offset += PAGE
            own.address = <char *>address
            own.moved = moved = True
    pthread_mutex_unlock(&mutex)
    return moved


cdef int _register(unsigned long long family, int process, Segment segment) except -1:
    global mappings, count, room
    cdef Mapping *larger
    pthread_mutex_lock(&mutex)
    if count == room:
        larger = <Mapping *>resized(mappings, (room + 64) * sizeof(Mapping))
        if larger == NULL:
            pthread_mutex_unlock(&mutex)
            raise MemoryError
        mappings, room = larger, room + 64
    mappings[count].family = family
    mappings[count].process = process
    mappings[count].address = segment.address
    mappings[count].size = segment.size
    mappings[count].descriptor = segment.descriptor
    mappings[count].moved = False
    count += 1
    pthread_mutex_unlock(&mutex)
    return 0


cdef void _forget(unsigned long long family) noexcept:
    global count
    cdef int i, kept = 0
    pthread_mutex_lock(&mutex)
    for i in range(count):
        if mappings[i].family != family:
            mappings[kept] = mappings[i]
            kept += 1
        elif mappings[i].moved:
            munmap(mappings[i].address, mappings[i].size)
    count = kept
    pthread_mutex_unlock(&mutex)


def has(size_t address):
    """Return whether an array at this address is in a window of this process."""
    cdef Py_ssize_t offset = 0
    return family_at(<const char *>address, 1, &offset) != 0


def unmap_released():
    """Unmap the families of which no process has an array any more."""
    cdef Family family
    for family in list(families.values()):
        if family.is_released():
            family.unmap()


def make_private():
    """Keep what a forked child writes to its arrays from its parent, as in memory of its own.

    The child has no windows then: it averages nothing, and releases nothing.
    """
    global own_process
    cdef Family family
    own_process = -1
    pthread_mutex_init(&mutex, NULL)  # another thread of the parent may have held it
    for family in families.values():
        family.own.make_private()


os.register_at_fork(after_in_child=make_private)


cdef class Family:
    """One process's part in a family of windows.

    Args:
        size: bytes of each window.

    Raises:
        AttributeError, OSError: the system provides no memory that others can map.
    """

    def __init__(self, Py_ssize_t size):
        self.own = Segment(FIRST + size, huge=True)
        self.segments = {}

    @property
    def handle(self):
        """What other processes of the node map this one's window by."""
        return self.own.size, self.own.handle

    def map(self, unsigned long long number, handles):
        """Map the windows of a family's processes, given their handles."""
        self.number = number
        for size, handle in handles:
            process = handle[0]
            segment = self.own
            if process != own_process:
                segment = Segment(size, handle, huge=True)
            self.segments[process] = segment
            _register(number, process, segment)
        families[number] = self

    def unmap(self):
        """Leave the family: no process uses it, or one could not map it."""
        families.pop(self.number, None)
        _forget(self.number)

    def window(self, Py_ssize_t offset, Py_ssize_t size):
        """Return a buffer of `size` bytes of this process's window, from an offset on."""
        return Window(self, FIRST + offset, size)

    cdef bint is_released(self):
        cdef Segment segment
        for segment in self.segments.values():
            if (<long long *>(segment.address + RELEASED))[0] == 0:
                return False
        return True


cdef class Window:
    """A part of this process's window, as a buffer; the family's arrays keep it mapped."""

    def __init__(self, Family family, Py_ssize_t offset, Py_ssize_t size):
        self.family, self.offset, self.size = family, offset, size
        family.arrays += 1

    def __dealloc__(self):
        cdef char *window
        if self.family is None:
            return
        self.family.arrays -= 1
        window = address_of(self.family.number, own_process)
        if self.family.arrays == 0 and window != NULL:
            (<long long *>(window + RELEASED))[0] = 1

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        buffer.buf = self.family.own.address + self.offset
        buffer.obj = self
        buffer.len = self.size
        buffer.itemsize = 1
        buffer.readonly = 0
        buffer.ndim = 1
        buffer.format = BYTES if flags & PyBUF_FORMAT else NULL
        buffer.shape = &self.size if flags & PyBUF_ND else NULL
        buffer.strides = &buffer.itemsize if (flags & PyBUF_STRIDES) == PyBUF_STRIDES else NULL
        buffer.suboffsets = NULL
        buffer.internal = NULL
