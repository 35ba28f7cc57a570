"""A deterministic in-memory network on which ranks run the wait-avoiding protocol.

Whatever can happen next, on any rank, is an event, and a chooser picks one of them. Messages are
neither lost nor duplicated, and those of one channel arrive in order, which is MPI's promise;
all else may be interleaved in any way. Every invariant of the protocol is checked while it runs,
and a run that breaks one raises a `Violation` that names it.

``python -m tests.protocol_network SEED`` replays the random run of a seed, event by event; the
message of a run that fails says what to add for other scenarios and for variants of the protocol.
"""

from __future__ import annotations

import enum
import itertools
import random
import sys
from fractions import Fraction
from pathlib import Path

from collectives.topology import activation_peers

sys.path.insert(0, str(Path(__file__).parent))

from protocol_messages import (
    FIN,
    FREED,
    NOTICE,
    OPERATION,
    VERSION,
    Contribution,
    Exchange,
    Invariant,
    Network,
    Pair,
    Sum,
    all_ranks,
    contribution,
    pair_of,
    protocol_of,
    protocols,
    rank_port,
    rank_protocol,
    replay,
    require,
    rule_of,
    snapshots,
    telling_how_to_replay,
    version_steps,
)
from protocol_own_pace import OwnPace
from protocol_scenarios import (
    AT_ONCE,
    CALL,
    INTERRUPTED_CALL,
    INTERRUPTED_NONFINITE_CALL,
    JOIN,
    LEASE,
    NONFINITE_CALL,
    ONE_AT_A_TIME,
    PUBLISH,
    Load,
    random_scenario,
)

# What to call the operations that a run meets.
OPERATIONS = {
    all_ranks.SYNC: "synchronization",
    all_ranks.SYNCHRONIZE: "synchronization",
    all_ranks.LOAD: "load",
    all_ranks.FINISH: "finish",
}


# What a `SnapshotProtocol` does depends on, beside its vectors and their weights.
DECIDING = (
    *("present", "calling", "published", "lent", "state", "target", "copy", "saved"),
    "drops",
)


class Stage(enum.Enum):
    """Where an application is."""

    COMPUTING = enum.auto()
    HANDING_OVER = enum.auto()
    COLLECTING = enum.auto()
    PUBLISHING = enum.auto()
    AGREEING = enum.auto()
    REDUCING = enum.auto()
    CLOSED = enum.auto()


def agreement(entered, own_pace=False):
    """Return the operation and the version that these pairs (operation, t) agree on.

    At the `own_pace` of ranks it is the highest version of any.

    There is none where two operations or versions differ; but ranks may close after different
    numbers of calls, and ranks that have joined take part in the averages of others, as many as
    those have made calls.
    """
    if own_pace:
        highest = max(t for _, t in entered)
        entered = [(operation, highest) for operation, _ in entered]
    joined = {t for operation, t in entered if operation == all_ranks.JOIN}
    others = {pair for pair in entered if pair[0] != all_ranks.JOIN}
    if not others:
        return all_ranks.FINISH, max(joined)
    if not joined and {operation for operation, _ in others} == {all_ranks.CLOSE}:
        return all_ranks.CLOSE, max(t for _, t in others)
    operation, t = min(others)
    averages = operation not in (all_ranks.CLOSE, all_ranks.LOAD)
    if len(others) > 1 or (joined and (not averages or max(joined) > t)):
        return all_ranks.NONE, -1
    return operation, t


INTERRUPTED_CALLS = INTERRUPTED_CALL, INTERRUPTED_NONFINITE_CALL
NONFINITE_CALLS = NONFINITE_CALL, INTERRUPTED_NONFINITE_CALL

# The steps of its rank for one of which an application waits.
CALLS = version_steps.PUBLISH, version_steps.RETURN
STEPS = {
    Stage.HANDING_OVER: CALLS,
    Stage.COLLECTING: CALLS,
    Stage.PUBLISHING: (version_steps.SHARE,),
    Stage.AGREEING: (rank_protocol.CONTRIBUTE, rank_protocol.REPLACE),
    Stage.REDUCING: (rank_protocol.END_AVERAGE, rank_protocol.REPLACE),
}


