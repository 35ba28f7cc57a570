"""Records what this process does in a ring of events: a file that is mapped into memory.

An event takes one atomic addition and one cache line. Nothing is allocated and no lock is taken, so
any thread may record at any time, without the GIL. The system keeps what has been recorded however
the process ends: no signal handler writes anything.

The file: a page with a header; two places for a description in JSON, of which the header names the
current one, so that it is whole at any time; the events. `wagma.timeline.rings` reads it.
"""

import contextlib
import mmap
import os

from libc.string cimport memcpy, memset

from collectives.exchange.clock cimport now

cdef extern from *:
    """
    #include <stdint.h>
    #include <sys/syscall.h>
    #include <unistd.h>

    typedef struct {
        char magic[8];
        uint64_t capacity, place, current, descriptions;
        char padding[24];
        uint64_t next;  /* in a cache line of its own */
    } ring_header;

    typedef struct {
        long long time, length, numbers[5];
        uint32_t sequence;  /* the event's own number plus 1: it is whole and no older one */
        uint8_t kind, collective, thread, count;
    } ring_event;

    enum { AHEAD = 8 };

    static inline ring_event *next_event(char *ring, uint32_t *sequence)
    {
        ring_header *header = (ring_header *)ring;
        uint64_t number = __atomic_fetch_add(&header->next, 1, __ATOMIC_RELAXED);
        ring_event *events = (ring_event *)(ring + header->place);
        ring_event *event = events + (number & (header->capacity - 1));
        /* So that a later event need not wait for memory, whose lines have left the cache. */
        __builtin_prefetch(events + ((number + AHEAD) & (header->capacity - 1)), 1);
        __atomic_store_n(&event->sequence, 0, __ATOMIC_RELAXED);
        __atomic_thread_fence(__ATOMIC_RELEASE);
        *sequence = (uint32_t)(number + 1);
        return event;
    }

    static inline void complete_event(ring_event *event, uint32_t sequence)
    {
        __atomic_store_n(&event->sequence, sequence, __ATOMIC_RELEASE);
    }

    static inline void store_ring(char **ring, char *value)
    {
        __atomic_store_n(ring, value, __ATOMIC_RELEASE);
    }

    static inline void set_current(char *ring, uint64_t current)
    {
        __atomic_store_n(&((ring_header *)ring)->current, current, __ATOMIC_RELEASE);
    }

    /* Threads have numbers: 0 the first, 1 the engine's, others from 2 on in their order. */
    enum { MOST_THREADS = 255 };
    static int threads = 2;
    static __thread int own_thread __attribute__((tls_model("initial-exec"))) = -1;

    static inline int thread_number(void)
    {
        if (own_thread < 0) {
            int first = syscall(SYS_gettid) == getpid();
            own_thread = first ? 0 : __atomic_fetch_add(&threads, 1, __ATOMIC_RELAXED);
            if (own_thread > MOST_THREADS)
                own_thread = MOST_THREADS;
        }
        return own_thread;
    }

    static inline void set_engine_thread(void)
    {
        own_thread = 1;
    }
    """
    ctypedef struct ring_header:
        char magic[8]
        unsigned long long capacity, place, current, descriptions, next
    ctypedef struct ring_event:
        long long time, length
        long long numbers[5]
        unsigned char kind, collective, thread, count
    ring_event *next_event(char *, unsigned *) nogil
    void complete_event(ring_event *, unsigned) nogil
    void store_ring(char **, char *) nogil
    void set_current(char *, unsigned long long) nogil
    int thread_number() nogil
    void set_engine_thread() nogil

# The names of the kinds of events, by which a file is read.
KIND_NAMES = ("span", "call", "wait", "copy", "exchange", "version", "operation", "waiting",
              "executed", "learned", "bytes", "members", "sent", "received")
MAGIC = b"wagmaTL1"
EVENT = sizeof(ring_event)
PAGE = mmap.PAGESIZE
DESCRIPTION = 1 << 18  # bytes of each place for the description
MOST_NAMES = 1000  # of spans: all others have one more name
OTHER_NAMES = "other spans"
LONGEST_NAME = 100  # characters that are described

# The last two mapped files: a thread may still be writing its last event after the end of one.
_mapped = []
# The names of spans, in the order of their numbers.
_names = {}


cdef void record(
    int kind, int collective, long long time, long long length, long long a, long long b,
    long long c
) noexcept nogil:
    """Record an event of this thread."""
    record_of(thread_number(), kind, collective, time, length, a, b, c)


cdef void record_of(
    int thread, int kind, int collective, long long time, long long length, long long a,
    long long b, long long c
) noexcept nogil:
    """Record an event of the thread with this number."""
    cdef unsigned sequence
    cdef char *current = ring
    cdef ring_event *event
    if current == NULL:
        return
    event = next_event(current, &sequence)
    event.time, event.length = time, length
    event.numbers[0], event.numbers[1], event.numbers[2] = a, b, c
    event.kind, event.collective, event.thread, event.count = kind, collective, thread, 0
    complete_event(event, sequence)


