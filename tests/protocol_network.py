"""A deterministic in-memory network on which ranks run the wait-avoiding protocol.

Whatever can happen next, on any rank, is an event, and a chooser picks one of them. Messages are
neither lost nor duplicated, and those of one channel arrive in order, which is MPI's promise;
all else may be interleaved in any way. Every invariant of the protocol is checked while it runs,
and a run that breaks one raises a `Violation` that names it.

``python -m tests.protocol_network SEED`` replays the random run of a seed, event by event.
"""

from __future__ import annotations

import enum
import importlib.util
import itertools
import pickle
import random
import sys
from collections import deque
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from collectives.topology import activation_peers, propagation_bound, shuffle

ROOT = Path(__file__).resolve().parents[1]


def load_source(module):
    """Load a protocol's source as a module of its own: the compiled one's methods are C's."""
    name = f"_source_of_{module}"
    if name not in sys.modules:
        path = ROOT / "collectives" / "protocols" / f"{module}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


protocols = load_source("wait_avoiding")
schedules = load_source("schedule")

# What an application's program consists of, besides the operations AVERAGE, SYNCHRONIZE, CLOSE.
CALL = "call"
INTERRUPTED_CALL = "interrupted call"
PUBLISH = "publish"
AVERAGE = protocols.AVERAGE
SYNCHRONIZE = protocols.SYNCHRONIZE
CLOSE = protocols.CLOSE

# When a rank sends the activations that are due.
AT_ONCE = "at once"
DELAYED = "delayed"
ONE_AT_A_TIME = "one at a time"

FIN = "fin"

# What an exchange is of: the number follows.
VERSION = "version"
OPERATION = "operation"


class Invariant(enum.Enum):
    """What must hold in every run."""

    IN_ORDER = "every started version, and no other, is executed once by each rank, in order"
    ONE_EACH = "the members of a group have the same contributions, one of each member"
    TIMELY = "a call is timely exactly if its vector is in its version's sum"
    LATE = "a late result is as new as its call, and lacks the call's vector"
    EPOCH = "no contribution and no result crosses a synchronisation"
    NOBODY_PASSIVE = "where nobody is passive, every call is timely"
    BETWEEN_VERSIONS = "a snapshot changes only between versions"
    CONSERVED = "the sum of all snapshots changes by the published updates alone"
    NEAR = "no two ranks' engines are further apart than the propagation bound"
    BOUNDED = "the messages that wait at a rank are bounded"
    MATCHED = "a message is received by the exchange that it was sent for"
    WAIT_AVOIDING = "no group call waits for a stopped application"
    ENDS = "nothing hangs"
    DRAINED = "no message is received after leaving, or left over"
    DISAGREED = "after a mismatch the ranks that are not closing are broken, the others close anew"


class Violation(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant, details):
        super().__init__(f"not so: {invariant.value}: {details}")
        self.invariant = invariant


def require(condition, invariant, *details):
    if not condition:
        raise Violation(invariant, " ".join(str(detail) for detail in details))


class Contribution(NamedTuple):
    """Which of a rank's publications is in a sum."""

    rank: int
    publication: int
    epoch: int


class Sum(NamedTuple):
    """The contributions of some ranks, and the exact sum of their vectors."""

    parts: frozenset
    value: Fraction

    def plus(self, other):
        twice = self.parts & other.parts
        require(not twice, Invariant.ONE_EACH, sorted(twice), "counted twice")
        return Sum(self.parts | other.parts, self.value + other.value)

    @property
    def mean(self):
        return self.value / len(self.parts)