class Application:
    """One rank's application: it goes through its program, computing before each operation."""

    def __init__(self, rank, program):
        self.rank = rank
        self.program = list(program)
        self.stage = Stage.COMPUTING
        self.load = None
        self.frozen = False
        self.interruptible = False
        self.vector = None

    def ready(self):
        """Whether the application can take its next step."""
        if self.stage == Stage.COMPUTING:
            return not self.frozen and (self.is_closing() or self.may_go_on())
        return self.rank.driven.next_step() in STEPS.get(self.stage, ())

    def is_closing(self):
        """Whether the application closes next, as it does once it heeds a failure."""
        heeded = self.rank.world.scenario.heeds and self.rank.protocol.failed >= 0
        return heeded or self.program[0] == all_ranks.CLOSE

    def caught_up(self):
        """Whether the version of an interrupted call, if there was one, has been executed since."""
        return self.rank.protocol.next >= self.rank.protocol.version

    def may_go_on(self):
        """Whether the next operation can begin; join() begins once no version runs."""
        joins = self.program[0] == JOIN and self.rank.world.joining_publishes
        return self.caught_up() and not (joins and self.rank.protocol.vectors == protocols.RUNNING)

    def computes(self):
        """Whether the application makes no call, and its last one is over."""
        return self.stage == Stage.COMPUTING and self.caught_up()

    def waits_in_group_call(self):
        if self.stage == Stage.COMPUTING:
            return not self.caught_up()
        return self.stage in (Stage.COLLECTING, Stage.PUBLISHING) and not self.ready()

    def step(self):
        if self.stage == Stage.COMPUTING:
            self.begin(all_ranks.CLOSE if self.is_closing() else self.program.pop(0))
        elif self.stage in (Stage.HANDING_OVER, Stage.COLLECTING):
            publishes = self.rank.driven.next_step() == version_steps.PUBLISH
            self.hand_over() if publishes else self.collect()
        elif self.stage == Stage.PUBLISHING:
            if self.rank.driven.purpose == version_steps.PUBLISHING:
                self.rank.note_publication()
            self.rank.driven.take(version_steps.SHARE)
            self.compute()
        elif self.stage == Stage.AGREEING:
            self.rank.begin_operation()
            self.stage = Stage.REDUCING
        else:
            self.rank.finish_operation()
            if self.rank.driven.done:
                self.compute()
            elif not self.rank.driven.begun:
                self.stage = Stage.AGREEING

    def begin(self, operation):
        """Compute, which changes the model, and enter the program's next operation."""
        self.rank.compute()
        if operation != all_ranks.CLOSE:
            self.rank.publishing.give(self.rank.weight_of_update())
        if operation == PUBLISH:
            self.rank.driven.hold(version_steps.PUBLISHING)
            self.stage = Stage.PUBLISHING
        elif operation == LEASE:
            self.rank.driven.hold(version_steps.LEASING)
            self.stage = Stage.PUBLISHING
        elif operation == JOIN:
            self.stage = Stage.AGREEING
            self.rank.join()
        elif isinstance(operation, Load):
            self.load = operation
            self.enter(all_ranks.LOAD)
        elif operation not in (CALL, *INTERRUPTED_CALLS, *NONFINITE_CALLS):
            self.enter(operation)
        elif self.rank.protocol.is_synchronous():
            self.enter(all_ranks.SYNC)
        else:
            self.given = self.rank.model
            self.interruptible = operation in INTERRUPTED_CALLS
            self.rank.vectors.finite = operation not in NONFINITE_CALLS
            self.call()

    def compute(self):
        """The application's vector is its own again."""
        self.rank.publishing.forget()
        self.stage = Stage.COMPUTING

    def enter(self, operation):
        self.stage = Stage.CLOSED if operation == all_ranks.CLOSE else Stage.AGREEING
        self.rank.enter(operation)

    def call(self):
        protocol = self.rank.protocol
        alone, started = self.rank.is_first_here(), protocol.started
        self.rank.driven.call()
        if self.rank.world.scenario.own_pace:
            starts = bool(protocol.timely), protocol.started > started
            require(starts == (alone, alone), Invariant.PACE, self.rank, alone, starts)
        self.vector = None
        self.rank.world.note_arrival(self.rank)
        if protocol.timely and protocol.may_start(protocol.version):
            self.rank.world.start(protocol.version, self.rank)
        handed_over = protocol.timely and protocol.vectors == protocols.HELD
        self.stage = Stage.HANDING_OVER if handed_over else Stage.COLLECTING

    def hand_over(self):
        """Publish the vector of a timely call, which lets its version begin."""
        protocol, started = self.rank.protocol, self.rank.protocol.started
        self.vector = self.rank.note_publication()
        self.rank.driven.take(version_steps.PUBLISH)
        if started < protocol.version <= protocol.started:
            self.rank.world.start(protocol.version, self.rank)
        self.stage = Stage.COLLECTING

    def collect(self):
        """Take what the call returns, and, late, publish the vector."""
        rank, protocol = self.rank, self.rank.protocol
        if self.vector is None:
            rank.check_late()
            self.vector = rank.note_publication()
        rank.check_call(self.vector)
        rank.world.met.add("timely" if protocol.timely else "late")
        if not rank.vectors.finite:
            rank.world.met.add("not finite")
        rank.driven.take(version_steps.RETURN)
        rank.check_left_out(self.given)
        rank.returned = rank.model
        rank.vectors.finite = True
        rank.seen = protocol.next
        self.interruptible = False
        self.compute()

    def interrupt(self):
        """An exception ends the call."""
        self.rank.world.met.add("interrupted")
        self.rank.abandon()
        self.rank.vectors.finite = True
        self.interruptible = False
        self.stage = Stage.COMPUTING

    def fail(self):
        """The operation did not agree: the application can only close."""
        self.rank.world.met.add("disagreement")
        self.program = [all_ranks.CLOSE]
        self.compute()


# What a vector holds whose content must not matter.
GARBAGE = Fraction(1000003)


