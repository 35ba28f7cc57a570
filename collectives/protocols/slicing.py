"""The allreduce of a long vector, as a reduce-scatter and an allgather.

The vector is processed in blocks. Each member owns one slice of a block: the others send it that
slice of their vectors (reduce-scatter), and it sends the mean to all (allgather). So every number
is sent once to its owner and once back, in groups of any size, and is rounded once.
"""

import cython

LINE = 64
# Bytes of the shortest slice that is worth a message's latency, and of the longest that stays in
# cache.
SHORTEST = 16 * 1024
LONGEST = 256 * 1024
# A block of vectors in shared memory stays in the cache of the member that averages it.
LONGEST_SHARED = 128 * 1024
# On a device a block is long enough to be worth the launch of kernels; the longest is chosen there.
SHORTEST_ON_DEVICE = 256 * 1024
# Shorter vectors are averaged by recursive doubling.
SHORTEST_VECTOR = 512 * 1024
# A block has at most LONGEST_BLOCK bytes, or 1/BLOCKS of a longer vector's: members hold several.
BLOCKS = 8
LONGEST_BLOCK = 1024 * 1024


class Slicing:
    """The blocks and slices of a vector of `length` bytes, averaged by `size` members.

    Attributes:
        blocks: number of blocks.
        block: bytes of each, the last one excepted; a multiple of 64.
    """

    def begin(self, length, size):
        """Lay out a vector of at least one byte, from byte 0 on."""
        self.lay_out(length, size, 0)

    def lay_out(self, length, size, shortest):
        """Lay out a vector as `begin` does, in blocks of at least `shortest` bytes for a device."""
        longest: cython.Py_ssize_t = max(LONGEST_BLOCK, length // BLOCKS)
        self.length = length
        self.size = size
        self.block = min(max(min(size * LONGEST, longest), shortest), length)
        self.block = size * LINE * ((self.block + size * LINE - 1) // (size * LINE))
        self.blocks = (length + self.block - 1) // self.block

    def end(self, block):
        """Return where a block ends."""
        return min(self.length, (block + 1) * self.block)

    def bound(self, block, member):
        """Return where a member's slice of a block begins, and the previous member's ends."""
        low: cython.Py_ssize_t = block * self.block
        high: cython.Py_ssize_t = self.end(block)
        share: cython.Py_ssize_t = (high - low + self.size - 1) // self.size
        share = LINE * ((share + LINE - 1) // LINE)
        return min(high, low + member * share)


def suits(length, size):
    """Return whether slices are faster than doubling, for `length` bytes and `size` members."""
    return size > 1 and length >= SHORTEST_VECTOR and length >= size * SHORTEST


def shared_block(length, size, on_device):
    """Return the bytes of a block in shared memory, which one member averages whole.

    There is at least one block for every member, unless blocks would be too short to be worth it.
    `on_device` is the longest block on a device, or 0 in the host's memory.
    """
    shortest: cython.Py_ssize_t = min(SHORTEST_ON_DEVICE, on_device) if on_device else SHORTEST
    longest: cython.Py_ssize_t = on_device if on_device else LONGEST_SHARED
    block: cython.Py_ssize_t = min(max(length // size, shortest), longest)
    return LINE * ((block + LINE - 1) // LINE)


def most_shared_blocks(length, size):
    """Return the largest number of such blocks, for groups of at most `size` members."""
    return max(size, length // LONGEST_SHARED) + 1
