# cython: boundscheck=False, wraparound=False
"""A rank's contributions to averages, and the results it gets: the late rules of its snapshot.

A rank has up to four vectors, which only the driver accesses: the application's X, while it is in a
call or operation; the SNAPSHOT, which the rank contributes also while its application computes; the
RESULT; and the SCRATCH, for averages that are not published. This module decides how they change:
it calls a port (`Vectors`), and its attributes tell the driver where an exchange stores its mean.

Under the "paper" rule a publication replaces the snapshot, the mean of a version is in the result,
and a late call returns it merged with the application's vector. Under the "conserving" rule a
publication adds the application's change since its last call to the snapshot, a mean replaces the
snapshot, which calls return, and the result keeps the *base*: the vector that the application
continued from, once the snapshot no longer holds it. So no update is lost or counted twice.

With weights w and snapshots s, an average leaves Σ w s unchanged, whichever ranks it includes:
afterwards all its members have its mean, and each keeps its weight. A publication of the change δ,
by a rank that has weight w' from then on, turns the rank's w s into w' (s + δ). After an average
over all ranks every s is its mean, Σ w s / Σ w.

Source: WAGMA-SGD, section III-A and Algorithm 2 (paper); the conserving rule is our own. Weights by
work: WP-SGD, Eq. 6.
"""

import cython

if not cython.compiled:  # else the .pxd declares them
    from math import exp

    from collectives.protocols.all_ranks import AVERAGE, FINISH, SYNC, SYNCHRONIZE

# A rank's vectors.
NOWHERE = -1
X = 0
SNAPSHOT = 1
RESULT = 2
SCRATCH = 3

# How a rank's vector is weighted: by the weight of its last call; by its work, the sum of the
# weights of its calls since the last average over all ranks; or by r to the power of how far that
# work is behind the most.
GIVEN = 0
WORK = 1
CONTRACTION = 2

# No weight by contraction is larger than exp of this: the sum over all ranks must be finite.
LARGEST_EXPONENT = 230.0

# The states of a snapshot.
EMPTY = 0
RETURNED = 1
AVERAGED = 2
BASELESS = 3


class Vectors:
    """Operations on a rank's vectors: in the engine's memory, in a test or with numbers."""

    def copy(self, to, source):
        """to = source"""
        raise NotImplementedError

    def zero(self, vector):
        """vector = 0"""
        raise NotImplementedError

    def all_finite(self, vector):
        """Return whether all elements of the vector are finite."""
        raise NotImplementedError

    def is_change_finite(self):
        """Return whether all elements of SNAPSHOT + (X − RESULT) are finite."""
        raise NotImplementedError

    def add_change(self, to):
        """to = SNAPSHOT + (X − RESULT)"""
        raise NotImplementedError

    def absorb(self, own, total):
        """X = (own · X + total · RESULT) / (own + total)"""
        raise NotImplementedError


