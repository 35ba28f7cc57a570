"""Ranks that share memory keep every invariant, in whichever order their words are changed.

The invariants themselves are in `claims_model`, which checks them throughout every run.
"""

from dataclasses import dataclass, replace

import pytest
from claims_model import (
    CALL,
    INTERRUPTED,
    PUBLISH,
    Invariant,
    Scenario,
    Script,
    SharedBlocks,
    World,
    all_ranks,
    at_once,
    claims,
    contribution,
    explore,
    frozen_scenario,
    mean_of,
    own_pace_scenario,
    partial_scenario,
    print_event,
    protocols,
    random_scenario,
    run_seed,
    shared_exchange,
    snapshots,
    types_of,
    versions_in_steps,
    waiting_scenario,
    windowed_scenario,
    withdrawing_scenario,
)
from edits import Begin, Decide, Disregard, Replace, Return, drop
from protocol_messages import Violation, run_again

SharedExchangeProtocol = shared_exchange.SharedExchangeProtocol
SnapshotProtocol = snapshots.SnapshotProtocol
WaitAvoidingProtocol = protocols.WaitAvoidingProtocol
CLOSE = all_ranks.CLOSE
SYNCHRONIZE = all_ranks.SYNCHRONIZE

SEEDS_PER_BLOCK = 100
BLOCKS = [0, *(pytest.param(n, marks=pytest.mark.extra) for n in (1, 2))]


@pytest.mark.parametrize("block", BLOCKS)
def test_random_runs_keep_every_invariant(block):
    for seed in range(block * SEEDS_PER_BLOCK, (block + 1) * SEEDS_PER_BLOCK):
        run_seed(seed)


@pytest.mark.parametrize("block", BLOCKS)
def test_calls_return_while_other_ranks_compute_for_ever(block):
    for seed in range(block * SEEDS_PER_BLOCK, (block + 1) * SEEDS_PER_BLOCK):
        run_seed(seed, frozen_scenario)


@pytest.mark.parametrize("block", BLOCKS[:2])
def test_where_versions_wait_for_their_groups_rings_keep_every_invariant(block):
    met = set()
    for seed in range(block * SEEDS_PER_BLOCK, (block + 1) * SEEDS_PER_BLOCK):
        met |= run_seed(seed, waiting_scenario).met
    assert met >= {
        *("a ring", "a slot again", "a block in place", "a block of rings alone"),
        *("interrupted", "alone", "a fate unknown"),
    }


def test_ranks_at_their_own_pace_keep_every_invariant():
    """In versions over all ranks, too, which others execute for those that compute or stop."""
    met = set().union(*(run_seed(seed, own_pace_scenario).met for seed in range(150)))
    assert met >= {"interrupted", "alone", "helped while computing", "an earlier one", "draining"}


@pytest.mark.parametrize("block", BLOCKS[:2])
def test_what_versions_leave_out_each_member_keeps(block):
    """Whoever averages a block, also for ranks that compute, and in rings."""
    met = set()
    for seed in range(block * SEEDS_PER_BLOCK, (block + 1) * SEEDS_PER_BLOCK):
        met |= run_seed(seed, partial_scenario).met
    assert met >= {
        *("a block left out", "a block left out in part", "a base left out", "a ring", "late"),
        *("kept", "helped while computing", "an earlier one", "interrupted", "an operation"),
    }


@pytest.mark.parametrize("scenarios", (windowed_scenario, withdrawing_scenario))
def test_vectors_in_windows_keep_every_invariant(scenarios):
    """Those of all ranks, or of some; exceptions end calls while others use them."""
    met = set()
    for seed in range(2 * SEEDS_PER_BLOCK):
        met |= run_seed(seed, scenarios).met
    assert met >= {
        *("a window", "interrupted", "withdrawn", "withdrawn in part", "hidden", "drained"),
        *("kept", "late", "swapped", "alone", "an operation", "helped while computing"),
    }


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
        "swapped",
    }


