"""What the `join` blocks of averagers share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


class _JoinBlocks(threading.local):
    """The `join` blocks that a thread is in, and the joins begun in the inner ones.

    The thread waits for other ranks only at the end of the outermost block; until then they may
    need this rank in the steps of any other averager.
    """

    begun: ExitStack | None = None

    @contextmanager
    def enter(self) -> Iterator[ExitStack]:
        """Yield an exit stack that waits, at the outermost block's end, for the joins begun."""
        if self.begun is not None:
            yield self.begun
            return
        with ExitStack() as self.begun:
            try:
                yield self.begun
            finally:
                self.begun = None


join_blocks = _JoinBlocks()


def check_threads(name: str) -> None:
    """Raise RuntimeError if MPI cannot be used by several threads."""
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise RuntimeError(f"join() of {name} needs MPI's THREAD_MULTIPLE")
