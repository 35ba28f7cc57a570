# cython: boundscheck=False, wraparound=False
"""What one rank does next: versions, calls, operations of all ranks, and what interrupts them.

`AllRanksProtocol` and its subclasses decide what has to happen, a `ContributionProtocol` what the
rank contributes and gets. The classes here put both together, and are all that a driver speaks to:
it reports events by their methods, and takes one step after the other while there is one. Steps are
executed through a port (`RankPort`). A driver decides nothing: the engine over MPI, the simulation
and the tests take the same steps in the same order.

Source: WAGMA-SGD, section III-A and Algorithm 2; operations, endings and what interrupts a call go
beyond the paper.
"""

import cython

if not cython.compiled:  # else the .pxd declares them
    from collectives.protocols.all_ranks import (
        AGREEING,
        AVERAGE,
        CLOSE,
        JOIN,
        LOAD,
        MEET,
        NONE,
        OUTSIDE,
        REDUCING,
        SYNC,
    )
    from collectives.protocols.wait_avoiding import HELD, IDLE, RUNNING, SHARED

# A rank's next step: none yet; begin the average over all ranks, once the rank has contributed to
# it; end it, or repeat it; go on from it; replace the vectors by those that are loaded; end an
# operation without data.
WAIT = 0
CONTRIBUTE = 1
END_AVERAGE = 2
ADOPT = 3
REPLACE = 4
END = 5
# And, of ranks with versions: begin and end a version's exchange; publish the vector of a timely
# call; complete a call; publish between two calls.
BEGIN_VERSION = 6
END_VERSION = 7
PUBLISH = 8
RETURN = 9
SHARE = 10


class RankPort:
    """Executes a rank's steps: over MPI, in simulated time, or in a test.

    An exchange averages what the rank's `ContributionProtocol` names, and stores the mean where
    that says.
    """

    # Passes over vectors

    def begin_pass(self, step, moves):
        """Prepare for a step's pass over the rank's vectors; if it `moves` none, it takes no time.

        Until it ends the rank takes no other step, and events that are not of messages wait.
        """
        raise NotImplementedError

    def end_pass(self, step, moves):
        """Return whether the pass has ended; else the driver calls `passed` once it has."""
        raise NotImplementedError

    def is_here(self):
        """Return whether the application's whole vector can be read; it may come from a device."""
        raise NotImplementedError

    def knows_change(self):
        """Return whether it is known if the vector's change is finite, without waiting."""
        raise NotImplementedError

    def remember(self):
        """Note that all ranks hold the mean from now on: compressed vectors are relative to it."""
        raise NotImplementedError

    # Exchanges

    def begin_average(self, number):
        """Begin the average over all ranks, which has this number among exchanges."""
        raise NotImplementedError

    def is_exchanged(self):
        """Return whether the exchange is complete, so that its mean is stored."""
        raise NotImplementedError

    def total_weight(self):
        """Return the weight of the mean of the last exchange."""
        raise NotImplementedError

    def number_from(self, first, shift):
        """Number exchanges from here on: `first` is the next version's, `shift` leads to users'."""
        raise NotImplementedError

    def adopt(self):
        """Copy what the exchange has not yet read of the application's vector, to stop using it."""
        raise NotImplementedError

    def redirect(self):
        """Store the exchange's mean where the contribution says now, not in the application's."""
        raise NotImplementedError

    # The application

    def returns(self, in_group):
        """Give the application its vector back; its call was a version of a group, or of all."""
        raise NotImplementedError

    # Versions

    def begin_version(self, version, number):
        """Begin the exchange of a version in its group, which has this number among exchanges."""
        raise NotImplementedError

    def executed(self, version):
        """Note that a version has been executed for this rank."""
        raise NotImplementedError

    def find_group(self, version):
        """Look up the group of a version, which others have executed or begun for this rank."""
        raise NotImplementedError

    # Vectors that other ranks may use, to execute versions for this one: see `claims`

    def is_quiet(self):
        """Return whether this rank's own passes over its vectors are complete."""
        raise NotImplementedError

    def open(self, number):
        """Open the vectors to other ranks, from the exchange of this number on."""
        raise NotImplementedError

    def close(self):
        """Close them; return the number of the exchange that others had reached for this rank."""
        raise NotImplementedError

    def has_begun(self):
        """Return whether another rank had begun that exchange; it is complete only later."""
        raise NotImplementedError

    def reached(self):
        """Return the number of the exchange that others have reached for this rank."""
        raise NotImplementedError

    def closed_weight(self):
        """Return the weight of the last mean that others have stored for this rank."""
        raise NotImplementedError

    def replaced(self):
        """Return whether a mean has replaced the snapshot since the vectors were opened."""
        raise NotImplementedError

    def resume(self):
        """Take over an exchange that another rank has begun for this one."""
        raise NotImplementedError

    def needs_messages(self, number):
        """Return whether some members of this exchange's group do not share memory."""
        raise NotImplementedError

    def leaves_to_others(self):
        """Return whether this rank executes no versions now, as it would delay the others."""
        raise NotImplementedError

    def help(self, number):
        """Execute a part of a started exchange; return whether there was one."""
        raise NotImplementedError


