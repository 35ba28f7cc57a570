"""Methods in simulated time: the network's model, the methods' walls, and the steps' lengths."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peer_network import (
    neighbor_average,
    pairwise_average,
    parameter_server,
    push_sum,
    queued_neighbor_average,
)
from protocol_messages import load_source, schedules
from simulation_reference import MessageReference, Reference

from collectives import graphs
from collectives.queue_settings import QueueSettings
from collectives.topology import default_group_size
from wagma import imbalance
from wagma.commands import simulate as command
from wagma.methods import METHODS
from wagma.methods.method import Method as Declared
from wagma.simulation import FREE, MACHINES, Machine, Settings, simulate, steps
from wagma.simulation.core import (
    Method,
    Simulation,
    allreduce_time,
    mpi_allreduce_time,
    placed_allreduce_time,
)

slicings = load_source("slicing")
FREE_MEMORY = dataclasses.replace(MACHINES["hdr"], memory=math.inf)
# Every parameter has a time of its own, in seconds, that can be told from the others' sums.
SLOW = Machine(
    latency=1000.0, overhead=10.0, gap=13.0, byte_gap=0.01, injection=20.0, ranks_per_node=2
)


def uneven(count, ranks, seed=0):
    return np.random.default_rng(seed).uniform(0.5, 1.5, (count, ranks))


class Scripted(Method):
    """Returns from every call at once; what a test lets happen later is collected."""

    def __init__(self, script=lambda simulation, rank: None):
        self.script = script
        self.happened = []

    def arrives(self, rank):
        self.script(self.simulation, rank)
        if self.simulation.ranks > 1:
            self.simulation.later(1e6, 0, rank)
        else:
            self.simulation.returns(rank)

    def happens(self, kind, rank, a, b):
        if kind == 0:
            self.simulation.returns(rank)
        else:
            self.happened.append((self.simulation.now, kind, rank, a, b))


def run(method, machine, step_times):
    simulation = Simulation(method, machine, step_times)
    simulation.run()
    return simulation


# The driver and its network


@given(st.lists(st.sampled_from((0.0, 0.5, 1.0, 1.25, 7.0)), max_size=200))
def test_what_is_to_happen_happens_in_its_time_and_in_the_order_it_was_caused(delays):
    def script(simulation, rank):
        if rank == 0:
            for number, delay in enumerate(delays):
                simulation.later(delay, 1, 0, number)

    method = Scripted(script)
    run(method, FREE, np.zeros((1, 2)))
    happened = [(now, a) for now, _, _, a, _ in method.happened]
    assert happened == sorted((delay, number) for number, delay in enumerate(delays))


def test_a_message_takes_what_loggp_says():
    method = Scripted(lambda simulation, rank: rank or simulation.send(0, 2, 101, 1, 5, 6))
    simulation = run(method, dataclasses.replace(SLOW, injection=math.inf), np.zeros((1, 4)))
    assert method.happened == [(10 + 1000 + 100 * 0.01 + 10, 1, 2, 5, 6)]
    assert simulation.messages == 1


def test_an_engine_s_messages_go_out_one_after_the_other():
    def script(simulation, rank):
        if rank == 0:
            simulation.send(0, 1, 201, 1, 0)
            simulation.send(0, 1, 1, 1, 1)

    method = Scripted(script)
    run(method, SLOW, np.zeros((1, 2)))
    # The second one begins 13 s after the first one's end, at 10 + 2 s, and is shorter.
    assert [now for now, *_ in method.happened] == [1022, 1035]
    method = Scripted(script)
    run(method, dataclasses.replace(SLOW, gap=0.0), np.zeros((1, 2)))
    # The sender is done with the second one at 20, the receiver with the first one at 1022.
    assert [now for now, *_ in method.happened] == [1022, 1032]


def test_a_node_sends_no_faster_than_its_injection_limit_and_within_it_nothing_is_limited():
    def script(simulation, rank):
        if rank < 2:
            simulation.send(rank, rank ^ 2, 2000, 1, rank)

    method = Scripted(script)
    run(method, SLOW, np.zeros((1, 4)))
    # Ranks 0 and 1 share a node, which sends 20 bytes a second: 100 s a message.
    assert [now for now, *_ in method.happened] == pytest.approx([1120, 1220])
    method = Scripted(lambda simulation, rank: rank or simulation.send(0, 1, 2000, 1))
    run(method, SLOW, np.zeros((1, 4)))
    assert [now for now, *_ in method.happened] == pytest.approx([1020 + 19.99])
    # Nor is a job limited that is on one node.
    method = Scripted(lambda simulation, rank: rank or simulation.send(0, 2, 2000, 1))
    run(method, dataclasses.replace(SLOW, ranks_per_node=9), np.zeros((1, 4)))
    assert [now for now, *_ in method.happened] == pytest.approx([1020 + 19.99])


def test_an_engine_and_a_node_receive_one_message_after_the_other():
    machine = dataclasses.replace(SLOW, ranks_per_node=1, injection=math.inf, overhead=0.0)

    def script(simulation, rank):
        if rank:
            simulation.send(rank, 0, 50_001, 1, rank)

    method = Scripted(script)
    run(method, machine, np.zeros((1, 4)))
    # Each takes 500 s, and the next begins 13 s after it.
    times = [now for now, *_ in method.happened]
    assert times == pytest.approx([1500, 1500 + 513, 1500 + 2 * 513])

    def crossing(simulation, rank):
        if rank in (2, 4):
            simulation.send(rank, rank // 4, 50_000, 1, rank)

    # From nodes of their own to the two ranks of a node, which receives 20 bytes a second.
    method = Scripted(crossing)
    run(method, dataclasses.replace(SLOW, overhead=0.0), np.zeros((1, 6)))
    assert [now for now, *_ in method.happened] == pytest.approx([3500, 6000])
    # What is sent within the node passes by.
    method = Scripted(lambda *of: crossing(*of) if of[1] else of[0].send(0, 1, 2001, 1, 0))
    run(method, dataclasses.replace(SLOW, overhead=0.0), np.zeros((1, 6)))
    assert [now for now, *_ in method.happened] == pytest.approx([1020, 3500, 6000])


def test_messages_are_received_in_the_order_in_which_they_come():
    """Rank 1 calls first for its second message, which comes long after that of rank 2."""
    machine = dataclasses.replace(SLOW, ranks_per_node=1, injection=math.inf, overhead=0.0, gap=0.0)

    def script(simulation, rank):
        if rank == 1:
            simulation.send(1, 3, 500_001, 1)
            simulation.send(1, 0, 50_001, 1)
        elif rank == 2:
            simulation.send(2, 0, 50_001, 1)

    method = Scripted(script)
    run(method, machine, np.array([[9.0, 0.0, 1.0, 9.0]]))
    assert [now for now, *_ in method.happened] == pytest.approx([1501, 6000, 6500])
    assert [rank for _, _, rank, *_ in method.happened] == [0, 3, 0]


def test_nodes_may_have_unequal_numbers_of_ranks():
    """Ranks 0 to 2 are on a node, rank 3 on another: only what leaves a node is limited."""
    machine = dataclasses.replace(SLOW, node_sizes=(3, 1))

    def script(simulation, rank):
        if rank:
            simulation.send(rank, rank ^ 2, 2000, rank)

    method = Scripted(script)
    run(method, machine, np.zeros((1, 4)))
    times = {kind: now for now, kind, *_ in method.happened}
    assert times == pytest.approx({2: 1020 + 19.99, 1: 1120, 3: 1120})
    with pytest.raises(
        ValueError, match=r"node_sizes \(3, 1\) do not add up to the number of ranks, 5"
    ):
        run(Scripted(), machine, np.zeros((1, 5)))
    with pytest.raises(ValueError, match="node_sizes must be 1 or more"):
        dataclasses.replace(SLOW, node_sizes=(3, 0))


def test_the_engine_of_a_rank_that_computes_takes_a_while_to_look():
    machine = dataclasses.replace(SLOW, response=500.0)
    method = Scripted(lambda simulation, rank: rank or simulation.send(0, 1, 1, 1))
    run(method, machine, np.array([[0.0, 5e6]]))
    assert [now for now, *_ in method.happened] == [1020 + 500]
    method = Scripted(lambda simulation, rank: rank and simulation.send(1, 0, 1, 1))
    run(method, machine, np.array([[0.0, 100.0]]))
    assert [now for now, *_ in method.happened] == [1020 + 100]


def test_an_engine_that_is_still_to_look_can_send_meanwhile():
    """Rank 1 computes until 1011; rank 0's message is there at 1010, and noticed at 1510."""
    method = Scripted(lambda simulation, rank: simulation.send(rank, 1 - rank, 1, 1))
    run(method, dataclasses.replace(SLOW, response=500.0), np.array([[0.0, 1011.0]]))
    assert [now for now, *_ in method.happened] == [1520, 1011 + 1020]


