"""Copies of a device's vectors in pinned host memory, which the host averages in their place."""

import threading

import numpy

from libc.stdlib cimport free

from collectives.exchange.mutex cimport (
    pthread_mutex_init,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from collectives.memory.allocation cimport zeroed
from collectives.memory.driver cimport (
    SUCCESS,
    PinnedMemory,
    check,
    create_stream,
    cu,
    enter,
    leave,
)
from collectives.memory.layout cimport HEADER, Layout

cdef extern from "<unistd.h>" nogil:
    int getpid()

cdef extern from "<semaphore.h>" nogil:
    int sem_init(sem_t *, int, unsigned)
    int sem_destroy(sem_t *)
    int sem_post(sem_t *)
    int sem_wait(sem_t *)

cdef extern from *:
    """
    static Py_ssize_t load_end(const Py_ssize_t *end)
    {
        return __atomic_load_n(end, __ATOMIC_ACQUIRE);
    }
    static void store_end(Py_ssize_t *end, Py_ssize_t value)
    {
        __atomic_store_n(end, value, __ATOMIC_RELEASE);
    }
    """
    Py_ssize_t load_end(const Py_ssize_t *end) noexcept nogil
    void store_end(Py_ssize_t *end, Py_ssize_t value) noexcept nogil


cdef class Mirror(Handover):
    """Copies on the host: `arrays` are its numpy arrays, one per array of the `Layout`.

    Vectors are copied in blocks, so that the first blocks can be averaged, and copied back, while
    the last ones are still being copied. A separate thread queues the copies back, because the
    driver may block it.

    Args:
        layout, addresses: see `Handover`.
        block: bytes of a block of copies, a multiple of 64.
    """

    def __init__(self, Layout layout, addresses, Py_ssize_t block):
        cdef int i, mode
        Handover.__init__(self, layout, addresses)
        self.block = block
        self.blocks = <int>((layout.size - HEADER + block - 1) // block)
        self.given_back = self.final = layout.size
        pthread_mutex_init(&self.returning, NULL)
        sem_init(&self.due, 0, 0)
        self.host = <char **>zeroed(layout.count, sizeof(char *))
        if self.host == NULL:
            raise MemoryError
        self.memory = PinnedMemory(layout.size - HEADER, self.context)
        self.arrays = []
        for i in range(layout.count):
            self.host[i] = self.memory.address + layout.begin[i] - HEADER
            self.arrays.append(numpy.frombuffer(
                self.memory, layout.dtypes[i], layout.length[i], layout.begin[i] - HEADER))
        check(b"cuCtxPushCurrent", enter(self.current, &mode))
        try:
            create_stream(&self.back)
        finally:
            leave(mode)

    def __dealloc__(self):
        self._destroy()
        free(self.host)
        sem_destroy(&self.due)

    cdef void _destroy(self) noexcept:
        cdef int mode
        if (self.pid == getpid() and self.current != NULL
                and enter(self.current, &mode) == SUCCESS):
            if self.back != NULL:
                cu.StreamDestroy(self.back)
            leave(mode)
        Handover._destroy(self)

    cdef int _begin(self) except -1 nogil:
        cdef int block
        cdef Py_ssize_t low
        # The device may still be reading the copy given back last.
        check(b"cuStreamWaitEvent", cu.StreamWaitEvent(self.out, self.returned, 0))
        if self.flag != NULL:
            self._check_finite()
        for block in range(self.blocks):
            low = HEADER + block * self.block
            self._copy_block(low, min(low + self.block, self.layout.size))
            self._mark()
        self.first_point = self.timeline.last - self.blocks + 1
        pthread_mutex_lock(&self.returning)
        self.given_back = self.final = HEADER
        pthread_mutex_unlock(&self.returning)
        self.fetching = True
        return 0

    cdef int _copy_block(self, Py_ssize_t low, Py_ssize_t high) except -1 nogil:
        cdef Py_ssize_t first, size, begin
        cdef int i
        for i in range(self.layout.count):
            size = self.layout.part(i, low, high, &first) * self.layout.itemsize[i]
            begin = first * self.layout.itemsize[i]
            if size > 0:
                check(b"cuMemcpyDtoHAsync", cu.MemcpyDtoHAsync(
                    self.host[i] + begin, self.device[i] + begin, size, self.out))
        return 0

    cdef bint has(self, Py_ssize_t end) noexcept nogil:
        cdef long long block = (end - HEADER - 1) // self.block
        if not self.fetching:
            return True
        if not self._is_over(self.first_point + block):
            return False
        if block == self.blocks - 1 or self.error != SUCCESS:
            self.fetching = False
        return True

    def withdraw(self):
        cdef int mode
        if self.fetching and enter(self.current, &mode) == SUCCESS:
            cu.StreamWaitEvent(self.stream, self.taken, 0)
            leave(mode)
        # Vectors before the previous one were given back before that was fetched.
        del self.kept[:max(len(self.kept) - 2, 0)]

    def return_in_blocks(self):
        if self.thread is None and self.blocks > 1:
            self.thread = threading.Thread(
                target=self._return_blocks, name="wagma-copies", daemon=True)
            self.thread.start()

    cdef void return_until(self, Py_ssize_t end) noexcept nogil:
        """Let the vector be copied back up to this byte, if that is a block more or its end."""
        if end - self.final < self.block and end < self.layout.size or self.error != SUCCESS:
            return
        store_end(&self.final, end)
        sem_post(&self.due)

    def _return_blocks(self):
        with nogil:
            while not self.ending:
                sem_wait(&self.due)
                self._return_final()

    cdef void _return_final(self) noexcept nogil:
        """Begin to copy back what is final; `give_back` raises an error of the driver."""
        cdef int mode, result
        cdef Py_ssize_t end
        pthread_mutex_lock(&self.returning)
        end = load_end(&self.final)
        if end > self.given_back and self.error == SUCCESS:
            result = enter(self.current, &mode)
            if result == SUCCESS:
                result = self._copy_back(end)
                leave(mode)
            self.error = result
        pthread_mutex_unlock(&self.returning)

    def give_back(self, bint bounds=False):
        """Begin to copy back the rest of the vector."""
        cdef int mode
        self.check()
        check(b"cuCtxPushCurrent", enter(self.current, &mode))
        try:
            with nogil:
                if self.fetching:  # a call that has not used all of it
                    cu.StreamWaitEvent(self.back, self.taken, 0)
                self._return_rest()
                if bounds and self.flag != NULL:
                    self._check_bounded(self.back)
                self._return(self.back)
        finally:
            leave(mode)
        self.kept = [self.kept.pop()]

    cdef int _return_rest(self) except -1 nogil:
        """Begin to copy back the rest of the vector."""
        cdef int result
        pthread_mutex_lock(&self.returning)
        result = self._copy_back(self.layout.size)
        self.final = self.layout.size
        pthread_mutex_unlock(&self.returning)
        return check(b"cuMemcpyHtoDAsync", result)

    cdef int _copy_back(self, Py_ssize_t end) noexcept nogil:
        """Queue the copy of bytes `given_back` to `end`; return the driver's result."""
        cdef Py_ssize_t first, size, begin
        cdef int i, result
        for i in range(self.layout.count):
            size = self.layout.part(i, self.given_back, end, &first) * self.layout.itemsize[i]
            begin = first * self.layout.itemsize[i]
            if size > 0:
                result = cu.MemcpyHtoDAsync(
                    self.device[i] + begin, self.host[i] + begin, size, self.back)
                if result != SUCCESS:
                    return result
        self.given_back = end
        return SUCCESS

    def close(self):
        """Wait for the copies and release all but the memory, which is freed with `arrays`.

        Errors are ignored: calls have reported earlier ones, and at the end of a process the driver
        may have been unloaded.
        """
        cdef int mode
        if self.current == NULL or self.pid != getpid():
            return
        if self.thread is not None:
            self.ending = True
            sem_post(&self.due)
            self.thread.join()
            self.thread = None
        if enter(self.current, &mode) == SUCCESS:
            with nogil:
                cu.StreamWaitEvent(self.back, self.taken, 0)
                cu.StreamSynchronize(self.back)
            leave(mode)
        Handover.close(self)
        self.fetching = False
        self.arrays = []
        self.memory = None
