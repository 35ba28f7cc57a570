"""Ranks that share memory keep every invariant, in whichever order their words are changed.

The invariants themselves are in `claims_model`, which checks them throughout every run.
"""

from dataclasses import dataclass

import pytest
from claims_model import (
    CALL,
    PUBLISH,
    Broken,
    Invariant,
    Rank,
    Scenario,
    claims_in_steps,
    explore,
    frozen_scenario,
    protocols,
    random_scenario,
    run_seed,
)

WaitAvoiding = protocols.WaitAvoiding
CLOSE = protocols.CLOSE
SYNCHRONIZE = protocols.SYNCHRONIZE

SEEDS_PER_BLOCK = 100


@pytest.mark.parametrize("block", range(10))
def test_random_runs_keep_every_invariant(block):
    for seed in range(block * SEEDS_PER_BLOCK, (block + 1) * SEEDS_PER_BLOCK):
        run_seed(seed)


@pytest.mark.parametrize("block", range(6))
def test_calls_return_while_other_ranks_compute_for_ever(block):
    for seed in range(block * SEEDS_PER_BLOCK, (block + 1) * SEEDS_PER_BLOCK):
        run_seed(seed, frozen_scenario)


def test_random_runs_meet_all_that_can_happen():
    met = set().union(*(run_seed(seed).met for seed in range(60)))
    assert met == {
        "timely",
        "late",
        "kept",
        "flowing",
        "alone",
        "an operation",
        "draining",
        "helped while computing",
        "an earlier one",
        "over",
        "a swap too late",
        "a fate unknown",
    }


EVERY_INTERLEAVING = {
    "one of two calls": Scenario(2, 2, ((CALL,), ()), length=2),
    "both call": Scenario(2, 2, ((CALL,), (CALL,)), length=2),
    "one calls, the other publishes": Scenario(2, 2, ((CALL,), (PUBLISH,)), length=1),
    "one calls twice": Scenario(2, 2, ((CALL, CALL), (CALL,)), conserving=True),
    "they synchronise and call": Scenario(2, 2, ((SYNCHRONIZE, CALL), (SYNCHRONIZE,)), length=1),
    "they call and close": Scenario(2, 2, ((CALL, CLOSE), (CLOSE,)), length=1),
    "two of three call": Scenario(3, 3, ((CALL,), (CALL,), ()), length=1),
    "one of three calls twice": Scenario(3, 3, ((CALL, CALL), (), ()), length=1),
    "two of three meet two": Scenario(3, 2, ((CALL, CALL), (CALL,), ()), length=1),
}


@pytest.mark.parametrize("scenario", EVERY_INTERLEAVING.values(), ids=EVERY_INTERLEAVING)
def test_every_interleaving_with_one_interruption_keeps_every_invariant(scenario):
    """A rank is taken off between two steps once, and others go on as far as they can."""
    assert explore(scenario, most=5000, switches=1) > 1000


class OpensAsItWas(Rank):
    """A part is opened as the last exchange left it described."""

    def describe(self, in_place, saves):
        if not self.opened or self.get("total") == 0:
            super().describe(in_place, saves)


class LooksTwice(Rank):
    """Whether a version has been started is seen of another number than the one that is helped."""

    def version_behind(self):
        version = yield from super().version_behind()
        return version if version < 0 else (yield from self.next())


class HelpsWhatIsOver(Rank):
    """What came before the last operation is helped on as a version."""

    def may_help(self, earlier, number):
        return earlier < number


class PublishesTooEarly(Rank):
    """A block is said to be published before it is."""

    def publish_block(self):
        handed_out = yield from self.claims.handed_out(self.number, self.first)
        near = handed_out + self.world.scenario.ahead
        if not self.given or self.published_blocks >= min(near, self.own_blocks):
            return False
        yield from self.claims.publish(self.me, self.number, self.published_blocks + 1)
        for i in self.blocks(self.own_size)[self.published_blocks]:
            self.write("snapshot", i, self.x[i])
        self.published_blocks += 1
        return True


class ReleasesBeforeTheEnd(Rank):
    """Members are released before they are told the weight."""

    def end_and_release(self, number, members, total):
        yield from self.claims.release(number, members, len(members))
        self.finish_exchange(members, total)


class ForgetsWhatWasExecuted(WaitAvoiding):
    """A version that others have executed is executed again."""

    def executed(self, version):
        pass


class TakesBackWhatRuns(WaitAvoiding):
    """The application has its vectors back although another rank has begun an exchange of them."""

    def take_back(self, running):
        super().take_back(False)


class SharesInOperations(WaitAvoiding):
    """Vectors are open to others while their rank is in an operation, too."""

    def run(self):
        if self.shares and self.vectors == protocols.IDLE and not self.waiting:
            self.vectors = protocols.SHARED
        else:
            self.execute()


def publishing_scenario(generator):
    """Parts are closed and opened again with the same number."""
    programs = [[PUBLISH] * 4 + [CALL], [PUBLISH, CALL, PUBLISH, PUBLISH], [CALL, CALL]]
    for program in programs:
        generator.shuffle(program)
    size = generator.randint(2, 3)
    generator.shuffle(programs)
    return Scenario(size, size, tuple(map(tuple, programs[:size])), length=1)


def synchronising_scenario(generator):
    """Ranks go on from an operation that others are still to be released from."""
    programs = ((SYNCHRONIZE, CALL, SYNCHRONIZE, CALL),) * 4
    return Scenario(4, 2, programs, length=generator.randint(1, 4))


