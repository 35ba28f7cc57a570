"""Ranks of one node that share memory: who is needed for what, several nodes, what is left."""

import contextlib
import gc
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from launch import Signal, is_open_mpi
from together import NEVER, RULES, compute_until, memory_denied, same_everywhere, wait_until

from collectives import GroupAllreduce
from collectives.memory import windows
from collectives.topology import group_of

pytestmark = pytest.mark.transports()  # whatever there is
mpi = pytest.mark.mpi
launch = pytest.mark.launch

HEAD = """
import os, time
import numpy as np
from mpi4py import MPI
from collectives import GroupAllreduce
comm = MPI.COMM_WORLD
"""
NODES = {"MPIR_CVAR_NUM_CLIQUES": "2"}  # MPICH then takes even and odd ranks for two nodes


@pytest.fixture
def job(mpirun_text):
    def run(body, ranks=4, **options):
        return mpirun_text(ranks, HEAD, body, **options)

    return run


# Who is needed


@launch
@pytest.mark.parametrize(
    "ranks, group_size, stopped",
    [(4, 4, [3]), (4, 2, [2, 3]), (3, 2, [1, 2])],
    ids=["all in one group", "a group of stopped ones", "a stopped one alone"],
)
def test_a_stopped_process_that_computes_hinders_nobody(job, ranks, group_size, stopped):
    """Not even where it has to take part in versions that the others' next ones come after."""
    job(
        f"""
        import psutil

        mine = np.zeros(300_001)
        stopped = {stopped}
        calls = 40
        with GroupAllreduce(comm, mine, group_size={group_size}, sync_period=10**9) as average:
            assert average.transport == "shared"
            pids = comm.allgather(os.getpid())
            if comm.rank in stopped:
                print("computing", comm.rank, flush=True)
            else:
                for rank in stopped:
                    while psutil.Process(pids[rank]).status() != psutil.STATUS_STOPPED:
                        time.sleep(0.01)
                for _ in range(calls):
                    mine += 1
                    average(mine)
                print("called", flush=True)
            comm.barrier()
            if comm.rank in stopped:
                for _ in range(calls):
                    average(mine)
            average.synchronize(mine)
            np.testing.assert_allclose(mine, calls * (comm.size - len(stopped)) / comm.size)
        assert average.statistics().versions == calls
        """,
        ranks=ranks,
        signals=[
            *(Signal(signal.SIGSTOP, f"computing {rank}", rank) for rank in stopped),
            *(Signal(signal.SIGCONT, "called", rank) for rank in stopped),
        ],
    ).check()


@mpi
@pytest.mark.ranks(3, 4, 8)
@pytest.mark.parametrize("late", RULES)
@pytest.mark.parametrize("group_size", [2, 3])
def test_without_an_engine_a_rank_that_computes_hinders_nobody(comm, late, group_size):
    mine = np.full(1000, float(comm.rank))
    computes = comm.rank == comm.size - 1
    calls = 50
    with GroupAllreduce(
        comm, mine, group_size=group_size, sync_period=NEVER, late=late, engine="none"
    ) as average:
        for _ in range(0 if computes else calls):
            call = average.start(mine)
            wait_until(call.test)
        compute_until(comm, not computes)
        # The others have executed these for it.
        assert average.executed == calls
        counts = average.statistics()
        assert counts.versions == calls
        if computes:
            assert counts.passive == calls
            assert counts.staleness == (0, *[1] * calls)
            result = average(mine)
            assert (result.timely, result.version, result.source) == (False, 0, calls - 1)
            assert result.group == group_of(comm.rank, comm.size, group_size, calls - 1)


@mpi
@pytest.mark.ranks(3, 4)
def test_a_result_tells_the_group_of_the_version_that_it_is_of(comm):
    """Also where a later version has been started that could not be executed yet."""
    chance = random.Random(comm.rank)
    mine = np.zeros(300_001)
    with GroupAllreduce(comm, mine, group_size=2, sync_period=NEVER) as average:
        for _ in range(150):
            mine += 1
            time.sleep(chance.random() * 0.003)
            if chance.random() < 0.3:
                average.publish(mine)
            result = average(mine)
            assert result.group == group_of(comm.rank, comm.size, 2, result.source)
            assert result.weight == len(result.group)
            assert (mine == mine[0]).all()


