"""What one rank does next in a wait-avoiding collective: versions, and calls of the application.

Source: WAGMA-SGD, section III-A and Algorithm 2; what interrupts a call goes beyond the paper.
"""

import cython

from collectives.protocols.rank import RankProtocol

if not cython.compiled:  # else the .pxd declares them
    from collectives.protocols.all_ranks import AVERAGE, JOIN
    from collectives.protocols.rank import RETURN, WAIT
    from collectives.protocols.wait_avoiding import HELD, IDLE, RUNNING, SHARED

# A rank's next step, besides those of `rank`: begin and end a version's exchange; publish the
# vector of a timely call; publish between two calls.
BEGIN_VERSION = 6
END_VERSION = 7
PUBLISH = 8
SHARE = 10

# What the application does between two calls: publish its vector, and then join; get the average
# over all ranks that is kept; name the vector that it continues from; or tell its part of some
# arrays, which counts only while it publishes.
PUBLISHING = 0
JOINING = 1
FETCHING = 2
REBASING = 3
LEASING = 4


class VersionsProtocol(RankProtocol):
    """One rank of a wait-avoiding collective: its versions, and its application's calls of them.

    Where other ranks may execute versions for this one, its vectors are opened to them as soon as
    it needs them for nothing itself, and closed before the application does anything.

    Args:
        versions, publishing: its `WaitAvoidingProtocol` and its `SnapshotProtocol`.

    Attributes:
        holding, purpose: whether the application uses the vectors between two calls, and what for.
        source: the newest version that the last call's result is of.
        opened: whether the vectors are open to other ranks; since which version, in `opened_for`.
    """

    def __init__(self, versions, publishing):
        RankProtocol.__init__(self, versions, publishing)
        self.versions = versions
        self.publishing = publishing
        self.holding = False
        self.purpose = PUBLISHING
        self.source = -1
        self.opened = False
        self.opened_for = 0

    def begin(self, shares):
        """Begin, once all ranks listen: others may execute versions here if this rank `shares`."""
        self.versions.share(shares)
        self.renumber()
        self.versions.run()
        self.open()

    # Steps

    def advance(self):
        steps: cython.int = 0
        if self.opened:
            # Read where others are only if there is something to expire.
            if self.publishing.lease.held and self.is_due_to_expire(self.next_version()):
                self.take_back()
            else:
                steps += self.serve_opened()
        steps += RankProtocol.advance(self)
        self.open()
        return steps

    def next_step(self):
        if self.versions.vectors == RUNNING:
            if not self.begun:
                return BEGIN_VERSION
            return END_VERSION if self.port.is_exchanged() else WAIT
        if self.passing != WAIT:
            return WAIT
        if not (self.publishing.calling or self.holding):
            return RankProtocol.next_step(self)
        if self.versions.vectors != HELD:
            return WAIT
        if self.holding:
            return SHARE
        if self.versions.timely and not self.publishing.published:
            return PUBLISH if self.may_contribute() else WAIT
        if self.port.is_here() and (self.versions.timely or self.may_contribute()):
            return RETURN
        return WAIT

    def take(self, step):
        if step == BEGIN_VERSION:
            self.begin_version()
        elif step == END_VERSION:
            self.end_version()
        else:
            RankProtocol.take(self, step)

    def moves(self, step):
        if step == RETURN:
            return not self.publishing.has_mean()
        return RankProtocol.moves(self, step)

    def read_or_write(self, step):
        if step == PUBLISH:
            self.publishing.lend()
        elif step == RETURN:
            self.publishing.end_call()
        elif step == SHARE:
            self.use_between_calls()
        else:
            RankProtocol.read_or_write(self, step)

    def go_on(self, step):
        if step == PUBLISH:
            self.versions.published()
        elif step == RETURN:
            self.end_call()
        elif step == SHARE:
            self.end_sharing()
        else:
            RankProtocol.go_on(self, step)

    # Versions

    def begin_version(self):
        self.begun = True
        self.expire_if_due(self.versions.running)
        self.publishing.begin_version()
        self.port.begin_version(self.versions.running, self.versions.running + self.data_ops)

    def end_average(self):
        mean: cython.double = self.port.mean_count()
        self.publishing.job.learn(mean)
        if self.operations.operation != AVERAGE:
            self.publishing.job.average(mean)
        RankProtocol.end_average(self)

    def end_operation(self):
        self.publishing.job.tell()
        RankProtocol.end_operation(self)

    def number_of_average(self):
        return self.versions.version + self.data_ops

    def end_version(self):
        self.begun = False
        version: cython.longlong = self.versions.running
        mean: cython.double = self.port.mean_count()
        self.publishing.end_version(self.port.total_weight())
        self.publishing.job.average(mean)
        if self.versions.is_of_all(version):
            self.publishing.job.learn(mean)
            self.publishing.keep_average(version)
        self.port.executed(version)
        self.versions.finished()

    # The application

    def call(self):
        """Begin the application's call of a version."""
        self.done = False
        self.reclaim()
        self.called = self.versions.version
        self.publishing.begin_call()
        self.versions.call()

    def end_call(self):
        """Complete the application's call, timely or not; its version has been executed."""
        self.publishing.job.tell()
        self.weight = self.publishing.total
        self.source = self.versions.source
        self.in_group = True
        self.timely += self.versions.timely and self.publishing.finite
        self.called = self.versions.returned()
        self.versions.returns()
        self.done = True
        self.port.returns(True)

    def hold(self, purpose):
        """Use the vectors between two calls, as soon as no version runs.

        To join is to publish, and then to take part in others' operations until all have joined.
        """
        self.done = False
        self.reclaim()
        self.holding = True
        self.purpose = purpose
        self.versions.hold()

    def use_between_calls(self):
        if self.purpose == FETCHING:
            self.publishing.fetch_kept()
        elif self.purpose == REBASING:
            self.publishing.rebase()
        elif self.purpose == LEASING:
            self.publishing.lease.renew()
        else:
            self.publishing.publish_between_calls()

    def end_sharing(self):
        """Release the vectors that the application has used between two calls."""
        joins: cython.bint = self.is_joining()
        self.let_go()
        if joins:
            self.publishing.join()
        self.versions.release()
        if joins:
            self.enter(JOIN)
        else:
            self.publishing.job.tell()
            self.done = True
            self.port.returns(False)

    def enter(self, operation):
        self.reclaim()
        RankProtocol.enter(self, operation)

    def interrupt(self):
        calling: cython.bint = self.publishing.calling
        RankProtocol.interrupt(self)
        if calling:
            self.versions.abandon()
        elif self.holding:
            self.versions.let_go()
        self.let_go()

    def let_go(self):
        """Note that the application does not use the vectors between two calls any longer."""
        self.holding = False
        self.purpose = PUBLISHING

    def interrupted(self, ended):
        RankProtocol.interrupted(self, ended)
        self.open()

    # Vectors that other ranks may use

    def open(self):
        """Open the vectors to other ranks, to execute versions for this one, if they are SHARED.

        Only once this rank's own passes over the vectors are complete.
        """
        if self.is_open():
            return
        self.expire_if_due(self.versions.next)
        if not self.port.is_quiet():
            return
        self.opened = True
        self.opened_for = self.versions.next
        self.publishing.begin_version()
        self.port.open(self.versions.next + self.data_ops)

    def reclaim(self):
        """Close the vectors to other ranks, and learn what these have executed."""
        running: cython.bint = False
        if self.versions.vectors != SHARED:
            return
        if self.opened:
            self.opened = False
            self.note_executed(self.port.close() - self.data_ops)
            running = self.port.has_begun()
            if self.versions.next > self.opened_for:
                self.port.find_group(self.versions.next - 1)
                total: cython.double = self.port.closed_weight()
                self.publishing.executed(total, self.port.replaced())
                self.learn_counts()
        self.versions.reclaim(running)
        if running:
            self.begun = True
            self.port.find_group(self.versions.running)
            self.port.resume()

    def take_back(self):
        """Close the vectors for a moment, to change them before they are opened again."""
        self.reclaim()
        if self.versions.vectors == IDLE:
            self.versions.run()

    def is_due_to_expire(self, version):
        """Return whether what counts only while the application publishes is to be taken out."""
        return self.publishing.lease.expires(version - self.publishing.published_version)

    def expire_if_due(self, version):
        """Take it out of the snapshot before this version, if that is due."""
        if self.is_due_to_expire(version):
            self.publishing.expire()

    def learn_counts(self):
        """Learn the counts of the exchanges that others have executed for this rank."""
        self.publishing.job.average(self.port.closed_count())
        if self.port.closed_average() >= 0:
            self.publishing.job.learn(self.port.closed_average_count())

    def note_executed(self, end):
        """Note that other ranks have executed every version before `end` for this one."""
        version: cython.longlong
        for version in range(self.versions.next, end):
            self.port.executed(version)
        self.versions.executed(end)

    def serve_opened(self):
        """Help to execute a started version; take it over if it needs messages.

        Return whether a part of one was executed.
        """
        # Read once: others may advance to a version that no rank has started.
        number: cython.longlong = self.port.reached()
        if not self.is_started(number - self.data_ops):
            return False
        if self.port.needs_messages(number):
            self.reclaim()
            if self.versions.vectors == IDLE:
                self.versions.execute()
            return False
        return not self.port.leaves_to_others() and self.port.help(number)

    def is_started(self, version):
        """Return whether this version has been started and may be executed now."""
        return version <= self.versions.started and self.versions.started_ops <= self.versions.ops

    # What drivers ask

    def next_version(self):
        """Return the next version to be executed for this rank."""
        if self.opened:
            return self.port.reached() - self.data_ops
        return self.versions.next

    def is_joining(self):
        """Return whether the application publishes what it has, and then joins."""
        return self.holding and self.purpose == JOINING

    def is_open(self):
        """Return whether other ranks can execute versions for this one, or need not."""
        return self.opened or self.versions.vectors != SHARED

    def is_behind(self):
        """Return whether a started version is still to be executed with the open vectors."""
        return (
            self.opened
            and not self.port.leaves_to_others()
            and self.is_started(self.next_version())
        )

    def is_busy(self):
        return (
            RankProtocol.is_busy(self)
            or self.versions.due != 0
            or self.publishing.calling
            or self.holding
            or self.is_behind()
        )

    def has_caught_up(self):
        return RankProtocol.has_caught_up(self) and self.next_version() >= self.versions.version
