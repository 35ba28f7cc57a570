"""Stalls: the reports of a rank that has waited for long, and its answers to others.

The engine answers while its rank computes, so a computing rank is distinguished from a stopped one.
"""

import logging

from mpi4py.MPI cimport Comm

from collectives.engine.driver cimport Driver
from collectives.engine.inquiry cimport ANSWER, Inquiry
from collectives.engine.progress cimport count_served
from collectives.engine.served cimport SECOND, Served, Waiting
from collectives.exchange.mutex cimport (
    mpi_mutex,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from collectives.protocols.all_ranks cimport CLOSE, LEAVING, NONE

from collectives.agreement import name_ranks
from collectives.engine.progress import all_served
from collectives.engine.words import OPERATIONS, calls_in_words
from collectives.errors import DisagreementError
from collectives.process import end_job

cdef enum:
    # The position of an operation's purpose in an answer, in bits.
    PURPOSE_SHIFT = 8

# The largest limit on waiting, in seconds: 64-bit counts of nanoseconds end after 292 years.
cdef double LONGEST_LIMIT = 9e9

# Nanoseconds for which a rank waits for answers, on a machine that is busy.
cdef long long ANSWERING = 3000000000

log = logging.getLogger("collectives")

# What a rank does if it waits for others elsewhere.
ELSEWHERE = "in join() of another collective"

# The collective in whose join() a thread of this process waits, and which thread; 0: none.
cdef long long joining = 0
cdef unsigned long joining_in = 0


cdef class StallReporter:
    """Reports the ranks that a collective's callers wait for, and answers the questions of others.

    Args:
        control: a communicator of the collective's, used to end the job.
        inquiry: asks and answers.
        identity: identifies the collective, the same on all ranks.
        stall, abort: seconds without progress after which a caller reports the missing ranks, or
            ends the job; 0: never.
    """

    def __init__(self, Comm control, Inquiry inquiry, *, identity, double stall, double abort):
        self.rank, self.size = control.Get_rank(), control.Get_size()
        self.control, self.inquiry = control, inquiry
        self.identity = identity
        self.stall = <long long>(min(stall, LONGEST_LIMIT) * SECOND)
        self.abort = <long long>(min(abort, LONGEST_LIMIT) * SECOND)

    # Answering and asking

    cdef void complete_answer(self, bint joins) noexcept nogil:
        """Add this rank's operation to an answer that describes its calls.

        `joins`: whether this rank is in join().
        """
        cdef long long *answer = self.inquiry.answer
        answer[2] = self.protocol.operation | self.purpose << PURPOSE_SHIFT
        answer[4] = 0
        if joining != self.identity and joining_in == self.caller and not joins:
            answer[4] = joining
        if self.closing and self.protocol.operation == NONE:
            answer[2] = CLOSE

    cdef void begin_join(self) noexcept nogil:
        """Note that this collective's caller waits in join()."""
        global joining, joining_in
        joining, joining_in = self.identity, self.caller

    cdef void end_join(self) noexcept nogil:
        global joining
        if joining == self.identity:
            joining = 0

    cdef int look(self, Served collective, Waiting *waiting, long long time) except -1:
        """Ask and report who is missing, look for circles, and end the job at its limit.

        In close() and join(), while others may well be computing, the first report has level INFO;
        a warning follows if they have made no call for as long again.
        """
        cdef long long waited = time - waiting.progressed
        cdef bint stalls = self.stall and waited >= self.stall and not waiting.warned
        cdef bint aborts = self.abort and waited > self.abort
        cdef bint circles = waited >= waiting.circles and count_served() > 1
        if stalls and waiting.said and time - waiting.said < self.stall:
            stalls = False
        if self.size == 1 or not (stalls or aborts or circles):
            return 0
        if waiting.asked == 0:
            waiting.asked = time
            with nogil:
                self.ask(collective)
            return 0
        if self.inquiry.asking and time - waiting.asked < ANSWERING:
            return 0
        waiting.asked = 0
        if circles:
            waiting.circles *= 2
            self._look_for_circle(collective)
        if stalls:
            self._say(collective, waiting, time)
        if aborts:
            self._abort(collective, waited)
        return 0

    cdef void ask(self, Served collective) noexcept nogil:
        """Ask all ranks how far they are.

        Once all ranks leave, ask nothing: questions have been counted, and no rank waits.
        """
        pthread_mutex_lock(&collective.lock)
        if self.protocol.stage != LEAVING and not collective.closed:
            pthread_mutex_lock(&mpi_mutex)
            self.inquiry.ask()
            pthread_mutex_unlock(&mpi_mutex)
        pthread_mutex_unlock(&collective.lock)

    # Reports

    cdef int _say(self, Served collective, Waiting *waiting, long long time) except -1:
        """Report who is missing."""
        cdef bint normal = self.closing or (<Driver>collective).is_joining()
        missing = self._missing_ranks(collective)
        waiting.warned = not normal or waiting.said and missing == self.said
        if waiting.warned or not waiting.said:
            level = logging.WARNING if waiting.warned else logging.INFO
            log.log(level, "%s",
                    self._describe_stall(collective, time - waiting.progressed, missing))
        waiting.said = time
        self.said = missing
        return 0

    cdef _missing_ranks(self, Served collective):
        """Return what each missing rank does, by rank; ranks that wait as well are not missing."""
        cdef int rank
        missing = {}
        for rank in (<Driver>collective)._waits_in()[1]:
            why = None if rank == self.rank else self._why_missing(collective, rank)
            if why:
                missing[rank] = why
        return missing

    cdef _describe_stall(self, Served collective, long long waited, missing):
        """Return a report of what this rank waits in, and for whom."""
        where, _ = (<Driver>collective)._waits_in()
        whys = {}
        for rank, why in missing.items():
            whys.setdefault(why, []).append(rank)
        listed = "; ".join(f"{name_ranks(who)}: {why}" for why, who in whys.items())
        return (
            f"rank {self.rank} has waited {waited * 1e-9:.0f} s in {where} for "
            + (listed or "no rank in particular: all have arrived")
        )

    cdef int _look_for_circle(self, Served collective) except -1:
        """Raise if this rank waits for one that waits for it, in join() of another collective.

        Only if one thread of each rank calls both collectives, so that neither can proceed.
        """
        cdef int rank
        cdef Driver other
        waits = [rank for rank, why in self._missing_ranks(collective).items()
                 if why.startswith(ELSEWHERE)]
        for other in all_served():
            if (other is collective or other.stalls.caller != self.caller or other.is_joining()):
                continue
            for rank in waits:
                if self.inquiry.answers[rank * ANSWER + 4] == other.stalls.identity:
                    error = DisagreementError(
                        f"rank {self.rank} waits in {(<Driver>collective)._waits_in()[0]} for rank "
                        f"{rank}, which waits in join() of another collective for this rank: join "
                        "both at once (collectives.join, or `with a.join(), b.join():` of "
                        "optimizers)"
                    )
                    for each in (collective, other):
                        each.fail(f"DisagreementError: {error}")
                    raise error
        return 0

    cdef waits_in(self, Served collective):
        """Return a description of what the application waits in, and the ranks it waits for."""
        cdef Driver driver = <Driver>collective
        if self.protocol.operation == CLOSE:
            return "close()", range(self.size)
        if self.protocol.operation != NONE:
            what = self.purpose or self.protocol.operation
            words = f"{OPERATIONS[what]} after {calls_in_words(driver.calls_made())}"
            return words, range(self.size)
        return driver._waits_in_call()

    cdef _why_missing(self, Served collective, int rank):
        """Return what a rank does instead of arriving where this one waits; None if it is there."""
        cdef long long *answer = &self.inquiry.answers[rank * ANSWER]
        completed = f"({calls_in_words(answer[0])} completed)"
        elsewhere = f"{ELSEWHERE if answer[4] else 'still computing'} {completed}"
        what = OPERATIONS.get(answer[2] >> PURPOSE_SHIFT or answer[2])
        if self.protocol.stage == LEAVING:
            return None
        if not self.inquiry.answered[rank]:
            return "does not answer (stopped, or computing without a progress thread)"
        if self.inquiry.stale:
            return None
        if self.protocol.operation == NONE:
            return (<Driver>collective).why_missing_in_call(
                answer, f"in {what} {completed}" if what else None, elsewhere)
        if self.protocol.operation == CLOSE and what and answer[2] != CLOSE:
            return f"in {what} {completed}"
        return None if what else elsewhere

    cdef int _abort(self, Served collective, long long waited) except -1:
        log.error("%s; this is the limit set by abort (WAGMA_ABORT): ending the job",
                  self._describe_stall(collective, waited, self._missing_ranks(collective)))
        logging.shutdown()
        end_job(self.control, 1)
