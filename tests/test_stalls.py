"""What a rank says that has waited for long, and when it says nothing."""

import logging
import re
import signal
import time

import numpy as np
import pytest
from launch import Signal
from together import NEVER, interrupted

from collectives import (
    GeneratedGroupAllreduce,
    GroupAllreduce,
    PairwiseAverage,
    RankFailedError,
)

SHORT = 0.3  # seconds without progress that are a stall here

# Where ranks wait until all have agreed on an operation, which no transport has a part in.
before_exchanges = pytest.mark.transports("messages")


def about(where, why=""):
    """Return what a report of rank 2 in this operation matches.

    On a busy machine other ranks may be as late, and are named beside it.
    """
    return rf" in {where}.* for .*(\b2\b|1-3)[^;:]*: {why}"


class Reports(logging.Handler):
    """What this rank has logged; each report is told to the rank that is missing.

    Those that do not match `about` do not count: ranks that were held up for other reasons.
    """

    def __init__(self, comm, missing):
        super().__init__()
        self.comm, self.missing = comm, missing
        self.about = about(r"(?!close|the constructor)")
        self.texts, self.levels = [], []
        self.told = []  # the levels of the others' reports, on the rank that is missing

    def emit(self, record):
        if not re.search(self.about, record.getMessage()):
            return
        self.texts.append(record.getMessage())
        self.levels.append(record.levelno)
        self.comm.isend(record.levelno, self.missing).wait()

    def hear(self):
        while self.comm.Iprobe():
            self.told.append(self.comm.recv())

    def wait_for(self, count):
        """Stay away until so many reports have been made, and time for more has passed."""
        for _ in range(count):
            while not self.comm.Iprobe():
                time.sleep(0.01)
            assert self.comm.recv() == logging.WARNING
        time.sleep(2 * SHORT)
        assert not self.comm.Iprobe()


@pytest.fixture
def reports(comm):
    handler = Reports(comm.Dup(), missing=2)
    logger = logging.getLogger("collectives")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    handler.comm.Free()


@pytest.mark.mpi
@before_exchanges
@pytest.mark.parametrize(
    ("given", "operations"),
    [("variable", 2 * ["a periodic synchronization"]), ("argument", ["average()", "load()"])],
)
def test_each_waiting_rank_says_once_who_is_missing(comm, reports, monkeypatch, given, operations):
    """And goes on when that rank does come; the next stall is reported as well."""
    monkeypatch.setenv("WAGMA_STALL", str(SHORT) if given == "variable" else "1000")
    stall = SHORT if given == "argument" else None
    mine = np.zeros(3)
    expected = []
    with GroupAllreduce(comm, mine, group_size=2, sync_period=2, stall=stall) as average:
        for calls, operation in zip((1, 3), operations):
            made = "1 call" if calls == 1 else f"{calls} calls"
            why = re.escape(f"still computing ({made} completed)")
            reports.about = about(re.escape(f"{operation} after {made}"), why)
            expected.append(reports.about)
            average(mine)
            if comm.rank == 2:
                reports.wait_for(3)
            if operation == "average()":
                average.average(mine)
            elif operation == "load()":
                average.load(mine, calls)
            assert average(mine).synchronized
    assert len(reports.texts) == (0 if comm.rank == 2 else 2)
    for text, wanted in zip(reports.texts, expected):
        assert text.startswith(f"rank {comm.rank} has waited ")
        assert re.search(wanted, text)


@pytest.mark.mpi
def test_a_rank_that_waits_for_its_group_names_the_member(comm, reports):
    mine = np.zeros(3)
    with GroupAllreduce(
        comm, mine, group_size=4, sync_period=NEVER, wait="group", stall=SHORT
    ) as average:
        if comm.rank == 2:
            reports.wait_for(3)
            average(mine)
        elif comm.rank == 3:
            average.start(mine).wait()
        else:
            average(mine)
    if comm.rank != 2:
        (text,) = reports.texts
        assert re.search(about("version 0", r"still computing \(0 calls completed\)"), text)


