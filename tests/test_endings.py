"""How a job ends: explicitly, by forgetting to close, by an exception, by a signal."""

import re
import signal

import pytest
from launch import Signal, is_open_mpi

from collectives import survival, witness

pytestmark = pytest.mark.launch

HEAD = """
import sys, time
import numpy as np
from mpi4py import MPI
from collectives import GroupAllreduce
comm = MPI.COMM_WORLD
x = np.zeros(1000)
"""


@pytest.fixture
def job(mpirun_text):
    def run(body, ranks=4, head=HEAD, **options):
        return mpirun_text(ranks, head, body, **options)

    return run


def test_a_collective_that_nobody_closed_is_closed_at_exit(job):
    result = job(
        """
        average = GroupAllreduce(comm, x, group_size=2, sync_period=1000)
        for _ in range(10 * comm.rank):
            average(x)
        import atexit
        atexit.register(lambda: None)
        """
    )
    assert result.check().stderr == ""


def test_mpi_finalized_before_close_closes_first(job):
    result = job(
        """
        average = GroupAllreduce(comm, x, group_size=2, sync_period=1000)
        for _ in range(10 * comm.rank):
            average(x)
        MPI.Finalize()
        assert average.closed and average.executed == 30
        for use, message in (
            (lambda: average(x), "ClosedError('this collective is closed')"),
            (lambda: GroupAllreduce(comm, x, group_size=2), "RuntimeError('MPI has been finalized"),
        ):
            try:
                use()
            except RuntimeError as error:
                assert repr(error).startswith(message), error
            else:
                raise AssertionError(message)
        average.close()
        assert average.statistics().calls == average.version
        """
    )
    assert result.check().stderr == ""


def test_children_of_a_rank_neither_hold_up_nor_close_anything(job):
    """Forked ones have the collective, spawned ones have not; and deleting it does not close it."""
    result = job(
        """
        import gc, multiprocessing, os

        def compute(value):
            return 2 * value

        if __name__ == "__main__":
            average = GroupAllreduce(comm, x, group_size=2, sync_period=1000)
            average(x)
            for kind in ("fork", "spawn"):
                with multiprocessing.get_context(kind).Pool(1) as pool:
                    assert pool.map(compute, [1, 2]) == [2, 4]
            child = os.fork()
            if child == 0:
                del average
                gc.collect()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            for _ in range(10 * comm.rank):
                average(x)
            del average
            gc.collect()
            print("ended")
        """,
        ranks=2,
        head=HEAD.replace("from mpi4py", "if __name__ == '__main__': from mpi4py")
        .replace("comm =", "if __name__ == '__main__': comm =")
        .replace("from collectives", "if __name__ == '__main__': from collectives"),
    )
    assert result.check().stdout.split() == ["ended"] * 2
    assert result.stderr == ""


@pytest.mark.parametrize("where", ["with", "without"])
def test_an_exception_on_one_rank_is_printed_and_ends_the_job(job, where):
    result = job(
        f"""
        def train(average):
            for t in range(100000):
                if (comm.rank, t) == (1, 5):
                    raise KeyError("the dataset is gone")
                average(x)

        average = GroupAllreduce(comm, x, group_size=2, sync_period=10)
        if {where == "with"}:
            with average:
                train(average)
        else:
            train(average)
        """
    )
    assert result.returncode != 0
    assert "the dataset is gone" in result.stderr
    reason = "rank 1 failed, so only close() is allowed here: KeyError: 'the dataset is gone'"
    assert f"RankFailedError: {reason}" in result.stderr
    assert result.seconds < 35


def test_an_exception_shows_its_traceback_while_others_go_on(job):
    """The others make no call until it is seen."""
    result = job(
        """
        import signal

        seen = []
        signal.signal(signal.SIGUSR1, lambda *_: seen.append(True))
        comm.Barrier()
        with GroupAllreduce(comm, x, group_size=2, sync_period=1000) as average:
            if comm.rank == 1:
                raise KeyError("the dataset is gone")
            while not seen:
                time.sleep(0.01)
            print("went on", file=sys.stderr, flush=True)
        """,
        signals=[Signal(signal.SIGUSR1, "the dataset is gone", "ranks")],
    )
    assert result.returncode != 0
    assert "went on" in result.stderr


