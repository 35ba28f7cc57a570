"""PartialAllreduce: everything that is put in comes out once, on every rank, whoever is late."""

import logging
import time

import numpy as np
import pytest
from protocol_messages import protocols
from together import (
    NEVER,
    assert_equal_everywhere,
    before_transports,
    compute_until,
    interrupted,
    wait_until,
)

from collectives import ClosedError, PartialAllreduce, RankFailedError

pytestmark = pytest.mark.mpi

both = pytest.mark.parametrize("trigger", ("solo", "majority"))


def drawn(seed, version, size):
    return protocols.drawn(seed, version, size)


def assert_mean(comm, put_in, came_out):
    """What came out is the mean of what all put in; to the bit, where that needs no rounding."""
    for mine, out in zip(put_in, came_out):
        mean = comm.allreduce(mine) / comm.size
        rounding = 0 if comm.size != 3 else 2**20 * np.finfo(mine.dtype).eps
        np.testing.assert_allclose(out, mean, rtol=0, atol=rounding)


@both
@pytest.mark.ranks(1, 3, 4, 8)
def test_what_is_put_in_comes_out_once_in_every_period(comm, trigger):
    """Ranks come at random, one is always late, another's vector is not finite now and then."""
    like = [np.zeros(70_000), np.zeros(3, np.float32)]
    generator = np.random.default_rng(comm.rank)
    dropped = 0
    with PartialAllreduce(comm, like, trigger=trigger, sync_period=6, seed=11) as average:
        for period in range(4):
            put_in, came_out = ([np.zeros_like(array) for array in like] for _ in range(2))
            for step in range(6):
                time.sleep(generator.random() * 0.004 + 0.004 * (comm.rank == 1))
                vector = [
                    generator.integers(-(2**10), 2**10, each.size).astype(each.dtype) * 8
                    for each in like
                ]
                if step == 2 and comm.rank == comm.size - 1:
                    vector[period % 2][1] = np.inf if period else np.nan
                    dropped += 1
                else:
                    put_in = [total + new for total, new in zip(put_in, vector)]
                if step == 3 and period == 1:
                    average.synchronize(vector)
                elif step == 4 and period == 1:
                    put_in = [total - new for total, new in zip(put_in, vector)]
                    means = [comm.allreduce(array) / comm.size for array in vector]
                    average.average(vector)
                    for mean, array in zip(means, vector):
                        np.testing.assert_allclose(array, mean, rtol=1e-6, atol=1e-2)
                        array[:] = 0
                else:
                    result = average(vector)
                    assert result.group == tuple(range(comm.size))
                came_out = [total + new for total, new in zip(came_out, vector)]
            while not result.synchronized:
                vector = [np.zeros_like(array) for array in like]
                result = average(vector)
                came_out = [total + new for total, new in zip(came_out, vector)]
            assert_mean(comm, put_in, came_out)
        statistics = average.statistics()
    assert statistics.left_out == dropped
    assert statistics.timely <= statistics.calls == average.version == 24
    assert average.closed


@pytest.mark.ranks(3, 4, 8)
def test_solo_waits_for_nobody_and_a_late_rank_gets_what_it_missed(comm):
    absent = comm.rank == comm.size - 1
    vector = np.empty(5)
    got = np.zeros(5)
    with PartialAllreduce(comm, vector, sync_period=NEVER) as average:
        for _ in range(3):
            if not absent:
                vector[:] = 1
                average(vector)
                got += vector
        compute_until(comm, not absent)
        if not absent:
            # Whoever was late may have missed what was put in last, its own or another's.
            assert (got <= 3 * (comm.size - 1) / comm.size + 1e-12).all()
            assert (got >= 2 / comm.size - 1e-12).all()
        for _ in range(3):
            if absent:
                vector[:] = 1
                assert not average(vector).timely
                got += vector
        comm.Barrier()
        vector[:] = 0
        average(vector)
        comm.Barrier()
        got += vector
        vector[:] = 0
        average.synchronize(vector)
        np.testing.assert_allclose(got + vector, 3, rtol=1e-12)
        assert average.version == 4