@pytest.mark.mpi
@pytest.mark.transports("shared")
def test_a_rank_that_waits_for_one_that_waits_says_in_which_version(comm, reports):
    """In version 0 rank 3's partner is missing; in version 1 rank 3 is, for its partner."""
    from collectives.topology import group_of

    missing = 2
    first = next(r for r in range(4) if r != 2 and 2 in group_of(r, 4, 2, 0))
    second = next(r for r in group_of(first, 4, 2, 1) if r != first)
    assert second != missing
    reports.about = about("version 0") + rf"| in version 1 for .*(\b2\b|\b{first}\b)"
    mine = np.zeros(3)
    with GroupAllreduce(
        comm, mine, group_size=2, sync_period=NEVER, wait="group", stall=SHORT
    ) as average:
        if comm.rank == missing:
            reports.wait_for(3)
        for _ in range(2):
            average(mine)
    if comm.rank == second:
        wanted = rf" in version 1 for .*\b{first}: still (in version 0|computing)"
        assert re.search(wanted, reports.texts[0])
    if comm.rank == first:
        assert re.search(about("version 0", "still computing"), reports.texts[0])


@pytest.mark.mpi
@pytest.mark.ranks(8)
@pytest.mark.transports("shared")
def test_a_rank_that_waits_for_its_slot_names_who_has_yet_to_read_it(comm):
    """Rank 1 is interrupted before rank 0 comes; in version 2 it is in another group."""
    from collectives.topology import group_of

    assert [group_of(0, 8, 2, version) for version in range(3)] == [(0, 1), (0, 2), (0, 4)]
    mine, own = np.zeros(3), comm.Dup()
    reports = Reports(own, missing=1)
    reports.about = "^rank 0 has waited .* in version 2 "
    logger = logging.getLogger("collectives")
    logger.addHandler(reports)
    try:
        with GroupAllreduce(
            comm, mine, group_size=2, sync_period=NEVER, wait="group", engine="none", stall=SHORT
        ) as average:
            if comm.rank == 1:
                with interrupted():
                    average(mine)
            comm.Barrier()
            if comm.rank == 1:
                own.recv(source=0)
            while average.version < 3:
                average(mine)
    finally:
        logger.removeHandler(reports)
        own.Free()
    if comm.rank == 0:
        assert re.search(r" for .*\b1\b.*: does not answer", reports.texts[0])


@pytest.mark.mpi
@pytest.mark.transports("messages")
def test_a_rank_without_a_progress_thread_does_not_answer(comm, reports):
    mine = np.zeros(3)
    with GroupAllreduce(
        comm, mine, group_size=4, sync_period=NEVER, engine="none", stall=SHORT
    ) as average:
        if comm.rank == 2:
            reports.wait_for(3)
        average(mine)
    if comm.rank != 2:
        (text,) = reports.texts
        assert re.search(about("version 0", r"does not answer \(stopped, or computing "), text)


@pytest.mark.mpi
@pytest.mark.ranks(3)
@pytest.mark.transports("messages")
@pytest.mark.usefixtures("usual_patience")
def test_reminders_of_those_that_wait_delay_no_report(comm, reports):
    """Two members of a group wait for the third, and remind each other every second."""
    mine = np.zeros(3)
    with GeneratedGroupAllreduce(comm, mine, group_size=3, engine="none", stall=1.5) as average:
        average(mine)
        if comm.rank == 2:
            reports.wait_for(2)
        average(mine)
    if comm.rank != 2:
        (text,) = reports.texts
        assert re.search(about("call 1, in group 1,"), text)


