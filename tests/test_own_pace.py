"""Ranks at their own pace: any number of calls, no wait for an application, no update lost."""

import copy
import io
import time

import numpy as np
import pytest
import torch
from together import assert_equal_everywhere, compute_until, same_everywhere, wait_until

from collectives import GroupAllreduce, RankFailedError
from wagma.optim import WAGMA

pytestmark = [pytest.mark.mpi]


def own_pace(comm, like, **settings):
    settings = {"group_size": min(2, comm.size), "sync_period": 4, **settings}
    return GroupAllreduce(comm, like, pace="own", **settings)


def calls_of(rank):
    return 3 + 4 * rank


@pytest.mark.ranks(1, 3, 4, 8)
@pytest.mark.parametrize("length", [3, 70_000])
@pytest.mark.parametrize("end", ["join", "synchronize", "average", "close"])
def test_no_update_is_lost_however_many_calls_ranks_make(comm, length, end):
    """Means of two, four and eight of these numbers are not rounded."""
    unit = float(4**12)
    mine = np.full(length, unit * comm.rank)
    given = float(mine[0])
    with own_pace(comm, mine) as average:
        for call in range(calls_of(comm.rank)):
            change = (1 + call) * unit
            mine += change
            given += change
            result = average(mine)
            assert len(set(mine)) == 1
            assert result.weight == len(result.group)
            if comm.rank == 0:
                time.sleep(0.002)
        total = comm.allreduce(given)
        if end == "close":
            return
        if end == "join":
            average.join(mine)
        else:
            getattr(average, end)(mine)
        np.testing.assert_allclose(mine, total / comm.size, rtol=1e-12)
        assert_equal_everywhere(comm, mine)
        assert average.statistics().calls == calls_of(comm.rank)


@pytest.mark.ranks(4)
def test_no_call_waits_for_an_application(comm):
    """One computes, while the others make 60 calls, over 15 averages of all ranks."""
    mine = np.zeros(1000)
    with own_pace(comm, mine) as average:
        comm.Barrier()
        if comm.rank == 1:
            comm.Ibarrier().Wait()
            wait_until(lambda: average.executed >= 60)
            mine += 4
            executed = average.executed
            result = average(mine)
            assert not result.timely
            # The last call of the others may have begun one more.
            assert executed <= result.version + 1 <= average.executed
        else:
            for _ in range(60):
                mine += 4
                average(mine)
            comm.Ibarrier().Wait()
        average.synchronize(mine)
        np.testing.assert_allclose(mine, 181)


