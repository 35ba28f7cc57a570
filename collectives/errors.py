"""Errors between ranks. Invalid arguments raise ValueError or TypeError instead."""

__all__ = [
    "ClosedError",
    "CollectiveError",
    "CudaError",
    "DisagreementError",
    "RankDiedError",
    "RankFailedError",
]


class CollectiveError(RuntimeError):
    """A collective operation failed."""


class DisagreementError(CollectiveError):
    """Ranks entered different synchronous operations; only close() is allowed after it."""


class ClosedError(CollectiveError):
    """The collective is closed, on this rank or on ranks that this one waits for."""


class RankFailedError(CollectiveError):
    """Another rank has failed; only close() is allowed after it."""


class RankDiedError(RankFailedError):
    """The process of another rank has ended, and the job goes on; only `abandon` is allowed."""


class CudaError(RuntimeError):
    """A function of the CUDA driver failed on this rank, or there is no driver."""
