cdef struct Event:
    double time
    long long order
    long long a
    long long b
    # Of a message: when its last byte arrives if nothing else does meanwhile; its length; the node
    # that it comes from.
    double last
    long long nbytes
    int node
    int kind
    int rank
    int stage


cdef class Simulation:
    cdef readonly double now
    cdef readonly int ranks, engines, iterations
    cdef readonly object machine
    cdef readonly Method method
    cdef readonly object applications
    cdef bint absolute
    # Of each rank: the number of steps made, the iteration number, the time waited in calls, and
    # when the last call ended.
    cdef readonly object made, reached, waited, ended
    cdef readonly long long events, messages
    cdef const double[:, ::1] step_times
    cdef double[::1] waits, ends, called_at, engine_free
    # When each engine's port, and each node's link, is free to send, and to receive.
    cdef double[::1] port_free, node_free, port_open, node_open
    cdef long long[::1] returned, iterations_of, done
    # The number of calls that each rank's application has made, and of steps begun.
    cdef int[::1] steps, begun
    cdef readonly int[::1] node_of
    cdef unsigned char[::1] computing
    cdef int unfinished
    cdef double overhead, latency, gap, byte_gap, node_byte_gap, response, seconds
    cdef double local_latency, local_byte_gap
    cdef Event *heap
    cdef Py_ssize_t count, room
    cdef long long pushed

    cpdef void later(self, double delay, int kind, int rank, long long a=*, long long b=*)
    cpdef void send(
        self, int source, int destination, long long nbytes, int kind, long long a=*, long long b=*)
    cpdef void returns(self, int rank, double delay=*, int iterations=*)
    cdef bint is_done(self, int rank) noexcept
    cpdef void call(self, int rank)
    cpdef void enter(self, int rank)
    cpdef void compute(self, int rank)
    cpdef void finish(self, int rank)
    cdef void _begin_step(self, int rank, double at)
    cdef void _take(self, Event *event)
    cdef void _receive(self, Event *event)
    cdef void _arrive(self, Event *event)
    cdef void _check(self, int rank, double delay, int kind)
    cdef void _push(
        self, double time, int kind, int rank, long long a, long long b, int stage)
    cdef void _put(self, Event *event)
    cdef Event _pop(self) noexcept


cdef class Method:
    cdef readonly Simulation simulation
    cdef public object staleness
    cdef public long long calls, timely, updates
    cdef public int servers

    cpdef begin(self)
    cpdef arrives(self, int rank)
    cpdef happens(self, int kind, int rank, long long a, long long b)


cpdef double allreduce_time(machine, int size, long long nbytes, bint doubling=*)
cpdef double placed_allreduce_time(machine, nodes, long long nbytes, bint doubling=*, sharing=*)
cpdef double mpi_allreduce_time(machine, int size, long long nbytes)
cdef double placed_doubling_time(machine, nodes, long long nbytes, double crossing_gap)
cdef double doubling_time(machine, int size, long long nbytes)
cdef double doubling_step(machine, long long nbytes)
cdef int steps_of(int size)
