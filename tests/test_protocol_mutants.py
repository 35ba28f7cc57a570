"""Variants of the protocol that look right and are not: the invariants catch each of them."""

from dataclasses import dataclass, replace

import pytest
from protocol_messages import (
    Invariant,
    Pair,
    Violation,
    all_ranks,
    contribution,
    own_pace,
    pair_of,
    protocols,
    run_again,
    snapshots,
    version_steps,
)
from protocol_network import Application, Rank, Stage, print_event, run_seed, types_of
from protocol_scenarios import (
    AT_ONCE,
    AVERAGE,
    CALL,
    CLOSE,
    DELAYED,
    INTERRUPTED_CALL,
    JOIN,
    SYNCHRONIZE,
    Load,
    Scenario,
    random_drawn_scenario,
    random_nonfinite_scenario,
    random_own_pace_scenario,
    random_partial_scenario,
    random_scenario,
    random_weighted_scenario,
)

WaitAvoidingProtocol = protocols.WaitAvoidingProtocol
OwnPaceProtocol = own_pace.OwnPaceProtocol


class ForwardsOnlyTheFirst(WaitAvoidingProtocol):
    """A version is forwarded only when it is first heard of."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.heard = ()

    def activate(self, version, ops, dimension):
        if version in self.heard:
            dimension = self.dimensions
        self.heard += (version,)
        super().activate(version, ops, dimension)


class TimelyUntilExecuted(WaitAvoidingProtocol):
    """A call is timely while its version has not been executed, although it may be running."""

    def call(self):
        super().call()
        self.timely = self.next == self.version


class NoGate(WaitAvoidingProtocol):
    """Versions are executed also before the synchronization that they came after has ended."""

    def run(self):
        self.started_ops = min(self.started_ops, self.ops)
        if self.stage == all_ranks.REDUCING and self.vectors == protocols.HELD:
            self.vectors = protocols.IDLE
        super().run()


class VersionFromTag(WaitAvoidingProtocol):
    """The version of an activation is the one nearest to the last that has its tag modulo 16."""

    def activate(self, version, ops, dimension):
        if dimension >= 0:
            version = self.started + (version - self.started + 8) % 16 - 8
        super().activate(version, ops, dimension)


class LeavesWithoutFin(WaitAvoidingProtocol):
    """A rank leaves when it has executed everything, whatever is still under way to it."""

    def agreed(self, records, size, differ):
        super().agreed(records, size, differ)
        if self.stage == all_ranks.LEAVING:
            self.fin_due = 0
            self.fin_seen = (1 << self.dimensions) - 1


class LateWithoutWaiting(WaitAvoidingProtocol):
    """A late call returns at once, with whatever result there is."""

    def call(self):
        super().call()
        if self.waiting:
            self.waiting = False
            self.vectors = protocols.HELD


class GroupMembersServeOnlyWhenClosing(WaitAvoidingProtocol):
    """Where nobody is passive, a rank in another operation lets its group wait for a call."""

    def run(self):
        if self.passive or self.waiting or self.operation == CLOSE:
            super().run()


class InterruptedMemberServesNobody(WaitAvoidingProtocol):
    """Where nobody is passive, a group waits for a member whose call was interrupted."""

    def run(self):
        if self.passive or self.waiting or self.operation != all_ranks.NONE or self.broken:
            super().run()


class MovesWithoutDraining(WaitAvoidingProtocol):
    """A rank that has joined averages at once, whatever it has not executed yet."""

    def drain(self, t):
        if self.vectors == protocols.IDLE:
            self.version = t
            self.stage = all_ranks.REDUCING
            self.vectors = protocols.HELD
        else:
            super().drain(t)


class SkipsWhatIsOutstanding(WaitAvoidingProtocol):
    """All have joined: versions that a rank has not begun by then are not executed there."""

    def drain(self, t):
        if self.operation == all_ranks.FINISH and self.vectors == protocols.IDLE:
            self.next = t
        super().drain(t)


class FinishesAtItsOwnVersion(WaitAvoidingProtocol):
    """After all have joined, each rank goes on from the number of calls that it has made."""

    def agreed(self, records, size, differ):
        self.came_at = self.version
        super().agreed(records, size, differ)

    def reduced(self):
        finishing = self.operation == all_ranks.FINISH
        super().reduced()
        if finishing:
            self.version = self.came_at


class JoinsOneOperation(WaitAvoidingProtocol):
    """A rank that has joined takes part in one operation of the others, and in no more."""

    def reduced(self):
        super().reduced()
        if self.joined:
            self.operation = all_ranks.NONE
            self.stage = all_ranks.OUTSIDE


class JoinedServesNobody(WaitAvoidingProtocol):
    """A rank that has joined lets its groups wait until it moves."""

    def run(self):
        if self.operation != all_ranks.JOIN:
            super().run()


class ClosesWithWhoHasJoined(WaitAvoidingProtocol):
    """Ranks that have joined do not keep the others from closing."""

    def agreed(self, records, size, differ):
        if CLOSE in records[::2] and set(records[::2]) <= {CLOSE, JOIN}:
            records = [number for t in records[1::2] for number in (CLOSE, t)]
        super().agreed(records, size, differ)


class OvertakenByWhoHasJoined(WaitAvoidingProtocol):
    """A rank may join after more calls than the others have made when they average."""

    def agreed(self, records, size, differ):
        kinds, versions = records[::2], records[1::2]
        if set(kinds) != {JOIN}:
            versions = [0 if kind == JOIN else t for kind, t in zip(kinds, versions)]
        super().agreed([number for pair in zip(kinds, versions) for number in pair], size, differ)


class KeepsResultOverLoad(WaitAvoidingProtocol):
    """A result from before a LOAD may be used after it."""

    def reduced(self):
        loading, source = self.operation == all_ranks.LOAD, self.source
        super().reduced()
        if loading:
            self.source = source


class ForwardsOnlyTheFirstNotice(WaitAvoidingProtocol):
    """Only who has not heard of a failure forwards the notice."""

    def notice(self, rank, dimension):
        super().notice(rank, dimension if self.failed < 0 else self.dimensions)


class NoNoticeInOperations(WaitAvoidingProtocol):
    """A rank in a synchronous operation forwards no notice."""

    def notice(self, rank, dimension):
        super().notice(rank, dimension if self.operation == all_ranks.NONE else self.dimensions)


class ForwardsNoNotice(WaitAvoidingProtocol):
    """A rank sends its own notice on every dimension, and others' on none."""

    def notice(self, rank, dimension):
        super().notice(rank, -1 if dimension < 0 else self.dimensions)