class ContributionProtocol:
    """A rank's contributions to averages that are not published, and the means that it gets.

    The rank lends its vector to the exchange, which reads it in place and writes the mean there. A
    vector that is not finite has weight 0.

    Args:
        vectors, ranks: its `Vectors`, and the rank's `AllRanksProtocol`.

    Attributes:
        present: whether the application is in a call or operation with a vector.
        given_weight, published_weight: its weight, and that of the vector last published.
        finite, nonfinite: whether the last vector or change was finite; how many were not.
        lent: whether the exchange averages X itself; `source` then is only the memory in its place.
        source, weight: the vector averaged otherwise; the weight of that, or of X.
        target, copy, saved: where the exchange stores its mean, a second copy of the mean, and the
            target's old contents; NOWHERE: not at all.
        total: the weight of the last mean; 0: no vector had a weight.
        weightless: whether no vector had a weight, so that all finite ones now count equally.
        work: of the calls since the last average over all ranks, where weights are by work.
    """

    def __init__(self, vectors, ranks):
        self.vectors = vectors
        self.ranks = ranks
        self.weighing = GIVEN
        self.log_rate = 0
        self.most_work = 0
        self.work = 0
        self.present = False
        self.given_weight = 1
        self.published_weight = 1
        self.finite = True
        self.nonfinite = 0
        self.lent = False
        self.source = SCRATCH
        self.weight = 0
        self.target = NOWHERE
        self.copy = NOWHERE
        self.saved = NOWHERE
        self.total = 0
        self.weightless = False
        # For repeating an average in which no vector had a weight: whether this rank contributes
        # finite values; whether these are X itself. Last: whether an interrupted call has already
        # filled the scratch.
        self.gives = False
        self.gives_x = False
        self.contributed = False

    # Weights

    def weigh_by(self, weighing, log_rate, most_work):
        """Weight by work from now on: proportionally (WORK), or as WP-SGD does (CONTRACTION).

        Args:
            weighing: GIVEN, WORK or CONTRACTION.
            log_rate: the logarithm of WP-SGD's contraction rate r, less than 0.
            most_work: the work of a rank that is not behind, by the average over all ranks.
        """
        self.weighing = weighing
        self.log_rate = log_rate
        self.most_work = most_work
        if weighing != GIVEN:
            self.restart_work()
            self.given_weight = self.published_weight

    def worked(self, weight):
        """Add the work since the application's last call; return the weight of its vector."""
        if self.weighing == GIVEN:
            return weight
        self.work += weight
        return self.weight_of_work()

    def weight_of_work(self):
        """Return the weight: q_i of WP-SGD's Eq. 6, up to a factor common to all ranks."""
        if self.weighing == WORK:
            return self.work
        return exp(min(LARGEST_EXPONENT, self.log_rate * (self.most_work - self.work)))

    def restart_work(self):
        """Count work from 0 again, since all ranks continue from the same vector."""
        if self.weighing != GIVEN:
            self.work = 0
            self.published_weight = self.weight_of_work()

    # The application's vector

    def give(self, weight):
        """Note that the application is in a call or operation with a vector of this weight."""
        self.present = True
        self.given_weight = weight

    def forget(self):
        """Note that the application has its vector back."""
        self.present = False

    def load(self):
        """Continue from the application's vector, if it is present; all ranks load."""

    def leave_out(self):
        """Count a vector or change that is not finite, and is not contributed."""
        self.nonfinite += 1

    def publishes(self):
        """Return whether the application's vector is to be contributed."""
        return self.present and not self.ranks.joined

    def is_finishing(self):
        """Return whether the application waits for FINISH, since all ranks have joined."""
        return self.present and self.ranks.operation == FINISH

    def is_averaging(self):
        """Return whether the application is in an operation that averages its vector."""
        operation: cython.int = self.ranks.operation
        return self.publishes() and (operation in (SYNC, SYNCHRONIZE, AVERAGE))

    # Averages over all ranks

    def takes_pass(self):
        """Return whether contributing X needs a pass over all of X besides that of the exchange."""
        return False

    def adds_change(self):
        """Return whether that pass checks that the change of X is finite, and adds it."""
        return False

    def begin_average(self):
        """Begin an average over all ranks: contribute, and set where the mean is stored."""
        if not self.contributed:
            self.contribute(self.publishes())
        self.contributed = False
        self.aim_average()

    def contribute(self, publishes):
        """Lend X, which takes no memory, or contribute nothing, by a scratch of zeros."""
        self.lent = publishes and self.vectors.all_finite(X)
        if not self.lent:
            self.vectors.zero(SCRATCH)
        self.gives = self.lent
        self.gives_x = self.lent
        self.weight = self.given_weight if self.lent else 0

    def aim_average(self):
        """Set where the mean of an average that is not published is stored."""
        gets: cython.bint = self.publishes() or self.is_finishing()
        self.source = SCRATCH
        self.target = X if self.lent else SCRATCH
        self.copy = X if gets and not self.lent else NOWHERE
        self.saved = NOWHERE

    def begin_again(self):
        """Repeat an average in which no vector had a weight: all finite ones count equally."""
        self.weightless = True
        self.weight = self.gives
        self.lent = self.gives_x
        self.aim_average()

    def end_exchange(self, total):
        """End an exchange whose mean, of weight `total`, has been stored."""
        self.lent = False
        self.total = total

    def end_average(self):
        """End an average over all ranks, whose mean has been stored."""

    def end_operation(self, averages):
        """End an operation; one that only `averages` has published nothing."""
        self.weightless = False

    # What an exception interrupts

    def interrupt(self, begun):
        """End the application's call or operation because of an exception.

        If an exchange of it has `begun`, the driver has copied the rest of X to the source. An
        average that has not begun will use what this rank contributes without its application,
        which would be nothing; so X is contributed now.
        """
        if not begun and self.is_averaging():
            self.contribute_ahead()
        self.stop_lending(begun)

    def contribute_ahead(self):
        """Contribute now what an average will take from this rank later."""
        self.contribute(True)
        if self.lent:
            self.vectors.copy(SCRATCH, X)
        self.contributed = True

    def stop_lending(self, begun):
        """Stop using X; parts of a contribution that was lent may no longer be in any vector."""
        self.lent = False
        self.gives = self.gives and not begun
        self.gives_x = False
        self.present = False
        if begun and self.target == X:
            self.target = self.own_target()
        self.copy = NOWHERE

    def own_target(self):
        """Return the vector that gets a mean that the application does not take."""
        return SCRATCH

    def interrupted(self, ended):
        """Note that no message uses X any longer, or that some may, if they have not `ended`."""


