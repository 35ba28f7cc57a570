"""Settings by argument and by variable, and what a long run leaves behind."""

import copy
import gc
import logging
import pickle
import re
import threading
import time
from itertools import pairwise

import numpy as np
import psutil
import pytest
from together import (
    NEVER,
    before_transports,
    same_everywhere,
    wait_until,
)

import collectives
from collectives import (
    GroupAllreduce,
    NeighborAverage,
    PairwiseAverage,
    PartialAllreduce,
    RankFailedError,
)

pytestmark = pytest.mark.mpi

VARIABLES = ("WAGMA_ENGINE", "WAGMA_STALL", "WAGMA_ABORT", "WAGMA_LOG_LEVEL")


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    logger = logging.getLogger("collectives")
    level = logger.level
    yield
    logger.setLevel(level)


def make(comm, **settings):
    return GroupAllreduce(comm, np.zeros(3), group_size=min(2, comm.size), **settings)


def engine_threads():
    return [thread for thread in threading.enumerate() if thread.name == "wagma-engine"]


# Settings


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize(
    ("variable", "argument", "mode"),
    [
        (None, None, "adaptive"),
        ("dedicated", None, "dedicated"),
        ("none", None, "none"),
        ("none", "adaptive", "adaptive"),
        ("adaptive", "none", "none"),
        ("nonsense", "dedicated", "dedicated"),
    ],
)
def test_the_engine_mode_is_the_arguments_else_the_variables(
    comm, monkeypatch, variable, argument, mode
):
    if variable:
        monkeypatch.setenv("WAGMA_ENGINE", variable)
    with make(comm, engine=argument) as average:
        assert average.engine == mode
        assert len(engine_threads()) == (mode != "none" and comm.size > 1)
        average(np.zeros(3))
    assert not engine_threads()


@pytest.mark.ranks(1, 4)
@pytest.mark.transports("messages")
@pytest.mark.parametrize(
    ("variable", "argument", "expected"),
    [
        (None, None, "shared"),
        ("messages", None, "messages"),
        ("shared", "messages", "messages"),
        ("messages", "shared", "shared"),
    ],
)
def test_the_transport_is_the_arguments_else_the_variables(
    comm, monkeypatch, variable, argument, expected
):
    monkeypatch.delenv("WAGMA_TRANSPORT")
    if variable:
        monkeypatch.setenv("WAGMA_TRANSPORT", variable)
    with make(comm, transport=argument) as average:
        assert average.transport == (expected if comm.size > 1 else "messages")
        average.synchronize(np.zeros(3))
        sent = average.statistics().bytes_sent
        assert (sent > 0) == (comm.size > 1 and expected == "messages")


@pytest.mark.ranks(3)
def test_a_dedicated_engine_spins_and_an_adaptive_one_sleeps(comm):
    """Of an idle collective the one takes all time that it can get, the other hardly any."""

    def processor_time():
        times = psutil.Process().threads()
        return sum(t.user_time + t.system_time for t in times if t.id == engine.native_id)

    for mode in ("dedicated", "adaptive"):
        with make(comm, engine=mode):
            (engine,) = engine_threads()
            comm.Barrier()
            if mode == "dedicated":
                wait_until(lambda: processor_time() >= 0.1)
            else:
                before = processor_time()
                time.sleep(0.3)
                assert processor_time() - before < 0.2
            comm.Ibarrier().Wait()


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("how", ["argument", "variable"])
def test_collectives_of_one_process_have_one_engine_mode(comm, monkeypatch, how):
    with make(comm, engine="none") as average:
        if how == "variable":
            monkeypatch.setenv("WAGMA_ENGINE", "adaptive")
        with pytest.raises(
            ValueError, match="engine is 'adaptive', but the open collectives .* use 'none'"
        ):
            make(comm, engine="adaptive" if how == "argument" else None)
        with make(comm, engine="none") as another:
            another(np.zeros(3))
        average(np.zeros(3))
    with make(comm, engine="adaptive") as average:
        average(np.zeros(3))


