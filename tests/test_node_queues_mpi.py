"""Vectors that ranks of a node send each other in memory that they share."""

import os
import signal
import time

import numpy as np
import pytest
from launch import is_open_mpi
from together import memory_denied, same_everywhere

from collectives import (
    NeighborAverage,
    ParameterServer,
    PushSum,
    QueuedNeighborAverage,
    RankFailedError,
)

pytestmark = pytest.mark.transports()  # they name the transport

INSIDE = 65536  # bytes of the longest vector inside its message
BLOCK = 65536  # and of the shortest block
KINDS = {"neighbors": NeighborAverage, "queues": QueuedNeighborAverage, "push-sum": PushSum}


def results(comm, kind, like, transport, calls=5):
    """Return what each of some calls, of ranks that change their vectors differently, returns."""
    chance = np.random.default_rng(comm.rank)
    arrays = like if isinstance(like, list) else [like]
    mine = [array.copy() for array in arrays]
    given = mine if isinstance(like, list) else mine[0]
    returned = []
    with KINDS[kind](comm, given, transport=transport) as collective:
        assert collective.transport == transport
        for _ in range(calls):
            for array in mine:
                array += chance.normal(size=array.size).astype(array.dtype)
            if chance.random() < 0.3:
                time.sleep(0.002 * chance.random())
            collective(given)
            returned.append([array.copy() for array in mine])
    return returned


LAYOUTS = {
    "short": np.zeros(1, np.float32),
    "inside": np.zeros(INSIDE // 4, np.float32),
    "one number more": np.zeros(INSIDE // 4 + 1, np.float32),
    "a block less": np.zeros(BLOCK // 8 - 1),
    "two blocks": np.zeros(2 * BLOCK // 8),
    "blocks and a rest": np.zeros(11 * BLOCK // 4 + 3, np.float32),
    "long": np.zeros(1_300_001, np.float32),
    "halves": np.zeros(50_001, np.float16),
    "list": [np.zeros(7), np.zeros(90_001, np.float32), np.zeros(1), np.zeros(5001, np.float16)],
}


@pytest.mark.mpi
@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_both_transports_have_the_same_bits(comm, kind, layout):
    by_memory, by_messages = (
        results(comm, kind, LAYOUTS[layout], transport) for transport in ("shared", "messages")
    )
    for ours, theirs in zip(by_memory, by_messages):
        for a, b in zip(ours, theirs):
            np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.mpi
@pytest.mark.ranks(4)
@pytest.mark.parametrize("length", [1, INSIDE // 8])
def test_a_stopped_rank_gets_more_than_its_queues_have_room_for(comm, length):
    """The others are ten iterations ahead of rank 3, which its tokens allow."""
    ahead, calls = 10, 25
    mine = np.zeros(length)
    everyone = QueuedNeighborAverage(comm, mine, max_gap=ahead, backup=1)
    process = comm.bcast(os.getpid(), root=3)
    others = comm.Split(comm.rank == 3)
    if comm.rank != 3:
        others.Barrier()  # all have what they need of rank 3
    if comm.rank == 0:
        os.kill(process, signal.SIGSTOP)
    if comm.rank != 3:
        others.Barrier()
        for _ in range(ahead - 1):
            mine += 1
            everyone(mine)
        others.Barrier()
    if comm.rank == 0:
        os.kill(process, signal.SIGCONT)
    others.Free()
    with everyone:
        while everyone.version < calls:
            mine += 1
            everyone(mine)
        everyone.synchronize(mine)
        assert same_everywhere(comm, mine.tobytes())
        assert np.isfinite(mine).all()
        assert (mine == mine[0]).all()


@pytest.mark.mpi
@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("where", ["making", "mapping"])
def test_where_no_memory_can_be_shared_the_vectors_travel(comm, monkeypatch, where):
    def make(**options):
        with memory_denied(comm, monkeypatch, where):
            return NeighborAverage(comm, np.zeros(30_000), **options)

    with make() as average:
        assert average.transport == "messages"
        mine = np.full(30_000, float(comm.rank))
        for _ in range(60):
            average(mine)
        np.testing.assert_allclose(mine, (comm.size - 1) / 2, atol=1e-6)
    with pytest.raises(RuntimeError, match=f"^transport: .*{where} is denied") as caught:
        make(transport="shared")
    assert same_everywhere(comm, str(caught.value))


@pytest.mark.mpi
@pytest.mark.ranks(4)
def test_without_a_progress_thread_all_send_messages(comm):
    mine = np.full(30_000, float(comm.rank))
    with NeighborAverage(comm, mine, engine="none") as average:
        assert average.transport == "messages"
        average(mine)


@pytest.mark.mpi
@pytest.mark.ranks(3, 4)
def test_blocks_of_a_rank_that_fails_are_not_waited_for(comm):
    mine = np.full(300_000, float(comm.rank))
    average = NeighborAverage(comm, mine)
    if comm.rank == 1:
        average(mine)
        average.fail(ValueError("the data is wrong"))
    else:
        with pytest.raises(RankFailedError, match="rank 1 failed.*the data is wrong"):
            for _ in range(1000):
                average(mine)
    average.close()


@pytest.mark.launch
@pytest.mark.skipif(is_open_mpi(), reason="the variable is MPICH's")
def test_ranks_of_two_nodes_use_both(mpirun_text):
    mpirun_text(
        4,
        """
import numpy as np
from mpi4py import MPI
from collectives import NeighborAverage, ParameterServer, PushSum
comm = MPI.COMM_WORLD
""",
        """
        for length in (10, 20_000, 300_001):
            for kind in (NeighborAverage, PushSum):
                ours = []
                for transport in (None, "messages"):
                    mine = np.full(length, float(comm.rank))
                    with kind(comm, mine, transport=transport) as average:
                        assert average.transport == (transport or "shared")
                        for _ in range(70):
                            mine += comm.rank
                            average(mine)
                    ours.append(mine)
                np.testing.assert_array_equal(*ours)
            mine = np.full(length, float(comm.rank))
            with ParameterServer(comm, mine) as server:
                for _ in range(20):
                    mine += 1
                    server(mine)
                server.synchronize(mine)
            assert (mine == mine[0]).all()
        """,
        env={"MPIR_CVAR_NUM_CLIQUES": "2"},
    ).check()


@pytest.mark.mpi
@pytest.mark.ranks(4)
@pytest.mark.parametrize("length", [100, 300_000])
def test_a_server_s_models_and_pushes_take_both_ways(comm, length):
    """Its clients copy the model from its memory; their changes are sent by MPI."""
    mine = np.zeros(length)
    with ParameterServer(comm, mine) as server:
        assert server.transport == "shared"
        for _ in range(40):
            mine += 1
            server(mine)
        server.synchronize(mine)
        assert same_everywhere(comm, mine.tobytes())
        assert (mine == mine[0]).all() and mine[0] > 0
