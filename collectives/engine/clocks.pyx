"""Compares the ranks' clocks by round trips, for their timelines."""

import threading

from libc.string cimport memset
from mpi4py.libmpi cimport (
    MPI_LONG_LONG,
    MPI_STATUS_IGNORE,
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

# Static, as a message that is given up may still be sent. One thread uses them at a time.
cdef long long sent, received
_lock = threading.Lock()


cdef bint exchange(MPI_Comm comm, int rank, bint sends, bint sleeps, long long end) noexcept nogil:
    """Send or receive a number; return whether that was complete in time."""
    cdef MPI_Request request
    cdef int done = 0
    pthread_mutex_lock(&mpi_mutex)
    if sends:
        MPI_Isend(&sent, 1, MPI_LONG_LONG, rank, CLOCK_TAG, comm, &request)
    else:
        MPI_Irecv(&received, 1, MPI_LONG_LONG, rank, CLOCK_TAG, comm, &request)
    while True:
        MPI_Test(&request, &done, MPI_STATUS_IGNORE)
        pthread_mutex_unlock(&mpi_mutex)
        if done:
            return True
        if now() > end:
            break
        if sleeps:
            sleep(BETWEEN_LOOKS)
        else:
            sched_yield()
        pthread_mutex_lock(&mpi_mutex)
    if not sends:
        pthread_mutex_lock(&mpi_mutex)
        MPI_Cancel(&request)
        MPI_Wait(&request, MPI_STATUS_IGNORE)
        pthread_mutex_unlock(&mpi_mutex)
    return False


cdef void answer(MPI_Comm comm, int size, long long limit) noexcept nogil:
    """Tell each other rank the time, as often as it asks."""
    cdef int rank, i
    cdef long long end
    global sent
    for rank in range(1, size):
        end = now() + limit
        if not exchange(comm, rank, True, False, end):
            continue
        for i in range(ROUNDS):
            if not exchange(comm, rank, False, i == 0, end):
                break
            sent = now()
            if not exchange(comm, rank, True, False, end):
                break


cdef bint ask(MPI_Comm comm, long long limit, long long *best) noexcept nogil:
    """Ask rank 0 for the time; return whether it has answered.

    `best` gets the time here, how far rank 0's clock is ahead, and the error, of the shortest round
    trip.
    """
    cdef long long began, ended
    cdef int i
    if not exchange(comm, 0, False, True, now() + limit):
        return False
    limit = now() + limit
    for i in range(ROUNDS):
        began = now()
        if not (exchange(comm, 0, True, False, limit) and exchange(comm, 0, False, False, limit)):
            return i > 0
        ended = now()
        if i == 0 or ended - began < 2 * best[2]:
            best[0] = (began + ended) // 2
            best[1] = received - best[0]
            best[2] = (ended - began + 1) // 2
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
            # The ranks before this one have their turns first.
            answered = ask(comm.ob_mpi, nanoseconds * rank, best)
    return (best[0], best[1], best[2]) if answered else None
