"""The groups and the activation tree: algorithms checked against the paper and by property."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.topology import activation_peers, group_of, groups, propagation_bound

WORLD_SIZES = st.integers(1, 64)
VERSIONS = st.integers(0, 10**6)


@st.composite
def worlds(draw, smallest_group=1):
    world_size = draw(st.integers(smallest_group, 64))
    return world_size, draw(st.integers(smallest_group, world_size))


def xor_shift_groups(world_size, group_size, version):
    """Algorithm 1 as printed: merge the pairs of each phase."""
    global_phases = world_size.bit_length() - 1
    group_phases = group_size.bit_length() - 1
    group = {rank: {rank} for rank in range(world_size)}
    for phase in range(group_phases):
        bit = (version * group_phases + phase) % global_phases
        for rank in range(world_size):
            union = group[rank] | group[rank ^ (1 << bit)]
            for member in union:
                group[member] = union
    return sorted({tuple(sorted(members)) for members in group.values()})


def versions_until_spread(world_size, group_size, start):
    """In how many versions from `start` every rank's update has reached every rank."""
    known = [1 << rank for rank in range(world_size)]
    everything = (1 << world_size) - 1
    for count in range(1, 4 * world_size):
        for members in groups(world_size, group_size, start + count - 1):
            union = 0
            for rank in members:
                union |= known[rank]
            for rank in members:
                known[rank] = union
        if all(each == everything for each in known):
            return count
    raise AssertionError("updates never spread")


def test_groups_of_the_papers_example():
    expected = [
        [(0, 1, 2, 3), (4, 5, 6, 7)],
        [(0, 1, 4, 5), (2, 3, 6, 7)],
        [(0, 2, 4, 6), (1, 3, 5, 7)],
    ]
    assert [groups(8, 4, version) for version in range(6)] == expected + expected


@pytest.mark.parametrize("world_bits", range(7))
def test_powers_of_two_are_algorithm_1(world_bits):
    for group_bits in range(world_bits + 1):
        for version in range(2 * world_bits + 3):
            arguments = (1 << world_bits, 1 << group_bits, version)
            assert groups(*arguments) == xor_shift_groups(*arguments)


@pytest.mark.parametrize("world_bits", range(1, 7))
def test_powers_of_two_spread_within_log_s_p(world_bits):
    for group_bits in range(1, world_bits + 1):
        for start in range(world_bits):
            spread = versions_until_spread(1 << world_bits, 1 << group_bits, start)
            assert spread == math.ceil(world_bits / group_bits)


@given(worlds(), VERSIONS)
def test_groups_partition_the_ranks(world, version):
    world_size, group_size = world
    made = groups(world_size, group_size, version)
    sizes = [len(members) for members in made]
    assert sorted(rank for members in made for rank in members) == list(range(world_size))
    assert len(made) == math.ceil(world_size / group_size)
    assert max(sizes) <= group_size
    assert max(sizes) - min(sizes) <= 1


@given(worlds(), VERSIONS)
def test_each_rank_computes_its_group_alone(world, version):
    for members in groups(*world, version):
        for rank in members:
            assert group_of(rank, *world, version) == members


@given(worlds(smallest_group=2), VERSIONS)
def test_updates_spread_within_the_bound_from_any_version(world, start):
    assert versions_until_spread(*world, start) <= propagation_bound(*world)


@given(worlds(smallest_group=2), VERSIONS)
def test_groups_change_with_every_version(world, version):
    world_size, group_size = world
    if group_size < world_size:
        assert groups(*world, version) != groups(*world, version + 1)


def test_every_size_up_to_64_spreads_within_the_bound():
    for world_size in range(2, 65):
        for group_size in range(2, world_size + 1):
            spread = versions_until_spread(world_size, group_size, 0)
            assert spread <= propagation_bound(world_size, group_size)


@given(WORLD_SIZES)
def test_activation_reaches_every_rank_once_from_every_root(world_size):
    for root in range(world_size):
        reached, frontier = [root], [(root, -1)]
        while frontier:
            rank, arrived_on = frontier.pop()
            for k, (destination, _) in enumerate(activation_peers(rank, world_size)):
                if k > arrived_on:
                    reached.append(destination)
                    frontier.append((destination, k))
        assert set(reached) == set(range(world_size))
        if world_size & (world_size - 1) == 0:
            assert len(reached) == world_size


@given(WORLD_SIZES)
def test_a_destination_receives_from_its_sender_on_the_same_dimension(world_size):
    for rank in range(world_size):
        for k, (destination, source) in enumerate(activation_peers(rank, world_size)):
            assert activation_peers(destination, world_size)[k][1] == rank
            assert activation_peers(source, world_size)[k][0] == rank


def test_one_rank_is_one_group_and_has_no_peers():
    assert groups(1, 1, 5) == [(0,)]
    assert activation_peers(0, 1) == []


def test_group_size_one_exchanges_nothing():
    assert groups(5, 1, 3) == [(0,), (1,), (2,), (3,), (4,)]


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (groups, (4, 0, 0), "group size 0"),
        (groups, (4, 5, 0), "group size 5"),
        (groups, (0, 1, 0), "world size 0"),
        (groups, (4, 2, -1), "version -1"),
        (group_of, (4, 4, 2, 0), "rank 4"),
        (group_of, (-1, 4, 2, 0), "rank -1"),
        (activation_peers, (2, 2), "rank 2"),
        (propagation_bound, (4, 1), "group size 1"),
    ],
)
def test_arguments_out_of_range_are_named(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)