cdef void record_version(
    Exchanged *slice, int collective, long long began, long long version, long long staleness,
    long long ahead, const int *members, int count
) noexcept nogil:
    """Record a version, or group, that has been executed, with its members.

    It ended when the last data of others were processed, if that is known.
    """
    cdef long long time = slice.end if slice.began else now()
    cdef char *current = ring
    cdef ring_event *event
    cdef unsigned sequence
    cdef int first = 0, few
    flush(slice, collective)
    if current == NULL:
        return
    while first == 0 or first < count:
        few = min(count - first, MORE_MEMBERS if first else FEW_MEMBERS)
        event = next_event(current, &sequence)
        event.time = began if began else time
        event.length = time - event.time
        event.kind = MEMBERS if first else VERSION if began else EXECUTED
        event.collective, event.thread, event.count = collective, thread_number(), few
        if first == 0:
            event.numbers[0], event.numbers[1] = version, staleness
            event.numbers[2] = ahead
            write_members(&event.numbers[3], members, few)
        else:
            write_members(&event.numbers[0], members + first, few)
        complete_event(event, sequence)
        first += few
        if count == 0:
            return


cdef void write_members(long long *numbers, const int *members, int count) noexcept nogil:
    """Write ranks as 16-bit numbers."""
    cdef unsigned short *shorts = <unsigned short *>numbers
    cdef int i
    for i in range(count):
        shorts[i] = <unsigned short>members[i]


cdef void put_together(
    Exchanged *slice, int collective, long long began, long long end
) noexcept nogil:
    """Add to the slice that is being put together, or begin another one."""
    cdef int thread = thread_number()
    if slice.began and (began - slice.end > GAP or slice.thread != thread):
        flush(slice, collective)
    if not slice.began:
        slice.began, slice.thread = began, thread
    slice.end = end


cdef void flush(Exchanged *slice, int collective) noexcept nogil:
    """End the slice that is being put together, if there is one."""
    cdef long long length = slice.end - slice.began
    if slice.began and length >= SHORTEST:
        record_of(slice.thread, EXCHANGE, collective, slice.began, length, 0, 0, 0)
    slice.began = 0


cdef void note_engine_thread() noexcept nogil:
    """Note that this thread is the engine's."""
    set_engine_thread()


def begin(path, Py_ssize_t size, str description):
    """Record events of this process in a new file, in place of any other.

    Args:
        path: of the file, in place of which it may be another.
        size: bytes of the events, rounded down to a power of two of them.
        description: see `describe`.

    Raises:
        OSError: the file cannot be written.
        ValueError: the description is too long.
    """
    global ring
    cdef unsigned char[::1] memory
    cdef Py_ssize_t page, place = PAGE + 2 * DESCRIPTION
    cdef bytes magic = MAGIC
    cdef ring_header *header
    if not has_place(description):
        raise ValueError(f"the timeline's description has more than {DESCRIPTION - 1} bytes")
    capacity = 1 << (max(size // EVENT, 1).bit_length() - 1)
    total = place + capacity * EVENT
    # Another file of this name may still be mapped, and must keep its length.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with open(path, "w+b") as file:
        # Allocated now: on a full disk a later store would end the process.
        os.posix_fallocate(file.fileno(), 0, total)
        mapped = mmap.mmap(file.fileno(), total, flags=mmap.MAP_SHARED)
    memory = mapped
    # The first store into a page takes microseconds.
    for page in range(0, total, PAGE):
        memory[page] = 0
    header = <ring_header *>&memory[0]
    memcpy(header.magic, <const char *>magic, 8)
    header.capacity, header.place, header.descriptions = capacity, place, DESCRIPTION
    _mapped.append((mapped, memory))
    if len(_mapped) > 2:
        del _mapped[0]
    store_ring(&ring, <char *>header)
    describe(description)


def end():
    """Record no more events."""
    store_ring(&ring, NULL)


def has_place(str description):
    """Return whether the file has a place for a description of this length."""
    return len(description.encode()) < DESCRIPTION


def describe(str description):
    """Replace the file's description, unless it has no place for this one."""
    cdef bytes text = description.encode()
    cdef unsigned long long other
    cdef char *to
    if ring == NULL or len(text) >= DESCRIPTION:
        return
    other = 1 - (<ring_header *>ring).current
    to = ring + <Py_ssize_t>PAGE + <Py_ssize_t>(other * DESCRIPTION)
    memset(to, 0, DESCRIPTION)
    memcpy(to, <const char *>text, len(text))
    set_current(ring, other)


def names():
    """Return the names of spans, in the order of their numbers; of long ones the beginnings."""
    return [name[:LONGEST_NAME] for name in _names]


cdef class Span:
    """A block of the application's work, by name; made by `span`, and entered only once at a time.
    """

    cdef long long began
    cdef int name

    def __enter__(self):
        self.began = now()
        return self

    def __exit__(self, *exception):
        note(SPAN, 0, self.began, now(), self.name)


cdef class NoSpan:
    """A block while nothing is recorded."""

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass


_no_span = NoSpan()


cdef int number_of(str name) except -1:
    """Return the number of a name of spans, a new one if need be and if there are not too many."""
    if name not in _names and len(_names) >= MOST_NAMES:
        name = OTHER_NAMES
    number = _names.get(name)
    if number is None:
        number = _names[name] = len(_names)
        _on_new_name()
    return number


# What to do when a span has a new name: `collectives.timeline` describes the file again.
_on_new_name = int


def set_on_new_name(function):
    """Set what is called when a span has a new name."""
    global _on_new_name
    _on_new_name = function


def span(str name not None):
    """Return a block, for `with`, that appears under this name in the timeline, if one is recorded.
    """
    cdef Span made
    if ring == NULL:
        return _no_span
    made = Span.__new__(Span)
    made.name = number_of(name)
    return made


def told(str name not None, double began, double end):
    """Record a lap, with its times in seconds on the clock of `time.perf_counter`.

    Laps follow one another, and need not respect the spans in which they begin or end.
    """
    if ring != NULL:
        note(SPAN, 0, <long long>(began * 1e9), <long long>(end * 1e9), number_of(name), 1)
