"""Compares the ranks' clocks by round trips, for their timelines."""

import threading

from libc.stdlib cimport malloc
from libc.string cimport memset
from mpi4py.libmpi cimport (
    MPI_LONG_LONG,
    MPI_STATUS_IGNORE,
    MPI_SUCCESS,
    MPI_Cancel,
    MPI_Comm,
    MPI_Irecv,
    MPI_Isend,
    MPI_Request,
    MPI_Test,
    MPI_Wait,
)
from mpi4py.MPI cimport Comm

from collectives.engine.tags cimport CLOCK_TAG
from collectives.exchange.clock cimport now, sleep
from collectives.exchange.mutex cimport mpi_mutex, pthread_mutex_lock, pthread_mutex_unlock

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef enum:
    # Round trips of a rank, of which the shortest counts, and nanoseconds between two looks of a
    # rank whose turn has not come.
    ROUNDS = 20
    BETWEEN_LOOKS = 50000
    # In place of a round, in the message of rank 0 by which a rank's turn begins.
    TURN = -1
    # What a message consists of.
    NUMBERS = 3

cdef struct Message:
    # The comparison, as rank 0 counts them; the round; in rank 0's answers, the time. A message of
    # another comparison or round is one that somebody has given up to wait for.
    long long comparison, round, time

# One thread uses them at a time. A message that is given up may still be sent: it keeps its memory.
cdef Message received
cdef Message *sent = NULL
cdef long long comparisons = 0
_lock = threading.Lock()


cdef bint exchange(MPI_Comm comm, int rank, bint sends, bint sleeps, long long end) noexcept nogil:
    """Send or receive a message; return whether that was complete in time."""
    global sent
    cdef MPI_Request request
    cdef int done = 0, error
    pthread_mutex_lock(&mpi_mutex)
    if sends:
        error = MPI_Isend(sent, NUMBERS, MPI_LONG_LONG, rank, CLOCK_TAG, comm, &request)
    else:
        error = MPI_Irecv(&received, NUMBERS, MPI_LONG_LONG, rank, CLOCK_TAG, comm, &request)
    while True:
        if error == MPI_SUCCESS:
            error = MPI_Test(&request, &done, MPI_STATUS_IGNORE)
        pthread_mutex_unlock(&mpi_mutex)
        if error != MPI_SUCCESS:  # as where a process has ended
            if sends:
                sent = NULL
            return False
        if done:
            return True
        if now() > end:
            break
        if sleeps:
            sleep(BETWEEN_LOOKS)
        else:
            sched_yield()
        pthread_mutex_lock(&mpi_mutex)
    if sends:
        sent = NULL
    else:
        pthread_mutex_lock(&mpi_mutex)
        MPI_Cancel(&request)
        MPI_Wait(&request, MPI_STATUS_IGNORE)
        pthread_mutex_unlock(&mpi_mutex)
    return False


cdef bint send(
    MPI_Comm comm, int rank, long long comparison, int round, long long end
) noexcept nogil:
    """Send a message with the time; return whether that was complete in time."""
    global sent
    if sent == NULL:
        sent = <Message *>malloc(sizeof(Message))
        if sent == NULL:
            return False
    sent.comparison, sent.round = comparison, round
    sent.time = now()
    return exchange(comm, rank, True, False, end)


cdef void answer(MPI_Comm comm, int size, long long limit) noexcept nogil:
    """Tell each other rank the time, as often as it asks."""
    global comparisons
    cdef int rank, i
    cdef long long end
    comparisons += 1
    for rank in range(1, size):
        end = now() + limit
        if not send(comm, rank, comparisons, TURN, end):
            continue
        i = 0
        while i < ROUNDS and exchange(comm, rank, False, i == 0, end):
            if received.comparison == comparisons and received.round == i:
                if not send(comm, rank, comparisons, i, end):
                    break
                i += 1


cdef bint ask(MPI_Comm comm, int rank, long long limit, long long *best) noexcept nogil:
    """Ask rank 0 for the time; return whether it has answered.

    `best` gets the time here, how far rank 0's clock is ahead, and the error, of the shortest round
    trip.
    """
    # The ranks before this one have their turns first.
    cdef long long comparison = 0, began, ended, end = now() + limit * rank
    cdef int i = 0
    received.round = 0
    while received.round != TURN:
        if not exchange(comm, 0, False, True, end):
            return False
    end = now() + limit
    while i < ROUNDS:
        if received.round == TURN:  # also of a later comparison, where the first one was given up
            comparison, i = received.comparison, 0
        began = now()
        if not send(comm, 0, comparison, i, end):
            return i > 0
        while True:
            if not exchange(comm, 0, False, False, end):
                return i > 0
            ended = now()
            if received.round == TURN:
                break
            if received.comparison == comparison and received.round == i:
                break
        if received.round == TURN:
            continue
        if i == 0 or ended - began < 2 * best[2]:
            best[0] = (began + ended) // 2
            best[1] = received.time - best[0]
            best[2] = (ended - began + 1) // 2
        i += 1
    return True


def compare(Comm comm, double limit):
    """Compare this rank's clock with rank 0's; collective, but it ends without the others, too.

    Args:
        comm: a communicator on which nobody else uses the tag `CLOCK_TAG`.
        limit: seconds after which a rank that does not answer is given up.

    Returns:
        A tuple of nanoseconds: the time here, how far rank 0's clock was ahead then, and the
        largest error of that; on rank 0 the time, 0 and 0. None: rank 0 did not answer.
    """
    cdef long long best[3]
    cdef int rank = comm.Get_rank(), size = comm.Get_size()
    cdef long long nanoseconds = <long long>(limit * 1e9)
    cdef bint answered = True
    memset(best, 0, sizeof(best))
    with _lock, nogil:
        if rank == 0:
            best[0] = now()
            answer(comm.ob_mpi, size, nanoseconds)
        else:
            answered = ask(comm.ob_mpi, rank, nanoseconds, best)
    return (best[0], best[1], best[2]) if answered else None
