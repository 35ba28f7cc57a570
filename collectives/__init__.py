"""Wait-avoiding collectives for MPI.

`GroupAllreduce` averages numpy vectors over groups of ranks that change with every call, without
waiting for late ranks; `PartialAllreduce`, of eager-SGD, averages what ranks put in over all of
them. `collectives.topology` says who meets whom. Importing this package neither
initialises MPI nor imports torch.
"""

from collectives.errors import (
    ClosedError,
    CollectiveError,
    DisagreementError,
    RankFailedError,
)
from collectives.group_allreduce import DEFAULT_LATE, GroupAllreduce
from collectives.partial_allreduce import PartialAllreduce
from collectives.statistics import Statistics

__all__ = [
    "DEFAULT_LATE",
    "ClosedError",
    "CollectiveError",
    "DisagreementError",
    "GroupAllreduce",
    "PartialAllreduce",
    "RankFailedError",
    "Statistics",
]
