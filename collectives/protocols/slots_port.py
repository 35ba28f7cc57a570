"""What makes the passes of averages by slots: see `slots`."""


class SlotsPort:
    """Makes the passes over a rank's vectors and slots."""

    def has_vector(self):
        """Return whether what this rank contributes is here; it may come from a device."""
        raise NotImplementedError

    def fill(self, slot):
        """Copy what this rank contributes, with its weight and count, into one of its slots."""
        raise NotImplementedError

    def average(self, slot, members, size):
        """Average what is in this slot of each member, in their order, to this rank's targets."""
        raise NotImplementedError

    def progressed(self):
        """Count a step."""
        raise NotImplementedError
