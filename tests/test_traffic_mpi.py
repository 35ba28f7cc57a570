"""What a rank sends by messages: the table of docs/performance.md."""

import numpy as np
import pytest

from collectives import (
    GroupAllreduce,
    NeighborAverage,
    ParameterServer,
    PartialAllreduce,
    PushSum,
    QueuedNeighborAverage,
    ReadyGroupAllreduce,
)

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(4), pytest.mark.transports("messages")]

CALLS = 20
VECTOR = np.zeros(1 << 17)  # 1 MiB: averages go block by block
OF_ALL = 2 * 3 / 4  # vectors that a rank sends in an average of four


@pytest.mark.parametrize(
    ("make", "options", "vectors"),
    [
        # Groups of two, and every tenth call all ranks.
        (GroupAllreduce, {"group_size": 2, "sync_period": 10}, (9 * 1 + OF_ALL) / 10),
        (GroupAllreduce, {"group_size": 4, "sync_period": 10}, OF_ALL),
        (GroupAllreduce, {"group_size": 1, "wait": "group", "sync_period": 5}, OF_ALL / 5),
        (PartialAllreduce, {"sync_period": 10}, OF_ALL),
        (ReadyGroupAllreduce, {"group_size": 4}, OF_ALL),
        (NeighborAverage, {}, 2),
        (QueuedNeighborAverage, {"graph": "ring"}, 2),
        (PushSum, {"neighbors": 1}, 1),
        (PushSum, {"neighbors": 2}, 2),
        (ParameterServer, {}, (3, 1, 1, 1)),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_ranks_send_as_many_vectors_as_the_page_says(comm, make, options, vectors):
    x = VECTOR.copy()
    with make(comm, x, **options) as average:
        before = average.statistics().bytes_sent
        comm.Barrier()  # other ranks' first calls make this one send
        for _ in range(CALLS):
            average(x)
        comm.Barrier()
        sent = (average.statistics().bytes_sent - before) / (CALLS * x.nbytes)
        comm.Barrier()
    expected = vectors[comm.rank] if isinstance(vectors, tuple) else vectors
    assert sent == pytest.approx(expected, rel=0.06)
