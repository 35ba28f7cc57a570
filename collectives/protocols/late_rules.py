"""The late rules: what ranks contribute and get, whether or not they called before their version.

Each rule decides what a publication does to a rank's snapshot, where the mean of a version is
stored, what the snapshot becomes, and what a call returns. `SnapshotProtocol` has what all share.

Source: WAGMA-SGD, Algorithm 2 (paper); the conserving rule is our own. Sums: eager-SGD.
"""

import cython

from collectives.protocols.snapshots import LateRule

if not cython.compiled:  # else the .pxd declares them
    from collectives.protocols.contribution import NOWHERE, RESULT, SNAPSHOT, X
    from collectives.protocols.snapshots import REPLACED, RETURNED, UNFILLED


class PaperRule(LateRule):
    """A publication replaces the snapshot; a late call merges the newest mean with its vector.

    The mean of a version is in the result: of a timely call, in its vector X.
    """

    def replaces(self, snapshot):
        return True

    def publish(self, snapshot):
        snapshot.replace()

    def lacks_contribution(self, snapshot, publishes):
        return publishes

    def stored_in(self):
        return RESULT

    def begin_version(self, snapshot, bypasses):
        snapshot.keeps = not bypasses

    def end_version(self, snapshot):
        snapshot.count_once()

    def has_mean(self, snapshot):
        return snapshot.versions.timely

    def end_call(self, snapshot):
        """End a call; a late one gets x = (W·m + w·x') / (W + w), or m if x' is not finite."""
        if snapshot.versions.timely or snapshot.total == 0:
            return
        if self.merges() and snapshot.finite and snapshot.given_weight > 0:
            snapshot.vectors.absorb(snapshot.given_weight, snapshot.total)
        else:
            snapshot.vectors.copy(X, RESULT)

    def merges(self):
        """Return whether a late call's vector is merged with the mean."""
        return True

    def join(self, snapshot):
        snapshot.snapshot_weight = 0

    def synchronized(self, snapshot):
        """An average over all ranks has replaced the snapshot, which is all that there is to do."""

    def publishes_changes(self):
        return False


class SumsRule(PaperRule):
    """Ranks contribute sums, which grow from 0 after each average over all; late calls get means.

    Part of a late sum is in the mean already, so the two are not merged.
    """

    def lacks_contribution(self, snapshot, publishes):
        """A sum does not enter an average of other vectors."""
        return True

    def merges(self):
        return False

    def join(self, snapshot):
        """What was not yet shared enters the next average over all ranks first."""

    def synchronized(self, snapshot):
        snapshot.vectors.zero(SNAPSHOT)


class ConservingRule(LateRule):
    """A publication adds the application's change to the snapshot, which the call returns.

    The mean of a version replaces the snapshot. The result keeps the *base*: the vector that the
    application continued from, once the snapshot no longer holds it. The states change as follows
    by a publication::

        state      holds                                        the application publishes
        UNFILLED   nothing; its weight is 0                     X, then RETURNED
        RETURNED   what the application continues from          X, then RETURNED
        REPLACED   a mean since; the base is in the result      SNAPSHOT + (X − base), REPLACED
        BASELESS   a mean; the vector that the application      nothing, since its change is not
                   continued from is not known                  known, BASELESS

    A mean that replaces the snapshot leads from RETURNED to REPLACED and from UNFILLED to BASELESS;
    one that the application gets, to RETURNED. So no update is lost or counted twice.
    """

    def replaces(self, snapshot):
        return snapshot.state == UNFILLED

    def publish(self, snapshot):
        """Publish the change; while the snapshot is the vector returned, that gives X exactly."""
        if snapshot.state == UNFILLED:
            snapshot.replace()
            return
        if snapshot.state == RETURNED:
            snapshot.finite = snapshot.vectors.all_finite(X)
            if snapshot.finite:
                snapshot.vectors.copy(SNAPSHOT, X)
        elif snapshot.state == REPLACED and snapshot.is_late():
            snapshot.finite = snapshot.vectors.take_change()
        else:
            known: cython.bint = snapshot.state == REPLACED
            snapshot.finite = known and snapshot.vectors.is_change_finite()
            if snapshot.finite:
                snapshot.vectors.add_change(SNAPSHOT)
        if snapshot.finite:
            snapshot.published_weight = snapshot.given_weight
            snapshot.snapshot_weight = snapshot.given_weight
        else:
            snapshot.leave_out()

    def lacks_contribution(self, snapshot, publishes):
        return publishes and snapshot.state == UNFILLED

    def stored_in(self):
        return SNAPSHOT

    def begin_version(self, snapshot, bypasses):
        snapshot.keeps = False
        snapshot.copy = SNAPSHOT if snapshot.direct and not bypasses else NOWHERE
        if snapshot.state == RETURNED and not snapshot.direct:
            snapshot.saved = RESULT

    def end_version(self, snapshot):
        if snapshot.total != 0:
            snapshot.mean_replaces()
        else:
            snapshot.count_once()

    def has_mean(self, snapshot):
        return snapshot.versions.timely and snapshot.total != 0

    def end_call(self, snapshot):
        if snapshot.state == UNFILLED:
            return
        has_taken: cython.bint = snapshot.state == REPLACED and snapshot.is_late()
        if not (has_taken or snapshot.has_mean()):
            snapshot.vectors.copy(X, SNAPSHOT)
        snapshot.state = RETURNED

    def join(self, snapshot):
        """Changes that were not yet shared enter the next average over all ranks first."""

    def synchronized(self, snapshot):
        """The snapshot has become the mean already."""

    def publishes_changes(self):
        return True


def late_rule(name):
    """Return the late rule of this name: every one is in this list."""
    rules = {"paper": PaperRule, "conserving": ConservingRule, "sums": SumsRule}
    return rules[name]()
