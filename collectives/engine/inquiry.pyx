"""Inquiries: a rank that has waited for long asks all others which calls they have made.

Engines answer, so a computing rank is distinguished from a stopped one. The MPI mutex is held in
every call.
"""

from libc.stdlib cimport free
from mpi4py.libmpi cimport (
    MPI_ANY_SOURCE,
    MPI_LONG_LONG,
    MPI_REQUEST_NULL,
    MPI_STATUS_IGNORE,
    MPI_Iprobe,
    MPI_Irecv,
    MPI_Isend,
    MPI_Recv,
    MPI_Status,
    MPI_Test,
)
from mpi4py.MPI cimport Comm

from collectives.engine.tags cimport ANSWER_TAG, QUESTION_TAG
from collectives.exchange.return_codes cimport check
from collectives.memory.allocation cimport zeroed


cdef class Inquiry:
    """One rank's questions and answers, on two tags of this communicator."""

    def __init__(self, Comm comm):
        self.comm = comm.ob_mpi
        self.rank, self.size = comm.rank, comm.size
        self.reply = MPI_REQUEST_NULL
        self.sends = <MPI_Request *>zeroed(self.size, sizeof(MPI_Request))
        self.receives = <MPI_Request *>zeroed(self.size, sizeof(MPI_Request))
        self.answers = <long long *>zeroed(self.size * ANSWER, sizeof(long long))
        self.answered = <bint *>zeroed(self.size, sizeof(bint))
        if (self.sends == NULL or self.receives == NULL or self.answers == NULL
                or self.answered == NULL):
            raise MemoryError

    def __dealloc__(self):
        free(self.sends)
        free(self.receives)
        free(self.answers)
        free(self.answered)

    cdef bint progress(self) noexcept nogil:
        """Receive answers, and a question; return whether there is one to reply to."""
        cdef MPI_Status status
        cdef long long question
        cdef int done, rank
        cdef int asked = 0
        if self.reply == MPI_REQUEST_NULL:
            # Not a receive from any source: while one is posted, all other messages are slower.
            check(&self.error, MPI_Iprobe(MPI_ANY_SOURCE, QUESTION_TAG, self.comm, &asked, &status))
            if asked:
                self.asker = status.MPI_SOURCE
                check(&self.error, MPI_Recv(
                    &question, 1, MPI_LONG_LONG, self.asker, QUESTION_TAG, self.comm,
                    MPI_STATUS_IGNORE))
                self.received += 1
        else:
            check(&self.error, MPI_Test(&self.reply, &done, MPI_STATUS_IGNORE))
        if self.asking:
            self.asking = 0
            for rank in range(self.size):
                if rank != self.rank:
                    check(&self.error, MPI_Test(&self.sends[rank], &done, MPI_STATUS_IGNORE))
                    self.asking += not done
                    check(&self.error, MPI_Test(&self.receives[rank], &done, MPI_STATUS_IGNORE))
                    self.answered[rank] = done
                    self.asking += not done
        return asked

    cdef void reply_to_asker(self) noexcept nogil:
        """Send the `answer` to the rank whose question has been received."""
        check(&self.error, MPI_Isend(
            self.answer, ANSWER, MPI_LONG_LONG, self.asker, ANSWER_TAG, self.comm, &self.reply))

    cdef void ask(self) noexcept nogil:
        """Ask all other ranks.

        If answers to the last question are still missing, ask nothing; the others count as stale.
        """
        cdef int rank
        self.stale = self.asking > 0
        if self.stale:
            return
        self.asked += 1
        for rank in range(self.size):
            self.answered[rank] = False
            if rank != self.rank:
                self.asking += 2
                check(&self.error, MPI_Irecv(
                    &self.answers[rank * ANSWER], ANSWER, MPI_LONG_LONG, rank, ANSWER_TAG,
                    self.comm, &self.receives[rank]))
                check(&self.error, MPI_Isend(
                    &self.asked, 1, MPI_LONG_LONG, rank, QUESTION_TAG, self.comm, &self.sends[rank]))

    cdef bint quiet(self) noexcept nogil:
        """Return whether no question or answer of this rank is pending."""
        return self.asking == 0 and self.reply == MPI_REQUEST_NULL
