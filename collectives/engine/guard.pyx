"""A guard that admits one call of a collective at a time."""


cdef class Guard:
    """Refuses a call by a signal handler, or by another thread, while a call is in progress."""

    def __enter__(self):
        self.take()

    cdef int take(self) except -1:
        if self.taken:
            raise RuntimeError(
                "this collective is in a call already: a signal handler or another thread cannot "
                "make one as well"
            )
        self.taken = True
        return 0

    def __exit__(self, *exception):
        self.taken = False
