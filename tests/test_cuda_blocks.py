"""The blocks in which devices average vectors: which ones are chosen, and agreed on."""

import pytest

from collectives import cuda_blocks
from collectives.cuda_blocks import LONGEST, SHORTEST, VARIABLE, choose

LONG = 100 << 20


class Ranks:
    """A communicator on the first of two ranks, with what the other one gives each time."""

    size = 2

    def __init__(self, *others):
        self.others = list(others)

    def allgather(self, mine):
        return [mine, self.others.pop(0)]


def fails():
    raise AssertionError("measured")


@pytest.mark.parametrize(
    ("measured", "there", "block"),
    [
        (0, 0, SHORTEST),
        (SHORTEST + 1, 0, 2 * SHORTEST),
        (0, 3 * SHORTEST, 4 * SHORTEST),
        (LONG, 0, LONGEST),
    ],
)
def test_a_block_is_what_the_device_reads_during_a_launch(monkeypatch, measured, there, block):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert choose(Ranks(None, None, there), LONG, lambda: measured) == block


def test_for_short_vectors_nothing_is_measured(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert choose(Ranks(None, None, 0), LONGEST, fails) == SHORTEST


def test_the_variable_decides(monkeypatch):
    monkeypatch.setenv(VARIABLE, "3000000")
    assert choose(Ranks("3000000", None, 0), LONG, fails) == 3_000_000


@pytest.mark.parametrize("given", ["", "fast", "100", str(2**31)])
def test_what_is_no_block_is_an_error(monkeypatch, given):
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(ValueError, match=f"{VARIABLE} is .*, not a number of bytes from 65536 to"):
        choose(Ranks(given, None), LONG, fails)


def test_ranks_have_the_same(monkeypatch):
    monkeypatch.setenv(VARIABLE, "3000000")
    with pytest.raises(ValueError, match=f"{VARIABLE} differs between ranks"):
        choose(Ranks("4000000", None), LONG, fails)
    assert cuda_blocks.LEAST < SHORTEST < LONGEST < cuda_blocks.MOST