@pytest.mark.parametrize(
    ("others", "failing"),
    [
        ("call", [0]),
        ("call", [1, 2]),
        ("have joined", [0]),
        ("are closing", [1, 2]),
        ("wait for their group", [0]),
    ],
)
def test_an_exception_ends_the_job_whatever_the_others_do(job, others, failing):
    """Which ends well only for those that are closing."""
    result = job(
        f"""
        failing, others = {failing}, {others!r}
        wait = "group" if others == "wait for their group" else "nobody"
        size = comm.size if wait == "group" else 2
        average = GroupAllreduce(comm, x, group_size=size, sync_period=10**9, wait=wait)
        with average:
            average(x)
            if others == "are closing":
                comm.Barrier()
            if comm.rank in failing:
                time.sleep(0.3)
                raise KeyError(f"the dataset of rank {{comm.rank}} is gone")
            if others == "have joined":
                average.join(x)
            elif others != "are closing":
                while True:
                    average(x)
                    time.sleep(0.001)
        print("ended well", flush=True)
        """,
        ranks=3,
    )
    assert result.returncode != 0
    assert result.seconds < 35
    for rank in failing:
        assert 'in <module>\n    raise KeyError(f"the dataset of rank' in result.stderr
        assert f"the dataset of rank {rank} is gone" in result.stderr
    told = 0 if others == "are closing" else 3 - len(failing)
    assert result.stdout.count("ended well") == 3 - len(failing) - told
    reasons = re.findall(r"RankFailedError: rank (\d) failed, so only .* KeyError", result.stderr)
    assert set(map(int, reasons)) <= set(failing)
    assert len(reasons) >= told
    for rank in set(range(3)) - set(failing):
        assert (f"rank {rank} is closing because of" in result.stderr) == bool(told)


@pytest.mark.parametrize("blocks", ["with", "without"])
def test_a_failure_has_one_traceback_and_one_line_of_each_other_rank(job, blocks):
    """With nested blocks, each of which tells why it ends, and with none."""
    result = job(
        f"""
        def train(first, second):
            for t in range(100):
                if (comm.rank, t) == (2, 7):
                    raise KeyError("the dataset is gone")
                first(x)
                second(y)

        y = np.zeros(10)
        first, second = (GroupAllreduce(comm, vector) for vector in (x, y))
        if {blocks == "with"}:
            with first, second:
                train(first, second)
        train(first, second)
        """
    )
    assert result.returncode != 0
    lines = [line for line in result.complaints.splitlines() if re.search(r"^\S.*Error", line)]
    assert result.stderr.count("Traceback") == 1
    assert sum(line.startswith("KeyError: 'the dataset is gone'") for line in lines) == 1
    told = [line for line in lines if "RankFailedError: rank 2 failed" in line]
    assert len(told) == 3
    assert len(lines) == 4


@pytest.mark.parametrize("end", ["raise", "sys.exit(3)", "return"])
def test_a_rank_that_closes_one_collective_is_not_waited_for_in_another(job, end):
    """Blocks close the second first, the exit the first; the others wait in the other one."""
    result = job(
        f"""
        y = np.zeros(10)
        periods = [10**9, 3] if {end == "return"} else [3, 10**9]

        def train(first, second):
            for t in range(6):
                if (comm.rank, t) == (1, 2):
                    {end.replace("raise", 'raise KeyError("the dataset is gone")')}
                first(x)
                second(y)

        first, second = [
            GroupAllreduce(comm, vector, group_size=2, sync_period=period)
            for vector, period in zip((x, y), periods)
        ]
        if {end == "return"}:
            train(first, second)
        else:
            with first, second:
                train(first, second)
        """,
        ranks=3,
    )
    assert result.returncode != 0
    if end == "return":
        assert "ClosedError: rank 0 waits in" in result.stderr
        assert "rank 1 entered close() after 2 calls" in result.stderr
    else:
        assert "RankFailedError: rank 1 failed, so only close() is allowed here" in result.stderr