SEARCHED = {
    "one of two calls": Scenario(2, 2, ((CALL,), ()), length=2),
    "both call": Scenario(2, 2, ((CALL,), (CALL,)), length=2),
    "one calls, the other publishes": Scenario(2, 2, ((CALL,), (PUBLISH,)), length=1),
    "one calls twice": Scenario(2, 2, ((CALL, CALL), (CALL,)), conserving=True),
    "they synchronize and call": Scenario(2, 2, ((SYNCHRONIZE, CALL), (SYNCHRONIZE,)), length=1),
    "they call and close": Scenario(2, 2, ((CALL, CLOSE), (CLOSE,)), length=1),
    "two of three call": Scenario(3, 3, ((CALL,), (CALL,), ()), length=1),
    "one of three calls twice": Scenario(3, 3, ((CALL, CALL), (), ()), length=1),
    "two of three meet two": Scenario(3, 2, ((CALL, CALL), (CALL,), ()), length=1),
    "both wait": Scenario(2, 2, ((CALL,), (CALL,)), length=4, waits=True, ahead=1),
    "one waits no longer": Scenario(
        2, 2, ((INTERRUPTED, CALL), (CALL, CALL)), length=2, conserving=True, waits=True, ahead=1
    ),
    "one calls twice, of which the first leaves out": Scenario(
        2, 2, ((CALL, CALL), (CALL,)), length=4, conserving=True, periods=(1, 2, 2, 0)
    ),
    "both wait, a block and a half are left out": Scenario(
        2,
        2,
        ((CALL,), (CALL,)),
        length=4,
        conserving=True,
        waits=True,
        ahead=1,
        periods=(1, 0, 0, 0),
    ),
    "both wait, in windows": Scenario(
        2, 2, ((CALL,), (CALL,)), length=4, waits=True, ahead=1, windows=(0, 1)
    ),
    "the first waits no longer, in a window": Scenario(
        2, 2, ((INTERRUPTED, CALL), (CALL, CALL)), length=2, waits=True, windows=(0, 1)
    ),
    "the second waits no longer, in a window": Scenario(
        2, 2, ((CALL, CALL), (INTERRUPTED, CALL)), length=2, conserving=True, windows=(1,)
    ),
}


@pytest.mark.parametrize("scenario", SEARCHED.values(), ids=SEARCHED)
def test_the_first_interleavings_with_one_preemption_keep_every_invariant(scenario):
    """A rank is preempted between two steps once; the search ends before it has all states."""
    assert explore(scenario, most=2500, switches=1) == 2500


class OpensAsItWas(SharedBlocks):
    """A part is opened as the last exchange left it described."""

    def describe(self):
        if not self.rank.driven.opened or self.rank.get("total") == 0:
            super().describe()


class LooksTwice(versions_in_steps.VersionsProtocol):
    """Whether a version has been started is seen of another number than the one that is helped."""

    def serve_opened(self):
        version = yield from self.next_version()
        started = yield from self.is_started(version)
        return started and (yield from self.port.help((yield from self.port.reached())))


class HelpsWhatIsOver(SharedExchangeProtocol):
    """What came before the last operation is helped on as a version."""

    @at_once
    def may_help(self, earlier, number):
        return earlier < number


class PublishesTooEarly(SharedExchangeProtocol):
    """A block is said to be published before it is."""

    def contribute_block(self):
        yield from self.claims.publish(self.rank, self.number, self.copied + 1)
        yield from super().contribute_block()


class FillsItsRing(SharedExchangeProtocol):
    """As many blocks are published as if the ring had room for all."""

    def near(self):
        return (yield from self.claims.handed_out(self.number, self.first))


class ReusesOneTooEarly(SharedExchangeProtocol):
    """A block is published in the place of one that has not been returned."""

    def near(self):
        near = yield from super().near()
        return near + 1 if self.ringed else near


class AveragesItsOwnRing(SharedBlocks):
    """The ring of a member is not told from one's own."""

    def in_ring(self, member, *place):
        return super().in_ring(self.me, *place)


class AveragesWhatWasTakenBack(SharedBlocks):
    """A block is averaged in the application's vector after an interrupted call as well."""

    def own_place(self, i):
        return self.me, "x", i


class ForgetsWhatItGot(SharedBlocks):
    """What an interrupted call has got so far is not kept."""

    def keep_arrays(self):
        x, self.rank.x = self.rank.x, self.rank.given_x
        super().keep_arrays()
        self.rank.x = x


class KeepsItsWeight(SnapshotProtocol):
    """A snapshot that is not kept has weight."""

    def set_snapshot(self, filled):
        super().set_snapshot(filled)
        self.snapshot_weight = self.given_weight

    def count_once(self):
        pass


class PublishesVectors(SnapshotProtocol):
    """The vector is published although a mean has replaced the snapshot."""

    def publish(self):
        if self.state == snapshots.REPLACED:
            self.state = snapshots.RETURNED
        super().publish()


class SavesNoBase(SnapshotProtocol):
    """A mean replaces the snapshot, and what the application goes on from is nowhere."""

    def begin_version(self):
        super().begin_version()
        self.saved = contribution.NOWHERE