class PaperRule:
    """Publishing replaces the snapshot; the model is one exact number."""

    conserves = False

    def __init__(self, model):
        self.model = model
        self.snapshot = model
        self.returned = model

    def unpublished(self):
        """The update that a publication would add to the snapshot."""
        return self.model - self.snapshot

    def publish(self):
        self.snapshot = self.model

    def executed(self, mean):
        """A version has been executed, passively or not."""

    def returns(self, timely, result):
        """The call returns the group's mean, or, late, the mean with its own vector added."""
        weight = len(result.parts)
        self.model = result.mean if timely else (result.value + self.model) / (weight + 1)

    def adopt(self, mean):
        """All ranks' common average is the model, and what is contributed from now on."""
        self.model = self.snapshot = self.returned = mean


class ConservingRule(PaperRule):
    """Publishing adds the application's own change; a mean replaces the snapshot."""

    conserves = True

    def unpublished(self):
        return self.model - self.returned

    def publish(self):
        self.snapshot += self.unpublished()
        self.returned = self.model

    def executed(self, mean):
        self.snapshot = mean

    def returns(self, timely, result):
        self.model = self.returned = self.snapshot


@dataclass(frozen=True)
class Scenario:
    """What the ranks of a run do, and which of their applications stop for a while.

    Attributes:
        programs: what each rank's application does; the last operation is CLOSE.
        sends: when due activations are sent; a delayed one may be overtaken by a later one.
        frozen: the ranks whose applications stop, wherever they compute, after `frozen_from`
            events, until nothing more can happen without them.
    """

    world_size: int
    group_size: int
    sync_period: int
    programs: tuple
    passive: bool = True
    rule: type = PaperRule
    sends: str = AT_ONCE
    frozen: frozenset = frozenset()
    frozen_from: int = 0


class Network:
    """The messages under way: activations by receiver and dimension, data by source and tag.

    For one rank there wait at most the vectors of one synchronous operation and of `gap` + 1
    versions: ⌊log2 n⌋ + 1 from an exchange of n members. On a channel there wait at most `gap` + 1
    activations that the receiver has use for; where one is sent at a time, at most one at all.
    """

    def __init__(self, world_size, group_size):
        steps = _log2_floor(world_size) + 1
        self.gap = 0
        self.data_bound = steps
        if group_size > 1:
            self.gap = propagation_bound(world_size, group_size)
            self.data_bound += (self.gap + 1) * (_log2_floor(group_size) + 1)
        self.window = 4 * self.gap + 4
        self.phases = steps + 1
        self.control = {}
        self.data = [{} for _ in range(world_size)]
        self.waiting = [0] * world_size

    def tag(self, version):
        """The first of a version's tags; the synchronous operations share one above them all."""
        return version % self.window * self.phases

    @property
    def operations_tag(self):
        return self.window * self.phases

    def send_control(self, destination, dimension, message):
        """Send (version, ops) or FIN; a channel carries ever higher versions, and FIN last."""
        channel = self.control.setdefault((destination, dimension), deque())
        if channel:
            follows = channel[-1] != FIN and (message == FIN or channel[-1][0] < message[0])
            require(follows, Invariant.BOUNDED, message, "is sent after", list(channel))
        channel.append(message)

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
        return not self.done and self._awaited() in self.network.data[self.rank]

    def receive(self):
        """Take the message that the present step waits for, and go on to the next."""
        source, tag = self._awaited()
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

    def _awaited(self):
        return self.members[self.schedule.peer], self.tag + self.schedule.phase

    def _send(self):
        """Send what is to be sent, up to the first step that receives."""
        while not self.schedule.done:
            if self.schedule.sends:
                peer, tag = self._awaited()
                self.network.send_data(self.rank, peer, tag, (self.label, self.sum))
            if self.schedule.receives != schedules.NOTHING:
                return
            self.schedule.advance()


class Stage(enum.Enum):
    """Where an application is."""

    COMPUTING = enum.auto()
    HANDING_OVER = enum.auto()
    COLLECTING = enum.auto()
    PUBLISHING = enum.auto()
    AGREEING = enum.auto()
    AVERAGING = enum.auto()
    CLOSED = enum.auto()


