"""Slots are read before they are filled again, in whichever order ranks load and store words.

Every load and store is a step, and so is every access to a vector. Accesses to vectors must be
ordered by what their ranks have read of each other's words, as in C. Groups change from exchange to
exchange, some of them go another way, and an application may stand still for ever.
"""

import enum
import itertools
import random

import pytest
from claims_model import STEP, in_steps
from protocol_messages import Violation, require

WAIT = "wait"
EXCHANGES = 6
MOST_STEPS = 4000
SEEDS = 300

slots = in_steps("slots", others=("self.port.fill", "self.port.average"))
SlotsProtocol = slots.SlotsProtocol


class Invariant(enum.Enum):
    """What must hold in every run."""

    ORDERED = "accesses to memory are ordered by words"
    MEAN = "a mean is of what the members gave to its exchange"
    ENDS = "nobody waits but for a rank that stands still"


class World:
    """Some ranks, their words and vectors, and the exchanges that they all enter.

    Args:
        seed: of the numbers of ranks and exchanges, the groups, the order of steps, and which rank
            stands still, if any.
        make: function that makes a rank's protocol.
    """

    def __init__(self, seed, make=SlotsProtocol):
        self.random = random.Random(seed)
        self.size = self.random.choice((2, 3, 4, 5))
        ranks = range(self.size)
        self.words = [{} for _ in ranks]
        self.word_clocks = [{} for _ in ranks]
        self.clocks = [[int(k == rank) for k in ranks] for rank in ranks]
        self.written, self.reads, self.data = {}, {}, {}
        self.changes = 0
        self.numbers, number = [], 0
        for _ in range(EXCHANGES):
            number += self.random.choice((1, 1, 1, 2, 3))
            self.numbers.append(number)
        self.groups = {number: self.partition() for number in self.numbers}
        self.given = {number: set() for number in self.numbers}
        self.taken = {number: set() for number in self.numbers}
        self.means = [{} for _ in ranks]
        self.stops = dict.fromkeys(ranks, MOST_STEPS)
        if self.random.random() < 0.5:
            self.stops[self.random.randrange(self.size)] = self.random.randrange(300)
        self.ranks = [Rank(self, rank, make) for rank in ranks]

    def partition(self):
        """Return the group of each rank in an exchange, but for those that go another way."""
        order = self.random.sample(range(self.size), self.size)
        bounds = sorted({0, self.size, self.random.randrange(self.size)})
        parts = [sorted(order[low:high]) for low, high in itertools.pairwise(bounds)]
        return {rank: part for part in parts if self.random.random() < 0.9 for rank in part}

    # Memory

    def load(self, by, rank, place):
        clock = self.word_clocks[rank].get(place, self.clocks[by])
        self.clocks[by][:] = map(max, self.clocks[by], clock)
        return self.words[rank].get(place, 0)

    def store(self, by, place, value):
        self.words[by][place] = value
        self.word_clocks[by][place] = tuple(self.clocks[by])
        self.clocks[by][by] += 1
        self.changes += 1

    def read(self, by, key):
        writer, time = self.written.get(key, (by, 0))
        known = self.clocks[by][writer] >= time
        require(known, Invariant.ORDERED, by, "reads", key, "without knowing of", writer)
        self.reads.setdefault(key, {})[by] = self.clocks[by][by]
        return self.data.get(key)

    def write(self, by, key, value):
        for reader, time in self.reads.pop(key, {}).items():
            known = self.clocks[by][reader] >= time
            require(known, Invariant.ORDERED, by, "writes", key, "that is read by", reader)
        self.written[key] = by, self.clocks[by][by]
        self.data[key] = value

    # Runs

    def run(self):
        """Let ranks make steps in a random order, until none can make another."""
        for step in range(MOST_STEPS):
            able = [rank for rank in self.ranks if rank.may_go_on(step)]
            if not able:
                return self.check_over(step)
            self.random.choice(able).go_on()
        raise Violation(Invariant.ENDS, f"after {MOST_STEPS} steps")

    def check_over(self, step):
        """Check that all have all means, or wait for one that stands still, or for such a one."""
        going_on = [rank for rank in self.ranks if self.stops[rank.me] > step]
        awaited = {rank.me: rank.awaited() for rank in going_on if not rank.over}
        excused = {rank.me for rank in self.ranks if self.stops[rank.me] <= step and not rank.over}
        while more := {me for me, ranks in awaited.items() if ranks & excused} - excused:
            excused |= more
        in_vain = {me: awaited[me] for me in awaited.keys() - excused}
        require(not in_vain, Invariant.ENDS, "waiting, and for whom:", in_vain)