@pytest.mark.ranks(3, 4, 8)
def test_with_majority_versions_begin_with_the_rank_that_is_drawn(comm):
    """Ranks come one after another, in random order: who comes before the drawn one is timely."""
    seed, versions = 5, 12
    orders = np.random.default_rng(0)
    vector = np.zeros(3)
    expected = 0
    with PartialAllreduce(
        comm, vector, trigger="majority", sync_period=NEVER, seed=seed
    ) as average:
        for version in range(versions):
            place = list(orders.permutation(comm.size))
            last = place.index(drawn(seed, version, comm.size))
            mine = place.index(comm.rank)
            vector[:] = 1
            # Those up to the drawn one call, and wait for it; the others come when it has called.
            if mine < last:
                result = average(vector)
            else:
                time.sleep(0.02)
                if mine > last:
                    while average.executed <= version:
                        time.sleep(0.0005)
                assert mine > last or average.executed == version
                result = average(vector)
            assert result.timely or mine != last
            assert not (result.timely and mine > last)
            expected += mine <= last
            comm.Barrier()
        timely = average.statistics().timely
    # One that is to come before the drawn one may be overtaken by it on a oversubscribed machine.
    assert timely <= expected
    assert comm.allreduce(timely) > versions


@pytest.mark.ranks(3, 4, 8)
@pytest.mark.parametrize("ending", ("join", "close"))
def test_nobody_waits_for_a_drawn_rank_that_has_no_more_calls_to_make(comm, ending):
    """Rank r makes 3·r calls; the rest of them go on, over a synchronization where they join."""
    vector = np.zeros(4)
    got = np.zeros(4)
    calls = 3 * comm.rank
    period = 4 if ending == "join" else NEVER
    with PartialAllreduce(comm, vector, trigger="majority", sync_period=period) as average:
        for _ in range(calls):
            vector[:] = comm.size
            average(vector)
            got += vector
        if ending == "join":
            vector[:] = 0
            average.join(vector)
            assert average.version == 3 * (comm.size - 1)
            before = np.full(4, comm.rank + 1.0)
            average.synchronize(before)
            assert (before == comm.allreduce(comm.rank + 1.0) / comm.size).all()
            if comm.rank == comm.size - 1:
                # In each period the sums are over those that had not joined before it.
                ranks = np.arange(comm.size)
                last = calls // period * period
                expected = 0
                for begin in range(0, last + 1, period):
                    end = min(begin + period, calls)
                    there = ranks[(3 * ranks >= begin) | (begin == 0)]
                    put_in = np.minimum(3 * there, end) - np.minimum(3 * there, begin)
                    expected += put_in.sum() * comm.size / len(there)
                np.testing.assert_allclose(got + vector, expected, rtol=1e-12)
    assert average.closed


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_the_sums_of_fp16_and_bf16_are_kept_in_single_precision(comm, dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    vector = np.zeros(7, dtype)
    got = np.zeros(7, np.float32)
    with PartialAllreduce(comm, vector, sync_period=600) as average:
        for _ in range(600):
            vector[:] = 1
            average(vector)
            got += vector.astype(np.float32)
    # A sum of ones in bfloat16 would end at 256; what rounds is the last increment.
    np.testing.assert_allclose(got, 600, rtol=2**-8)


@pytest.mark.ranks(3, 4)
def test_what_exceeds_fp16_is_in_the_next_results(comm):
    """Rank 0's contributions are all in the others' first average."""
    put_in = np.float16(60_000)
    got = np.zeros(3)
    vector = np.zeros(3, np.float16)
    with PartialAllreduce(comm, vector, sync_period=NEVER) as average:
        if comm.rank:
            wait_until(lambda: average.executed == 8)
        for call in range(8):
            vector[:] = put_in if comm.rank == 0 else 0
            average(vector)
            assert np.isfinite(vector).all(), call
            got += vector
    np.testing.assert_allclose(got, 8 * float(put_in) / comm.size, rtol=1e-3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"trigger": None}, "trigger is None, not one of solo, majority"),
        ({"trigger": "most"}, "trigger is 'most', not one of solo, majority"),
        ({"seed": -1}, "seed is -1, not between 0 and 18446744073709551615"),
        ({"seed": 0.5}, "seed is 0.5, not an integer"),
        ({"sync_period": 0}, "sync_period is 0, less than 1"),
        ({"sync_period": 2**70}, f"sync_period is {2**70}, more than {2**60}"),
        ({"like": np.zeros(3, int)}, "like is of dtype int64"),
        ({"like": [np.zeros(3), None]}, r"like\[1\] is a NoneType, not a numpy array"),
    ],
)
def test_a_bad_argument_is_an_error_on_every_rank(comm, given, message):
    given = {"like": np.zeros(3), **(given if comm.rank == 1 else {})}
    with pytest.raises((TypeError, ValueError), match=message):
        PartialAllreduce(comm, **given)