class RankProtocol:
    """One rank, in operations of all ranks; `VersionsProtocol` adds the versions.

    Args:
        ranks, contribution: its `AllRanksProtocol` and its `ContributionProtocol`.

    Attributes:
        begun: whether an exchange is pending, or complete and its mean not yet taken.
        passing: the step whose pass over vectors has not ended; WAIT: none.
        gathers: whether the driver is to gather every rank's operation; it resets this.
        done: whether the application's call or operation is complete.
        disagreed: the operation that has ended in a disagreement, if the application has not yet
            been told; NONE: no such one.
        called: the version of the application's last call or operation.
        weight, in_group: the weight of the mean that this returned, and whether it is a group's.
        data_ops: operations that have moved data; a repeated average counts again.
        timely, synchronizations: counts of calls whose vector was in their version, and of averages
            over all ranks that changed what ranks continue from.
    """

    def __init__(self, ranks, contribution):
        self.port = None
        self.ranks = ranks
        self.contribution = contribution
        self.begun = False
        self.passing = WAIT
        self.gathers = False
        self.done = False
        self.disagreed = NONE
        self.called = 0
        self.weight = 0
        self.in_group = False
        self.data_ops = 0
        self.timely = 0
        self.synchronizations = 0
        # The number of the version that all ranks load.
        self.loading = 0

    def attach(self, port):
        """Execute steps by this `RankPort`."""
        self.port = port

    # Steps

    def advance(self):
        """Take all steps that can be taken now; return how many."""
        steps: cython.int = 0
        step: cython.int = self.next_step()
        while step != WAIT:
            self.take(step)
            steps += 1
            step = self.next_step()
        return steps

    def next_step(self):
        """Return the next step that can be taken now, or WAIT; an exchange makes progress."""
        if self.passing != WAIT or self.ranks.stage != REDUCING:
            return WAIT
        if self.ranks.operation == LOAD:
            return REPLACE
        if self.ranks.operation == MEET:
            return END
        if self.begun:
            return END_AVERAGE if self.port.is_exchanged() else WAIT
        return CONTRIBUTE if self.may_contribute() else WAIT

    def may_contribute(self):
        """Return whether the contribution can use the application's vector now."""
        if not self.contribution.takes_pass():
            return True
        return self.port.is_here() and (
            not self.contribution.adds_change() or self.port.knows_change()
        )

    def take(self, step):
        """Take a step, which `next_step` has returned."""
        if step == END_AVERAGE:
            self.end_average()
        elif step == END:
            self.end_operation()
        else:
            self.make_pass(step)

    def make_pass(self, step):
        """Read or write vectors, by a pass that may take time, and go on from it."""
        moves: cython.bint = self.moves(step)
        self.passing = step
        self.port.begin_pass(step, moves)
        self.read_or_write(step)
        if self.port.end_pass(step, moves):
            self.passed()

    def moves(self, step):
        """Return whether a step's pass reads or writes vectors."""
        return step != ADOPT or self.ranks.operation != AVERAGE

    def read_or_write(self, step):
        """Have the contribution change the vectors, as a step requires."""
        if step == CONTRIBUTE:
            self.contribution.begin_average()
        elif step == REPLACE:
            self.contribution.load()
        elif self.ranks.operation != AVERAGE:
            if self.contribution.total != 0:
                self.port.remember()
            self.contribution.end_average()

    def passed(self):
        """Go on from the end of a step's pass."""
        step: cython.int = self.passing
        self.passing = WAIT
        self.go_on(step)

    def go_on(self, step):
        """Do what follows the pass of this step."""
        if step == CONTRIBUTE:
            self.begin_average()
        else:
            if step == REPLACE:
                self.ranks.load(self.loading)
            self.end_operation()

    # Operations of all ranks

    def enter(self, operation):
        """Enter an operation, for the application."""
        self.done = False
        if operation != CLOSE:  # which keeps the version of a started call, for its result
            self.called = self.ranks.version
        self.ranks.enter(operation)
        self.gathers = True

    def agreed(self, records, size, loading, differ, failed):
        """Handle the agreement: see `AllRanksProtocol.agreed`.

        Args:
            loading: the number of the version to load, if the operations do not `differ`.
            failed: whether a rank knows of a failure. That made other ranks close, will reach this
                rank too, and says why.
        """
        operation: cython.int = self.ranks.operation
        self.loading = loading
        self.ranks.agreed(records, size, differ)
        if self.ranks.stage == OUTSIDE:
            self.disagreed = operation
            self.done = not failed
        self.gathers = self.ranks.stage == AGREEING

    def begin_average(self):
        self.begun = True
        self.port.begin_average(self.number_of_average())

    def number_of_average(self):
        """Return the number of the operation's average among exchanges."""
        return self.data_ops + 1

    def end_average(self):
        """End the average over all ranks; repeat it if no vector had a weight."""
        self.begun = False
        self.contribution.end_exchange(self.port.total_weight())
        if self.contribution.total == 0 and not self.contribution.weightless:
            self.count_data()
            self.contribution.begin_again()
            self.begin_average()
            return
        if self.ranks.operation != AVERAGE:
            self.synchronizations += 1
            if self.ranks.operation == SYNC and not self.ranks.joined:
                self.timely += self.contribution.finite
        self.make_pass(ADOPT)

    def end_operation(self):
        """End the operation; a rank that has joined enters the next one."""
        averages: cython.bint = self.ranks.operation == AVERAGE
        self.weight = 0 if self.contribution.weightless else self.contribution.total
        self.in_group = False
        self.ranks.reduced()
        self.contribution.end_operation(averages)
        self.count_data()
        if self.ranks.stage == AGREEING:
            self.gathers = True
        else:
            self.done = True
            self.port.returns(False)

    def count_data(self):
        """Count an operation that has moved data."""
        self.data_ops += 1
        self.renumber()

    def renumber(self):
        """Number exchanges onwards from the last operation."""
        self.port.number_from(self.ranks.version + self.data_ops, self.ranks.base - self.data_ops)

    # What drivers ask

    def is_busy(self):
        """Return whether work is in flight."""
        return self.begun or self.ranks.stage == AGREEING

    def has_caught_up(self):
        """Return whether what an exception has interrupted is complete."""
        return self.ranks.stage == OUTSIDE

    # What an exception interrupts

    def interrupt(self):
        """End the application's call or operation because of an exception, between two steps."""
        if self.begun:
            self.port.adopt()
        self.contribution.interrupt(self.begun)
        if self.begun:
            self.port.redirect()

    def interrupted(self, ended):
        """Note that no message uses the application's vector any longer, if they have `ended`."""
        self.contribution.interrupted(ended)