@pytest.mark.mpi
@before_exchanges
def test_catching_up_with_an_interrupted_call_says_once_who_is_missing(comm, reports):
    mine = np.zeros(3)
    with GroupAllreduce(
        comm, mine, group_size=4, sync_period=NEVER, wait="group", stall=SHORT
    ) as average:
        if comm.rank == 2:
            reports.wait_for(3)
        else:
            with interrupted(SHORT / 2):
                average(mine)
        average(mine)
    if comm.rank != 2:
        (text,) = reports.texts
        assert re.search(about("version 0", r"still computing \(0 calls completed\)"), text)


@pytest.mark.mpi
@before_exchanges
@pytest.mark.parametrize("end", ["close", "join"])
def test_who_still_computes_at_the_end_is_information_and_a_warning_if_nothing_moves(
    comm, reports, caplog, end
):
    caplog.set_level(logging.INFO, "collectives")
    where = r"close\(\)" if end == "close" else r"join\(\) after 1 call"
    reports.about = about(where, r"still computing \(")
    mine = np.zeros(3)
    with GroupAllreduce(comm, mine, group_size=1, sync_period=NEVER, stall=SHORT) as average:
        average(mine)
        if comm.rank == 2:
            while reports.told.count(logging.INFO) < 3:
                average(mine)  # in a group of one, of which no other rank hears
                time.sleep(SHORT / 4)
                reports.hear()
            while reports.told.count(logging.WARNING) < 3:
                time.sleep(SHORT / 4)
                reports.hear()
        if end == "join":
            average.join(mine)
    if comm.rank != 2:
        assert reports.levels == [logging.INFO, logging.WARNING]


@pytest.mark.mpi
@before_exchanges
def test_at_their_own_pace_each_rank_s_calls_are_counted(comm, reports, caplog):
    caplog.set_level(logging.INFO, "collectives")
    mine = np.zeros(3)
    with GroupAllreduce(comm, mine, group_size=2, pace="own", stall=SHORT) as average:
        for _ in range(2 if comm.rank == 2 else 5):
            average(mine)
        comm.Barrier()
        if comm.rank == 2:
            while reports.told.count(logging.INFO) < 3:
                time.sleep(SHORT / 4)
                reports.hear()
        average.join(mine)
    if comm.rank != 2:
        why = r"still computing \(2 calls completed\)"
        assert re.search(about(r"join\(\) after 5 calls", why), reports.texts[0])


@pytest.mark.mpi
@before_exchanges
def test_nothing_is_a_stall_where_that_is_0(comm, reports, caplog):
    caplog.set_level(logging.INFO, "collectives")
    reports.about = ""
    mine = np.zeros(3)
    for end in ("close", "synchronize"):
        with GroupAllreduce(comm, mine, group_size=2, sync_period=NEVER, stall=0) as average:
            average(mine)
            if comm.rank == 2:
                time.sleep(2 * SHORT)
            if end == "synchronize":
                average.synchronize(mine)
    assert reports.texts == []


@pytest.mark.mpi
@pytest.mark.transports("messages")
@pytest.mark.parametrize("kind", [GroupAllreduce, PairwiseAverage])
def test_the_constructor_says_who_has_not_come(comm, reports, kind):
    reports.about = rf"in the constructor of {kind.__name__} for ranks? .*(\b2\b|1-3)"
    if comm.rank == 2:
        reports.wait_for(2)
    with kind(comm, np.zeros(3), stall=5 * SHORT):
        pass
    assert len(reports.texts) == (comm.rank < 2)
    assert not comm.Iprobe()  # what ranks have told each other there has been received


@pytest.mark.mpi
@pytest.mark.transports("messages")
def test_a_rank_that_was_interrupted_in_a_constructor_goes_on_when_it_comes_again(comm):
    """Another one is waited for; and a failure that was caught keeps nobody from coming."""
    mine = np.zeros(3)
    failed = GroupAllreduce(comm, mine)
    if comm.rank == 0:
        failed.fail(KeyError("caught"))
        with interrupted():
            GroupAllreduce(comm, mine)
        comm.send("interrupted", dest=2)
    if comm.rank == 2:
        comm.recv(source=0)
        time.sleep(1.5)
    with GroupAllreduce(comm, mine) as average:
        average(mine)
    failed.close()


