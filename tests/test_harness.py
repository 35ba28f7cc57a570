"""The harness itself: a rank that fails or hangs ends the run soon, with its traceback."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import forked as stub
import lockstep
import psutil
import pytest
from launch import Job, Signal
from run import parts, with_tests_of

HERE = Path(__file__).parent


@pytest.fixture
def mpi_pytest(mpirun, tmp_path):
    """Return a function that runs pytest on a text under mpiexec, with this suite's plugin."""

    def run(ranks, tests, *arguments, **env):
        (tmp_path / "conftest.py").write_text((HERE / "conftest.py").read_text())
        header = "import os, time\nimport pytest\n"
        header += "pytestmark = [pytest.mark.mpi, pytest.mark.transports()]\n"
        (tmp_path / "test_inner.py").write_text(header + textwrap.dedent(tests))
        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n ranks\n transports\n")
        return mpirun(
            ranks,
            *("-m", "pytest", "--with-mpi", "-p", "no:cacheprovider", "--color=no", *arguments),
            timeout=60,
            cwd=tmp_path,
            env={"PYTHONPATH": str(HERE), "LOCKSTEP_GRACE": "30", **env},
        )

    return run


def runs(pid):
    # An orphan's new parent may be slow to take note of its end.
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.mpi
@pytest.mark.ranks(*lockstep.SIZES)
def test_comm_is_a_duplicate_of_the_world(comm, request):
    from mpi4py import MPI

    assert MPI.Comm.Compare(comm, MPI.COMM_WORLD) == MPI.CONGRUENT
    assert comm.size in lockstep.check_ranks(request.node)
    assert comm.allreduce(1) == comm.size


@pytest.mark.mpi
def test_a_test_runs_with_four_ranks_unless_it_says_otherwise(comm):
    assert comm.size == 4


@pytest.mark.launch
def test_a_passing_run_prints_one_summary_and_ends_with_status_0(mpi_pytest):
    result = mpi_pytest(
        4,
        """
        def test_passes(comm):
            assert comm.allreduce(comm.rank) == 6

        @pytest.mark.xfail
        def test_is_expected_to_fail(comm):
            assert comm.rank < 0

        @pytest.mark.ranks(8)
        def test_of_another_size(comm):
            assert False
        """,
    ).check()
    assert result.stdout.count("1 passed, 1 deselected, 1 xfailed") == 1
    assert result.stdout.count("test session starts") == 1


@pytest.mark.launch
@pytest.mark.parametrize("ci", ["", "true"])  # pytest prints more where CI is set
def test_a_failing_rank_fails_the_test_with_its_traceback_and_the_next_test_runs(mpi_pytest, ci):
    """Also where it fails in the setup, which keeps the others out of the test, or skips it."""
    result = mpi_pytest(
        4,
        """
        @pytest.mark.parametrize("failing", [0, 2])
        def test_fails_on_one_rank(comm, failing):
            print("said by", comm.rank)
            assert comm.rank != failing, f"the reason of {failing}"

        @pytest.fixture
        def broken(comm):
            assert comm.rank != 1, "the setup's reason"

        def test_never_runs(comm, broken):
            comm.Barrier()

        def test_skips_on_one_rank(comm):
            if comm.rank == 3:
                pytest.skip("one rank")

        def test_next(comm):
            comm.Barrier()
        """,
        CI=ci,
    )
    assert result.returncode == 1
    assert "3 failed, 1 passed, 1 error" in result.stdout
    for failing in (0, 2):
        assert result.stdout.count(f"E       AssertionError: the reason of {failing}") == 1
        assert f"said by {failing}" in result.stdout
    assert "the setup's reason" in result.stdout
    assert "passed on ranks 0, 1, 2; skipped on rank 3" in result.stdout


@pytest.mark.launch
def test_a_failing_rank_that_the_others_wait_for_aborts_the_run_with_its_traceback(mpi_pytest):
    result = mpi_pytest(
        4,
        """
        def test_others_wait(comm):
            if comm.rank == 2:
                raise ValueError("the reason")
            comm.Barrier()
        """,
        "--timeout=50",
        LOCKSTEP_GRACE="2",
    )
    assert result.returncode not in (0, 5)
    assert "rank 2: is at call of test_inner.py::test_others_wait; ranks 0, 1, 3" in result.stderr
    assert "ValueError: the reason" in result.stderr
    assert "has not ended" not in result.stderr


@pytest.mark.launch
def test_a_hanging_rank_aborts_the_run_with_its_stack(mpi_pytest):
    result = mpi_pytest(
        4,
        """
        def wait_for_nobody(comm):
            comm.recv(source=comm.rank)

        def test_fails_before():
            assert False, "the earlier failure"

        def test_one_hangs(comm):
            if comm.rank == 1:
                print("the last word")
                wait_for_nobody(comm)
        """,
        "--timeout=5",
        LOCKSTEP_PRINTING="3",
    )
    assert result.returncode not in (0, 5)
    assert "rank 1: test_inner.py::test_one_hangs has not ended after 5.0 s" in result.stderr
    assert "in wait_for_nobody" in result.stderr
    assert "the last word" in result.stderr
    assert "This rank waits for rank 1." in result.stderr
    assert "the earlier failure" in result.stdout


