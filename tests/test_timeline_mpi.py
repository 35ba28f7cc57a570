"""The timelines of several ranks: recorded around a collective or an averager, and merged."""

import time
from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import traces

from collectives import (
    GroupAllreduce,
    NeighborAverage,
    PairwiseAverage,
    ParameterServer,
    PartialAllreduce,
    PushSum,
    QueuedNeighborAverage,
    RankFailedError,
    ReadyGroupAllreduce,
    timeline,
)
from collectives.engine import clocks
from collectives.timeline import is_recording, span
from wagma import WAGMA
from wagma.timeline import merge, trace

pytestmark = pytest.mark.mpi
TURNS = 3  # calls of a rank between two synchronizations


@pytest.fixture
def directory(comm, tmp_path):
    """The same directory on all ranks."""
    yield comm.bcast(tmp_path)
    comm.Barrier()


def put_together(comm, directory):
    """Return the timeline, checked as a trace, on rank 0; None on others."""
    comm.Barrier()
    if comm.rank:
        return None
    made = merge.load(directory)
    trace.write(made, directory / "timeline.json.gz")
    traces.check(traces.read(directory / "timeline.json.gz"))
    assert made.ranks.keys() == set(range(comm.size))
    for rank in made.ranks.values():
        assert rank.ring.dropped == rank.ring.torn == 0
        assert rank.clock.aligned
    return made


def names(rank, kind):
    return [each.name for each in rank.slices if each.kind == kind]


def test_late_and_timely_calls_are_recorded_with_who_started_them(comm, directory, transport):
    x = np.full(1000, float(comm.rank))
    late = comm.size - 1
    with GroupAllreduce(comm, x, group_size=2, sync_period=TURNS + 1) as average:
        with average.timeline(directory):
            assert is_recording()
            if comm.rank == late:  # its engine takes part meanwhile
                assert comm.recv(source=0) == "done"
            for _ in range(TURNS):
                with span("compute"):
                    x += 1
                average(x)
            if comm.rank == 0:
                comm.send("done", late)
            average(x)
        assert not is_recording()
    found = put_together(comm, directory)
    if found is None:
        return
    for number, rank in found.ranks.items():
        assert {f"call {turn}" for turn in range(TURNS + 1)} <= set(names(rank, "call"))
        assert names(rank, "span") == ["compute"] * TURNS
        assert len(names(rank, "version")) == TURNS
        assert "a periodic synchronization" in names(rank, "operation")
        assert number == 0 or (len(rank.clock.times) == 2 and rank.clock.error > 0)
    versions = [each for each in found.ranks[late].slices if each.kind == "version"]
    assert any(each.about["staleness"] > 0 for each in versions)
    for version in range(TURNS):
        started = [
            number
            for number, rank in found.ranks.items()
            for each in rank.slices
            if each.name.startswith(f"version {version}") and "started by" in each.about
        ]
        assert started
    # In shared memory others may have executed all of them before this rank heard of any.
    assert late in {each.to_rank for each in found.arrows} or transport == "shared"
    counters = {each.name for rank in found.ranks.values() for each in rank.counts}
    # They end with the collective's number in its process.
    assert {"staleness", "versions ahead"} <= {name.rstrip("0123456789 ") for name in counters}


MODELS = {  # the messages with vectors of each method
    NeighborAverage: ("model",),
    PushSum: ("share",),
    PairwiseAverage: ("grant", "half of the difference"),
    QueuedNeighborAverage: ("update",),
    ParameterServer: ("update", "last update", "model"),
}


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_messages_between_peers_are_recorded_on_both_sides(comm, directory, kind):
    x, late, turns = np.full(1000, float(comm.rank)), comm.size - 1, 4
    with kind(comm, x) as average, average.timeline(directory):
        for _ in range(turns):
            if comm.rank == late:
                time.sleep(0.02)
            average(x)
    found = put_together(comm, directory)
    if found is None:
        return
    sent, received, names_of_vectors = Counter(), Counter(), set()
    for number, rank in found.ranks.items():
        assert f"messages of {kind.__name__}" in " ".join(rank.tracks.values())
        for each in rank.slices:
            if each.kind in ("sent", "received") and each.about["has a vector"]:
                what, _, peer = each.name.partition(" rank ")
                verb, *words = what.split()
                names_of_vectors.add(" ".join(words[:-2]))
                key = (number, int(peer)) if verb == "sends" else (int(peer), number)
                (sent if verb == "sends" else received)[(*key, *words[:-1])] += 1
    assert names_of_vectors and names_of_vectors <= {*MODELS[kind]}
    if kind is not PairwiseAverage:  # whose ranks go on when others have ended their recording
        assert not received - sent
    arrows = Counter((each.rank, each.to_rank) for each in found.arrows if each.name == "vector")
    assert sum(arrows.values()) == sum((sent & received).values()) > 0
    assert all(each.to_time >= each.time for each in found.arrows)
    if kind is NeighborAverage:  # a call waits for the vectors of all neighbors
        waited = Counter()
        for each in found.ranks[0].slices:
            waited.update(each.about.get("for rank: how late (µs)", {}))
        assert waited[str(late)] > 15_000  # of three pauses of 20 ms