class NeverFrees(WaitAvoidingProtocol):
    """A rank in an operation does not let others start what it may be drawn for."""

    def enter(self, operation):
        super().enter(operation)
        self.freed_due = 0


class JoinedFreesOnce(WaitAvoidingProtocol):
    """A rank that has joined lets others start versions until their next operation, no longer."""

    def reduced(self):
        super().reduced()
        self.freed_due = 0


class InterruptedStartsNothing(WaitAvoidingProtocol):
    """A version whose call was interrupted is not started when it is free."""

    def start_awaited(self):
        if self.waiting:
            super().start_awaited()


class FreesWhatCameBefore(WaitAvoidingProtocol):
    """What is free stays so after the operation."""

    def may_start(self, version):
        return self.freed >= 0 or super().may_start(version)


class FinBeforeNotice(Rank):
    """A FIN may overtake the notice that is due on its dimension."""

    def send(self, dimension):
        protocol, bit = self.protocol, 1 << dimension
        if protocol.fin_due & bit and not protocol.due & bit:
            notice_due, protocol.notice_due = protocol.notice_due, 0
            super().send(dimension)
            protocol.notice_due = notice_due
        else:
            super().send(dimension)


class RenumbersTooLate(version_steps.VersionsProtocol):
    """What is loaded renumbers the versions only when the next one may have begun."""

    def end_operation(self):
        base, self.operations.base = self.operations.base, self.base
        super().end_operation()
        self.port.rank.react()
        self.base = self.operations.base = base

    base = 0


class TrainsAfterJoining(Rank):
    """A rank that has joined still changes and contributes its model."""

    def begin_operation(self):
        if self.protocol.joined:
            self.compute()
            self.publish_between_calls()
        super().begin_operation()


class SilentSynchronization(snapshots.SnapshotProtocol):
    """A synchronization does not publish the common average."""

    def aim_average(self):
        super().aim_average()
        self.target = contribution.SCRATCH