class SnapshotProtocol(ContributionProtocol):
    """A rank's contributions to versions and published averages, and the means that it gets.

    The states of its snapshot, and their changes by a publication under the conserving rule::

        state      holds                                        the application publishes
        EMPTY      nothing; its weight is 0                     X, then RETURNED
        RETURNED   what the application continues from          X, then RETURNED
        AVERAGED   a mean since; the base is in the result      SNAPSHOT + (X − base), AVERAGED
        BASELESS   a mean; the vector that the application      nothing, since its change is not
                   continued from is not known                  known, BASELESS

    A vector or change that is not finite is left out; in place of an EMPTY snapshot, or under the
    paper's rule, it leaves an EMPTY one of zeros. A mean that replaces the snapshot leads from
    RETURNED to AVERAGED and from EMPTY to BASELESS; one that the application gets, to RETURNED.

    Args:
        vectors: its `Vectors`; the first publication is `replace`.
        ranks: the rank's `WaitAvoidingProtocol`.
        conserving: whether the late rule is the conserving one; else it is the paper's.
        summing: whether ranks contribute sums that grow from 0 after each average over all ranks,
            and a late call gets the newest mean as it is.

    Attributes:
        state: of the snapshot. snapshot_weight: its weight; 0 where it is EMPTY.
        calling: whether the application is in a call of a version. published: whether it has
            already published in that call, or in an operation.
        published_version: the version that it last published for, from which staleness is counted.
        direct: whether the version that has begun includes the vector of this call.
        keeps: whether a lent X is also to be copied to the snapshot.
        out: whether the rank has joined, and its weight is 0 until all have.
    """

    def __init__(self, vectors, ranks, conserving, summing):
        ContributionProtocol.__init__(self, vectors, ranks)
        self.versioning = ranks
        self.conserving = conserving
        self.summing = summing
        self.state = EMPTY
        self.snapshot_weight = 0
        self.calling = False
        self.published = False
        self.published_version = -1
        self.direct = False
        self.keeps = False
        self.out = False
        # The version of the application's next call when this rank joined.
        self.joined_at = -1
        # Whether the change of an interrupted call is in the snapshot.
        self.shares = False

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
        self.published_version = self.ranks.version - 1

    def set_snapshot(self, filled):
        """Set the snapshot's state: `filled` by the application's vector, or empty."""
        self.published_weight = self.given_weight
        self.snapshot_weight = self.given_weight if filled else 0
        self.state = RETURNED if filled else EMPTY

    def publish(self):
        """Publish the vector itself (paper), or the application's change to it (conserving).

        While the snapshot is the vector that was returned, adding the change gives X exactly.
        """
        if not self.conserving or self.state == EMPTY:
            self.replace()
        else:
            if self.state == RETURNED:
                self.finite = self.vectors.all_finite(X)
                if self.finite:
                    self.vectors.copy(SNAPSHOT, X)
            else:
                self.finite = self.state == AVERAGED and self.vectors.is_change_finite()
                if self.finite:
                    self.vectors.add_change(SNAPSHOT)
            if self.finite:
                self.published_weight = self.given_weight
                self.snapshot_weight = self.given_weight
            else:
                self.leave_out()
        self.note_published()

    def note_published(self):
        """Note that the rank contributes the application's current vector."""
        self.published = True
        self.published_version = self.ranks.version

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
        return self.conserving and (self.state == AVERAGED or self.state == BASELESS)

    def adds_change(self):
        return self.conserving and self.state == AVERAGED

    def publish_between_calls(self):
        """Publish, and make X the vector that the application continues from."""
        bases: cython.bint = self.conserving and self.state == AVERAGED
        self.publish()
        if bases and self.finite:
            self.vectors.copy(RESULT, X)
        self.published = False

    def join(self):
        """Note that the application has published, and makes no calls until all have joined."""
        self.joined_at = self.ranks.version
        if not (self.conserving or self.summing):
            # Otherwise changes that were not yet shared first enter the next synchronization.
            self.snapshot_weight = 0

    def count_once(self):
        """Set an averaged vector's weight to 0, unless ranks are passive or this one has joined."""
        if not (self.versioning.passive or self.ranks.joined):
            self.snapshot_weight = 0

    # Versions

    def begin_call(self):
        """Note that the application is in a call of a version."""
        self.calling = True

    def begin_version(self):
        """Begin a version: set what this rank contributes, and where the mean is stored."""
        bypasses: cython.bint = self.bypasses_snapshot()
        self.direct = self.calling and self.published and self.versioning.timely
        self.source = SNAPSHOT
        self.weight = self.snapshot_weight
        self.keeps = not (self.conserving or bypasses)
        self.target = X if self.direct else self.own_target()
        self.copy = NOWHERE
        self.saved = NOWHERE
        if self.conserving:
            if self.direct and not bypasses:
                self.copy = SNAPSHOT
            if self.state == RETURNED and not self.direct:
                self.saved = RESULT

    def bypasses_snapshot(self):
        """Return whether a version averages the application's buffer in place, and keeps no copy.

        If no rank is passive none is needed, unless an exception interrupts the call meanwhile.
        """
        return self.lent and self.calling and not self.versioning.passive

    def own_target(self):
        if self.source == SCRATCH:
            return SCRATCH
        return SNAPSHOT if self.conserving else RESULT

    def end_exchange(self, total):
        """End an exchange; if no vector had a weight, a lent one stays the rank's contribution."""
        self.total = total
        if self.lent and total == 0 and self.source == SNAPSHOT and not self.bypasses_snapshot():
            self.vectors.copy(SNAPSHOT, X)
        self.lent = False

    def end_version(self, total):
        """End a version whose mean, of weight `total`, has been stored."""
        bypassed: cython.bint = self.bypasses_snapshot()
        self.end_exchange(total)
        if bypassed:
            self.set_snapshot(False)
        elif self.conserving and total != 0:
            self.mean_replaces()
        else:
            self.count_once()

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
            self.state = AVERAGED
        elif self.state == EMPTY:
            self.state = BASELESS

    def weight_after(self):
        """Return the weight of a mean that replaces the snapshot."""
        if self.versioning.passive:
            return 0 if self.out else self.published_weight
        return self.snapshot_weight if self.ranks.joined else 0

    def has_mean(self):
        """Return whether the application's buffer already holds the call's result."""
        return self.versioning.timely and (self.total != 0 or not self.conserving)

    def end_call(self):
        """End the call, whose version has been executed, timely or not, and set X to its result."""
        if not self.versioning.timely:
            self.publish()
        if not self.conserving:
            if not self.versioning.timely:
                self.absorb_late()
        elif self.state != EMPTY:
            if not self.has_mean():
                self.vectors.copy(X, SNAPSHOT)
            self.state = RETURNED
        self.calling = False
        self.published = False

    def absorb_late(self):
        """Merge a late vector by the paper's rule: x = (W·m + w·x') / (W + w).

        It is m if x' is not finite, or is a sum, part of which is in m already.
        """
        if self.total == 0:
            return
        if self.finite and not self.summing and self.given_weight > 0:
            self.vectors.absorb(self.given_weight, self.total)
        else:
            self.vectors.copy(X, RESULT)

    # Averages over all ranks

    def begin_average(self):
        if self.ranks.operation == AVERAGE:
            ContributionProtocol.begin_average(self)
            return
        if self.publishes():
            self.lend()
        if self.is_finishing() and self.joined_at == self.ranks.version and self.finite:
            # No rank has made more calls: this rank's snapshot counts.
            self.snapshot_weight = self.published_weight
        self.gives = self.state != EMPTY
        self.aim_average()

    def contribute(self, publishes):
        """Lend X, or fill the scratch with what a synchronization would take from this rank now.

        The cases are those of `publish`. A sum does not enter an average of other vectors.
        """
        replaces: cython.bint = not self.conserving or self.state == EMPTY
        self.gives = True
        self.gives_x = False
        self.weight = self.given_weight
        if publishes and (replaces or self.state == RETURNED) and self.vectors.all_finite(X):
            self.lent = True
            self.gives_x = True
        elif replaces and (publishes or self.summing):
            self.vectors.zero(SCRATCH)
            self.gives = False
            self.weight = 0
        elif publishes and self.state == AVERAGED and self.vectors.is_change_finite():
            self.vectors.add_change(SCRATCH)
        else:
            self.vectors.copy(SCRATCH, SNAPSHOT)
            self.gives = self.state != EMPTY
            self.weight = self.snapshot_weight

    def aim_average(self):
        if self.ranks.operation == AVERAGE:
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
        if self.ranks.operation == AVERAGE:
            ContributionProtocol.begin_again(self)
            return
        self.weightless = True
        self.snapshot_weight = self.gives
        self.aim_average()

    def end_average(self):
        operation: cython.int = self.ranks.operation
        if operation == AVERAGE:
            return
        self.published_version = self.ranks.version - (operation != SYNC)
        # This average includes what a rank that has joined had not yet shared.
        self.out = self.ranks.joined and operation != FINISH
        self.restart_work()
        if self.total != 0:
            if self.copy != NOWHERE:
                self.state = RETURNED
            else:
                self.leave_base()
            self.snapshot_weight = 0 if self.out else self.published_weight
        if self.summing:
            self.vectors.zero(SNAPSHOT)

    def end_operation(self, averages):
        self.weightless = False
        self.published = False
        if not averages:
            self.count_once()

    # What an exception interrupts

    def interrupt(self, begun):
        """See `ContributionProtocol`; here the application's change is published."""
        self.shares = self.conserving and (self.published or (self.is_finishing() and begun))
        if not begun and self.lent:
            # Its version's exchange has not begun here.
            self.vectors.copy(SNAPSHOT, X)
        elif not begun and self.is_averaging() and not self.versioning.passive:
            if self.ranks.operation == AVERAGE:
                self.contribute_ahead()
            else:
                self.publish_between_calls()
        self.stop_lending(begun)
        if self.shares:
            self.saved = NOWHERE
            if self.state == RETURNED:
                self.state = AVERAGED
        self.published = False
        self.calling = False

    def interrupted(self, ended):
        """Make X the base if its change is published; unknown if messages may still write to it."""
        if not self.shares:
            return
        self.vectors.copy(RESULT, X)
        if not ended and self.state == AVERAGED:
            self.state = BASELESS
        self.shares = False
