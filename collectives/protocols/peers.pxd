cdef int LEAVE, AWAY

cdef class Port:
    cdef void write(self, int kind, long long number) noexcept nogil
    cdef void write_model(self, int kind, long long number, double weight) noexcept nogil
    cdef void write_change(self, int kind, long long number, double weight) noexcept nogil
    cdef void post(self, int destination) noexcept nogil
    cdef double mix(self, int source, double keep, double share) noexcept nogil
    cdef void halve(self, int source, int kind, long long number) noexcept nogil
    cdef void drop(self, int source) noexcept nogil
    cdef void scale(self, double factor) noexcept nogil
    cdef void look_ahead(self, double momentum) noexcept nogil
    cdef void publish(self, double scale) noexcept nogil
    cdef void return_model(self, double scale) noexcept nogil

cdef class PeerProtocol:
    cdef Port port
    cdef public int rank, size, missing
    cdef public long long calls, skipped, most_calls, averagings, passive, pauses, came_back
    cdef public bint calling, leaving, departing, paused, joined, follows, queues
    cdef int[::1] awaited
    cdef long long[::1] messages, left, away

    cdef void restart(self, long long calls) noexcept nogil
    cdef void begin(self) noexcept nogil
    cdef void call(self) noexcept nogil
    cdef void start(self) noexcept nogil
    cdef void skip(self, long long count) noexcept nogil
    cdef void arrived(
        self, int source, int kind, long long number, double weight) noexcept nogil
    cdef void received(
        self, int source, int kind, long long number, double weight) noexcept nogil
    cdef int index_of(self, int rank) noexcept nogil
    cdef void advance(self) noexcept nogil
    cdef void proceed(self) noexcept nogil
    cdef void look_for_missing(self) noexcept nogil
    cdef bint is_out(self, int i) noexcept nogil
    cdef void announce(self, int kind, long long number) noexcept nogil
    cdef void leave(self, bint failed) noexcept nogil
    cdef void depart(self) noexcept nogil
    cdef bint owes(self) noexcept nogil
    cdef void pause(self) noexcept nogil
    cdef void resume(self) noexcept nogil
    cdef void hand_in(self) noexcept nogil
    cdef void join(self) noexcept nogil
    cdef void catch_up(self, long long calls) noexcept nogil
    cdef bint is_waited_for_by(self, int rank) noexcept nogil
    cdef bint is_quiet(self) noexcept nogil
    cdef double factor(self) noexcept nogil
    cdef bint waits_for(self, int rank) noexcept nogil
