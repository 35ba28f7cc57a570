"""What executes the steps of a rank: see `rank`."""


class StepPort:
    """Executes a rank's steps: over MPI, in simulated time, or in a test."""

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

    # Exchanges

    def begin_average(self, number):
        """Begin the average over all ranks, or in a group, of this number among exchanges."""
        raise NotImplementedError

    def is_exchanged(self):
        """Return whether the exchange is complete, so that its mean is stored."""
        raise NotImplementedError

    def total_weight(self):
        """Return the weight of the mean of the last exchange."""
        raise NotImplementedError

    def executed(self, number):
        """Note that the version or group of this number has been executed for this rank."""
        raise NotImplementedError

    # The application

    def returns(self, in_group):
        """Give the application its vector back; its call was a version of a group, or of all."""
        raise NotImplementedError

    # What an exception interrupts

    def adopt(self):
        """Copy what the exchange has not yet read of the application's vector, to stop using it."""
        raise NotImplementedError

    def redirect(self):
        """Store the exchange's mean where that is now to go, not in the application's."""
        raise NotImplementedError


class RankPort(StepPort):
    """Executes the steps of operations of all ranks, and of versions.

    An exchange averages what the rank's `ContributionProtocol` names, and stores the mean where
    that says.
    """

    # Passes over vectors

    def knows_change(self):
        """Return whether it is known if the vector's change is finite, without waiting."""
        raise NotImplementedError

    def remember(self):
        """Note that all ranks hold the mean from now on: compressed vectors are relative to it."""
        raise NotImplementedError

    # Exchanges

    def mean_count(self):
        """Return the mean of the members' counts in the last exchange: see `job_count`."""
        raise NotImplementedError

    def number_from(self, first, shift):
        """Number exchanges from here on: `first` is the next version's, `shift` leads to users'."""
        raise NotImplementedError

    # Versions

    def begin_version(self, version, number):
        """Begin the exchange of a version in its group, which has this number among exchanges."""
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

    def closed_count(self):
        """Return the mean of the counts in the last exchange that they executed for this rank."""
        raise NotImplementedError

    def closed_average(self):
        """Return the number of their last average over all ranks; −1: there was none."""
        raise NotImplementedError

    def closed_average_count(self):
        """Return the mean of all ranks' counts in that average."""
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
