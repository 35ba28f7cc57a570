"""Every result that repeats is, bit for bit, what the fixture says: `python -m tests.bits`."""

import pytest
from bits import CASES, digest, expected, fixture
from mpi4py import MPI


def played(size):
    """Return cases with transports: with eight ranks one each, in turn, else all."""
    found = []
    for number, (name, case) in enumerate(CASES.items()):
        some = case.transports
        if size == 8:
            some = [some[number % len(some)]]
        found += [(name, transport) for transport in some]
    return found


pytestmark = [pytest.mark.mpi, pytest.mark.transports()]


@pytest.mark.ranks(4, 8)
@pytest.mark.parametrize(("name", "transport"), played(MPI.COMM_WORLD.size), indirect=["transport"])
def test_the_bits_are_the_fixtures(comm, name, transport):
    assert digest(name, comm) == expected(comm.size, name, transport, comm.rank)


@pytest.mark.ranks(4, 8)
def test_the_fixture_has_these_cases_and_no_others(comm):
    assert set(fixture()[str(comm.size)]) == set(CASES)