class PublishesNothingNew(SnapshotProtocol):
    """What is published between calls is not what the application goes on from."""

    def publish_between_calls(self):
        self.publish()
        self.published = False


class CountsMeansTwice(SnapshotProtocol):
    """A late call's vector is mixed with the mean, under the conserving rule as well."""

    def end_call(self):
        late = not self.versions.timely
        super().end_call()
        if late and self.rule.publishes_changes() and self.total != 0:
            self.vectors.absorb(self.given_weight, self.total)


class StaysOut(SnapshotProtocol):
    """A published average leaves the snapshot without weight."""

    def end_average(self):
        super().end_average()
        self.snapshot_weight = 0


class ReleasesBeforeTheEnd(SharedExchangeProtocol):
    """Members are released before they are told the weight."""

    def finish(self, number, members, size, total):
        yield from self.claims.release(number, members, size)
        yield from self.set_total(members, size, total)


class ForgetsWhatWasExecuted(WaitAvoidingProtocol):
    """A version that others have executed is executed again."""

    def executed(self, version):
        pass


class TakesBackWhatRuns(WaitAvoidingProtocol):
    """The application has its vectors back although another rank has begun an exchange of them."""

    def reclaim(self, running):
        super().reclaim(False)


class SharesInOperations(WaitAvoidingProtocol):
    """Vectors are open to others while their rank is in an operation, too."""

    def run(self):
        if self.shares and self.vectors == protocols.IDLE and not self.waiting:
            self.vectors = protocols.SHARED
        else:
            self.execute()


class ForgetsTheirCounts(versions_in_steps.VersionsProtocol):
    """What others have averaged for this rank changes its snapshot, and not its count."""

    def learn_counts(self):
        yield from ()


class CountsForItself(SharedBlocks):
    """Whoever ends an exchange averages the counts into its own part only."""

    def average_counts(self, number, members, size):
        counts = [self.of(member, "count") for member in members[:size]]
        self.world.write(self.me, (self.me, "count"), sum(counts) / size)


class AveragesWhatIsLeftOut(SharedBlocks):
    """A version averages all elements."""

    def averages_in(self, number, together):
        return self.rank.length


class LeavesOutInOperations(SharedBlocks):
    """An operation averages as much as a version of its number."""

    def averages_in(self, number, together):
        return super().averages_in(number, False)


class LeavesOutOfAll(SharedBlocks):
    """A version over all ranks leaves out as much as any other."""

    def averages_in(self, number, together):
        in_groups = replace(self.world.scenario, own_pace=False)
        return self.rank.length if together else in_groups.averaged(number + self.rank.shift)


class LeavesOutByExchanges(SharedBlocks):
    """Exchanges are counted, with operations, in place of versions."""

    def averages_in(self, number, together):
        return super().averages_in(number - (not together) * self.rank.shift, together)


class AveragesBlocksWhole(SharedBlocks):
    """A block is averaged whole if any of it is."""

    def averaged_of(self, elements, number, together):
        averaged = super().averaged_of(elements, number, together)
        return elements if averaged else averaged


class LeavesBlocksOutWhole(SharedBlocks):
    """A block is left out whole if any of it is."""

    def averaged_of(self, elements, number, together):
        averaged = super().averaged_of(elements, number, together)
        return averaged if averaged == elements else elements[:0]


class GivesMeansOfWhatIsLeftOut(SharedBlocks):
    """Those who take a mean get one of what is left out, too."""

    def keep(self, values, sources, targets):
        mean = mean_of(values, self.weights)
        super().keep([mean] * len(values), [None] * len(values), targets)


class GivesWhatTheFirstKeeps(SharedBlocks):
    """Of what is left out all members get that of the first."""

    def keep(self, values, sources, targets):
        super().keep(values[:1] * len(values), sources[:1] * len(values), targets)


class SavesNoBaseOfWhatIsLeftOut(SharedBlocks):
    """Of what is left out a rank that computes cannot tell its next change."""

    def save(self, member, i, value, averaged):
        if averaged:
            super().save(member, i, value, averaged)


class ReturnsOnlyMeans(SharedBlocks):
    """A call returns what is left out as it was given, whatever the rank has contributed."""

    def begin(self, number, together):
        super().begin(number, together)
        self.own_filled = False


class WritesAfterReturn(SharedBlocks):
    """A block has ended before its mean is in a window."""

    later = ()

    def write_window(self, *what):
        self.later = (*self.later, what)

    def progressed(self):
        super().progressed()
        later, self.later = self.later, ()
        for what in later:
            super().write_window(*what)


