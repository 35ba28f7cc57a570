"""The blocks in which vectors are copied to the host and back."""

import pytest

from collectives.device import BLOCK, MOST_BLOCKS, copied_block


@pytest.mark.parametrize("size", [64, BLOCK, 10**8 + 1, 512 << 20, (2 << 30) + 1, 100 << 30])
def test_a_vector_is_copied_in_blocks_that_fit_into_a_launch_queue(size):
    block = copied_block(size)
    assert block >= BLOCK and block % 64 == 0
    assert -(-size // block) <= MOST_BLOCKS
    assert size > MOST_BLOCKS * BLOCK or block == BLOCK
