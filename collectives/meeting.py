"""A barrier that reports missing ranks, for constructors, which have no engine yet to do so."""

from __future__ import annotations

import logging
import time

from collectives import process
from collectives.agreement import name_ranks

__all__ = ["meet"]

ASLEEP = 1e-3  # most seconds between two tests of the barrier
FAILED = 1.0  # seconds of waiting after which a failure in another collective may be the reason
LOOKING = 0.2  # seconds between two checks for that
DRAINING = 1.0  # seconds to wait for messages sent; the application may have received them
REPORTING = (0, 1)  # ranks that report who is missing: the first may be missing itself

log = logging.getLogger("collectives")


_unfinished: dict[int, _Meeting] = {}


def meet(comm, where: str, stall: float, abort: float) -> None:
    """Wait until all ranks have called this function, asleep; collective.

    After `stall` seconds ranks 0 and 1 log which ranks are missing; after `abort` seconds a rank
    ends the job; 0: never. A rank whose wait an exception has ended counts as present, and
    continues the same meeting when it calls the function again.

    Args:
        comm: an mpi4py intracommunicator.
        where: what the ranks do here, in words.

    Raises:
        RankFailedError: one of these ranks has failed in another collective.
    """
    handle = comm.handle
    if handle not in _unfinished:
        _unfinished[handle] = _Meeting(comm)
    meeting = _unfinished[handle]
    try:
        meeting.wait(where, stall, abort)
    except process.load_mpi().Exception:  # it cannot be continued
        del _unfinished[handle]
        raise
    with process.interrupts_held():
        meeting.end()
        del _unfinished[handle]


class _Meeting:
    """A barrier; ranks that have waited for long tell the reporting ranks that they have arrived.

    It sends on the application's communicator, because there is no other yet, but only if ranks
    wait for long, and with a tag that applications hardly use.
    """

    def __init__(self, comm):
        self._comm = comm
        self._arrived = comm.Ibarrier()
        self._sends = []
        self._told = False
        self._present = {comm.rank}

    def wait(self, where, stall, abort):
        """Wait for all ranks; log which ones are missing."""
        began = time.monotonic()
        limits = [limit for limit in (stall, abort) if limit]
        looked, reported = began, False
        while not self._arrived.Test():
            now = time.monotonic()
            waited = now - began
            if waited > FAILED and now - looked > LOOKING:
                looked = now
                process.raise_failure_in(self._comm)
            if limits and waited > min(limits) / 2:
                self._call_the_roll()
            if stall and waited > stall and not reported:
                reported = True
                level = logging.WARNING if self._reports else logging.INFO
                log.log(level, "%s", self._describe(where, waited))
            if abort and waited > abort:
                log.error(
                    "%s; this is the limit set by abort (WAGMA_ABORT): ending the job",
                    self._describe(where, waited),
                )
                logging.shutdown()
                process.end_job(self._comm, 1)
            time.sleep(min(waited / 16, ASLEEP))

    def end(self):
        """Receive the messages that were sent, now that all ranks have arrived; collective."""
        told = self._comm.allgather(self._told)
        deadline = time.monotonic() + DRAINING
        expected = {rank for rank, has in enumerate(told) if has}
        while self._reports and not self._present >= expected and time.monotonic() < deadline:
            self._hear()
        for send in self._sends:
            send.Wait()

    @property
    def _reports(self):
        return self._comm.rank in REPORTING

    @property
    def _tag(self):
        from mpi4py import MPI

        return self._comm.Get_attr(MPI.TAG_UB) or MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)

    def _describe(self, where, waited) -> str:
        """Return a message about the ranks that have not arrived."""
        missing = [rank for rank in range(self._comm.size) if rank not in self._present]
        if not self._reports:
            whom = "other ranks (see the messages of ranks 0 and 1)"
        else:
            whom = name_ranks(missing) if missing else "no rank in particular: all have arrived"
        return f"rank {self._comm.rank} has waited {waited:.0f} s in {where} for {whom}"

    def _call_the_roll(self):
        """Tell the reporting ranks that this rank is present; receive the messages of others."""
        if not self._told:
            self._told = True
            self._sends = [
                self._comm.Isend(bytearray(1), rank, self._tag)
                for rank in REPORTING
                if rank < self._comm.size and rank != self._comm.rank
            ]
        self._hear()

    def _hear(self):
        for rank in set(range(self._comm.size)) - self._present:
            if self._comm.Iprobe(rank, self._tag):
                self._comm.Recv(bytearray(1), rank, self._tag)
                self._present.add(rank)