class VersionsProtocol(RankProtocol):
    """One rank of a wait-avoiding collective: its versions, and its application's calls of them.

    Where other ranks may execute versions for this one, its vectors are opened to them as soon as
    it needs them for nothing itself, and closed before the application does anything.

    Args:
        versions, publishing: its `WaitAvoidingProtocol` and its `SnapshotProtocol`.

    Attributes:
        holding, joining: whether the application publishes between two calls, and then joins.
        source: the newest version that the last call's result is of.
        opened: whether the vectors are open to other ranks; since which version, in `opened_for`.
    """

    def __init__(self, versions, publishing):
        RankProtocol.__init__(self, versions, publishing)
        self.versions = versions
        self.publishing = publishing
        self.holding = False
        self.joining = False
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
            self.publishing.publish_between_calls()
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
        self.publishing.begin_version()
        self.port.begin_version(self.versions.running, self.versions.running + self.data_ops)

    def number_of_average(self):
        return self.versions.version + self.data_ops

    def end_version(self):
        self.begun = False
        self.publishing.end_version(self.port.total_weight())
        self.port.executed(self.versions.running)
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
        self.weight = self.publishing.total
        self.source = self.versions.source
        self.in_group = True
        self.timely += self.versions.timely and self.publishing.finite
        self.versions.returns()
        self.done = True
        self.port.returns(True)

    def publish(self):
        """Publish the application's vector between two calls, as soon as no version runs."""
        self.hold(False)

    def join(self):
        """Publish it, and then take part in others' operations until all ranks have joined."""
        self.hold(True)

    def hold(self, joins):
        self.done = False
        self.reclaim()
        self.holding = True
        self.joining = joins
        self.versions.hold()

    def end_sharing(self):
        """Release the vectors that the application has published between two calls."""
        joins: cython.bint = self.joining
        self.let_go()
        if joins:
            self.publishing.join()
        self.versions.release()
        if joins:
            self.enter(JOIN)
        else:
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
        """Note that the application does not publish between two calls any longer."""
        self.holding = False
        self.joining = False

    def interrupted(self, ended):
        RankProtocol.interrupted(self, ended)
        self.open()

    # Vectors that other ranks may use

    def open(self):
        """Open the vectors to other ranks, to execute versions for this one, if they are SHARED.

        Only once this rank's own passes over the vectors are complete.
        """
        if self.is_open() or not self.port.is_quiet():
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
        self.versions.reclaim(running)
        if running:
            self.begun = True
            self.port.find_group(self.versions.running)
            self.port.resume()

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
        return version <= self.versions.told and self.versions.told_ops <= self.versions.ops

    # What drivers ask

    def next_version(self):
        """Return the next version to be executed for this rank."""
        if self.opened:
            return self.port.reached() - self.data_ops
        return self.versions.next

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