class MeanWeighsOne(snapshots.SnapshotProtocol):
    """The mean that replaces a snapshot weighs as if calls had no weights."""

    def weight_after(self):
        return 1


class ForgetsWork(snapshots.SnapshotProtocol):
    """A publication under way loses the weight of the work that others have averaged already."""

    def mean_replaces(self):
        snapshots.SnapshotProtocol.mean_replaces(self)
        if self.weighing == contribution.WORK:
            self.restart_work()


class JoinedStillWeighs(snapshots.SnapshotProtocol):
    """A rank that has joined keeps its weight after the others' next average of all."""

    def end_average(self):
        super().end_average()
        if self.out and self.total != 0:
            self.snapshot_weight = self.published_weight


class JoinedWeighsAgain(snapshots.SnapshotProtocol):
    """A version's mean gives a rank that has joined its weight back."""

    def weight_after(self):
        out, self.out = self.out, False
        weight = super().weight_after()
        self.out = out
        return weight


class LosesWhatIsLate(snapshots.SnapshotProtocol):
    """Under the conserving rule a late call takes the mean without having published."""

    def end_call(self):
        if not self.versions.timely:
            self.versions.timely, self.total = True, 0
            super().end_call()
            self.versions.timely = False
        else:
            super().end_call()


class MistakesVersionsForAverages(snapshots.SnapshotProtocol):
    """What is executed while the application waits in average() goes where that would."""

    def own_target(self):
        if self.operations.operation == all_ranks.AVERAGE:
            return contribution.SCRATCH
        return super().own_target()


class BlockingSynchronization(Rank):
    """A rank that waits in a synchronous operation does nothing else."""

    def events(self):
        events = super().events()
        if self.application.stage == Stage.AGREEING:
            return [event for event in events if event[1] in ("agree", "step")]
        return events


class PublishesWhileRunning(Application):
    """A late call publishes at once, also while a version runs."""

    def call(self):
        super().call()
        if self.rank.protocol.waiting:
            self.vector = self.rank.publish()


class Impatient(Application):
    """After an interrupted call the next one is made before the first one's version is over."""

    def caught_up(self):
        return True


class StartsWhereLate(OwnPaceProtocol):
    """At the own pace a late call starts a version, too."""

    def call(self):
        super().call()
        if not self.timely and self.started < self.next:
            self.start(self.next)


class ReturnsWhileAnExchangeRuns(OwnPaceProtocol):
    """At the own pace a late call takes the snapshot that an exchange is averaging."""

    def call(self):
        super().call()
        if self.waiting:
            self.waiting = False
            self.vectors = protocols.HELD


class WaitsForApplications(OwnPaceProtocol):
    """A version over all ranks waits for their calls, as it does at the common pace."""

    def execute(self):
        of_all = (self.next + self.base + 1) % self.sync_period == 0
        if not of_all or self.waiting or self.operation != all_ranks.NONE:
            super().execute()


class AgreesOnItsOwnVersion(OwnPaceProtocol):
    """Ranks at their own pace enter operations at the versions of their own last calls."""

    def agreed(self, records, size, differ):
        own = [number for kind in records[::2] for number in (kind, self.version)]
        WaitAvoidingProtocol.agreed(self, own, size, differ)


class ForgetsWhatWasAbandoned(OwnPaceProtocol):
    """A version does not count whose call, which started it, was interrupted."""

    def abandon(self):
        self.timely = False
        super().abandon()


