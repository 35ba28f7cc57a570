"""One rank's exchanges in shared memory: what it publishes, averages and takes next.

Members that have arrived average the vector block by block, directly from all contributions to the
destination of each member's mean. The words of `claims` say which rank does what; here is decided
in which order. A `SharedExchangePort` makes the passes over blocks. They may complete later,
as on a device, so that each has a ticket.
"""

import cython

if not cython.compiled:  # else the .pxd declares them
    from collectives.protocols.claims import (
        AVERAGED,
        CLOSED,
        EMPTY,
        FLOWING,
        GATHERED,
        KEPT,
        MISSING,
        OPEN,
        PENDING,
        RINGED,
        UNKNOWN,
        number_of,
        state_of,
    )

    # Where a member contributes a block, or receives its mean. WINDOW: in the application's arrays,
    # which are in memory that the node's ranks share.
    NOWHERE, SNAPSHOT, RESULT, RING, WINDOW = range(5)

    # Lists of members: of this rank's own exchange, of another one, and, from here on, of the
    # blocks being averaged.
    OWN, OTHER, FIRST_BLOCK = range(3)

# Longest chain of exchanges of which each waits for an earlier one.
DEEPEST = 64


def source_of(ringed, shows):
    """Return where a member contributes, as its part says.

    Args:
        ringed: whether the ring has its blocks.
        shows: whether the application's arrays have them.
    """
    if shows:
        return WINDOW
    return RING if ringed else SNAPSHOT


def target_of(ringed, in_place, takes):
    """Return where a member receives the mean, as its part says; besides in its WINDOW, maybe."""
    if not takes:
        return NOWHERE
    if ringed:
        return RING
    return SNAPSHOT if in_place else RESULT


class AveragedBlocks:
    """A queue of the blocks that a rank averages; they end in order.

    Attributes:
        numbers, sizes: of their exchanges, and how many members these have.
        blocks, of: which blocks they are, and of how many.
        totals: the members' weights.
        tickets: of their passes.
        first, count: the place of the first one, and how many there are.
    """

    def __init__(self, ahead):
        self.first = 0
        self.count = 0
        if not cython.compiled:
            self.numbers, self.sizes, self.blocks, self.of = ([0] * ahead for _ in range(4))
            self.totals, self.tickets = [0] * ahead, [0] * ahead


