"""The application's arrays on a device, which arrive and return block by block."""


cdef class Arrival:
    """How much of the application's arrays averages may use, and how much may return."""

    cdef bint has(self, char **arrays, Py_ssize_t end) noexcept nogil:
        """Return whether these arrays have arrived up to this byte of a vector."""
        return arrays == NULL or arrays != self.arrays or self.handover.has(end)

    cdef void give_back(self, char **arrays, Py_ssize_t end) noexcept nogil:
        """Return these arrays to the device up to this byte of a vector: they hold the mean."""
        if arrays != NULL and arrays == self.arrays and not self.more:
            self.handover.return_until(end)
