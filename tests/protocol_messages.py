"""The messages of the in-memory network of `protocol_network`, and the invariants of its runs."""

from __future__ import annotations

import argparse
import contextlib
import enum
import importlib.util
import pkgutil
import shlex
import subprocess
import sys
from collections import deque
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from collectives.topology import propagation_bound

ROOT = Path(__file__).resolve().parents[1]


def load_source(module, *bases):
    """Load a protocol's source as a module of its own: the compiled one's methods are C's.

    Args:
        module: its name in `collectives.protocols`.
        bases: the names of others that it imports, of which it gets the sources, too.
    """
    name = f"_source_of_{module}"
    if name not in sys.modules:
        path = ROOT / "collectives" / "protocols" / f"{module}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        with in_place_of_the_compiled(bases):
            spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@contextlib.contextmanager
def in_place_of_the_compiled(bases, made=()):
    """Let imports of these protocols find their sources, or the modules `made` of them."""
    found = {base: load_source(base) for base in bases} | dict(made)
    names = {f"collectives.protocols.{base}": module for base, module in found.items()}
    compiled = {name: importlib.import_module(name) for name in names}
    sys.modules.update(names)
    try:
        yield
    finally:
        sys.modules.update(compiled)


all_ranks = load_source("all_ranks")
protocols = load_source("wait_avoiding", "all_ranks")
own_pace = load_source("own_pace", "wait_avoiding")
contribution = load_source("contribution", "all_ranks")
leases = load_source("lease", "contribution")
snapshots = load_source("snapshots", "all_ranks", "contribution", "job_count", "lease")
late_rules = load_source("late_rules", "contribution", "snapshots")
rank_port = load_source("rank_port")
rank_protocol = load_source("rank", "all_ranks")
version_steps = load_source("versions", "all_ranks", "rank", "wait_avoiding")
schedules = load_source("schedule")


def rule_of(scenario):
    """Return the late rule of a scenario, of the protocols' sources."""
    return late_rules.late_rule("conserving" if scenario.conserving else "paper")


def protocol_of(scenario):
    """Return the protocol's type of a scenario, of the protocols' sources."""
    return own_pace.OwnPaceProtocol if scenario.own_pace else protocols.WaitAvoidingProtocol


# What goes over a channel of control besides activations: the last message, (NOTICE, rank), and
# (FREED, operations).
FIN = "fin"
NOTICE = "notice"
FREED = "freed"

# What an exchange is of: the number follows.
VERSION = "version"
OPERATION = "operation"


class Invariant(enum.Enum):
    """What must hold in every run."""

    IN_ORDER = "every started version, and no other, is executed once by each rank, in order"
    ONE_EACH = "the members of a group have the same contributions, one of each member"
    TIMELY = "a call is timely exactly if its vector is in its version's sum"
    LATE = "a late result is as new as its call, and lacks the call's vector"
    EPOCH = "no contribution and no result crosses a synchronization"
    NOBODY_PASSIVE = "where nobody is passive, every call is timely"
    BETWEEN_VERSIONS = "a snapshot changes only between versions"
    CONSERVED = "the sum of all snapshots changes by the published updates alone"
    NEAR = "no two ranks' engines are further apart than the propagation bound"
    BOUNDED = "the messages that wait at a rank are bounded"
    MATCHED = "a message is received by the exchange that it was sent for"
    WAIT_AVOIDING = "no group call waits for a stopped application"
    ENDS = "nothing hangs"
    DRAINED = "no message is received after leaving, or left over"
    AGREED = "an operation begins, at one version, exactly if all have entered one that allows it"
    TOGETHER = "all ranks leave an operation at the same version, with what it publishes"
    JOINED = "a rank that has joined contributes nothing newer than its join"
    OUT = "a rank that has joined has no weight once an average of all has taken what it had left"
    RETURNS = "who has joined gets its vector back once all have joined, and no earlier"
    HEARD = "everybody hears of a failure, unless all are closing"
    DRAWN = "a version is started by the rank drawn for it, unless one is in an operation"
    PACE = "a call at the own pace starts a version exactly if none was since the last one"
    ALIKE = "at the ranks' own pace every member of a group has weight 1"
    COUNTED = "the ranks' counts are, in sum, the work of the calls whose changes are published"
    COMMON = "after a version over all ranks all snapshots were the same"
    SPREAD = "a published change is in all snapshots after as many versions as a period has"
    LEFT_OUT = "what a version leaves out is what its rank has, with its own changes"
    LEASED = "a rank's part is out of its snapshot exactly where it published too long ago"
    HIGHEST = "all ranks leave an operation after the last version that any has started"


class Violation(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant, details):
        super().__init__(f"not so: {invariant.value}: {details}")
        self.invariant = invariant