def weightless_scenario(generator):
    """Some exchanges have no weight."""
    weights = [0, 0, 1, 1]
    generator.shuffle(weights)
    return Scenario(2, 2, (tuple((CALL, weight) for weight in weights),) * 2, length=1)


@dataclass(frozen=True)
class Mutant:
    """A wrong variant, of a class or of the source of Claims, and what catches it."""

    name: str
    invariants: set
    old: str = ""
    new: str = ""
    variant: type | None = None
    scenarios: object = random_scenario
    seeds: int = 100

    def run(self, seed):
        types = {"claims_type": claims_in_steps(self.old, self.new)}
        if self.variant is not None:
            part = "rank_type" if issubclass(self.variant, Rank) else "protocol_type"
            types[part] = self.variant
        run_seed(seed, self.scenarios, **types)


ALL = set(Invariant)
MUTANTS = [
    Mutant(
        "gather takes OPEN parts for begun",
        ALL,
        "if state_of(word) != OPEN:\n                    break",
        "break",
    ),
    Mutant(
        "gather takes CLOSED for begun",
        ALL,
        """                if state_of(word) == CLOSED:
                    self.missing = members[i]
                    return MISSING
""",
        """                if state_of(word) == CLOSED:
                    break
""",
    ),
    Mutant("gather's first does not check CLOSED", ALL, " or state_of(word) == CLOSED:", ":"),
    Mutant(
        "gather begins whatever number there is",
        ALL,
        "if number_of(word) < number or state_of(word) == CLOSED",
        "if state_of(word) == CLOSED",
    ),
    Mutant(
        "take of an old number",
        ALL,
        "            if old >> BLOCK_BITS > number:\n                return -1\n",
        "",
    ),
    Mutant(
        "take without care",
        ALL,
        "            if self.swap(first, HANDED_OUT, old, (number << BLOCK_BITS) + block + 1):\n                return block",
        "            self.swap(first, HANDED_OUT, old, (number << BLOCK_BITS) + block + 1)\n            return block",
    ),
    Mutant(
        "end does not reset",
        ALL,
        "            if old >> BLOCK_BITS == number:\n                ended = old",
        "            if True:\n                ended = old",
    ),
    Mutant(
        "end counts on",
        ALL,
        "            if old >> BLOCK_BITS == number:\n                ended = old - (number << BLOCK_BITS)",
        "            ended = old & ((1 << BLOCK_BITS) - 1)",
    ),
    Mutant(
        "end without care",
        ALL,
        "            if self.swap(first, ENDED, old, (number << BLOCK_BITS) + ended + 1):\n                return ended + 1 == blocks",
        "            self.swap(first, ENDED, old, (number << BLOCK_BITS) + ended + 1)\n            return ended + 1 == blocks",
    ),
    Mutant(
        "block after counting",
        ALL,
        "        old: cython.ulonglong = self.load(first, BLOCKS + block)\n        self.swap(first, BLOCKS + block, old, word_of(number, fate))\n        while",
        "        while",
    ),
    Mutant(
        "release opens KEPT",
        ALL,
        "OPEN if state_of(old) == TAKEN else CLOSED",
        "CLOSED if state_of(old) == FLOWING else OPEN",
    ),
    Mutant("release closes TAKEN", ALL, "OPEN if state_of(old) == TAKEN else CLOSED", "CLOSED"),
    Mutant(
        "release once",
        ALL,
        "                if self.swap(members[i], PART, old, word_of(number + 1, after)):\n                    break",
        "                self.swap(members[i], PART, old, word_of(number + 1, after))\n                break",
    ),
    Mutant("close ignores TAKEN", ALL, "if state != OPEN and state != TAKEN:", "if state != OPEN:"),
    Mutant("close closes TAKEN", ALL, "CLOSED if state == OPEN else KEPT", "CLOSED"),
    Mutant(
        "close once",
        ALL,
        "            if self.swap(rank, PART, old, closed):\n                return closed",
        "            self.swap(rank, PART, old, closed)\n            return closed",
    ),
    Mutant("published ignores FLOWING", ALL, "if self.state(members[i]) == FLOWING:", "if False:"),
    Mutant(
        "published takes an old count",
        ALL,
        "                if word >> BLOCK_BITS == number:\n                    count = word - (number << BLOCK_BITS)",
        "                count = word & ((1 << BLOCK_BITS) - 1)",
    ),
    Mutant(
        "handed_out old",
        ALL,
        "        if word >> BLOCK_BITS != number:\n            return 0\n",
        "",
    ),
    Mutant(
        "fate takes old",
        ALL,
        "        if number_of(word) < number:\n            return PENDING\n",
        "",
    ),
    Mutant(
        "fate takes new",
        ALL,
        "        if number_of(word) > number:\n            return UNKNOWN\n",
        "",
    ),
    Mutant(
        "fate never unknown", ALL, "            return UNKNOWN\n", "            return PENDING\n"
    ),
    *[
        Mutant(v.__name__, ALL, variant=v)
        for v in (
            OpensAsItWas,
            LooksTwice,
            HelpsWhatIsOver,
            PublishesTooEarly,
            ReleasesBeforeTheEnd,
            ForgetsWhatWasExecuted,
            TakesBackWhatRuns,
            SharesInOperations,
        )
    ],
]