class TellsNobody(OwnPaceProtocol):
    """Groups of one member execute versions without telling others of them."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.exchanges = arguments[1] > 1


class HeldBackWhileLoading(OwnPaceProtocol):
    """What came before a load waits for it once others have started more after it."""

    def is_held_back(self):
        return self.started_ops > self.ops


class JoinedLosesItsWeight(snapshots.SnapshotProtocol):
    """At the own pace, too, a rank that has joined has no weight after an average of all."""

    def end_average(self):
        super().end_average()
        if self.operations.joined and self.operations.operation != all_ranks.FINISH:
            self.out, self.snapshot_weight = True, 0


class CountsWhatIsLeftOut(snapshots.SnapshotProtocol):
    """The work of a change that is not finite counts as well."""

    def note_published(self):
        super().note_published()
        self.job.count += not self.finite


class CountsWhatIsNotPublished(snapshots.SnapshotProtocol):
    """The work of a call counts before its change is published."""

    def worked(self, weight):
        self.job.count += 1
        super().worked(weight)
        self.job.unpublished = 0
        return 1


class KeepsItsCount(version_steps.VersionsProtocol):
    """One rank keeps its own count in the versions of groups."""

    def end_version(self):
        count, of_all = self.publishing.job.count, self.versions.is_of_all(self.versions.running)
        super().end_version()
        if self.port.rank.number == 0 and not of_all:
            self.publishing.job.count = count


class NeverExpires(version_steps.VersionsProtocol):
    """What a rank has put in stays in, however long it publishes nothing."""

    def expire_if_due(self, version):
        pass


class ExpiresOnce(snapshots.SnapshotProtocol):
    """What was taken out is not put back by a publication."""

    def publish(self):
        self.rule.publish(self)
        self.note_published()


class ExpiresWithItsBase(snapshots.SnapshotProtocol):
    """What is taken out is a change of the application's."""

    def expire(self):
        self.lease.expire(False)


class AveragesWhatIsLeftOut(Rank):
    """A version of a group averages all arrays."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        reduce = self.vectors.reduce
        self.vectors.reduce = lambda publishing, result, partial=False: reduce(publishing, result)


class LosesTheBaseOfWhatIsLeftOut(Rank):
    """Where a mean replaces the snapshot, the old one of the other arrays is not saved."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        vectors, reduce = self.vectors, self.vectors.reduce

        def forgetful(publishing, result, partial=False):
            base = pair_of(vectors.of[contribution.RESULT]).rarely
            reduce(publishing, result, partial)
            if partial and publishing.saved == contribution.RESULT:
                saved = vectors.of[contribution.RESULT]
                vectors.of[contribution.RESULT] = Pair(saved.often, base)

        self.vectors.reduce = forgetful


class TakesAMeanForItsSnapshot(snapshots.SnapshotProtocol):
    """The mean of a version to which an interrupted call has given nothing is the snapshot."""

    def interrupt(self, begun):
        super().interrupt(begun)
        self.drops = False


class AveragesOnlyTheGroup(Rank):
    """A version over all ranks averages over a group, as any other."""

    def group_of(self, version):
        scenario = replace(self.world.scenario, own_pace=False)
        return scenario.group_of(self.number, version + self.protocol.base)


class AveragesAllOfThemHalfAsOften(Rank):
    """Every other version over all ranks averages over a group."""

    def group_of(self, version):
        scenario = replace(self.world.scenario, sync_period=2 * self.world.scenario.sync_period)
        return scenario.group_of(self.number, version + self.protocol.base)


def long_periods(generator):
    """Many versions without a synchronization, so that an activation can become very old."""
    world_size = generator.randint(4, 9)
    return Scenario(
        world_size,
        group_size=generator.randint(2, world_size),
        sync_period=100,
        programs=((*[CALL] * 30, CLOSE),) * world_size,
        sends=generator.choice((AT_ONCE, DELAYED)),
    )


def several_activators(generator):
    """Half of the ranks call, the others close at once: an activation must reach them."""
    world_size = generator.randint(5, 9)
    programs = [(*[CALL] * 5, CLOSE), (CLOSE,)] * 5
    return Scenario(
        world_size,
        group_size=generator.randint(2, world_size),
        sync_period=100,
        programs=tuple(generator.sample(programs, world_size)),
    )


def stopped_applications(generator):
    """Each rank averages over all of them after another call, and some applications stop."""
    world_size = generator.randint(3, 9)
    programs = []
    for _ in range(world_size):
        early = generator.randint(0, 6)
        programs.append((*[CALL] * early, AVERAGE, *[CALL] * (6 - early), CLOSE))
    return Scenario(
        world_size,
        group_size=generator.randint(2, world_size),
        sync_period=100,
        programs=tuple(programs),
        frozen=frozenset(generator.sample(range(world_size), 2)),
        frozen_from=generator.randint(0, 20 * world_size),
    )