def require(condition, invariant, *details):
    if not condition:
        raise Violation(invariant, " ".join(str(detail) for detail in details))


# A run of a seed, and how to see it again


@contextlib.contextmanager
def telling_how_to_replay(module, seed, scenario, scenarios, types):
    """Let what fails in a block name the seed, and the command that runs it again.

    Args:
        module: the name of the module whose command replays seeds.
        scenarios: the function that makes the scenario.
        types: variants of the protocol's parts, by name.
    """
    try:
        yield
    except Exception as error:
        command = f"python -m tests.{module.split('.')[-1]} {seed} {_name_of(scenarios)}"
        for variant in types.values():
            # A class that is made anew has no name.
            command += "" if "<locals>" in variant.__qualname__ else f" {_name_of(variant)}"
        error.args = (f"{error}\nseed {seed}: {scenario}\nreplayed by: {command}",)
        raise


def _name_of(thing):
    return f"{thing.__module__}:{thing.__qualname__}"


def run_again(message):
    """Run the command that a message of `telling_how_to_replay` ends with."""
    program, *arguments = shlex.split(message.rpartition("replayed by: ")[2])
    assert program == "python"
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def replay(module, scenarios):
    """Run the seed of the command line, and print every event.

    Args:
        module: what has `run_seed`, `types_of` and `print_event`. It is imported anew, lest its
            classes differ from those that variants are made of.
        scenarios: what makes the scenarios where the command line does not say.
    """
    parser = argparse.ArgumentParser(description="Replay the run of a seed, event by event.")
    parser.add_argument("seed", type=int)
    parser.add_argument("scenarios", nargs="?", default=scenarios, help="module:function")
    parser.add_argument("variant", nargs="?", help="module:class, of the protocol or a part")
    arguments = parser.parse_args()
    model = importlib.import_module(module)
    types = model.types_of(pkgutil.resolve_name(arguments.variant)) if arguments.variant else {}
    make_scenario = pkgutil.resolve_name(arguments.scenarios)
    model.run_seed(arguments.seed, make_scenario, model.print_event, **types)
    print("every invariant holds")


class Contribution(NamedTuple):
    """Which of a rank's publications is in a sum, and how many of its updates are in it."""

    rank: int
    publication: int
    updates: int
    epoch: int


class Pair(NamedTuple):
    """A vector of two arrays, of which only averages over all ranks average the second one."""

    often: Fraction
    rarely: Fraction

    def __add__(self, other):
        other = pair_of(other)
        return Pair(self.often + other.often, self.rarely + other.rarely)

    __radd__ = __add__

    def __sub__(self, other):
        return self + -1 * pair_of(other)

    def __rsub__(self, other):
        return pair_of(other) - self

    def __mul__(self, factor):
        return Pair(factor * self.often, factor * self.rarely)

    __rmul__ = __mul__

    def __truediv__(self, divisor):
        return Pair(self.often / divisor, self.rarely / divisor)

    def __eq__(self, other):
        return tuple(self) == tuple(pair_of(other))

    def __ne__(self, other):
        return not self == other

    def __hash__(self):
        return hash(tuple(self))


def pair_of(value):
    """Return a number as a pair."""
    return value if isinstance(value, Pair) else Pair(Fraction(value), Fraction(value))


class Sum(NamedTuple):
    """The contributions of some ranks, and the exact sums of their vectors and counts."""

    parts: frozenset
    value: Fraction
    weight: int
    count: Fraction

    def plus(self, other):
        twice = self.parts & other.parts
        require(not twice, Invariant.ONE_EACH, sorted(twice), "counted twice")
        return Sum(
            self.parts | other.parts,
            self.value + other.value,
            self.weight + other.weight,
            self.count + other.count,
        )

    @property
    def mean(self):
        return self.value / self.weight

    @property
    def mean_count(self):
        return self.count / len(self.parts)