@pytest.mark.launch
def test_a_rank_that_hangs_in_teardown_after_a_failure_aborts_the_run(mpi_pytest):
    result = mpi_pytest(
        4,
        """
        @pytest.fixture
        def closes_badly(comm):
            yield
            if comm.rank == 0:
                comm.recv(source=0)

        def test_fails_and_hangs(closes_badly):
            assert False, "the reason"
        """,
        "--timeout=5",
        LOCKSTEP_PRINTING="3",
    )
    assert result.returncode not in (0, 5)
    assert "in closes_badly" in result.stderr


@pytest.mark.launch
def test_a_module_that_one_rank_cannot_import_stops_the_run(mpi_pytest):
    result = mpi_pytest(
        2,
        """
        from mpi4py import MPI
        if MPI.COMM_WORLD.rank == 1:
            import no_such_module

        def test_never_runs(comm):
            comm.Barrier()
        """,
    )
    assert result.returncode == 1
    assert "No module named 'no_such_module'" in result.stdout + result.stderr


@pytest.mark.launch
def test_a_run_that_skips_everything_has_tested_nothing(mpi_pytest):
    result = mpi_pytest(1, "@pytest.mark.ranks(1)\ndef test_skips(): pytest.skip('always')")
    assert result.returncode == pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.mark.launch
def test_a_number_of_ranks_that_the_suite_never_has_is_refused(mpi_pytest):
    result = mpi_pytest(1, "@pytest.mark.ranks(5)\ndef test_of_five(comm): pass")
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "never has [5] ranks" in result.stderr


@pytest.mark.launch
@pytest.mark.parametrize("forked", [False, True])
def test_mpirun_ends_a_job_that_takes_too_long_and_shows_where_it_was(mpirun, forked):
    code = "import time\ndef wait():\n  time.sleep(60)\nwait()"
    with pytest.raises(AssertionError, match="no end after 4 s") as failure:
        mpirun(3, "-c", code, timeout=4, forked=forked)
    assert str(failure.value).count("in wait") == 3


@pytest.mark.launch
@pytest.mark.parametrize("forked", [False, True])
def test_mpirun_finds_and_ends_a_process_that_outlives_its_job(
    mpirun, tmp_path, monkeypatch, forked
):
    monkeypatch.setattr("launch.ENDING", 3.0)
    pid = tmp_path / "pid"
    code = f"""
        import pathlib, subprocess
        # With the job's output open, mpiexec would wait for it.
        closed = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        child = subprocess.Popen(["sleep", "60"], start_new_session=True, **closed)
        pathlib.Path({str(pid)!r}).write_text(str(child.pid))
    """
    with pytest.raises(AssertionError, match=r"left behind: .*sleep 60"):
        mpirun(1, "-c", textwrap.dedent(code), timeout=20, forked=forked)
    assert not runs(int(pid.read_text()))


@pytest.mark.launch
def test_mpirun_removes_the_shared_memory_of_an_aborted_job(mpirun, tmp_path, monkeypatch):
    def slowly(job):
        time.sleep(0.1)  # as on a busy machine
        return processes(job)

    def note(job):
        note_segments(job)
        told = list(tmp_path.glob("mapped-*"))
        if len(told) == 2 and job._segments >= {*" ".join(map(Path.read_text, told)).split()}:
            seen.touch()

    processes, note_segments, seen = Job.processes, Job._note_segments, tmp_path / "seen"
    monkeypatch.setattr(Job, "processes", slowly)
    monkeypatch.setattr(Job, "_note_segments", note)
    code = f"""
        import time
        from pathlib import Path
        from mpi4py import MPI
        words = open("/proc/self/maps").read().split()
        mapped = {{each for each in words if "/dev/shm/" in each and Path(each).exists()}}
        print(*mapped, flush=True)
        folder = Path({str(tmp_path)!r})
        part = folder / f"part-{{MPI.COMM_WORLD.rank}}"
        part.write_text(" ".join(mapped))
        part.rename(folder / f"mapped-{{MPI.COMM_WORLD.rank}}")
        while not (folder / "seen").exists():
            time.sleep(0.01)
        MPI.COMM_WORLD.Abort(3)
    """
    result = mpirun(2, "-c", textwrap.dedent(code), timeout=20)
    assert result.returncode == 3
    assert not any(Path(segment).exists() for segment in result.stdout.split())