@pytest.mark.transports("messages")
@pytest.mark.parametrize("kind", [NeighborAverage, PartialAllreduce, ReadyGroupAllreduce])
def test_other_collectives_record_calls_and_compare_clocks(comm, directory, kind):
    x = np.full(100, float(comm.rank))
    with kind(comm, x) as average:
        with average.timeline(directory):
            for _ in range(5):
                average(x)
        average(x)
    found = put_together(comm, directory)
    if found is not None:
        for rank in found.ranks.values():
            assert {f"call {turn}" for turn in range(5)} <= set(names(rank, "call"))
            assert "call 5" not in names(rank, "call")


@pytest.mark.transports("messages")
@pytest.mark.parametrize("closes", [False, True])
def test_an_averager_records_its_steps_until_it_is_closed(comm, directory, closes):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = WAGMA(model, optimizer, comm=comm)
    with nullcontext() if closes else averager, averager.timeline(directory):
        for _ in range(3):
            model(torch.ones(3)).backward()
            optimizer.step()
        if closes:
            averager.close()
    found = put_together(comm, directory)
    if found is not None:
        for number, rank in found.ranks.items():
            assert names(rank, "span") == ["step"] * 3
            assert number == 0 or len(rank.clock.times) == 2


@pytest.mark.transports("messages")
def test_a_second_timeline_and_one_that_cannot_be_written_are_refused(comm, directory):
    x = np.zeros(10)
    (directory / "file").touch()
    with GroupAllreduce(comm, x, group_size=2) as average:
        with pytest.raises(OSError), average.timeline(directory / "file"):
            pass
        with average.timeline(directory):
            again = average.timeline(directory)
            with pytest.raises(RuntimeError, match="records a timeline already"), again:
                pass
            assert is_recording()
        average(x)


@pytest.mark.transports("messages")
def test_an_exception_ends_a_timeline_without_the_other_ranks(comm, directory):
    x = np.zeros(10)
    with (
        pytest.raises(KeyError if comm.rank == 1 else RankFailedError),
        GroupAllreduce(comm, x, group_size=2) as average,
        average.timeline(directory),
    ):
        average(x)
        comm.Barrier()
        if comm.rank == 1:
            raise KeyError("mine")
        for _ in range(10**6):
            average(x)
    assert not is_recording()
    found = put_together(comm, directory)
    if found is not None:
        assert all("call 0" in names(rank, "call") for rank in found.ranks.values())


@pytest.mark.transports("messages")
def test_only_some_ranks_with_the_variable_are_refused(comm, directory, monkeypatch):
    if comm.rank == 0:
        monkeypatch.setenv("WAGMA_TIMELINE", str(directory))
    x = np.zeros(10)
    with pytest.raises(ValueError, match="timeline differs between ranks"):
        GroupAllreduce(comm, x, group_size=2)
    timeline.end()


@pytest.mark.transports("messages")
def test_a_rank_that_is_too_late_compares_its_clock_the_next_time(comm):
    own = comm.Dup()
    if comm.rank == 1:
        comm.recv(source=0)
    found = clocks.compare(own, 0.05)
    if comm.rank == 0 and comm.size > 1:
        comm.send("too late", dest=1)
    assert comm.rank != 1 or found is None
    comm.Barrier()
    found = clocks.compare(own, 5.0)
    assert found is not None
    _, offset, error = found
    assert abs(offset) <= error  # the ranks have one clock
    comm.Barrier()
    own.Free()