class Application:
    """One rank's application: it goes through its program, computing before each operation."""

    def __init__(self, rank, program):
        self.rank = rank
        self.program = list(program)
        self.stage = Stage.COMPUTING
        self.operation = None
        self.frozen = False
        self.interruptible = False
        self.vector = None

    def ready(self):
        """Whether the application can take its next step."""
        protocol = self.rank.protocol
        if self.stage == Stage.COMPUTING:
            return not self.frozen and (self.program[0] == CLOSE or self.caught_up())
        if self.stage in (Stage.COLLECTING, Stage.PUBLISHING):
            return protocol.vectors == protocols.HELD and not protocol.waiting
        if self.stage == Stage.AGREEING:
            return protocol.stage == protocols.MOVING
        if self.stage == Stage.AVERAGING:
            return self.rank.average.done
        return self.stage == Stage.HANDING_OVER

    def caught_up(self):
        """Whether the version of an interrupted call, if there was one, has been executed since."""
        return self.rank.protocol.next >= self.rank.protocol.t

    def waits_in_group_call(self):
        if self.stage == Stage.COMPUTING:
            return not self.caught_up()
        return self.stage in (Stage.COLLECTING, Stage.PUBLISHING) and not self.ready()

    def step(self):
        if self.stage == Stage.COMPUTING:
            self.begin(self.program.pop(0))
        elif self.stage == Stage.HANDING_OVER:
            self.hand_over()
        elif self.stage == Stage.COLLECTING:
            self.collect()
        elif self.stage == Stage.PUBLISHING:
            self.rank.publish()
            self.rank.protocol.release()
            self.stage = Stage.COMPUTING
        elif self.stage == Stage.AGREEING:
            self.rank.begin_average(self.operation)
            self.stage = Stage.AVERAGING
        else:
            self.rank.finish_average(self.operation)
            self.stage = Stage.COMPUTING

    def begin(self, operation):
        """Compute, which changes the model, and enter the program's next operation."""
        self.rank.compute()
        if operation == PUBLISH:
            self.rank.protocol.hold()
            self.stage = Stage.PUBLISHING
        elif operation not in (CALL, INTERRUPTED_CALL):
            self.enter(operation)
        elif self.rank.protocol.is_synchronous():
            self.enter(protocols.SYNC)
        else:
            self.interruptible = operation == INTERRUPTED_CALL
            self.call()

    def enter(self, operation):
        self.operation = operation
        self.stage = Stage.CLOSED if operation == CLOSE else Stage.AGREEING
        self.rank.protocol.enter(operation)
        self.rank.contribute_to_agreement()

    def call(self):
        protocol = self.rank.protocol
        protocol.call()
        self.vector = None
        if protocol.timely:
            self.rank.world.start(protocol.t, self.rank)
        handed_over = protocol.timely and protocol.vectors == protocols.HELD
        self.stage = Stage.HANDING_OVER if handed_over else Stage.COLLECTING

    def hand_over(self):
        """Publish the vector of a timely call, which lets its version begin."""
        self.vector = self.rank.publish()
        self.rank.protocol.published()
        self.stage = Stage.COLLECTING

    def collect(self):
        """Take what the call returns, and, late, publish the vector."""
        rank, protocol = self.rank, self.rank.protocol
        if self.vector is None:
            rank.check_late()
            self.vector = rank.publish()
        rank.check_call(self.vector)
        rank.world.met.add("timely" if protocol.timely else "late")
        rank.rule.returns(protocol.timely, rank.result)
        protocol.returns()
        self.interruptible = False
        self.stage = Stage.COMPUTING

    def interrupt(self):
        """An exception ends the call."""
        self.rank.world.met.add("interrupted")
        self.rank.protocol.abandon()
        self.interruptible = False
        self.stage = Stage.COMPUTING

    def fail(self):
        """The operation raised: the application can only close."""
        self.rank.world.met.add("disagreement")
        self.program = [CLOSE]
        self.stage = Stage.COMPUTING


