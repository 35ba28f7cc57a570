"""Going on without ranks whose processes have ended: what MPI's ULFM is used for.

ULFM (User-Level Failure Mitigation) is a part of Open MPI 5 that its own mpiexec switches on, with
`--with-ft ulfm`. Then the end of a rank's process ends the others' communication with it, rather
than the job. mpi4py has ULFM's methods with every MPI, so that they prove nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from collectives.agreement import name_ranks

if TYPE_CHECKING:  # importing mpi4py.MPI initializes it
    from mpi4py import MPI

__all__ = [
    "Survivors",
    "is_offered",
    "is_rebuilding",
    "name_dead",
    "note",
    "why_not",
]

SWITCH = "OMPI_MCA_mpi_ft_enable"  # set by `mpiexec --with-ft ulfm` for the ranks
ASLEEP = 5e-4  # seconds between two looks at an agreement, or at what others have revoked

# The communicators made from one that may be revoked while ranks wait in them; None: not now.
_derived: list[MPI.Comm] | None = None


def is_offered() -> bool:
    """Return whether this job goes on when a rank's process ends."""
    return os.environ.get(SWITCH, "").lower() in ("1", "true")


def why_not() -> str | None:
    """Return why no rank of this job can go on without another; None: it can."""
    if not is_offered():
        return (
            "no rank can go on here without another: that needs Open MPI 5 and its own "
            "`mpiexec --with-ft ulfm`"
        )
    from mpi4py import MPI  # noqa: F401  not at the top: it loads the library, and initializes it

    from collectives.engine import deaths

    if deaths.find_revoke():
        return None
    return "no rank can go on here without another: this MPI library has no MPIX_Comm_revoke"


def name_dead(comm: MPI.Comm) -> str:
    """Return "the process of rank 2", as far as this rank knows whose have ended."""
    known = dead_ranks(comm)
    if not known:
        return "the process of another rank"
    return f"the process{'es' * (len(known) > 1)} of {name_ranks(known)}"


def dead_ranks(comm: MPI.Comm) -> list[int]:
    """Return the ranks of this communicator of which MPI has told this one that they ended."""
    failed, all_ranks = comm.Get_failed(), comm.Get_group()
    ranks = failed.Translate_ranks(None, all_ranks)
    failed.Free()
    all_ranks.Free()
    return sorted(ranks)


def note(comm: MPI.Comm) -> None:
    """Note a communicator in which ranks may wait for one that has left: see `rebuilding`."""
    if _derived is not None:
        _derived.append(comm)


def is_rebuilding() -> bool:
    """Return whether this rank makes a collective again, and copes with errors of MPI there."""
    return _derived is not None


@contextmanager
def rebuilding(comm: MPI.Comm) -> Iterator[None]:
    """Build on a communicator; if any rank revokes it, revoke what was derived from it as well.

    Otherwise ranks would wait in a derived one for a rank that has given up because of an error.
    """
    global _derived
    _derived = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(ASLEEP * 4):
            if comm.Is_revoked():
                for each in list(_derived or ()):
                    if each:
                        each.Revoke()

    watcher = threading.Thread(target=watch, name="wagma-rebuilding", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        _derived = None


class Survivors:
    """The ranks that go on together, and agree on it; construction is collective.

    Args:
        comm: communicator of all ranks at first; it is duplicated.

    Attributes:
        comm: communicator of the ranks that go on, of which nobody else has a copy.
    """

    def __init__(self, comm: MPI.Intracomm):
        self.comm: MPI.Intracomm = comm.Dup()

    def agree(self, wish: bool) -> bool:
        """Return whether all ranks that live wish so; collective, the same on all that return.

        It waits, asleep, until every rank has called it or its process has ended.
        """
        return bool(self._common(int(wish)))

    def hear(self, bits: int) -> int | None:
        """Return the bits, at most 30, that any rank says; collective as `agree`, which it meets.

        None: a rank says in `agree` that it does not wish so.
        """
        unsaid = self._common(~(bits << 1))
        return ~unsaid >> 1 if unsaid & 1 else None

    def _common(self, bits: int) -> int:
        """Return the bits that all ranks that live have in common: see `agree`."""
        from mpi4py import MPI

        from collectives.engine.deaths import Agreement

        while True:
            self.comm.Ack_failed(self.comm.size)
            agreement = Agreement(self.comm, bits)
            try:
                while (common := agreement.look()) is None:
                    time.sleep(ASLEEP)
            except MPI.Exception:  # the end of a process that was not acknowledged; on all ranks
                continue
            return common

    def revoke(self) -> None:
        """End all communication there, on all ranks."""
        self.comm.Revoke()

    def shrink(self) -> None:
        """Leave out the ranks that have died, and keep the others' order; collective."""
        from mpi4py import MPI

        former, self.comm = self.comm, MPI.Intracomm(self.comm.Shrink())
        with suppress(Exception):  # it has been revoked, and is of no further use
            former.Free()