@pytest.mark.ranks(4)
def test_every_sync_period_th_version_averages_over_all_ranks(comm):
    mine = np.full(3, float(comm.rank))
    with own_pace(comm, mine) as average:
        for _ in range(12):
            wait_until(lambda: average.executed == average.version)
            comm.Barrier()
            if comm.rank == 0:
                result = average(mine)
                assert result.timely
                everybody = (result.version + 1) % 4 == 0
                assert len(result.group) == (4 if everybody else 2)
                if everybody:
                    assert (mine == 1.5).all()
            comm.Barrier()
            if comm.rank:
                average(mine)


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("overlap", [False, True])
def test_models_are_equal_after_steps_of_different_numbers_and_after_a_state_is_loaded(
    comm, overlap
):
    """Each rank's updates are -1 a step, whatever its model, so that the mean counts the steps."""
    model = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)

    def step():
        sgd.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        sgd.step()

    with WAGMA(model, sgd, pace="own", overlap=overlap, sync_period=3) as averager:
        for _ in range(calls_of(comm.rank)):
            step()
        state = averager.state_dict()
        assert f"step {calls_of(comm.rank)}, open" in repr(averager)
        with averager.averaged():
            steps = sum(map(calls_of, range(comm.size)))
            np.testing.assert_allclose(model.weight.detach().numpy(), -steps / comm.size, rtol=1e-6)
            saved = copy.deepcopy(model.state_dict())
        model.load_state_dict(saved)
        averager.load_state_dict(state)
        with averager.join():
            for _ in range(comm.rank):
                step()
        steps += sum(range(comm.size))
        np.testing.assert_allclose(model.weight.detach().numpy(), -steps / comm.size, rtol=1e-6)
        assert_equal_everywhere(comm, model.weight.detach().numpy())


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"wait": "group"}, "wait is 'group' with pace 'own', not 'nobody'"),
        ({"late": "paper"}, "late is 'paper' with pace 'own', not 'conserving'"),
        ({"weights": "work"}, "weights is 'work' with pace 'own', not 'given'"),
        ({"pace": "mine"}, "pace is 'mine', not one of common, own"),
    ],
)
def test_settings_that_an_own_pace_excludes_raise_on_all_ranks(comm, settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        GroupAllreduce(comm, np.zeros(3), group_size=1, **{"pace": "own", **settings})
    assert same_everywhere(comm, str(caught.value))


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("what", ["call", "start", "publish"])
def test_a_weight_other_than_1_is_an_error_on_all_ranks(comm, what):
    mine = np.zeros(3)
    average = own_pace(comm, mine)
    if comm.rank == 0:
        operation = average if what == "call" else getattr(average, what)
        with pytest.raises(ValueError, match="weight is 2 with pace 'own', not 1"):
            operation(mine, weight=2)
    else:
        with pytest.raises(RankFailedError, match="weight is 2 with pace 'own'"):
            while True:
                average(mine)
    average.close()


# The count that travels with the vectors, and the average that is kept


@pytest.mark.ranks(1, 3, 4, 8)
@pytest.mark.parametrize("length", [3, 70_000])
def test_all_ranks_know_the_same_total_of_all_calls_after_the_same_average(comm, length):
    """Each change is the work of its call, so the mean of the models is that of the counts."""
    mine = np.zeros(length)
    totals = {}
    with own_pace(comm, mine) as average:
        assert average.total_calls == 0
        for call in range(calls_of(comm.rank)):
            work = 1.0 + call % 3
            mine += work
            result = average(mine, work=work)
            of_all = len(result.group) == comm.size and (result.source + 1) % 4 == 0
            if of_all and result.timely:
                totals[result.source] = average.total_calls, float(mine[0]) * comm.size
            time.sleep(0.002 * (comm.rank == 0))
        made = sum(1.0 + call % 3 for call in range(calls_of(comm.rank)))
        average.synchronize(mine)
        assert average.total_calls == comm.allreduce(made)
        np.testing.assert_allclose(mine, average.total_calls / comm.size, rtol=1e-12)
    everyones = comm.allgather(totals)
    for version, (total, models) in ((v, t) for each in everyones for v, t in each.items()):
        np.testing.assert_allclose(total, models, rtol=1e-9)
        assert all(each.get(version, (total,))[0] == total for each in everyones)


@pytest.mark.ranks(3, 4)
def test_a_job_ends_by_the_work_that_its_ranks_have_done_together(comm):
    mine = np.zeros(100)
    with own_pace(comm, mine) as average:
        made = 0
        while average.total_calls < 60:
            mine += 1
            made += 1
            average(mine)
            time.sleep(0.001 * (comm.rank == 0))
        average.join(mine)
        assert average.total_calls == comm.allreduce(made) >= 60
        np.testing.assert_allclose(mine, average.total_calls / comm.size, rtol=1e-12)


@pytest.mark.ranks(3, 4)
def test_the_total_is_that_of_the_last_call_while_others_make_more(comm):
    """So it belongs to what a rank reads, or saves, beside it: the others' averages run here."""
    mine, kept = np.zeros(3), np.zeros(3)
    with own_pace(comm, mine, keep_average=True) as average:
        average.synchronize(mine)
        for _ in range(12 * (comm.rank > 0)):
            mine += 1
            average(mine)
        comm.Ibarrier().Wait()
        if comm.rank == 0:
            wait_until(lambda: average.executed >= 12)
            assert average.total_calls == 0
            _, total = average.last_average(kept)
            assert average.total_calls == total > 0
            np.testing.assert_allclose(kept, total / comm.size, rtol=1e-12)


@pytest.mark.ranks(1, 4)
def test_what_is_not_published_does_not_count(comm):
    mine = np.zeros(3)
    with own_pace(comm, mine) as average:
        mine[0] = np.nan if comm.rank == 0 else 1
        average(mine)
        mine[:] = 1
        average.publish(mine)  # a publication is no call
        average.synchronize(mine)
        assert average.total_calls == comm.size - 1
        mine += 1
        average(mine, work=0)
        average.average(mine)
        assert average.total_calls == comm.size - 1


@pytest.mark.ranks(1, 3, 4)
@pytest.mark.parametrize("length", [3, 70_000])
def test_the_newest_average_over_all_ranks_is_what_all_had(comm, length):
    mine = np.full(length, float(comm.rank))
    kept, seen = np.zeros(length), {}
    with own_pace(comm, mine, keep_average=comm.rank == 0) as average:
        if comm.rank == 0:
            assert average.last_average(kept) is None
            assert not kept.any()
        comm.Barrier()
        for call in range(20):
            mine += 1.5**call
            result = average(mine)
            if result.timely and (result.source + 1) % 4 == 0:
                seen[result.source] = average.total_calls, mine.copy()
            if comm.rank == 0 and call > 4:
                version, total = average.last_average(kept)
                assert (version + 1) % 4 == 0
                assert len(set(kept)) == 1
                seen.setdefault(version, (total, kept.copy()))
        everyones = comm.allgather(seen)
        newest = mine.copy()
        average.synchronize(newest)
        if comm.rank == 0:
            version, total = average.last_average(kept)
            assert total == 20 * comm.size
            assert kept.tobytes() == newest.tobytes()
        else:
            with pytest.raises(ValueError, match=r"last_average\(\) needs .* keep_average=True"):
                average.last_average(kept)
    for version, (total, model) in ((v, e) for each in everyones for v, e in each.items()):
        for other_total, other in (each[version] for each in everyones if version in each):
            assert (other_total, other.tobytes()) == (total, model.tobytes())


@pytest.mark.ranks(4)
def test_rank_0_has_the_average_while_all_others_compute(comm):
    """It needs no other rank: none makes a call meanwhile."""
    mine, kept = np.full(1000, float(comm.rank)), np.zeros(1000)
    with own_pace(comm, mine, keep_average=True) as average:
        if comm.rank == 0:
            for _ in range(8):
                average(mine)
            version, total = average.last_average(kept)
            assert version >= 3
            assert total <= 8
            np.testing.assert_allclose(kept, 1.5)
        comm.Ibarrier().Wait()


@pytest.mark.ranks(1, 3, 4)
def test_who_loads_its_snapshot_goes_on_where_the_job_was(comm):
    """Both jobs make the same calls after it, one rank after the other, and have the same bits."""

    def go_on(average, mine):
        for turn in range(3 * comm.size):
            comm.Barrier()
            wait_until(lambda: average.executed == 0 or same_everywhere(comm, average.executed))
            if turn % comm.size == comm.rank:
                mine += 1 + turn
                average(mine)
        average.synchronize(mine)
        return mine.tobytes(), average.total_calls

    mine = np.full(50, float(comm.rank))
    with own_pace(comm, mine) as average:
        for call in range(calls_of(comm.rank)):
            mine += 0.1 * (comm.rank + call)
            average(mine)
        snapshot = np.empty(50)
        version = average.snapshot(snapshot)
        saved = mine.copy()
        total = comm.allreduce(calls_of(comm.rank))
        assert same_everywhere(comm, version)
        changes = comm.allreduce(sum(0.1 * (comm.rank + k) for k in range(calls_of(comm.rank))))
        initial = sum(range(comm.size))
        np.testing.assert_allclose(comm.allreduce(snapshot[0]), initial + changes, rtol=1e-12)
        first = go_on(average, mine)
    assert first[1] == total + 3 * comm.size
    with own_pace(comm, np.zeros(50)) as average:
        average.load(snapshot, version, total=total)
        average.rebase(saved)
        assert average.total_calls == total
        assert go_on(average, saved) == first


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize(
    ("pace", "call", "message"),
    [
        ("common", lambda a, x: a(x, work=2), "work is 2 with pace 'common'"),
        ("common", lambda a, x: a.snapshot(x), r"snapshot\(\) needs pace 'own'"),
        ("common", lambda a, x: a.load(x, 0, total=3), "total is given with pace 'common'"),
        ("common", lambda a, x: a.rebase(x), r"rebase\(\) needs pace 'own'"),
        ("own", lambda a, x: a.lease(x), r"lease\(\) needs a collective made with leased arrays"),
        ("own", lambda a, x: a(x, work=-1), "work is -1, not between 0"),
        ("own", lambda a, x: a.load(x, 0, total="3"), "total is a str, not a number"),
    ],
)
def test_what_a_pace_does_not_take_is_an_error_on_all_ranks(comm, pace, call, message):
    mine = np.zeros(3)
    average = GroupAllreduce(comm, mine, group_size=1, pace=pace, sync_period=2)
    if comm.rank == 0:
        with pytest.raises((TypeError, ValueError), match=message):
            call(average, mine)
    else:
        with pytest.raises(RankFailedError, match=message):
            while True:
                average(mine)
    average.close()


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep_average": True, "pace": "common"}, "keep_average is True with pace 'common'"),
        ({"keep_average": 1, "pace": "own"}, "keep_average is 1, not True or False"),
    ],
)
def test_an_average_that_cannot_be_kept_is_an_error_on_all_ranks(comm, settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        GroupAllreduce(comm, np.zeros(3), group_size=1, **settings)


@pytest.mark.ranks(3, 4)
def test_with_a_common_pace_all_calls_are_those_of_this_rank_times_the_ranks(comm):
    mine = np.zeros(3)
    with GroupAllreduce(comm, mine, sync_period=2) as average:
        for _ in range(4):
            average(mine)
        assert average.total_calls == 4 * comm.size


# Devices


def play_on(device, comm, stream):
    """Make calls with vectors on a device; keep, save and load there."""
    initial = sum(range(comm.size))

    def array(value):
        return device.array(np.full(70_000, float(value)), stream)

    x, kept, snapshot = array(comm.rank), array(0), array(0)

    def step():
        device.write(x, x.get(stream) + 1, stream)
        average(x)

    with own_pace(comm, x, keep_average=comm.rank > 0) as average:
        comm.Barrier()
        for _ in range(6 + comm.rank):
            step()
        if comm.rank > 0:
            version, total = average.last_average(kept)
            assert (version + 1) % 4 == 0
            np.testing.assert_allclose(kept.get(stream), (initial + total) / comm.size)
        made = comm.allreduce(6 + comm.rank)
        version = average.snapshot(snapshot)
        saved = comm.allreduce(snapshot.get(stream)[[0, -1]])
        np.testing.assert_allclose(saved, initial + made)
        before = x.get(stream)
        average.load(snapshot, version, total=made)
        average.rebase(x)
        np.testing.assert_array_equal(x.get(stream), before)
        step()
        average.synchronize(x)
        assert average.total_calls == made + comm.size
        np.testing.assert_allclose(x.get(stream), (initial + made) / comm.size + 1)


@pytest.mark.ranks(1, 3, 4)
def test_vectors_on_a_device_that_are_averaged_on_the_host_are_kept_and_saved(comm, device, stream):
    play_on(device, comm, stream)


@pytest.mark.ranks(3, 4)
def test_vectors_that_are_averaged_on_their_device_are_kept_and_saved_there(comm, direct, stream):
    play_on(direct, comm, stream)


# Optimizers


class Counting:
    """A model of one weight, from which each step of a rank takes 1."""

    def __init__(self, pace="own", **settings):
        self.model = torch.nn.Linear(3, 1, bias=False)
        torch.nn.init.zeros_(self.model.weight)
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.averager = WAGMA(self.model, self.sgd, pace=pace, sync_period=3, **settings)

    def step(self, weight=1, work=None):
        self.sgd.zero_grad()
        self.model(torch.ones(1, 3)).sum().backward()
        self.averager.weight, self.averager.work = weight, work
        self.sgd.step()

    @property
    def weight(self):
        return self.model.weight.detach().numpy().copy()


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("overlap", [False, True])
def test_an_optimizer_ends_by_the_steps_of_all_and_shows_their_last_average(comm, overlap):
    counting = Counting(overlap=overlap, keep_average=True)
    with counting.averager as averager:
        if comm.rank == 0:
            none = pytest.raises(RuntimeError, match="no average over all ranks yet")
            with none, averager.last_average():
                pass
        comm.Barrier()
        with averager.join():
            while averager.total_steps < 40:
                counting.step()
                time.sleep(0.001 * comm.rank)
            before = counting.weight
            with averager.last_average() as (version, total):
                # Each rank has had another step of its own since, unless it made this average.
                np.testing.assert_allclose(counting.weight, -total / comm.size, rtol=1e-6)
                assert total >= 40
                assert version >= 2
                saved = averager.state_dict()
                assert (saved["total"], saved["equal"]) == (total, True)
            if not overlap:
                np.testing.assert_array_equal(counting.weight, before)
        steps = comm.allreduce(averager.collective.statistics().calls)
        assert averager.total_steps == steps
        np.testing.assert_allclose(counting.weight, -steps / comm.size, rtol=1e-6)


@pytest.mark.ranks(3, 4)
def test_the_work_of_steps_is_counted_in_samples_say(comm):
    counting = Counting()
    with counting.averager as averager:
        for _ in range(4):
            counting.step(work=16 * (1 + comm.rank))
        averager.synchronize()
        assert averager.total_steps == 64 * sum(range(1, comm.size + 1))
        comm.Barrier()  # or some may hear of the error before they have their average
        if comm.rank == 0:
            with pytest.raises(ValueError, match="work is -1"):
                counting.step(work=-1)


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize(
    ("pace", "given", "message"),
    [
        ("own", {"weight": 2}, "weight is 2.0 with pace 'own', not 1"),
        ("own", {"work": -1}, "work is -1, not between 0"),
        ("own", {"work": float("nan")}, "work is nan, not between 0"),
        ("common", {"work": 3}, "work is 3.0 with pace 'common', which counts calls only"),
    ],
)
def test_what_a_step_of_this_pace_does_not_take_is_refused_before_it(comm, pace, given, message):
    counting = Counting(pace=pace)
    with counting.averager as averager:
        counting.step()
        averager.synchronize()
        before = counting.weight
        with pytest.raises(ValueError, match=message):
            counting.step(**given)
        np.testing.assert_array_equal(counting.weight, before)
        counting.step()
        averager.synchronize()
        np.testing.assert_allclose(counting.weight, before - 1, rtol=1e-6)


@pytest.mark.ranks(1, 4)
def test_a_checkpoint_of_another_pace_is_refused_and_training_goes_on(comm):
    counting = Counting(pace="common")
    with counting.averager as averager:
        with pytest.raises(ValueError, match=r"checkpoint\(\) needs pace 'own'"):
            averager.checkpoint()
        counting.step()
        assert averager.total_steps == comm.size


@pytest.mark.ranks(1, 3, 4)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_checkpoint_of_each_rank_continues_with_its_snapshot_and_the_total(comm, overlap):
    counting = Counting(overlap=overlap)
    with counting.averager as averager:
        for _ in range(calls_of(comm.rank)):
            counting.step()
        state, model = averager.checkpoint(), copy.deepcopy(counting.model.state_dict())
        steps = sum(map(calls_of, range(comm.size)))
        assert state["total"] == steps
        snapshots = comm.allgather(state["snapshot"][0].numpy())
        np.testing.assert_allclose(sum(snapshots)[:3], -steps, rtol=1e-6)
        counting.step()  # which does not change what was saved
    file = io.BytesIO()
    torch.save({"model": model, "averager": state}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)

    counting = Counting(overlap=overlap)
    with counting.averager as averager:
        counting.model.load_state_dict(loaded["model"])
        averager.load_state_dict(loaded["averager"])
        assert averager.total_steps == steps
        again = averager.checkpoint()
        for one, other in zip(again["snapshot"], state["snapshot"]):
            assert torch.equal(one, other)
        assert (again["total"], again["version"]) == (steps, state["version"])
        for name, value in counting.model.state_dict().items():
            assert torch.equal(value, model[name])
        counting.step()
        averager.synchronize()
        assert averager.total_steps == steps + comm.size
        np.testing.assert_allclose(counting.weight, -steps / comm.size - 1, rtol=1e-6)


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize(
    "lengths", [(30, 20, 10), (50_000, 150_001, 70_000)], ids=["short", "long"]
)
def test_the_part_of_a_rank_that_computes_expires_and_comes_back(comm, lengths):
    """Rank 0 makes no call for many versions: what the others sum is theirs alone meanwhile."""
    period, part = 2, float(16 * (comm.rank + 1))
    x = [np.zeros(length) for length in lengths]
    everyone = sum(16.0 * (rank + 1) for rank in range(comm.size))
    with GroupAllreduce(
        comm, x, group_size=2, sync_period=period, pace="own", leased=[1, 2]
    ) as average:
        for array in x[1:]:
            array += part
        average(x)
        average.lease([np.full(length, part) for length in lengths])
        comm.Barrier()
        if comm.rank == 0:
            compute_until(comm, False)
        else:
            others = (everyone - 16) / comm.size
            deadline = time.monotonic() + 60  # rank 0's engine may sleep for a while
            while not all(np.allclose(array, others, rtol=1e-9) for array in x[1:]):
                assert time.monotonic() < deadline, (x[1][0], others)
                time.sleep(0.001)
                average(x)
            compute_until(comm, True)
        average(x)
        mean = [array.copy() for array in x]
        average.average(mean)
        assert not mean[0].any()
        for array in mean[1:]:
            np.testing.assert_allclose(array, everyone / comm.size, rtol=1e-9)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"leased": [1]}, "leased is given with pace 'common'"),
        ({"leased": [0, 2], "pace": "own"}, r"leased is \[0, 2\], not indices of arrays in a row"),
        ({"leased": [3], "pace": "own"}, r"leased is \[3\], not indices of arrays in a row"),
        ({"leased": 1, "pace": "own"}, "leased is 1, not a list of indices"),
    ],
)
def test_what_cannot_be_leased_is_refused(comm, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        GroupAllreduce(comm, [np.zeros(3) for _ in range(3)], group_size=2, **options)