def test_a_call_that_nobody_answers_is_an_error_and_no_hang():
    class Silent(Method):
        def arrives(self, rank):
            pass

    with pytest.raises(RuntimeError, match="2 of 2 ranks wait at 1 s for something that will not"):
        run(Silent(), FREE, np.ones((3, 2)))


def test_an_error_in_a_method_is_raised():
    class Broken(Method):
        def arrives(self, rank):
            raise ZeroDivisionError(rank)

    with pytest.raises(ZeroDivisionError):
        run(Broken(), FREE, np.ones((3, 2)))


@pytest.mark.parametrize(
    "mistake, error, message",
    (
        (lambda it: it.send(0, 2, 8, 1), ValueError, "no rank 2 among 2"),
        (lambda it: it.send(-1, 0, 8, 1), ValueError, "no rank -1 among 2"),
        (lambda it: it.send(0, 1, 0, 1), ValueError, "rank 0 sends 0 bytes"),
        (lambda it: it.later(-1.0, 1, 0), ValueError, "delay -1.0 and kind 1 must be 0 or more"),
        (lambda it: it.later(math.nan, 1, 0), ValueError, "must be 0 or more"),
        (lambda it: it.later(1.0, -1, 0), ValueError, "must be 0 or more"),
        (lambda it: it.later(1.0, 1, 10**8), ValueError, "no rank 100000000 among 2"),
        (lambda it: it.returns(10**8), ValueError, "no rank 100000000 among 2"),
        (lambda it: (it.returns(0), it.returns(0)), RuntimeError, "rank 0 is not in a call at 1 s"),
        (lambda it: it.returns(0, 0, 0), ValueError, "rank 0 goes on by 0 iterations"),
    ),
)
@pytest.mark.parametrize("steps_left", (0, 1))
def test_a_method_s_mistakes_are_raised(mistake, error, message, steps_left):
    method = Scripted(lambda simulation, rank: rank or mistake(simulation))
    with pytest.raises(error, match=message):
        run(method, FREE, np.ones((1 + steps_left, 2)))


@pytest.mark.parametrize("seconds", (None, 4.5))
def test_a_rank_that_skips_iterations_makes_fewer_steps(seconds):
    class Skipping(Method):
        def arrives(self, rank):
            self.simulation.returns(rank, 0.5, 1 + 3 * rank)

    times = np.outer(np.ones(10), (1.0, 2.0))
    simulation = Simulation(Skipping(), FREE, times, seconds)
    simulation.run()
    if seconds is None:
        assert simulation.made.tolist() == [10, 3] and simulation.reached.tolist() == [10, 12]
        assert simulation.ended.tolist() == [15.0, 7.5]
    else:
        assert simulation.made.tolist() == [3, 1] and simulation.reached.tolist() == [3, 4]


@pytest.mark.parametrize("size", range(2, 18))
def test_recursive_doubling_takes_the_steps_of_its_schedule(size):
    longest = 0
    for place in range(size):
        schedule, count = schedules.Schedule(), 0
        schedule.begin(size, place)
        while not schedule.done:
            count += 1
            schedule.advance()
        longest = max(longest, count)
    machine = MACHINES["aries"]
    step = machine.latency + 2 * machine.overhead + 15 * machine.shared_byte_gap + 16 / 10e9
    assert allreduce_time(machine, size, 16) == pytest.approx(longest * step)
    assert allreduce_time(machine, size, 1 << 24, True) > longest * (1 << 24) / 9.6e9


SEND, RECEIVE, COMPUTE = "send", "receive", "compute"


class ByMessages(Method):
    """An allreduce, message by message.

    Args:
        member: returns what the rank at a place does, one after the other: (SEND, peer, tag,
            bytes), (RECEIVE, peer, tag), or (COMPUTE, seconds).
    """

    def __init__(self, member):
        self.member = member

    def begin(self):
        self.members = [self.member(rank) for rank in range(self.simulation.ranks)]
        self.came = [set() for _ in self.members]
        self.awaited = [None] * self.simulation.ranks

    def arrives(self, rank):
        self.go_on(rank)

    def happens(self, kind, rank, source, tag):
        if kind == 0:
            self.came[rank].add((source, tag))
        if kind == 1 or self.awaited[rank] in self.came[rank]:
            self.go_on(rank)

    def go_on(self, rank):
        self.awaited[rank] = None
        for action, *of in self.members[rank]:
            if action == SEND:
                peer, tag, nbytes = of
                self.simulation.send(rank, peer, nbytes, 0, rank, tag)
            elif action == COMPUTE:
                self.simulation.later(*of, 1, rank)
                return
            elif tuple(of) not in self.came[rank]:
                self.awaited[rank] = tuple(of)
                return
        self.simulation.returns(rank)


@pytest.mark.parametrize("size", (2, 3, 4, 6, 8, 13, 16))
@pytest.mark.parametrize("nbytes", (8, 4096, 1 << 18))
@pytest.mark.parametrize("name", sorted(MACHINES))
def test_the_time_of_recursive_doubling_is_that_of_its_messages(size, nbytes, name):
    machine = MACHINES[name]

    def member(rank):
        schedule = schedules.Schedule()
        schedule.begin(size, rank)
        while not schedule.done:
            if schedule.sends:
                yield SEND, schedule.peer, schedule.phase, nbytes
            if schedule.receives != schedules.NOTHING:
                yield RECEIVE, schedule.peer, schedule.phase
                yield COMPUTE, nbytes / machine.memory
            schedule.advance()

    simulation = run(ByMessages(member), machine, np.zeros((1, size)))
    taken = allreduce_time(machine, size, nbytes)
    if size & (size - 1) == 0:
        assert simulation.ended == pytest.approx(taken, rel=1e-3)
    else:  # Some steps of different members overlap, and some receive two vectors in one step.
        step = taken / (size.bit_length() + 1)
        assert taken - 1.01 * step < simulation.ended.max() < 1.25 * taken


@pytest.mark.parametrize("size", (2, 3, 4, 8, 16, 32))
@pytest.mark.parametrize("nbytes", (1 << 20, (1 << 20) + 4096, 1 << 26))
@pytest.mark.parametrize("name", sorted(MACHINES))
def test_the_time_of_slices_is_that_of_their_messages(size, nbytes, name):
    """Every member sends each other one a slice, gets one from each, and sends the means back."""
    machine = MACHINES[name]
    slicing = slicings.Slicing()
    slicing.begin(nbytes, size)

    def member(rank):
        for block in range(slicing.blocks):
            length = slicing.end(block) - block * slicing.block
            for phase in range(2):
                tag = 2 * block + phase
                for other in range(1, size):
                    yield SEND, (rank + other) % size, tag, length // size
                for other in range(1, size):
                    yield RECEIVE, (rank - other) % size, tag
                yield COMPUTE, length / 2 / machine.memory

    simulation = run(ByMessages(member), machine, np.zeros((1, size)))
    # Here a block begins once the one before has ended; in the engine they overlap.
    taken = allreduce_time(machine, size, nbytes)
    waits = 2 * slicing.blocks * (machine.latency + 2 * machine.overhead)
    adding = nbytes / machine.memory
    assert taken <= simulation.ended.max() * 1.05
    assert simulation.ended.max() <= 1.05 * (taken + waits + adding)