@before_transports
@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("how", ["argument", "variable"])
@pytest.mark.parametrize(
    ("name", "variable", "value", "what"),
    [
        ("engine", "WAGMA_ENGINE", "fast", "'fast', not one of adaptive, dedicated, none"),
        ("transport", "WAGMA_TRANSPORT", "pigeons", "'pigeons', not one of shared, messages"),
        ("stall", "WAGMA_STALL", "-1", "-1.0, not a number of seconds of at least 0"),
        ("stall", "WAGMA_STALL", "soon", "'soon', not a number of seconds of at least 0"),
        ("abort", "WAGMA_ABORT", "inf", "inf, not a number of seconds of at least 0"),
        ("abort", "WAGMA_ABORT", "nan", "nan, not a number of seconds of at least 0"),
        ("log_level", "WAGMA_LOG_LEVEL", "loud", "'loud', not one of debug, info"),
    ],
)
def test_a_wrong_setting_on_one_rank_raises_on_all(
    comm, monkeypatch, how, name, variable, value, what
):
    wrong = comm.rank == comm.size - 1
    if how == "variable" and wrong:
        monkeypatch.setenv(variable, value)
    arguments = {name: value} if how == "argument" and wrong else {}
    with pytest.raises(ValueError) as caught:
        make(comm, **arguments)
    assert f"{name} ({variable}) is {what}" in str(caught.value)
    assert comm.size == 1 or str(caught.value).startswith(f"rank {comm.size - 1}: ")
    assert same_everywhere(comm, str(caught.value))


@before_transports
@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (collectives.GroupAllreduce, "stalls"),
        (collectives.PartialAllreduce, "group_size"),
        (collectives.ReadyGroupAllreduce, "sync_period"),
        (collectives.TriggeredAverage, "trigger"),
        (collectives.NeighborAverage, "group_size"),
        (collectives.ParameterServer, "graph"),
    ],
)
def test_an_unknown_argument_on_one_rank_raises_on_all(comm, kind, name):
    arguments = {name: None} if comm.rank == comm.size - 1 else {}
    says = rf"{kind.__name__}\(\) got an unexpected keyword argument '{name}'"
    with pytest.raises(TypeError, match=says):
        kind(comm, np.zeros(3), **arguments)


@before_transports
@pytest.mark.ranks(4)
def test_engine_modes_that_differ_name_ranks_and_values(comm):
    with pytest.raises(
        ValueError, match="engine differs between ranks: adaptive on ranks 0, 2-3; none on rank 1"
    ):
        make(comm, engine="none" if comm.rank == 1 else None)


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize(
    ("variable", "argument", "level"),
    [
        (None, None, logging.CRITICAL),
        ("debug", None, logging.DEBUG),
        ("debug", "ERROR", logging.ERROR),
        (None, "info", logging.INFO),
    ],
)
def test_the_log_level_is_the_arguments_else_the_variables(
    comm, monkeypatch, variable, argument, level
):
    logging.getLogger("collectives").setLevel(logging.CRITICAL)
    if variable:
        monkeypatch.setenv("WAGMA_LOG_LEVEL", variable)
    with make(comm, log_level=argument):
        assert logging.getLogger("collectives").level == level


@pytest.mark.ranks(3)
@pytest.mark.transports("messages")  # no transport has a part in this wait
@pytest.mark.parametrize(
    ("variable", "argument", "said"),
    [("0.2", None, True), ("0.2", 0, False), ("60", 0.2, True), (None, None, False)],
)
def test_the_stall_limit_is_the_arguments_else_the_variables(
    comm, monkeypatch, caplog, variable, argument, said
):
    """Rank 0 comes to a synchronization half a second late, or once all others have said so."""
    others = range(1, comm.size)
    if variable:
        monkeypatch.setenv("WAGMA_STALL", variable)
    if comm.rank != 0:
        monkeypatch.setattr(caplog.handler, "emit", tell_rank_0(comm, caplog.handler.emit))
    mine = np.zeros(3)
    with make(comm, stall=argument, log_level="warning") as average:
        comm.Barrier()
        if comm.rank == 0 and said:
            wait_until(lambda: all(comm.iprobe(source=rank) for rank in others))
        elif comm.rank == 0:
            time.sleep(0.5)
        average.synchronize(mine)
    if comm.rank == 0 and said:
        for rank in others:
            comm.recv(source=rank)
    messages = [record.message for record in caplog.records if record.name == "collectives"]
    messages = [text for text in messages if " in synchronize() " in text]
    assert len(messages) == (said and comm.rank != 0)
    # Others that come late are named, too.
    wanted = r"\b0\b[^;:]*: still computing \(0 calls completed\)"
    assert all(re.search(wanted, text) for text in messages)


