cdef extern from * nogil:
    bint unlikely(bint)

cdef enum:
    # What an event is, each with its numbers. Slices, which have a begin and a length:
    SPAN  # what the application tells: its name, and whether it is a lap
    CALL  # a call: what was requested, and the version
    WAIT  # a wait in a call: its goal, and nanoseconds in which others' data were processed
    COPY  # a pass over the application's vector
    EXCHANGE  # data of other ranks processed, one slice for all that is at most GAP apart
    VERSION  # a version or group: its number, staleness, how far ahead of the calls; its members
    OPERATION  # an operation of all ranks: which, how many came before, and the version
    # moments:
    WAITING  # a wait that has lasted long already, until its WAIT
    EXECUTED  # a version that other ranks have executed for this one: as VERSION
    LEARNED  # that a version has been started: its number, and from which rank
    BYTES  # bytes of vectors sent so far
    MEMBERS  # further members of the version before
    # Messages between peers: the other rank, the message's number; its kind and, as bits, whether
    # it has a vector and whether the receiver waited for that rank.
    SENT
    RECEIVED
    KINDS

cdef enum:
    # Nanoseconds: the shortest copy, exchange or wait recorded, and the longest gap in an exchange.
    SHORTEST = 1000
    GAP = 5000
    # Members in one event of a version, and in each that follows.
    FEW_MEMBERS = 8
    MORE_MEMBERS = 20

cdef struct Exchanged:
    # The slice that is being put together, and the number of its thread; began 0: there is none.
    long long began, end
    int thread

# Where events go; NULL while nothing is recorded.
cdef char *ring

cdef void record(
    int kind, int collective, long long time, long long length, long long a, long long b,
    long long c
) noexcept nogil
cdef void record_version(
    Exchanged *slice, int collective, long long began, long long version, long long staleness,
    long long ahead, const int *members, int count
) noexcept nogil
cdef void note_engine_thread() noexcept nogil
cdef void put_together(
    Exchanged *slice, int collective, long long began, long long end) noexcept nogil
cdef void flush(Exchanged *slice, int collective) noexcept nogil

cdef inline bint recording() noexcept nogil:
    """Return whether events are recorded; there is nothing else to do if not."""
    return unlikely(ring != NULL)

cdef inline void note(
    int kind, int collective, long long began, long long end, long long a=0, long long b=0,
    long long c=0
) noexcept nogil:
    """Record a slice, or a moment if it ends when it begins."""
    if recording():
        record(kind, collective, began, end - began, a, b, c)

cdef inline void note_if_long(
    int kind, int collective, long long began, long long end, long long a=0, long long b=0
) noexcept nogil:
    """Record a slice that is long enough to be seen."""
    if recording() and end - began >= SHORTEST:
        record(kind, collective, began, end - began, a, b, 0)

cdef inline void exchanged(
    Exchanged *slice, int collective, long long began, long long end
) noexcept nogil:
    """Record that others' data were processed, as one slice with what came just before."""
    if recording():
        put_together(slice, collective, began, end)