class Rank:
    """One rank: it does what its protocol says, event by event, as an engine would."""

    def __init__(self, world, number, protocol_type, application_type):
        scenario = world.scenario
        self.world = world
        self.number = number
        self.peers = activation_peers(number, scenario.world_size)
        self.protocol = protocol_type(
            len(self.peers), scenario.group_size, scenario.sync_period, scenario.passive
        )
        self.application = application_type(self, scenario.programs[number])
        self.rule = scenario.rule(Fraction(number))
        self.contribution = Contribution(number, 0, 0)
        self.epoch = 0
        self.updates = 0
        self.exchange = None
        self.average = None
        self.result = None
        self.result_epoch = -1
        self.executed = []
        self.left = False

    # Events

    def events(self):
        """List what can happen on this rank."""
        protocol, application = self.protocol, self.application
        control, dimensions = self.world.network.control, range(len(self.peers))
        events = [(self.number, "hear", k) for k in dimensions if (self.number, k) in control]
        if application.ready():
            events.append((self.number, "step"))
        if application.interruptible:
            events.append((self.number, "interrupt"))
        if self.exchange is not None and self.exchange.can_receive():
            events.append((self.number, "receive"))
        if self.average is not None and self.average.can_receive():
            events.append((self.number, "receive_average"))
        if protocol.stage == protocols.AGREEING and self.all_entered():
            events.append((self.number, "agree"))
        if protocol.due or protocol.fin_due:
            events += [(self.number, "send", k) for k in dimensions if self.can_send(k)]
        if not self.left and protocol.may_leave():
            events.append((self.number, "leave"))
        return events

    def step(self):
        self.application.step()

    def interrupt(self):
        self.application.interrupt()

    def receive(self):
        self.exchange.receive()

    def receive_average(self):
        self.average.receive()

    def hear(self, dimension):
        """An activation or a FIN arrives."""
        message = self.world.network.receive_control(self.number, dimension)
        require(not self.left, Invariant.DRAINED, f"{message} for rank {self.number}, which left")
        if message == FIN:
            self.protocol.fin(dimension)
            return
        due, sent = self.protocol.due, list(self.protocol.sent)
        self.protocol.tell(*message, dimension)
        if any(due >> k & 1 and sent[k] < self.protocol.sent[k] for k in range(len(sent))):
            self.world.met.add("overtaken activation")

    def can_send(self, dimension):
        if not (self.protocol.due | self.protocol.fin_due) >> dimension & 1:
            return False
        channel = (self.peers[dimension][0], dimension)
        busy = channel in self.world.network.control
        return not busy or self.world.scenario.sends != ONE_AT_A_TIME

    def send(self, dimension):
        """Send the activation that is due on a dimension, or else the FIN."""
        protocol, bit = self.protocol, 1 << dimension
        if protocol.due & bit:
            protocol.due &= ~bit
            message = (protocol.sent[dimension], protocol.sent_ops[dimension])
            self.world.check_activation(message, self.peers[dimension][0])
        else:
            protocol.fin_due &= ~bit
            message = FIN
        self.world.network.send_control(self.peers[dimension][0], dimension, message)

    def agree(self):
        """All ranks have entered an operation: each learns of what the others have entered."""
        protocol, entered = self.protocol, self.world.entered[self.protocol.ops]
        records = [number for rank in sorted(entered) for number in entered[rank]]
        same, closing = len(set(entered.values())) == 1, protocol.operation == CLOSE
        closed = all(operation == CLOSE for operation, _ in entered.values())
        broken = protocol.broken
        protocol.agreed(records, len(entered))
        if closed or same:
            stage = protocols.LEAVING if closed else protocols.MOVING
        else:
            stage = protocols.AGREEING if closing else protocols.OUTSIDE
            broken = broken or not closing
        require(
            protocol.stage == stage and protocol.broken == broken,
            Invariant.DISAGREED,
            f"rank {self.number}, at stage {protocol.stage}, broken {protocol.broken}, {entered}",
        )
        if protocol.stage == protocols.OUTSIDE:
            self.application.fail()
        elif protocol.stage == protocols.AGREEING:
            self.contribute_to_agreement()

    def leave(self):
        self.left = True

    # Versions

    def react(self):
        """Execute what the protocol wants executed, and send what is due, if it is sent at once."""
        while True:
            if self.exchange is not None and self.exchange.done:
                self.finish_version()
            elif self.exchange is None and self.protocol.vectors == protocols.RUNNING:
                self.begin_version()
            else:
                break
        if self.world.scenario.sends == AT_ONCE:
            for dimension in range(len(self.peers)):
                while self.can_send(dimension):
                    self.send(dimension)

    def begin_version(self):
        world, version = self.world, self.protocol.running
        scenario = world.scenario
        require(
            (version + 1) % scenario.sync_period,
            Invariant.EPOCH,
            f"rank {self.number} executes version {version}, a synchronisation, passively",
        )
        require(version in world.started, Invariant.IN_ORDER, f"nobody has started {version}")
        require(
            self.contribution.epoch == world.started[version],
            Invariant.EPOCH,
            f"version {version}, started in epoch {world.started[version]}: {self.contribution}",
        )
        groups = shuffle(scenario.world_size, scenario.group_size)
        self.exchange = Exchange(
            world.network,
            (VERSION, version),
            groups.members(self.number, version),
            self.number,
            Sum(frozenset([self.contribution]), self.rule.snapshot),
            world.network.tag(version),
        )

    def finish_version(self):
        exchange, self.exchange = self.exchange, None
        version = exchange.label[1]
        contributed = Sum(frozenset([self.contribution]), self.rule.snapshot)
        require(
            contributed == exchange.contribution,
            Invariant.BETWEEN_VERSIONS,
            f"rank {self.number} in version {version}: {exchange.contribution}, {contributed}",
        )
        self.world.check_sum(exchange, exchange.sum)
        require(
            not self.executed or self.executed[-1] < version,
            Invariant.IN_ORDER,
            f"rank {self.number} executes {version} after {self.executed}",
        )
        self.executed.append(version)
        if self.application.stage == Stage.COMPUTING:
            self.world.met.add("passive")
        self.rule.executed(exchange.sum.mean)
        self.result = exchange.sum
        self.result_epoch = self.epoch
        self.protocol.finished()

    def compute(self):
        """Change the model by an update that no other rank, and no other time, has."""
        self.updates += 1
        self.rule.model += self.updates * self.world.scenario.world_size + self.number

    def publish(self):
        """Replace what this rank contributes; return what it contributes from now on."""
        self.world.published += self.rule.unpublished()
        self.rule.publish()
        self.contribution = self.contribution._replace(
            publication=self.contribution.publication + 1, epoch=self.epoch
        )
        return self.contribution

    def check_late(self):
        protocol = self.protocol
        details = f"rank {self.number} late at {protocol.t}, source {protocol.source}"
        require(protocol.source >= protocol.t, Invariant.LATE, details)
        require(protocol.source == self.executed[-1], Invariant.LATE, details, self.executed)

    def check_call(self, vector):
        """What a call is about to return is what it says that it is."""
        protocol, scenario = self.protocol, self.world.scenario
        details = f"rank {self.number} in call {protocol.t}, timely {protocol.timely}"
        group = shuffle(scenario.world_size, scenario.group_size).members(self.number, protocol.t)
        result = self.world.sums.get((VERSION, protocol.t, *group))
        present = result is not None and vector in result.parts
        require(present == bool(protocol.timely), Invariant.TIMELY, details, vector, result)
        require(protocol.next > protocol.t, Invariant.IN_ORDER, details, "returns too early")
        require(self.result_epoch == self.epoch, Invariant.EPOCH, details, "result too old")
        require(protocol.timely or vector not in self.result.parts, Invariant.LATE, details)
        require(protocol.timely or scenario.passive, Invariant.NOBODY_PASSIVE, details)

    # Synchronous operations

    def all_entered(self):
        return len(self.world.entered[self.protocol.ops]) == self.world.scenario.world_size

    def contribute_to_agreement(self):
        entered = self.world.entered.setdefault(self.protocol.ops, {})
        entered[self.number] = (self.protocol.operation, self.protocol.t)

    def begin_average(self, operation):
        """Contribute to the average over all ranks, which publishes, except for AVERAGE."""
        value = self.rule.snapshot + self.rule.unpublished()
        if operation == AVERAGE:
            self.world.unpublished += self.rule.unpublished()
        else:
            self.publish()
        network = self.world.network
        self.average = Exchange(
            network,
            (OPERATION, self.protocol.ops),
            list(range(self.world.scenario.world_size)),
            self.number,
            Sum(frozenset([self.contribution]), value),
            network.operations_tag,
        )

    def finish_average(self, operation):
        average, self.average = self.average, None
        self.world.check_sum(average, average.sum)
        epochs = {part.epoch for part in average.sum.parts}
        require(epochs == {self.epoch}, Invariant.EPOCH, f"{average.label}: {average.sum}")
        if operation != AVERAGE:
            self.epoch += 1
            self.world.met.add("synchronisation")
            self.adopt(average.sum.mean)
        self.protocol.moved()

    def adopt(self, mean):
        """The common average is this rank's model, and what it contributes from now on."""
        self.rule.adopt(mean)
        self.contribution = self.contribution._replace(
            publication=self.contribution.publication + 1, epoch=self.epoch
        )

    def state(self):
        protocol, application = vars(self.protocol), self.application
        values = (tuple(each) if isinstance(each, list) else each for each in protocol.values())
        return (
            *values,
            application.stage,
            len(application.program),
            application.interruptible,
            application.vector,
            self.contribution,
            self.epoch,
            self.exchange and self.exchange.state(),
            self.average and self.average.state(),
            self.result and self.result.parts,
            self.result_epoch,
            self.left,
        )

    def __str__(self):
        state = vars(self.protocol)
        shown = ("t", "next", "told", "told_ops", "ops", "vectors", "stage", "fin_at", "fin_seen")
        values = " ".join(f"{name}={state[name]}" for name in shown)
        return f"rank {self.number} {self.application.stage.name}: {values}"