class Rank:
    """A rank of a `World`, and the port of its protocol."""

    def __init__(self, world, me, make):
        self.world, self.me = world, me
        lists = [[0] * world.size for _ in range(slots.CURRENT + 1)]
        self.steps = make(None, me, lists)
        self.steps.attach(self)
        self.steps.load, self.steps.store = self.load, self.store
        self.over, self.number, self.seen, self.doing = False, None, -1, STEP
        self.generator = self.live()

    def live(self):
        for number in self.world.numbers:
            group = self.world.groups[number].get(self.me)
            if group is None:
                continue
            self.number = number
            yield from self.steps.begin(number, group, len(group))
            while not (yield from self.steps.progress()):
                yield WAIT
            mean = self.world.means[self.me][number]
            expected = [(number, member) for member in group for _ in range(2)]
            require(mean == expected, Invariant.MEAN, self.me, "has", mean, "not", expected)
        self.over = True

    def may_go_on(self, step):
        """Return whether this rank can do more than to look at the same words again."""
        if self.over or self.world.stops[self.me] <= step:
            return False
        return self.doing != WAIT or self.seen != self.world.changes

    def awaited(self):
        """Return which ranks have not yet done what this one waits for."""
        if self.me in self.world.given[self.number]:
            return set(self.world.groups[self.number][self.me]) - self.world.given[self.number]
        slot = self.steps.slot
        if not self.steps.sizes[slot]:
            return set()
        readers = set(self.steps.members[slot][: self.steps.sizes[slot]])
        return readers - self.world.taken[self.steps.numbers[slot]]

    def go_on(self):
        if self.doing == WAIT:
            self.seen = self.world.changes
        self.doing = next(self.generator, STEP)

    def load(self, rank, place):
        yield STEP
        return self.world.load(self.me, rank, place)

    def store(self, place, value):
        yield STEP
        done = self.world.taken if place == slots.READ else self.world.given
        done[self.number].add(self.me)
        self.world.store(self.me, place, value)

    # The port

    def has_vector(self):
        return self.world.random.random() < 0.9 or bool(self.progressed())

    def fill(self, slot):
        for part in range(2):
            yield STEP
            self.world.write(self.me, (self.me, slot, part), (self.number, self.me))

    def average(self, slot, members, size):
        mean = []
        for member in members[:size]:
            for part in range(2):
                yield STEP
                mean.append(self.world.read(self.me, (member, slot, part)))
        self.world.means[self.me][self.number] = mean

    def progressed(self):
        self.world.changes += 1


def test_every_rank_has_every_mean_or_waits_for_one_that_stands_still():
    over = 0
    for seed in range(SEEDS):
        world = World(seed)
        world.run()
        over += all(rank.over for rank in world.ranks)
    assert SEEDS / 2 < over < SEEDS  # the others had a rank that stood still


class FillsTooEarly(SlotsProtocol):
    """A slot is filled again although members of an earlier group have not read it."""

    def is_read(self):
        return True
        yield


class ForgetsOtherGroups(SlotsProtocol):
    """Only those members have to have read a slot that are in the next group, too."""

    def is_read(self):
        readers, kept = self.members[self.slot], self.members[slots.CURRENT][: self.size]
        for reader in readers[: self.sizes[self.slot]]:
            if reader in kept:
                word = yield from self.load(reader, slots.READ)
                if word <= self.numbers[self.slot]:
                    return False
        return True


class ReadsTooEarly(SlotsProtocol):
    """The last member is not waited for."""

    def have_all_filled(self):
        self.size -= 1
        found = yield from super().have_all_filled()
        self.size += 1
        return found


class TakesAnyExchange(SlotsProtocol):
    """A slot that is filled for an earlier exchange will do."""

    def have_all_filled(self):
        for member in self.members[slots.CURRENT][: self.size]:
            if not (yield from self.load(member, slots.FILLED + self.slot * slots.APART)):
                return False
        return True


class SaysItIsFilledBefore(SlotsProtocol):
    """A slot is said to be filled before it is."""

    def give(self):
        yield from self.store(slots.FILLED + self.slot * slots.APART, self.number + 1)
        yield from super().give()


class SaysItIsReadBefore(SlotsProtocol):
    """Slots are said to be read before they are."""

    def have_all_filled(self):
        found = yield from super().have_all_filled()
        if found:
            yield from self.store(slots.READ, self.number + 1)
        return found


class FreesTheOther(SlotsProtocol):
    """The other slot is thought to be read by members of any group."""

    def free_other(self):
        self.sizes[1 - self.slot] = 0
        yield from ()


class FreesIt(SlotsProtocol):
    """A slot is thought to be read once its exchange is over here."""

    def free_other(self):
        self.sizes[self.slot] = 0
        yield from ()


class WaitsForMore(SlotsProtocol):
    """A slot is filled again once its readers have read another, too."""

    def is_read(self):
        self.numbers[self.slot] += 1
        found = yield from super().is_read()
        self.numbers[self.slot] -= 1
        return found


WRONG = (
    *(FreesTheOther, FreesIt, WaitsForMore),
    *(FillsTooEarly, ForgetsOtherGroups, ReadsTooEarly, TakesAnyExchange),
    *(SaysItIsFilledBefore, SaysItIsReadBefore),
)


@pytest.mark.parametrize("make", WRONG)
def test_a_rank_that_goes_on_too_early_or_waits_too_long_is_caught(make):
    with pytest.raises(Violation):
        for seed in range(SEEDS):
            World(seed, make).run()
