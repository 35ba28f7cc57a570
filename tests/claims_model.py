"""Ranks that share memory, word by word: every load and swap of a word is a step, in any order.

Each rank decides by the sources of `collectives.protocols.versions` and `shared_exchange`, and its
words change by that of `claims`. Whoever is to make the next step is chosen from outside. Vectors
are numbers modulo a prime, in which means are exact. A run that breaks an invariant raises a
`Violation` that names it. Between words, accesses to vectors must be ordered by what their ranks
have read of each other's words (as in C), whether or not the run happens to mix them up. Where an
application's vector is in a window, averages and withdrawals take several steps.

``python -m tests.claims_model SEED`` replays the random run of a seed, step by step; the message of
a run that fails says what to add for other scenarios and for variants of the protocol.
"""

from __future__ import annotations

import ast
import enum
import functools
import random
import sys
import types
from collections import deque
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from pathlib import Path

from collectives.topology import activation_peers

sys.path.insert(0, str(Path(__file__).parent))

from edits import Edit
from protocol_messages import (
    ROOT,
    all_ranks,
    contribution,
    in_place_of_the_compiled,
    load_source,
    protocol_of,
    protocols,
    rank_protocol,
    replay,
    require,
    rule_of,
    snapshots,
    telling_how_to_replay,
    version_steps,
)
from protocol_scenarios import Grouped

claims = load_source("claims")

PRIME = 2**31 - 1
MOST_STEPS = 20000
# How often a rank looks for others before it copies what it might average in place.
PATIENCE = 2

# What an application does next, besides the protocol's operations; and what it waits for.
CALL = "call"
INTERRUPTED = "a call that an exception may end"
INTERRUPTED_AVERAGE = "an average over all ranks that an exception may end"
PUBLISH = "publish"
COMPUTING = "computing"
WAITING = "waiting"

# What a rank may be told to do when it is its turn.
STEP = "step"
LOOK = "look"
GO_ON = "go on"
INTERRUPT = "interrupt"

BEGUN = (claims.TAKEN, claims.KEPT, claims.FLOWING, claims.RINGED)

# What is in a vector that holds nothing.
ANYTHING = 987654321


class Invariant(enum.Enum):
    """What must hold in every run."""

    STATES = "a part is closed and kept by its rank, taken from open, and released once, at the end"
    ALL_THERE = "a block is averaged only when all members have begun"
    ONCE = "a block is averaged once"
    CONTRIBUTED = "a mean is of what the members contributed, and changed no more"
    COMPLETE = "an exchange is released when all its blocks have ended, for its members"
    IN_ORDER = "every rank executes all versions that were started, in order"
    EPOCH = "no contribution crosses an operation"
    RESULT = "a call returns the mean of its group, and, late, what the rule makes of it"
    LEFT_OUT = "of what a version leaves out each member has what it contributed"
    CONSERVED = "the sum of all snapshots and of what is not yet published changes by updates alone"
    COUNTED = "the sum of all counts, and of what is not yet published, is the work of all calls"
    ORDERED = "accesses to memory are ordered by words"
    WINDOW = "others use a window from the announcement of its call until that has it back"
    SWAPPED = "a snapshot and a result change places only while their rank's part is closed"
    ENDS = "nobody waits for a rank that computes"


class _Steps(ast.NodeTransformer):
    """Make calls of these methods `yield from`, and the methods themselves generators.

    Args:
        methods: names of methods, of a class's own or of what it calls by one of `owners`.
        others: what else it calls that takes steps.
    """

    def __init__(self, methods, owners, others):
        self.methods = methods
        self.owners = owners
        self.others = others

    def visit_Call(self, node):
        self.generic_visit(node)
        called = node.func
        if ast.unparse(called) in self.others:
            return ast.YieldFrom(node)
        if not isinstance(called, ast.Attribute) or called.attr not in self.methods:
            return node
        return ast.YieldFrom(node) if ast.unparse(called.value) in self.owners else node

    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        if node.name in self.methods:
            node.body.append(ast.parse("if False:\n    yield").body[0])
        return node


def in_steps(*names, edit=None, owners=("self",), others=(), bases=()):
    """Return a protocol's module, the methods of its classes as generators.

    Args:
        names: the module's, after those that it is based on and whose methods are generators, too.
        edit: of the module's source.
        owners, others: see `_Steps`.
        bases: see `load_source`.
    """
    folder = ROOT / "collectives" / "protocols"
    sources = [(folder / f"{name}.py").read_text() for name in names]
    if edit is not None:
        sources[-1] = edit.apply(sources[-1])
    trees = [ast.parse(source) for source in sources]
    classes = [each for tree in trees for each in tree.body if isinstance(each, ast.ClassDef)]
    methods = {
        node.name for each in classes for node in each.body if isinstance(node, ast.FunctionDef)
    }
    for each in classes:
        _Steps(methods - {"__init__", "attach"}, owners, others).visit(each)
    made = {}
    for name, tree in zip(names, trees):
        module = types.ModuleType(f"{name}_in_steps")
        code = compile(ast.fix_missing_locations(tree), f"{name}.py in steps", "exec")
        with in_place_of_the_compiled(bases, made):
            exec(code, module.__dict__)
        made[name] = module
    return module


versions_in_steps = in_steps(
    *("rank_port", "rank", "versions"),
    owners=("self", "self.port", "self.executing", "RankProtocol"),
    bases=("all_ranks", "wait_avoiding"),
)


@cache
def exchange_in_steps(edit=None):
    """Return the module of SharedExchangeProtocol, its source edited by `edit`, if any."""
    return in_steps(
        *("claims", "shared_exchange"),
        edit=edit,
        owners=("self", "self.claims"),
        others=("self.port.average", "self.port.withdraw"),
    )


shared_exchange = exchange_in_steps()


@cache
def claims_in_steps(edit=None):
    """Return ClaimsProtocol, its methods generators that stop before each load and swap.

    Its source is edited by `edit`, if any.
    """
    module = in_steps("claims", edit=edit)

    class ClaimsProtocol(module.ClaimsProtocol):
        def __init__(self, world, rank):
            self.world = world
            self.rank = rank

        def load(self, rank, place):
            yield STEP
            return self.world.load(self.rank, rank, place)

        def swap(self, rank, place, old, new):
            yield STEP
            return self.world.swap(self.rank, rank, place, old, new)

        def gather(self, number, members, size):
            found = yield from super().gather(number, members, size)
            if found == claims.OVER:
                self.world.met.add("over")
            return found

        def end(self, number, first, block, *fate):
            self.world.exchanges[number, first].ended.add(block)
            return (yield from super().end(number, first, block, *fate))

    return ClaimsProtocol


@dataclass(frozen=True)
class Scenario(Grouped):
    """What the ranks do.

    Attributes:
        length: elements of a vector; a block is one, or more where the group is small.
        programs: of each rank: CALL, INTERRUPTED, PUBLISH, INTERRUPTED_AVERAGE, operations, each
            maybe in a tuple with a weight or the version to load.
        waits: whether each version waits for the calls of its group.
        ahead: blocks that are published before they are needed, averaged in one go, and in a ring.
        frozen: ranks that compute for ever from about a step on, without so much as a look.
        stopped: ranks whose applications compute for ever from about a step on.
        still_from: that step.
        delays: a seed for the time that activations take; None: none.
        periods: of each element, the versions from one that averages it to the next, each a
            multiple of that before; 0: only averages over all ranks do. Empty: all are 1.
        own_pace: whether ranks make any number of calls: see `protocol_scenarios.Scenario`.
        windows: ranks whose applications' vectors are in windows.
    """

    world_size: int
    group_size: int
    programs: tuple
    length: int = 2
    sync_period: int = 100
    conserving: bool = False
    waits: bool = False
    ahead: int = 2
    frozen: tuple = ()
    stopped: tuple = ()
    still_from: int = 0
    delays: int | None = None
    periods: tuple = ()
    own_pace: bool = False
    windows: tuple = ()

    def averaged(self, number):
        """Return how many elements, from the first on, the version of this number averages."""
        if not self.is_of_all(number):
            for i, period in enumerate(self.periods):
                if period == 0 or (number + 1) % period:
                    return i
        return self.length