class UsesWhatWasShown(SharedBlocks):
    """A part that is opened still says where the last call's vector was."""

    def describe(self):
        path = [self.rank.get(field) for field in ("ringed", "takes", "shows", "gets")]
        super().describe()
        self.set_path(*path)


class SwapsWhatRuns(SnapshotProtocol):
    """A late call publishes although others still execute a version."""

    def begin_call(self):
        super().begin_call()
        if self.versions.vectors == protocols.RUNNING and self.state == snapshots.REPLACED:
            self.vectors.take_change()
            self.state = snapshots.RETURNED


class OverlooksSwaps(SharedBlocks):
    """Others take the snapshot to be where it was at first."""

    def shared_place(self, member, name, i):
        return member, name, i


class TakesBackTooLittle(SharedBlocks):
    """One more block counts as averaged where a vector is taken back."""

    def withdraw(self, averaged):
        yield from super().withdraw(averaged + 1)


def publishing_scenario(generator):
    """Parts are closed and opened again with the same number."""
    programs = [[PUBLISH] * 4 + [CALL], [PUBLISH, CALL, PUBLISH, PUBLISH], [CALL, CALL]]
    for program in programs:
        generator.shuffle(program)
    size = generator.randint(2, 3)
    generator.shuffle(programs)
    return Scenario(size, size, tuple(map(tuple, programs[:size])), length=1)


def conserving_scenario(generator):
    return replace(publishing_scenario(generator), conserving=True)


def ringed_scenario(generator):
    """All wait for their groups, which change, and no call is interrupted."""
    size = generator.choice((3, 3, 4))
    programs = ((CALL,) * generator.randint(2, 4),) * size
    length, ahead = generator.choice((2, 4, 6)), generator.choice((1, 2, 3))
    return Scenario(size, 2, programs, length=length, waits=True, ahead=ahead)


def weightless_scenario(generator):
    """Some exchanges have no weight, others have."""
    programs = []
    for _ in range(4):
        programs.append(tuple((CALL, generator.choice((0, 0, 1))) for _ in range(4)))
    return Scenario(4, 2, tuple(programs), length=1)


def weightless_windows_scenario(generator):
    """So do some of those that are withdrawn from."""
    programs = []
    for program in withdrawing_scenario(generator).programs:
        items = [item if item == CLOSE else (item[0], 0) for item in program]
        programs.append(tuple(items))
    size = len(programs)
    everyone = tuple(range(size))
    return Scenario(size, size, tuple(programs), length=6, conserving=True, windows=everyone)


@pytest.mark.parametrize(
    "scenarios",
    (
        publishing_scenario,
        conserving_scenario,
        ringed_scenario,
        weightless_scenario,
        weightless_windows_scenario,
    ),
)
def test_particular_runs_keep_every_invariant(scenarios):
    for seed in range(100):
        run_seed(seed, scenarios)


@dataclass(frozen=True)
class Mutant:
    """A wrong variant, and what catches it.

    Attributes:
        variant: see `types_of`.
        invariants: those that it breaks.
        scenarios: those in which it does, and how many seeds that takes at the most.
    """

    name: str
    variant: object
    invariants: set
    scenarios: object = random_scenario
    seeds: int = 150

    def run(self, seed):
        run_seed(seed, self.scenarios, **types_of(self.variant))


STATES = Invariant.STATES
ALL_THERE = Invariant.ALL_THERE
ONCE = Invariant.ONCE
CONTRIBUTED = Invariant.CONTRIBUTED
IN_ORDER = Invariant.IN_ORDER
RESULT = Invariant.RESULT
CONSERVED = Invariant.CONSERVED
COUNTED = Invariant.COUNTED
ORDERED = Invariant.ORDERED
ENDS = Invariant.ENDS
LEFT_OUT = Invariant.LEFT_OUT
WINDOW = Invariant.WINDOW
SWAPPED = Invariant.SWAPPED

