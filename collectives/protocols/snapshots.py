"""A rank's snapshot: what it contributes to versions, also while its application computes.

What late ranks contribute and get is for a `LateRule` to decide: see `late_rules`.

Source: WAGMA-SGD, section III-A and Algorithm 2.
"""

import cython

from collectives.protocols.contribution import ContributionProtocol
from collectives.protocols.job_count import JobCount
from collectives.protocols.lease import Lease

if not cython.compiled:  # else the .pxd declares them
    from collectives.protocols.all_ranks import AVERAGE, FINISH, SYNC
    from collectives.protocols.contribution import (
        GIVEN,
        KEPT,
        NOWHERE,
        RESULT,
        SCRATCH,
        SNAPSHOT,
        X,
    )

# The states of a snapshot: it holds nothing; what the application continues from; a mean since; or
# a mean, and what the application continues from is not known.
UNFILLED = 0
RETURNED = 1
REPLACED = 2
BASELESS = 3


class LateRule:
    """What a rank contributes and gets: see `late_rules`."""

    # What a rank contributes

    def replaces(self, snapshot):
        """Return whether a publication replaces the snapshot, whatever that was."""
        raise NotImplementedError

    def publish(self, snapshot):
        """Publish the application's vector X, or its change."""
        raise NotImplementedError

    def lacks_contribution(self, snapshot, publishes):
        """Return whether an average that is not published gets nothing where X cannot be lent.

        Args:
            publishes: whether the application is in a call or operation, with X.
        """
        raise NotImplementedError

    # A version

    def stored_in(self):
        """Return where the mean of a version is stored that the application does not take."""
        raise NotImplementedError

    def begin_version(self, snapshot, bypasses):
        """Set what is copied and saved besides; `bypasses`: see `bypasses_snapshot`."""
        raise NotImplementedError

    def end_version(self, snapshot):
        """Set what the snapshot becomes: the mean is stored, or no vector had a weight."""
        raise NotImplementedError

    # What a call gets

    def has_mean(self, snapshot):
        """Return whether the application's buffer already holds the call's result."""
        raise NotImplementedError

    def end_call(self, snapshot):
        """Set X to the result of the call, timely or late; a late one has published."""
        raise NotImplementedError

    # What else happens to the snapshot

    def join(self, snapshot):
        """Remove its weight, as its rank makes no more calls, unless it is still to be shared."""
        raise NotImplementedError

    def synchronized(self, snapshot):
        """Continue from an average over all ranks, which all of them have now."""
        raise NotImplementedError

    def publishes_changes(self):
        """Return whether publications are relative to what the application continues from."""
        raise NotImplementedError