@pytest.mark.parametrize("size", (2, 4, 8, 16, 64))
@pytest.mark.parametrize("nbytes", (2048, 1 << 14, 1 << 24))
@pytest.mark.parametrize("name", sorted(MACHINES))
def test_the_time_of_mpi_s_allreduce_is_that_of_its_messages(size, nbytes, name):
    machine = MACHINES[name]
    halves = [nbytes >> 1 + phase for phase in range(size.bit_length() - 1)]
    if nbytes == 2048:
        phases = [(1 << phase, nbytes, nbytes) for phase in range(len(halves))]
    else:
        phases = [(size >> 1 + phase, half, half) for phase, half in enumerate(halves)]
        phases += [(away, half, 0) for away, half, _ in reversed(phases)]

    def member(rank):
        for tag, (away, length, added) in enumerate(phases):
            yield SEND, rank ^ away, tag, length
            yield RECEIVE, rank ^ away, tag
            yield COMPUTE, added / machine.memory

    simulation = run(ByMessages(member), machine, np.zeros((1, size)))
    assert simulation.ended == pytest.approx(mpi_allreduce_time(machine, size, nbytes), rel=0.01)


TWO_LEVELS = {"local_latency": 2e-7, "local_byte_gap": 1 / 40e9}
# Ranks of each node: of one, of pairs and fours, one of each, and of unequal nodes.
PLACES = ((4,), (2, 2), (4, 4), (1, 1, 1, 1), (1, 1, 2), (4, 4, 4, 4), (3, 1))


def on_nodes(name, sizes):
    """Return a machine of two levels with these nodes, for a job that fills them."""
    machine = dataclasses.replace(MACHINES[name], node_sizes=sizes, **TWO_LEVELS)
    return machine.for_job(sum(sizes))


@pytest.mark.parametrize("sizes", PLACES)
@pytest.mark.parametrize("nbytes", (1 << 20, 1 << 26))
@pytest.mark.parametrize("name", sorted(MACHINES))
def test_the_time_of_a_group_on_several_nodes_is_that_of_its_messages(sizes, nbytes, name):
    """Slices, of which some go to members on the same node, and the others share its injection."""
    machine, size = on_nodes(name, sizes), sum(sizes)
    nodes = [node for node, count in enumerate(sizes) for _ in range(count)]
    slicing = slicings.Slicing()
    slicing.begin(nbytes, size)

    def member(rank):
        for block in range(slicing.blocks):
            length = slicing.end(block) - block * slicing.block
            for phase in range(2):
                tag = 2 * block + phase
                for other in range(1, size):
                    yield SEND, (rank + other) % size, tag, length // size
                for other in range(1, size):
                    yield RECEIVE, (rank - other) % size, tag
                yield COMPUTE, length / 2 / machine.memory

    simulation = run(ByMessages(member), machine, np.zeros((1, size)))
    sharing = dict(enumerate(sizes))
    taken = placed_allreduce_time(machine, nodes, nbytes, False, sharing)
    waits = 2 * slicing.blocks * (machine.latency + 2 * machine.overhead)
    assert taken <= simulation.ended.max()
    assert simulation.ended.max() <= 1.1 * (taken + waits + nbytes / machine.memory)


