"""Agreement on the operation that all ranks enter, and on its end when they leave.

The MPI mutex is held in every call that calls MPI.
"""

from libc.stdlib cimport free
from libc.string cimport memcpy
from mpi4py.libmpi cimport (
    MPI_LONG_LONG,
    MPI_REQUEST_NULL,
    MPI_STATUS_IGNORE,
    MPI_Iallgather,
    MPI_Test,
)
from mpi4py.MPI cimport Comm

from collectives.engine.inquiry cimport Inquiry
from collectives.exchange.return_codes cimport check
from collectives.memory.allocation cimport zeroed
from collectives.protocols.all_ranks cimport CLOSE, LEAVING, LOAD, NONE
from collectives.protocols.rank cimport RankProtocol

from collectives.agreement import by_value, name_ranks
from collectives.engine.words import operation_in_words
from collectives.errors import ClosedError, DisagreementError


cdef class Agreement:
    """Gathers which operation every rank has entered, and has the protocol compare them.

    Args:
        comm: a communicator on which nothing else calls collective operations.
        steps: the protocol that is told what was gathered.
        inquiry: its questions are counted when all ranks leave.
    """

    def __init__(self, Comm comm, RankProtocol steps, Inquiry inquiry):
        self.comm = comm.ob_mpi
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.steps, self.protocol, self.inquiry = steps, steps.operations, inquiry
        self.request = MPI_REQUEST_NULL
        self.width = RECORD
        self.records = <long long *>zeroed((RECORD + 2) * self.size, sizeof(long long))
        if self.records == NULL:
            raise MemoryError
        self.pairs = self.records + RECORD * self.size

    def __dealloc__(self):
        free(self.records)
        free(self.told)

    cdef int tell_with_operations(self, int count) except -1:
        """From now on gather so many numbers of the application as well; all ranks do so at once.

        What it tells follows `RECORD` in `record`. No operation is under way.
        """
        cdef int width = RECORD + count
        cdef long long *records = <long long *>zeroed((width + 2) * self.size, sizeof(long long))
        cdef double *told = <double *>zeroed(count * self.size, sizeof(double))
        if records == NULL or told == NULL:
            free(records)
            free(told)
            raise MemoryError
        free(self.records)
        free(self.told)
        self.width, self.records, self.told = width, records, told
        self.pairs = records + width * self.size
        return 0

    cdef void _record(self, long long *record, int purpose, long long calls) noexcept nogil:
        record[0] = self.protocol.operation
        record[1] = self.protocol.version
        record[2] = purpose if self.protocol.operation != CLOSE else NONE
        if self.protocol.operation == LOAD:
            record[2] = self.loading
        record[3] = self.inquiry.asked
        record[4] = self.protocol.failed
        record[5] = calls

    cdef void begin(self, int purpose, long long calls) noexcept nogil:
        """Begin to gather what each rank has entered, for what purpose, after how many calls."""
        self._record(self.record, purpose, calls)
        check(&self.error, MPI_Iallgather(
            self.record, self.width, MPI_LONG_LONG, self.records, self.width, MPI_LONG_LONG,
            self.comm, &self.request))

    cdef bint look(self, int purpose, long long calls) noexcept nogil:
        """Return whether all ranks have just agreed, or begun to leave.

        Once all leave, they gather how many questions each has asked, and none asks any more.
        """
        cdef int done
        check(&self.error, MPI_Test(&self.request, &done, MPI_STATUS_IGNORE))
        if not done or self.error != 0:  # it may have ended in an error
            return False
        if self.counting:
            self.counting = False
            return False
        self._agreed()
        if self.protocol.stage == LEAVING:
            self.counting = True
            self.begin(purpose, calls)
        return True

    cdef void agree_alone(self, int purpose, long long calls) noexcept nogil:
        """Agree as the only rank."""
        self._record(self.record, purpose, calls)
        memcpy(self.records, self.record, self.width * sizeof(long long))
        self._agreed()

    cdef void _agreed(self) noexcept nogil:
        cdef bint same = True
        cdef bint failed = False
        cdef int count = self.width - RECORD
        cdef int rank
        cdef long long *record
        for rank in range(self.size):
            record = self.records + self.width * rank
            failed = failed or record[4] >= 0
            self.pairs[2 * rank] = record[0]
            self.pairs[2 * rank + 1] = record[1]
            same = same and record[2] == self.records[2]
            if count > 0:
                memcpy(self.told + count * rank, record + RECORD, count * sizeof(double))
        self.tellings += count > 0
        # Different versions to load are different operations, and so are different purposes.
        self.steps.agreed(self.pairs, self.size, self.records[2], not same, failed)

    cdef bint is_over(self) noexcept nogil:
        """Return whether every question, of this rank and to it, has been answered."""
        cdef long long asked = 0
        cdef int rank
        if self.counting:
            return False
        for rank in range(self.size):
            if rank != self.rank:
                asked += self.records[self.width * rank + 3]
        return self.inquiry.received == asked and self.inquiry.quiet()

    cdef calls_made(self):
        """Return how many calls each rank had made when all entered the last operation."""
        cdef int rank
        return tuple([self.records[self.width * rank + 5] for rank in range(self.size)])

    cdef difference(self):
        """Return the error of a rank whose operation differs from that of other ranks."""
        cdef int rank, i
        entered = by_value(
            tuple([self.records[self.width * rank + i] for i in (0, 5, 2)])
            for rank in range(self.size)
        )
        closing = any(kind == CLOSE for kind, _, _ in entered)
        (mine,) = (what for what, ranks in entered.items() if self.rank in ranks)
        del entered[mine]
        others = "; ".join(f"{name_ranks(ranks)} entered {operation_in_words(*what)}"
                           for what, ranks in sorted(entered.items()))
        return (ClosedError if closing else DisagreementError)(
            f"rank {self.rank} waits in {operation_in_words(*mine)}, "
            f"which needs all ranks to make the same calls, but {others}"
        )