class Network:
    """The messages under way: control by receiver and dimension, data by source and tag.

    For one rank there wait at most the vectors of one synchronous operation and of `gap` + 1
    versions: ⌊log2 n⌋ + 1 from an exchange of n members. On a channel there wait at most `gap` + 1
    activations that the receiver has use for; where one is sent at a time, at most one at all. A
    channel carries at most one notice.

    With a `period`, ranks are at their own pace and every period-th version is of all of them. So
    no engine executes such a version while another has not begun it, and `gap` is at most the
    period: a rank that waits in the next one is a period ahead of those that still execute this
    one. Larger groups spread an update no later, so the propagation bound holds as well. While
    ranks load, which moves no data, one that has loaded may be `gap` versions past it and another
    as many before it: `far`. Of `far` + 1 versions in sequence as many are of all ranks as fit in
    there, and one more where they are numbered anew. Groups of one member send nothing.
    """

    def __init__(self, world_size, group_size, period=None, loads=False):
        steps = _log2_floor(world_size) + 1
        per_group = _log2_floor(group_size) + 1 if group_size > 1 else 0
        self.gap = propagation_bound(world_size, group_size) if group_size > 1 else 0
        self.far = self.gap
        of_all = 0
        if period:
            self.gap = min(self.gap or period, period)
            self.far = (1 + loads) * self.gap
            of_all = min(-(-(self.far + 1) // period) + loads, self.far + 1)
        self.bounded = bool(period) or group_size > 1
        self.data_bound = (1 + of_all) * steps + (self.far + 1 - of_all) * per_group
        # As in engines: groups of one member need no window, since messages of versions over all
        # ranks arrive in order.
        self.window = 4 * self.gap + 4 if group_size > 1 or not period else 1
        self.phases = steps + 1
        self.control = {}
        self.carried = {}
        self.notified = set()
        self.data = [{} for _ in range(world_size)]
        self.waiting = [0] * world_size

    def tag(self, version):
        """The first of a version's tags; the synchronous operations share one above them all."""
        return version % self.window * self.phases

    @property
    def operations_tag(self):
        return self.window * self.phases

    def send_control(self, destination, dimension, message):
        """Send one message over a channel of control.

        There go (version, ops) and (FREED, ops), each ever higher ones, (NOTICE, rank), at most
        once, and FIN, last.
        """
        key = destination, dimension
        last = self.carried.get(key, -1)
        require(last != FIN, Invariant.DRAINED, message, "is sent after FIN on", key)
        if message != FIN and message[0] == NOTICE:
            require(key not in self.notified, Invariant.BOUNDED, message, "is sent twice on", key)
            self.notified.add(key)
        elif message != FIN and message[0] == FREED:
            ascending = self.carried.get((*key, FREED), -1) < message[1]
            require(ascending, Invariant.BOUNDED, message, "is sent again on", key)
            self.carried[(*key, FREED)] = message[1]
        else:
            version = FIN if message == FIN else message[0]
            ascending = message == FIN or last < version
            require(ascending, Invariant.BOUNDED, message, "is sent after", last, "on", key)
            self.carried[key] = version
        self.control.setdefault(key, deque()).append(message)

    def carries_notices(self):
        return any(message[0] == NOTICE for sent in self.control.values() for message in sent)

    def receive_control(self, destination, dimension):
        channel = self.control[destination, dimension]
        message = channel.popleft()
        if not channel:
            del self.control[destination, dimension]
        return message

    def send_data(self, source, destination, tag, message):
        self.data[destination].setdefault((source, tag), deque()).append(message)
        self.waiting[destination] += 1
        require(
            self.waiting[destination] <= self.data_bound,
            Invariant.BOUNDED,
            f"{self.waiting[destination]} messages wait at rank {destination}",
        )

    def receive_data(self, source, destination, tag):
        messages = self.data[destination][source, tag]
        message = messages.popleft()
        if not messages:
            del self.data[destination][source, tag]
        self.waiting[destination] -= 1
        return message


class Exchange:
    """One member's part in the allreduce of a version, or of a synchronous operation."""

    def __init__(self, network, label, members, rank, contribution, tag):
        self.network = network
        self.label = label
        self.members = members
        self.rank = rank
        self.sum = self.contribution = contribution
        self.tag = tag
        self.schedule = schedules.Schedule()
        self.schedule.begin(len(members), members.index(rank))
        self._send()

    @property
    def done(self):
        return self.schedule.done

    def can_receive(self):
        return not self.done and self.awaited() in self.network.data[self.rank]

    def receive(self):
        """Take the message that the present step waits for, and go on to the next."""
        source, tag = self.awaited()
        label, incoming = self.network.receive_data(source, self.rank, tag)
        require(
            label == self.label,
            Invariant.MATCHED,
            f"rank {self.rank} receives data of {label} in {self.label}",
        )
        taken = self.schedule.receives == schedules.TAKE
        self.sum = incoming if taken else self.sum.plus(incoming)
        self.schedule.advance()
        self._send()

    def state(self):
        return self.schedule.phase, self.sum.parts

    def awaited(self):
        """Return the source and the tag of the message that the present step is about."""
        return self.members[self.schedule.peer], self.tag + self.schedule.phase

    def _send(self):
        """Send what is to be sent, up to the first step that receives."""
        while not self.schedule.done:
            if self.schedule.sends:
                peer, tag = self.awaited()
                self.network.send_data(self.rank, peer, tag, (self.label, self.sum))
            if self.schedule.receives != schedules.NOTHING:
                return
            self.schedule.advance()


def _log2_floor(number):
    return number.bit_length() - 1