@pytest.mark.parametrize("sizes", ((4,), (2, 2), (4, 4), (1, 1, 1, 1), (4, 4, 4, 4)))
@pytest.mark.parametrize("nbytes", (8, 2048, 1 << 14, 1 << 24))
@pytest.mark.parametrize("name", sorted(MACHINES))
def test_partners_on_a_node_are_faster_in_mpi_s_allreduce_and_in_doubling(sizes, nbytes, name):
    machine, size = on_nodes(name, sizes), sum(sizes)
    nodes = [node for node, count in enumerate(sizes) for _ in range(count)]
    near = [(1 << phase, nbytes >> 1 + phase) for phase in range(size.bit_length() - 1)]
    doubling = [(away, nbytes, nbytes) for away, _ in near]
    halving = [(away, half, half) for away, half in near]
    halving += [(away, half, 0) for away, half in reversed(near)]
    for phases, time in (
        (doubling, lambda: placed_allreduce_time(machine, nodes, nbytes, True)),
        (
            doubling if nbytes <= 2048 else halving,
            lambda: mpi_allreduce_time(machine, size, nbytes),
        ),
    ):

        def member(rank, phases=phases):
            for tag, (away, length, added) in enumerate(phases):
                yield SEND, rank ^ away, tag, length
                yield RECEIVE, rank ^ away, tag
                yield COMPUTE, added / machine.memory

        simulation = run(ByMessages(member), machine, np.zeros((1, size)))
        ratio = simulation.ended.max() / time()
        if 1 in (len(sizes), max(sizes)):
            assert ratio == pytest.approx(1, rel=0.01)
        else:  # A rank adds while others of its node send.
            assert 0.87 < ratio < 1.02


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_one_level_is_two_of_the_same(name):
    """Where messages within a node are as fast as between nodes, and these are not limited."""
    one = dataclasses.replace(MACHINES[name], ranks_per_node=2, injection=math.inf)
    two = dataclasses.replace(one, local_latency=one.latency, local_byte_gap=one.byte_gap)
    for nbytes in (8, 1 << 14, 10**7):
        assert mpi_allreduce_time(two, 16, nbytes) == pytest.approx(
            mpi_allreduce_time(one, 16, nbytes), rel=1e-12
        )
        for size in (2, 3, 8):
            nodes = [place // 2 for place in range(size)]
            for doubling in (False, True):
                alike = allreduce_time(one, size, nbytes, doubling)
                assert placed_allreduce_time(one, nodes, nbytes, doubling) == alike
                assert placed_allreduce_time(two, nodes, nbytes, doubling) == pytest.approx(
                    alike, rel=1e-12
                )
    times = steps.log_normal(30, 16, 0.01, 0.1, seed=0)
    for method in METHODS:
        walls = [simulate(method, times, machine, Settings(10**6)).wall for machine in (one, two)]
        assert walls[1] == pytest.approx(walls[0], rel=1e-9)


def test_a_message_within_a_node_has_times_of_its_own():
    machine = dataclasses.replace(SLOW, local_latency=100.0, local_byte_gap=0.001)
    method = Scripted(lambda simulation, rank: rank or simulation.send(0, 1, 101, 1))
    run(method, machine, np.zeros((1, 4)))
    assert [now for now, *_ in method.happened] == [pytest.approx(10 + 100 + 0.1 + 10)]
    method = Scripted(lambda simulation, rank: rank or simulation.send(0, 2, 101, 1))
    run(method, machine, np.zeros((1, 4)))
    assert [now for now, *_ in method.happened] == [pytest.approx(10 + 1000 + 101 / 20 + 10)]


def test_groups_by_node_are_faster_where_the_network_is_slower_than_a_node():
    """Ripples, 5.2: one rank of a node at a time sends over the network."""
    times = steps.log_normal(300, 16, 0.02, 0.05, seed=0)
    rates = {}
    for gap in (None, 1 / 40e9):
        machine = dataclasses.replace(MACHINES["aries"], ranks_per_node=4, local_byte_gap=gap)
        for nodes in (4, 16):
            chosen = Settings(10**8, ranks_per_node=nodes)
            rates[gap, nodes] = simulate("ripples", times, machine, chosen, 5.0).throughput
    assert rates[None, 4] < 1.1 * rates[None, 16]
    assert rates[1 / 40e9, 4] > 1.5 * rates[1 / 40e9, 16]


@pytest.mark.parametrize("nbytes", (8, 1 << 14))
def test_surplus_ranks_cost_mpi_s_allreduce_two_more_messages(nbytes):
    machine = MACHINES["aries"]
    message = machine.latency + 2 * machine.overhead + nbytes * machine.byte_gap
    more = mpi_allreduce_time(machine, 6, nbytes) - mpi_allreduce_time(machine, 4, nbytes)
    assert 2 * message <= more <= 2 * (message + nbytes / machine.memory)


@pytest.mark.parametrize("time", (allreduce_time, mpi_allreduce_time))
@pytest.mark.parametrize("size", (2, 3, 4, 8, 64, 1024))
def test_an_allreduce_moves_all_data_twice_and_not_much_more(time, size):
    machine = MACHINES["hdr"]
    assert time(machine, 1, 1 << 27) == 0
    for long in (False, True):
        times = [time(machine, size, 1 << shift) for shift in range(3 + 21 * long, 12 + 21 * long)]
        assert times == sorted(times)
    data = (1 << 27) * machine.byte_gap
    added = (1 << 27) / machine.memory
    taken = time(machine, size, 1 << 27)
    # MPICH's folds surplus ranks, which sends the vector once more there and back.
    folded = 2 * data + added if size == 3 else 0
    assert 2 * (1 - 1 / size) * data < taken < 2.1 * data + 1.1 * added + folded + 0.01
    assert taken <= time(machine, 2 * size, 1 << 27) + folded


def test_ranks_of_a_node_share_what_it_can_send():
    alone, crowded = FREE_MEMORY, dataclasses.replace(FREE_MEMORY, ranks_per_node=8)
    for time in (allreduce_time, mpi_allreduce_time):
        ratio = time(crowded, 64, 1 << 28) / time(alone, 64, 1 << 28)
        assert 5 < ratio < 8


# The methods


@pytest.mark.parametrize("ranks", (1, 2, 3, 8))
def test_allreduce_waits_for_the_slowest_at_every_step(ranks):
    times = uneven(20, ranks)
    machine = MACHINES["10gbe"]
    result = simulate("allreduce", times, machine, Settings(1 << 22))
    average = mpi_allreduce_time(machine, ranks, 1 << 22)
    assert result.wall == pytest.approx(times.max(axis=1).sum() + 20 * average)
    assert result.waited == pytest.approx(result.wall - times.sum(axis=0))


def slowest_in_each_period(times, period):
    ends = range(0, len(times), period)
    return sum(times[end : end + period].sum(axis=0).max() for end in ends)


@pytest.mark.parametrize("period", (1, 3, 10))
def test_local_sgd_waits_for_the_slowest_of_every_period(period):
    times = uneven(30, 5)
    result = simulate("local-sgd", times, FREE, Settings(1 << 22, sync_period=period))
    assert result.wall == pytest.approx(slowest_in_each_period(times, period))


@pytest.mark.parametrize("count", (4, 5))
def test_local_sgd_started_by_the_fastest_waits_for_steps_and_not_for_who_has_ended(count):
    times = np.tile([1.0, 3.0], (count, 1))
    result = simulate("local-sgd", times, FREE, Settings(1, sync_period=2, trigger="solo"))
    assert (result.waited.tolist(), result.wall) == ([2, 0], 3 * count)
    assert (result.made.tolist(), result.updates) == ([count, count], 3)


@pytest.mark.parametrize("ranks", (1, 2, 3, 7, 16, 64))
@pytest.mark.parametrize("period", (1, 4, 10))
def test_wagma_waits_for_nobody_between_synchronizations(ranks, period):
    times = uneven(40, ranks, seed=ranks)
    result = simulate("wagma", times, FREE, Settings(1 << 22, sync_period=period))
    assert result.wall == pytest.approx(slowest_in_each_period(times, period))


@pytest.mark.parametrize("ranks", (1, 2, 3, 7, 16, 64))
@pytest.mark.parametrize("group_size, groups", ((1, "changing"), (2, "fixed"), (None, "changing")))
def test_wagma_at_its_own_pace_waits_for_nobody(ranks, group_size, groups):
    """However slow some ranks are; averages take no time."""
    times = steps.log_normal(200, ranks, 1.0, 0.5, ranks)
    times[:, ::3] *= 5
    of = Settings(8, group_size=min(group_size or ranks, ranks), groups=groups, pace="own")
    result = simulate("wagma", times, FREE, of, 30.0)
    alone = [int((column.cumsum() <= 30.0).sum()) for column in times.T]
    assert result.made.tolist() == alone


def test_wagma_that_waits_for_its_group_is_allreduce_where_that_is_everybody():
    times = uneven(40, 8)
    result = simulate("wagma", times, FREE, Settings(1 << 22, group_size=8, wait="group"))
    assert result.wall == pytest.approx(times.max(axis=1).sum())
    assert result.timely_share == 1
    assert result.staleness.tolist() == [36 * 8]  # every tenth call is all ranks'


def test_fixed_groups_wait_for_their_own_members_alone():
    times = uneven(40, 4)
    chosen = {"group_size": 2, "wait": "group", "sync_period": 100}
    fixed, changing = (
        simulate("wagma", times, FREE, Settings(8, groups=groups, **chosen)).wall
        for groups in ("fixed", "changing")
    )
    pairs = times.reshape(40, 2, 2).max(axis=2).sum(axis=0)
    assert fixed == pytest.approx(pairs.max())
    assert changing > 1.01 * fixed


def test_an_average_that_overlaps_is_waited_for_a_step_later():
    times = uneven(40, 8)
    called, done = np.zeros(8), np.zeros(8)
    for number, step in enumerate(times):
        called = np.maximum(called + step, done)
        done = np.full(8, called.max())
        if (number + 1) % 10 == 0:  # all ranks average, which is waited for at once
            called = done
    chosen = {"group_size": 8, "wait": "group", "sync_period": 10}
    walls = [
        simulate("wagma", times, FREE, Settings(8, overlap=overlap, **chosen)).wall
        for overlap in (False, True)
    ]
    assert walls == pytest.approx([times.max(axis=1).sum(), done.max()])
    assert walls[1] < walls[0]


@st.composite
def machines(draw):
    machine = MACHINES[draw(st.sampled_from(sorted(MACHINES)))]
    return dataclasses.replace(
        machine,
        response=draw(st.sampled_from((0.0, 1e-5, 1e-3))),
        staging=draw(st.sampled_from((math.inf, 12e9, 1e8))),
        memory=draw(st.sampled_from((1e10, 1e7))),
        ranks_per_node=draw(st.sampled_from((1, 2, 3, 8))),
        local_latency=draw(st.sampled_from((None, None, 1e-7))),
        local_byte_gap=draw(st.sampled_from((None, None, 1e-11, 1e-9))),
    )


@given(machines() | st.just(FREE), st.integers(1, 13), st.integers(1, 15), st.data())
@settings(max_examples=150, deadline=None)
def test_wagma_decides_and_takes_as_long_as_the_reference(machine, ranks, count, data):
    """The reference checks besides that every rank executes every version once and in order."""
    chosen = Settings(
        nbytes=data.draw(st.sampled_from((1, 4096, 1 << 20, 10**7 + 3))),
        group_size=data.draw(st.integers(1, ranks)),
        sync_period=data.draw(st.sampled_from((1, 2, 3, 7, 30))),
        wait=data.draw(st.sampled_from(("nobody", "nobody", "group"))),
        doubling=data.draw(st.booleans()),
        groups=data.draw(st.sampled_from(("changing", "fixed"))),
        late=data.draw(st.sampled_from((None, "conserving", "paper"))),
    )
    scale = data.draw(st.sampled_from((1e-5, 1e-3, 0.1)))
    generator = np.random.default_rng(data.draw(st.integers(0, 1000)))
    times = scale * generator.choice((1.0, 1.5, 4.0), (count, ranks))
    if data.draw(st.booleans()):
        times *= np.exp(generator.standard_normal(times.shape))
    result = simulate("wagma", times, machine, chosen)
    expected = Reference(times, machine, chosen).run()
    assert result.wall == expected.wall
    assert result.waited.tolist() == [rank.waited for rank in expected.ranks]
    assert result.messages == expected.messages
    assert dict(enumerate(result.staleness)) == {
        age: expected.staleness[age] for age in range(len(result.staleness))
    }
    assert result.staleness.sum() == expected.staleness.total()
    assert result.timely_share == (expected.timely / expected.calls if expected.calls else 1)
    assert result.idle_share == pytest.approx(1 - times.sum() / (ranks * result.wall))


@pytest.mark.parametrize("staging", (math.inf, 2000.0))
@pytest.mark.parametrize("late", ("paper", "conserving"))
def test_the_copies_of_timely_late_and_passive_ranks_by_hand(late, staging):
    """Rank 1 is late for version 0, whose 1000 bytes take 1 s to copy, and 0.5 s to stage.

    Rank 0 keeps its vector beside the mean (paper), or the mean in its snapshot as well
    (conserving); rank 1 then also saves the vector that its application continues from.
    """
    machine = dataclasses.replace(FREE, memory=1000.0, staging=staging)
    times = np.array([[1.0, 9.0]])
    stage = 1000 / staging
    result = simulate("wagma", times, machine, Settings(1000, group_size=2, late=late))
    adding = 1.0
    timely, late_call = stage + 1 + adding + stage, 2 * (1 + stage)
    assert result.waited == pytest.approx([timely, late_call])
    # The late call comes while its version runs, which ends at 1 + stage + 2 or 3.
    times = np.array([[1.0, 2.5 + stage]])
    result = simulate("wagma", times, machine, Settings(1000, group_size=2, late=late))
    begun = 1 + stage + (late == "paper")
    ends = begun + adding + (late == "conserving")
    assert result.waited[1] == pytest.approx(ends - times[0, 1] + late_call)
    result = simulate("wagma", times, machine, Settings(1000, group_size=2, wait="group"))
    assert result.waited[1] == pytest.approx(stage + adding + stage)  # nothing is kept


@pytest.mark.parametrize("late", ("paper", "conserving"))
def test_an_average_over_all_ranks_is_written_twice_and_a_change_added_before(late):
    """Rank 1 synchronizes after version 0, whose mean has replaced what it continued from."""
    machine = dataclasses.replace(FREE, memory=1000.0)
    adding, agreeing = 1.0, 16 / 1000
    result = simulate(
        "wagma", np.array([[1.0, 9.0]]), machine, Settings(1000, sync_period=1, late=late)
    )
    assert result.wall == pytest.approx(9 + agreeing + adding + 1)
    assert simulate("allreduce", np.array([[1.0, 9.0]]), machine, Settings(1000)).wall == 10


def test_staleness_and_timeliness_of_two_ranks_by_hand():
    """Rank 1 is late for versions 0, 1 and 2, which rank 0 starts while it makes its first step.

    It contributes to them what was there before any call. When rank 0 starts version 3, rank 1 has
    published in its call 0; version 4 synchronizes.
    """
    times = np.array([[1.0, 3.5]] * 5)
    times[3, 0] = 2.0
    result = simulate("wagma", times, FREE, Settings(8, group_size=2, sync_period=5))
    assert result.staleness.tolist() == [4, 1, 1, 2]
    assert result.timely_share == 4 / 8
    assert result.wall == 17.5
    assert result.waited.tolist() == [17.5 - 6, 0]


# The methods whose ranks send each other vectors


def ring_neighbors(rank, size):
    return sorted({(rank - 1) % size, (rank + 1) % size} - {rank})


ORDERS = ("parallel", "serial")
HOP = ("max_gap", "backup", "staleness", "mean", "max_skip", "skip_trigger", "mode", "order")


@st.composite
def hop_settings(draw, ranks):
    """Draw what goes together."""
    if draw(st.integers(0, 5)) == 0:
        order = draw(st.sampled_from(ORDERS))
        return {"mode": "notify-ack", "max_gap": None, "order": order, "mean": "weighted"}
    max_gap = draw(st.sampled_from((None, 1, 2, 5)))
    given = {"mode": "standard", "max_gap": max_gap, "order": draw(st.sampled_from(ORDERS))}
    given["staleness"] = draw(st.sampled_from((None, 0, 2, 7)))
    given["mean"] = draw(st.sampled_from(("weighted", "simple")))
    if max_gap is not None:
        given["backup"] = draw(st.integers(0, min(2, ranks - 1)))
        if ranks > 1 and draw(st.booleans()):
            given["backup"] = tuple(draw(st.integers(0, 1)) for _ in range(ranks))
        given["max_skip"] = draw(st.sampled_from((0, 2, 10)))
        given["skip_trigger"] = draw(st.integers(0, 3))
    return given


def messages_of(method, chosen, size):
    """Return the function that makes a method's protocol, of its source, for the reference."""
    phases = graphs.exponential_phases(size, chosen.neighbors)

    def make(port, rank, size):
        if method == "d-psgd":
            near = graphs.sources(graphs.edges_of(chosen.graph, size), rank)
            shares = [1 / (1 + len(near))] * len(near)
            return neighbor_average.NeighborAverageProtocol(
                port, rank, size, near, shares, 0.5, near, chosen.clock == "global"
            )
        if method == "sgp":
            to = [graphs.destinations(edges, rank) for edges in phases]
            into = [graphs.sources(edges, rank) for edges in phases]
            return push_sum.PushSumProtocol(port, rank, size, to, into, 1)
        if method == "ad-psgd":
            others = sorted(set(range(size)) - {rank})
            if chosen.graph is not None:
                others = graphs.sources(graphs.edges_of(chosen.graph, size), rank)
            return pairwise_average.PairwiseAverageProtocol(port, rank, size, others, chosen.seed)
        if method == "hop":
            edges = graphs.edges_of(chosen.graph or "ring-based", size)
            return queued_neighbor_average.QueuedNeighborAverageProtocol(
                port,
                rank,
                size,
                graphs.sources(edges, rank),
                graphs.destinations(edges, rank),
                **QueueSettings(**{name: getattr(chosen, name) for name in HOP}).of_rank(rank),
            )
        alone = chosen.dedicated_server
        return parameter_server.ParameterServerProtocol(
            port,
            rank,
            size,
            chosen.mode,
            size - 1 if alone else 0,
            chosen.backups + alone,
            chosen.max_age or size - alone,
            *(0.9, 0.7),
        )

    return make


@given(machines() | st.just(FREE), st.integers(1, 9), st.integers(1, 9), st.data())
@settings(max_examples=100, deadline=None)
def test_methods_of_messages_decide_and_take_as_long_as_the_reference(machine, ranks, count, data):
    method = data.draw(st.sampled_from(("d-psgd", "sgp", "ad-psgd", "parameter-server", "hop")))
    own = {"mode": data.draw(st.sampled_from(sorted(parameter_server.MODES)))}
    own["dedicated_server"] = servers = method == "parameter-server" and data.draw(st.booleans())
    if method == "hop":
        own = data.draw(hop_settings(ranks))
    chosen = Settings(
        nbytes=data.draw(st.sampled_from((1, 4096, 10**7 + 3))),
        clock=data.draw(st.sampled_from(("neighbors", "global"))),
        graph=data.draw(st.sampled_from((None, "ring-based", f"hierarchical-{ranks}"))),
        neighbors=data.draw(st.integers(1, max(1, (ranks - 1).bit_length()))),
        backups=data.draw(st.integers(0, ranks - 1)),
        max_age=data.draw(st.none() | st.integers(1, ranks)),
        local_steps=1,
        seed=data.draw(st.integers(0, 9)),
        **own,
    )
    generator = np.random.default_rng(data.draw(st.integers(0, 1000)))
    times = data.draw(st.sampled_from((1e-5, 0.1))) * generator.choice((1, 1.5, 4), (count, ranks))
    if data.draw(st.booleans()):
        times *= np.exp(generator.standard_normal(times.shape))
    result = simulate(method, times, machine, chosen)
    make = messages_of(method, chosen, ranks)
    expected = MessageReference(times, machine, chosen, make, servers).run()
    assert result.wall == expected.wall
    assert result.waited.tolist() == [rank.waited for rank in expected.ranks[:ranks]]
    assert result.made.tolist() == [rank.made for rank in expected.ranks[:ranks]]
    assert (result.reached == count).all()
    assert result.messages == expected.messages
    assert result.timely_share == 1 and result.staleness.size == 0


def ends(times, awaited):
    """Return when steps end, where step k of a rank waits for what `awaited` says of (k, rank).

    That is a list of (step, rank): for -1 steps ago and before there is nothing to wait for.
    """
    count, ranks = times.shape
    called, ended = np.zeros((2, count, ranks))
    for k in range(count):
        called[k] = times[k] + (ended[k - 1] if k else 0)
        for rank in range(ranks):
            own, others = awaited(k, rank)
            waits = [called[k, rank]]
            waits += [called[k, other] for other in own]
            waits += [ended[k - 1, other] for other in others if k]
            ended[k, rank] = max(waits)
    return ended


@pytest.mark.parametrize("ranks", (1, 2, 3, 8, 13))
def test_who_waits_for_whom_where_nothing_else_takes_time(ranks):
    """The closed forms: D-PSGD's and SGP's recurrences, and the slowest's and one's own steps."""
    times = uneven(30, ranks, seed=ranks)
    hops = [1 << i for i in range((ranks - 1).bit_length())] or [0]

    def sent_before(k, rank):
        return [], ring_neighbors(rank, ranks)

    def sent_now(k, rank):
        return [(rank - hops[k % len(hops)]) % ranks], []

    slowest, own = times.max(axis=1).sum(), times.sum(axis=0).max()
    expected = {
        ("d-psgd", "clock", "neighbors"): ends(times, sent_before).max(),
        ("d-psgd", "clock", "global"): slowest,
        ("sgp", "neighbors", 1): ends(times, sent_now).max(),
        ("ad-psgd", "seed", 7): own,
        ("parameter-server", "mode", "bsp"): slowest,
        ("parameter-server", "mode", "backup"): slowest,  # of no backups
        ("parameter-server", "mode", "asp"): own,
        ("parameter-server", "mode", "hete"): own,
        ("parameter-server", "mode", "ringmaster"): own,
        ("parameter-server", "mode", "async-local"): own,
    }
    for ((method, name, value), wall), alone in itertools.product(expected.items(), (False, True)):
        chosen = Settings(1 << 22, dedicated_server=alone, **{name: value})
        result = simulate(method, times, FREE, chosen)
        assert result.wall == pytest.approx(wall), (method, value)
        if value in ("asp", "hete", "ringmaster", "async-local"):
            assert result.waited.sum() == pytest.approx(0)


def hop_ends(times, near, gap=None, backup=0, staleness=0, order="parallel", acknowledged=False):
    """Return when Hop's steps end, from what each waits for, on a graph with edges both ways."""
    count, ranks = times.shape
    called, ended = np.zeros((2, count, ranks))

    def end(k, rank):
        return ended[k, rank] if k >= 0 else 0.0

    for k in range(count):
        called[k] = [times[k, rank] + end(k - 1, rank) for rank in range(ranks)]
        sent = [end(k - 1 - staleness, rank) for rank in range(ranks)]
        if order == "serial":
            sent = [called[k - staleness, rank] if k >= staleness else 0.0 for rank in range(ranks)]
        if acknowledged:
            used = [max((end(k - 1, peer) for peer in near[rank]), default=0) for rank in near]
            sent = np.maximum(sent, used)
        for rank in near:
            came = sorted(sent[peer] for peer in near[rank])[: len(near[rank]) - backup]
            tokens = [end(k - gap, peer) for peer in near[rank] if gap is not None]
            ended[k, rank] = max(called[k, rank], *came, *tokens, sent[rank])
    return ended[-1].max()


@pytest.mark.parametrize("graph", ("ring", "ring-based"))
@pytest.mark.parametrize("ranks", (1, 2, 3, 8, 13))
def test_hop_waits_for_updates_tokens_and_acknowledgements(ranks, graph):
    times = uneven(40, ranks, seed=ranks) ** 3
    edges = graphs.edges_of(graph, ranks)
    near = {rank: graphs.sources(edges, rank) for rank in range(ranks)}
    for chosen in (
        {},
        {"max_gap": None},
        {"max_gap": 1},
        {"max_gap": 1, "staleness": 3},
        {"max_gap": None, "staleness": 2},
        {"max_gap": 2, "backup": min(1, ranks - 1)},
        {"max_gap": 2, "backup": min(1, ranks - 1), "staleness": 1},
        {"order": "serial"},
        {"order": "serial", "max_gap": 1},
        {"order": "serial", "staleness": 2},
        {"mode": "notify-ack"},
        {"mode": "notify-ack", "order": "serial"},
    ):
        acknowledged = "mode" in chosen
        gap = max(5, chosen.get("staleness", 0) + 2)
        rules = {"max_gap": gap, "staleness": 0, "backup": 0, "order": "parallel"} | chosen
        rules |= {"gap": None if acknowledged else rules.pop("max_gap")}
        expected = hop_ends(
            times,
            near,
            **{name: rules[name] for name in ("gap", "staleness", "backup", "order")},
            acknowledged=acknowledged,
        )
        result = simulate("hop", times, FREE, Settings(8, graph=graph, **chosen))
        assert result.wall == pytest.approx(expected), chosen


def test_hop_s_straggler_skips_and_the_others_go_at_their_own_pace():
    """One step of it, of the length of 20, and then it is where the others are, or nearly."""
    times = np.ones((100, 8))
    times[:, 0] = 20
    kept = simulate("hop", times, FREE, Settings(8, max_gap=20, backup=1))
    assert kept.wall == 2000
    skipping = simulate("hop", times, FREE, Settings(8, max_gap=20, backup=1, max_skip=20))
    assert skipping.made.tolist() == [6, *7 * [100]] and skipping.reached.tolist() == 8 * [100]
    assert skipping.wall <= 121
    assert skipping.compute[0] == 6 * 20
    some = simulate("hop", times, FREE, Settings(8, max_gap=20, backup=1, max_skip=4))
    assert some.made.tolist() == [25, *7 * [100]]
    by_time = simulate("hop", times, FREE, Settings(8, max_gap=20, backup=1, max_skip=20), 50)
    assert by_time.made[0] == 2 and (by_time.reached[1:] >= 49).all()


def test_a_rank_sends_an_update_after_its_local_steps():
    times = np.array([[1.0, 4.0, 1.0]] * 12)
    chosen = Settings(8, mode="async-local", local_steps=(4, 1, 4))
    result = simulate("parameter-server", times, FREE, chosen, 12.0)
    assert result.made.tolist() == [12, 3, 12] and result.waited.sum() == 0
    assert result.messages == 2 * (3 + 3) + 1  # rank 2 has left
    with pytest.raises(ValueError, match="local_steps has 3 numbers, but there are 2 ranks"):
        simulate("parameter-server", times[:, :2], FREE, chosen)


def test_the_fastest_rank_makes_the_local_steps_and_others_as_many_in_the_same_time():
    """The first update of each rank has four; rank 1's at 16 s, and then one of every step."""
    times = np.array([[1.0, 4.0, 1.25]] * 40)
    chosen = Settings(8, mode="async-local", local_steps=4, dynamic_steps=True)
    result = simulate("parameter-server", times, FREE, chosen, 32.0)
    assert result.made.tolist() == [32, 8, 25] and result.waited.sum() == 0
    assert result.messages == 2 * ((1 + 4) + (1 + 7))  # rank 2's next updates have three


def test_a_round_does_not_wait_for_its_backups():
    """Rank 2 takes so long that its changes are dropped, and the others do not notice it."""
    times = np.array([[1.0, 1.5, 40.0]] * 10)
    for alone in (False, True):
        chosen = Settings(8, mode="backup", backups=1, dedicated_server=alone)
        result = simulate("parameter-server", times, FREE, chosen)
        assert result.waited == pytest.approx([5.0, 0.0, 0.0])


@pytest.mark.parametrize("alone", (False, True))
def test_all_changes_and_all_models_go_through_the_server_s_link(alone):
    """13 machines, 1 Gbit/s: as many models go in, and out, as there are ranks elsewhere."""
    rate = 1e8
    machine = dataclasses.replace(MACHINES["10gbe"], injection=rate, memory=math.inf)
    remote, nbytes = 12 + alone, 4 * 10**7
    taken = []
    for count in (1, 11):
        times = np.full((count, 13), 1.0)
        chosen = Settings(nbytes, dedicated_server=alone)
        taken.append(simulate("parameter-server", times, machine, chosen).wall)
    # All send at once in the first step. Later those that got the model first are the first again,
    # and a step takes one model in, after the last one has gone out.
    assert taken[0] == pytest.approx(1 + 2 * remote * nbytes / rate, rel=1e-3)
    assert taken[1] - taken[0] == pytest.approx(10 * (1 + (remote + 1) * nbytes / rate), rel=1e-3)


def test_a_server_on_a_node_of_its_own_answers_at_once_and_makes_no_steps():
    machine = dataclasses.replace(SLOW, memory=1000.0, ranks_per_node=9, response=500.0)
    result = simulate("parameter-server", np.ones((3, 1)), machine, Settings(1000))
    assert result.messages == 0
    chosen = Settings(1000, dedicated_server=True)
    result = simulate("parameter-server", np.ones((3, 1)), machine, chosen)
    under_way = 10 + 1064 / 20 + 1000 + 10
    # The server adds the change; the rank copies the model twice.
    assert result.waited == pytest.approx([3 * (under_way + 1 + under_way + 2)])
    assert result.made.tolist() == [3] and result.ranks == 1
    assert result.messages == 2 * 3 + 1


def test_a_method_s_servers_make_no_calls():
    class Asking(Scripted):
        def __init__(self):
            super().__init__(lambda simulation, rank: simulation.send(rank, 2, 8, 1))
            self.servers = 1

        def happens(self, kind, rank, a, b):
            self.simulation.returns(2)

    with pytest.raises(ValueError, match="rank 2 is a server, which makes no calls"):
        run(Asking(), SLOW, np.ones((1, 2)))


def test_what_a_message_costs_by_hand():
    """Rank 1 sends its change of 1000 bytes to the server, which has come before, and gets a model.

    Of 10 s each: o. A pass through the vector takes 1 s, and staging 0.5 s. The engine of rank 1
    stages the change; the server's, which has added its own, adds it and gets its model, and sends
    that to rank 1, which copies it twice.
    """
    machine = dataclasses.replace(SLOW, memory=1000.0, staging=2000.0, ranks_per_node=1)
    result = simulate("parameter-server", np.array([[0.0, 100.0]]), machine, Settings(1000))
    under_way = 10 + 1064 / 20 + 1000 + 10
    server = 100 + 0.5 + under_way + 1 + 1 + 0.5
    assert result.waited == pytest.approx([server, server - 100 + under_way + 2])
    assert result.messages == 3  # and that rank 1 leaves


@pytest.mark.parametrize("method", ("d-psgd", "sgp", "ad-psgd", "parameter-server", "hop"))
def test_messages_of_a_thousand_ranks(method):
    times = steps.log_normal(10, 1024, 0.5, 0.05, seed=0)
    given = {"mode": "asp"} if method == "parameter-server" else {}
    result = simulate(method, times, MACHINES["aries"], Settings(1 << 20, **given))
    assert result.messages > 10 * 1023
    assert result.wall < 1.2 * times.max(axis=1).sum()


@pytest.mark.parametrize("method", METHODS)
def test_the_same_arguments_give_the_same_result(method):
    times = steps.delayed(steps.log_normal(20, 33, 0.5, 0.1, seed=3), "random", 3)
    one, other = (simulate(method, times, MACHINES["10gbe"], Settings(1 << 20)) for _ in "ab")
    for field in dataclasses.fields(one):
        assert np.array_equal(getattr(one, field.name), getattr(other, field.name))


class Ring(Method):
    """Gossip in a ring: a rank goes on once its left neighbor's last message is there."""

    def __init__(self, settings, ranks):
        self.nbytes = settings.nbytes

    def begin(self):
        self.came = [0] * self.simulation.ranks
        self.waiting = [False] * self.simulation.ranks

    def arrives(self, rank):
        self.waiting[rank] = True
        self.simulation.send(rank, (rank + 1) % self.simulation.ranks, self.nbytes, 0)
        self.go_on(rank)

    def happens(self, kind, rank, a, b):
        self.came[rank] += 1
        self.go_on(rank)

    def go_on(self, rank):
        if self.waiting[rank] and self.came[rank]:
            self.came[rank] -= 1
            self.waiting[rank] = False
            self.simulation.returns(rank)


def test_a_method_can_be_written_in_python(monkeypatch):
    simulated = f"{__name__}.Ring"
    monkeypatch.setitem(
        METHODS, "ring", Declared("ring", "gossip", averager="", simulated=simulated)
    )
    result = simulate("ring", uneven(10, 4), MACHINES["aries"], Settings(1 << 20))
    assert result.messages == 40
    assert result.staleness.size == 0
    assert 0 < result.idle_share < 0.5


def test_a_thousand_ranks():
    times = steps.delayed(steps.log_normal(100, 1024, 0.5, 0.05, seed=0), "cloud", 0)
    result = simulate("wagma", times, MACHINES["aries"], Settings(100_000_000))
    assert result.events > 100_000
    assert slowest_in_each_period(times, 10) < result.wall < times.max(axis=1).sum()


@pytest.mark.parametrize(
    "arguments, message",
    (
        (("wagma", np.ones(3)), r"must be of shape \(steps, ranks\), not \(3,\)"),
        (("wagma", np.ones((0, 3))), "must be of shape"),
        (("wagma", [[1.0, -1.0]]), "must be finite, 0 or more, and not all"),
        (("wagma", [[1.0, math.nan]]), "must be finite, 0 or more, and not all"),
        (("wagma", [[0.0, 0.0]]), "must be finite, 0 or more, and not all"),
        (("none", [[1.0]]), "no method 'none': there are wagma, allreduce, "),
    ),
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        simulate(*arguments, FREE, Settings(8))


@pytest.mark.parametrize("group_size", (3, 4))
def test_a_group_must_fit_into_the_job(group_size):
    with pytest.raises(ValueError, match="group size"):
        simulate("wagma", np.ones((2, 2)), FREE, Settings(8, group_size=group_size))


@pytest.mark.parametrize(
    "changes, message",
    (
        ({"nbytes": 0}, "nbytes must be 1 or more, not 0"),
        ({"sync_period": -6}, "sync_period must be an integer of at least 1, not '-6'"),
        ({"group_size": 0}, "group_size must be an integer of at least 1, not '0'"),
        ({"groups": "none"}, "groups must be changing or fixed, not 'none'"),
        ({"wait": "everybody"}, "wait must be nobody or group, not 'everybody'"),
        ({"clock": "none"}, "clock must be neighbors or global, not 'none'"),
        (
            {"mode": "sync"},
            "mode must be bsp or backup or asp or hete or ringmaster or async-local, not 'sync'",
        ),
        ({"neighbors": 0}, "neighbors must be an integer of at least 1, not '0'"),
        ({"backups": -1}, "backups must be an integer of at least 0, not '-1'"),
    ),
)
def test_settings_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Settings(**{"nbytes": 8} | changes)


def test_an_option_that_no_method_has_is_refused():
    with pytest.raises(TypeError, match="no simulated method has an option 'speed'"):
        Settings(8, speed=3)


def test_what_takes_for_ever_is_refused():
    machine = dataclasses.replace(MACHINES["hdr"], memory=1e-300)
    with pytest.raises(
        ValueError, match="time of allreduce on 4 ranks exceeds the range of a float"
    ):
        simulate("allreduce", np.ones((2, 4)), machine, Settings(1 << 30))


@pytest.mark.parametrize(
    "changes, message",
    (
        ({"latency": -1.0}, "latency must be 0 or more, not -1"),
        ({"byte_gap": math.nan}, "byte_gap must be 0 or more, not nan"),
        ({"injection": 0.0}, "injection must be above 0, not 0"),
        ({"local_byte_gap": -1.0}, "local_byte_gap must be 0 or more, not -1"),
        ({"ranks_per_node": 1.5}, "ranks_per_node must be an integer, not 1.5"),
    ),
)
def test_a_machine_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MACHINES["hdr"], **changes)


# The steps' lengths


def test_steps_are_constant_or_log_normal():
    assert np.array_equal(steps.constant(3, 2, 0.5), np.full((3, 2), 0.5))
    made = steps.log_normal(2000, 8, 0.5, 0.25, seed=1)
    assert np.median(made) == pytest.approx(0.5, rel=0.02)
    assert np.log(made).std() == pytest.approx(0.25, rel=0.03)
    assert np.array_equal(made, steps.log_normal(2000, 8, 0.5, 0.25, seed=1))
    assert not np.array_equal(made, steps.log_normal(2000, 8, 0.5, 0.25, seed=2))


def test_long_tailed_steps_are_those_of_the_paper():
    """5,000 of them lie between 1.7 s and about 43.5 s, with a median below 2 s."""
    made = steps.long_tailed(5000, 8, seed=0)
    assert made.min() >= 1.7
    assert np.all(made <= 43.5)
    assert np.all(np.abs(np.median(made, axis=0) - 1.9) < 0.05)
    assert 20 < np.median(made.max(axis=0)) <= 43.5


@pytest.mark.parametrize("kind", imbalance.KINDS)
def test_injected_delays_are_those_of_training(kind):
    even = steps.log_normal(30, 8, 0.1, 0.3, seed=5)
    made = steps.delayed(even, kind, 7, scale=0.5, slow_ranks={2: 3.0})
    for step in range(30):
        for rank in range(8):
            compute = even[step, rank]
            delay = 0.5 * imbalance.delay(kind, 7, step, rank, 8, compute)
            slow = 2 * compute if rank == 2 else 0
            assert made[step, rank] == pytest.approx(compute + delay + slow)
    assert (kind == "none") == np.array_equal(made[:, 3:], even[:, 3:])


@pytest.mark.parametrize("delimiter", (" ", ","))
def test_a_recorded_table_is_taken_as_it_is_and_gone_through_again(tmp_path, delimiter):
    trace = np.round(uneven(6, 2), 6)
    path = tmp_path / "steps.txt"
    np.savetxt(path, trace, delimiter=delimiter, header="made by hand, in seconds")
    assert np.array_equal(steps.read_trace(path), trace)
    assert np.array_equal(steps.recorded(trace, 4, 2, seed=0), trace[:4])
    longer = steps.recorded(trace, 15, 5, seed=0)
    for rank in range(5):
        column = trace[:, rank % 2]
        begins = [
            np.array_equal(longer[:, rank], np.tile(np.roll(column, -begin), 3)[:15])
            for begin in range(6)
        ]
        assert any(begins) and (rank >= 2 or begins[0])


def write_metrics(run, lines_of_rank):
    for rank, lines in lines_of_rank.items():
        (run / f"rank-{rank:04}.jsonl").write_text("".join(line + "\n" for line in lines))


def test_a_run_of_training_is_a_trace(tmp_path):
    lines = {
        rank: [
            json.dumps({"compute_s": 1.0 + step, "delay_s": rank / 4})
            for step in range(4 + rank % 2)
        ]
        for rank in (0, 1, 10_000)
    }
    write_metrics(tmp_path, lines)
    made = steps.read_trace(tmp_path)
    assert made.tolist() == [[1.0 + step, 1.25 + step, 2501.0 + step] for step in range(4)]


def test_a_rank_that_made_no_steps_is_left_out_of_a_trace(tmp_path):
    line = json.dumps({"compute_s": 2.0, "delay_s": 0.5})
    write_metrics(tmp_path, {0: [], 1: 3 * [line], 2: 2 * [line]})
    assert steps.read_trace(tmp_path).tolist() == [[2.5, 2.5], [2.5, 2.5]]


@pytest.mark.parametrize(
    "content, message",
    (
        (b"", "has no steps"),
        (b"# 1.0\n\n", "has no steps"),
        (b"1.0 x", "is not a table of seconds: could not convert"),
        (b"1 2\n3", "is not a table of seconds: the number of columns changed"),
        (b"1.0 -2.0", "must hold seconds, 0 or more"),
        (b"1.0 nan", "must hold seconds, 0 or more"),
        (b"\xff\xfe", "is not a text file"),
    ),
)
def test_what_is_no_table_is_refused(content, message, tmp_path):
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path} {message}"):
        steps.read_trace(path)


