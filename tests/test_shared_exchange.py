"""What ranks do in shared memory, compiled as in engines and from its source as in tests.

Their ports are recorders, which answer at random: ranks of both kinds have the same passes made, in
the same order, and leave the same words.
"""

import functools
import importlib.util
import random
from collections import Counter
from pathlib import Path

import pytest
from build_once import build_cython
from protocol_messages import load_source

claims = load_source("claims")
shared_exchange = load_source("shared_exchange", "claims")
port = load_source("shared_exchange_port")

SOURCE = Path(__file__).parent / "compiled_exchange.pyx"
AHEAD, PATIENCE = 8, 3  # of compiled ranks
BLOCKS = 12
EVENTS = 400


def is_together(number):
    """Return whether an exchange is one that all ranks enter."""
    return number % 5 == 4


def group_of(rank, number, size):
    """Return the members of a rank's exchange: all ranks, or all but one, which is alone."""
    alone = number % size
    if size == 2 or is_together(number):
        return list(range(size))
    return [rank] if rank == alone else [each for each in range(size) if each != alone]


class Recorder:
    """The port of a rank."""

    def __init__(self, generator, size, actions):
        self.random = generator
        self.size = size
        self.actions = actions
        self.tickets = 0

    def group(self, rank, number):
        self.note("find_group", rank, number)
        return group_of(rank, number, self.size)

    def find_group(self, rank, number, members):
        group = self.group(rank, number)
        members[: len(group)] = group
        return len(group)

    def blocks(self, size):
        return BLOCKS

    def begun(self):
        self.tickets += 1
        return self.note("begun", self.tickets)

    def contribute_block(self, block):
        return self.note("contribute_block", block, self.begun())

    def weigh(self, members, size=None):
        return self.note("weigh", *members[:size], self.random.choice((0.0, 1.0, 2.5)))

    def average(self, number, together, block, members, size, in_place):
        how = bool(together), bool(in_place)
        return self.note("average", number, *how, block, *members[:size], self.begun())

    def over(self, ticket):
        return self.note("over", ticket, self.random.random() < 0.8)

    def has_block(self, block):
        return self.note("has_block", block, self.random.random() < 0.8)

    def total_weight(self):
        return self.note("total_weight", self.random.choice((0.0, 1.0)))

    def end_part(self, rank, total):
        return self.note("end_part", rank, total, self.random.choice((True, False)))

    def average_counts(self, number, members, size=None):
        self.note("average_counts", number, *members[:size])

    def set_path(self, *where):
        self.note("set_path", *map(bool, where))

    def return_block(self, block, in_place):
        self.note("return_block", block, bool(in_place))

    def keep_arrays(self):
        self.note("keep_arrays")

    def withdraw(self, averaged):
        self.note("withdraw", averaged)

    def replace(self, rank):
        self.note("replace", rank)

    def progressed(self):
        self.note("progressed")

    def note(self, *action):
        self.actions.append(action)
        return action[-1]


class SourceWords(list):
    """The words of ranks of the source."""

    def __init__(self, size, blocks):
        super().__init__([0] * (claims.BLOCKS + blocks) for _ in range(size))

    def values(self):
        return list(self)


class SourceExchange(shared_exchange.SharedExchangeProtocol):
    """A rank of the source, with the methods of a compiled one."""

    def __init__(self, words, port, rank):
        places = range(shared_exchange.FIRST_BLOCK + AHEAD)
        members = [[0] * len(words) for _ in places]
        super().__init__(claims.ClaimsProtocol(words), rank, AHEAD, members, PATIENCE)
        self.attach(port)

    def begin(self, number, together, members, *options):
        super().begin(number, together, members, len(members), *options)


@functools.cache
def compiled():
    """Return the module of CompiledExchange, built where that has not been done."""
    path = f"collectives/protocols/{SOURCE.name}"  # it depends on what is declared there
    built = build_cython("exchange", SOURCE.read_text(), path, "-O0")
    spec = importlib.util.spec_from_file_location("compiled_exchange", built)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Life:
    """Some ranks that meet the events of a seed: those that an engine may report then."""

    def __init__(self, make_words, make_rank, seed):
        self.random = random.Random(seed)
        self.actions = []
        size = self.chosen(2, 3, 4)
        self.words = make_words(size, BLOCKS)
        self.ranks = [
            make_rank(self.words, Recorder(self.random, size, self.actions), rank)
            for rank in range(size)
        ]
        self.states = ["closed"] * size
        for _ in range(EVENTS):
            self.happen(self.random.randrange(size))

    def chosen(self, *options):
        return self.random.choice(options)

    def happen(self, me):
        state = self.states[me] = getattr(self, self.states[me])(self.ranks[me], me)
        self.actions.append((state, me, self.ranks[me].is_pending()))

    def closed(self, rank, me):
        number = rank.reached()
        together = is_together(number)
        if not together and self.random.random() < 0.4:
            rank.open(number)
            return "opened"
        given = self.chosen(True, True, False)
        receives = given or self.chosen(True, False)
        ringed = (given or not receives) and self.chosen(True, False)
        windowed = receives and self.chosen(True, False)
        keeps = not ringed and self.chosen(True, False)
        members = group_of(me, number, len(self.ranks))
        rank.begin(number, together, members, given, receives, ringed, windowed, keeps)
        return "averaging"

    def opened(self, rank, me):
        number = rank.reached()
        if self.random.random() < 0.7 and not is_together(number):
            self.actions.append(("helped", rank.help(me, number)))
            return "opened"
        return "averaging" if rank.close() else "closed"

    def averaging(self, rank, me):
        if self.random.random() < 0.05:
            rank.adopt()
        if self.random.random() < 0.1:
            rank.end_blocks()
        return "closed" if rank.progress() else "averaging"


def of_source(seed):
    return Life(SourceWords, SourceExchange, seed)


def of_compiled(seed):
    module = compiled()
    return Life(module.Words, module.CompiledExchange, seed)


@pytest.mark.parametrize("block", range(3))
def test_compiled_ranks_do_what_those_of_the_source_do(block):
    actions = Counter()
    for seed in range(100 * block, 100 * (block + 1)):
        source, built = of_source(seed), of_compiled(seed)
        assert source.actions == built.actions, f"seed {seed}"
        assert source.words.values() == built.words.values(), f"seed {seed}"
        actions.update(action[0] for action in source.actions)
    verbs = vars(port.SharedExchangePort).keys() - {"blocks"}
    assert {verb for verb in verbs if not verb.startswith("_") and actions[verb] < 20} == set()


class Eager(SourceExchange):
    """A rank that publishes more blocks ahead."""

    def near(self):
        return super().near() + 1


class Hasty(SourceExchange):
    """A rank that takes its arrays back from members that still use them."""

    def is_undisturbed(self):
        return super().is_undisturbed() or self.holding


@pytest.mark.parametrize("other", (Eager, Hasty))
def test_a_rank_that_decides_otherwise_is_noticed(other):
    assert any(
        Life(SourceWords, other, seed).actions != of_compiled(seed).actions for seed in range(20)
    )
