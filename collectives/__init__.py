"""Wait-avoiding collectives for MPI.

`GroupAllreduce` averages numpy vectors over groups of ranks that change with every call, without
waiting for stragglers. `PartialAllreduce`, of eager-SGD, averages contributions over all ranks.
`ReadyGroupAllreduce`, of Partial Reduce, averages in groups of the ranks that are ready first.
`GeneratedGroupAllreduce`, of Ripples, averages in groups that a generator makes. `TriggeredAverage`
averages over all ranks when the first of them has made enough calls; the others take part at the
end of their current step. `collectives.topology` computes groups. In `NeighborAverage`,
`QueuedNeighborAverage`, `PushSum`, `PairwiseAverage` and `ParameterServer` ranks send their vectors
to each other, along the edges of `collectives.graphs`; `UpdateQueue` is such a queue by itself.
`empty` and `empty_like` make arrays that are averaged where they are. Collectives constructed with
arrays on a CUDA device accept such arrays: see `collectives.device`.
Importing this package neither initializes MPI nor imports torch.
"""

from collectives.errors import (
    ClosedError,
    CollectiveError,
    CudaError,
    DisagreementError,
    RankDiedError,
    RankFailedError,
)
from collectives.generated_groups import GeneratedGroupAllreduce
from collectives.group_allreduce import DEFAULT_LATE, GroupAllreduce
from collectives.joining import join
from collectives.neighbor_average import NeighborAverage
from collectives.options import CollectiveOptions
from collectives.pairwise_average import PairwiseAverage
from collectives.parameter_server import ParameterServer
from collectives.partial_allreduce import PartialAllreduce
from collectives.push_sum import PushSum
from collectives.queued_neighbor_average import QueuedNeighborAverage
from collectives.ready_groups import ReadyGroupAllreduce, dynamic_weights
from collectives.statistics import Statistics
from collectives.triggered_average import TriggeredAverage
from collectives.update_queue import UpdateQueue
from collectives.windows import empty, empty_like

__all__ = [
    "DEFAULT_LATE",
    "ClosedError",
    "CollectiveError",
    "CollectiveOptions",
    "CudaError",
    "DisagreementError",
    "GeneratedGroupAllreduce",
    "GroupAllreduce",
    "NeighborAverage",
    "PairwiseAverage",
    "ParameterServer",
    "PartialAllreduce",
    "PushSum",
    "QueuedNeighborAverage",
    "RankDiedError",
    "RankFailedError",
    "ReadyGroupAllreduce",
    "Statistics",
    "TriggeredAverage",
    "UpdateQueue",
    "dynamic_weights",
    "empty",
    "empty_like",
    "join",
]
