"""A rank's contributions to averages, and the results it gets.

A rank has up to five vectors, which only the driver accesses: the application's X, while it is in a
call or operation; the SNAPSHOT, which the rank contributes also while its application computes (see
`snapshots`); the RESULT; the SCRATCH, for averages that are not published; and KEPT, for the newest
average over all ranks, if that is asked for. The protocols decide how they change: they call a port
(`Vectors`), and their attributes tell the driver where an exchange stores its mean.

With weights w and snapshots s, an average leaves Σ w s unchanged, whichever ranks it includes:
afterwards all its members have its mean, and each keeps its weight. A publication of the change δ,
by a rank that has weight w' from then on, turns the rank's w s into w' (s + δ). After an average
over all ranks every s is its mean, Σ w s / Σ w.

Source: WAGMA-SGD, Algorithm 2. Weights by work: WP-SGD, Eq. 6.
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
KEPT = 4

# How a rank's vector is weighted: by the weight of its last call; by its work, the sum of the
# weights of its calls since the last average over all ranks; or by r to the power of how far that
# work is behind the most.
GIVEN = 0
WORK = 1
CONTRACTION = 2

# No weight by contraction is larger than exp of this: the sum over all ranks must be finite.
LARGEST_EXPONENT = 230.0


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

    def take_change(self):
        """X = SNAPSHOT = SNAPSHOT + (X − RESULT); return whether all elements are finite.

        If not, X = SNAPSHOT. The RESULT holds anything then: as one pass may write two vectors but
        must leave one as it was, it may become the SNAPSHOT, and this the RESULT.
        """
        finite: cython.bint = self.is_change_finite()
        if finite:
            self.add_change(SNAPSHOT)
        self.copy(X, SNAPSHOT)
        return finite

    def absorb(self, own, total):
        """X = (own · X + total · RESULT) / (own + total)"""
        raise NotImplementedError

    # The rank's own part of some arrays: see `lease`

    def keep_part(self):
        """part = X"""
        raise NotImplementedError

    def take_out_part(self):
        """SNAPSHOT = SNAPSHOT − part"""
        raise NotImplementedError

    def put_back_part(self):
        """SNAPSHOT = SNAPSHOT + part"""
        raise NotImplementedError


class ContributionProtocol:
    """A rank's contributions to averages that are not published, and the means that it gets.

    The rank lends its vector to the exchange, which reads it in place and writes the mean there. A
    vector that is not finite has weight 0.

    Args:
        vectors, operations: its `Vectors`, and the rank's `AllRanksProtocol`.

    Attributes:
        present: whether the application is in a call or operation with a vector.
        given_weight, published_weight: its weight, and that of the vector last published.
        finite, nonfinite: whether the last vector or change was finite; how many were not.
        lent: whether the exchange averages X itself; `source` is then where X goes if an exception
            ends the call.
        source, weight: the vector averaged otherwise; the weight of that, or of X.
        target, copy, saved: where the exchange stores its mean, a second copy of the mean, and the
            target's old contents; NOWHERE: not at all.
        total: the weight of the last mean; 0: no vector had a weight.
        weightless: whether no vector had a weight, so that all finite ones now count equally.
        work: of the calls since the last average over all ranks, where weights are by work.
    """

    def __init__(self, vectors, operations):
        self.vectors = vectors
        self.operations = operations
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
        # For repeating an average in which no vector had a weight: `gives`, whether this rank
        # contributes finite values; `gives_x`, whether these are X itself.
        self.gives = False
        self.gives_x = False
        # Whether an interrupted call has already filled the scratch.
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

    def save(self):
        """Give the application what this rank continues with; all ranks do, at one moment."""

    def leave_out(self):
        """Count a vector or change that is not finite, and is not contributed."""
        self.nonfinite += 1

    def publishes(self):
        """Return whether the application's vector is to be contributed."""
        return self.present and not self.operations.joined

    def is_finishing(self):
        """Return whether the application waits for FINISH, since all ranks have joined."""
        return self.present and self.operations.operation == FINISH

    def is_averaging(self):
        """Return whether the application is in an operation that averages its vector."""
        operation: cython.int = self.operations.operation
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

        If its exchange has `begun`, the driver has copied the rest of X to the source. An average
        that begins later would find no vector of the application's, and this rank would contribute
        nothing; so X is contributed now.
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
        """Stop using X; where it was lent, no vector may have the whole contribution any more."""
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
