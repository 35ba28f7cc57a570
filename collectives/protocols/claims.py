"""Which rank begins whose part in an exchange, if the ranks of a node share memory.

Each rank has words that all others see. The first holds the number of the rank's next exchange, and
whether others may begin the rank's part in it: while it is OPEN, any member that needs the part may
begin it, with the rank's last snapshot, so that a rank that computes need not do anything. Members
that have arrived divide the blocks of the vector among each other, one at a time, up to the last
block that all have published; the member that completes the last block completes the exchange for
all. The words that count blocks are those of the exchange's first member. The numbers of a rank's
exchanges increase.

Every S-th block belongs to the same one of an exchange's S members. Where all pass their blocks
through rings, each may *reserve* its own from some block on: these it does not copy into its ring,
but averages them itself, in place. They are not handed out to others.

No step waits for another rank, and each changes one word at a time, by compare-and-swap.
"""

import cython

# The states in the first word, besides the number.
CLOSED = 0  # only the rank itself may begin
OPEN = 1  # any member may begin
TAKEN = 2  # begun; when the exchange ends, the next number is OPEN
KEPT = 3  # begun; when it ends, the next number is CLOSED, since the rank waits for it
FLOWING = 4  # the same, but the rank publishes its contribution block by block meanwhile
RINGED = 5  # the same, by way of a ring, and it may reserve blocks if all members' parts are

# Offsets of words, each in a cache line of its own; from BLOCKS on there is one for every block.
PART = 0
HANDED_OUT = 16
ENDED = 32
PUBLISHED = 48
RESERVED = 49  # which is looked at after the former
BLOCKS = 64

# The states of an exchange that `gather` and `gather_rings` return.
MISSING = 0
GATHERED = 1
OVER = 2

# The states of a block that `fate` returns: AVERAGED only if a member's vector has weight.
PENDING = 0
EMPTY = 1
AVERAGED = 2
UNKNOWN = 3

# A word is a number, and in its last bits a state or a count of blocks.
STATE_BITS = 3
BLOCK_BITS = 20


def word_of(number, state):
    """Return the word of a number and a state, for a rank's part or for a block."""
    return (number << STATE_BITS) | state


def number_of(word):
    """Return the number in such a word."""
    return word >> STATE_BITS


def state_of(word):
    """Return the state in such a word."""
    return word & ((1 << STATE_BITS) - 1)


