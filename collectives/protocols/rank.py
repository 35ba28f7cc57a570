"""What one rank does next: operations of all ranks, and what interrupts them; see also `versions`.

`AllRanksProtocol` and its subclasses decide what has to happen, a `ContributionProtocol` what the
rank contributes and gets. `RankProtocol` and its subclass put both together, and are all that a
driver speaks to: it reports events by their methods, and takes one step after the other while there
is one. Steps are executed through a port (`RankPort`). A driver decides nothing: the engine over
MPI, the simulation and the tests take the same steps in the same order.

Operations, endings and what interrupts a call go beyond the papers.
"""

import cython

if not cython.compiled:  # else the .pxd declares them
    from collectives.protocols.all_ranks import (
        AGREEING,
        AVERAGE,
        CLOSE,
        LOAD,
        MEET,
        NONE,
        OUTSIDE,
        REDUCING,
        SAVE,
        SYNC,
    )

# A rank's next step: none yet; begin the average over all ranks, once the rank has contributed to
# it; end it, or repeat it; go on from it; replace the vectors by those that are loaded; save the
# snapshot; end an operation without data; complete a call.
WAIT = 0
CONTRIBUTE = 1
END_AVERAGE = 2
ADOPT = 3
REPLACE = 4
END = 5
RETURN = 9
STORE = 11


class StepsProtocol:
    """A rank that takes one step after the other; some of them read or write vectors in a pass.

    Attributes:
        begun: whether an exchange is pending, or complete and its mean not yet taken.
        passing: the step whose pass over vectors has not ended; WAIT: none.
        done: whether the application's call or operation is complete.
    """

    def __init__(self):
        # The `StepPort` that executes passes, as `port`.
        self.executing = None
        self.begun = False
        self.passing = WAIT
        self.done = False

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
        raise NotImplementedError

    def take(self, step):
        """Take a step, which `next_step` has returned."""
        raise NotImplementedError

    def make_pass(self, step):
        """Read or write vectors, by a pass that may take time, and go on from it."""
        moves: cython.bint = self.moves(step)
        self.passing = step
        self.executing.begin_pass(step, moves)
        self.read_or_write(step)
        if self.executing.end_pass(step, moves):
            self.passed()

    def moves(self, step):
        """Return whether a step's pass reads or writes vectors."""
        raise NotImplementedError

    def read_or_write(self, step):
        """Change the vectors, as a step requires."""
        raise NotImplementedError

    def passed(self):
        """Go on from the end of a step's pass."""
        step: cython.int = self.passing
        self.passing = WAIT
        self.go_on(step)

    def go_on(self, step):
        """Do what follows the pass of this step."""
        raise NotImplementedError


class RankProtocol(StepsProtocol):
    """One rank, in operations of all ranks; `VersionsProtocol` adds the versions.

    Args:
        operations, contribution: its `AllRanksProtocol` and its `ContributionProtocol`.

    Attributes:
        gathers: whether the driver is to gather every rank's operation; it resets this.
        disagreed: the operation that has ended in a disagreement, if the application has not yet
            been told; NONE: no such one.
        called: the version of the application's last call or operation.
        weight, in_group: the weight of the mean that this returned, and whether it is a group's.
        data_ops: operations that have moved data; a repeated average counts again.
        timely, synchronizations: counts of calls whose vector was in their version, and of averages
            over all ranks that changed what ranks continue from.
    """

    def __init__(self, operations, contribution):
        StepsProtocol.__init__(self)
        self.port = None
        self.operations = operations
        self.contribution = contribution
        self.gathers = False
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
        self.port = self.executing = port

    # Steps

    def next_step(self):
        if self.passing != WAIT or self.operations.stage != REDUCING:
            return WAIT
        if self.operations.operation == LOAD:
            return REPLACE
        if self.operations.operation == SAVE:
            return STORE
        if self.operations.operation == MEET:
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
        if step == END_AVERAGE:
            self.end_average()
        elif step == END:
            self.end_operation()
        else:
            self.make_pass(step)

    def moves(self, step):
        return step != ADOPT or self.operations.operation != AVERAGE

    def read_or_write(self, step):
        if step == CONTRIBUTE:
            self.contribution.begin_average()
        elif step == REPLACE:
            self.contribution.load()
        elif step == STORE:
            self.contribution.save()
        elif self.operations.operation != AVERAGE:
            if self.contribution.total != 0:
                self.port.remember()
            self.contribution.end_average()

    def go_on(self, step):
        if step == CONTRIBUTE:
            self.begin_average()
        else:
            if step == REPLACE:
                self.operations.load(self.loading)
            self.end_operation()

    # Operations of all ranks

    def enter(self, operation):
        """Enter an operation, for the application."""
        self.done = False
        if operation != CLOSE:  # which keeps the version of a started call, for its result
            self.called = self.operations.version
        self.operations.enter(operation)
        self.gathers = True

    def agreed(self, records, size, loading, differ, failed):
        """Handle the agreement: see `AllRanksProtocol.agreed`.

        Args:
            loading: the number of the version to load, if the operations do not `differ`.
            failed: whether a rank knows of a failure. That made other ranks close, will reach this
                rank too, and says why.
        """
        operation: cython.int = self.operations.operation
        self.loading = loading
        self.operations.agreed(records, size, differ)
        if self.operations.stage == OUTSIDE:
            self.disagreed = operation
            self.done = not failed
        self.gathers = self.operations.stage == AGREEING

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
        if self.operations.operation != AVERAGE:
            self.synchronizations += 1
            if self.operations.operation == SYNC and not self.operations.joined:
                self.timely += self.contribution.finite
        self.make_pass(ADOPT)

    def end_operation(self):
        """End the operation; a rank that has joined enters the next one."""
        averages: cython.bint = self.operations.operation == AVERAGE
        self.weight = 0 if self.contribution.weightless else self.contribution.total
        self.in_group = False
        self.operations.reduced()
        self.contribution.end_operation(averages)
        self.count_data()
        if self.operations.stage == AGREEING:
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
        self.port.number_from(
            self.operations.version + self.data_ops, self.operations.base - self.data_ops
        )

    # What drivers ask

    def is_busy(self):
        """Return whether work is in flight."""
        return self.begun or self.operations.stage == AGREEING

    def has_caught_up(self):
        """Return whether what an exception has interrupted is complete."""
        return self.operations.stage == OUTSIDE

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
