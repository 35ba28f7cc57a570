"""What makes the passes of averages in shared memory: see `shared_exchange`."""


class SharedExchangePort:
    """Makes the passes over the vectors of a rank, and of those with which it shares memory."""

    def find_group(self, rank, number, members):
        """Fill in the members of a rank's exchange; return how many, 0 if some share no memory."""
        raise NotImplementedError

    def blocks(self, size):
        """Return the number of blocks of an exchange of so many members."""
        raise NotImplementedError

    def set_path(self, ringed, takes, shows, gets):
        """Note in this rank's part where its blocks are, and where it takes the mean.

        Args:
            ringed: whether the ring has its blocks.
            takes: whether a vector of its own takes the mean; one that is in place does so anyway.
            shows, gets: whether the application's arrays have its blocks, and take the mean.
        """
        raise NotImplementedError

    def begun(self):
        """Return a ticket for all passes that this rank has begun."""
        raise NotImplementedError

    def over(self, ticket):
        """Return whether the passes that a ticket is for are complete."""
        raise NotImplementedError

    def has_block(self, block):
        """Return whether the application's block is here; it may come from a device."""
        raise NotImplementedError

    def contribute_block(self, block):
        """Copy a block of the application's arrays to this rank's source; return the ticket."""
        raise NotImplementedError

    def return_block(self, block, in_place):
        """Give the application a block of the mean, in its arrays.

        It is copied from this rank's target unless it has been averaged in place.
        """
        raise NotImplementedError

    def keep_arrays(self):
        """Use a copy in place of the application's arrays, from now on, if there is one."""
        raise NotImplementedError

    def withdraw(self, averaged):
        """Use this rank's own vectors in place of the application's arrays from now on.

        Args:
            averaged: how many blocks have their mean in the application's arrays.
        """
        raise NotImplementedError

    def weigh(self, members, size):
        """Return the total weight of the members, of whose exchange this rank averages a block."""
        raise NotImplementedError

    def average(self, number, together, block, members, size, in_place):
        """Average a block of the members weighed last to their targets; return the ticket.

        This rank's source and target are the application's arrays if that is `in_place`.

        An exchange may average some arrays only, unless its members enter it `together`: of the
        others, and of the blocks that have nothing else, each member keeps its own.
        """
        raise NotImplementedError

    def total_weight(self):
        """Return the weight of this rank's last mean."""
        raise NotImplementedError

    def end_part(self, rank, total):
        """Note in a rank's part the weight of its mean; return whether that is in place."""
        raise NotImplementedError

    def average_counts(self, number, members, size):
        """Note in the members' parts the mean of their counts, also as that of all if it is."""
        raise NotImplementedError

    def replace(self, rank):
        """Note in a rank's part that a mean has replaced the snapshot, with the weight after it."""
        raise NotImplementedError

    def progressed(self):
        """Count a step."""
        raise NotImplementedError