class SharedExchangeProtocol:
    """A rank's part in its own exchanges, and its help with those of other ranks.

    Args:
        claims: the words, a `ClaimsProtocol`.
        rank: this rank.
        ahead: blocks that a rank publishes ahead of need, that it averages before it does anything
            else, and that a ring holds.
        members: `ahead` + FIRST_BLOCK lists, each for as many ranks as there are; compiled ones are
            in memory whose address is set.

    Attributes:
        oldest: the number of the first version after the last operation.
        number: the exchange that this rank is in; `together` if every member enters it.
        lent: whether the application's arrays are published block by block. receives: whether
            they receive the mean. ringed: whether only the ring has their blocks.
        shows, gets: whether others read the application's arrays, and write the mean there.
        withdrawing: whether they are to stop that. holding: whether this rank keeps all from
            claiming blocks; of which so many were claimed before: held. hidden: whether its part is
            CLOSED meanwhile. entered: the state in which its part began.
        own_size, first: its members, and the first of them.
        own_place: that of this rank among them.
        own_blocks: its blocks; of them are `copied` from the application (with tickets `copies`),
            `published`, and `returned` to the application.
        patience: how often this rank looks for other members before it copies a block that it could
            reserve if they came; 0: it reserves none. looks: how often it has.
        reserving: whether it may yet reserve blocks; from which block on it has: reserved, and the
            next of these to be averaged: next_reserved. shared_out: whether no other blocks of its
            exchange are left to average.
        entry: the state in which the part begins once the passes of `entry_ticket` are complete;
            CLOSED: it has begun.
    """

    def __init__(self, claims, rank, ahead, members, patience):
        self.port = None
        self.claims = claims
        self.rank = rank
        self.ahead = ahead
        self.patience = patience
        self.oldest = 0
        self.number = 0
        self.together = False
        self.lent = False
        self.receives = False
        self.ringed = False
        self.shows = False
        self.gets = False
        self.withdrawing = False
        self.held = 0
        self.holding = False
        self.hidden = False
        self.entered = KEPT
        self.first = 0
        self.own_size = 0
        self.own_place = 0
        self.own_blocks = 0
        self.reserving = False
        self.looks = 0
        self.reserved = 0
        self.next_reserved = 0
        self.shared_out = False
        self.copied = 0
        self.published = 0
        self.returned = 0
        self.entry = CLOSED
        self.entry_ticket = 0
        self.averaging = AveragedBlocks(ahead)
        if not cython.compiled:
            self.members = members
            self.copies = [0] * ahead

    def attach(self, port):
        """Set what makes the passes."""
        self.port = port

    def place(self, k):
        """Return a list of ranks."""
        if cython.compiled:
            return self.members + k * self.most
        else:
            return self.members[k]

    def slot(self, k):
        """Return the slot of the `k`-th block, of which at most `ahead` are kept."""
        if cython.compiled:
            return k % AHEAD  # noqa: F821 (of the .pxd): faster than by a variable
        else:
            return k % self.ahead

    # This rank's part

    def open(self, number):
        """Let any member begin this rank's next part, and those after it."""
        self.claims.set(self.rank, number, OPEN)

    def close(self):
        """Close this rank's part to others; return whether it has begun, in exchange `number`."""
        word: cython.ulonglong = self.claims.close(self.rank)
        self.number = number_of(word)
        self.together = False
        self.lent = False
        self.receives = False
        self.shows = False
        self.gets = False
        self.entry = CLOSED
        self.copied = 0
        self.published = 0
        return state_of(word) == KEPT

    def reached(self):
        """Return the number of the exchange that this rank's part is opened for, or is in."""
        return self.claims.number(self.rank)

    def is_pending(self):
        """Return whether the exchange that this rank is in is not over."""
        return self.entry != CLOSED or self.reached() == self.number

    def begin(self, number, together, members, size, lent, receives, ringed, windowed, keeps):
        """Begin this rank's part in an exchange.

        If all members enter it `together`, no rank executes it for another. A part that is `ringed`
        gives and receives, or has weight 0 and does neither.

        Where the application's arrays are `windowed`, others read what is lent there, unless this
        rank `keeps` a copy, and write the mean there; nothing goes by the ring.
        """
        i: cython.int
        own: cython.p_int = self.place(OWN)
        self.shows = windowed and lent and not keeps
        self.gets = windowed and receives
        self.withdrawing = False
        lent = lent and not self.shows
        receives = receives and not self.gets
        ringed = ringed and not windowed
        self.port.set_path(
            ringed, (receives or not ringed) and not self.gets, self.shows, self.gets
        )
        self.number = number
        self.together = together
        for i in range(size):
            own[i] = members[i]
            if members[i] == self.rank:
                self.own_place = i
        self.own_size = size
        self.first = members[0]
        self.lent = lent
        self.receives = receives
        self.ringed = ringed
        self.copied = 0
        self.published = 0
        self.returned = 0
        self.own_blocks = self.port.blocks(size)
        self.reserving = self.patience > 0 and lent and ringed
        self.looks = 0
        self.reserved = self.own_blocks
        self.next_reserved = self.own_blocks
        self.shared_out = False
        self.entry = KEPT
        if lent:
            self.entry = RINGED if self.reserving else FLOWING
        self.entered = self.entry
        # Others may average the snapshot only once its passes are complete; the application's
        # blocks are published one by one.
        self.entry_ticket = self.port.begun()
        self.enter()

    def enter(self):
        """Begin this rank's part if it is due and the passes over its vectors are complete."""
        if self.entry != CLOSED and self.port.over(self.entry_ticket):
            self.claims.set(self.rank, self.number, self.entry)
            self.entry = CLOSED

    def progress(self):
        """Progress without blocking; return whether the mean is complete."""
        self.enter()
        if self.entry != CLOSED:
            return False
        self.publish()
        while self.contribute_next():
            self.port.progressed()
        self.end_blocks()
        for _ in range(self.ahead):
            if self.reached() != self.number or not self.advance():
                break
            self.port.progressed()
        while self.return_next():
            self.port.progressed()
        if self.withdrawing:
            self.withdraw()
        return not (
            self.reached() == self.number
            or self.withdrawing
            or (self.receives and self.returned < self.own_blocks)
        )

    def advance(self):
        """Average a block of the exchange that this rank is in; return whether there was one."""
        if self.average_reserved():
            return True
        if self.is_shared_out():
            return False
        if not self.together:
            return self.help(self.rank, self.number)
        if self.claims.gather(self.number, self.place(OWN), self.own_size) != GATHERED:
            return False
        return self.average_next(self.number, self.place(OWN), self.own_size)

    def contribute_next(self):
        """Copy the application's next block if it is needed soon; return whether it was."""
        if self.reserving:
            self.reserve()
        if not self.lent or self.copied == self.own_blocks:
            return False
        if self.reserving and self.owns(self.copied) and self.looks < self.patience:
            self.looks += 1
            return False
        near: cython.Py_ssize_t = self.near()
        if self.copied >= near + self.ahead or not self.port.has_block(self.copied):
            return False
        self.contribute_block()
        self.publish()
        return True

    def reserve(self):
        """Reserve those of this rank's own blocks that it has not copied, once it may."""
        found: cython.int = self.claims.gather_rings(self.number, self.place(OWN), self.own_size)
        self.reserving = found == MISSING
        if found != GATHERED:
            return
        self.claims.reserve(self.rank, self.number, self.copied)
        self.reserved = self.copied
        self.next_reserved = self.copied - self.copied % self.own_size + self.own_place
        if self.next_reserved < self.copied:
            self.next_reserved += self.own_size

    def has_reserved(self, block):
        """Return whether this rank averages a block in place."""
        return block >= self.reserved and self.owns(block)

    def owns(self, block):
        """Return whether a block is one that this rank may reserve."""
        return block % self.own_size == self.own_place

    def near(self):
        """Return how far the exchange has come: the number of blocks handed out to be averaged.

        In the ring, the number of those returned to the application.
        """
        if self.ringed:
            return self.returned
        return self.claims.handed_out(self.number, self.first)

    def contribute_block(self):
        # Among unpublished blocks, later ones have later tickets.
        ticket: cython.longlong
        if self.has_reserved(self.copied):
            ticket = self.port.begun()
        else:
            ticket = self.port.contribute_block(self.copied)
        self.copies[self.slot(self.copied)] = ticket
        self.copied += 1

    def publish(self):
        """Let others average the blocks whose copies are complete."""
        before: cython.Py_ssize_t = self.published
        while self.published < self.copied and self.port.over(
            self.copies[self.slot(self.published)]
        ):
            self.published += 1
        if self.published > before:
            self.claims.publish(self.rank, self.number, self.published)

    def return_next(self):
        """Copy the next block of the mean to the application; return whether it was available."""
        if not self.receives or self.returned == self.own_blocks:
            return False
        fate: cython.int = self.claims.fate(self.number, self.first, self.returned)
        if fate == UNKNOWN:
            fate = AVERAGED if self.port.total_weight() > 0 else EMPTY
        if fate == PENDING or not self.port.has_block(self.returned):
            return False
        if fate == AVERAGED:
            self.port.return_block(self.returned, self.has_reserved(self.returned))
        self.returned += 1
        return True

    def adopt(self):
        """Publish the rest of the application's arrays and return nothing to them.

        A ring has no room for that: other arrays take their place, or they stay in use. Where other
        members use them, they are `withdrawing` until those have stopped.
        """
        if self.lent and self.ringed:
            self.port.keep_arrays()
            return
        while self.lent and self.copied < self.own_blocks:
            self.contribute_block()
        self.publish()
        self.lent = False
        self.receives = False
        self.withdrawing = self.shows or self.gets
        if self.withdrawing:
            self.withdraw()

    def withdraw(self):
        """Use this rank's own vectors, not the application's arrays, if no member uses these now.

        No member uses them while this rank keeps all from claiming blocks and those that were
        claimed before have ended; nor while the first member has not come, if this part is closed.
        """
        over: cython.bint = self.reached() != self.number
        if not (over or self.is_undisturbed()):
            return
        own: cython.p_int = self.place(OWN)
        averaged: cython.Py_ssize_t = self.own_blocks if over else self.held
        total: cython.double = 0
        if averaged > 0:  # else some members may not have come, and still set their weights
            total = self.port.total_weight() if over else self.port.weigh(own, self.own_size)
        self.port.withdraw(averaged if total > 0 else 0)
        self.shows = False
        self.gets = False
        self.withdrawing = False
        self.let_go()

    def is_undisturbed(self):
        """Return whether no member uses the application's arrays, nor will before `let_go`."""
        if not self.holding:
            come: cython.bint = self.first == self.rank or self.claims.has_come(
                self.first, self.number
            )
            if not (come or self.hidden):
                # Whoever finds that all have come looks at the first member before this one.
                self.hidden = self.claims.change(self.rank, self.number, self.entered, CLOSED)
                come = not self.hidden or self.claims.has_come(self.first, self.number)
            if not come:
                self.held = 0
                return True
            self.held = self.claims.hold(self.number, self.first, self.own_blocks)
            self.holding = self.held >= 0
        return self.holding and self.claims.ended(self.number, self.first) == self.held

    def let_go(self):
        """Let members use this rank's part again, if it is still in the exchange."""
        if self.holding:
            self.claims.let_go(self.number, self.first, self.held, self.own_blocks)
        if self.hidden:
            self.claims.change(self.rank, self.number, CLOSED, self.entered)
        self.holding = False
        self.hidden = False

    # Exchanges

    def needs_messages(self, number):
        """Return whether some members of this rank's group in an exchange do not share memory."""
        return self.port.find_group(self.rank, number, self.place(OTHER)) == 0

    def average_reserved(self):
        """Average the next block that this rank has reserved, if all have published it."""
        if self.next_reserved >= self.own_blocks or self.averaging.count == self.ahead:
            return False
        own: cython.p_int = self.place(OWN)
        ready: cython.longlong = self.claims.published(
            self.number, own, self.own_size, self.own_blocks
        )
        if self.next_reserved >= ready:
            return False
        block: cython.Py_ssize_t = self.next_reserved
        self.next_reserved += self.own_size
        self.average_block(self.number, own, self.own_size, block, self.own_blocks, True)
        return True

    def is_shared_out(self):
        """Return whether all blocks of this rank's exchange are reserved, or handed out."""
        if not self.shared_out and self.entered == RINGED and not self.reserving:
            end: cython.longlong = self.claims.unreserved(
                self.number, self.place(OWN), self.own_size, self.own_blocks
            )
            self.shared_out = self.claims.handed_out(self.number, self.first) >= end
        return self.shared_out

    def help(self, rank, number):
        """Average a block of an exchange of a rank's group; return whether there was one.

        If a member has yet to execute an earlier one, average a block of that instead.
        """
        members: cython.p_int = self.place(OTHER)
        for _ in range(DEEPEST):
            size: cython.int = self.port.find_group(rank, number, members)
            if size == 0:
                return False
            state: cython.int = self.claims.gather(number, members, size)
            if state == GATHERED:
                return self.average_next(number, members, size)
            if state != MISSING:
                return False
            rank = self.claims.missing
            earlier: cython.longlong = self.claims.number(rank)
            if self.claims.state(rank) == CLOSED or not self.may_help(earlier, number):
                return False
            number = earlier
        return False

    def may_help(self, earlier, number):
        """Return whether an exchange for which another one waits is a version to help with.

        Those before the last operation are complete, even if a rank's words lag.
        """
        return self.oldest <= earlier and earlier < number

    def average_next(self, number, members, size):
        """Average a block of an exchange whose members have all arrived, if one is available."""
        if self.averaging.count == self.ahead:
            return False
        blocks: cython.Py_ssize_t = self.port.blocks(size)
        ready: cython.longlong = self.claims.published(number, members, size, blocks)
        block: cython.longlong = self.claims.claim(number, members, size, ready)
        if block < 0:
            return False
        self.average_block(number, members, size, block, blocks, False)
        return True

    def average_block(self, number, members, size, block, blocks, in_place):
        """Average a block that this rank has claimed, or reserved: in place."""
        i: cython.int
        slot: cython.int = self.slot(self.averaging.first + self.averaging.count)
        kept: cython.p_int = self.place(FIRST_BLOCK + slot)
        for i in range(size):
            kept[i] = members[i]
        self.averaging.count += 1
        self.averaging.numbers[slot] = number
        self.averaging.sizes[slot] = size
        self.averaging.blocks[slot] = block
        self.averaging.of[slot] = blocks
        total: cython.double = self.port.weigh(members, size)
        self.averaging.totals[slot] = total
        if total > 0:
            self.averaging.tickets[slot] = self.port.average(
                number, self.together and number == self.number, block, members, size, in_place
            )
        else:
            self.averaging.tickets[slot] = self.port.begun()
        self.end_blocks()

    def end_blocks(self):
        """Mark completed blocks as averaged, and finish each exchange whose last block this is."""
        while self.averaging.count > 0:
            slot: cython.int = self.averaging.first
            if not self.port.over(self.averaging.tickets[slot]):
                return
            self.end_block(
                self.averaging.numbers[slot],
                self.place(FIRST_BLOCK + slot),
                self.averaging.sizes[slot],
                self.averaging.blocks[slot],
                self.averaging.of[slot],
                self.averaging.totals[slot],
            )
            self.averaging.first = self.slot(slot + 1)
            self.averaging.count -= 1

    def end_block(self, number, members, size, block, blocks, total):
        fate: cython.int = AVERAGED if total > 0 else EMPTY
        if self.claims.end(number, members[0], block, blocks, fate):
            self.finish(number, members, size, total)

    def finish(self, number, members, size, total):
        """End an exchange all blocks of which are averaged, for all of its members."""
        self.set_total(members, size, total)
        self.port.average_counts(number, members, size)
        self.claims.release(number, members, size)

    def set_total(self, members, size, total):
        """Update the members' parts, which they read once they are released."""
        i: cython.int
        for i in range(size):
            if self.port.end_part(members[i], total) and total > 0:
                self.port.replace(members[i])
