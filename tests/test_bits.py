"""Every result that repeats is, bit for bit, what the fixture says: `python -m tests.bits`."""

import pytest
from bits import CASES, digest, expected, fixture

PLAYED = [(name, transport) for name, case in CASES.items() for transport in case.transports]

pytestmark = [pytest.mark.mpi, pytest.mark.transports()]


@pytest.mark.ranks(4, 8)
@pytest.mark.parametrize(("name", "transport"), PLAYED, indirect=["transport"])
def test_the_bits_are_the_fixtures(comm, name, transport):
    assert digest(name, comm) == expected(comm.size, name, transport, comm.rank)


@pytest.mark.ranks(4, 8)
def test_the_fixture_has_these_cases_and_no_others(comm):
    assert set(fixture()[str(comm.size)]) == set(CASES)