class Numbers(contribution.Vectors):
    """A rank's vectors, each one exact number, and what an exchange makes of them.

    Attributes:
        part: the rank's own. taken_out: how much of it the snapshot does not have now.
    """

    def __init__(self):
        self.of = [Fraction(0)] * 4
        self.finite = True
        self.part = self.taken_out = Fraction(0)

    def keep_part(self):
        self.part = self.of[contribution.X]

    def take_out_part(self):
        self.of[contribution.SNAPSHOT] -= self.part
        self.taken_out = self.part

    def put_back_part(self):
        self.of[contribution.SNAPSHOT] += self.part
        self.taken_out = Fraction(0)

    def copy(self, to, source):
        self.of[to] = self.of[source]

    def zero(self, vector):
        self.of[vector] = Fraction(0)

    def all_finite(self, vector):
        return self.finite or vector != contribution.X

    def is_change_finite(self):
        return self.finite

    def add_change(self, to):
        x, snapshot, base = self.of[:3]
        self.of[to] = snapshot + x - base

    def take_change(self):
        finite = contribution.Vectors.take_change(self)
        self.of[contribution.RESULT] = GARBAGE
        return finite

    def absorb(self, own, total):
        x, _, mean = self.of[:3]
        self.of[contribution.X] = (own * x + total * mean) / (own + total)

    def contributed(self, publishing):
        """What an exchange averages, of a rank's `SnapshotProtocol`."""
        return self.of[contribution.X if publishing.lent else publishing.source]

    def reduce(self, publishing, result, partial=False):
        """Put the mean, if it has weight, where it belongs; of `partial` ones only the first array.

        Of the second one the rank has what it contributes.
        """
        own = self.contributed(publishing)
        if publishing.lent and publishing.keeps:
            self.copy(contribution.SNAPSHOT, contribution.X)
        if publishing.saved != contribution.NOWHERE:
            self.copy(publishing.saved, publishing.target)
        if result.weight > 0:
            mean = result.mean
            if partial:
                gives = publishing.lent or publishing.state != snapshots.UNFILLED
                kept = pair_of(own if gives else self.of[publishing.target])
                mean = Pair(mean.often, kept.rarely)
            self.of[publishing.target] = mean
            if publishing.copy != contribution.NOWHERE:
                self.of[publishing.copy] = mean


class Port(rank_port.RankPort):
    """Executes a rank's steps on the network."""

    def __init__(self, rank):
        self.rank = rank

    def begin_pass(self, step, moves):
        if step == rank_protocol.REPLACE:
            self.rank.load()

    def end_pass(self, step, moves):
        if step in (rank_protocol.ADOPT, rank_protocol.REPLACE):
            self.rank.go_on(step)
        return True

    def is_here(self):
        return True

    def knows_change(self):
        return True

    def remember(self):
        pass

    def begin_average(self, number):
        self.rank.exchange_with_all()

    def begin_version(self, version, number):
        self.rank.exchange_in_group(version)

    def is_exchanged(self):
        rank = self.rank
        runs = rank.protocol.vectors == protocols.RUNNING
        exchange = rank.exchange if runs else rank.average
        require(exchange is not None, Invariant.EPOCH, f"{rank}: a version during an average")
        return exchange.done

    def total_weight(self):
        return self.rank.total_weight

    def mean_count(self):
        return self.rank.mean_count

    def number_from(self, first, shift):
        pass

    def adopt(self):
        rank = self.rank
        if rank.publishing.lent:
            rank.vectors.copy(contribution.SNAPSHOT, contribution.X)
            rank.contributed = rank.contribution, rank.snapshot

    def redirect(self):
        pass

    def returns(self, in_group):
        pass

    def executed(self, version):
        pass


