# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Stalls: the reports of a rank that has waited for long, and its answers to others.

The engine answers while its rank computes, so a computing rank is distinguished from a stopped one.
"""

import logging


from collectives.engine.inquiry cimport ANSWER
from collectives.engine.progress cimport count_served
from collectives.engine.waiting cimport Waiter, Waiting
from collectives.exchange.mutex cimport (
    mpi_mutex,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from collectives.protocols.all_ranks cimport (
    AVERAGE,
    CLOSE,
    FINISH,
    JOIN,
    LEAVING,
    LOAD,
    MEET,
    NONE,
    SYNC,
    SYNCHRONIZE,
)

from collectives.agreement import name_ranks
from collectives.engine.progress import all_served
from collectives.errors import DisagreementError
from collectives.process import end_job

cdef enum:
    # The position of an operation's purpose in an answer, in bits.
    PURPOSE_SHIFT = 8

# Nanoseconds for which a rank waits for answers, on a machine that is busy.
cdef long long ANSWERING = 3000000000

OPERATIONS = {SYNC: "a periodic synchronization", AVERAGE: "average()",
              SYNCHRONIZE: "synchronize()", CLOSE: "close()", LOAD: "load()", JOIN: "join()",
              FINISH: "join()", MEET: "join()"}
# The purposes that several operations together may have.
PURPOSES = {OPERATIONS[what]: what for what in (AVERAGE, SYNCHRONIZE, LOAD, JOIN)}

log = logging.getLogger("collectives")

# What a rank does that cannot arrive because it waits for others.
ELSEWHERE = "in join() of another collective"

# The collective in whose join() a thread of this process waits, and which thread; 0: none.
cdef long long joining = 0
cdef unsigned long joining_in = 0


def calls_in_words(long long count):
    """Return "1 call" or "12 calls"."""
    return f"{count} call{'' if count == 1 else 's'}"


def operation_in_words(kind, calls, detail):
    """Return what a rank has entered, after how many calls."""
    what = f"load() of version {detail}" if kind == LOAD else OPERATIONS[detail or kind]
    return f"{what} after {calls_in_words(calls)}"


cdef class StallReporter(Waiter):
    """A collective whose callers report the ranks that they wait for."""

    # What subclasses override

    cdef long long _calls_made(self) noexcept nogil:
        """Return how many calls the application has made."""
        return self.protocol.version + self.protocol.base

    cdef void _describe_call(self, long long *answer) noexcept nogil:
        """Fill in an answer: number of calls, next version, whether in a call."""
        answer[0] = self._calls_made()
        answer[1] = 0
        answer[3] = False

    def _waits_in_call(self):
        """Return what a call waits in, in words, and the ranks it waits for."""
        return f"call {self._calls_made()}", range(self.size)

    cdef _why_missing_in_call(self, long long *answer, operation, elsewhere):
        """Return why a rank that a call waits for is missing; None if it is not.

        Args:
            answer: the missing rank's.
            operation, elsewhere: in words, the operation that it is in, if any, or else what it
                does.
        """
        return operation or (None if answer[3] else elsewhere)

    # Answering and asking

    cdef void _answer(self) noexcept nogil:
        """Answer ranks that ask who is missing; the MPI mutex is held."""
        cdef long long answer[ANSWER]
        self._describe_call(answer)
        answer[2] = self.protocol.operation | self.purpose << PURPOSE_SHIFT
        answer[4] = 0
        if joining != self.identity and joining_in == self.caller and not self._is_joining():
            answer[4] = joining
        if self.closing and self.protocol.operation == NONE:
            answer[2] = CLOSE
        self.inquiry.progress(answer)
        if self.inquiry.error != 0:
            self.error = self.inquiry.error

    cdef int _look_for_stalls(self, int goal, Waiting *waiting, long long time) except -1:
        """Ask and report who is missing, look for circles, and end the job at its limit.

        In close() and join(), where it is normal that others still compute, the report has level
        INFO; it is a warning only if those have made no call for as long again.
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
                self._ask()
            return 0
        if self.inquiry.asking and time - waiting.asked < ANSWERING:
            return 0
        waiting.asked = 0
        if circles:
            waiting.circles *= 2
            self._look_for_circle()
        if stalls:
            self._say(waiting, time)
        if aborts:
            self._abort(waited)
        return 0

    cdef void _ask(self) noexcept nogil:
        """Ask all ranks how far they are.

        Not once all ranks leave: questions have been counted then, and no rank waits for another.
        """
        pthread_mutex_lock(&self.lock)
        if self.protocol.stage != LEAVING and not self.closed:
            pthread_mutex_lock(&mpi_mutex)
            self.inquiry.ask()
            pthread_mutex_unlock(&mpi_mutex)
        pthread_mutex_unlock(&self.lock)

    cdef void _begin_waiting(self, int goal) noexcept nogil:
        global joining, joining_in
        if self._is_joining():
            joining, joining_in = self.identity, self.caller

    cdef void _end_waiting(self) noexcept nogil:
        global joining
        if joining == self.identity:
            joining = 0

    cdef bint _is_joining(self) noexcept nogil:
        return self.protocol.joined or self.purpose == JOIN

    # Reports

    cdef int _say(self, Waiting *waiting, long long time) except -1:
        """Report who is missing."""
        cdef bint normal = self.closing or self._is_joining()
        missing = self._missing_ranks()
        waiting.warned = not normal or waiting.said and missing == self.said
        if waiting.warned or not waiting.said:
            level = logging.WARNING if waiting.warned else logging.INFO
            log.log(level, "%s", self._describe_stall((time - waiting.progressed) * 1e-9, missing))
        waiting.said = time
        self.said = missing
        return 0

    def _missing_ranks(self):
        """Return what each missing rank does, by rank; ranks that wait as well are not missing."""
        cdef int rank
        _, ranks = self._waits_in()
        return {rank: self._why_missing(rank) for rank in ranks
                if rank != self.rank and self._why_missing(rank)}

    def _describe_stall(self, seconds, missing):
        """Return a report of what this rank waits in, and for whom."""
        where, _ = self._waits_in()
        whys = {}
        for rank, why in missing.items():
            whys.setdefault(why, []).append(rank)
        listed = "; ".join(f"{name_ranks(who)}: {why}" for why, who in whys.items())
        return (
            f"rank {self.rank} has waited {seconds:.0f} s in {where} for "
            + (listed or "no rank in particular: all have arrived")
        )

    cdef int _look_for_circle(self) except -1:
        """Raise where a rank waits for this one's join() of a collective, as this one does for it.

        Only where one thread of each makes the calls of both, so that neither can proceed.
        """
        cdef int rank
        cdef StallReporter other
        waits = [rank for rank, why in self._missing_ranks().items() if why.startswith(ELSEWHERE)]
        for other in all_served():
            if other is self or other.caller != self.caller or other._is_joining():
                continue
            for rank in waits:
                if self.inquiry.answers[rank * ANSWER + 4] == other.identity:
                    error = DisagreementError(
                        f"rank {self.rank} waits in {self._waits_in()[0]} for rank {rank}, which "
                        "waits in join() of another collective for this rank: join both at once "
                        "(collectives.join, or `with a.join(), b.join():` of optimizers)"
                    )
                    for each in (self, other):
                        each.fail(f"DisagreementError: {error}")
                    raise error
        return 0

    def _waits_in(self):
        """Return what this rank's application waits in, in words, and the ranks it waits for."""
        if self.protocol.operation == CLOSE:
            return "close()", range(self.size)
        if self.protocol.operation != NONE:
            what = self.purpose or self.protocol.operation
            words = f"{OPERATIONS[what]} after {calls_in_words(self._calls_made())}"
            return words, range(self.size)
        return self._waits_in_call()

    cdef _why_missing(self, int rank):
        """Return what a rank does instead of what this one waits for; None if it does that."""
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
            return self._why_missing_in_call(answer, f"in {what} {completed}" if what else None,
                                             elsewhere)
        if self.protocol.operation == CLOSE and what and answer[2] != CLOSE:
            return f"in {what} {completed}"
        return None if what else elsewhere

    cdef int _abort(self, long long waited) except -1:
        log.error("%s; this is the limit set by abort (WAGMA_ABORT): ending the job",
                  self._describe_stall(waited * 1e-9, self._missing_ranks()))
        logging.shutdown()
        end_job(self.control, 1)

    def is_closing(self, int rank):
        """Return whether a rank has answered that it closes, and ask all again; call it often."""
        cdef bint closing
        with nogil:
            pthread_mutex_lock(&self.lock)
            self.progress()
            closing = (self.inquiry.answered[rank]
                       and self.inquiry.answers[rank * ANSWER + 2] == CLOSE)
            pthread_mutex_unlock(&self.lock)
            self._ask()
        return closing
