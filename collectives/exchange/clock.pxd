from posix.time cimport CLOCK_MONOTONIC, clock_gettime, nanosleep, timespec

cdef inline long long now() noexcept nogil:
    """Return the nanoseconds on the monotonic clock."""
    cdef timespec time
    clock_gettime(CLOCK_MONOTONIC, &time)
    return time.tv_sec * 1000000000LL + time.tv_nsec

cdef inline void sleep(long long nanoseconds) noexcept nogil:
    cdef timespec time
    time.tv_sec = nanoseconds // 1000000000LL
    time.tv_nsec = nanoseconds % 1000000000LL
    nanosleep(&time, NULL)
