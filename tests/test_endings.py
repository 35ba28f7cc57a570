"""How a job ends: explicitly, by forgetting to close, by an exception, by a signal."""

import signal
import textwrap

import pytest
from launch import Signal

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
def job(mpirun, tmp_path):
    def run(body, ranks=4, head=HEAD, **options):
        script = tmp_path / "job.py"
        script.write_text(head + textwrap.dedent(body))
        return mpirun(ranks, script, timeout=40, **options)

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
        """
    )
    assert result.check().stderr == ""


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
    reason = "rank 1 failed, so only close() is left here: KeyError: 'the dataset is gone'"
    assert f"RankFailedError: {reason}" in result.stderr
    assert result.seconds < 20


def test_an_exception_shows_its_traceback_while_others_go_on(job):
    """The others make no call for two seconds; the traceback does not wait for that."""
    result = job(
        """
        with GroupAllreduce(comm, x, group_size=2, sync_period=1000) as average:
            if comm.rank == 1:
                raise KeyError("the dataset is gone")
            time.sleep(2)
            print("went on", file=sys.stderr, flush=True)
        """
    )
    assert result.returncode != 0
    assert result.stderr.index("the dataset is gone") < result.stderr.index("went on")


@pytest.mark.parametrize("number", [signal.SIGINT])
@pytest.mark.parametrize("to", ["ranks", 2])
def test_ctrl_c_interrupts_a_waiting_call_and_the_job_ends(job, number, to):
    """Rank 3 computes, the others wait at a synchronisation that it does not reach."""
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
        assert "rank 2 entered close() after" in result.stderr


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
    assert "initialised without support for threads" in result.check().stdout
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


def test_importing_initialises_no_mpi_and_loads_no_torch(job):
    job(
        """
        import sys
        import collectives, collectives.topology
        assert not {"mpi4py.MPI", "torch", "cupy"} & set(sys.modules)
        """,
        head="",
        ranks=1,
    ).check()
