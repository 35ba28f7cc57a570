# cython: boundscheck=False, wraparound=False
"""A rank's contributions to averages, and its results: the late rules of a rank's snapshot.

A rank has up to four vectors, which only the driver accesses: the application's X, while it is in a
call or operation; the SNAPSHOT, which the rank contributes also while its application computes; the
RESULT; and the SCRATCH, for averages that are not published. This module decides what happens to
them, by calls of a port and attributes that tell the driver of an exchange where its mean belongs.

Under the "paper" rule a publication replaces the snapshot, the mean of a version is in the result,
and a late call returns it merged with the application's vector. Under the "conserving" rule a
publication adds the application's change since its last call to the snapshot, a mean replaces the
snapshot, which calls return, and the result keeps the *base*: the vector that the application
continued from, once that is no longer in the snapshot. So no update is lost or counted twice.

With weights w and snapshots s, an average leaves Σ w s unchanged, whichever ranks it includes: then
all its members have its mean, and each its own weight. A publication of the change δ, by a rank
that has weight w' from then on, turns the rank's w s into w' (s + δ). After an average over all
ranks every s is its mean, Σ w s / Σ w.

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

# What a rank's vector weighs: what its last call says; the sum of what its calls since the last
# average over all ranks say, its work; or r to the power of how far that is behind the most.
GIVEN = 0
WORK = 1
CONTRACTION = 2

# No weight is larger, or smaller, than its e-th power; the sum over all ranks must be finite.
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
        """Whether all of the vector is finite."""
        raise NotImplementedError

    def is_change_finite(self):
        """Whether SNAPSHOT + (X − RESULT) is finite."""
        raise NotImplementedError

    def add_change(self, to):
        """to = SNAPSHOT + (X − RESULT)"""
        raise NotImplementedError

    def absorb(self, own, total):
        """X = (own · X + total · RESULT) / (own + total)"""
        raise NotImplementedError


class ContributionProtocol:
    """What a rank gives to averages that are not published, and gets of them.

    It lends its vector to the exchange, which reads it where it is and writes the mean there. A
    vector that is not finite has weight 0.

    Args:
        vectors, ranks: its `Vectors`, and the rank's `AllRanksProtocol`.

    Attributes:
        present: whether the application's vector is there, in a call or operation.
        given_weight, published_weight: its weight, and that of the one last published.
        finite, nonfinite: whether what was last given is finite; how often it was not.
        lent: whether the exchange averages X itself; `source` then only has room for it.
        source, weight: what else it averages; how much that, or X, weighs.
        target, copy, saved: where its mean belongs, where that is to be as well, and where to save
            what was in the target; NOWHERE: not.
        total: the weight of the last mean; 0: there was nothing to average.
        weightless: whether no vector had a weight, so that all finite ones have the same now.
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
        # What this rank gives to an average, once more where nobody's vector has weight: something
        # finite; X itself. Whether an interrupted call has filled the scratch already.
        self.gives = False
        self.gives_x = False
        self.contributed = False

    # Weights

    def weigh_by(self, weighing, log_rate, most_work):
        """Weigh by work from now on: by how much it is (WORK), or as WP-SGD does (CONTRACTION).

        Args:
            weighing: GIVEN, WORK or CONTRACTION.
            log_rate: the logarithm of WP-SGD's contraction rate r, less than 0.
            most_work: what a rank that is not behind has done by the average over all ranks.
        """
        self.weighing = weighing
        self.log_rate = log_rate
        self.most_work = most_work
        if weighing != GIVEN:
            self.restart_work()
            self.given_weight = self.published_weight

    def worked(self, weight):
        """The application has done this much since its last call: return what its vector weighs."""
        if self.weighing == GIVEN:
            return weight
        self.work += weight
        return self.weight_of_work()

    def weight_of_work(self):
        """Return the weight: q_i of WP-SGD's Eq. 6, but for a factor that all ranks have."""
        if self.weighing == WORK:
            return self.work
        return exp(min(LARGEST_EXPONENT, self.log_rate * (self.most_work - self.work)))

    def restart_work(self):
        """All ranks go on from the same: work counts from here."""
        if self.weighing != GIVEN:
            self.work = 0
            self.published_weight = self.weight_of_work()

    # The application's vector

    def give(self, weight):
        """The application is in a call or operation with a vector of this weight."""
        self.present = True
        self.given_weight = weight

    def forget(self):
        """The application's vector is its own again."""
        self.present = False

    def leave_out(self):
        """What the application gave is not finite, and is contributed to nothing."""
        self.nonfinite += 1

    def publishes(self):
        """Whether the application's vector is to be contributed."""
        return self.present and not self.ranks.joined

    def is_finishing(self):
        """Whether the application waits for the end of what all have joined."""
        return self.present and self.ranks.operation == FINISH

    def is_averaging(self):
        """Whether the application is in an operation that averages what it gives."""
        operation: cython.int = self.ranks.operation
        return self.publishes() and (operation in (SYNC, SYNCHRONIZE, AVERAGE))

    # Averages over all ranks

    def takes_pass(self):
        """Whether to give X to what begins takes a pass over all of it, and not the exchange's."""
        return False

    def adds_change(self):
        """Whether that is whether the change of X is finite, and to add it."""
        return False

    def begin_average(self):
        """All ranks average: contribute, and say where the mean belongs."""
        if not self.contributed:
            self.contribute(self.publishes())
        self.contributed = False
        self.aim_average()

    def contribute(self, publishes):
        """Lend X, which takes no memory, or else contribute nothing, from the scratch."""
        self.lent = publishes and self.vectors.all_finite(X)
        if not self.lent:
            self.vectors.zero(SCRATCH)
        self.gives = self.lent
        self.gives_x = self.lent
        self.weight = self.given_weight if self.lent else 0

    def aim_average(self):
        """Say where the mean of an average that is not published belongs."""
        gets: cython.bint = self.publishes() or self.is_finishing()
        self.source = SCRATCH
        self.target = X if self.lent else SCRATCH
        self.copy = X if gets and not self.lent else NOWHERE
        self.saved = NOWHERE

    def begin_again(self):
        """Nobody's vector has weight: let all that are finite count alike."""
        self.weightless = True
        self.weight = self.gives
        self.lent = self.gives_x
        self.aim_average()

    def end_exchange(self, total):
        """The mean, of this weight, is where it belongs."""
        self.lent = False
        self.total = total

    def end_average(self):
        """The average over all ranks is there."""

    def end_operation(self, averages):
        """An operation is over; one that only `averages` has published nothing."""
        self.weightless = False

    # What an exception interrupts

    def interrupt(self, begun):
        """An exception ends what the application is in; whether an exchange of it has `begun`.

        Where one has, the driver has put what is left of X into the source. An average that has not
        goes on with what there is, and that would be nothing.
        """
        if not begun and self.is_averaging():
            self.contribute_ahead()
        self.stop_lending(begun)

    def contribute_ahead(self):
        """Give now what an average will take from this rank."""
        self.contribute(True)
        if self.lent:
            self.vectors.copy(SCRATCH, X)
        self.contributed = True

    def stop_lending(self, begun):
        """X is not to be used any longer; of what it gave part may be nowhere any more."""
        self.lent = False
        self.gives = self.gives and not begun
        self.gives_x = False
        self.present = False
        if begun and self.target == X:
            self.target = self.own_target()
        self.copy = NOWHERE

    def own_target(self):
        """Where a mean goes that the application does not take."""
        return SCRATCH

    def interrupted(self, ended):
        """Nothing is under way to X any longer; or messages have not `ended` that are."""


