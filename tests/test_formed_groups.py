"""Groups that one rank forms: their records, and the protocol without MPI and in simulated time."""

import functools
import random

import numpy as np
import pytest
from formed_groups import (
    LATE,
    Group,
    PlannedGroups,
    RandomGroups,
    World,
    replay,
    source,
)

from collectives.protocols import formed_groups as compiled
from collectives.protocols.scripted import ScriptedGroupProtocol
from wagma.simulation import MACHINES, Settings, simulate
from wagma.simulation.core import Simulation, allreduce_time
from wagma.simulation.formed_groups import FormedGroupMethod

LENGTH = 3


def change(rank, call):
    """What a rank's application changes before a call; before the first, what it begins with."""
    return np.random.default_rng([rank, call + 1]).standard_normal(LENGTH)


def start(size):
    return np.array([change(rank, -1) for rank in range(size)])


# Records

both = pytest.mark.parametrize("kind", [Group, compiled.Group], ids=["source", "compiled"])


@both
def test_a_record_has_its_members_sorted_with_their_weights(kind):
    group = kind(7, [4, 0, 2], [0.5, 0.0, 3])
    assert (group.number, group.size, group.equal) == (7, 3, False)
    assert group.listed() == ((0, 2, 4), (0.0, 3.0, 0.5))
    assert repr(group) == "Group(7, (0, 2, 4), (0.0, 3.0, 0.5))"
    alike = kind(0, [1, 0])
    assert alike.equal
    assert alike.listed() == ((0, 1), (1.0, 1.0))


BAD = {
    "nobody": ((3, []), ValueError, "group 3 has no members"),
    "twice": ((3, [1, 2, 1]), ValueError, "group 3 has rank 1 twice"),
    "no rank": ((3, [1, -2]), ValueError, "the member -2, which is not a rank"),
    "a name": ((3, ["1"]), TypeError, "the member '1', which is not a rank"),
    "below 0": ((-1, [0]), ValueError, "number is -1, less than 0"),
    "half a number": ((0.5, [0]), TypeError, "number is 0.5, not an integer"),
    "too few": ((3, [1, 2], [1]), ValueError, "has 2 members, but 1 weights"),
    "negative": (
        (3, [1, 2], [1, -1]),
        ValueError,
        "weight of rank 2 in group 3 is -1, not between 0 and",
    ),
    "no number": ((3, [1], [float("nan")]), ValueError, "is nan, not between 0 and 1e"),
    "infinite": ((3, [1], [float("inf")]), ValueError, "is inf, not between 0 and 1e"),
    "no weight": ((3, [1, 2], [0, 0]), ValueError, "no member of group 3 has a weight"),
}


@both
@pytest.mark.parametrize(("given", "error", "text"), BAD.values(), ids=BAD)
def test_what_is_no_group_is_named(kind, given, error, text):
    with pytest.raises(error, match=text):
        kind(*given)


def test_a_record_travels_as_integers_with_the_bits_of_its_weights():
    generator = random.Random(4)
    for number in range(200):
        members = generator.sample(range(40), generator.randint(1, 40))
        weights = [generator.random() * 10 ** generator.randint(-30, 30) for _ in members]
        group = Group(number, members, generator.choice((None, weights)))
        integers = source.array.array("q", [0]) * 100
        end = group.write(integers, 5)
        assert end - 5 == 3 + (1 if group.equal else 2) * len(members)
        read = Group(room=40)
        assert read.read(integers, 5) == end
        assert (read.number, read.listed()) == (number, group.listed())