@pytest.mark.launch
@pytest.mark.parametrize("forked", [False, True])
@pytest.mark.parametrize(("to", "count"), [("ranks", 2), (1, 1)])
def test_mpirun_sends_a_signal_once_the_job_has_said_a_word(mpirun, to, count, forked):
    code = f"""
        import signal, sys
        from mpi4py import MPI
        comm = MPI.COMM_WORLD
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        comm.Barrier()
        print("ready", flush=True)
        if {to!r} in ("ranks", comm.rank):
            signal.sigwait([signal.SIGUSR1])
            sys.stdout.write(f"got it: {{comm.rank}}\\n")
    """
    sent = Signal(signal.SIGUSR1, after="ready", to=to)
    code = textwrap.dedent(code)
    result = mpirun(2, "-c", code, timeout=30, signals=[sent], forked=forked).check()
    assert result.stdout.count("got it") == count
    assert "got it: 1" in result.stdout


@pytest.mark.launch
@pytest.mark.parametrize("forked", [False, True])
def test_mpirun_signals_the_launcher_as_ctrl_c_does(mpirun, forked):
    code = "import time; print('ready', flush=True); time.sleep(60)"
    sent = Signal(signal.SIGINT, after="ready", to="launcher")
    assert mpirun(2, "-c", code, timeout=30, signals=[sent], forked=forked).returncode != 0


@pytest.mark.launch
def test_a_forked_process_is_what_python_would_be(mpirun, tmp_path):
    """Its arguments, variables, directory, files, path, end and descendants' job."""
    (tmp_path / "beside.py").write_text("name = 'beside'")
    script = tmp_path / "job.py"
    script.write_text(SAYS)
    said = []
    for forked in (False, True):
        job = partial(mpirun, timeout=20, env={"SAID": "yes"}, cwd=tmp_path, forked=forked)
        said.append(
            [
                job(None, script, "a", "b").check().stdout,
                job(None, "-m", "job", "a").check().stdout,
                job(None, "-c", "import sys; sys.exit(f'ended with {sys.argv}')", "a").stderr,
                job(None, "-c", "import os; os.kill(os.getpid(), 15)").returncode,
                job(None, "-c", "import os; os.kill(os.getpid(), 9)").returncode,
                job(2, "-c", "import sys; sys.exit(7)").returncode,
            ]
        )
    assert said[0] == said[1]
    assert said[0][3:] == [-15, -9, 7]


SAYS = """
import atexit, os, sys
import beside

print(sys.argv[1:], os.environ["SAID"], os.getcwd(), __name__, __file__, beside.name)
print(sorted(os.listdir("/proc/self/fd"))[:3], sys.path[0], os.sched_getaffinity(0))
atexit.register(print, "the end")
"""


def test_a_signal_for_a_forked_process_that_has_just_ended_is_dropped():
    ended = subprocess.Popen(["true"])
    ended.wait()
    stub.forward(ended.pid, 0, None)


def test_more_files_than_a_forked_process_gets_are_refused():
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(stub.MOST_FILES)]
    try:
        result = subprocess.run(
            [sys.executable, "-I", "-S", stub.__file__, "no socket"],
            pass_fds=files,
            capture_output=True,
            text=True,
        )
    finally:
        for number in files:
            os.close(number)
    told = rf"\d+ files are open, and a forked process gets at most {stub.MOST_FILES}\n"
    assert result.returncode == 1 and re.fullmatch(told, result.stderr)


def test_a_job_knows_its_processes_whatever_became_of_their_parents():
    command = ["bash", "-c", "(setsid sleep 60 &) ; exec sleep 60"]
    with Job(command) as job:
        while len(job.processes()) < 2:
            assert job.poll() is None
        pids = [process.pid for process in job.processes()]
        assert os.getpid() not in pids
    assert not any(map(runs, pids))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ["one process"]),
        ("pytestmark = pytest.mark.launch\n", ["one process"]),
        ("pytestmark = [pytest.mark.mpi, x]\n", ["4 ranks"]),
        (
            "pytestmark = pytest.mark.mpi\n@pytest.mark.ranks(1, 3)\n",
            ["4 ranks", "3 ranks", "1 rank"],
        ),
        ("@pytest.mark.mpi\n", ["one process", "4 ranks"]),
        (
            "pytestmark = pytest.mark.torch_device\n@pytest.mark.mpi\n",
            ["its test device", "their test device"],
        ),
        ("pytestmark = [pytest.mark.extra]\n", []),
    ],
)
def test_only_parts_that_have_tests_of_a_file_are_started(tmp_path, text, names):
    (tmp_path / "test_it.py").write_text(text)
    arguments = [f"{tmp_path}/test_it.py::test_it", "-x"]
    every = parts(False, False, False)
    assert [part.name for part in with_tests_of(arguments, every)] == names
    assert with_tests_of(["-k", "it"], every) == every


@pytest.mark.parametrize("offered", [True, False])
def test_a_brief_run_has_deaths_where_others_can_go_on(monkeypatch, offered):
    monkeypatch.setattr("run.has_ulfm", lambda: offered)
    names = ["4 ranks", "their test device"] + ["deaths"] * offered
    assert [part.name for part in parts(True, False, False)] == names