@pytest.mark.parametrize("where", ["with", "without"])
def test_sys_exit_on_one_rank_fails_the_job(job, where):
    """In a block the others are told at once; at exit it is no exception any more, but a close."""
    result = job(
        f"""
        import contextlib
        average = GroupAllreduce(comm, x, group_size=2, sync_period=100)
        with average if {where == "with"} else contextlib.nullcontext():
            if comm.rank == 1:
                sys.exit(3)
            for _ in range(100):
                average(x)
                time.sleep(0.005)
        """,
        ranks=3,
    )
    assert result.returncode != 0  # which of the ranks' it is is up to mpiexec
    if where == "with":
        assert "rank 1 is closing because of SystemExit: 3\n" in result.stderr
        assert "RankFailedError: rank 1 failed, so only close() is allowed here" in result.stderr
    else:
        assert "rank 1 entered close() after 0 calls" in result.stderr


@pytest.mark.parametrize("end", ["os._exit(5)", "os.kill(os.getpid(), 9)"])
def test_the_launcher_ends_a_job_that_lost_a_process(job, end):
    """Nothing of ours runs in that process any more, and the others cannot go on without it."""
    result = job(
        f"""
        import os
        with GroupAllreduce(comm, x, group_size=2, sync_period=10) as average:
            for t in range(10):
                if (comm.rank, t) == (1, 5):
                    {end}
                average(x)
        """,
        ranks=3,
    )
    assert result.returncode != 0
    assert result.seconds < 35


def test_a_launcher_that_ends_nothing_is_not_waited_for(job, tmp_path):
    """As srun: MPICH's mpiexec can be told to let the others be, which then wait forever.

    It may end before them, and then nobody forwards what they say.
    """
    if is_open_mpi():
        pytest.skip("Open MPI's mpiexec always ends the job, or tells the others (ULFM)")
    result = job(
        f"""
        import os, sys
        from collectives import process
        sys.stderr = open(f"{tmp_path}/{{comm.rank}}", "w")
        process.last_words.append(lambda: "the newest checkpoint is runs/7")
        with GroupAllreduce(comm, x, group_size=2, sync_period=10) as average:
            for t in range(10**9):
                if (comm.rank, t) == (1, 5):
                    os.kill(os.getpid(), 9)
                average(x)
        """,
        ranks=3,
        options=("-disable-auto-cleanup",),
    )
    assert result.returncode != 0
    assert result.seconds < 35
    if result.seconds < witness.GRACE:
        pytest.skip("mpiexec has ended the job, as it now and then does although it is told not to")
    said = (
        r"the process of rank 1 has ended \(process \d+ of this node\): ending the job; the newest"
    )
    assert any(re.search(said, (tmp_path / str(rank)).read_text()) for rank in (0, 2))


def test_the_end_of_a_rank_that_nobody_needs_is_no_death(job):
    """Rank 1 has left, and ends without MPI_Finalize; rank 0 has begun to leave, and computes."""
    if is_open_mpi():
        pytest.skip("Open MPI's mpiexec ends the job when a rank ends without MPI_Finalize")
    result = job(
        """
        import os, threading
        from collectives import process, witness
        witness.GRACE = 0.0
        reported, report = threading.Event(), process._witness._report

        def noted(ended):
            report(ended)
            reported.set()

        process._witness._report = noted
        average = GroupAllreduce(comm, x, group_size=2, sync_period=10)
        average(x)
        assert average.native.needs_others()
        if comm.rank == 1:
            average.close()
            comm.recv(source=0)
            os._exit(0)
        average.native.begin_close()
        while average.native.needs_others():
            time.sleep(0.001)
        comm.send(None, dest=1)
        assert reported.wait(20)
        average.close()
        print("closed", flush=True)
        process.remove_segments()  # as MPI_Finalize would, which would wait for rank 1
        os._exit(0)
        """,
        ranks=2,
        options=("-disable-auto-cleanup",),
    )
    assert result.check().stdout == "closed\n"