@pytest.mark.mpi
@pytest.mark.transports("messages")
def test_a_receive_of_the_applications_takes_no_constructors_time_away(comm):
    """One of anything from anybody may get what ranks tell each other that wait for long."""
    request = comm.Irecv(bytearray(1)) if comm.rank == 0 else None
    if comm.rank == 2:
        time.sleep(3 * SHORT)
    with GroupAllreduce(comm, np.zeros(3), stall=2 * SHORT) as average:
        average(np.zeros(3))
    if comm.rank == 0:
        if not request.Test():
            request.Cancel()
        request.Wait()
    comm.Barrier()


@pytest.mark.mpi
@pytest.mark.transports("messages")
def test_the_constructor_ends_where_a_rank_has_failed_before_it(comm):
    raises = pytest.raises((KeyError, RankFailedError), match="the dataset is gone")
    with raises, GroupAllreduce(comm, np.zeros(3)) as first:
        first(np.zeros(3))
        if comm.rank == 2:
            raise KeyError("the dataset is gone")
        GroupAllreduce(comm, np.zeros(3))


# Jobs

HEAD = """
import signal, sys, time
import numpy as np
from mpi4py import MPI
from collectives import GroupAllreduce
comm = MPI.COMM_WORLD
x = np.zeros(1000)
comm.Barrier()
"""


@pytest.fixture
def job(mpirun_text):
    def run(body, ranks=3, **options):
        return mpirun_text(ranks, HEAD, body, **options)

    return run


@pytest.mark.launch
@pytest.mark.parametrize("group_size", [1, 3])
def test_a_stopped_process_is_named_and_the_job_goes_on_when_it_does(job, group_size):
    """In a synchronization, and as a member of a group; where no logging was set up."""
    result = job(
        f"""
        with GroupAllreduce(comm, x, group_size={group_size}, sync_period=50) as average:
            if comm.rank == 2:
                continued = []
                signal.signal(signal.SIGCONT, lambda *_: continued.append(True))
                print("computing", flush=True)
                while not continued:
                    time.sleep(0.01)
            for _ in range(100):
                average(x)
        print("ended", flush=True)
        """,
        env={"WAGMA_STALL": "2"},
        signals=[
            Signal(signal.SIGSTOP, "computing", 2),
            Signal(signal.SIGCONT, "does not answer", 2),
        ],
    ).check()
    assert result.stdout.count("ended") == 3
    named = re.compile(r"(rank \d) has waited .* for .*\b2: does not answer \(stopped, or")
    found = [match[1] for match in map(named.search, result.stderr.splitlines()) if match]
    assert 1 <= len(found) == len(set(found))


@pytest.mark.launch
@pytest.mark.parametrize("where", ["a periodic synchronization after 2 calls", "close()"])
def test_the_abort_limit_ends_the_job(job, where):
    """Rank 2 never comes, and is named; the others wait, or left their block by an exception."""
    result = job(
        f"""
        with GroupAllreduce(comm, x, group_size=1, sync_period=3) as average:
            if comm.rank == 2:
                time.sleep(1000)
            if {where.startswith("close")}:
                raise KeyError("the dataset is gone")
            for _ in range(3):
                average(x)
        """,
        env={"WAGMA_ABORT": "3"},
    )
    assert result.returncode != 0
    waited = rf"has waited \d s in {re.escape(where)} for .*\b2: still computing \(0 calls"
    assert re.search(waited, result.stderr)
    assert "this is the limit set by abort (WAGMA_ABORT): ending the job" in result.stderr
    assert ("the dataset is gone" in result.stderr) == where.startswith("close")
    assert result.seconds < 60
    assert result.left == ()