# Variants of ClaimsProtocol.
BEGUN_IF_OPEN = Decide("ClaimsProtocol.gather", "state_of(word) != OPEN", "True")
BEGUN_IF_CLOSED = Decide("ClaimsProtocol.gather", "state_of(word) == CLOSED", "False")
BEGINS_EARLIER_ONES = Replace("ClaimsProtocol.gather", "number_of(word) < number", "False")
TAKES_WHAT_IS_OVER = Decide("ClaimsProtocol.claim", "old >> BLOCK_BITS > number", "False")
TAKES_UNSWAPPED = Disregard("ClaimsProtocol.claim", "self.swap")
ENDS_UNSWAPPED = Disregard("ClaimsProtocol.end", "self.swap")
COUNTS_ON = Begin("ClaimsProtocol.end", "ended", "old & ((1 << BLOCK_BITS) - 1)")
SAYS_NO_FATE = Replace("ClaimsProtocol.end", "word_of(number, fate)", "old")
OPENS_KEPT = Replace("ClaimsProtocol.release", "state_of(old) == TAKEN", "state_of(old) != FLOWING")
CLOSES_ALL = Begin("ClaimsProtocol.release", "after", "CLOSED")
RELEASES_UNSWAPPED = Disregard("ClaimsProtocol.release", "self.swap")
CLOSES_ONLY_OPEN = Replace("ClaimsProtocol.close", "state != TAKEN", "True")
CLOSES_TAKEN = Replace("ClaimsProtocol.close", "KEPT", "CLOSED")
CLOSES_UNSWAPPED = Disregard("ClaimsProtocol.close", "self.swap")
PUBLISHED_AT_ONCE = Decide(
    "ClaimsProtocol.published", "self.state(members[i]) in (FLOWING, RINGED)", "False"
)
OLD_COUNT = Begin("ClaimsProtocol.published", "count", "word & ((1 << BLOCK_BITS) - 1)")
OLD_HANDED_OUT = Decide("ClaimsProtocol.handed_out", "word >> BLOCK_BITS != number", "False")
OLD_FATE = Decide("ClaimsProtocol.fate", "number_of(word) < number", "False")
NEW_FATE = Replace("ClaimsProtocol.fate", "UNKNOWN", "state_of(word)")
NEW_FATE_PENDING = Replace("ClaimsProtocol.fate", "UNKNOWN", "PENDING")
RESERVES_ALONE = Return("ClaimsProtocol.gather_rings", "GATHERED")
TAKES_RESERVED = Return("ClaimsProtocol.is_reserved", "False")
TAKES_RESERVED_AND_OVER = Replace(
    "ClaimsProtocol.is_reserved", "word >> BLOCK_BITS > number", "False"
)
RESERVED_AT_FIRST = Replace("ClaimsProtocol.is_reserved", "word > none", "True")
HOLDS_NOTHING = Replace("ClaimsProtocol.hold", "(number << BLOCK_BITS) + blocks", "old")
HOLDS_EARLIER_ONES = Return("ClaimsProtocol.has_come", "True")

# Variants of SharedExchangeProtocol.
RESERVES_FOR_ITSELF = drop("SharedExchangeProtocol.reserve", "self.claims.reserve")
RESERVES_WHAT_IS_COPIED = Decide(
    "SharedExchangeProtocol.reserve", "self.next_reserved < self.copied", "False"
)
LEAVES_THE_NEXT = Decide(
    "SharedExchangeProtocol.reserve", "self.next_reserved < self.copied", "True"
)
AVERAGES_UNPUBLISHED = Decide(
    "SharedExchangeProtocol.average_reserved", "self.next_reserved >= ready", "False"
)
RETURNS_THE_RING = Replace(
    "SharedExchangeProtocol.return_next", "self.has_reserved(self.returned)", "False"
)
COPIES_RESERVED = Decide(
    "SharedExchangeProtocol.contribute_block", "self.has_reserved(self.copied)", "True"
)
LEAVES_WHAT_IS_COPIED = Return(
    "SharedExchangeProtocol.is_shared_out", "self.reserved < self.own_blocks"
)
NEVER_WITHDRAWS = Replace("SharedExchangeProtocol.adopt", "self.shows or self.gets", "False")
WITHDRAWS_WHAT_RUNS = Replace(
    "SharedExchangeProtocol.is_undisturbed",
    "self.claims.ended(self.number, self.first) == self.held",
    "True",
)
WITHDRAWS_AGAIN = drop("SharedExchangeProtocol.close", "self.gets")
WEIGHS_TOO_EARLY = Replace("SharedExchangeProtocol.withdraw", "averaged > 0", "True")
COUNTS_EMPTY_BLOCKS = Replace(
    "SharedExchangeProtocol.withdraw", "averaged if total > 0 else 0", "averaged"
)
LETS_OTHERS_GO = Decide("SharedExchangeProtocol.let_go", "self.holding", "True")
STAYS_CLOSED = Decide("SharedExchangeProtocol.let_go", "self.hidden", "False")
STAYS_OPEN = Replace(
    "SharedExchangeProtocol.is_undisturbed",
    "self.claims.change(self.rank, self.number, self.entered, CLOSED)",
    "True",
)
LOOKS_ONLY_BEFORE = Replace(
    "SharedExchangeProtocol.is_undisturbed",
    "not self.hidden or self.claims.has_come(self.first, self.number)",
    "not self.hidden",
)

