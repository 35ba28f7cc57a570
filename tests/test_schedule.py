"""The allreduce of a group: every member ends with the same sum, with every part in it once."""

import random
import struct
from collections import Counter, deque

import pytest
from protocol_messages import schedules

SIZES = range(1, 34)


def run_group(parts, add, generator):
    """Run the schedules of a group, in random order; return the sums and the messages sent."""
    members = range(len(parts))
    plans = [schedules.Schedule() for _ in members]
    sums, mail, sent = list(parts), {}, []
    for me in members:
        plans[me].begin(len(parts), me)

    def send(me):
        plan = plans[me]
        if not plan.done and plan.sends:
            mail.setdefault((me, plan.peer, plan.phase), deque()).append(sums[me])
            sent.append((me, plan.peer, plan.phase))

    def can_go_on(me):
        plan = plans[me]
        return plan.receives == schedules.NOTHING or (plan.peer, me, plan.phase) in mail

    for me in members:
        send(me)
    while unfinished := [me for me in members if not plans[me].done]:
        me = generator.choice([me for me in unfinished if can_go_on(me)])
        plan = plans[me]
        if plan.receives != schedules.NOTHING:
            incoming = mail.pop((plan.peer, me, plan.phase)).popleft()
            sums[me] = add(sums[me], incoming) if plan.receives == schedules.ADD else incoming
        plan.advance()
        send(me)
    assert not mail
    return sums, sent


@pytest.mark.parametrize("size", SIZES)
def test_everyone_ends_with_every_part_exactly_once(size):
    for seed in range(5):
        parts = [Counter([me]) for me in range(size)]
        sums, _ = run_group(parts, Counter.__add__, random.Random(seed))
        assert sums == [Counter(range(size))] * size


@pytest.mark.parametrize("size", SIZES)
def test_every_message_is_received_once_in_its_phase(size):
    _, sent = run_group([0] * size, int.__add__, random.Random(size))
    assert len(set(sent)) == len(sent)
    receives = Counter()
    for me in range(size):
        plan = schedules.Schedule()
        plan.begin(size, me)
        while not plan.done:
            if plan.receives != schedules.NOTHING:
                receives[plan.peer, me, plan.phase] += 1
            plan.advance()
    assert receives == Counter(sent)


@pytest.mark.parametrize("size", SIZES)
def test_all_members_have_the_same_sum_bit_for_bit(size):
    generator = random.Random(size)
    for _ in range(5):
        parts = [generator.uniform(-1, 1) * 10 ** generator.randint(-9, 9) for _ in range(size)]
        sums, _ = run_group(parts, float.__add__, generator)
        assert len({struct.pack("d", each) for each in sums}) == 1


@pytest.mark.parametrize("size", SIZES)
def test_a_member_exchanges_log2_times_and_a_surplus_one_folds_and_unfolds(size):
    doublings = size.bit_length() - 1
    core = 1 << doublings
    _, sent = run_group([0] * size, int.__add__, random.Random(size))
    messages = Counter(me for me, _, _ in sent)
    for me in range(size):
        folded = me < size - core
        assert messages[me] == (1 if me >= core else doublings + folded)


def test_a_schedule_can_be_begun_again():
    plan = schedules.Schedule()
    plan.begin(4, 1)
    plan.advance()
    plan.begin(3, 2)
    assert (plan.done, plan.phase, plan.peer, plan.sends) == (False, 0, 0, True)
    assert plan.receives == schedules.NOTHING


def test_a_group_of_one_has_nothing_to_do():
    plan = schedules.Schedule()
    plan.begin(1, 0)
    assert plan.done
