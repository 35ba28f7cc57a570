"""Peers with arrays on devices: what overlaps with the copies, and what goes wrong meanwhile."""

import threading

import numpy as np
import pytest
from devices import CASES, vectors_of
from stand_in import ILLEGAL_ADDRESS
from test_device_errors_mpi import close_after_failure, hear_that_rank_1_failed
from test_device_mpi import check_bits
from together import (
    Interrupted,
    compute_until,
    interrupt,
    interrupted,
    signalled,
    wait_until,
)

import collectives
from collectives import CudaError, NeighborAverage, PairwiseAverage

pytestmark = [pytest.mark.mpi, pytest.mark.transports("messages")]

PEERS = ["neighbors", "queues", "push-sum", "server"]
LENGTH, BLOCKS = 2**20, 16  # of float32, several blocks of a message, and of copies


@pytest.fixture
def vector(comm, device, stream, monkeypatch):
    """One of several blocks, full of this rank's number."""
    monkeypatch.setattr(collectives.device, "BLOCK", 2**18)
    return device.array(np.full(LENGTH, float(comm.rank), np.float32), stream)


def begun(device):
    """Return a function that says whether blocks have been given back in a call from now on."""
    copies = device.counts().copies
    return lambda: device.counts().copies > copies + BLOCKS


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("case", PEERS)
def test_long_vectors_that_are_copied_in_blocks_get_the_bits_of_the_host(
    comm, device, stream, case, monkeypatch
):
    if (case, comm.size) == ("server", 3):
        pytest.skip("what comes first is added first, and thirds are rounded: it differs on hosts")
    monkeypatch.setattr(collectives.device, "BLOCK", 2**17)
    arrays = vectors_of(0, comm.size, [300_001, 40, 150_000], ["float32", "float32", "float64"])
    check_bits(comm, CASES[case], arrays, device, stream)


@pytest.mark.parametrize("case", [*PEERS, "pairs"])
def test_the_first_blocks_are_given_back_while_the_last_are_on_their_way(
    comm, device, vector, case
):
    with CASES[case].make(comm, vector) as collective:
        collective(vector)
        comm.Barrier()
        given_back = begun(device)
        with device.holding_copies(BLOCKS // 2):
            call = threading.Thread(target=collective, args=[vector])
            call.start()
            wait_until(given_back)
            assert call.is_alive()
            comm.Barrier()
        call.join()
        assert collective.version == 2
        collective.synchronize(vector)
        expected = 0 if case == "server" else (comm.size - 1) / 2
        np.testing.assert_allclose(vector.get(), expected, rtol=1e-6)


@pytest.mark.parametrize("case", ["neighbors", "push-sum"])
def test_a_change_that_is_not_finite_is_left_out(comm, device, vector, case):
    """Whether the vector is not finite, or is too far from what it was."""
    changes = [np.zeros(LENGTH, np.float32) for _ in range(3)]
    if comm.rank == 1:
        changes[1][-1] = np.nan
        changes[2][-1] = -3e38
    device.write(vector, np.full(LENGTH, 3e38, np.float32), vector.stream)
    with CASES[case].make(comm, vector) as collective:
        for change in changes:
            collective(vector)
            last = vector.get()
            np.testing.assert_allclose(last, 3e38, rtol=1e-6)
            device.write(vector, np.where(change, change, last), vector.stream)
        collective(vector)
        np.testing.assert_allclose(vector.get(), 3e38, rtol=1e-6)
        assert collective.statistics().left_out == 2 * (comm.rank == 1)


def test_a_rank_whose_device_is_behind_is_averaged_as_it_was(comm, device):
    stream = device.create_stream()
    vector = device.array(np.full(5000, float(comm.rank)), stream)
    with PairwiseAverage(comm, vector) as average:
        average(vector)
        comm.Barrier()
        before = average.statistics().passive
        if comm.rank == 1:
            with device.holding(stream):
                call = threading.Thread(target=average, args=[vector])
                call.start()
                compute_until(comm, False)
                assert (call.is_alive(), average.version) == (True, 1)
                waits = "call 1, whose vector the device has not provided yet,"
                assert average.native._waits_in_call() == (waits, [])
            call.join()
            assert average.statistics().passive > before
        else:
            for _ in range(20):
                average(vector)
                average.native.settle()
            compute_until(comm, True)
        average.synchronize(vector)
        np.testing.assert_allclose(vector.get(), (comm.size - 1) / 2)


def test_an_exception_while_the_device_is_behind_leaves_a_call_to_be_made(comm, device, stream):
    vector = device.array(np.full(5000, float(comm.rank)), stream)
    with NeighborAverage(comm, vector) as average:
        average(vector)
        first = vector.get()
        with device.holding(stream):
            with interrupted():
                average(vector)
            assert average.version == 1
            device.write(vector, first, stream)
        assert average(vector).version == 1
        average.synchronize(vector)
        np.testing.assert_allclose(vector.get(), (comm.size - 1) / 2)


@pytest.mark.parametrize("case", ["neighbors", "push-sum", "server", "pairs"])
def test_an_exception_in_the_middle_ends_the_call_and_not_the_rank_s_part(
    comm, device, vector, case
):
    """Where the application has but some blocks of the model its next change is none."""
    blocks = {0}
    with CASES[case].make(comm, vector) as collective:
        collective(vector)
        own = vector.get()[0] + np.float32(comm.rank**2)
        device.write(vector, np.full(LENGTH, own), vector.stream)
        comm.Barrier()
        if comm.rank == 1:
            opening = threading.Timer(0.1, device.open)

            def interrupt_first():
                opening.start()
                interrupt()

            given_back = begun(device)
            with device.holding_copies(BLOCKS // 2), pytest.raises(Interrupted):  # noqa: SIM117
                with signalled(interrupt_first, 0.02, once=given_back):
                    collective(vector)
            opening.join()
            left = vector.get()
            blocks = set(left)
            device.write(vector, left + np.float32(8), vector.stream)
        else:
            collective(vector)
        collective(vector)
        missed = collective.statistics().left_out
        assert len(blocks) <= 1 + missed
        collective.synchronize(vector)
        changes = [rank**2 for rank in range(comm.size)] + [8 - 8 * comm.bcast(missed, 1)]
        initial = 0 if case == "server" else (comm.size - 1) / 2
        np.testing.assert_allclose(vector.get(), initial + sum(changes) / comm.size, rtol=1e-6)


@pytest.mark.parametrize("case", ["neighbors", "server", "pairs"])
def test_a_device_that_fails_in_the_middle_is_named_everywhere_and_nobody_hangs(
    comm, device, vector, case
):
    collective = CASES[case].make(comm, vector)
    collective(vector)
    comm.Barrier()
    if comm.rank == 1:
        given_back = begun(device)
        with device.holding_copies(BLOCKS // 2):

            def fail():
                wait_until(given_back)
                device.fail(ILLEGAL_ADDRESS)

            failing = threading.Thread(target=fail)
            failing.start()
            with pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
                collective(vector)
            failing.join()
    else:
        hear_that_rank_1_failed(collective, vector)
    comm.Barrier()
    close_after_failure(comm, device, collective)