# The protocol, in every order of a small case, and in orders that are drawn


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize(("size", "calls"), [(1, 3), (2, 2)])
def test_everybody_comes_to_an_end_in_every_order(size, calls, late):
    assert World(size, calls, change, seed=1, late=late).explore() > 30


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_every_group_is_averaged_once_by_each_member_in_the_order_of_the_controller(size, late):
    for seed in range(30):
        world = World(size, 4, change, seed=seed, late=late)
        world.run(seed)
        if late == "passive":
            continue
        logs = [protocol.log for protocol in world.protocols]
        expected = replay(world.protocols[0].formed, logs, start(size), change)
        np.testing.assert_allclose(
            [port.vector for port in world.ports], expected, rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("late", LATE)
def test_groups_with_equal_weights_keep_the_sum_of_all_vectors(late):
    size, calls = 5, 4
    given = sum(change(rank, call) for rank in range(size) for call in range(-1, calls))
    for seed in range(30):
        world = World(size, calls, change, seed=seed, late=late, equal=True)
        world.run(seed)
        total = sum(port.vector for port in world.ports)
        np.testing.assert_allclose(total, given, rtol=1e-11, atol=1e-11)


def test_there_are_groups_of_all_kinds():
    """Several at once, twice the same rank, of all sizes, unequal weights, late members."""
    sizes, weights, passive, most = set(), set(), 0, 0
    for seed in range(40):
        world = World(5, 4, change, seed=seed, late="passive")
        generator = random.Random(seed)
        while events := list(world.events()):
            event, what = generator.choice(events)
            event(what)
            under_way = {port.steps[0].number for port in world.ports if port.averaging}
            most = max(most, len(under_way))
        for _, members, given in world.protocols[0].formed:
            sizes.add(len(members))
            weights.update(given)
        for protocol in world.protocols:
            passive += sum(not in_call for _, *rest in protocol.log for in_call in rest)
    assert sizes == {1, 2, 3, 4, 5}
    assert {0, 1, 7} < weights
    assert passive > 10
    assert most >= 3


class Reversed(RandomGroups):
    """Carries out the groups that it is told of in the wrong order."""

    def reduce_pending(self):
        self.pending.reverse()
        super().reduce_pending()


class Forgetful(RandomGroups):
    """Leaves without the groups that wait for its next call."""

    def pause(self):
        self.port.send(0, [1, self.calls])


@pytest.mark.parametrize("wrong", [Reversed, Forgetful])
def test_a_wrong_protocol_is_caught(wrong):
    with pytest.raises(AssertionError):
        for seed in range(200):
            World(4, 4, change, wrong, seed=seed, late="waited for").run(seed)


# In simulated time


def simulated(protocol, step_times, nbytes=4000, machine=MACHINES["hdr"], **settings):
    """Return a simulation that has ended, and the ranks' protocols."""
    make = functools.partial(protocol, **settings)
    method = FormedGroupMethod(
        lambda port, rank, size: ScriptedGroupProtocol(port, rank, size, make), nbytes
    )
    simulation = Simulation(method, machine, step_times)
    simulation.run()
    return simulation, [method.protocol(rank).script for rank in range(simulation.ranks)]


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("size", [1, 3, 8, 32])
def test_every_group_is_averaged_once_by_each_member_in_simulated_time(size, late):
    steps = np.random.default_rng(size).uniform(0.5e-6, 30e-6, (12, size))
    settings = {"seed": size, "late": late, "most_awaited": (size + 1) // 2}
    simulation, protocols = simulated(RandomGroups, steps, **settings)
    # What was under way when the last application made its last step is of no interest to it.
    assert all(protocol.calls == 12 for protocol in protocols)
    formed = protocols[0].formed
    for rank, protocol in enumerate(protocols):
        own = [number for number, members, _ in formed if rank in members]
        averaged = [event for event, *_ in protocol.log if isinstance(event, int)]
        assert averaged == own[: len(averaged)]
        assert protocol.told == own[: len(protocol.told)]
    assert simulation.method.updates > 5 or size == 1
    assert simulation.method.most > 1 or size < 8
    again, _ = simulated(RandomGroups, steps, **settings)
    np.testing.assert_array_equal(again.ended, simulation.ended)


def test_the_slow_member_of_a_group_delays_no_other_group_in_simulated_time():
    calls, machine = 10, MACHINES["hdr"]
    plan = [[(2 * call, (0, 1)), (2 * call + 1, (2, 3))] for call in range(calls)]
    steps = np.full((calls, 4), 1e-3)
    steps[:, 3] = 0.1
    simulation, _ = simulated(PlannedGroups, steps, 10**6, plan=plan)
    average = allreduce_time(machine.for_job(4), 2, 10**6)
    assert average > 0
    np.testing.assert_allclose(simulation.ended[:2], calls * (1e-3 + average), rtol=1e-12)
    np.testing.assert_allclose(simulation.ended[2:], calls * (0.1 + average), rtol=1e-12)


def test_groups_of_one_rank_follow_one_another_in_simulated_time():
    machine = MACHINES["hdr"]
    plan = [[(0, (0, 1)), (1, (1, 2)), (2, (0, 2))]]
    simulation, _ = simulated(PlannedGroups, np.full((1, 3), 1e-3), 10**6, plan=plan)
    average = allreduce_time(machine.for_job(3), 2, 10**6)
    np.testing.assert_allclose(simulation.ended, 1e-3 + average * np.array([3, 2, 3]), rtol=1e-12)


@pytest.mark.parametrize("name", ["partial-reduce", "ripples"])
@pytest.mark.parametrize("sync_every", [1, 3])
def test_a_rank_averages_in_every_so_manieth_call(name, sync_every):
    """Ranks that are in step; the time of each average is as if it was the only one."""
    steps = np.full((12, 4), 1.0)
    settings = Settings(10**8, sync_every=sync_every, group_size=4)
    result = simulate(name, steps, MACHINES["hdr"], settings)
    average = allreduce_time(MACHINES["hdr"], 4, 10**8)
    assert result.updates == 12 // sync_every
    assert result.wall == pytest.approx(12 + 12 // sync_every * average, rel=1e-3)
