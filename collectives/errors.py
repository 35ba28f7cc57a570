"""What goes wrong between ranks, as opposed to wrong arguments (ValueError, TypeError)."""

__all__ = [
    "ClosedError",
    "CollectiveError",
    "CudaError",
    "DisagreementError",
    "RankFailedError",
]


class CollectiveError(RuntimeError):
    """A collective operation could not be carried out."""


class DisagreementError(CollectiveError):
    """The ranks entered different synchronous operations; the collective can only be closed now."""


class ClosedError(CollectiveError):
    """The collective is closed, here or by ranks that this one waited for."""


class RankFailedError(CollectiveError):
    """Another rank has failed; the collective can only be closed now."""


class CudaError(RuntimeError):
    """A function of the CUDA driver has failed on this rank, or there is no driver."""
