"""What ranks are told where something is wrong, and that they all come out of it."""

import contextlib
import inspect
import os
import re
import signal
import time
from importlib import metadata

import numpy as np
import pytest
from together import (
    NEVER,
    before_transports,
    interrupted,
    signalled,
    wait_until,
)

import collectives
from collectives import (
    ClosedError,
    CollectiveError,
    DisagreementError,
    GeneratedGroupAllreduce,
    GroupAllreduce,
    NeighborAverage,
    PairwiseAverage,
    ParameterServer,
    PartialAllreduce,
    PushSum,
    RankFailedError,
    ReadyGroupAllreduce,
    process,
)

pytestmark = pytest.mark.mpi

METHODS = ("__call__", "start", "publish", "average", "synchronize", "load", "join")


def use(average, name, vector):
    """Use a method that takes a vector."""
    arguments = [vector, 0] if name == "load" else [vector]
    return getattr(average, name)(*arguments)


def until_it_raises(function, *arguments):
    while True:
        function(*arguments)
        time.sleep(0.001)


# Making one


@before_transports
@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize(
    ("name", "settings", "values"),
    [
        ("engine", {"engine": "none"}, "adaptive on ranks.*; none on rank 1"),
        ("length", {"like": [np.zeros(3), np.zeros(3)]}, r"\[3\] on ranks.*; \[3, 3\] on rank 1"),
        ("length", {"like": np.zeros(3)}, r"\[3\] on ranks.*; 3 on rank 1"),
        (
            "dtype",
            {"like": [np.zeros(3, "f")]},
            r"\['float64'\] on ranks.*; \['float32'\] on rank 1",
        ),
    ],
)
def test_more_settings_that_differ_raise_on_all(comm, name, settings, values):
    arguments = {"like": [np.zeros(3)], "group_size": 1, "engine": "adaptive"}
    arguments.update(settings if comm.rank == 1 else {})
    like = arguments.pop("like")
    with pytest.raises(ValueError, match=f"{name} differs between ranks: {values}"):
        GroupAllreduce(comm, like, **arguments)


@before_transports
@pytest.mark.ranks(4)
def test_another_version_of_the_package_on_one_rank_raises_on_all(comm, monkeypatch):
    here = metadata.version("wagma")
    if comm.rank == 2:
        monkeypatch.setattr("collectives.settings.package_version", lambda: "0.0.7")
    values = f"version of wagma differs between ranks: {here} on ranks 0-1, 3; 0.0.7 on rank 2"
    with pytest.raises(ValueError, match=values):
        GroupAllreduce(comm, np.zeros(3), group_size=1)


@before_transports
@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("wrong_rank", [0, "all"])
def test_extensions_of_another_mpi_raise_on_all(comm, monkeypatch, wrong_rank):
    from mpi4py import MPI

    built = MPI.Get_library_version().splitlines()[0].strip("\0 ")
    if wrong_rank in (comm.rank, "all"):
        monkeypatch.setattr(MPI, "Get_library_version", lambda: "Some MPI v9\nof today\0")
    with pytest.raises(ImportError) as caught:
        GroupAllreduce(comm, np.zeros(3), group_size=1)
    message = str(caught.value)
    assert f"extensions were built for {built}, but mpi4py runs on Some MPI v9; build" in message
    assert "with the mpicc of mpi4py's MPI (MPICC=/path/to/mpicc)" in message
    assert message.startswith("wagma's" if wrong_rank == "all" or comm.size == 1 else "rank 0: ")