class ClaimsProtocol:
    """The words of a node's ranks, as one of them sees and changes them.

    Attributes:
        missing: a member that `gather` found missing.
    """

    def __init__(self, words):
        """Use these words of each rank; compiled ones are in memory whose addresses are set."""
        if not cython.compiled:
            self.words = words

    def load(self, rank, offset):
        """Return a word."""
        if cython.compiled:
            return atomic_load(self.words[rank] + offset)  # noqa: F821 (of the .pxd)
        else:
            return self.words[rank][offset]

    def swap(self, rank, offset, old, new):
        """Set a word to `new` if it is `old`; return whether it was."""
        if cython.compiled:
            return atomic_swap(self.words[rank] + offset, old, new)  # noqa: F821
        else:
            same = self.words[rank][offset] == old
            if same:
                self.words[rank][offset] = new
            return same

    def state(self, rank):
        """Return whether a rank's part is CLOSED, OPEN, TAKEN, KEPT or FLOWING."""
        return state_of(self.load(rank, PART))

    def number(self, rank):
        """Return the number of the exchange that a rank is in, or else of its next."""
        return number_of(self.load(rank, PART))

    # This rank's own part

    def set(self, rank, number, state):
        """Open or begin this rank's own part, which is closed, so that no other rank changes it."""
        old: cython.ulonglong = self.load(rank, PART)
        self.swap(rank, PART, old, word_of(number, state))

    def publish(self, rank, number, blocks):
        """Publish the first `blocks` blocks of this rank's contribution to an exchange."""
        old: cython.ulonglong = self.load(rank, PUBLISHED)
        self.swap(rank, PUBLISHED, old, (number << BLOCK_BITS) + blocks)

    def reserve(self, rank, number, block):
        """Reserve this rank's own blocks, from this one on, before it publishes any of them."""
        old: cython.ulonglong = self.load(rank, RESERVED)
        self.swap(rank, RESERVED, old, (number << BLOCK_BITS) + block + 1)

    def reserved(self, rank, number):
        """Return from which block on a rank has reserved its own in an exchange; −1: from none."""
        word: cython.ulonglong = self.load(rank, RESERVED)
        if word >> BLOCK_BITS != number:
            return -1
        count: cython.longlong = word - (number << BLOCK_BITS)
        return count - 1

    def close(self, rank):
        """Keep others from beginning this rank's own part, and return its word after that.

        It is CLOSED, or, where the part has begun, KEPT: closed when that exchange ends.
        """
        while True:
            old: cython.ulonglong = self.load(rank, PART)
            state: cython.ulonglong = state_of(old)
            if state != OPEN and state != TAKEN:
                return old
            closed: cython.ulonglong = word_of(number_of(old), CLOSED if state == OPEN else KEPT)
            if self.swap(rank, PART, old, closed):
                return closed

    # An exchange

    def gather(self, number, members, size):
        """Begin the open parts of all members if none is missing; return the exchange's state."""
        i: cython.int
        word: cython.ulonglong
        for i in range(size):
            word = self.load(members[i], PART)
            if number_of(word) > number:
                return OVER
            if number_of(word) < number or state_of(word) == CLOSED:
                self.missing = members[i]
                return MISSING
        for i in range(size):
            while not self.swap(members[i], PART, word_of(number, OPEN), word_of(number, TAKEN)):
                word = self.load(members[i], PART)
                if number_of(word) > number:
                    return OVER
                if state_of(word) == CLOSED:
                    self.missing = members[i]
                    return MISSING
                # Its rank may have closed and reopened it since: then the part has not begun.
                if state_of(word) != OPEN:
                    break
        return GATHERED

    def gather_rings(self, number, members, size):
        """Return GATHERED if all members have begun by way of rings, OVER if they never will."""
        i: cython.int
        found: cython.int = GATHERED
        for i in range(size):
            word: cython.ulonglong = self.load(members[i], PART)
            if number_of(word) < number or word <= word_of(number, OPEN):
                found = MISSING
            elif word != word_of(number, RINGED):
                return OVER
        return found

    def is_reserved(self, number, members, size, block):
        """Return whether its owner has reserved a published block."""
        word: cython.ulonglong = self.load(members[block % size], RESERVED)
        none: cython.ulonglong = number << BLOCK_BITS
        # What the owner has reserved in a later exchange has taken this one's place.
        return word > none and (word <= none + block + 1 or word >> BLOCK_BITS > number)

    def unreserved(self, number, members, size, blocks):
        """Return the block from which on all are reserved; `blocks` if some may not be."""
        i: cython.int
        last: cython.longlong = 0
        for i in range(size):
            first: cython.longlong = self.reserved(members[i], number)
            if first < 0:
                return blocks
            last = max(last, first)
        return last

    def published(self, number, members, size, blocks):
        """Return how many blocks all members have published."""
        i: cython.int
        least: cython.ulonglong = blocks
        for i in range(size):
            if self.state(members[i]) in (FLOWING, RINGED):
                word: cython.ulonglong = self.load(members[i], PUBLISHED)
                count: cython.ulonglong = 0
                if word >> BLOCK_BITS == number:
                    count = word - (number << BLOCK_BITS)
                if count < least:
                    least = count
        return least

    def handed_out(self, number, first):
        """Return how many blocks of an exchange are being averaged or have been."""
        word: cython.ulonglong = self.load(first, HANDED_OUT)
        if word >> BLOCK_BITS != number:
            return 0
        return word - (number << BLOCK_BITS)

    def claim(self, number, members, size, blocks):
        """Return the next of so many published blocks to be averaged, −1 if there is none."""
        while True:
            old: cython.ulonglong = self.load(members[0], HANDED_OUT)
            block: cython.ulonglong = 0
            if old >> BLOCK_BITS > number:
                return -1
            if old >> BLOCK_BITS == number:
                block = old - (number << BLOCK_BITS)
            if block >= blocks:
                return -1
            after: cython.ulonglong = (number << BLOCK_BITS) + block + 1
            if self.is_reserved(number, members, size, block):
                self.swap(members[0], HANDED_OUT, old, after)
                continue
            if self.swap(members[0], HANDED_OUT, old, after):
                return block

    def hold(self, number, first, blocks):
        """Keep all from claiming one of so many blocks; return how many are claimed, −1: all are.

        The exchange's first member must have come to it, so that it is in no earlier one.
        """
        while True:
            old: cython.ulonglong = self.load(first, HANDED_OUT)
            claimed: cython.ulonglong = 0
            if old >> BLOCK_BITS == number:
                claimed = old - (number << BLOCK_BITS)
            if old >> BLOCK_BITS > number or claimed >= blocks:
                return -1
            if self.swap(first, HANDED_OUT, old, (number << BLOCK_BITS) + blocks):
                return claimed

    def let_go(self, number, first, claimed, blocks):
        """Let the blocks that `hold` kept be claimed again."""
        held: cython.ulonglong = (number << BLOCK_BITS) + blocks
        self.swap(first, HANDED_OUT, held, (number << BLOCK_BITS) + claimed)

    def ended(self, number, first):
        """Return how many blocks of an exchange have been averaged."""
        word: cython.ulonglong = self.load(first, ENDED)
        return word - (number << BLOCK_BITS) if word >> BLOCK_BITS == number else 0

    def has_come(self, rank, number):
        """Return whether a rank's part in an exchange has begun, or the exchange is over."""
        word: cython.ulonglong = self.load(rank, PART)
        state: cython.ulonglong = state_of(word)
        if number_of(word) != number:
            return number_of(word) > number
        return state != CLOSED and state != OPEN

    def change(self, rank, number, old, new):
        """Change the state of a rank's part in an exchange, if that is what it was."""
        return self.swap(rank, PART, word_of(number, old), word_of(number, new))

    def end(self, number, first, block, blocks, fate):
        """Set a block to EMPTY or AVERAGED; return whether it was the last, to `release` then."""
        old: cython.ulonglong = self.load(first, BLOCKS + block)
        self.swap(first, BLOCKS + block, old, word_of(number, fate))
        while True:
            old = self.load(first, ENDED)
            ended: cython.ulonglong = 0
            if old >> BLOCK_BITS == number:
                ended = old - (number << BLOCK_BITS)
            if self.swap(first, ENDED, old, (number << BLOCK_BITS) + ended + 1):
                return ended + 1 == blocks

    def fate(self, number, first, block):
        """Return the state of a block; UNKNOWN if the exchange ended and a later one began."""
        word: cython.ulonglong = self.load(first, BLOCKS + block)
        if number_of(word) < number:
            return PENDING
        if number_of(word) > number:
            return UNKNOWN
        return state_of(word)

    def release(self, number, members, size):
        """End the exchange: open each member's next part, unless the member waits for this one."""
        i: cython.int
        for i in range(size):
            while True:
                old: cython.ulonglong = self.load(members[i], PART)
                after: cython.ulonglong = OPEN if state_of(old) == TAKEN else CLOSED
                if self.swap(members[i], PART, old, word_of(number + 1, after)):
                    break