def tell_rank_0(comm, emit):
    """Return what a log handler does with a record, after which it tells rank 0."""

    def emit_and_tell(record):
        emit(record)
        comm.send(record.message, 0)

    return emit_and_tell


# What is left behind


def resources():
    """Return this process's resident memory in bytes, its open files, and its threads."""
    gc.collect()
    process = psutil.Process()
    return process.memory_info().rss, process.num_fds(), process.num_threads()


def assert_flat(run, grown, rounds=3):
    """What leaks grows in every round; MPI's pools of messages grow once, by 2 MiB.

    A thread that an earlier test began may end meanwhile.
    """
    seen = [resources()]
    for _ in range(rounds):
        run()
        seen.append(resources())
    growths = [after[0] - before[0] for before, after in pairwise(seen)]
    assert min(growths) < grown, f"grew by {growths} bytes"
    (_, files, threads), (_, files_after, threads_after) = seen[0], seen[-1]
    assert files_after <= files, f"{files_after - files} more files are open"
    assert threads_after <= threads, f"{threads_after - threads} more threads run"


@pytest.mark.ranks(4)
def test_thousands_of_versions_leave_memory_flat(comm):
    """100 bytes leaked in a version would be seen."""
    mine = [np.zeros(30, np.float32), np.zeros(50, np.float16)]
    with GroupAllreduce(comm, mine, group_size=2, sync_period=100) as average:

        def run(calls):
            for t in range(calls):
                if t % 3:
                    average(mine)
                else:
                    average.start(mine).wait()
            average.synchronize(mine)

        run(500)
        assert_flat(lambda: run(500), grown=50_000)
        assert average.statistics().versions == 1_980


@pytest.mark.ranks(4)
def test_collectives_that_were_closed_leave_nothing_behind(comm):
    """Neither memory nor threads nor communicators, of which MPI has a few thousand."""
    mine = np.zeros(60_000)

    def run(times):
        for _ in range(times):
            with GroupAllreduce(comm, mine, group_size=2, sync_period=NEVER) as average:
                average(mine)
            assert not any(communicator for communicator in average._communicators)

    run(10)
    # One vector of 0.48 MB each time would be 2.4 MB in a round.
    assert_flat(lambda: run(5), grown=1_250_000)


# What collectives say of themselves


@pytest.mark.ranks(4)
def test_a_collective_and_its_calls_say_in_a_line_what_they_are(comm):
    mine = np.zeros(3)
    made = [
        (GroupAllreduce, {}, "group_size=2, sync_period=10, "),
        (PartialAllreduce, {"trigger": "majority"}, "trigger='majority', sync_period=10, "),
        (NeighborAverage, {}, ""),
        (PairwiseAverage, {}, ""),
    ]
    for kind, settings, shown in made:
        with kind(comm, mine, **settings) as collective:
            collective(mine)
            said = f"{kind.__name__}(4 ranks, {shown}version=1, "
            assert repr(collective) == f"{said}open)"
            for copied in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match=f"a {kind.__name__} cannot be copied"):
                    copied(collective)
        assert repr(collective) == f"{said}closed)"
    with GroupAllreduce(comm, mine, wait="group") as average:
        call = average.start(mine)
        assert repr(call) == "<Call of version 0, not complete>"
        with pytest.raises(TypeError, match="a call in progress cannot be copied"):
            copy.copy(call)
        result = call.wait()
        assert repr(call) == f"<Call that is complete: {result}>"


@pytest.mark.ranks(3, 4)
def test_arrays_of_one_vector_that_share_memory_are_an_error_that_all_hear_of(comm):
    memory = np.zeros(10)
    apart = [memory[5:], memory[:5]]
    with GroupAllreduce(comm, apart, group_size=1) as average:
        average(apart)
        comm.Barrier()
        if comm.rank == 1:
            overlapping = [memory[3:8], memory[:5]]
            with pytest.raises(
                ValueError, match="array 0 of the vector and array 1 of the vector share"
            ):
                average(overlapping)
        else:
            with pytest.raises(
                RankFailedError, match="array 0 of the vector and array 1 of the vector share"
            ):
                while True:
                    average(apart)
