"""Compiled ranks that share memory, whose ports are Python objects: see test_shared_exchange.py."""

from libc.stdlib cimport calloc, free

from collectives.protocols.claims cimport BLOCKS, ClaimsProtocol
from collectives.protocols.shared_exchange cimport AHEAD, FIRST_BLOCK, SharedExchangeProtocol
from collectives.protocols.shared_exchange_port cimport SharedExchangePort


cdef class PythonPort(SharedExchangePort):
    cdef object port

    cdef int find_group(self, int rank, long long number, int *members) noexcept nogil:
        with gil:
            group = self.port.group(rank, number)
            for i, member in enumerate(group):
                members[i] = member
            return len(group)

    cdef Py_ssize_t blocks(self, int size) noexcept nogil:
        with gil:
            return self.port.blocks(size)

    cdef void set_path(self, bint ringed, bint takes, bint shows, bint gets) noexcept nogil:
        with gil:
            self.port.set_path(ringed, takes, shows, gets)

    cdef long long begun(self) noexcept nogil:
        with gil:
            return self.port.begun()

    cdef bint over(self, long long ticket) noexcept nogil:
        with gil:
            return self.port.over(ticket)

    cdef bint has_block(self, Py_ssize_t block) noexcept nogil:
        with gil:
            return self.port.has_block(block)

    cdef long long contribute_block(self, Py_ssize_t block) noexcept nogil:
        with gil:
            return self.port.contribute_block(block)

    cdef void return_block(self, Py_ssize_t block, bint in_place) noexcept nogil:
        with gil:
            self.port.return_block(block, in_place)

    cdef void keep_arrays(self) noexcept nogil:
        with gil:
            self.port.keep_arrays()

    cdef void withdraw(self, Py_ssize_t averaged) noexcept nogil:
        with gil:
            self.port.withdraw(averaged)

    cdef double weigh(self, const int *members, int size) noexcept nogil:
        with gil:
            return self.port.weigh([members[i] for i in range(size)])

    cdef long long average(
        self, long long number, bint together, Py_ssize_t block, const int *members, int size,
        bint in_place
    ) noexcept nogil:
        with gil:
            return self.port.average(
                number, together, block, [members[i] for i in range(size)], size, in_place)

    cdef double total_weight(self) noexcept nogil:
        with gil:
            return self.port.total_weight()

    cdef bint end_part(self, int rank, double total) noexcept nogil:
        with gil:
            return self.port.end_part(rank, total)

    cdef void average_counts(
        self, long long number, const int *members, int size
    ) noexcept nogil:
        with gil:
            self.port.average_counts(number, [members[i] for i in range(size)])

    cdef void replace(self, int rank) noexcept nogil:
        with gil:
            self.port.replace(rank)

    cdef void progressed(self) noexcept nogil:
        with gil:
            self.port.progressed()


cdef class Words:
    """The words of some ranks."""

    cdef unsigned long long **of
    cdef int size, count

    def __init__(self, int size, int blocks):
        self.size, self.count = size, BLOCKS + blocks
        self.of = <unsigned long long **>calloc(size, sizeof(unsigned long long *))
        for rank in range(size):
            self.of[rank] = <unsigned long long *>calloc(self.count, sizeof(unsigned long long))

    def __dealloc__(self):
        for rank in range(self.size):
            free(self.of[rank])
        free(self.of)

    def values(self):
        return [[self.of[rank][k] for k in range(self.count)] for rank in range(self.size)]


cdef class CompiledExchange:
    """A rank's `SharedExchangeProtocol`, with the methods of `SourceExchange`."""

    cdef SharedExchangeProtocol steps
    cdef Words words
    cdef int *members

    def __init__(self, Words words, port, int rank):
        claims = ClaimsProtocol(None)
        (<ClaimsProtocol>claims).words = words.of
        python = PythonPort()
        (<PythonPort>python).port = port
        self.words = words
        self.steps = SharedExchangeProtocol(claims, rank, AHEAD, None, 3)
        self.members = <int *>calloc((FIRST_BLOCK + AHEAD) * words.size, sizeof(int))
        self.steps.members, self.steps.most = self.members, words.size
        self.steps.attach(python)

    def __dealloc__(self):
        free(self.members)

    def open(self, number):
        self.steps.open(number)

    def close(self):
        return self.steps.close()

    def reached(self):
        return self.steps.reached()

    def begin(self, number, together, members, given, receives, ringed, windowed, keeps):
        cdef int group[16]
        for i, member in enumerate(members):
            group[i] = member
        self.steps.begin(
            number, together, group, len(members), given, receives, ringed, windowed, keeps)

    def progress(self):
        return self.steps.progress()

    def adopt(self):
        self.steps.adopt()

    def help(self, rank, number):
        return self.steps.help(rank, number)

    def end_blocks(self):
        self.steps.end_blocks()

    def is_pending(self):
        return self.steps.is_pending()
