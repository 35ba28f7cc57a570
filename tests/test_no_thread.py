"""Without a progress thread calls do all the work: also those that wait for nobody."""

import time

import numpy as np
import pytest
from together import NEVER, wait_until

from collectives import (
    CollectiveError,
    GroupAllreduce,
    NeighborAverage,
    PairwiseAverage,
    ParameterServer,
    PartialAllreduce,
    PushSum,
)

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3, 4), pytest.mark.transports("messages")]

KINDS = {
    "group": (GroupAllreduce, {"group_size": 2, "sync_period": NEVER}),
    "sums": (PartialAllreduce, {"sync_period": NEVER}),
    "neighbors": (NeighborAverage, {}),
    "push-sum": (PushSum, {}),
    "pairs": (PairwiseAverage, {}),
    "server": (ParameterServer, {}),
    "asynchronous server": (ParameterServer, {"mode": "asp"}),
}
each = pytest.mark.parametrize(("kind", "settings"), KINDS.values(), ids=KINDS)


def call_all(comm, collective, mine, asynchronous, seconds=20):
    """Let all ranks call until all have the same, but for a tenth of how they differed."""
    deadline = time.monotonic() + seconds
    while True:
        for _ in range(20):
            collective(mine)
            time.sleep(0.0005)
        if isinstance(collective, ParameterServer):
            request = comm.Ibarrier()
            while not request.Test():  # the others' calls wait for those of an asynchronous server
                if comm.rank == 0 and asynchronous:
                    collective(mine)
        values = comm.allgather(mine[0])
        if np.ptp(values) < 0.1 * (comm.size - 1):
            return
        assert comm.bcast(time.monotonic() < deadline), values


@each
def test_calls_exchange_what_ranks_have(comm, kind, settings):
    mine = np.full(1000, float(comm.rank))
    with kind(comm, mine, engine="none", **settings) as collective:
        if kind is PartialAllreduce:  # a rank gets what the others put in
            total, got = comm.size * (comm.size - 1) / 2, 0.0
            collective(mine)
            got += mine[0]
            deadline = time.monotonic() + 20
            while any(comm.allgather(abs(got - total / comm.size) > 1e-9)):
                mine[:] = 0
                collective(mine)
                got += mine[0]
                assert time.monotonic() < deadline, got
        else:
            call_all(comm, collective, mine, "mode" in settings)


@each
def test_calls_hear_of_a_rank_that_has_failed(comm, kind, settings):
    mine = np.zeros(1000)
    collective = kind(comm, mine, engine="none", **settings)
    if comm.rank == 1:
        with pytest.raises(KeyError), collective:
            collective(mine)
            raise KeyError("the dataset is gone")
    else:
        raised = []

        def has_heard():
            try:
                collective(mine)
            except CollectiveError as error:
                raised.append(str(error))
            return raised

        wait_until(has_heard)
        assert "rank 1 failed" in raised[0] or "rank 1, which has closed" in raised[0]
        collective.close()


def test_calls_of_one_collective_serve_another(comm):
    """Rank 0 calls the second only after the others have got what it published there."""
    mine, other = np.full(10, float(comm.rank)), np.zeros(10)
    with (
        GroupAllreduce(comm, mine, group_size=comm.size, sync_period=NEVER, engine="none",
                       transport="messages") as average,
        PairwiseAverage(comm, other, engine="none") as pairs,
    ):  # fmt: skip
        if comm.rank == 0:
            request = comm.Ibarrier()
            wait_until(lambda: pairs(other) and request.Test())
        else:
            average(mine)
            comm.Ibarrier().Wait()
            np.testing.assert_allclose(mine, (comm.size - 1) / 2)
