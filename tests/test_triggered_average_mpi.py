"""`TriggeredAverage`, and weights by work, on several ranks."""

import logging
import re
import time

import ml_dtypes
import numpy as np
import pytest
from together import NEVER, interrupted, same_everywhere

from collectives import (
    ClosedError,
    DisagreementError,
    GroupAllreduce,
    RankFailedError,
    TriggeredAverage,
)

pytestmark = pytest.mark.mpi

DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)


@pytest.mark.ranks(1, 3, 4, 8)
@pytest.mark.parametrize("weights", ("given", "work", "wp"))
def test_the_first_rank_with_enough_calls_starts_it_and_the_others_join_in(comm, weights):
    """Rank 0 has made 5 calls; the others take part in theirs as soon as they have heard of it."""
    mine = np.zeros(40_000)
    with TriggeredAverage(comm, mine, sync_period=5, weights=weights, contraction=0.5) as average:
        if comm.rank == 0:
            results = []
            for made in range(5):
                if made == 4:
                    comm.Barrier()
                mine += 1
                results.append(average(mine, weight=2))
            assert [result.synchronized for result in results] == [False] * 4 + [True]
            assert [result.group for result in results[:4]] == [(0,)] * 4
            given = 5.0, 5, 10.0
        else:
            made = 0
            while True:
                mine += 1
                made += 1
                if average(mine, weight=0.5).synchronized:
                    break
                assert made < 5
                if made == 2:
                    comm.Barrier()  # before this nobody has made enough
                time.sleep(0.001)
            given = float(made), made, made / 2
        everyones = comm.allgather(given)
        values = [value for value, _, _ in everyones]
        by = {
            "given": [2 if rank == 0 else 0.5 for rank in range(comm.size)],
            "work": [work for _, _, work in everyones],
            "wp": [0.5 ** (5 - work) for _, _, work in everyones],
        }
        np.testing.assert_allclose(mine, np.average(values, weights=by[weights]), rtol=1e-12)
        assert same_everywhere(comm, mine.tobytes())
        assert average.version == 1 and average.calls == given[1]
        assert average.statistics().synchronizations == 1


@pytest.mark.parametrize("count", (3, 300_000))
def test_arrays_of_all_dtypes_and_one_that_is_not_finite(comm, count):
    arrays = [np.full(count, comm.rank + 1.0).astype(dtype) for dtype in DTYPES]
    with TriggeredAverage(comm, arrays, sync_period=1, weights="work") as average:
        if comm.rank == 1:
            arrays[2][0] = np.inf
        assert average(arrays, weight=comm.rank).timely == (comm.rank != 1)
        mean = np.average([1.0, 3.0, 4.0], weights=[0, 2, 3])
        for array in arrays:
            rounding = 2.0**-7 if array.dtype == ml_dtypes.bfloat16 else 2.0**-10
            np.testing.assert_allclose(array.astype(float), mean, rtol=rounding)
        assert same_everywhere(comm, b"".join(array.tobytes() for array in arrays))
        assert average.statistics().left_out == (comm.rank == 1)


@pytest.mark.transports("messages")
def test_compressed_averages_are_told_from_the_last_one(comm):
    mine = np.full(100_000, 1000.0)
    with TriggeredAverage(comm, mine, sync_period=1, wire_dtype="float16") as average:
        for step in range(4):
            mine += 1e-3 * (comm.rank + 1)
            average(mine)
            expected = 1000 + 2.5e-3 * (step + 1)
            np.testing.assert_allclose(mine, expected, rtol=0, atol=4e-3 * 2.0**-10)
        sent = average.statistics().bytes_sent
    assert sent < 4 * 1.6 * mine.nbytes / 4


def test_who_has_joined_gives_what_it_did_once(comm):
    mine = np.zeros(1000)
    with TriggeredAverage(comm, mine, sync_period=3, weights="work") as average:
        if comm.rank:
            mine += 4.0
            result = average(mine)
            if comm.rank == 1:
                comm.recv(source=0)  # or its own third call might start the first average
            while not result.synchronized and comm.rank == 1:
                time.sleep(0.001)
                result = average(mine, weight=0)
            average.join(mine)
        else:
            for call in range(9):
                if call == 2:
                    comm.send(None, 1)
                mine += 1.0
                average(mine)
            average.join(mine)
        assert same_everywhere(comm, mine.tobytes())
        # The first average is of 3 with weight 3, and of 4 three times; the others of rank 0 alone.
        assert mine[0] == 3.5 + 3 + 3 and average.version == 3


def test_all_come_to_average_and_load_and_synchronize(comm):
    mine = np.full(100, float(comm.rank))
    with TriggeredAverage(comm, mine, sync_period=NEVER, weights="work") as average:
        for _ in range(comm.rank + 1):
            average(mine)
        shown = mine.copy()
        average.average(shown)
        np.testing.assert_allclose(shown, np.average(range(4), weights=range(1, 5)))
        assert mine[0] == comm.rank
        average.synchronize(mine)
        np.testing.assert_allclose(mine, np.average(range(4), weights=range(1, 5)))
        average.load(mine + comm.rank, 70)
        assert average.version == 70


def test_an_average_beside_another_operation_is_an_error_on_all_ranks(comm):
    mine = np.zeros(3)
    with TriggeredAverage(comm, mine, sync_period=1) as average:
        with pytest.raises(DisagreementError, match=r"rank\(?s?.* entered (average|a periodic)"):
            if comm.rank == 2:
                average.average(mine)
            else:
                average(mine)
        with pytest.raises(ClosedError):
            average(mine)