class World:
    """All ranks and the network between them."""

    def __init__(
        self,
        scenario,
        protocol_type=protocols.WaitAvoiding,
        rank_type=Rank,
        application_type=Application,
    ):
        self.scenario = scenario
        self.network = Network(scenario.world_size, scenario.group_size)
        self.started = {}
        self.sums = {}
        self.entered = {}
        self.ranks = [
            rank_type(self, number, protocol_type, application_type)
            for number in range(scenario.world_size)
        ]
        self.initial = sum(rank.rule.snapshot for rank in self.ranks)
        self.published = 0
        self.unpublished = 0
        self.met = set()

    def events(self):
        """List all that can happen next."""
        return [event for rank in self.ranks for event in rank.events()]

    def happen(self, event):
        number, action, *arguments = event
        rank = self.ranks[number]
        before = rank.protocol.next
        getattr(rank, action)(*arguments)
        rank.react()
        if rank.protocol.next != before:
            self.check_distance()

    def run(self, choose, watch=None):
        """Let everything happen, in the order in which `choose` picks from the events."""
        for count in itertools.count():
            if count == self.scenario.frozen_from:
                self.freeze(self.scenario.frozen)
            events = self.events()
            if not events:
                frozen = [rank for rank in self.ranks if rank.application.frozen]
                if not frozen:
                    break
                self.met.add("stopped")
                self.check_nobody_waits()
                self.freeze(())
                continue
            event = choose(events)
            if watch:
                watch(event, self)
            self.happen(event)
        self.check_end()
        return count

    def is_computing(self, event):
        """Whether the event is the end of an application's computing."""
        stage = self.ranks[event[0]].application.stage
        return event[1] == "step" and stage == Stage.COMPUTING

    def state(self):
        """All that the future depends on, but for the vectors' values."""
        ranks = tuple(rank.state() for rank in self.ranks)
        control = frozenset(
            (channel, tuple(sent)) for channel, sent in self.network.control.items()
        )
        data = frozenset(
            (destination, key, tuple((label, sent.parts) for label, sent in messages))
            for destination, mail in enumerate(self.network.data)
            for key, messages in mail.items()
        )
        return ranks, control, data

    def freeze(self, numbers):
        """Stop the applications of these ranks where they compute, and of no others."""
        for rank in self.ranks:
            rank.application.frozen = rank.number in numbers

    def start(self, version, rank):
        self.started.setdefault(version, rank.epoch)

    # Invariants

    def check_sum(self, exchange, result):
        """Each member has contributed once, and all members have the same sum."""
        details = f"{exchange.label} of {exchange.members}: {result}"
        ranks = sorted(part.rank for part in result.parts)
        require(ranks == sorted(exchange.members), Invariant.ONE_EACH, details)
        require(exchange.contribution.parts <= result.parts, Invariant.ONE_EACH, details)
        key = (*exchange.label, *exchange.members)
        if key not in self.sums and exchange.label[0] == OPERATION:
            self.check_conserved(result.value - self.unpublished, details)
            self.unpublished = 0
        first = self.sums.setdefault(key, result)
        require(first == result, Invariant.ONE_EACH, details, "and", first)

    def check_conserved(self, snapshots, details):
        if self.scenario.rule.conserves:
            expected = self.initial + self.published
            require(snapshots == expected, Invariant.CONSERVED, f"{expected}, {details}")

    def check_activation(self, message, destination):
        """An activation is little ahead of its receiver, so that few wait that it has use for."""
        allowed = self.ranks[destination].protocol.next + self.network.gap
        require(message[0] <= allowed, Invariant.BOUNDED, message, f"for rank {destination}")

    def check_distance(self):
        versions = [rank.protocol.next for rank in self.ranks]
        apart = max(versions) - min(versions)
        if self.scenario.group_size > 1:
            require(apart <= self.network.gap, Invariant.NEAR, versions)

    def check_nobody_waits(self):
        """Nothing more can happen while some applications stop: no group call may wait."""
        if not self.scenario.passive:
            return
        for rank in self.ranks:
            require(not rank.application.waits_in_group_call(), Invariant.WAIT_AVOIDING, rank)

    def check_end(self):
        for rank in self.ranks:
            require(rank.left, Invariant.ENDS, *self.ranks)
        left_over = [*self.network.control.items(), *filter(None, self.network.data)]
        require(not left_over, Invariant.DRAINED, left_over)
        for rank in self.ranks:
            require(
                rank.executed == sorted(self.started),
                Invariant.IN_ORDER,
                f"rank {rank.number} executed {rank.executed} of {sorted(self.started)}",
            )
        self.check_conserved(sum(rank.rule.snapshot for rank in self.ranks), "at the end")