@pytest.mark.parametrize("number", [signal.SIGINT])
@pytest.mark.parametrize("to", ["ranks", 2])
def test_ctrl_c_interrupts_a_waiting_call_and_the_job_ends(job, number, to):
    """Rank 3 computes, the others wait at a synchronization that it does not reach."""
    result = job(
        """
        with GroupAllreduce(comm, x, group_size=2, sync_period=3) as average:
            if comm.rank == 3:
                print("computing", flush=True)
                for _ in range(10000 if sys.argv[1] == "ranks" else 100):
                    time.sleep(0.02)
            for _ in range(3):
                average(x)
            average.synchronize(x)
        """.replace("sys.argv[1]", repr(str(to))),
        signals=[Signal(number, "computing", to)],
    )
    assert result.returncode != 0
    assert "KeyboardInterrupt" in result.stderr
    if to == 2:
        told = (
            "RankFailedError: rank 2 failed, so only close() is allowed here: KeyboardInterrupt\n"
        )
        assert told in result.stderr


@pytest.mark.parametrize("level", ["single", "funneled"])
def test_an_mpi_without_thread_support_is_refused_on_every_rank(job, level):
    result = job(
        """
        try:
            GroupAllreduce(comm, x, group_size=2)
        except RuntimeError as error:
            everyone = comm.allgather(str(error))
            assert len(set(everyone)) == 1
            if comm.rank == 0:
                print(error)
        """,
        head=f"import mpi4py\nmpi4py.rc.thread_level = {level!r}\n" + HEAD,
    )
    assert "initialized without support for threads" in result.check().stdout
    assert f"level {level.upper()}, SERIALIZED is needed" in result.stdout


def test_serialized_allows_one_collective_at_a_time(job):
    result = job(
        """
        with GroupAllreduce(comm, x, group_size=2, sync_period=5) as average:
            for _ in range(10):
                average(x)
            GroupAllreduce(comm, x, group_size=2)
        """,
        head="import mpi4py\nmpi4py.rc.thread_level = 'serialized'\n" + HEAD,
    )
    assert result.returncode != 0
    assert "SERIALIZED, which allows one open collective" in result.stderr


def test_without_a_progress_thread_funneled_suffices(job):
    job(
        """
        with GroupAllreduce(comm, x, group_size=2, sync_period=5) as average:
            for _ in range(10):
                average(x)
        """,
        head="import mpi4py\nmpi4py.rc.thread_level = 'funneled'\n" + HEAD,
        env={"WAGMA_ENGINE": "none"},
    ).check()


@pytest.mark.parametrize("variable", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_singletons_of_a_larger_job_are_refused(job, variable):
    # Without mpiexec, because Open MPI's sets its variable itself.
    result = job("GroupAllreduce(comm, x, group_size=2)", ranks=None, env={variable: "4"})
    assert result.returncode != 0
    assert f"MPI made each of the job's 4 tasks ({variable}) a job of its own" in result.stderr


def test_importing_initializes_no_mpi_and_loads_no_torch(job):
    job(
        """
        import sys
        import collectives, collectives.topology
        assert not {"mpi4py.MPI", "torch", "cupy"} & set(sys.modules)
        """,
        head="",
        ranks=1,
    ).check()


def test_without_a_function_that_revokes_no_rank_can_go_on(monkeypatch):
    from mpi4py import MPI  # noqa: F401  loads the library

    from collectives.engine import deaths

    monkeypatch.setenv(survival.SWITCH, "1")
    monkeypatch.setattr(deaths, "find_revoke", lambda: False)
    assert survival.why_not() == (
        "no rank can go on here without another: this MPI library has no MPIX_Comm_revoke"
    )
