"""What the ranks of a command do together, and how one's mistake becomes everybody's."""

import pytest

from collectives import RankFailedError
from wagma import job

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 4), pytest.mark.transports()]


def test_each_rank_gets_its_own_result(comm):
    assert job.together(lambda: 10 * comm.rank, comm) == 10 * comm.rank


def test_a_usage_error_on_one_rank_is_raised_on_every_rank(comm):
    last = comm.size - 1

    def function():
        if comm.rank == last:
            raise job.UsageError("no such file")

    message = "^no such file$" if comm.size == 1 else f"^rank {last}: no such file$"
    with pytest.raises(job.UsageError, match=message):
        job.together(function, comm)


def test_the_same_usage_error_everywhere_is_said_once(comm):
    def function():
        raise job.UsageError("no such file")

    with pytest.raises(job.UsageError, match="^no such file$"):
        job.together(function, comm)


def test_after_a_failure_on_some_ranks_every_rank_raises(comm):
    first = min(1, comm.size - 1)

    def function():
        if comm.rank >= first:
            raise KeyError(comm.rank)

    expected = KeyError if comm.rank >= first else RankFailedError
    with pytest.raises(expected, match=str(max(comm.rank, first))):
        job.together(function, comm)


def test_a_script_that_exits_is_an_error_like_others(comm):
    with pytest.raises(SystemExit):
        job.together(lambda: exit(0), comm)


# --- how a command ends


def caused(error, cause):
    """Return an error with its cause."""
    error.__cause__ = cause
    return error


@pytest.fixture
def end(comm, monkeypatch, capfd):
    """Return a function that ends the command, and returns the status and what was written.

    The status is "waits" on a rank that leaves it to another one to end the job.
    """

    def run(error):
        def exit_with(_, status):
            raise SystemExit(status)

        def wait(seconds):
            if seconds >= job.ENDING:
                raise SystemExit("waits")

        monkeypatch.setattr("collectives.process.end_job", exit_with)
        monkeypatch.setattr(job.time, "sleep", wait)
        monkeypatch.setitem(job.PATIENCE, job.OWN, 20.0)
        try:
            status = job.end(comm, error)
        except SystemExit as ended:
            status = ended.code
        return status, capfd.readouterr().err

    return run


@pytest.mark.parametrize("cause", [False, True])
def test_the_rank_that_failed_writes_its_traceback_and_others_a_line(comm, end, cause):
    last = comm.size - 1
    told = RankFailedError(f"rank {last} failed: ValueError: no")
    if comm.rank != last:
        status, written = end(caused(RuntimeError(str(told)), told) if cause else told)
        assert (status, written) == ("waits", f"wagma: rank {comm.rank} of {comm.size}: {told}\n")
        return
    try:
        raise ValueError("no")
    except ValueError as error:
        status, written = end(error)
    assert status == job.FAILED
    assert written.startswith(f"wagma: rank {last} of {comm.size} failed:\nTraceback")
    assert written.endswith("ValueError: no\n") and written.count("ValueError: no") == 1


def test_the_same_failure_of_all_ranks_is_written_once(comm, end):
    status, written = end(ValueError("no"))
    if comm.rank == 0:
        assert status == job.FAILED and "rank 0 of" in written
    else:
        assert (status, written) == ("waits", "")


def test_a_rank_that_ends_alone_speaks_for_itself(comm, end, monkeypatch):
    monkeypatch.setattr(job, "may_meet", lambda: False)
    status, written = end(KeyError(comm.rank))
    assert status == job.FAILED
    assert written.endswith(f"KeyError: {comm.rank}\n")
    expected = f"wagma: error: rank {comm.rank}: no image\n"
    assert end(job.UsageError("no image")) == (job.USAGE, expected)


def test_a_usage_error_of_one_rank_that_others_were_told_of_is_one_line(comm, end):
    last = comm.size - 1
    mine = job.UsageError("no image") if comm.rank == last else RankFailedError("rank x failed")
    who = f"rank {last}: " if comm.size > 1 else ""
    expected = f"wagma: error: {who}no image\n" if comm.rank == 0 else ""
    assert end(mine) == (job.USAGE, expected)


def test_a_usage_error_of_all_ranks_is_one_line(comm, end):
    expected = "wagma: error: no such file\n" if comm.rank == 0 else ""
    assert end(job.UsageError("no such file")) == (job.USAGE, expected)