class ListedChooser:
    """Picks events as a list of numbers says, and the first one when it has come to its end."""

    def __init__(self, numbers):
        self.numbers = iter(numbers)

    def __call__(self, events):
        return events[next(self.numbers, 0) % len(events)]


class RandomChooser:
    """Picks events at random, from ranks of very different speeds and over stalled channels."""

    def __init__(self, generator, world_size, stall=False):
        self.generator = generator
        self.applications = generator.choices((0.02, 0.2, 1, 1, 5), k=world_size)
        self.engines = generator.choices((0.05, 1, 1, 5), k=world_size)
        self.stall = stall
        self.weights = {}

    def __call__(self, events):
        weights = [self.weights.get(event) or self._weight(event) for event in events]
        return self.generator.choices(events, weights)[0]

    def _weight(self, event):
        number, action, *_ = event
        weight = (self.applications if action == "step" else self.engines)[number]
        if action == "hear" and self.stall and self.generator.random() < 0.15:
            weight *= 0.001
        self.weights[event] = weight
        return weight


def random_programs(generator, world_size, sync_period, kind, longest=14):
    """Make one program a rank: all "equal", of "unequal" lengths, or with a "mismatch"."""
    calls = generator.randint(0, 3 * sync_period if sync_period < 8 else longest)
    common = [CALL] * calls
    for _ in range(generator.choice((0, 0, 1, 2))):
        operation = generator.choice((AVERAGE, SYNCHRONIZE))
        common.insert(generator.randint(0, len(common)), operation)
    programs = []
    for _ in range(world_size):
        program = list(common)
        if kind == "unequal":
            del program[generator.randint(0, len(program)) :]
        elif kind == "mismatch" and generator.random() < 0.3:
            operation = generator.choice((CALL, AVERAGE, SYNCHRONIZE))
            program.insert(generator.randint(0, len(program)), operation)
        for _ in range(generator.choice((0, 0, 1, 2))):
            program.insert(generator.randint(0, len(program)), PUBLISH)
        if CALL in program and generator.random() < 0.2:
            calls = [index for index, operation in enumerate(program) if operation == CALL]
            program[generator.choice(calls)] = INTERRUPTED_CALL
        programs.append((*program, CLOSE))
    return tuple(programs)