def test_an_average_beside_closing_is_an_error_where_it_waits(comm):
    mine = np.zeros(3)
    with TriggeredAverage(comm, mine, sync_period=1) as average:
        if comm.rank != 2:
            with pytest.raises(ClosedError, match="but rank 2 entered close"):
                average(mine)


class Report(logging.Handler):
    """What a rank has logged; the first report is told to rank 2."""

    def __init__(self, comm):
        super().__init__()
        self.comm, self.texts = comm, []

    def emit(self, record):
        self.texts.append(record.getMessage())
        if len(self.texts) == 1:
            self.comm.send(None, 2)


def test_a_waiting_rank_says_who_is_still_computing(comm):
    mine, report, logger = np.zeros(3), Report(comm), logging.getLogger("collectives")
    with TriggeredAverage(comm, mine, sync_period=2, stall=0.3) as average:
        average(mine)
        comm.Barrier()  # lest this was a slow rank's first call, and an average
        if comm.rank == 0:
            logger.addHandler(report)
        elif comm.rank == 2:
            comm.recv(source=0)  # until rank 0 has said that it waits for this one
        assert average(mine).synchronized
        logger.removeHandler(report)
    if comm.rank == 0:
        assert "in a periodic synchronization after 1 call for" in report.texts[0]
        wanted = r"(\b2\b|1-3)[^;:]*: still computing \(1 call completed\)"
        assert re.search(wanted, report.texts[0])


@pytest.mark.parametrize("count", (3, 500_000))
def test_a_rank_whose_call_is_interrupted_still_gives_its_part(comm, count):
    mine = np.full(count, comm.rank + 1.0)
    with TriggeredAverage(comm, mine, sync_period=1, weights="work") as average:
        if comm.rank == 3:
            comm.recv(source=1)
        if comm.rank == 1:
            with interrupted():
                average(mine, weight=5)
            comm.send(None, 3)
        else:
            average(mine, weight=1)
            expected = np.average([1, 2, 3, 4], weights=[1, 5, 1, 1])
            np.testing.assert_allclose(mine, expected)
        mine[:] = comm.rank
        average(mine)
        np.testing.assert_allclose(mine, 1.5)


def test_a_failure_is_heard_in_a_call_of_ones_own(comm):
    mine = np.zeros(3)
    with TriggeredAverage(comm, mine, sync_period=NEVER) as average:
        if comm.rank == 1:
            with pytest.raises(ValueError, match="has 2 elements"):
                average(np.zeros(2))
        else:
            with pytest.raises(RankFailedError, match="rank 1 failed"):
                while True:
                    average(mine)
                    time.sleep(0.001)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sync_period": 0}, "sync_period is 0, less than 1"),
        ({"sync_period": 2**70}, f"sync_period is {2**70}, more than {2**60}"),
        ({"sync_period": 1.5}, "sync_period is 1.5, not an integer"),
        ({"weights": "equal"}, "weights is 'equal', not one of given, work, wp"),
        ({"contraction": 1}, "contraction is 1, not between 0 and 1"),
        ({"contraction": "half"}, "contraction is 'half', not a number"),
        ({"wire_dtype": "float8"}, "wire_dtype is 'float8', not one of float16, bfloat16"),
    ],
)
@pytest.mark.parametrize("kind", (TriggeredAverage, GroupAllreduce))
def test_a_wrong_argument_of_one_rank_is_named_on_all(comm, kind, given, message):
    own = given if comm.rank == 1 else {}
    with pytest.raises((TypeError, ValueError), match=message):
        kind(comm, np.zeros(3), **own)


# Weights of GroupAllreduce


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("late", ("paper", "conserving"))
@pytest.mark.parametrize("wait", ("nobody", "group"))
def test_local_work_weighs_until_all_average(comm, late, wait):
    """In groups of one each rank's work adds up, and all have the weighted mean."""
    mine = np.full(1000, float(comm.rank))
    work = [(rank + 1) * (rank + 2) for rank in range(comm.size)]
    with GroupAllreduce(
        comm, mine, group_size=1, sync_period=3, weights="work", late=late, wait=wait
    ) as average:
        for period in range(3):
            mine[:] = comm.rank
            for part in (0, 0.25, 0.75):
                result = average(mine, weight=part * work[comm.rank])
            assert result.synchronized and result.weight == sum(work), period
            np.testing.assert_allclose(mine, np.average(range(comm.size), weights=work))
            shown = mine.copy() + comm.rank
            average.average(shown)  # nobody has done any work: all count alike
            np.testing.assert_allclose(shown, mine + (comm.size - 1) / 2)


def test_a_passive_rank_weighs_what_it_has_done(comm):
    """Rank 3 has published once, and is averaged with the others' later calls as such."""
    mine = np.full(10, float(comm.rank))
    with GroupAllreduce(
        comm, mine, group_size=comm.size, sync_period=NEVER, weights="work", late="paper"
    ) as average:
        average(mine, weight=2)
        comm.Barrier()
        mine[:] = comm.rank
        if comm.rank == 3:
            average.publish(mine, weight=1)
        comm.Barrier()
        if comm.rank == 0:
            mine[:] = 8.0
            result = average(mine, weight=4)
            assert result.timely and result.weight == 6 + 2 + 2 + 3
            assert mine[0] < 8
        comm.Barrier()