@before_transports
@pytest.mark.ranks(4)
def test_what_is_no_intracommunicator_is_refused(comm):
    from mpi4py import MPI

    mine = np.zeros(3)
    for comm_null in (MPI.COMM_NULL, comm.Split(MPI.UNDEFINED)):
        with pytest.raises(ValueError, match="comm is COMM_NULL: this process is not in"):
            GroupAllreduce(comm_null, mine, group_size=1)
        for kind in vars(collectives).values():
            if isinstance(kind, type) and issubclass(kind, collectives.collective.Collective):
                with pytest.raises(ValueError, match="comm is COMM_NULL: this process is not in"):
                    kind(comm_null, mine)
    half = comm.Split(comm.rank % 2)
    between = half.Create_intercomm(0, comm, 1 - comm.rank % 2)
    for wrong in (None, "world", 4, between):
        kind = type(wrong).__name__
        with pytest.raises(TypeError, match=f"comm is of type {kind}, not an mpi4py intracomm"):
            GroupAllreduce(wrong, mine, group_size=1)
    between.Free()
    half.Free()


@pytest.mark.ranks(1)
def test_a_limit_on_waiting_may_be_too_long_to_count(comm):
    with GroupAllreduce(comm, np.zeros(3), group_size=1, stall=1e300, abort=1e300) as average:
        average(np.zeros(3))


# Using it


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("name", METHODS)
def test_a_wrong_vector_in_any_method_ends_what_the_others_wait_in(comm, name):
    """The others call, wait in a synchronization, or have joined; one rank alone is only told."""
    mine = np.zeros(3)
    wrong = np.zeros(4)
    failing = comm.size - 1
    with GroupAllreduce(comm, mine, group_size=1, sync_period=NEVER) as average:
        if comm.rank == failing:
            with pytest.raises(ValueError, match="has 4 elements, the collective's have 3"):
                use(average, name, wrong)
            with pytest.raises(ClosedError, match="this rank failed .*: only close.. is allowed"):
                use(average, name, mine)
        else:
            told = f"rank {failing} failed, so only close.. is allowed here: ValueError: the vector"
            with pytest.raises(RankFailedError, match=told):
                if comm.rank == 0:
                    until_it_raises(average, mine)
                use(average, {1: "synchronize", 2: "join"}[comm.rank], mine)
            with pytest.raises(RankFailedError, match=told):
                use(average, name, mine)


@pytest.mark.ranks(4)
def test_one_rank_closes_while_another_fails(comm):
    """Those that close are not told; a handle is told as a call is."""
    mine = np.zeros(3)
    average = GroupAllreduce(comm, mine, group_size=4, sync_period=1, wait="group")
    handle = average.start(mine) if comm.rank == 0 else None
    comm.Barrier()
    if comm.rank == 0:
        for _ in range(2):
            with pytest.raises(RankFailedError, match="rank 1 failed.* weight is -1, not between"):
                handle.wait()
    elif comm.rank == 1:
        with pytest.raises(ValueError, match="weight is -1, not between 0 and 1e"):
            average(mine, weight=-1)
    average.close()


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize(
    ("weight", "shown"), [(1e308, "1e+308"), (10**400, "inf")], ids=["float", "int"]
)
@pytest.mark.parametrize("name", ["__call__", "start", "publish"])
def test_a_weight_whose_sum_overflows_is_refused(comm, name, weight, shown):
    mine = np.zeros(3)
    message = re.escape(f"weight is {shown}, not between 0 and 1e+100")
    with GroupAllreduce(comm, mine, group_size=1, sync_period=NEVER) as average:
        if comm.rank == 0:
            with pytest.raises(ValueError, match=f"^{message}$"):
                getattr(average, name)(mine, weight=weight)
        else:
            with pytest.raises(RankFailedError, match=f"rank 0 failed.* ValueError: {message}"):
                until_it_raises(average, mine)


@pytest.mark.ranks(3, 8)
def test_several_ranks_fail_at_once(comm):
    mine = np.zeros(3)
    with GroupAllreduce(comm, mine, group_size=2, sync_period=NEVER) as average:
        if comm.rank == 0:
            with pytest.raises(RankFailedError, match="rank [1-7] failed, .* TypeError: the vec"):
                until_it_raises(average, mine)
        else:
            with pytest.raises((TypeError, RankFailedError)):
                average("a vector")