def joined_and_synchronizing(generator):
    """Some ranks synchronize, others only join, before or after that."""
    world_size = generator.randint(2, 9)
    joins = [(*[CALL] * calls, JOIN, CLOSE) for calls in range(8)]
    programs = [(*[CALL] * 4, SYNCHRONIZE, CALL, JOIN, CLOSE)] * 8
    return Scenario(
        world_size,
        group_size=generator.randint(1, world_size),
        sync_period=100,
        programs=tuple(generator.sample(joins + programs, world_size)),
    )


def interrupted_and_closing(generator):
    """Some ranks are interrupted before others, of which one is drawn, close."""
    world_size = generator.randint(2, 4)
    programs = [(INTERRUPTED_CALL, CALL, CLOSE), (CLOSE,)] * world_size
    return Scenario(
        world_size,
        group_size=world_size,
        sync_period=100,
        programs=tuple(programs[:world_size]),
        seed=generator.getrandbits(64),
    )


def loading_at_the_own_pace(generator):
    """Some ranks call before all load, and others after it."""
    world_size = generator.randint(3, 6)
    calls = [[CALL] * generator.choice((0, 4)) for _ in range(2 * world_size)]
    programs = [(*calls.pop(), Load(0), *calls.pop(), CLOSE) for _ in range(world_size)]
    return Scenario(
        world_size,
        group_size=2,
        sync_period=100,
        programs=tuple(programs),
        conserving=True,
        own_pace=True,
    )


