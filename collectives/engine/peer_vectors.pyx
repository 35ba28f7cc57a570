"""A rank's model and change, and the steps that are executed on them.

The steps are executed in order on each block, one after the other while it is in cache, as far as
possible: a step may wait for a block that has not arrived, or that is still being sent.
"""

from libc.stdlib cimport free
from libc.string cimport memset
from mpi4py.libmpi cimport MPI_ERR_NO_MEM

from collectives.engine.transfers cimport Transfer, Transfers
from collectives.memory.allocation cimport allocate, try_to_allocate, zeroed
from collectives.memory.layout cimport UserVector

cdef enum:
    # How many blocks SEND may be ahead of the next step, and a change in turns of its reader.
    AHEAD = 4


cdef class PeerVectors:
    """Model and change of one rank; initially without a change.

    Args:
        like: list of arrays, the model at the start.
        messages: sends and receives vectors.
    """

    def __init__(self, like, Transfers messages):
        cdef UserVector opened
        cdef int count
        self.messages = messages
        self.blocks = messages.blocks
        self.layout = messages.blocks.layout
        count = self.layout.count
        self.model_arrays = <char **>zeroed(5 * count, sizeof(char *))
        if self.model_arrays == NULL:
            raise MemoryError
        self.change_arrays = self.model_arrays + count
        self.arrays = self.change_arrays + count
        self.kept_arrays = self.arrays + count
        self.earlier_arrays = self.kept_arrays + count
        self.model = messages.queues.model
        # These take no physical memory before they are written to.
        self.change = allocate(self.layout.size)
        self.kept = allocate(AHEAD * self.blocks.length)
        # Padding between arrays is sent too.
        self.layout.zero_vector(self.model)
        self.layout.locate(self.model_arrays, self.model)
        self.layout.locate(self.change_arrays, self.change)
        opened = UserVector(like, self.layout, 0)
        self.layout.copy(self.model_arrays, opened.arrays)

    def __dealloc__(self):
        cdef Step *following
        while self.first != NULL:
            following = self.first.next
            free(self.first)
            self.first = following
        while self.idle != NULL:
            following = self.idle.next
            free(self.idle)
            self.idle = following
        free(self.change)
        free(self.earlier)
        free(self.kept)
        free(self.model_arrays)

    cdef Step *add(self, What what, double share, char **user) noexcept nogil:
        """Add a step after all others, and return it; NULL and an error without memory.

        None follows one that had no memory: it would use what that has not written.
        """
        cdef Step *step = self.idle
        if self.error != 0:
            return NULL
        if step != NULL:
            self.idle = step.next
        else:
            step = <Step *>zeroed(1, sizeof(Step))
            if step == NULL:
                self.error = MPI_ERR_NO_MEM
                return NULL
        memset(step, 0, sizeof(Step))
        step.what = what
        step.share = share
        step.user = user
        self.answers += what in (RECORD, SAVE, KEEP, RETURN)
        if self.first == NULL:
            self.first = step
        else:
            self.last.next = step
        self.last = step
        return step

    cdef Step *add_use(
        self, What what, Transfer *source, double keep, double share
    ) noexcept nogil:
        """Add a step that uses an incoming vector, and return it; NULL: without memory, none does.
        """
        cdef Step *step = self.add(what, share, NULL)
        if step != NULL:
            step.source = source
            step.keep = keep
        else:
            source.dropped = True
        return step

    cdef void abandon(self) noexcept nogil:
        """Let the steps whose vectors have no memory do nothing, as there is none."""
        cdef Step *step = self.first
        while step != NULL:
            if step.what in (MIX, HALVE) and step.source.memory == NULL:
                step.source = NULL
                if step.outgoing != NULL:
                    self.messages.send_zeros(step.outgoing)
            step = step.next

    cdef void record(self, char **user, bint against_model) noexcept nogil:
        """Add a step that sets D to the application's change of D, what it last got, or of X."""
        cdef Step *step = self.add(RECORD, 1, user)
        if step != NULL:
            step.against_model = against_model
            self.recording = step

    cdef void publish(self, double share) noexcept nogil:
        """Add a step that adds the change to X, and is the last one to use that change."""
        cdef Step *step = self.add(PUBLISH, share, NULL)
        if step != NULL and self.recording != NULL:
            step.in_turns = self.recording.in_turns = True
            self.recording.reader = step
        self.recording = NULL

    cdef void look_ahead(self, double momentum) noexcept nogil:
        """Add a step that lets X look ahead of S, which has memory from the first one on."""
        if self.earlier == NULL:
            self.earlier = try_to_allocate(self.layout.size)
            if self.earlier == NULL:
                self.error = MPI_ERR_NO_MEM
                return
            self.layout.locate(self.earlier_arrays, self.earlier)
        self.add(LOOK_AHEAD, momentum, NULL)

    cdef bint run(self) noexcept nogil:
        """Execute every step that can be on one more block; return whether there was one."""
        cdef Step *step = self.first
        cdef int end = self.blocks.count
        cdef bint progressed = False
        self.recording = NULL
        while step != NULL:
            if step.done < end and self._may_do(step):
                self._do(step, step.done)
                step.done += 1
                progressed = True
            end = min(end, step.done)
            step = step.next
        self._remove_done()
        return progressed

    cdef bint _may_do(self, Step *step) noexcept nogil:
        """Return whether a step can be executed on its next block; those before it have been."""
        cdef int block = step.done
        if self.arrives and step.user != NULL and not self.handover.has(self.blocks.end(block)):
            return False
        if step.next != NULL:
            # Not far ahead of the step that reads the same block.
            if step.what == SEND and block >= step.next.done + AHEAD:
                return False
            if step.what in (RECORD, PUBLISH, SCALE) and block > step.next.done:
                return False
        if step.in_turns and step.what == RECORD and block >= step.reader.done + AHEAD:
            return False
        if step.what == SEND:
            return True
        if step.what in (MIX, HALVE):
            if step.source == NULL:
                return True
            if step.source.complete <= block and (
                    step.what == HALVE or not self.messages.offers(step.source, block)):
                return False
        if step.what == RETURN and step.share == 1:
            return True
        return self.messages.is_free(
            self.change if self._writes_change(step) else self.model, block)

    cdef bint _writes_change(self, Step *step) noexcept nogil:
        return step.what in (RECORD, SAVE, ZERO, KEEP, RETURN)

    cdef char **_change_of(self, Step *step, int block) noexcept nogil:
        """Return the arrays in which a step reads or writes a block of the change."""
        if not step.in_turns:
            return self.change_arrays
        self.layout.locate(self.kept_arrays, (
            self.kept + block % AHEAD * self.blocks.length - self.blocks.begin(block)))
        return self.kept_arrays

    cdef void _do(self, Step *step, int block) noexcept nogil:
        cdef char **x = self.model_arrays
        cdef char **d = self.change_arrays
        cdef Transfer *outgoing
        if step.what == RECORD:
            self.blocks.combine(block, self._change_of(step, block),
                                x if step.against_model else d, -1, step.user, 1)
        elif step.what == SAVE:
            self.blocks.scale(block, d, x, 1)
        elif step.what == ZERO:
            self.blocks.zero(block, self.change)
        elif step.what == KEEP:
            if step.user != NULL:
                self.blocks.scale(block, d, step.user, 1)
        elif step.what == PUBLISH:
            if step.user != NULL:
                self.blocks.scale(block, x, step.user, 1)
            else:
                self.blocks.combine(block, x, x, 1, self._change_of(step, block), step.share)
        elif step.what == SCALE:
            self.blocks.scale(block, x, x, step.share)
        elif step.what == LOOK_AHEAD:
            self._look_ahead(block, step.share)
        elif step.what == SEND:
            outgoing = step.outgoing
            while outgoing != NULL:
                outgoing.ready = block + 1
                outgoing = outgoing.sibling
        elif step.what in (MIX, HALVE) and step.source == NULL:
            if step.outgoing != NULL:
                step.outgoing.ready = block + 1
        elif step.what == MIX:
            self._locate(step.source, block)
            if step.keep == 0 and step.share == 1:
                self.blocks.scale(block, x, self.arrays, 1)
            else:
                self.blocks.combine(block, x, x, step.keep, self.arrays, step.share)
            self.messages.use(step.source, block)
        elif step.what == HALVE:
            self._halve(step, block)
        else:
            if step.share != 1:
                self.blocks.scale(block, d, x, step.share)
                x = d
            if step.user != NULL:
                self.blocks.scale(block, step.user, x, 1)
                if self.arrives:
                    self.handover.return_until(self.blocks.end(block))

    cdef void _look_ahead(self, int block, double momentum) noexcept nogil:
        cdef char **x = self.model_arrays
        cdef char **s = self.earlier_arrays
        if momentum == 0:
            self.blocks.scale(block, s, x, 1)
            return
        # S is the step from S to X for a moment, and X as it was again, but for rounding.
        self.blocks.combine(block, s, s, -1, x, 1)
        self.blocks.combine(block, x, x, 1, s, momentum)
        self.blocks.combine(block, s, x, 1, s, -momentum)

    cdef void _halve(self, Step *step, int block) noexcept nogil:
        """Overwrite the received block with the half to send back, and subtract that from X."""
        self._locate(step.source, block)
        self.blocks.combine(block, self.arrays, self.arrays, -0.5, self.model_arrays, 0.5)
        self.blocks.combine(block, self.model_arrays, self.model_arrays, 1, self.arrays, -1)
        if step.outgoing != NULL:
            step.outgoing.memory = step.source.memory
            step.outgoing.in_turns = step.source.in_turns
            step.outgoing.ready = block + 1
        else:
            step.source.used = block + 1

    cdef void _locate(self, Transfer *transfer, int block) noexcept nogil:
        """Locate the arrays of which this block, which another rank has sent, is a part."""
        cdef char *place = (
            self.messages.place(transfer, block) if transfer.complete > block
            else self.messages.show(transfer, block))
        self.layout.locate(self.arrays, place - self.blocks.begin(block))

    cdef void _remove_done(self) noexcept nogil:
        cdef Step *step = self.first
        while step != NULL and step.done == self.blocks.count:
            self.answers -= step.what in (RECORD, SAVE, KEEP, RETURN)
            self.first = step.next
            step.next = self.idle
            self.idle = step
            step = self.first

    cdef bint forget_user(self) noexcept nogil:
        """Stop using the application's buffer; return whether a KEEP or RETURN still needed it."""
        cdef Step *step = self.first
        cdef bint misses = False
        self.recording = NULL
        while step != NULL:
            if step.user != NULL and step.what in (RECORD, PUBLISH):
                self._record_all(step)
            misses |= step.user != NULL and step.what in (KEEP, RETURN)
            step.user = NULL
            step = step.next
        return misses

    cdef void _record_all(self, Step *step) noexcept nogil:
        """Record the whole change, of which steps would have kept a few blocks at a time."""
        cdef char **x = self.model_arrays
        cdef char **d = self.change_arrays
        cdef int block
        if step.what == PUBLISH:
            for block in range(step.done, self.blocks.count):
                self.blocks.combine(block, d, x, -1, step.user, 1)
            return
        if step.in_turns:
            for block in range(step.reader.done, step.done):
                self.blocks.scale(block, d, self._change_of(step, block), 1)
            step.in_turns = step.reader.in_turns = False
        while step.done < self.blocks.count:
            self._do(step, step.done)
            step.done += 1