# Several nodes


@launch
@pytest.mark.skipif(is_open_mpi(), reason="the variable is MPICH's")
def test_groups_within_a_node_share_memory_and_others_send_messages(job):
    job(
        """
        import random
        from collectives.topology import group_of

        chance = random.Random(comm.rank)
        for length in (100, 200_001, 100):
            mine = np.zeros(length)
            added = 0
            average = GroupAllreduce(comm, mine, group_size=4, sync_period=7)
            assert average.transport == "shared"
            for t in range(70):
                added += comm.rank + t
                mine += comm.rank + t
                time.sleep(chance.random() * 0.002)
                result = average(mine)
                assert (mine == mine[0]).all()
                if result.synchronized:
                    np.testing.assert_allclose(mine, comm.allreduce(added) / comm.size)
                else:
                    group = group_of(comm.rank, comm.size, 4, result.source)
                    assert result.group == group, result
            average.close()
        """,
        ranks=8,
        env=NODES,
    ).check()


@launch
@pytest.mark.skipif(is_open_mpi(), reason="the variable is MPICH's")
def test_memory_that_not_all_ranks_can_share_is_refused_alike(job):
    result = job(
        """
        try:
            GroupAllreduce(comm, np.zeros(5), group_size=2, transport="shared")
        except RuntimeError as error:
            print(error)
        """,
        env=NODES,
    ).check()
    lines = result.stdout.splitlines()
    assert len(lines) == 4 and len(set(lines)) == 1
    assert "transport: of the 4 ranks, only ranks 0, 2 are on one node" in lines[0]


# No memory to share


def windows_of_earlier_tests(comm):
    """Return `shared_memory()`, once no rank has garbage that keeps a window."""
    gc.collect()
    comm.Barrier()
    return shared_memory()


def shared_memory():
    """Return what of shared memory this process has mapped and open."""
    gc.collect()
    windows.unmap_released()
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line for line in maps if "memfd:wagma" in line]
    opened = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            opened.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return mapped, [path for path in opened if "memfd:wagma" in path]


@mpi
@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("where", ["making", "mapping"])
def test_where_no_memory_can_be_shared_the_vectors_travel(comm, monkeypatch, where):
    def make(**options):
        with memory_denied(comm, monkeypatch, where):
            return GroupAllreduce(comm, np.zeros(1000), group_size=comm.size, **options)

    before = windows_of_earlier_tests(comm)
    with make(wait="group") as average:
        assert average.transport == "messages"
        assert shared_memory() == before
        mine = np.full(1000, float(comm.rank))
        average(mine)
        np.testing.assert_allclose(mine, (comm.size - 1) / 2)
        sent = average.statistics().bytes_sent
        assert sent >= mine.nbytes
    # What travels is compressed, where that was asked for.
    with make(wait="group", wire_dtype="float16") as average:
        average(mine)
        assert 0 < average.statistics().bytes_sent < sent
    with pytest.raises(RuntimeError, match=f"^transport: .*{where} is denied") as caught:
        make(transport="shared")
    assert same_everywhere(comm, str(caught.value))


# What is left


@mpi
@pytest.mark.ranks(3, 4)
def test_nothing_is_left_of_a_collective_that_was_closed(comm):
    before = windows_of_earlier_tests(comm)
    for _ in range(2):
        mine = np.zeros(100_000)
        average = GroupAllreduce(comm, mine, group_size=2, sync_period=3)
        mapped, opened = shared_memory()
        assert len(mapped) == len(before[0]) + comm.size
        assert opened == before[1]
        for _ in range(5):
            average(mine)
        average.close()
        del average
        assert shared_memory() == before