def several_failures(generator):
    """Many ranks fail while all call."""
    world_size = generator.randint(5, 9)
    return Scenario(
        world_size,
        group_size=generator.randint(1, world_size),
        sync_period=100,
        programs=((*[CALL] * 5, CLOSE),) * world_size,
        failing=frozenset(generator.sample(range(world_size), world_size // 2)),
    )


@dataclass(frozen=True)
class Mutant:
    """A wrong variant, what catches it, and among how many seeds at the most."""

    variant: type
    invariants: set
    seeds: int
    scenarios: object = random_scenario

    def run(self, seed):
        run_seed(seed, self.scenarios, **types_of(self.variant))


MUTANTS = [
    Mutant(ForwardsOnlyTheFirst, {Invariant.ENDS}, 500, several_activators),
    Mutant(TimelyUntilExecuted, {Invariant.TIMELY, Invariant.ENDS}, 50),
    Mutant(SilentSynchronization, {Invariant.TOGETHER}, 50),
    Mutant(MistakesVersionsForAverages, {Invariant.CONSERVED}, 100),
    Mutant(LosesWhatIsLate, {Invariant.CONSERVED}, 200),
    Mutant(MeanWeighsOne, {Invariant.CONSERVED}, 50, random_weighted_scenario),
    Mutant(ForgetsWork, {Invariant.CONSERVED}, 50, random_weighted_scenario),
    Mutant(JoinedStillWeighs, {Invariant.OUT}, 100),
    Mutant(JoinedWeighsAgain, {Invariant.OUT}, 100),
    Mutant(NoGate, {Invariant.EPOCH}, 50),
    Mutant(VersionFromTag, {Invariant.IN_ORDER}, 500, long_periods),
    Mutant(BlockingSynchronization, {Invariant.WAIT_AVOIDING}, 100, stopped_applications),
    Mutant(LeavesWithoutFin, {Invariant.DRAINED}, 100),
    Mutant(LateWithoutWaiting, {Invariant.LATE}, 50),
    Mutant(PublishesWhileRunning, {Invariant.BETWEEN_VERSIONS}, 50),
    Mutant(GroupMembersServeOnlyWhenClosing, {Invariant.ENDS}, 100),
    Mutant(InterruptedMemberServesNobody, {Invariant.ENDS}, 500),
    Mutant(Impatient, {Invariant.LATE}, 100),
    Mutant(MovesWithoutDraining, {Invariant.TOGETHER}, 100),
    Mutant(SkipsWhatIsOutstanding, {Invariant.IN_ORDER}, 100),
    Mutant(FinishesAtItsOwnVersion, {Invariant.TOGETHER}, 100),
    Mutant(JoinsOneOperation, {Invariant.RETURNS}, 100),
    Mutant(JoinedServesNobody, {Invariant.ENDS}, 100),
    Mutant(ClosesWithWhoHasJoined, {Invariant.AGREED}, 100),
    Mutant(OvertakenByWhoHasJoined, {Invariant.AGREED}, 100, joined_and_synchronizing),
    Mutant(KeepsResultOverLoad, {Invariant.EPOCH}, 100),
    Mutant(ForwardsOnlyTheFirstNotice, {Invariant.HEARD}, 200, several_failures),
    Mutant(NoNoticeInOperations, {Invariant.HEARD}, 100),
    Mutant(ForwardsNoNotice, {Invariant.HEARD}, 100),
    Mutant(NeverFrees, {Invariant.ENDS}, 100, random_drawn_scenario),
    Mutant(JoinedFreesOnce, {Invariant.ENDS}, 200, random_drawn_scenario),
    Mutant(InterruptedStartsNothing, {Invariant.ENDS}, 50, interrupted_and_closing),
    Mutant(FreesWhatCameBefore, {Invariant.DRAWN}, 100, random_drawn_scenario),
    Mutant(FinBeforeNotice, {Invariant.DRAINED}, 100),
    Mutant(RenumbersTooLate, {Invariant.ENDS, Invariant.EPOCH, Invariant.TOGETHER}, 200),
    Mutant(TrainsAfterJoining, {Invariant.JOINED}, 100),
    *(
        Mutant(variant, {invariant}, 100, random_own_pace_scenario)
        for variant, invariant in (
            (StartsWhereLate, Invariant.PACE),
            (ReturnsWhileAnExchangeRuns, Invariant.BETWEEN_VERSIONS),
            (WaitsForApplications, Invariant.WAIT_AVOIDING),
            (AgreesOnItsOwnVersion, Invariant.AGREED),
            (ForgetsWhatWasAbandoned, Invariant.HIGHEST),
            (TellsNobody, Invariant.IN_ORDER),
            (JoinedLosesItsWeight, Invariant.ALIKE),
            (LosesWhatIsLate, Invariant.CONSERVED),
            (AveragesOnlyTheGroup, Invariant.COMMON),
            (AveragesAllOfThemHalfAsOften, Invariant.SPREAD),
            (CountsWhatIsLeftOut, Invariant.COUNTED),
            (CountsWhatIsNotPublished, Invariant.COUNTED),
            (KeepsItsCount, Invariant.COUNTED),
            (NeverExpires, Invariant.LEASED),
            (ExpiresOnce, Invariant.LEASED),
            (ExpiresWithItsBase, Invariant.CONSERVED),
        )
    ),
    Mutant(AveragesWhatIsLeftOut, {Invariant.LEFT_OUT}, 100, random_partial_scenario),
    Mutant(LosesTheBaseOfWhatIsLeftOut, {Invariant.LEFT_OUT}, 100, random_partial_scenario),
    Mutant(TakesAMeanForItsSnapshot, {Invariant.LEFT_OUT}, 100, random_nonfinite_scenario),
    Mutant(HeldBackWhileLoading, {Invariant.ENDS}, 100, loading_at_the_own_pace),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.variant.__name__)
def test_a_wrong_variant_is_caught_where_the_protocol_passes(mutant):
    for seed in range(mutant.seeds):
        try:
            mutant.run(seed)
        except Violation as violation:
            if violation.invariant in mutant.invariants:
                run_seed(seed, mutant.scenarios)
                print(f"{mutant.variant.__name__} is caught by seed {seed}: {violation}")
                return
    pytest.fail(f"{mutant.variant.__name__} passes {mutant.seeds} seeds")


def test_the_command_of_a_failing_seed_replays_it(capsys):
    """The message ends with a command, which shows the same events and the same violation."""
    mutant = next(mutant for mutant in MUTANTS if mutant.variant is ForwardsOnlyTheFirst)
    types = types_of(mutant.variant)
    for seed in range(mutant.seeds):
        capsys.readouterr()
        try:
            run_seed(seed, mutant.scenarios, print_event, **types)
        except Violation as violation:
            message = str(violation)
            break
    events = capsys.readouterr().out
    assert f"seed {seed}: Scenario(" in message
    replayed = run_again(message)
    assert replayed.returncode == 1
    assert events.count("\n") > 10
    assert replayed.stdout == events
    assert replayed.stderr.rstrip().endswith(message)
