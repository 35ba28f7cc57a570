"""What the ranks of a command do together, and how one's mistake becomes everybody's."""

import pytest

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


def test_only_the_first_rank_that_failed_ends_the_job_at_once(comm, monkeypatch):
    slept = []
    monkeypatch.setattr(job.time, "sleep", slept.append)
    first = min(1, comm.size - 1)

    def function():
        if comm.rank >= first:
            raise KeyError(comm.rank)

    expected = KeyError if comm.rank >= first else RuntimeError
    with pytest.raises(expected, match=str(max(comm.rank, first))):
        job.together(function, comm)
    assert (job.ENDING in slept) == (comm.rank != first)


def test_a_script_that_exits_is_an_error_like_others(comm, monkeypatch):
    monkeypatch.setattr(job, "ENDING", 0)
    with pytest.raises(SystemExit):
        job.together(lambda: exit(0), comm)