MUTANTS = [
    Mutant("begun if closed", BEGUN_IF_CLOSED, {ALL_THERE, ORDERED}, publishing_scenario),
    Mutant("begins earlier ones", BEGINS_EARLIER_ONES, {ALL_THERE}),
    Mutant("takes what is over", TAKES_WHAT_IS_OVER, {ONCE}),
    Mutant("takes unswapped", TAKES_UNSWAPPED, {ONCE}),
    Mutant("ends unswapped", ENDS_UNSWAPPED, {ENDS}),
    Mutant("counts on", COUNTS_ON, {ENDS}),
    Mutant("says no fate", SAYS_NO_FATE, {ENDS}),
    Mutant("opens kept", OPENS_KEPT, {STATES}),
    Mutant("closes all", CLOSES_ALL, {STATES}),
    Mutant("releases unswapped", RELEASES_UNSWAPPED, {ENDS}, frozen_scenario),
    Mutant("closes only open", CLOSES_ONLY_OPEN, {STATES, ORDERED}),
    Mutant("closes taken", CLOSES_TAKEN, {STATES}),
    Mutant("closes unswapped", CLOSES_UNSWAPPED, {STATES, ORDERED}),
    Mutant("published at once", PUBLISHED_AT_ONCE, {CONTRIBUTED, ORDERED}),
    Mutant("old count", OLD_COUNT, {CONTRIBUTED, ORDERED}),
    Mutant("old handed out", OLD_HANDED_OUT, {ENDS}),
    Mutant("old fate", OLD_FATE, {CONTRIBUTED, RESULT, ORDERED}),
    Mutant("new fate", NEW_FATE, {RESULT}, weightless_scenario, 300),
    Mutant("new fate pending", NEW_FATE_PENDING, {ENDS}),
    Mutant("not described", OpensAsItWas, {RESULT, CONSERVED}),
    Mutant("looks twice", LooksTwice, {IN_ORDER}, publishing_scenario),
    Mutant("publishes too early", PublishesTooEarly, {ORDERED}),
    Mutant("fills its ring", FillsItsRing, {ORDERED}, waiting_scenario),
    Mutant("reuses one too early", ReusesOneTooEarly, {ORDERED}, waiting_scenario),
    Mutant("averages its own ring", AveragesItsOwnRing, {CONTRIBUTED, ORDERED}, waiting_scenario),
    *(
        Mutant(name, variant, invariants, waiting_scenario)
        for name, variant, invariants in (
            ("averages what was taken back", AveragesWhatWasTakenBack, {CONTRIBUTED, RESULT}),
            ("reserves alone", RESERVES_ALONE, {ALL_THERE}),
            ("takes what is reserved", TAKES_RESERVED, {ONCE, CONTRIBUTED, ORDERED}),
            ("reserved at first", RESERVED_AT_FIRST, {ENDS}),
            ("reserves for itself", RESERVES_FOR_ITSELF, {ONCE, CONTRIBUTED, ORDERED}),
            ("reserves what is copied", RESERVES_WHAT_IS_COPIED, {ONCE}),
            ("leaves the next", LEAVES_THE_NEXT, {ENDS}),
            ("averages what is unpublished", AVERAGES_UNPUBLISHED, {CONTRIBUTED, ORDERED}),
            ("returns the ring", RETURNS_THE_RING, {RESULT, ORDERED}),
            ("copies nothing", COPIES_RESERVED, {CONTRIBUTED, ORDERED}),
            ("leaves what is copied", LEAVES_WHAT_IS_COPIED, {ENDS}),
        )
    ),
    Mutant("takes what is reserved and over", TAKES_RESERVED_AND_OVER, {ONCE}, ringed_scenario),
    Mutant("forgets what it got", ForgetsWhatItGot, {RESULT}, waiting_scenario, 600),
    Mutant("keeps its weight", KeepsItsWeight, {CONTRIBUTED}, waiting_scenario),
    Mutant("publishes vectors", PublishesVectors, {CONSERVED}),
    Mutant("saves no base", SavesNoBase, {CONSERVED}),
    Mutant("publishes nothing new", PublishesNothingNew, {CONSERVED}, conserving_scenario),
    Mutant("counts means twice", CountsMeansTwice, {RESULT}),
    Mutant("stays out", StaysOut, {CONSERVED, RESULT}),
    Mutant("releases before the end", ReleasesBeforeTheEnd, {ORDERED, RESULT}),
    Mutant("forgets what was executed", ForgetsWhatWasExecuted, {STATES, CONSERVED}),
    Mutant("takes back what runs", TakesBackWhatRuns, {ORDERED, STATES, RESULT}),
    Mutant("shares in operations", SharesInOperations, {ENDS}),
    Mutant("forgets their counts", ForgetsTheirCounts, {COUNTED}, own_pace_scenario),
    Mutant("counts for itself", CountsForItself, {COUNTED}, own_pace_scenario),
    *(
        Mutant(name, variant, invariants, withdrawing_scenario, 300)
        for name, variant, invariants in (
            ("writes after return", WritesAfterReturn, {WINDOW}),
            ("uses what was shown", UsesWhatWasShown, {WINDOW, ORDERED}),
            ("swaps what runs", SwapsWhatRuns, {SWAPPED, ORDERED}),
            ("overlooks swaps", OverlooksSwaps, {CONTRIBUTED, RESULT}),
            ("takes back too little", TakesBackTooLittle, {CONTRIBUTED, RESULT}),
            ("holds nothing", HOLDS_NOTHING, {WINDOW, ORDERED}),
            ("holds earlier ones", HOLDS_EARLIER_ONES, {ENDS}),
            ("never withdraws", NEVER_WITHDRAWS, {WINDOW}),
            ("withdraws what runs", WITHDRAWS_WHAT_RUNS, {WINDOW, ORDERED}),
            ("weighs too early", WEIGHS_TOO_EARLY, {ORDERED}),
            ("lets others go", LETS_OTHERS_GO, {ONCE}),
            ("stays closed", STAYS_CLOSED, {ENDS}),
            ("stays open", STAYS_OPEN, {WINDOW, ORDERED}),
        )
    ),
    Mutant(
        *("counts empty blocks", COUNTS_EMPTY_BLOCKS, {CONSERVED, RESULT}),
        weightless_windows_scenario,
    ),
    *(
        Mutant(name, variant, {invariant}, partial_scenario)
        for name, variant, invariant in (
            ("averages what is left out", AveragesWhatIsLeftOut, LEFT_OUT),
            ("leaves out in operations", LeavesOutInOperations, RESULT),
            ("leaves out of all", LeavesOutOfAll, RESULT),
            ("leaves out by exchanges", LeavesOutByExchanges, LEFT_OUT),
            ("averages blocks whole", AveragesBlocksWhole, LEFT_OUT),
            ("leaves blocks out whole", LeavesBlocksOutWhole, RESULT),
            ("gives means of what is left out", GivesMeansOfWhatIsLeftOut, LEFT_OUT),
            ("gives what the first keeps", GivesWhatTheFirstKeeps, LEFT_OUT),
            ("saves no base of it", SavesNoBaseOfWhatIsLeftOut, CONSERVED),
            ("returns only means", ReturnsOnlyMeans, RESULT),
        )
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_variant_is_caught(mutant):
    for seed in range(mutant.seeds):
        try:
            mutant.run(seed)
        except Violation as broken:
            if broken.invariant in mutant.invariants:
                print(f"{mutant.name} is caught by seed {seed}: {broken}")
                return
    pytest.fail(f"{mutant.name} passes {mutant.seeds} seeds")


def test_the_command_of_a_failing_seed_replays_it(capsys):
    with pytest.raises(Violation) as caught:
        for seed in range(150):
            capsys.readouterr()
            run_seed(seed, random_scenario, print_event, **types_of(SharesInOperations))
    steps = capsys.readouterr().out
    replayed = run_again(str(caught.value))
    assert (replayed.returncode, replayed.stdout) == (1, steps)
    assert replayed.stderr.rstrip().endswith(str(caught.value))


# Runs that are told step by step: what a rank goes on to


def is_part(rank, number, state):
    return lambda world: world.part(rank) == (number, state)


def is_at(rank, function, of=None, place=None):
    """A rank is about to load or swap a word, of another and in a function."""

    def stands(world):
        names, its, at = world.ranks[rank].standing()
        return function in names and (of is None or (names[-1], its, at) == ("swap", of, place))

    return stands


def is_not_at(*arguments):
    return lambda world: not is_at(*arguments)(world)


def has_executed(rank, count):
    return lambda world: len(world.ranks[rank].executed) == count


def has_entered(rank):
    return lambda world: rank in world.entered.get(0, ())


def has_published(rank):
    return lambda world: world.words[rank].get(claims.PUBLISHED)


def is_interrupted(rank):
    return lambda world: "interrupted" in world.met and not world.ranks[rank].publishing.present


def has_held_or_withdrawn(rank):
    return lambda world: world.ranks[rank].shared.holding or world.ranks[rank].window is None


@dataclass(frozen=True)
class Tale:
    """One run, and variants that do not survive it."""

    scenario: Scenario
    turns: tuple
    mutants: tuple


THREE_OPEN = tuple((rank, is_part(rank, 0, claims.OPEN)) for rank in range(3))
TALES = {
    "a part is closed and opened again while it is claimed": Tale(
        Scenario(2, 2, ((CALL,), (PUBLISH,))),
        (
            *THREE_OPEN[:2],
            (0, is_at(0, "gather", 1, claims.PART)),
            (1, is_part(1, 0, claims.CLOSED)),
            (0, is_not_at(0, "gather", 1, claims.PART)),
            (1, is_part(1, 0, claims.OPEN)),
        ),
        (BEGUN_IF_OPEN,),
    ),
    "a part is claimed while it closes": Tale(
        Scenario(3, 3, ((CALL,), (), (CALL,)), length=3),
        (
            *THREE_OPEN,
            (2, is_at(2, "close", 2, claims.PART)),
            (0, is_part(2, 0, claims.TAKEN)),
            (2, is_part(2, 0, claims.KEPT)),
        ),
        (CLOSES_UNSWAPPED, CLOSES_TAKEN),
    ),
    "a part closes while it is released": Tale(
        Scenario(3, 3, ((CALL,), (), (CALL,)), length=3),
        (
            *THREE_OPEN,
            (0, is_at(0, "release", 2, claims.PART)),
            (2, is_part(2, 0, claims.KEPT)),
        ),
        (RELEASES_UNSWAPPED,),
    ),
    "a helper is away from before it takes until the exchange is over": Tale(
        Scenario(2, 2, ((CALL, CALL), (CALL,)), length=2),
        (
            *THREE_OPEN[:2],
            (0, is_at(0, "claim", 0, claims.HANDED_OUT)),
            (1, has_executed(1, 1)),
        ),
        (TAKES_UNSWAPPED,),
    ),
    "a helper is away until a later exchange is over": Tale(
        Scenario(2, 2, ((), (CALL, CALL)), length=2),
        (
            *THREE_OPEN[:2],
            (1, is_at(1, "claim")),
            (0, is_at(0, "claim")),
            (1, has_executed(1, 2)),
        ),
        (TAKES_WHAT_IS_OVER,),
    ),
    "a rank goes on from an operation that others are not yet released from": Tale(
        Scenario(4, 2, ((SYNCHRONIZE, CALL),) * 4, length=1),
        (
            *((rank, has_entered(rank)) for rank in range(4)),
            *((rank, has_published(rank)) for rank in range(4)),
            (3, is_at(3, "release", 1, claims.PART)),
            (0, is_at(0, "begin_version")),
        ),
        (HelpsWhatIsOver,),
    ),
    "the first member comes while another one closes its part to withdraw": Tale(
        Scenario(2, 2, ((CALL,), (INTERRUPTED,)), length=2, waits=True, windows=(1,)),
        (
            (1, is_at(1, "change", 1, claims.PART)),
            (0, is_at(0, "average")),
            (1, has_held_or_withdrawn(1)),
        ),
        (LOOKS_ONLY_BEFORE,),
    ),
    "a rank no longer waits for what others have begun, after a call in a window": Tale(
        Scenario(4, 2, ((), (CALL, INTERRUPTED), (), (CALL, CALL)), length=1, windows=(1,)),
        (
            *THREE_OPEN,
            (3, is_part(3, 0, claims.OPEN)),
            (1, is_part(1, 1, claims.OPEN)),
            (3, is_part(1, 1, claims.TAKEN)),
            (3, is_at(3, "end")),
            (1, is_interrupted(1)),
        ),
        (WITHDRAWS_AGAIN,),
    ),
}


@pytest.mark.parametrize("tale", TALES.values(), ids=TALES)
def test_what_is_told(tale):
    World(tale.scenario).run(Script(*tale.turns))
    for mutant in tale.mutants:
        with pytest.raises(Violation):
            World(tale.scenario, **types_of(mutant)).run(Script(*tale.turns))
