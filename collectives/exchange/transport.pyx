"""What carries out averages among ranks: the interface of `messages` and `shared`."""


cdef class Transport:
    """Averages the vectors of some ranks, in one exchange at a time.

    Each has a method that begins an exchange, with the arguments that it needs.
    """

    cdef bint progress(self) noexcept nogil:
        """Progress without blocking; return whether the mean is complete."""

    cdef void adopt(self, char **kept) noexcept nogil:
        """Publish the rest of the application's arrays and stop using them.

        If no other vector holds the part of the mean that they have received, `kept` receives it:
        the arrays of the source, which the caller then makes the target; else `kept` is NULL.
        Arrays from a device must have arrived.
        """

    cdef void divert(self) noexcept nogil:
        """Stop receiving into the application's buffer, as far as that is possible."""

    cdef void leave(self) noexcept nogil:
        """Protect the application's buffer from a pending exchange, as far as that is possible."""

    cdef bint uses(self, char **user) noexcept nogil:
        """Return whether a pending exchange uses the application's buffer or its kept copy."""