def random_scenario(generator):
    world_size = generator.randint(1, 9)
    sync_period = generator.choice((1, 2, 3, 4, 5, 100))
    kind = generator.choice(("equal", "equal", "unequal", "mismatch"))
    frozen = frozenset()
    if generator.random() < 0.5:
        frozen = frozenset(rank for rank in range(world_size) if generator.random() < 0.4)
    return Scenario(
        world_size,
        group_size=generator.randint(1, world_size),
        sync_period=sync_period,
        programs=random_programs(generator, world_size, sync_period, kind),
        passive=generator.random() < 0.75,
        rule=generator.choice((PaperRule, ConservingRule)),
        sends=generator.choice((AT_ONCE, DELAYED, ONE_AT_A_TIME)),
        frozen=frozen,
        frozen_from=generator.randint(0, 60 * world_size),
    )


def run_seed(seed, make_scenario=random_scenario, watch=None, **types):
    """Run the random scenario of a seed with the random choices of the seed."""
    generator = random.Random(seed)
    scenario = make_scenario(generator)
    stall = generator.random() < 0.5
    try:
        world = World(scenario, **types)
        world.run(RandomChooser(generator, scenario.world_size, stall), watch)
    except Violation as violation:
        violation.args = (f"{violation}\nseed {seed}: {scenario}",)
        raise
    return world


def explore(scenario, **types):
    """Run a scenario in every order in which its events can happen; return the number of states.

    In every state all applications that compute may stop for ever: no group call may wait for one.
    """
    first = World(scenario, **types)
    seen, unexplored = {first.state()}, [pickle.dumps(first)]
    while unexplored:
        saved = unexplored.pop()
        world = pickle.loads(saved)
        events = world.events()
        if not events:
            world.check_end()
        if all(world.is_computing(event) for event in events):
            world.check_nobody_waits()
        for event in events:
            world = pickle.loads(saved)
            world.happen(event)
            state = world.state()
            if state not in seen:
                seen.add(state)
                unexplored.append(pickle.dumps(world))
    return len(seen)


def print_event(event, world):
    print(*event, "|", world.ranks[event[0]])


def _log2_floor(number):
    return number.bit_length() - 1


if __name__ == "__main__":
    run_seed(int(sys.argv[1]), watch=print_event)
