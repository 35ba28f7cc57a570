"""The options that all collectives and optimizers take."""

from __future__ import annotations

from typing import TypedDict

__all__ = ["CollectiveOptions"]


class CollectiveOptions(TypedDict, total=False):
    """Keyword arguments of every collective and of every optimizer.

    An option that is not given, or None, has the value of its environment variable, else the
    default.

    Attributes:
        engine: "adaptive": one thread per process serves its collectives, and sleeps when they are
            idle. "dedicated": the thread spins, on a core of its own. "none": no thread; other
            ranks wait while this one computes. By default WAGMA_ENGINE, else "adaptive"; the same
            for all open collectives of a process.
        stall: seconds without progress after which a waiting call logs, once, which ranks are
            missing; 0: never. By default WAGMA_STALL, else 60.
        abort: seconds without progress, also in close(), after which it ends the job by MPI_Abort;
            0: never. By default WAGMA_ABORT, else 0.
        log_level: "debug", "info", "warning" or "error", for the logger `collectives`. By default
            WAGMA_LOG_LEVEL, else the level is unchanged.
        transport: "shared": vectors are in memory shared by the ranks, which must all be on one
            node; an average over a group or all ranks then needs nothing of a rank that computes,
            not even its progress thread. "messages": vectors are sent. By default WAGMA_TRANSPORT,
            else None: ranks on one node use shared memory if the system has any, others messages.
            Ranks that send each other models without a progress thread use messages.
    """

    engine: str | None
    stall: float | None
    abort: float | None
    log_level: str | None
    transport: str | None