class SnapshotProtocol(ContributionProtocol):
    """A rank's contributions to versions and published averages, and the means that it gets.

    A vector or change that is not finite is left out; where it would have replaced the snapshot,
    that becomes UNFILLED, with zeros.

    Args:
        vectors: its `Vectors`; the first publication is `replace`.
        versions: the rank's `WaitAvoidingProtocol`.
        rule: its `LateRule`.

    Attributes:
        state: of the snapshot. snapshot_weight: its weight; 0 where it is UNFILLED.
        calling: whether the application is in a call of a version. published: whether it has
            already published in that call, or in an operation.
        published_version: the version that it last published for, from which staleness is counted.
        direct: whether the version that has begun includes the vector of this call.
        keeps: whether a lent X is also to be copied to the snapshot.
        out: whether the rank has joined, and its weight is 0 until all have.
        job, lease: the `JobCount` and the `Lease` of ranks at their own pace.
        keeps_average: whether the newest average over all ranks is kept, in KEPT.
        kept_version, kept_count: its version, −1 before the first, and the mean of the counts.
        fetched_version, fetched_count: those of the one that the application has got last; or the
            next version when it got the snapshot.
        loaded_count: the count to continue with after a LOAD.
    """

    def __init__(self, vectors, versions, rule):
        ContributionProtocol.__init__(self, vectors, versions)
        self.versions = versions
        self.rule = rule
        self.state = UNFILLED
        self.snapshot_weight = 0
        self.calling = False
        self.published = False
        self.published_version = -1
        self.direct = False
        self.keeps = False
        self.out = False
        self.job = JobCount()
        self.lease = Lease(vectors)
        self.keeps_average = False
        self.kept_version = -1
        self.kept_count = 0
        self.fetched_version, self.fetched_count = -1, 0
        self.loaded_count = 0
        # The version of the application's next call when this rank joined.
        self.joined_at = -1
        # Whether the change of an interrupted call is in the snapshot.
        self.shares = False
        # Whether the version of an interrupted call, which goes on, has nothing of this rank's.
        self.drops = False

    # Weights

    def worked(self, weight):
        """At the ranks' own pace models have weight 1; that of a call is its work, to count."""
        if not self.versions.own_pace:
            return ContributionProtocol.worked(self, weight)
        self.job.work(weight)
        return 1

    # Publishing

    def replace(self):
        """Make X the rank's contribution, whatever that was."""
        self.finite = self.vectors.all_finite(X)
        if self.finite:
            self.vectors.copy(SNAPSHOT, X)
        else:
            self.leave_out()
            self.vectors.zero(SNAPSHOT)
        self.set_snapshot(self.finite)

    def load(self):
        self.restart_work()
        if self.present:
            if self.weighing != GIVEN:
                self.given_weight = self.published_weight
            self.replace()
        self.published_version = self.operations.version - 1
        self.job.restart(self.loaded_count)
        self.lease.end()
        self.kept_version = -1

    def set_snapshot(self, filled):
        """Set the snapshot's state: `filled` by the application's vector, or empty."""
        self.published_weight = self.given_weight
        self.snapshot_weight = self.given_weight if filled else 0
        self.state = RETURNED if filled else UNFILLED

    def publish(self):
        """Publish the application's vector, or its change, as the late rule says."""
        self.lease.resume()
        self.rule.publish(self)
        self.note_published()

    def note_published(self):
        """Note that the rank contributes the application's current vector."""
        self.published = True
        self.published_version = self.versions.publishes_for()
        self.job.publish(self.finite)

    def lend(self):
        """Publish for an exchange that begins at once, without a copy where none is needed."""
        if self.takes_pass() or not self.vectors.all_finite(X):
            self.publish()
            return
        self.lent = True
        self.finite = True
        self.set_snapshot(True)
        self.note_published()

    def takes_pass(self):
        """Return whether publishing X does more than to replace the snapshot by it."""
        return self.state != RETURNED and not self.rule.replaces(self)

    def adds_change(self):
        return self.state == REPLACED and not self.rule.replaces(self)

    def publish_between_calls(self):
        """Publish, and make X the vector that the application continues from."""
        bases: cython.bint = self.adds_change()
        self.publish()
        if bases and self.finite:
            self.vectors.copy(RESULT, X)
        self.published = False

    def save(self):
        """Give the application the snapshot; others may start versions once all have theirs."""
        self.lease.resume()
        self.vectors.copy(X, SNAPSHOT)
        self.fetched_version = self.versions.version + self.versions.base

    def fetch_kept(self):
        """Give it the average over all ranks that is kept; another may take its place at once."""
        self.vectors.copy(X, KEPT)
        self.fetched_version, self.fetched_count = self.kept_version, self.kept_count

    def rebase(self):
        """Continue from X, and keep the snapshot: what the application changes is relative to X."""
        if self.state == RETURNED:
            self.state = REPLACED
        self.vectors.copy(RESULT, X)

    def expire(self):
        """Take out of the snapshot what counts only while the application publishes."""
        self.lease.expire(self.state == RETURNED)
        if self.state == RETURNED:
            self.state = REPLACED

    def join(self):
        """Note that the application has published, and makes no calls until all have joined."""
        self.joined_at = self.operations.version
        self.lease.end()
        self.rule.join(self)

    def count_once(self):
        """Set an averaged vector's weight to 0, unless ranks are passive or this one has joined."""
        if not (self.versions.passive or self.operations.joined):
            self.snapshot_weight = 0

    # Versions

    def begin_call(self):
        """Note that the application is in a call of a version."""
        self.calling = True

    def begin_version(self):
        """Begin a version: set what this rank contributes, and where the mean is stored."""
        self.direct = self.calling and self.published and self.versions.timely
        bypasses: cython.bint = self.bypasses_snapshot()
        self.source = SNAPSHOT
        self.weight = self.snapshot_weight
        self.target = X if self.direct else self.own_target()
        self.copy = NOWHERE
        self.saved = NOWHERE
        self.rule.begin_version(self, bypasses)

    def bypasses_snapshot(self):
        """Return whether a version averages the application's buffer in place, and keeps no copy.

        If no rank is passive none is needed, unless an exception interrupts the call meanwhile. Of
        a buffer that contributes nothing, only the application has the arrays that the version
        leaves out.
        """
        contributes_nothing: cython.bint = self.direct and self.state == UNFILLED
        return self.calling and not self.versions.passive and (self.lent or contributes_nothing)

    def is_in_place(self):
        """Return whether the exchange's mean replaces the snapshot."""
        return self.target == SNAPSHOT or self.copy == SNAPSHOT

    def saves_snapshot(self):
        """Return whether the exchange leaves the old snapshot in the result vector."""
        return self.saved == RESULT

    def own_target(self):
        return SCRATCH if self.source == SCRATCH else self.rule.stored_in()

    def end_exchange(self, total):
        """End an exchange; if no vector had a weight, a lent one stays the rank's contribution."""
        self.total = total
        if self.lent and total == 0 and self.source == SNAPSHOT and not self.bypasses_snapshot():
            self.vectors.copy(SNAPSHOT, X)
        self.lent = False

    def end_version(self, total):
        """End a version whose mean, of weight `total`, has been stored.

        One to which an interrupted call has given nothing leaves the snapshot empty, as it would
        if the call had taken its mean: only the application has all arrays.
        """
        bypassed: cython.bint = self.bypasses_snapshot() or self.drops
        self.end_exchange(total)
        if self.drops:
            self.drops = False
            self.vectors.zero(SNAPSHOT)
        if bypassed:
            self.set_snapshot(False)
        else:
            self.rule.end_version(self)

    def keep_average(self, version):
        """Keep the snapshot, which is the average over all ranks of this version, if asked to."""
        if self.keeps_average and self.total != 0:
            self.vectors.copy(KEPT, SNAPSHOT)
            self.kept_version = version + self.versions.base
            self.kept_count = self.job.known

    def executed(self, total, replaced):
        """Note that others have executed versions for this rank.

        Args:
            total: the weight of the last one's mean.
            replaced: whether a mean of one of them is in the snapshot.
        """
        self.total = total
        if replaced:
            self.mean_replaces()

    def mean_replaces(self):
        """Note that a mean has replaced the snapshot."""
        self.snapshot_weight = self.weight_after()
        self.leave_base()

    def leave_base(self):
        """Note that the snapshot is no longer the vector that the application continues from."""
        if self.state == RETURNED:
            self.state = REPLACED
        elif self.state == UNFILLED:
            self.state = BASELESS

    def weight_after(self):
        """Return the weight of a mean that replaces the snapshot."""
        if self.versions.passive:
            return 0 if self.out else self.published_weight
        return self.snapshot_weight if self.operations.joined else 0

    def is_late(self):
        """Return whether the application is in a call whose version is executed without it."""
        return self.calling and not self.versions.timely

    def has_mean(self):
        """Return whether the application's buffer already holds the call's result."""
        return self.rule.has_mean(self)

    def end_call(self):
        """End the call, whose version has been executed, timely or not, and set X to its result."""
        if self.is_late():
            self.publish()
        self.rule.end_call(self)
        self.calling = False
        self.published = False

    # Averages over all ranks

    def begin_average(self):
        if self.operations.operation == AVERAGE:
            ContributionProtocol.begin_average(self)
            return
        if self.publishes():
            self.lend()
        if self.is_finishing() and self.joined_at == self.operations.version and self.finite:
            # No rank has made more calls: this rank's snapshot counts.
            self.snapshot_weight = self.published_weight
        self.gives = self.state != UNFILLED
        self.aim_average()

    def contribute(self, publishes):
        """Lend X, or fill the scratch with what a synchronization would take from this rank now.

        The cases are those of publications.
        """
        self.lease.resume()
        replaces: cython.bint = self.rule.replaces(self)
        self.gives = True
        self.gives_x = False
        self.weight = self.given_weight
        if publishes and (replaces or self.state == RETURNED) and self.vectors.all_finite(X):
            self.lent = True
            self.gives_x = True
        elif self.rule.lacks_contribution(self, publishes):
            self.vectors.zero(SCRATCH)
            self.gives = False
            self.weight = 0
        elif publishes and self.state == REPLACED and self.vectors.is_change_finite():
            self.vectors.add_change(SCRATCH)
        else:
            self.vectors.copy(SCRATCH, SNAPSHOT)
            self.gives = self.state != UNFILLED
            self.weight = self.snapshot_weight

    def aim_average(self):
        if self.operations.operation == AVERAGE:
            ContributionProtocol.aim_average(self)
            return
        publishes: cython.bint = self.publishes()
        self.source = SNAPSHOT
        self.weight = self.snapshot_weight
        self.keeps = False
        self.target = SNAPSHOT
        self.copy = X if publishes or self.is_finishing() else NOWHERE
        self.saved = RESULT if self.state == RETURNED and not publishes else NOWHERE

    def begin_again(self):
        if self.operations.operation == AVERAGE:
            ContributionProtocol.begin_again(self)
            return
        self.weightless = True
        self.snapshot_weight = self.gives
        self.aim_average()

    def end_average(self):
        operation: cython.int = self.operations.operation
        if operation == AVERAGE:
            return
        self.published_version = self.operations.version - (operation != SYNC)
        # This average includes what a rank that has joined had not yet shared.
        self.out = self.operations.joined and operation != FINISH and not self.versions.own_pace
        self.restart_work()
        if self.total != 0:
            if self.copy != NOWHERE:
                self.state = RETURNED
            else:
                self.leave_base()
            self.snapshot_weight = 0 if self.out else self.published_weight
        self.rule.synchronized(self)
        self.keep_average(self.published_version)

    def end_operation(self, averages):
        self.weightless = False
        self.published = False
        if not averages:
            self.count_once()

    # What an exception interrupts

    def interrupt(self, begun):
        """See `ContributionProtocol`; here the application's change is published."""
        changes: cython.bint = self.rule.publishes_changes()
        goes_on: cython.bint = self.calling and self.versions.next <= self.versions.version
        if goes_on and not self.versions.passive and self.state == UNFILLED:
            self.drops = True
        gave: cython.bint = self.published or (self.is_finishing() and begun)
        self.shares = changes and gave and not self.drops
        if not begun and self.lent:
            # Its version's exchange has not begun here.
            self.vectors.copy(SNAPSHOT, X)
        elif not begun and self.is_averaging() and not self.versions.passive:
            if self.operations.operation == AVERAGE:
                self.contribute_ahead()
            else:
                self.publish_between_calls()
        self.stop_lending(begun)
        if self.shares:
            self.saved = NOWHERE
            if self.state == RETURNED:
                self.state = REPLACED
        self.published = False
        self.calling = False

    def interrupted(self, ended):
        """Make X the base if its change is published; unknown if messages may still write to it."""
        if not self.shares:
            return
        self.vectors.copy(RESULT, X)
        if not ended and self.state == REPLACED:
            self.state = BASELESS
        self.shares = False