@before_transports
@pytest.mark.parametrize(("name", "values"), [("trigger", ("solo", "majority")), ("seed", (1, 2))])
def test_what_differs_between_ranks_is_an_error_on_all(comm, name, values):
    with pytest.raises(ValueError, match=f"{name} differs between ranks"):
        PartialAllreduce(comm, np.zeros(3), **{name: values[comm.rank % 2]})


@both
def test_all_ranks_hear_of_a_bad_vector(comm, trigger):
    vector = np.zeros(3)
    with PartialAllreduce(comm, vector, trigger=trigger, sync_period=NEVER) as average:
        average(vector)
        comm.Barrier()
        if comm.rank == 2:
            with pytest.raises(ValueError, match="the vector has 4 elements"):
                average(np.zeros(4))
        else:
            with pytest.raises(RankFailedError, match="rank 2 failed.*the vector has 4 elements"):
                for _ in range(NEVER):
                    average(vector)
        with pytest.raises((ClosedError, RankFailedError)):
            average(vector)


@pytest.mark.ranks(3, 4)
def test_who_waits_for_the_drawn_rank_says_so_and_can_be_interrupted(comm, caplog):
    """One is; the others hear of it, and all close."""
    vector = np.ones(3)
    seed = 1
    absent = drawn(seed, 0, comm.size)
    average = PartialAllreduce(
        comm, vector, trigger="majority", sync_period=NEVER, seed=seed, stall=0.2
    )
    with caplog.at_level(logging.WARNING, "collectives"):
        if comm.rank == (absent + 1) % comm.size:
            with interrupted(0.01, once=lambda: caplog.records):
                average(vector)
            assert (
                f"for rank {absent}: still computing (0 calls completed), and drawn" in caplog.text
            )
        elif comm.rank != absent:
            with pytest.raises(RankFailedError, match="Interrupted"):
                average(vector)
        compute_until(comm, comm.rank != absent)
        with pytest.raises((ClosedError, RankFailedError)):
            for _ in range(NEVER):
                average(vector)
    average.close()


@both
def test_versions_go_on_after_a_load_and_are_drawn_by_their_numbers(comm, trigger):
    vector = np.ones(3)
    with PartialAllreduce(comm, vector, trigger=trigger, sync_period=5, seed=2) as average:
        average(vector)
        average.load(13)
        assert average.version == 13
        vector[:] = comm.rank
        assert average(vector).version == 13
        first = vector.copy()
        vector[:] = comm.rank
        result = average(vector)
        assert (result.version, result.synchronized) == (14, True)
        np.testing.assert_allclose(first + vector, comm.size - 1)
        vector[:] = comm.rank
        average.synchronize(vector)
        assert_equal_everywhere(comm, vector)
