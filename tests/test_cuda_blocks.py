"""The blocks in which devices average vectors: which ones are chosen, and agreed on."""

import pytest

from collectives import cuda_blocks
from collectives.cuda_blocks import LONGEST, SHORTEST, VARIABLE, choose

MIB = 1 << 20


class Ranks:
    """A communicator on the first of two ranks, with what the other one gives each time."""

    size = 2

    def __init__(self, *others):
        self.others = list(others)

    def allgather(self, mine):
        return [mine, self.others.pop(0)]


@pytest.mark.parametrize(
    ("size", "block"),
    [
        (100, SHORTEST),
        (16 * MIB - 4, SHORTEST),
        (16 * MIB, 2 * MIB),
        (63 * MIB, 4 * MIB),
        (64 * MIB, LONGEST),
        (1000 * MIB, LONGEST),
    ],
)
def test_a_long_vector_has_long_blocks_and_eight_at_least(monkeypatch, size, block):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert choose(Ranks(None), size) == block


def test_the_variable_decides(monkeypatch):
    monkeypatch.setenv(VARIABLE, "3000000")
    assert choose(Ranks("3000000"), 100 * MIB) == 3_000_000


@pytest.mark.parametrize("given", ["", "fast", "100", str(2**31)])
def test_what_is_no_block_is_an_error(monkeypatch, given):
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(ValueError, match=f"{VARIABLE} is .*, not a number of bytes from 65536 to"):
        choose(Ranks(given), 100 * MIB)


def test_ranks_have_the_same(monkeypatch):
    monkeypatch.setenv(VARIABLE, "3000000")
    with pytest.raises(ValueError, match=f"{VARIABLE} differs between ranks"):
        choose(Ranks("4000000", None), 100 * MIB)
    assert cuda_blocks.LEAST < SHORTEST < LONGEST < cuda_blocks.MOST