class Rank:
    """One rank: its application, its network and what is known of it from outside."""

    def __init__(self, world, number, protocol_type, application_type):
        scenario = world.scenario
        self.world = world
        self.number = number
        self.peers = activation_peers(number, scenario.world_size)
        self.protocol = protocol_type(
            len(self.peers), scenario.group_size, scenario.sync_period, scenario.passive
        )
        self.protocol.attach(self)
        if scenario.seed is not None:
            self.protocol.draw(number, scenario.world_size, scenario.seed)
        self.application = application_type(self, scenario.programs[number])
        self.vectors = Numbers()
        self.model = self.returned = self.number_or_pair(number, 7 * number)
        self.publishing = world.publishing_type(self.vectors, self.protocol, rule_of(scenario))
        if scenario.by_work:
            self.publishing.weigh_by(contribution.WORK, 0, 0)
        self.publishing.replace()
        self.publishing.count_once()
        self.publishing.lease.limit = scenario.lease
        self.driven = world.driven_type(self.protocol, self.publishing)
        self.driven.attach(Port(self))
        self.total_weight = self.mean_count = 0
        self.contribution = Contribution(number, 0, 0, 0)
        self.contributed = None
        self.epoch = 0
        self.updates = 0
        self.updates_until_join = 0
        # Calls and operations whose change is not yet published.
        self.unpublished = 0
        # The next version when the application's last call or operation ended.
        self.seen = 0
        # Whether this rank has joined, and an average of all ranks has taken what it had left.
        self.taken = False
        self.failing = number in scenario.failing
        self.exchange = None
        self.average = None
        self.result = None
        self.result_epoch = -1
        self.executed = []
        self.left = False

    @property
    def model(self):
        """The application's vector."""
        return self.vectors.of[contribution.X]

    @model.setter
    def model(self, value):
        self.vectors.of[contribution.X] = value

    @property
    def snapshot(self):
        return self.vectors.of[contribution.SNAPSHOT]

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
        if protocol.stage == all_ranks.AGREEING and self.all_entered():
            events.append((self.number, "agree"))
        if protocol.due_on():
            events += [(self.number, "send", k) for k in dimensions if self.can_send(k)]
        if self.failing and not self.left:
            events.append((self.number, "fail"))
        if not self.left and protocol.may_leave():
            events.append((self.number, "leave"))
        return events

    def step(self):
        self.application.step()

    def interrupt(self):
        self.application.interrupt()

    def fail(self):
        """Something failed on this rank: all are told."""
        self.failing = False
        if self.protocol.fin_at < 0:
            self.world.failed.add(self.number)
        self.protocol.notice(self.number, -1)

    def receive(self):
        self.exchange.receive()

    def receive_average(self):
        self.average.receive()

    def hear(self, dimension):
        """An activation, a notice or a FIN arrives."""
        message = self.world.network.receive_control(self.number, dimension)
        require(not self.left, Invariant.DRAINED, f"{message} for rank {self.number}, which left")
        if message == FIN:
            self.protocol.fin(dimension)
            return
        if message[0] == NOTICE:
            self.world.met.add("notice")
            self.protocol.notice(message[1], dimension)
            return
        if message[0] == FREED:
            self.may_start(self.protocol.free, message[1], dimension)
            return
        due, sent = self.protocol.due, list(self.protocol.sent)
        self.protocol.activate(*message, dimension)
        if any(due >> k & 1 and sent[k] < self.protocol.sent[k] for k in range(len(sent))):
            self.world.met.add("overtaken activation")

    def may_start(self, event, *arguments):
        """Tell the protocol of what may let it start a version that has been called before."""
        awaited = self.protocol.awaited()
        event(*arguments)
        if 0 <= awaited <= self.protocol.started:
            self.world.met.add("freed")
            self.world.start(awaited, self)

    def abandon(self):
        """The application's call ends by an exception; its version may be started only then."""
        version = self.protocol.version
        if self.protocol.timely:
            self.seen = version + 1
        self.driven.interrupt()
        self.driven.interrupted(True)
        if self.application.vector is not None:
            # What was published goes on from what the application is left with: the mean, perhaps.
            self.returned = self.model
        if version == self.protocol.started:
            self.world.start(version, self)

    def can_send(self, dimension):
        if not self.protocol.due_on() >> dimension & 1:
            return False
        channel = (self.peers[dimension][0], dimension)
        busy = channel in self.world.network.control
        return not busy or self.world.scenario.sends != ONE_AT_A_TIME

    def send(self, dimension):
        self.protocol.send_on(dimension)

    # The port

    def send_activation(self, dimension, version, ops):
        message = version, ops
        self.world.check_activation(message, self.peers[dimension][0])
        self._send(dimension, message)

    def send_failure(self, dimension, rank):
        self._send(dimension, (NOTICE, rank))

    def send_free(self, dimension, ops):
        self._send(dimension, (FREED, ops))

    def send_fin(self, dimension):
        self._send(dimension, FIN)

    def _send(self, dimension, message):
        self.world.network.send_control(self.peers[dimension][0], dimension, message)

    # Operations

    def agree(self):
        """All ranks have entered an operation: each learns of what the others have entered."""
        protocol, entered = self.protocol, self.world.entered[self.protocol.ops]
        records = [number for rank in sorted(entered) for number in entered[rank]]
        operation, t = agreement(entered.values(), self.world.scenario.own_pace)
        closing, broken = protocol.operation == all_ranks.CLOSE, protocol.broken
        load = self.application.load
        loading = load and self.world.numbers.setdefault(protocol.ops, load.number)
        self.driven.agreed(records, len(entered), loading, False, False)
        if operation == all_ranks.CLOSE:
            stages = (all_ranks.LEAVING,)
        elif operation != all_ranks.NONE:
            stages = (all_ranks.DRAINING, all_ranks.REDUCING)
            require(protocol.operation == operation, Invariant.AGREED, self, entered)
            require(protocol.version == t, Invariant.AGREED, self, entered)
        else:
            stages = (all_ranks.AGREEING if closing else all_ranks.OUTSIDE,)
            broken = broken or not closing
        agreed = protocol.stage in stages and protocol.broken == broken
        require(agreed, Invariant.AGREED, self, f"broken={protocol.broken}", entered)
        if protocol.stage == all_ranks.OUTSIDE:
            self.application.fail()
        elif protocol.stage == all_ranks.DRAINING:
            self.world.met.add("draining")
        self.contribute_to_agreement()

    def leave(self):
        self.left = True

    # Versions

    def react(self):
        """Execute what the protocol wants executed, and send what is due, if it is sent at once."""
        while True:
            step = self.driven.next_step()
            if step == version_steps.END_VERSION:
                self.finish_version()
            elif step == version_steps.BEGIN_VERSION:
                self.begin_version()
            else:
                break
        if self.world.scenario.sends == AT_ONCE:
            for dimension in range(len(self.peers)):
                while self.can_send(dimension):
                    self.send(dimension)

    def begin_version(self):
        world, version = self.world, self.protocol.running
        number = version + self.protocol.base
        require(
            world.scenario.own_pace or (number + 1) % world.scenario.sync_period,
            Invariant.EPOCH,
            f"rank {self.number} executes version {version}, a synchronization, passively",
        )
        require(version in world.started, Invariant.IN_ORDER, f"nobody has started {version}")
        require(
            self.contribution.epoch == world.started[version],
            Invariant.EPOCH,
            f"version {version}, started in epoch {world.started[version]}: {self.contribution}",
        )
        self.check_joined()
        self.driven.take(version_steps.BEGIN_VERSION)
        lease, age = self.publishing.lease, version - self.publishing.published_version
        late = bool(lease.limit and lease.held and age >= lease.limit)
        require(lease.expired == late, Invariant.LEASED, self, version, age)
        if lease.expired:
            self.world.met.add("expired")

    def exchange_in_group(self, version):
        network, label = self.world.network, (VERSION, version)
        self.contributed = self.contribution, self.snapshot
        own = self.sum_of_this()
        if self.world.pace:
            whole = own.value + self.vectors.taken_out
            self.world.pace.begin_version(self.number, label, whole, own.count)
        self.exchange = Exchange(
            network,
            label,
            self.group_of(version),
            self.number,
            own,
            network.tag(version),
        )

    def finish_version(self):
        exchange, self.exchange = self.exchange, None
        version = exchange.label[1]
        now = self.contribution, self.snapshot
        require(
            self.contributed == now,
            Invariant.BETWEEN_VERSIONS,
            f"rank {self.number} in version {version}: {self.contributed}, {now}",
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
        elif self.protocol.joined:
            self.world.met.add("joined")
        of_all = self.world.scenario.is_of_all(version + self.protocol.base)
        partial = self.world.scenario.partial and not of_all
        self.vectors.reduce(self.publishing, exchange.sum, partial)
        self.total_weight = exchange.sum.weight
        self.mean_count = exchange.sum.mean_count
        self.result = exchange.sum
        self.result_epoch = self.epoch
        self.driven.take(version_steps.END_VERSION)
        if self.world.pace:
            parts = exchange.sum.parts
            known = self.publishing.job.known if of_all else None
            self.world.pace.end_version(
                self.number, exchange.label, parts, self.snapshot, known, of_all
            )

    def group_of(self, version):
        return self.world.scenario.group_of(self.number, version + self.protocol.base)

    def is_first_here(self):
        """Return whether no version was executed or started here since the last call ended."""
        protocol = self.protocol
        running = protocol.vectors == protocols.RUNNING or protocol.started >= protocol.next
        return protocol.next == self.seen and not running

    def compute(self):
        """Change the model by an update that no other rank, and no other time, has."""
        self.updates += 1
        update = self.updates * self.world.scenario.world_size + self.number
        self.model += self.number_or_pair(update, 3 * update + 1)

    def number_or_pair(self, often, rarely):
        """Return a vector of one array, or of two."""
        if self.world.scenario.partial:
            return Pair(Fraction(often), Fraction(rarely))
        return Fraction(often)

    def weight_of_update(self):
        """Return how much the application's vector weighs, after its last update."""
        weight = 1 + (self.number + self.updates) % 3 if self.world.scenario.weighted else 1
        self.unpublished += 1
        return self.publishing.worked(weight)

    @property
    def weighted_snapshot(self):
        return self.publishing.snapshot_weight * self.snapshot

    def would_publish(self):
        """Return what a publication adds to the sum of all weighted snapshots."""
        if not self.vectors.finite:
            return 0
        weight = self.publishing.given_weight
        change = self.model - self.returned
        return weight * (self.snapshot + change) - self.weighted_snapshot

    def sum_of_this(self):
        """What this rank contributes to the exchange that its contribution tells of."""
        weight, value = self.publishing.weight, self.vectors.contributed(self.publishing)
        out = self.taken and self.protocol.operation != all_ranks.FINISH
        counts = weight and not self.publishing.weightless
        require(not (out and counts), Invariant.OUT, self, weight)
        alike = weight == 1 or not self.world.scenario.own_pace
        require(alike, Invariant.ALIKE, self, weight)
        count = self.publishing.job.count
        return Sum(frozenset([self.contribution]), weight * value, weight, Fraction(count))

    def check_left_out(self, given):
        """In step, a call of a group returns the second array as it was given."""
        scenario = self.world.scenario
        if scenario.partial and not scenario.own_pace and self.vectors.finite:
            same = self.model.rarely == given.rarely
            require(same, Invariant.LEFT_OUT, self, given, self.model)

    def publish(self):
        """Publish, and return what this rank contributes from now on."""
        self.publishing.publish()
        return self.note_publication()

    def publish_between_calls(self):
        self.note_publication()
        self.publishing.publish_between_calls()

    def join(self):
        self.updates_until_join = self.updates
        if self.world.joining_publishes:
            self.driven.hold(version_steps.JOINING)
            self.note_publication()
            self.may_start(self.driven.take, version_steps.SHARE)
            self.contribute_to_agreement()
        else:
            self.publishing.join()
            self.enter(JOIN)

    def note_publication(self):
        """The application publishes: return what this rank contributes from now on."""
        change = self.would_publish()
        self.world.published += change
        if self.world.pace:
            work, self.unpublished = self.unpublished * self.vectors.finite, 0
            self.world.pace.publish(self.number, change, self.protocol.next, work)
        self.returned = self.model
        self.contribution = self.contribution._replace(
            publication=self.contribution.publication + 1,
            updates=self.updates,
            epoch=self.epoch,
        )
        return self.contribution

    def check_joined(self):
        if self.protocol.joined:
            newest = self.updates_until_join
            require(
                self.contribution.updates <= newest,
                Invariant.JOINED,
                f"rank {self.number}, joined after {newest} updates: {self.contribution}",
            )

    def check_late(self):
        protocol = self.protocol
        details = f"rank {self.number} late at {protocol.version}, source {protocol.source}"
        require(protocol.source >= protocol.version, Invariant.LATE, details)
        require(protocol.source == self.executed[-1], Invariant.LATE, details, self.executed)

    def check_call(self, vector):
        """What a call is about to return is what it says that it is."""
        protocol, scenario = self.protocol, self.world.scenario
        details = f"rank {self.number} in call {protocol.version}, timely {protocol.timely}"
        group = self.group_of(protocol.version)
        result = self.world.sums.get((VERSION, protocol.version, *group))
        present = result is not None and vector in result.parts
        require(present == bool(protocol.timely), Invariant.TIMELY, details, vector, result)
        require(protocol.next > protocol.version, Invariant.IN_ORDER, details, "returns too early")
        require(self.result_epoch == self.epoch, Invariant.EPOCH, details, "result too old")
        require(protocol.timely or vector not in self.result.parts, Invariant.LATE, details)
        require(protocol.timely or scenario.passive, Invariant.NOBODY_PASSIVE, details)

    # Synchronous operations

    def enter(self, operation):
        self.may_start(self.driven.enter, operation)
        self.contribute_to_agreement()

    def all_entered(self):
        return len(self.world.entered[self.protocol.ops]) == self.world.scenario.world_size

    def contribute_to_agreement(self):
        """Let all know which operation this rank is in, if that is due."""
        if not self.driven.gathers:
            return
        self.driven.gathers = False
        entered = self.world.entered.setdefault(self.protocol.ops, {})
        entered[self.number] = (self.protocol.operation, self.protocol.version)

    def begin_operation(self):
        """Contribute to the average over all ranks, if it is one, and publish by most of them."""
        operation = self.protocol.operation
        if operation == all_ranks.LOAD:
            return
        if self.publishing.publishes():
            if operation == all_ranks.AVERAGE:
                self.world.unpublished += self.would_publish()
            else:
                self.note_publication()
        if self.protocol.joined and not self.world.joining_publishes:
            self.publish_between_calls()
        self.check_joined()
        self.driven.take(rank_protocol.CONTRIBUTE)

    def exchange_with_all(self):
        network, label = self.world.network, (OPERATION, self.protocol.ops)
        if self.world.pace:
            whole = self.snapshot + self.vectors.taken_out
            self.world.pace.begin(self.number, label, whole, self.publishing.job.count)
        self.average = Exchange(
            network,
            label,
            list(range(self.world.scenario.world_size)),
            self.number,
            self.sum_of_this(),
            network.operations_tag,
        )

    def finish_operation(self):
        """Take the average over all ranks, or what is loaded."""
        protocol, average = self.protocol, self.average
        operation, ops = protocol.operation, protocol.ops
        if average is None:
            self.driven.take(rank_protocol.REPLACE)
        else:
            self.world.check_sum(average, average.sum)
            epochs = {part.epoch for part in average.sum.parts}
            require(epochs == {self.epoch}, Invariant.EPOCH, f"{average.label}: {average.sum}")
            self.vectors.reduce(self.publishing, average.sum)
            self.total_weight = average.sum.weight
            self.mean_count = average.sum.mean_count
            self.driven.take(rank_protocol.END_AVERAGE)
            if self.driven.begun:
                return  # no vector had a weight: it is repeated
            self.average = None
        require(self.driven.done != protocol.joined, Invariant.RETURNS, self)
        fresh = operation == all_ranks.AVERAGE or protocol.source < 0
        require(fresh, Invariant.EPOCH, f"{self} keeps the result of {protocol.source}")
        published = operation not in (all_ranks.AVERAGE, all_ranks.LOAD)
        model = self.snapshot if published else None
        state = (protocol.version, protocol.next, protocol.base, model)
        if ops not in self.world.left:
            self.world.check_highest(protocol.version)
        first = self.world.left.setdefault(ops, state)
        require(state == first, Invariant.TOGETHER, self, state, "and", first)
        self.seen = protocol.next
        self.contribute_to_agreement()

    def go_on(self, step):
        """All go on from the mean, with weights of their own, or from what was loaded."""
        operation, average = self.protocol.operation, self.average
        if operation == all_ranks.AVERAGE:
            return
        self.epoch += 1
        self.world.met.add(OPERATIONS[operation])
        keeps = operation == all_ranks.FINISH or self.world.scenario.own_pace
        self.taken = self.protocol.joined and not keeps
        if step == rank_protocol.ADOPT:
            self.world.published += self.weighted_snapshot - average.contribution.value
            if self.world.pace:
                self.world.pace.learn(self.number, average.label, average.sum.parts)
            require(self.snapshot == average.sum.mean, Invariant.TOGETHER, self)
            if operation == all_ranks.FINISH or not self.protocol.joined:
                self.returned = self.model
        else:
            whole = self.weighted_before + self.vectors.taken_out
            self.world.published += self.weighted_snapshot - whole
            self.vectors.taken_out = Fraction(0)
            self.unpublished = 0
            if self.world.pace:
                self.world.pace.load(self.number, self.snapshot, self.protocol.next)
            self.returned = self.model
        self.note_adoption()

    def load(self):
        """Replace the application's vector by what is loaded."""
        self.updates += 1
        loaded = Fraction(self.updates * self.world.scenario.world_size + self.number, 3)
        self.model = self.number_or_pair(loaded, 2 * loaded)
        self.weighted_before = self.weighted_snapshot

    def note_adoption(self):
        """What all have averaged, or what was loaded, is what this rank contributes."""
        self.contribution = self.contribution._replace(
            publication=self.contribution.publication + 1, epoch=self.epoch
        )

    def state(self):
        protocol, application = vars(self.protocol), self.application
        values = (
            tuple(each) if isinstance(each, list) else each
            for name, each in protocol.items()
            if name not in ("calls", "port")  # on which nothing depends
        )
        return (
            *values,
            application.stage,
            len(application.program),
            self.failing,
            application.interruptible,
            application.vector,
            self.contribution,
            tuple(getattr(self.publishing, name) for name in DECIDING),
            self.epoch,
            self.exchange and self.exchange.state(),
            self.average and self.average.state(),
            self.result and self.result.parts,
            self.result_epoch,
            self.left,
            self.world.scenario.own_pace and self.seen,
            self.vectors.finite,
            self.world.scenario.lease and self.leased,
        )

    @property
    def leased(self):
        """What the rank's part depends on, besides its value."""
        lease = self.publishing.lease
        age = self.protocol.next - self.publishing.published_version
        return lease.held, lease.expired, min(age, lease.limit)

    def __str__(self):
        state = vars(self.protocol)
        shown = (
            "version",
            "next",
            "started",
            "started_ops",
            "ops",
            "vectors",
            "operation",
            "stage",
        )
        shown += ("base", "joined", "failed", "fin_at", "fin_seen")
        values = " ".join(f"{name}={state[name]}" for name in shown)
        return f"rank {self.number} {self.application.stage.name}: {values}"


def network_of(scenario):
    period = scenario.sync_period if scenario.own_pace else None
    loads = any(isinstance(each, Load) for program in scenario.programs for each in program)
    return Network(scenario.world_size, scenario.group_size, period, loads)


class World:
    """All ranks and the network between them.

    Attributes:
        joining_publishes: whether a rank publishes when it joins, as engines do; else in the next
            operation, which differs in the vectors' values alone and takes far fewer states.
    """

    joining_publishes = True

    def __init__(
        self,
        scenario,
        protocol_type=None,
        rank_type=Rank,
        application_type=Application,
        publishing_type=snapshots.SnapshotProtocol,
        driven_type=version_steps.VersionsProtocol,
    ):
        self.scenario = scenario
        self.publishing_type = publishing_type
        self.driven_type = driven_type
        self.network = network_of(scenario)
        self.started = {}
        self.arrived = {}
        self.sums = {}
        self.entered = {}
        self.left = {}
        self.numbers = {}
        self.failed = set()
        self.ranks = [
            rank_type(self, number, protocol_type or protocol_of(scenario), application_type)
            for number in range(scenario.world_size)
        ]
        self.initial = sum(rank.weighted_snapshot for rank in self.ranks)
        self.pace = None
        if scenario.own_pace:
            self.pace = OwnPace([rank.snapshot for rank in self.ranks], scenario.sync_period)
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
        if self.failed:
            self.check_heard()

    def run(self, choose, watch=None):
        """Let everything happen, in the order in which `choose` picks from the events."""
        absent = self.scenario.absent
        self.freeze(absent)
        for count in itertools.count():
            if count == self.scenario.frozen_from:
                self.freeze(self.scenario.frozen | absent)
            events = self.events()
            if not events:
                frozen = {rank.number for rank in self.ranks if rank.application.frozen}
                if not frozen:
                    break
                self.check_nobody_waits()
                if frozen == absent:
                    self.met.add("never arrived")
                    self.check_without_absent()
                    return count
                self.met.add("stopped")
                self.freeze(absent)
                continue
            event = choose(events)
            if watch:
                watch(event, self)
            self.happen(event)
        self.check_end()
        return count

    def may_never_happen(self, event):
        """Whether the event is a failure, or the end of an application's computing."""
        stage = self.ranks[event[0]].application.stage
        return event[1] == "fail" or (event[1] == "step" and stage == Stage.COMPUTING)

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
        """Note that a rank starts a version, if it is the first."""
        if version not in self.started:
            freed = any(each.protocol.operation != all_ranks.NONE for each in self.ranks)
            drawn = self.drawn_for(version, rank)
            require(freed or drawn in (None, rank.number), Invariant.DRAWN, version, drawn, rank)
            self.started[version] = rank.epoch

    def drawn_for(self, version, rank):
        """Return which rank is drawn for a version, as a rank sees it; None: anybody may start."""
        if self.scenario.seed is None:
            return None
        number = version + rank.protocol.base
        return protocols.drawn(self.scenario.seed, number, self.scenario.world_size)

    def note_arrival(self, rank):
        """A rank has made a call: note who came, and whether others were gone or came, too."""
        protocol = rank.protocol
        timely = self.arrived.setdefault((protocol.ops, protocol.version), set())
        if protocol.timely:
            timely.add(rank.number)
        if len(timely) == len(self.ranks) > 2:
            self.met.add("together")
        if any(each.application.stage == Stage.CLOSED for each in self.ranks):
            self.met.add("closed early")

    # Invariants

    def check_sum(self, exchange, result):
        """Each member has contributed once, and all members have the same sum."""
        details = f"{exchange.label} of {exchange.members}: {result}"
        ranks = sorted(part.rank for part in result.parts)
        require(ranks == sorted(exchange.members), Invariant.ONE_EACH, details)
        require(exchange.contribution.parts <= result.parts, Invariant.ONE_EACH, details)
        key = (*exchange.label, *exchange.members)
        if key not in self.sums and exchange.label[0] == OPERATION:
            whole = result.value
            if self.scenario.lease:
                whole += sum(rank.vectors.taken_out for rank in self.ranks)
            self.check_conserved(whole - self.unpublished, details)
            self.unpublished = 0
        first = self.sums.setdefault(key, result)
        require(first == result, Invariant.ONE_EACH, details, "and", first)

    def check_conserved(self, snapshots, details):
        if self.scenario.conserving and self.all_count():
            expected = self.initial + self.published
            require(snapshots == expected, Invariant.CONSERVED, f"{expected}, {details}")

    def all_count(self):
        """Whether all ranks' contributions have had weight in all that was averaged.

        Those of who has joined have none from the next operation on; where nobody is passive, those
        of who has made no call.
        """
        kinds = {operation for program in self.scenario.programs for operation in program}
        return self.scenario.passive and (self.scenario.own_pace or JOIN not in kinds)

    def check_activation(self, message, destination):
        """An activation is little ahead of its receiver, so that few wait that it has use for."""
        allowed = self.ranks[destination].protocol.next + self.allowed_distance()
        require(message[0] <= allowed, Invariant.BOUNDED, message, f"for rank {destination}")

    def check_distance(self):
        versions = [rank.protocol.next for rank in self.ranks]
        apart = max(versions) - min(versions)
        if self.network.bounded:
            require(apart <= self.allowed_distance(), Invariant.NEAR, versions)

    def allowed_distance(self):
        loading = any(rank.protocol.operation == all_ranks.LOAD for rank in self.ranks)
        return self.network.far if loading else self.network.gap

    def check_highest(self, version):
        """The first rank leaves an operation at this version."""
        last = max(self.started, default=-1)
        highest = not self.scenario.own_pace or version == last + 1
        require(highest, Invariant.HIGHEST, version, "after", last)

    def check_heard(self):
        """Where no notice is under way, everybody has heard of a failure, unless all close."""
        for rank in self.ranks:
            if rank.protocol.fin_at >= 0 or rank.protocol.notice_due:
                return
        if self.network.carries_notices():
            return
        for rank in self.ranks:
            require(rank.protocol.failed in self.failed, Invariant.HEARD, rank, self.failed)

    def check_nobody_waits(self):
        """Nothing more can happen while some applications stop: no group call may wait.

        It may for the rank that is drawn for its version, if that has stopped.
        """
        if not self.scenario.passive:
            return
        for rank in self.ranks:
            waits = rank.application.waits_in_group_call() and not self.awaits_stopped(rank)
            require(not waits, Invariant.WAIT_AVOIDING, rank)

    def awaits_stopped(self, rank):
        """Whether a rank waits for one that computes to start a version drawn for that."""
        drawn = self.drawn_to_start(rank)
        return drawn is not None and self.ranks[drawn].application.computes()

    def drawn_to_start(self, rank):
        """Return which rank is drawn to start what a rank has called, if nobody has started it."""
        version = rank.protocol.awaited()
        return self.drawn_for(version, rank) if version >= 0 else None

    def check_without_absent(self):
        """Nothing more can happen without those that never come: all others have come to wait.

        What the others have started is executed by everybody, but for groups of one, which nobody
        is told of, and nothing is under way.
        """
        if not self.scenario.passive:
            return
        for rank in self.ranks:
            arrived = rank.application.stage in (Stage.AGREEING, Stage.CLOSED)
            arrived = arrived or self.awaits_stopped(rank)
            require(arrived or rank.application.frozen, Invariant.ENDS, *self.ranks)
        self.check_drained()
        if self.scenario.group_size > 1 or self.scenario.own_pace:
            self.check_executed()

    def check_end(self):
        for rank in self.ranks:
            require(rank.left, Invariant.ENDS, *self.ranks)
        self.check_drained()
        self.check_executed()
        wholes = [rank.weighted_snapshot + rank.vectors.taken_out for rank in self.ranks]
        self.check_conserved(sum(wholes), "at the end")

    def check_drained(self):
        left_over = [*self.network.control.items(), *filter(None, self.network.data)]
        require(not left_over, Invariant.DRAINED, left_over)

    def check_executed(self):
        for rank in self.ranks:
            require(
                rank.executed == sorted(self.started),
                Invariant.IN_ORDER,
                f"rank {rank.number} executed {rank.executed} of {sorted(self.started)}",
            )


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
        if action == "fail":
            weight = 0.02
        if action == "hear" and self.stall and self.generator.random() < 0.15:
            weight *= 0.001
        self.weights[event] = weight
        return weight


class TogetherChooser:
    """Lets all applications that compute come at once: after everything else, and before it."""

    def __init__(self, world, choose):
        self.world = world
        self.choose = choose
        self.coming = set()

    def __call__(self, events):
        arrivals = [event for event in events if self.world.may_never_happen(event)]
        if len(arrivals) == len(events):
            self.coming = set(arrivals)
        coming = [event for event in arrivals if event in self.coming]
        event = self.choose(coming or [event for event in events if event not in arrivals])
        self.coming.discard(event)
        return event


def run_seed(seed, make_scenario=random_scenario, watch=None, **types):
    """Run the random scenario of a seed with the random choices of the seed."""
    generator = random.Random(seed)
    scenario = make_scenario(generator)
    stall, together = generator.random() < 0.5, generator.random() < 0.2
    with telling_how_to_replay(__name__, seed, scenario, make_scenario, types):
        world = World(scenario, **types)
        choose = RandomChooser(generator, scenario.world_size, stall)
        world.run(TogetherChooser(world, choose) if together else choose, watch)
    return world


def types_of(variant):
    """Return what a variant takes the place of."""
    bases = {
        "protocol_type": protocols.WaitAvoidingProtocol,
        "rank_type": Rank,
        "application_type": Application,
        "publishing_type": snapshots.SnapshotProtocol,
        "driven_type": version_steps.VersionsProtocol,
    }
    return {part: variant for part, base in bases.items() if issubclass(variant, base)}


def print_event(event, world):
    print(*event, "|", world.ranks[event[0]])


if __name__ == "__main__":
    replay("protocol_network", "protocol_scenarios:random_scenario")