class SnapshotProtocol(ContributionProtocol):
    """What a rank contributes to versions and published averages, and gets of them.

    The states of its snapshot, and under the conserving rule what a publication makes of them::

        state      holds                                        the application publishes
        EMPTY      nothing; its weight is 0                     X, then RETURNED
        RETURNED   what the application goes on from            X, then RETURNED
        AVERAGED   a mean since; the base is in the result      SNAPSHOT + (X − base), AVERAGED
        BASELESS   a mean; what its application has come from   nothing, since its change is not
                   is not known                                 known, BASELESS

    A vector or change that is not finite is left out; in place of an EMPTY snapshot, or under the
    paper's rule, it leaves an EMPTY one of zeros. A mean that replaces the snapshot leads from
    RETURNED to AVERAGED and from EMPTY to BASELESS; one that the application gets, to RETURNED.

    Args:
        vectors: its `Vectors`; the first publication is `replace`.
        ranks: the rank's `WaitAvoidingProtocol`.
        conserving: the late rule; else the paper's.
        summing: whether ranks contribute sums that grow from 0 after each average over all ranks,
            and a late call gets the newest mean as it is.

    Attributes:
        state: of the snapshot. snapshot_weight: how much it weighs; what is EMPTY weighs 0.
        calling: whether the application is in a call of a version; `published`: and is past
            publishing, there or in an operation.
        published_version: the version that it last published for, of which staleness is counted.
        direct: whether the version that has begun has the vector of this call.
        keeps: whether an X that is lent is to be in the snapshot afterwards.
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
        # After how many calls this rank joined.
        self.joined_at = -1
        # An interrupted call's change is in the snapshot.
        self.shares = False

    # Publishing

    def replace(self):
        """Make X what the rank contributes, whatever it was."""
        self.finite = self.vectors.all_finite(X)
        if self.finite:
            self.vectors.copy(SNAPSHOT, X)
        else:
            self.leave_out()
            self.vectors.zero(SNAPSHOT)
        self.set_snapshot(self.finite)

    def load(self):
        """All ranks go on from what this one's application gives, if it is there."""
        self.restart_work()
        if self.present:
            if self.weighing != GIVEN:
                self.given_weight = self.published_weight
            self.replace()
        self.published_version = self.ranks.version - 1

    def set_snapshot(self, filled):
        """The snapshot is what the application has, or else nothing that counts."""
        self.published_weight = self.given_weight
        self.snapshot_weight = self.given_weight if filled else 0
        self.state = RETURNED if filled else EMPTY

    def publish(self):
        """Publish the vector itself (paper), or what the application changed (conserving).

        While the snapshot is what was returned, adding the change gives X exactly.
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
        """The rank contributes what its application has now."""
        self.published = True
        self.published_version = self.ranks.version

    def lend(self):
        """Publish for an exchange that begins at once, without a copy where it needs none."""
        if self.takes_pass() or not self.vectors.all_finite(X):
            self.publish()
            return
        self.lent = True
        self.finite = True
        self.set_snapshot(True)
        self.note_published()

    def takes_pass(self):
        """Whether X, published, does not just replace the snapshot."""
        return self.conserving and (self.state == AVERAGED or self.state == BASELESS)

    def adds_change(self):
        return self.conserving and self.state == AVERAGED

    def publish_between_calls(self):
        """Publish, and go on from X."""
        bases: cython.bint = self.conserving and self.state == AVERAGED
        self.publish()
        if bases and self.finite:
            self.vectors.copy(RESULT, X)
        self.published = False

    def join(self):
        """The application, which has published, makes no more calls until all have joined."""
        self.joined_at = self.ranks.version
        if not (self.conserving or self.summing):
            # Under other rules what was not yet shared goes into the next synchronization first.
            self.snapshot_weight = 0

    def count_once(self):
        """If no rank is passive, averaged vectors count no more, except those of joined ranks."""
        if not (self.versioning.passive or self.ranks.joined):
            self.snapshot_weight = 0

    # Versions

    def begin_call(self):
        """The application is in a call of a version."""
        self.calling = True

    def begin_version(self):
        """A version begins here: say what it averages, and where its mean belongs."""
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
        """Whether a version goes from the application's memory back there, and no copy is kept.

        If no rank is passive none is needed, unless an exception ends the call meanwhile.
        """
        return self.lent and self.calling and not self.versioning.passive

    def own_target(self):
        if self.source == SCRATCH:
            return SCRATCH
        return SNAPSHOT if self.conserving else RESULT

    def end_exchange(self, total):
        """What was lent and had no weight stays what the rank contributes."""
        self.total = total
        if self.lent and total == 0 and self.source == SNAPSHOT and not self.bypasses_snapshot():
            self.vectors.copy(SNAPSHOT, X)
        self.lent = False

    def end_version(self, total):
        """The mean of a version, of this weight, is where it belongs."""
        bypassed: cython.bint = self.bypasses_snapshot()
        self.end_exchange(total)
        if bypassed:
            self.set_snapshot(False)
        elif self.conserving and total != 0:
            self.mean_replaces()
        else:
            self.count_once()

    def executed(self, total, replaced):
        """Others have executed versions for this rank, the last one's mean of this weight.

        Args:
            replaced: whether a mean of one of them is in the snapshot.
        """
        self.total = total
        if replaced:
            self.mean_replaces()

    def mean_replaces(self):
        """A mean has replaced the snapshot."""
        self.snapshot_weight = self.weight_after()
        self.leave_base()

    def leave_base(self):
        """The snapshot is no longer what the application goes on from."""
        if self.state == RETURNED:
            self.state = AVERAGED
        elif self.state == EMPTY:
            self.state = BASELESS

    def weight_after(self):
        """The weight of a mean that replaces the snapshot."""
        if self.versioning.passive:
            return 0 if self.out else self.published_weight
        return self.snapshot_weight if self.ranks.joined else 0

    def has_mean(self):
        """Whether the application has what its call returns already."""
        return self.versioning.timely and (self.total != 0 or not self.conserving)

    def end_call(self):
        """The version that the call waited for has been executed, timely or not: return."""
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
        """Late under the paper's rule: x = (W·m + w·x') / (W + w), or m if x' is not finite.

        And m where x' is a sum, of which some is in m already.
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
            # Nobody has made more steps: what this rank has counts.
            self.snapshot_weight = self.published_weight
        self.gives = self.state != EMPTY
        self.aim_average()

    def contribute(self, publishes):
        """Lend X, or fill the scratch with what a synchronization would take from this rank now.

        The cases are those of `publish`. A sum is none of an average of something else.
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
        # What a rank that has joined had not yet shared is in this average.
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
        """See `ContributionProtocol`; what the application has changed is published then."""
        self.shares = self.conserving and (self.published or (self.is_finishing() and begun))
        if not begun and self.lent:
            # Its version has not been started.
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
        """X is then what the application goes on from, unless more may still come to it."""
        if not self.shares:
            return
        self.vectors.copy(RESULT, X)
        if not ended and self.state == AVERAGED:
            self.state = BASELESS
        self.shares = False
