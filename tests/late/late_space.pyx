"""The host's memory with passes that are deferred, as on a device, in one queue for all vectors.

One is made with each question whether a ticket is over. Passes that return something, and those that
only the engine makes, come after all before.
"""

from cpython.ref cimport PyObject
from libc.stdlib cimport calloc
from libc.string cimport memcpy

from collectives.memory.space cimport HostSpace

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *, void *)
    int pthread_mutex_lock(pthread_mutex_t *)
    int pthread_mutex_unlock(pthread_mutex_t *)

cdef enum:
    ROOM = 4096
    MEMBERS = 16
    COPY, COMBINE, MEAN, ENCODE, DECODE, ALL_FINITE, FINITE_CHANGE

cdef struct Pass:
    PyObject *space
    int kind, i, size
    char *to
    const char *a
    const char *b
    double share_a, share_b
    const char *vectors[MEMBERS]
    double shares[MEMBERS]
    Py_ssize_t count

# Whether passes are made at once after all, and whether tickets are said to be over before they are.
prompt = lying = False
# They stay as long as there may be passes of theirs.
spaces = []

cdef Pass *passes = <Pass *>calloc(ROOM, sizeof(Pass))
cdef long long first = 0, end = 0
cdef pthread_mutex_t mutex
pthread_mutex_init(&mutex, NULL)


def make(dtypes, sent):
    """Return such a space, to be put in the place of `collectives.memory.space.make`."""
    made = LateSpace(dtypes, sent)
    spaces.append(made)
    return made


def make_all():
    """Make all passes that are left; return how many there have been."""
    _make_all()
    return end


cdef void _make_all() noexcept nogil:
    pthread_mutex_lock(&mutex)
    while first < end:
        _make_first()
    pthread_mutex_unlock(&mutex)


cdef void _make_first() noexcept nogil:
    global first
    (<LateSpace>passes[first % ROOM].space)._make(&passes[first % ROOM])
    first += 1


cdef class LateSpace(HostSpace):
    cdef bint waits, lies

    def __init__(self, dtypes, sent):
        HostSpace.__init__(self, dtypes, sent)
        self.deferred, self.waits, self.lies = True, not prompt, lying

    cdef long long begun(self) noexcept nogil:
        return end

    cdef bint over(self, long long ticket) noexcept nogil:
        cdef bint over
        pthread_mutex_lock(&mutex)
        over = first >= ticket
        if not over:
            _make_first()
        pthread_mutex_unlock(&mutex)
        return over or self.lies

    cdef void _make(self, Pass *it) noexcept nogil:
        if it.kind == COPY:
            memcpy(it.to, it.a, it.count)
        elif it.kind == COMBINE:
            HostSpace.combine(self, it.i, it.to, it.a, it.share_a, it.b, it.share_b, it.count)
        elif it.kind == MEAN:
            HostSpace.mean(self, it.i, &it.to, 1, it.vectors, it.shares, it.size, it.count)
        elif it.kind == ALL_FINITE:
            HostSpace.begin_all_finite(self, <int *>it.to, it.i, it.a, it.count)
        elif it.kind == FINITE_CHANGE:
            HostSpace.begin_finite_change(
                self, <int *>it.to, it.i, it.vectors[0], it.vectors[1], it.vectors[2], it.count)
        elif it.kind == ENCODE:
            HostSpace.encode(self, it.i, it.to, it.a, it.b, it.count)
        else:
            HostSpace.decode(self, it.i, it.to, it.a, it.b, it.count)

    cdef void _defer(
        self, int kind, int i, char *to, const char *a, double share_a, const char *b,
        double share_b, const char **vectors, const double *shares, int size, Py_ssize_t count
    ) noexcept nogil:
        global end
        cdef Pass *it
        pthread_mutex_lock(&mutex)
        if end - first == ROOM:
            _make_first()
        it = &passes[end % ROOM]
        it.space = <PyObject *>self
        it.kind, it.i, it.to, it.a, it.b, it.count = kind, i, to, a, b, count
        it.share_a, it.share_b, it.size = share_a, share_b, size
        if size > 0:
            memcpy(it.vectors, vectors, size * sizeof(char *))
        if shares != NULL:
            memcpy(it.shares, shares, size * sizeof(double))
        end += 1
        if not self.waits:
            _make_first()
        pthread_mutex_unlock(&mutex)

    # What is deferred

    cdef void copy(self, char *to, const char *source, Py_ssize_t size) noexcept nogil:
        self._defer(COPY, 0, to, source, 0, NULL, 0, NULL, NULL, 0, size)

    cdef void copy_away(self, char *to, const char *source, Py_ssize_t size) noexcept nogil:
        self._defer(COPY, 0, to, source, 0, NULL, 0, NULL, NULL, 0, size)

    cdef void combine(
        self, int i, char *to, const char *a, double share_a, const char *b, double share_b,
        Py_ssize_t count
    ) noexcept nogil:
        self._defer(COMBINE, i, to, a, share_a, b, share_b, NULL, NULL, 0, count)

    cdef void mean(
        self, int i, char **to, int takers, const char **vectors, const double *shares, int size,
        Py_ssize_t count
    ) noexcept nogil:
        cdef int k
        self._defer(MEAN, i, to[0], NULL, 0, NULL, 0, vectors, shares, size, count)
        for k in range(1, takers):
            self.copy(to[k], to[0], count * self.kernels[i].itemsize)

    cdef void begin_all_finite(
        self, int *flag, int i, const char *x, Py_ssize_t count
    ) noexcept nogil:
        self._defer(ALL_FINITE, i, <char *>flag, x, 0, NULL, 0, NULL, NULL, 0, count)

    cdef void begin_finite_change(
        self, int *flag, int i, const char *snapshot, const char *x, const char *returned,
        Py_ssize_t count
    ) noexcept nogil:
        cdef const char *vectors[3]
        vectors[0], vectors[1], vectors[2] = snapshot, x, returned
        self._defer(FINITE_CHANGE, i, <char *>flag, NULL, 0, NULL, 0, vectors, NULL, 3, count)

    cdef void encode(
        self, int i, char *to, const char *source, const char *reference, Py_ssize_t count
    ) noexcept nogil:
        self._defer(ENCODE, i, to, source, 0, reference, 0, NULL, NULL, 0, count)

    cdef void decode(
        self, int i, char *to, const char *source, const char *reference, Py_ssize_t count
    ) noexcept nogil:
        self._defer(DECODE, i, to, source, 0, reference, 0, NULL, NULL, 0, count)

    # What is not

    cdef void zero(self, char *to, Py_ssize_t size) noexcept nogil:
        _make_all()
        HostSpace.zero(self, to, size)

    cdef void add_change(
        self, int i, char *to, const char *snapshot, const char *x, const char *returned,
        Py_ssize_t count
    ) noexcept nogil:
        _make_all()
        HostSpace.add_change(self, i, to, snapshot, x, returned, count)

    cdef bint all_finite(self, int i, const char *x, Py_ssize_t count) noexcept nogil:
        _make_all()
        return HostSpace.all_finite(self, i, x, count)

    cdef bint finite_change(
        self, int i, const char *snapshot, const char *x, const char *returned, Py_ssize_t count
    ) noexcept nogil:
        _make_all()
        return HostSpace.finite_change(self, i, snapshot, x, returned, count)