@pytest.mark.parametrize(
    "line", ("", "[]", "{}", '{"compute_s": 1}', '{"compute_s": null, "delay_s": 0}', '{"comp')
)
def test_what_is_no_record_of_a_run_is_refused_by_its_line(line, tmp_path):
    write_metrics(tmp_path, {0: ['{"compute_s": 1, "delay_s": 0}', line]})
    with pytest.raises(ValueError, match="rank-0000.jsonl, line 2: no record with compute_s and"):
        steps.read_trace(tmp_path)


def test_a_directory_without_metrics_and_a_run_without_steps_are_no_traces(tmp_path):
    with pytest.raises(ValueError, match="is it a run of wagma train"):
        steps.read_trace(tmp_path)
    write_metrics(tmp_path, {0: []})
    with pytest.raises(ValueError, match="has no steps"):
        steps.read_trace(tmp_path)


# The command line names what there is without loading it.


def test_the_command_line_knows_all_machines():
    assert sorted(command.MACHINES) == sorted(MACHINES)
    numbers = [field.name for field in dataclasses.fields(Machine) if field.default != ()]
    assert list(command.MACHINE_VALUES) == numbers


def test_random_numbers_of_ranks_have_the_papers_group_size():
    for ranks in random.Random(0).sample(range(1, 5000), 50):
        size = default_group_size(ranks)
        assert size == min(ranks, 2 ** math.ceil(math.log2(ranks) / 2))