class Ghost:
    """What is to be known of one exchange from outside.

    Attributes:
        averages: how many elements it averages.
    """

    def __init__(self, members, length, size, averages):
        self.members = members
        self.averages = averages
        self.begun = {}
        self.weights = {}
        self.means = [None] * length
        self.averaged = set()
        self.ended = set()
        self.released = set()
        self.block = max(1, length // size)
        self.blocks = -(-length // self.block)

    @property
    def weight(self):
        return sum(self.weights.values())

    def result(self, member):
        """Return what a member has after it, if it has weight."""
        return self.means[: self.averages] + self.begun[member][self.averages :]


class World:
    """Some ranks and their memory."""

    def __init__(
        self,
        scenario,
        claims_type=None,
        exchange_type=None,
        blocks_type=None,
        protocol_type=None,
        publishing_type=None,
        driven_type=None,
    ):
        self.scenario = scenario
        size = self.size = scenario.world_size
        self.claims_type = claims_type or claims_in_steps()
        self.exchange_type = exchange_type or shared_exchange.SharedExchangeProtocol
        self.blocks_type = blocks_type or SharedBlocks
        self.protocol_type = protocol_type or protocol_of(scenario)
        self.publishing_type = publishing_type or snapshots.SnapshotProtocol
        self.driven_type = driven_type or versions_in_steps.VersionsProtocol
        self.words = [{} for _ in range(size)]
        self.word_clocks = [{} for _ in range(size)]
        self.clocks = [[int(k == rank) for k in range(size)] for rank in range(size)]
        self.data = {}
        self.accesses = {}
        self.changes = 0
        self.steps = 0
        self.exchanges = {}
        self.started = {}
        self.entered = {}
        self.averages = {}
        self.channels = {}
        self.random = None if scenario.delays is None else random.Random(scenario.delays)
        self.met = set()
        self.total = [0] * scenario.length
        self.ranks = []
        for rank in range(size):
            self.ranks.append(Rank(self, rank))
        for rank in self.ranks:
            rank.advance(None)

    # Words

    def load(self, by, rank, place):
        self.see(by, self.word_clocks[rank].get(place))
        return self.words[rank].get(place, 0)

    def swap(self, by, rank, place, old, new):
        word = self.load(by, rank, place)
        if word != old:
            self.met.add("a swap too late")
            return False
        if place == claims.PART:
            self.check_part(by, rank, old, new)
        self.words[rank][place] = new
        self.word_clocks[rank][place] = tuple(self.clocks[by])
        self.clocks[by][by] += 1
        self.changes += old != new
        return True

    def part(self, rank):
        word = self.words[rank].get(claims.PART, 0)
        return claims.number_of(word), claims.state_of(word)

    # Memory between words

    def see(self, by, clock):
        """What happened before `clock` happened before whatever this rank does now."""
        if clock is not None:
            self.clocks[by][:] = map(max, self.clocks[by], clock)

    def read(self, by, key):
        writer, written, reads = self.accesses.setdefault(key, (by, 0, {}))
        require(self.clocks[by][writer] >= written, Invariant.ORDERED, by, "reads", key, writer)
        reads[by] = self.clocks[by][by]
        return self.data.get(key, ANYTHING)

    def write(self, by, key, value):
        writer, written, reads = self.accesses.get(key, (by, 0, {}))
        clock = self.clocks[by]
        require(clock[writer] >= written, Invariant.ORDERED, by, "writes", key, "after", writer)
        for reader, time in reads.items():
            require(clock[reader] >= time, Invariant.ORDERED, by, "writes", key, "read by", reader)
        self.accesses[key] = by, clock[by], {}
        self.data[key] = value

    def vector(self, rank, name):
        """Return a vector as it is, seen from outside."""
        place = placed(name, self.data[rank, "swapped"])
        return [self.data[rank, place, i] for i in range(self.scenario.length)]

    def check_window(self, by, member, number, field):
        """Check that a rank may use a member's window in an exchange: read it, or write to it."""
        opened = self.ranks[member].window
        may = opened == number and self.data[member, field]
        details = f"{by} uses {member}'s, which {field} in", opened, "in", number
        require(may, Invariant.WINDOW, *details)

    # What must hold

    def ghost(self, rank, number):
        members = self.ranks[rank].members_of(number)
        key = number, members[0]
        if key not in self.exchanges:
            averages = self.ranks[rank].averages_in(number)
            self.exchanges[key] = Ghost(members, self.scenario.length, len(members), averages)
        return self.exchanges[key]

    def check_part(self, by, rank, old, new):
        """Check a change of a rank's first word, and note what it means."""
        before, state = claims.number_of(old), claims.state_of(old)
        number, after = claims.number_of(new), claims.state_of(new)
        own = by == rank
        part = self.ranks[rank]
        if part.hidden is not None:
            # It returns, or the exchange ends as if it had.
            returns = own and number == before and after == part.hidden
            state, part.hidden = part.hidden, None
            if returns:
                return
        elif own and number == before and state in BEGUN and after == claims.CLOSED:
            require(part.shared.withdrawing, Invariant.STATES, by, "hides", before)
            self.met.add("hidden")
            part.hidden = state
            return
        if old == new:
            allowed = own
        elif state == claims.CLOSED:
            allowed = own and number >= before and after != claims.TAKEN
        elif state == claims.OPEN:
            closes = own and after == claims.CLOSED
            allowed = number == before and (closes or after == claims.TAKEN)
        elif number == before:
            allowed = own and (state, after) == (claims.TAKEN, claims.KEPT)
        else:
            next_one = claims.OPEN if state == claims.TAKEN else claims.CLOSED
            allowed = number == before + 1 and after == next_one
        change = f"{by} makes {rank}'s {before, state} {number, after}"
        require(allowed, Invariant.STATES, change)
        if after in BEGUN and state not in BEGUN:
            flows = after in (claims.FLOWING, claims.RINGED)
            self.ranks[rank].check_begin(number, flows)
        elif state in BEGUN and after not in BEGUN:
            ghost = self.ghost(rank, before)
            require(len(ghost.ended) == ghost.blocks, Invariant.COMPLETE, change)
            require(rank not in ghost.released, Invariant.COMPLETE, change)
            ghost.released.add(rank)
            self.ranks[rank].check_end(before, ghost)

    def check_conserved(self):
        """Check that the sum of what all have is what was put in, when no exchange is under way."""
        for i in range(self.scenario.length):
            there = 0
            for rank in self.ranks:
                there += rank.x[i]
                if rank.publishing.state != snapshots.UNFILLED:
                    there += self.vector(rank.me, "snapshot")[i] - rank.base[i]
            require((there - self.total[i]) % PRIME == 0, Invariant.CONSERVED, i)
        counts = sum(rank.count for rank in self.ranks)
        work = sum(rank.work for rank in self.ranks)
        require(counts == work or not self.scenario.own_pace, Invariant.COUNTED, counts, work)

    # Steps

    def options(self):
        """List who may make a step: (rank, what)."""
        return [(rank.me, what) for rank in self.ranks for what in rank.options()]

    def take(self, option):
        self.steps += 1
        require(self.steps < MOST_STEPS, Invariant.ENDS, "after", self.steps, "steps")
        rank, what = option
        self.ranks[rank].advance(what)

    def run(self, choose, watch=None):
        """Let whoever is chosen make a step, until nobody can."""
        while option := choose(self):
            if watch is not None:
                watch(option, self)
            self.take(option)
        self.check_over()
        return self

    def check_over(self):
        for rank in self.ranks:
            over = rank.over or rank.never_goes_on
            require(over, Invariant.ENDS, f"rank {rank.me} waits in {rank.doing}")
        kinds = {item for program in self.scenario.programs for item in program}
        if all(rank.left for rank in self.ranks):
            executed = [rank.executed for rank in self.ranks]
            require(all(each == executed[0] for each in executed), Invariant.IN_ORDER, executed)
        idle = all(ghost.released == set(ghost.members) for ghost in self.exchanges.values())
        # Where versions wait, one that has closed has weight 0 in those of the others.
        counts = not self.scenario.waits or len({rank.protocol.version for rank in self.ranks}) == 1
        counts = counts and (self.scenario.own_pace or all_ranks.JOIN not in kinds)
        # What was put in before a load is gone.
        detailed = [kind for kind in kinds if type(kind) is tuple]
        counts = counts and all_ranks.LOAD not in [kind for kind, _ in detailed]
        # The sum is that of the vectors where each weighs as much.
        counts = counts and all(kind == all_ranks.LOAD or weight == 1 for kind, weight in detailed)
        if self.scenario.conserving and idle and counts:
            self.check_conserved()

    def fingerprint(self):
        """Return what the rest of a run depends on."""
        parts = [rank.fingerprint() for rank in self.ranks]
        parts += [tuple(sorted(words.items())) for words in self.words]
        parts += [tuple(self.data.values()), repr(self.entered), repr(self.averages)]
        parts += [tuple(message[:2] for message in each) for each in self.channels.values()]
        return hash(tuple(parts))


def placed(name, swapped):
    """Return where a vector is: the snapshot and the result may have changed places."""
    if swapped and name in ("snapshot", "result"):
        return "result" if name == "snapshot" else "snapshot"
    return name


class Memory(contribution.Vectors):
    """A rank's vectors, of which other ranks see all but the scratch."""

    shared = {
        contribution.X: "x",
        contribution.SNAPSHOT: "snapshot",
        contribution.RESULT: "result",
    }

    def __init__(self, rank):
        self.rank = rank
        self.scratch = [0] * rank.length

    def values(self, vector):
        if vector in self.shared:
            return [self.rank.read(self.shared[vector], i) for i in range(self.rank.length)]
        return list(self.scratch)

    def put(self, vector, values):
        if vector in self.shared:
            for i, value in enumerate(values):
                self.rank.write(self.shared[vector], i, value)
        else:
            self.scratch = list(values)

    def copy(self, to, source):
        self.put(to, self.values(source))

    def zero(self, vector):
        self.put(vector, [0] * self.rank.length)

    def all_finite(self, vector):
        return True

    def is_change_finite(self):
        return True

    def changed(self):
        """Return SNAPSHOT + (X − RESULT)."""
        vectors = contribution.SNAPSHOT, contribution.X, contribution.RESULT
        parts = zip(*map(self.values, vectors))
        return [(snapshot + x - base) % PRIME for snapshot, x, base in parts]

    def add_change(self, to):
        self.put(to, self.changed())

    def take_change(self):
        values = self.changed()
        self.put(contribution.RESULT, values)
        self.put(contribution.X, values)
        self.rank.swap_vectors()
        self.put(contribution.RESULT, [ANYTHING] * self.rank.length)
        return True

    def absorb(self, own, total):
        pairs = zip(self.values(contribution.RESULT), self.values(contribution.X))
        self.put(contribution.X, [mean_of(pair, [total, own]) for pair in pairs])


def at_once(function):
    """Make a function without steps a generator."""

    @functools.wraps(function)
    def generator(*arguments):
        return function(*arguments)
        yield

    return generator


class Port:
    """Executes a rank's steps, and checks what becomes of its vectors."""

    def __init__(self, rank):
        self.rank = rank

    @at_once
    def begin_pass(self, step, moves):
        self.rank.check_before(step)

    @at_once
    def end_pass(self, step, moves):
        self.rank.check_after(step)
        return True

    @at_once
    def is_here(self):
        return True

    @at_once
    def knows_change(self):
        return True

    @at_once
    def remember(self):
        pass

    def begin_version(self, version, number):
        yield from self.rank.begin_version(version, number)

    def begin_average(self, number):
        yield from self.rank.begin_average(number)

    def is_exchanged(self):
        return (yield from self.rank.exchange_progress())

    @at_once
    def total_weight(self):
        self.rank.bypassed = self.rank.publishing.bypasses_snapshot()
        return self.rank.exchange_weight

    @at_once
    def mean_count(self):
        return self.rank.exchange_count

    @at_once
    def number_from(self, first, shift):
        self.rank.shared.oldest, self.rank.shift = first, shift

    def adopt(self):
        if self.rank.exchange == "memory":
            self.rank.blocks.kept = self.rank.publishing.bypasses_snapshot()
            yield from self.rank.shared.adopt()

    @at_once
    def redirect(self):
        pass

    @at_once
    def returns(self, in_group):
        pass

    @at_once
    def executed(self, version):
        rank = self.rank
        runs = rank.protocol.vectors == protocols.RUNNING
        if runs and rank.conserving and rank.exchange_weight != 0 and not rank.bypassed:
            rank.check_returned()

    @at_once
    def find_group(self, version):
        self.rank.members = self.rank.group(version)

    @at_once
    def is_quiet(self):
        return True

    def open(self, number):
        self.rank.blocks.describe()
        yield from self.rank.shared.open(number)

    def close(self):
        self.rank.kept = yield from self.rank.shared.close()
        return self.rank.shared.number

    @at_once
    def has_begun(self):
        if self.rank.kept:
            self.rank.world.met.add("kept")
        return self.rank.kept

    @at_once
    def closed_weight(self):
        return self.rank.look("total")

    @at_once
    def closed_count(self):
        return self.rank.look("count")

    @at_once
    def closed_average(self):
        return self.rank.look("average_number")

    @at_once
    def closed_average_count(self):
        return self.rank.look("average_count")

    @at_once
    def replaced(self):
        return self.rank.look("replaced")

    def reached(self):
        return (yield from self.rank.shared.reached())

    @at_once
    def resume(self):
        self.rank.exchange = "memory"

    def needs_messages(self, number):
        return (yield from self.rank.shared.needs_messages(number))

    @at_once
    def leaves_to_others(self):
        return False

    def help(self, number):
        helped = yield from self.rank.shared.help(self.rank.me, number)
        if helped:
            self.rank.world.met.add("helped while computing")
        return helped


class SharedBlocks:
    """The blocks of a rank's exchanges: the port of its `SharedExchangeProtocol`.

    Attributes:
        taken_over: whether the snapshot has taken the place of the application's vector.
        kept: whether it is to do so where that is in a window.
        own_averages: how many elements this rank's exchange averages; `own_filled`:
            whether it contributes a vector, rather than zeros in place of one.
        in_place: whether this rank's block of those that it averages is in the application's
            vector.
    """

    def __init__(self, rank):
        self.rank = rank
        self.world, self.me = rank.world, rank.me
        self.ahead = rank.world.scenario.ahead
        self.taken_over = self.kept = self.in_place = False
        self.own_averages = self.own_filled = 0

    def begin(self, number, together):
        """Begin this rank's exchange, whose part has been described."""
        self.taken_over = False
        self.own_averages = self.averages_in(number, together)
        self.own_filled = self.rank.get("filled")

    def averages_in(self, number, together):
        """Return how many elements, from the first on, an exchange averages."""
        if together:
            return self.rank.length
        return self.world.scenario.averaged(number + self.rank.shift)

    def describe(self):
        """Say in this rank's part what an exchange does with its vectors."""
        publishing = self.rank.publishing
        self.set_path(False, True, False, False)
        self.rank.put("in_place", publishing.is_in_place())
        self.rank.put("saves", publishing.saves_snapshot())
        self.rank.put("replaced", False)
        filled = publishing.lent or publishing.state != snapshots.UNFILLED
        self.rank.put("filled", bool(filled))
        self.rank.put("weight", publishing.weight)
        self.rank.put("weight_after", publishing.weight_after())
        self.rank.put("count", Fraction(publishing.job.count))
        self.rank.put("average_number", -1)

    def set_path(self, ringed, takes, shows, gets):
        self.rank.put("ringed", ringed)
        self.rank.put("takes", takes or self.rank.get("in_place"))
        self.rank.put("shows", shows)
        self.rank.put("gets", gets)

    def find_group(self, rank, number, members):
        """Fill in the members, which all share memory, and return how many they are."""
        if rank != self.me:
            self.world.met.add("an earlier one")
        group = self.world.scenario.group_of(rank, number + self.rank.shift)
        members[: len(group)] = group
        return len(group)

    def blocks(self, size):
        return len(self.elements(size))

    def elements(self, size):
        """Return the elements of each block."""
        length = self.rank.length
        block = max(1, length // size)
        return [range(low, min(low + block, length)) for low in range(0, length, block)]

    def own_elements(self, block):
        return self.elements(self.rank.shared.own_size)[block]

    def begun(self):
        return 0

    def over(self, ticket):
        return True

    # The application's blocks

    def has_block(self, block):
        return True

    def contribute_block(self, block):
        rank, elements = self.rank, self.own_elements(block)
        if rank.get("ringed"):
            self.world.met.add("a ring")
            if block >= self.ahead:
                self.world.met.add("a slot again")
        for i in elements:
            value = rank.read("snapshot" if self.taken_over else "x", i)
            self.world.write(self.me, self.source(self.me, block, i, elements), value)
        return 0

    def return_block(self, block, in_place):
        if in_place:
            return
        rank, elements = self.rank, self.own_elements(block)
        for i in elements:
            if i >= self.own_averages and not self.own_filled:
                break  # it has contributed nothing, in place of what it keeps
            mean = self.world.read(self.me, self.target(self.me, block, i, elements))
            rank.write("snapshot" if self.taken_over else "x", i, mean)

    def keep_arrays(self):
        if not self.taken_over:
            self.world.met.add("taken over")
            self.rank.vectors.copy(contribution.SNAPSHOT, contribution.X)
            self.taken_over = True

    def withdraw(self, averaged):
        rank, blocks = self.rank, range(self.rank.shared.own_blocks)
        rank.window = None
        rank.world.met.add("withdrawn")
        if 0 < averaged < len(blocks):
            rank.world.met.add("withdrawn in part")
        if self.kept:
            yield from self.copy_blocks(blocks, "snapshot")
            rank.put("in_place", True)
        elif rank.get("shows"):
            yield from self.copy_blocks(blocks[averaged:], "snapshot")
        elif not rank.get("in_place"):
            yield from self.copy_blocks(blocks[:averaged], "result")
        self.set_path(False, True, False, False)

    def copy_blocks(self, blocks, name):
        """Copy blocks of the application's vector to one of the rank's own."""
        for block in blocks:
            yield STEP
            for i in self.own_elements(block):
                self.rank.write(name, i, self.rank.read("x", i))

    # Where blocks are

    def source(self, member, block, i, elements):
        """Return where a member's element of a block is that it contributes."""
        if self.in_place and member == self.me:
            return self.own_place(i)
        place = shared_exchange.source_of(self.of(member, "ringed"), self.of(member, "shows"))
        return self.at(member, place, block, i, elements)

    def target(self, member, block, i, elements):
        """Return where a member gets the mean of an element."""
        if self.in_place and member == self.me:
            return self.own_place(i)
        place = shared_exchange.target_of(
            *(self.of(member, field) for field in ("ringed", "in_place", "takes"))
        )
        return self.at(member, place, block, i, elements)

    def second_target(self, member, i, averaged):
        """Return where a member gets it besides; to what it keeps, only what it gave."""
        if not self.of(member, "gets") or (i not in averaged and not self.of(member, "filled")):
            return None
        return member, "x", i

    def at(self, member, place, block, i, elements):
        if place == shared_exchange.NOWHERE:
            return None
        if place == shared_exchange.RING:
            return self.in_ring(member, block, i, elements)
        if place == shared_exchange.WINDOW:
            return member, "x", i
        name = "snapshot" if place == shared_exchange.SNAPSHOT else "result"
        return self.shared_place(member, name, i)

    def own_place(self, i):
        """Return where an element of what the application gave is."""
        return self.shared_place(self.me, "snapshot" if self.taken_over else "x", i)

    def shared_place(self, member, name, i):
        return member, placed(name, self.of(member, "swapped")), i

    def in_ring(self, member, block, i, elements):
        return member, "ring", block % self.ahead, i - elements.start

    def of(self, member, field):
        """Read a field of a member's part."""
        return self.world.read(self.me, (member, field))

    # Averages

    def weigh(self, members, size):
        averaging = self.rank.shared.averaging
        if averaging.count == 0:  # it averages nothing, but withdraws
            return sum(self.of(member, "weight") for member in members[:size])
        newest = (averaging.first + averaging.count - 1) % self.ahead
        number, block = averaging.numbers[newest], averaging.blocks[newest]
        members = members[:size]
        self.ghost = self.rank.check_averaging(number, members, block)
        self.weights = [self.of(member, "weight") for member in members]
        begun = [self.ghost.weights[member] for member in members]
        details = self.me, "averages", number, "of", members, "with", self.weights, "not", begun
        require(self.weights == begun, Invariant.CONTRIBUTED, *details)
        return sum(self.weights)

    def average(self, number, together, block, members, size, in_place):
        world, ghost = self.world, self.ghost
        self.in_place = in_place
        elements, members = self.elements(size)[block], members[:size]
        if in_place:
            world.met.add("a block in place")
        elif all(self.of(member, "ringed") for member in members):
            world.met.add("a block of rings alone")
        averaged = self.averaged_of(elements, number, together)
        if len(averaged) < len(elements):
            world.met.add("a block left out" if not averaged else "a block left out in part")
        windowed = any(self.of(k, "shows") or self.of(k, "gets") for k in members)
        if windowed:
            world.met.add("a window")
        for i in elements:
            if windowed:
                yield STEP
            places = [self.source(member, block, i, elements) for member in members]
            values = [self.read_source(place, number) for place in places]
            begun = [ghost.begun[member][i] for member in members]
            require(values == begun, Invariant.CONTRIBUTED, members, i, values, begun)
            for member, value in zip(members, values):
                if self.of(member, "saves"):
                    self.save(member, i, value, i in averaged)
            targets = [self.target(member, block, i, elements) for member in members]
            windows = [self.second_target(member, i, averaged) for member in members]
            if i in averaged:
                mean = ghost.means[i] = mean_of(values, self.weights)
                for target in targets:
                    if target is not None:
                        world.write(self.me, target, mean)
                for k in range(len(windows)):  # which a fingerprint tells from others
                    if windows[k] is not None:
                        yield STEP
                        self.write_window(windows[k], mean, number)
            else:
                self.keep(values, places, targets)
                self.keep(values, places, windows)
        self.in_place = False
        return 0

    def read_source(self, place, number):
        if place[1] == "x" and not (self.in_place and place[0] == self.me):
            self.world.check_window(self.me, place[0], number, "shows")
        return self.world.read(self.me, place)

    def write_window(self, place, mean, number):
        self.world.check_window(self.me, place[0], number, "gets")
        self.world.write(self.me, place, mean)

    def averaged_of(self, elements, number, together):
        """Return those elements of a block that an exchange averages."""
        end = self.averages_in(number, together)
        return range(elements.start, max(elements.start, min(end, elements.stop)))

    def save(self, member, i, value, averaged):
        """Leave an element of a member's old snapshot in its result."""
        if not averaged:
            self.world.met.add("a base left out")
        self.world.write(self.me, self.shared_place(member, "result", i), value)

    def keep(self, values, sources, targets):
        """Let each member have its own of an element that is not averaged."""
        for value, source, target in zip(values, sources, targets):
            if target not in (None, source):
                self.world.write(self.me, target, value)

    # The end of an exchange

    def total_weight(self):
        self.world.met.add("a fate unknown")
        return self.rank.get("total")

    def end_part(self, rank, total):
        self.world.write(self.me, (rank, "total"), total)
        return self.of(rank, "in_place")

    def average_counts(self, number, members, size):
        members = members[:size]
        mean = sum(self.of(member, "count") for member in members) / size
        of_all = self.world.scenario.is_of_all(number + self.rank.shift)
        for member in members:
            self.world.write(self.me, (member, "count"), mean)
            if of_all:
                self.world.write(self.me, (member, "average_count"), mean)
                self.world.write(self.me, (member, "average_number"), number)

    def replace(self, rank):
        self.world.write(self.me, (rank, "weight"), self.of(rank, "weight_after"))
        self.world.write(self.me, (rank, "replaced"), True)
        self.world.write(self.me, (rank, "saves"), False)

    def progressed(self):
        self.rank.progress_count += 1


class Rank:
    """One rank: its application, its part in exchanges, and what is to be known from outside."""

    def __init__(self, world, me):
        scenario = world.scenario
        self.world = world
        self.me = me
        self.length = scenario.length
        self.conserving = scenario.conserving
        self.peers = activation_peers(me, world.size)
        self.protocol = world.protocol_type(
            len(self.peers), scenario.group_size, scenario.sync_period, not scenario.waits
        )
        self.protocol.share(True)
        self.protocol.attach(self)
        places = range(shared_exchange.FIRST_BLOCK + scenario.ahead)
        self.shared = world.exchange_type(
            world.claims_type(world, me),
            me,
            scenario.ahead,
            [[0] * world.size for _ in places],
            PATIENCE,
        )
        self.blocks = world.blocks_type(self)
        self.shared.attach(self.blocks)
        self.everyone = list(range(world.size))
        # The application
        self.program = scenario.programs[me]
        self.swapped = False
        self.x = [(1000 * me + i) % PRIME for i in range(self.length)]
        self.updates = self.work = 0
        self.doing = self.yielded = None
        self.over = self.left = False
        self.stopped = self.frozen = False
        still = me in scenario.frozen or me in scenario.stopped
        self.stills_from = scenario.still_from if still else MOST_STEPS
        self.looked_at = -1
        # The engine
        self.exchange_weight = self.exchange_count = 0
        self.bypassed = self.publishes = self.kept = False
        self.loading = 0
        self.members = []
        self.exchange = None
        self.progress_count = 0
        self.shift = 0
        # What is known from outside: the exchange in which others use its window; the state of its
        # part before that was closed to withdraw; and others
        self.window = self.hidden = None
        self.base = list(self.x)
        self.expected = list(self.x)
        self.executed = []
        self.results = {}
        for i in range(self.length):
            world.total[i] += self.x[i]
            self.write("result", i, ANYTHING)
        self.vectors = Memory(self)
        self.publishing = world.publishing_type(self.vectors, self.protocol, rule_of(scenario))
        self.publishing.replace()
        self.publishing.count_once()
        self.driven = world.driven_type(self.protocol, self.publishing)
        self.driven.attach(Port(self))
        for field in ("in_place", "saves", "replaced", "ringed", "takes", "shows", "gets"):
            self.put(field, False)
        self.put("swapped", False)
        for field in ("filled", "weight", "weight_after", "total", "count", "average_count"):
            self.put(field, 0)
        self.put("average_number", -1)
        self.generator = self.live()

    @property
    def data_ops(self):
        return self.driven.data_ops

    @property
    def count(self):
        """The rank's count, with what it has not yet published."""
        job = self.publishing.job
        count = self.world.data[self.me, "count"] if self.driven.opened else job.count
        return count + job.unpublished

    @property
    def x(self):
        """The application's vector, as seen from outside."""
        return [self.world.data[self.me, "x", i] for i in range(self.length)]

    @x.setter
    def x(self, values):
        for i, value in enumerate(values):
            self.write("x", i, value)

    # Steps

    def advance(self, what):
        try:
            self.yielded = self.generator.send(what)
        except StopIteration:
            self.yielded = None

    def options(self):
        """What this rank may do next; it freezes where nothing waits for it."""
        if self.stills_from <= self.world.steps and self.doing == COMPUTING:
            self.become_still()
        if self.yielded is None or self.frozen:
            return ()
        if self.yielded is STEP:
            return (STEP,)
        news = self.world.changes != self.looked_at or self.has_messages()
        if self.yielded == WAITING:
            interrupts = (INTERRUPT,) if self.may_be_interrupted() else ()
            return (LOOK, *interrupts) if news else interrupts
        if self.over or self.stopped:
            return (LOOK,) if news else ()
        return (GO_ON, LOOK) if news else (GO_ON,)

    def may_be_interrupted(self):
        if self.doing == INTERRUPTED_AVERAGE:
            return self.publishing.present
        return self.doing == INTERRUPTED and self.publishing.calling

    def become_still(self):
        """Freeze, unless others may wait for this rank; or only its application computes on."""
        if self.me in self.world.scenario.stopped:
            self.stopped = True
        elif self.driven.opened and self.shared.averaging.count == 0:
            self.frozen = self.world.part(self.me)[1] in (claims.OPEN, claims.TAKEN)

    @property
    def never_goes_on(self):
        return self.stopped or self.frozen

    def has_messages(self):
        return any(self.world.channels.get((self.me, k)) for k in range(len(self.peers)))

    def fingerprint(self):
        """Return what the rest of a run depends on, of this rank; counts only as they are news."""
        counts = {"changes": self.world.changes, "progress_count": self.progress_count}
        state = [self.doing, self.world.changes != self.looked_at, *self.x, *self.base]
        generator = self.generator
        while generator is not None and generator.gi_frame is not None:
            state.append(generator.gi_frame.f_lasti)
            for name, value in generator.gi_frame.f_locals.items():
                if isinstance(value, int) and name != "slot":  # any of the queue will do
                    state.append(value == counts[name] if name in counts else value)
            generator = generator.gi_yieldfrom
        uncounted = "looked_at", "progress_count", "timely", "synchronizations"
        for holder in (self, self.protocol, self.publishing, self.driven, self.shared, self.blocks):
            for name, value in vars(holder).items():
                if isinstance(value, int) and (name not in uncounted or holder is self.protocol):
                    state.append(value)
        averaging = self.shared.averaging
        for k in range(averaging.first, averaging.first + averaging.count):
            k %= self.shared.ahead
            state += averaging.numbers[k], averaging.blocks[k], averaging.totals[k]
        return tuple(state)

    def standing(self):
        """Return which functions this rank is in, and the rank and place of the word it is at."""
        names = []
        generator = frame = self.generator
        while generator is not None and generator.gi_frame is not None:
            frame = generator.gi_frame
            names.append(frame.f_code.co_name)
            generator = generator.gi_yieldfrom
        return names, frame.f_locals.get("rank"), frame.f_locals.get("place")

    # The application

    def live(self):
        """Go through the program, computing before each item and after the last."""
        yield from self.driven.begin(True)
        for item in self.program:
            yield from self.compute()
            self.update()
            what, detail = item if isinstance(item, tuple) else (item, 1)
            self.doing = what
            yield from self.carry_out(what, detail)
            if what == all_ranks.CLOSE:
                self.over = self.left = True
                return
        self.over = True
        yield from self.compute()

    def compute(self):
        self.doing = COMPUTING
        while (yield COMPUTING) != GO_ON:
            changes, progress_count = self.world.changes, self.progress_count
            yield from self.progress()
            if self.progress_count == progress_count:
                self.looked_at = changes

    def update(self):
        """Change the model by an update that no other rank, and no other time, has."""
        self.updates += 1
        for i in range(self.length):
            update = (7**self.updates * (11 + 2 * self.me) ** 5 + 131 * i) % PRIME
            self.write("x", i, (self.read("x", i) + update) % PRIME)
            self.world.total[i] += update

    def carry_out(self, what, detail):
        self.given_x = list(self.x)
        if what == all_ranks.LOAD:
            self.loading = detail
        scenario = self.world.scenario
        if what == all_ranks.CLOSE:
            yield from self.wait(lambda: self.protocol.stage == all_ranks.OUTSIDE)
        elif scenario.waits or scenario.own_pace or scenario.windows:
            yield from self.wait(self.has_caught_up)
        if what != all_ranks.CLOSE:
            calls = what in (CALL, INTERRUPTED, PUBLISH)
            weight = detail if calls else self.publishing.published_weight
            if self.protocol.own_pace and calls:
                self.work += what != PUBLISH
                weight = self.publishing.worked(what != PUBLISH)
            self.publishing.give(weight)
        if what == PUBLISH:
            yield from self.driven.hold(version_steps.PUBLISHING)
        elif what == all_ranks.JOIN:
            yield from self.driven.hold(version_steps.JOINING)
        elif what in (CALL, INTERRUPTED) and not self.protocol.is_synchronous():
            yield from self.begin_call()
        else:
            operations = {CALL: all_ranks.SYNC, INTERRUPTED: all_ranks.SYNC}
            operations[INTERRUPTED_AVERAGE] = all_ranks.SYNCHRONIZE
            yield from self.driven.enter(operations.get(what, what))
        self.contribute()
        if what == all_ranks.CLOSE:
            yield from self.wait(self.may_leave)
        else:
            yield from self.progress()
            if (yield from self.wait(lambda: self.driven.done)) == INTERRUPT:
                yield from self.abandon()
        self.publishing.forget()

    def has_caught_up(self):
        """Return whether what an exception has interrupted is complete."""
        protocol = self.protocol
        return protocol.stage == all_ranks.OUTSIDE and protocol.next >= protocol.version

    def may_leave(self):
        protocol = self.protocol
        at_end = protocol.stage == all_ranks.LEAVING and protocol.next >= protocol.fin_at
        return at_end and protocol.vectors != protocols.RUNNING and protocol.due == 0

    def wait(self, reached):
        """Look until the goal is reached, again only once something has changed.

        Return INTERRUPT where an exception has ended that.
        """
        while not reached():
            changes, progress_count = self.world.changes, self.progress_count
            yield from self.progress()
            if self.progress_count == progress_count and not reached():
                self.looked_at = changes
                if (yield WAITING) == INTERRUPT:
                    return INTERRUPT
        return None

    def abandon(self):
        """An exception has ended a call: its version goes on without the application."""
        self.world.met.add("interrupted")
        published = self.publishing.published
        if not self.driven.begun and self.publishing.is_averaging() and self.world.scenario.waits:
            self.expect_publication()
            published = True
        yield from self.driven.interrupt()
        while self.driven.begun and self.exchange == "memory" and (yield from self.uses()):
            self.world.met.add("drained")
            changes = self.world.changes
            yield from self.exchange_progress()
            if (yield from self.uses()):
                self.looked_at = changes
                yield WAITING
                yield from self.progress()
        require(self.window is None, Invariant.WINDOW, self.me, "has it back in", self.window)
        yield from self.driven.interrupted(True)
        if published:
            self.base = list(self.x)
        self.looked_at = -1

    def uses(self):
        """Return whether the pending exchange still uses the application's vector or the result."""
        if self.shared.withdrawing:
            return True
        # Another rank may set this meanwhile.
        saves = self.world.data[self.me, "saves"]
        return saves and (yield from self.shared.is_pending())

    # Progress, as `Collective` makes it

    def progress(self):
        self.receive()
        self.send()
        if self.protocol.stage == all_ranks.AGREEING:
            yield from self.agree()
            self.send()
        steps = yield from self.driven.advance()
        self.progress_count += steps  # which exchanges have increased meanwhile
        self.contribute()

    def receive(self):
        for k in range(len(self.peers)):
            channel = self.world.channels.get((self.me, k))
            while channel and not (self.world.random and self.world.random.random() < 0.5):
                version, ops, clock = channel.popleft()
                self.world.see(self.me, clock)
                self.protocol.activate(version, ops, k)
                self.progress_count += 1

    def send(self):
        for k in range(len(self.peers)):
            while self.protocol.due_on() >> k & 1:
                self.protocol.send_on(k)

    def send_activation(self, dimension, version, ops):
        message = version, ops, self.release_clock()
        channel = self.peers[dimension][0], dimension
        self.world.channels.setdefault(channel, deque()).append(message)
        self.world.changes += 1

    def send_fin(self, dimension):
        """Whether others leave is not modelled."""

    def release_clock(self):
        clock = tuple(self.world.clocks[self.me])
        self.world.clocks[self.me][self.me] += 1
        return clock

    def agree(self):
        entered = self.world.entered[self.protocol.ops]
        if len(entered) < self.world.size:
            return
        for _, _, clock in entered.values():
            self.world.see(self.me, clock)
        records = [x for rank in self.everyone for x in entered[rank][:2]]
        self.progress_count += 1
        yield from self.driven.agreed(records, self.world.size, self.loading, False, False)
        assert not self.protocol.broken, f"the programs disagree: {records}"
        self.world.met.add("an operation")
        if self.protocol.stage == all_ranks.DRAINING:
            self.world.met.add("draining")

    def contribute(self):
        """Let all know which operation this rank is in, if that is due."""
        if not self.driven.gathers:
            return
        self.driven.gathers = False
        entered = self.world.entered.setdefault(self.protocol.ops, {})
        entered[self.me] = self.protocol.operation, self.protocol.version, self.release_clock()
        self.world.changes += 1

    def group(self, version):
        return self.world.scenario.group_of(self.me, version + self.protocol.base)

    def begin_version(self, version, number):
        self.members = self.group(version)
        publishing = self.publishing
        if len(self.members) > 1:
            ringed = publishing.lent and publishing.bypasses_snapshot()
            receives, keeps = publishing.direct, publishing.keeps
            yield from self.begin(number, False, self.members, receives, ringed, keeps)
        else:
            self.exchange = "alone"
            self.execute_alone(version)

    def execute_alone(self, version):
        """Execute a version whose group is this rank alone."""
        publishing, vectors = self.publishing, self.vectors
        if publishing.lent:
            vectors.copy(contribution.SNAPSHOT, contribution.X)
        values = vectors.values(contribution.SNAPSHOT)
        self.exchange_weight = publishing.weight
        self.exchange_count = publishing.job.count
        if publishing.saved != contribution.NOWHERE:
            vectors.copy(publishing.saved, publishing.target)
        if publishing.weight > 0:
            vectors.put(publishing.target, values)
            if publishing.copy != contribution.NOWHERE:
                vectors.put(publishing.copy, values)
        self.check_executed(version)
        self.results[version] = values, publishing.weight, [self.me]
        self.world.met.add("alone")

    def exchange_progress(self):
        if self.exchange == "memory":
            over = yield from self.shared.progress()
            if over:
                self.exchange_weight = self.get("total")
                self.exchange_count = self.get("count")
            return over
        if self.exchange == "average":
            return len(self.world.averages[self.protocol.ops]) == self.world.size
        return True

    def begin_average(self, number):
        publishing, ops = self.publishing, self.protocol.ops
        if self.protocol.operation == all_ranks.AVERAGE:
            self.exchange, self.exchange_weight = "average", 1
            given = contribution.X if publishing.lent else contribution.SCRATCH
            self.world.averages.setdefault(ops, {})[self.me] = self.vectors.values(given)
            self.world.changes += 1
            return
        gets = publishing.copy == contribution.X
        yield from self.begin(number, True, self.everyone, gets, False, False)

    def begin(self, number, together, members, receives, ringed, keeps):
        """Begin an exchange in memory."""
        given = self.publishing.lent
        if given:
            self.world.met.add("flowing")
        self.exchange = "memory"
        self.blocks.describe()
        self.blocks.begin(number, together)
        windowed = receives and self.me in self.world.scenario.windows
        yield from self.shared.begin(
            number, together, members, len(members), given, receives, ringed, windowed, keeps
        )

    def begin_call(self):
        yield from self.driven.call()
        if self.protocol.timely:
            self.world.started.setdefault(self.protocol.version, self.data_ops)
        self.world.met.add("timely" if self.protocol.timely else "late")

    def check_before(self, step):
        """Note what the rank is to contribute after a step that publishes."""
        publishes = step in (version_steps.PUBLISH, version_steps.SHARE)
        if step == version_steps.RETURN:
            publishes = not self.protocol.timely
        elif step == rank_protocol.CONTRIBUTE:
            averages = self.protocol.operation == all_ranks.AVERAGE
            publishes = self.publishing.publishes() and not averages
        self.publishes = publishes
        if publishes:
            self.expect_publication()

    def check_after(self, step):
        if step == version_steps.RETURN:
            self.check_call()
        elif step == rank_protocol.ADOPT:
            self.check_adopted()
        elif self.publishes:
            self.check_published()
        replaced = step == rank_protocol.REPLACE and self.publishing.present
        if replaced:
            self.expected = list(self.x)
        if replaced or step in (version_steps.RETURN, version_steps.SHARE):
            self.base = list(self.x)

    def check_adopted(self):
        """All go on from the mean."""
        publishing = self.publishing
        if self.protocol.operation == all_ranks.AVERAGE:
            return
        gets = publishing.copy == contribution.X and publishing.total != 0
        if gets:
            self.base = list(self.x)
        ghost = self.world.ghost(self.me, self.shared.number)
        weighs = publishing.total == ghost.weight
        require(weighs, Invariant.RESULT, self.me, "has a wrong weight")
        returned = not gets or self.x == ghost.result(self.me)
        require(returned, Invariant.RESULT, f"{self.me} of an operation:", self.x, ghost.means)

    # Memory

    def read(self, name, i):
        return self.world.read(self.me, (self.me, placed(name, self.swapped), i))

    def write(self, name, i, value):
        self.world.write(self.me, (self.me, placed(name, self.swapped), i), value)

    def swap_vectors(self):
        """Let the snapshot and the result change places."""
        part = self.world.part(self.me)
        require(part[1] == claims.CLOSED, Invariant.SWAPPED, self.me, part)
        self.world.met.add("swapped")
        self.swapped = not self.swapped
        self.put("swapped", self.swapped)

    def get(self, field):
        return self.world.read(self.me, (self.me, field))

    def put(self, field, value):
        self.world.write(self.me, (self.me, field), value)

    def look(self, field):
        """Read what another rank may be writing, as long as an exchange is running."""
        return self.world.data[self.me, field] if self.kept else self.get(field)

    # What must hold

    def is_together(self, number):
        """Return whether an exchange is that of an operation, which all enter."""
        return self.shared.together and number == self.shared.number

    def members_of(self, number):
        if self.is_together(number):
            return self.everyone
        return self.world.scenario.group_of(self.me, number + self.shift)

    def averages_in(self, number):
        """Return how many elements, from the first on, an exchange is to average."""
        if self.is_together(number):
            return self.length
        return self.world.scenario.averaged(number - self.data_ops + self.protocol.base)

    def check_begin(self, number, flowing):
        """This rank's part begins: from now on it contributes what it has."""
        ghost = self.world.ghost(self.me, number)
        require(self.me not in ghost.begun, Invariant.ONCE, self.me, "begins", number, "again")
        shows, gets = (self.world.data[self.me, field] for field in ("shows", "gets"))
        if shows or gets:
            self.window = number
        values = self.x if flowing or shows else self.world.vector(self.me, "snapshot")
        ghost.begun[self.me] = list(values)
        ghost.weights[self.me] = self.world.data[self.me, "weight"]
        if not self.is_together(number):
            version = number - self.data_ops
            started = self.world.started.get(version)
            require(started is not None, Invariant.IN_ORDER, "nobody has started", version)
            require(
                started == self.data_ops, Invariant.EPOCH, version, self.me, started, self.data_ops
            )
        filled = self.publishing.state != snapshots.UNFILLED
        empty = not filled and ghost.weights[self.me] > 0
        require(not empty, Invariant.CONTRIBUTED, self.me, number, "has nothing to contribute")
        if self.conserving and filled:
            require(list(values) == self.expected, Invariant.CONSERVED, self.me, number, values)

    def check_averaging(self, number, members, block):
        ghost = self.world.exchanges.get((number, members[0]))
        begun = ghost is not None and ghost.members == members and set(ghost.begun) == set(members)
        require(begun, Invariant.ALL_THERE, f"{self.me} averages {number} of {members}")
        require(block not in ghost.averaged, Invariant.ONCE, number, members, block)
        ghost.averaged.add(block)
        return ghost

    def check_end(self, number, ghost):
        """This rank's part is over: the mean is where it belongs."""
        self.window = None
        vector = self.world.vector
        in_place, ringed, shows, gets = (
            self.world.data[self.me, field] for field in ("in_place", "ringed", "shows", "gets")
        )
        bypassed = ringed or (shows and not in_place)
        require(in_place or bypassed or not self.conserving, Invariant.CONSERVED, self.me, number)
        result = ghost.result(self.me)
        if gets and ghost.weight > 0:
            known = self.length if ghost.weights[self.me] > 0 else ghost.averages
            arrives = self.x[:known] == result[:known]
            require(arrives, Invariant.RESULT, f"{self.me}'s window after {number}: {result}")
        if bypassed:
            # Some of it is still to be taken from the ring, or all of it is in the window.
            if ghost.weight > 0:
                self.expected = list(result)
            arrived = True
        elif ghost.weight > 0 and in_place:
            self.expected = list(result)
            self.check_left_out(vector(self.me, "snapshot"), result, ghost.averages)
            arrived = vector(self.me, "snapshot") == result
        else:
            contributed = self.x if shows else vector(self.me, "snapshot")
            arrived = contributed == ghost.begun[self.me] and (
                ghost.weight == 0 or gets or vector(self.me, "result") == result
            )
        require(arrived, Invariant.RESULT, f"{self.me}'s vectors after {number}: {result}")
        if not self.is_together(number):
            version = number - self.data_ops
            self.check_executed(version)
            self.results[version] = result, ghost.weight, ghost.members

    def check_left_out(self, vector, own, averages):
        same = vector[averages:] == own[averages:]
        require(same, Invariant.LEFT_OUT, self.me, vector, "not", own, "from", averages)

    def check_executed(self, version):
        """Every version is executed after the one before it, but for synchronizations."""
        skipped = self.executed[-1] + 1 if self.executed else 0
        scenario = self.world.scenario
        while (skipped + self.protocol.base + 1) % scenario.sync_period == 0:
            if scenario.own_pace:
                break
            skipped += 1
        require(version == skipped, Invariant.IN_ORDER, self.me, version, self.executed)
        self.executed.append(version)

    def check_returned(self):
        """Once it is over here as well, the snapshot holds what the rank contributes."""
        snapshot = self.world.vector(self.me, "snapshot")
        require(snapshot == self.expected, Invariant.RESULT, self.me, snapshot, self.expected)

    def expect_publication(self):
        """Note what the rank contributes once it has published."""
        if not self.conserving:
            self.expected = list(self.x)
            return
        changes = zip(self.expected, self.x, self.base)
        self.expected = [(old + x - base) % PRIME for old, x, base in changes]

    def check_published(self):
        given = contribution.X if self.publishing.lent else contribution.SNAPSHOT
        values = self.vectors.values(given)
        require(values == self.expected, Invariant.CONSERVED, self.me, values, self.expected)

    def check_call(self):
        protocol = self.protocol
        source = protocol.source
        new = source == protocol.version if protocol.timely else source >= protocol.version
        newest = source in self.results and source == self.executed[-1]
        require(new and newest, Invariant.RESULT, self.me, protocol.version, "takes", source)
        means, weight, members = self.results[source]
        total = self.publishing.total
        known = total == weight and self.members == members
        require(known, Invariant.RESULT, self.me, source, total, self.members, members)
        if self.conserving:
            x = self.expected
            if not self.protocol.own_pace and 0 in self.world.scenario.periods:
                # Nobody else has changed what only averages over all ranks average.
                rarely = self.world.scenario.periods.index(0)
                self.check_left_out(self.x, self.given_x, rarely)
        elif weight == 0:
            x = self.given_x
        elif protocol.timely:
            x = means
        else:
            own = self.publishing.given_weight
            x = [mean_of(pair, [weight, own]) for pair in zip(means, self.given_x)]
        require(self.x == list(x), Invariant.RESULT, f"{self.me} in {protocol.version}", self.x, x)


@cache
def _inverse(number):
    return pow(number, -1, PRIME)


def mean_of(values, weights):
    total = sum(value * weight for value, weight in zip(values, weights))
    return total * _inverse(sum(weights)) % PRIME


# Who makes the next step


class RandomChooser:
    """Choose evenly; or keep to a rank for long; or by priorities that change now and then."""

    def __init__(self, generator, size):
        self.random = generator.random
        self.kind = generator.choice(("evenly", "keeping", "by priority"))
        self.changes = {"evenly": 1, "keeping": 0.3, "by priority": 0.02}[self.kind]
        self.changes *= generator.choice((0.2, 1)) if self.kind != "evenly" else 1
        self.goes_on = generator.choice((0.1, 0.5, 0.9))
        self.order = list(range(size))
        generator.shuffle(self.order)

    def __call__(self, world):
        if self.random() < self.changes:
            order = self.order
            place = int(self.random() * len(order))
            order.insert(
                0 if self.kind != "by priority" else int(self.random() * len(order)),
                order.pop(place),
            )
        for rank in self.order:
            options = world.ranks[rank].options()
            if options:
                return rank, options[len(options) > 1 and self.random() > self.goes_on]
        return None


class Script:
    """Let ranks go on in turn, each until something holds; then whoever can."""

    def __init__(self, *turns):
        self.turns = list(turns)

    def __call__(self, world):
        while self.turns and self.turns[0][1](world):
            self.turns.pop(0)
        if not self.turns:
            return next(iter(world.options()), None)
        rank = self.turns[0][0]
        options = world.ranks[rank].options()
        assert options, f"rank {rank} cannot go on, with {len(self.turns)} turns left"
        return rank, options[0]


def random_scenario(generator):
    """Some calls and operations, that all ranks enter after as many calls."""
    size = generator.choice((2, 3, 3, 4, 5))
    conserving = generator.random() < 0.5
    joining = generator.random() < 0.3
    programs = [[] for _ in range(size)]
    for _ in range(generator.randint(1, 2)):
        calls = generator.randint(0, 3)
        operations = (all_ranks.SYNCHRONIZE, all_ranks.SYNCHRONIZE, all_ranks.AVERAGE)
        last = all_ranks.JOIN if joining else generator.choice(operations)
        for program in programs:
            made = generator.randint(0, calls) if joining else calls
            for _ in range(made):
                if generator.random() < 0.2:
                    program.append(PUBLISH)
                weight = 1 if conserving else generator.choice((1, 1, 1, 2, 0))
                program.append((CALL, weight))
            program.append(last)
    for program in programs:
        program += [CALL] * generator.randint(0, 2) + [all_ranks.CLOSE]
    period = 100 if joining else generator.choice((100, 100, 2, 3))
    if period < 100:
        calls = min(program.count(CALL) for program in programs)
        programs = [[p for p in program if p != CALL] for program in programs]
        programs = [program[:-1] + [CALL] * calls + [all_ranks.CLOSE] for program in programs]
    return Scenario(
        size,
        generator.randint(2, size),
        tuple(map(tuple, programs)),
        length=generator.randint(1, 4),
        sync_period=period,
        conserving=conserving,
        ahead=generator.choice((1, 2, 16)),
        delays=generator.choice((None, generator.randrange(1000))),
    )


def own_pace_scenario(generator):
    """Ranks make any number of calls, some of them interrupted, between operations and at the end.

    Applications may stop for ever, where ranks only make calls.
    """
    size = generator.choice((2, 3, 3, 4, 5))
    load = all_ranks.LOAD, generator.randint(0, 9)
    operations = (all_ranks.SYNCHRONIZE, all_ranks.AVERAGE, all_ranks.JOIN, load)
    ends = [generator.choice(operations) for _ in range(generator.randint(0, 2))]
    programs = []
    for _ in range(size):
        program = []
        for end in (*ends, all_ranks.CLOSE):
            calls = generator.choices((CALL, INTERRUPTED, PUBLISH), (8, 1, 1), k=4)
            program += [*calls[: generator.randint(0, 4)], end]
        programs.append(tuple(program))
    still = ()
    if not ends and generator.random() < 0.5:
        programs = [(*program[:-1], CALL) for program in programs]
        still = tuple(generator.sample(range(size), generator.randint(1, size - 1)))
    return Scenario(
        size,
        generator.randint(1, size),
        tuple(programs),
        length=generator.randint(1, 4),
        sync_period=generator.choice((1, 2, 3, 100)),
        conserving=True,
        ahead=generator.choice((1, 2, 16)),
        stopped=still,
        still_from=generator.choice((0, 30, 100, 300)),
        delays=generator.choice((None, generator.randrange(1000))),
        own_pace=True,
    )


def frozen_scenario(generator):
    """Only calls, and some ranks that compute for ever: the others go on all the same."""
    everything = generator.random() < 0.6
    sizes = (2, 2), (3, 3), (4, 2), (4, 3), (4, 4), (5, 3), (5, 5)
    size, group_size = generator.choice(sizes)
    if not everything:
        size = generator.randint(2, 5)
        group_size = generator.randint(2, size)
    programs = []
    for _ in range(size):
        items = [CALL, CALL, CALL, PUBLISH]
        programs.append(tuple(generator.choice(items) for _ in range(generator.randint(1, 5))))
    still = tuple(generator.sample(range(size), generator.randint(1, size - 1)))
    return Scenario(
        size,
        group_size,
        tuple(programs),
        length=generator.randint(1, 4),
        conserving=generator.random() < 0.5,
        ahead=generator.choice((1, 2, 16)),
        frozen=still if everything else (),
        stopped=() if everything else still,
        still_from=generator.choice((0, 30, 100, 300)),
        delays=generator.choice((None, generator.randrange(1000))),
    )


def waiting_scenario(generator):
    """Versions wait for their groups; some calls are interrupted, some ranks make fewer."""
    size = generator.choice((2, 3, 3, 4))
    conserving = generator.random() < 0.5
    programs = [[] for _ in range(size)]
    operations = (None, all_ranks.SYNCHRONIZE, all_ranks.AVERAGE)
    for operation in generator.sample(operations, generator.randint(1, 2)):
        calls = generator.randint(1, 3)
        for program in programs:
            for _ in range(calls):
                if generator.random() < 0.1:
                    program.append(PUBLISH)
                weight = 1 if conserving else generator.choice((1, 1, 2, 0))
                program.append((INTERRUPTED if generator.random() < 0.2 else CALL, weight))
            if operation is not None:
                program.append(operation)
    fewer = generator.random() < 0.3
    calls = generator.randint(0, 2)
    for program in programs:
        program += [CALL] * (generator.randint(0, calls) if fewer else calls) + [all_ranks.CLOSE]
    return Scenario(
        size,
        generator.randint(2, size),
        tuple(map(tuple, programs)),
        length=generator.randint(1, 4) * generator.choice((1, 2)),
        conserving=conserving,
        waits=True,
        ahead=generator.choice((1, 1, 2, 3)),
        delays=generator.choice((None, generator.randrange(1000))),
    )


def partial_scenario(generator):
    """One of those above, under the conserving rule, whose versions leave elements out."""
    make = generator.choice((random_scenario, frozen_scenario, waiting_scenario, own_pace_scenario))
    scenario = make(generator)
    counts = generator.randint(1, 4), generator.randint(0, 3), generator.randint(1, 4)
    every = generator.choice((2, 3))
    periods = tuple(period for period, count in zip((1, every, 0), counts) for _ in range(count))
    return replace(scenario, conserving=True, length=len(periods), periods=periods)


def windowed_scenario(generator):
    """One of those above where all or some ranks' vectors are in windows; more are interrupted."""
    makers = random_scenario, waiting_scenario, waiting_scenario, own_pace_scenario
    makers += frozen_scenario, partial_scenario
    scenario = generator.choice(makers)(generator)
    if not scenario.own_pace and not scenario.periods:
        scenario = replace(
            scenario, programs=tuple(interrupted(each, generator) for each in scenario.programs)
        )
    everyone = range(scenario.world_size)
    some = generator.sample(everyone, generator.randint(1, scenario.world_size))
    return replace(scenario, windows=tuple(generator.choice((everyone, some))))


def withdrawing_scenario(generator):
    """A few calls and averages, all in windows, and many of them interrupted."""
    size = generator.choice((2, 3, 3))
    conserving = generator.random() < 0.5
    weights = (1,) if conserving else (1, 1, 2, 0)
    kinds = generator.choices((CALL, CALL, all_ranks.SYNCHRONIZE), k=generator.randint(1, 4))
    programs = []
    for _ in range(size):
        program = [(kind, generator.choice(weights)) for kind in kinds]
        programs.append((*interrupted(program, generator), all_ranks.CLOSE))
    return Scenario(
        size,
        generator.randint(2, size),
        tuple(programs),
        length=generator.randint(1, 4) * generator.choice((1, 2)),
        conserving=conserving,
        waits=generator.random() < 0.5,
        ahead=generator.choice((1, 2, 16)),
        delays=generator.choice((None, generator.randrange(1000))),
        windows=tuple(range(size)),
    )


def interrupted(program, generator):
    """Let exceptions end some of a program's calls, and of its averages over all ranks."""
    kinds = {CALL: INTERRUPTED, all_ranks.SYNCHRONIZE: INTERRUPTED_AVERAGE}
    items = []
    for item in program:
        what, weight = item if isinstance(item, tuple) else (item, 1)
        ends = what in kinds and generator.random() < 0.4
        items.append((kinds[what], weight) if ends else item)
    return tuple(items)


def run_seed(seed, scenarios=random_scenario, watch=None, **types):
    """Run a seed's scenario by the choices of that seed."""
    generator = random.Random(seed)
    scenario = scenarios(generator)
    with telling_how_to_replay(__name__, seed, scenario, scenarios, types):
        world = World(scenario, **types)
        return world.run(RandomChooser(generator, scenario.world_size), watch)


# What `World` may be given variants of.
KINDS = {
    SharedBlocks: "blocks_type",
    shared_exchange.SharedExchangeProtocol: "exchange_type",
    snapshots.SnapshotProtocol: "publishing_type",
    protocols.WaitAvoidingProtocol: "protocol_type",
    versions_in_steps.VersionsProtocol: "driven_type",
}


def types_of(variant):
    """Return what a variant replaces: a class, or one whose source it edits."""
    if isinstance(variant, Edit):
        if variant.method.startswith("ClaimsProtocol."):
            return {"claims_type": claims_in_steps(variant)}
        return {"exchange_type": exchange_in_steps(variant).SharedExchangeProtocol}
    for base, name in KINDS.items():
        if issubclass(variant, base):
            return {name: variant}
    raise TypeError(f"{variant} is no variant of anything")


def print_event(option, world):
    parts = map(world.part, range(world.size))
    parts = " ".join(f"{number}{'COTKFR'[state]}" for number, state in parts)
    rank = world.ranks[option[0]]
    print(f"{world.steps:5} {parts}  rank {option[0]} {option[1]} in {rank.doing}")


def explore(scenario, most=10**6, switches=None, **types):
    """Run every interleaving, as far as its states differ; return the number of states.

    Args:
        most: states after which it is enough.
        switches: how often a rank may be interrupted that could go on; None: any number of times.
    """
    seen = set()
    paths = [()]
    while paths:
        path = paths.pop()
        world = World(scenario, **types)
        switched, last = 0, None
        for option in path:
            switched, last = _count_switch(world, option, switched, last)
            world.take(option)
        while options := world.options():
            state = world.fingerprint(), last if switches else None, switched if switches else 0
            if state in seen:
                break
            seen.add(state)
            if len(seen) >= most:
                return len(seen)
            allowed = [(option, _count_switch(world, option, switched, last)) for option in options]
            allowed = [
                (option, after)
                for option, after in allowed
                if switches is None or after[0] <= switches
            ]
            allowed.sort(key=lambda each: each[0][0] != last)
            for option, _ in allowed[1:]:
                paths.append((*path, option))
            option, (switched, last) = allowed[0]
            path = (*path, option)
            world.take(option)
        else:
            world.check_over()
    return len(seen)


def _count_switch(world, option, switched, last):
    """Return how often a rank was interrupted that could have gone on, and who goes on."""
    if last is not None and option[0] != last and world.ranks[last].yielded == STEP:
        switched += 1
    return switched, option[0]


if __name__ == "__main__":
    replay("claims_model", "claims_model:random_scenario")