class Mute(Exception):
    """An exception that cannot even say what it is."""

    def __str__(self):
        raise RuntimeError("no")


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("x" * 1000), "ValueError: x{200,240}"),
        (ValueError("ä" * 1000), "ValueError: ä{100,120}"),
        (ValueError("y" + "ä" * 1000), "ValueError: yä{100,120}"),
        (ValueError("𝄞" * 1000), "ValueError: 𝄞{50,60}"),
        (ValueError("file \udc80 is gone"), "ValueError: file . is gone"),
        (ValueError("two\nlines"), "ValueError: two\nlines"),
        (KeyError(), "KeyError"),
        (Mute(), "Mute"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_others_are_told_what_a_rank_failed_by(comm, error, text):
    """In 240 bytes: a longer text ends there, but never within a character."""
    mine = np.zeros(3)
    message = f"^rank 1 failed, so only close\\(\\) is allowed here: {text}$"
    with GroupAllreduce(comm, mine, group_size=1, sync_period=NEVER) as average:
        if comm.rank == 1:
            average.fail(error)
        else:
            with pytest.raises(RankFailedError, match=message):
                until_it_raises(average, mine)


@pytest.mark.ranks(1, 3)
def test_a_block_that_is_left_by_no_failure_tells_nobody(comm):
    mine = np.zeros(3)
    for harmless in (SystemExit(0), SystemExit(), GeneratorExit()):
        average = GroupAllreduce(comm, mine, group_size=1, sync_period=NEVER)
        with pytest.raises(type(harmless)), average:
            average(mine)
            if comm.rank > 0:
                time.sleep(0.05)
                average(mine)
            raise harmless


@pytest.mark.ranks(1, 4)
def test_a_closed_collective_says_so_in_every_method(comm):
    mine = np.zeros(3)
    with GroupAllreduce(comm, mine, group_size=1, sync_period=NEVER) as average:
        average(mine)
        handle = average.start(mine)
    for name in METHODS:
        with pytest.raises(ClosedError, match="^this collective is closed$"):
            use(average, name, mine)
    assert handle.test() and handle.wait().version == 1
    assert (average.closed, average.version, average.executed) == (True, 2, 2)
    assert average.statistics().calls == 2
    average.fail(ValueError())
    average.close()


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("name", ["join", "load", "start"])
def test_an_interrupted_operation_can_be_closed(comm, name):
    """Rank 0 waits in it alone and is interrupted; the others carry it on, and are told of close.

    Nobody is told of it who does not wait for rank 0.
    """
    mine = np.zeros(3)
    average = GroupAllreduce(comm, mine, group_size=1, sync_period=1)
    if comm.rank == 0:
        with interrupted():
            operation = use(average, name, mine)
            operation.wait()  # only start() comes so far
        request = comm.Ibarrier()
    else:
        comm.Ibarrier().Wait()
        use(average, "__call__" if name == "start" else name, mine)
        with pytest.raises(ClosedError, match=r"rank 0 entered close\(\) after (0 calls|1 call)"):
            average(mine)
    average.close()
    if comm.rank == 0:
        request.Wait()
    assert average.closed


@pytest.mark.ranks(3, 4)
def test_catching_up_with_an_interrupted_call_hears_of_a_failure(comm):
    """Of rank 1, which closes only once the others have been told."""
    mine = np.zeros(3)
    with GroupAllreduce(
        comm, mine, group_size=comm.size, sync_period=NEVER, wait="group"
    ) as average:
        if comm.rank != 1:
            with interrupted():
                average(mine)
        comm.Barrier()
        request = None
        if comm.rank == 1:
            average.fail(KeyError("the dataset is gone"))
            request = comm.Ibarrier()
            wait_until(request.Test)
        else:
            with pytest.raises(RankFailedError, match="rank 1 failed.*the dataset is gone"):
                average(mine)
            comm.Ibarrier().Wait()


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("during", ["__call__", "join", "catching up", "close"])
def test_a_signal_handler_cannot_use_a_collective_that_is_in_a_call(comm, during):
    """Rank 0 waits; what its handler tries is refused, and the call that waits is carried on."""
    mine = np.full(3, float(comm.rank))
    average = GroupAllreduce(
        comm, mine, group_size=comm.size, sync_period=NEVER, wait="group", late="paper"
    )
    waits = {
        "join": lambda: average.join(mine),
        "close": average.close,
    }.get(during, lambda: average(mine))
    uses = [lambda name=name: use(average, name, np.ones(3)) for name in METHODS]
    if during == "close":
        uses = []  # they say that it is closed
    requests = []

    def handle():
        for attempt in [*uses, average.close]:
            with pytest.raises(RuntimeError, match="is in a call already: a signal handler or"):
                attempt()
        requests.append(comm.Ibarrier())

    if comm.rank == 0:
        if during == "catching up":
            with interrupted():
                average(mine)
        with signalled(handle, 0.05, waits=True):
            waits()
        (request,) = requests
        request.Wait()
    else:
        comm.Ibarrier().Wait()
        if during == "catching up":
            average(mine)
            mine[:] = comm.rank
        waits()
    if during != "close":
        np.testing.assert_allclose(mine, (comm.size - 1) / 2)
    average.close()


@pytest.mark.ranks(4)
def test_a_signal_handler_that_is_refused_interrupts_the_call(comm):
    mine = np.zeros(3)
    average = GroupAllreduce(comm, mine, group_size=4, sync_period=NEVER, wait="group")
    if comm.rank == 0:
        with (
            pytest.raises(RuntimeError, match="is in a call already"),
            signalled(lambda: average.average(np.ones(3)), 0.05, waits=True),
        ):
            average(mine)
        request = comm.Ibarrier()
    else:
        request = comm.Ibarrier()
        request.Wait()
        assert average(mine).weight == 4
    average.close()
    request.Wait()
    assert average.executed == 1


# Processes


def in_a_fork(function):
    """Return what a function says in a forked child of this process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, function().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.ranks(1, 4)
def test_a_forked_child_can_neither_use_nor_disturb_a_collective(comm):
    mine = np.zeros(3)
    with GroupAllreduce(comm, mine, group_size=comm.size, sync_period=NEVER) as average:
        handle = average.start(mine)
        uses = {name: lambda name=name: use(average, name, mine) for name in METHODS}
        uses |= {"wait": handle.wait, "test": handle.test}
        uses["make"] = lambda: GroupAllreduce(comm, mine, group_size=1)

        def try_all():
            said = []
            for name, attempt in uses.items():
                try:
                    said.append(f"{name}: {attempt()}")
                except RuntimeError as error:
                    said.append(f"{name}: {error}")
            average.fail(ValueError())
            average.close()
            return "\n".join(said)

        said = in_a_fork(try_all).splitlines()
        owner = f"this collective belongs to process {os.getpid()}: a forked child cannot use it"
        assert said[:-1] == [f"{name}: {owner}" for name in uses if name != "make"]
        assert "was forked after MPI was initialized, and cannot use it" in said[-1]
        handle.wait()
        average(mine)
        assert not average.closed


KINDS = (
    GroupAllreduce,
    PartialAllreduce,
    NeighborAverage,
    PushSum,
    PairwiseAverage,
    ParameterServer,
    GeneratedGroupAllreduce,
    ReadyGroupAllreduce,
)


def use_all_of(collective, vector):
    """Use each public method and attribute; return those that neither answered nor raised."""
    for name in [name for name in dir(collective) if not name.startswith("_")]:
        with contextlib.suppress(CollectiveError, RuntimeError):
            attribute = getattr(collective, name)
            if callable(attribute):
                used = attribute(*[vector, 1][: len(inspect.signature(attribute).parameters)])
                if hasattr(used, "__enter__"):
                    with used:
                        pass
    return ""


@pytest.mark.ranks(4)
@pytest.mark.transports("messages")
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_collective_hangs_in_a_forked_child(comm, kind):
    """Also where the progress thread has a lock in the instant of the fork, which no child has."""
    mine = np.zeros(100_000)
    with kind(comm, mine) as collective:
        for _ in range(8):
            handle = collective.start(mine) if hasattr(collective, "start") else None
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(10)
                try:
                    use_all_of(collective, mine)
                finally:
                    os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            if handle:
                handle.wait()
            else:
                collective(mine)
        statistics = collective.statistics()
    assert statistics.calls == 8


# A call while another one is made


class Sneaky(list):
    """A list of arrays that calls something when it is read."""

    def __init__(self, arrays, call):
        super().__init__(arrays)
        self.call, self.refused = call, 0

    def __iter__(self):
        with contextlib.suppress(TypeError), pytest.raises(RuntimeError, match="in a call already"):
            self.call()
        self.refused += 1
        return super().__iter__()


@pytest.mark.ranks(1, 4)
def test_no_call_is_made_while_a_weight_is_read(comm):
    """It would end before the outer call has begun, and be lost."""
    mine, other = np.zeros(4), np.full(4, 100.0)
    refused = []

    class Weight:
        def __float__(self):
            for use in (average, average.start, average.publish, average.synchronize):
                with pytest.raises(RuntimeError, match="in a call already"):
                    use(other)
                refused.append(use)
            return 1.0

    with GroupAllreduce(comm, mine, group_size=comm.size, wait="group") as average:
        mine += comm.rank
        result = average(mine, weight=Weight())
        assert (result.version, average.version) == (0, 1)
        np.testing.assert_allclose(mine, (comm.size - 1) / 2)
        assert len(refused) == 4
        average(mine, weight=Weight())
        assert average.version == 2
    np.testing.assert_array_equal(other, 100)


@pytest.mark.ranks(1, 4)
@pytest.mark.transports("messages")
@pytest.mark.parametrize("kind", KINDS[1:-2])  # those with groups read it without Python
def test_no_call_is_made_while_a_vector_is_read(comm, kind):
    """Calls use what they keep, such as bf16 in single precision, one at a time."""
    arrays = [np.zeros(4, np.float16), np.zeros(3)]
    with kind(comm, arrays) as collective:
        sneaky = Sneaky(arrays, lambda: collective([array.copy() for array in arrays]))
        collective(sneaky)
        assert sneaky.refused
        assert collective.version == 1


def test_a_closed_collective_is_no_disagreement():
    """So that who retries after a disagreement does not go on with what is closed."""
    assert not issubclass(ClosedError, DisagreementError)
    assert issubclass(ClosedError, CollectiveError) and issubclass(
        DisagreementError, CollectiveError
    )


class Alarmed(Exception):
    """What the handler of a signal raises in these tests."""


@pytest.fixture
def alarm():
    """A function that raises a signal, whose handler raises `Alarmed`."""

    def handle(*_):
        raise Alarmed

    before = signal.signal(signal.SIGALRM, handle)
    yield lambda: signal.raise_signal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, before)


class ClosedByASignal:
    """A rank's part of a collective, whose `close` is followed by a signal at once."""

    def __init__(self, collective, alarm):
        self.collective, self.native, self.alarm = collective, collective.native, alarm

    def __getattr__(self, name):
        return getattr(self.native, name)

    def close(self):
        self.native.close()
        self.collective.native = self.native
        self.alarm()


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("where", ["after", "in"])
def test_a_signal_at_the_end_of_close_leaves_nothing_registered(comm, alarm, monkeypatch, where):
    average = GroupAllreduce(comm, np.zeros(3), group_size=1, engine="adaptive")
    if where == "after":
        average.native = ClosedByASignal(average, alarm)
    else:
        remove = process.remove
        monkeypatch.setattr(process, "remove", lambda collective: [alarm(), remove(collective)][1])
    with pytest.raises(Alarmed):
        average.close()
    assert average.closed and average not in process.opened()
    monkeypatch.undo()
    with GroupAllreduce(comm, np.zeros(3), group_size=1, engine="none"):
        pass
