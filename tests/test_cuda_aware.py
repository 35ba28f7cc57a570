"""Whether MPI may be given device memory: what decides it, and what may go wrong on the way."""

import ctypes
import subprocess
import sys
import types

import pytest
from mpi4py import MPI

from collectives import cuda_aware
from collectives.cuda_aware import Answer
from collectives.memory import probe

SIZE = probe.SIZES[0]
NON_BLOCKING, LEGACY_TOO = 1, 0


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.delenv("WAGMA_CUDA_AWARE", raising=False)


@pytest.fixture
def child(monkeypatch):
    """`child(program)` lets this one of Python's be the process that tries MPI; None: none may."""

    def let(program):
        command = (sys.executable, "-c", program) if program else ("/nowhere/python",)
        monkeypatch.setattr(cuda_aware, "COMMAND", command)

    return let


def verdict(text):
    return f"print({probe.VERDICT + text!r})"


# --- what is said


@pytest.mark.parametrize(
    ("values", "answer"),
    [
        ([None, ""], None),
        (["yes"], None),
        (["0"], Answer(False, "WAGMA_CUDA_AWARE=0")),
        (["1", None], Answer(True, "WAGMA_CUDA_AWARE=1")),
        (["1", "0"], Answer(False, "WAGMA_CUDA_AWARE is 0 on some ranks, and 1 on others")),
    ],
)
def test_the_variable_decides(values, answer):
    assert cuda_aware.forced(values) == answer


def test_what_the_variable_says_is_not_tried(monkeypatch, child):
    monkeypatch.setenv("WAGMA_CUDA_AWARE", "1")
    child(None)
    assert cuda_aware.ask(MPI.COMM_SELF) == Answer(True, "WAGMA_CUDA_AWARE=1")


def test_without_a_driver_nothing_is_tried(monkeypatch, child):
    monkeypatch.setenv("WAGMA_CUDA_LIBRARY", "/nowhere/libcuda.so.1")
    child(None)
    aware, reason = cuda_aware.ask(MPI.COMM_SELF)
    assert not aware
    assert reason.startswith("no CUDA driver: /nowhere/libcuda.so.1: ")


def test_an_mpi_that_says_no_is_not_tried(device, child):
    if cuda_aware.query() is None:
        pytest.skip("this MPI may be CUDA-aware")
    child(None)
    expected = Answer(False, "this MPI reports that it was built without CUDA")
    assert cuda_aware.ask(MPI.COMM_SELF) == expected


def function(result):
    """One of MPI's, which writes what it says through its last argument if it has any."""

    def say(*arguments):
        if arguments:
            arguments[-1]._obj.value = result
        return 0 if arguments else result

    return say


@pytest.mark.parametrize(
    ("functions", "no"),
    [
        ({}, False),
        ({"MPIX_Query_cuda_support": function(1)}, False),
        ({"MPIX_Query_cuda_support": function(0)}, True),
        ({"MPIX_GPU_query_support": function(0)}, True),
        ({"MPIX_GPU_query_support": function(1), "MPIX_Query_cuda_support": function(1)}, False),
    ],
)
def test_only_a_no_of_mpi_s_counts(monkeypatch, functions, no):
    monkeypatch.setattr(ctypes, "CDLL", lambda path: types.SimpleNamespace(**functions))
    assert (cuda_aware.query() is not None) == no


def test_cray_s_mpi_needs_its_variable_and_its_library(monkeypatch):
    monkeypatch.setattr(MPI, "Get_library_version", lambda: "MPI VERSION : CRAY MPICH version 8")
    monkeypatch.delenv("MPICH_GPU_SUPPORT_ENABLED", raising=False)
    assert cuda_aware.query() == "MPICH_GPU_SUPPORT_ENABLED is not 1"
    monkeypatch.setenv("MPICH_GPU_SUPPORT_ENABLED", "1")
    assert cuda_aware.query() == "the library libmpi_gtl_cuda is not loaded"


# --- the process that tries it


@pytest.mark.parametrize(
    ("program", "wrong"),
    [
        (verdict("not all of 4096 bytes arrive as sent"), "not all of 4096 bytes arrive"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "it was ended by SIGSEGV"),
        (verdict(probe.FINE) + "; import os; os.abort()", "it was ended by SIGABRT"),
        ("raise SystemExit(3)", "it ended with status 3"),
        ("pass", "it ended with status 0"),
        ("import time; time.sleep(100)", "it has not ended after 0.5 s"),
    ],
)
def test_a_process_that_does_not_succeed_is_a_no(child, program, wrong):
    child(program)
    reason = cuda_aware.try_alone(0, limit=0.5 if "sleep" in program else 20)
    assert reason.startswith(f"sending device memory failed in a separate process: {wrong}")


def test_a_process_that_succeeds_decides_nothing(child):
    child(f"print('MPI says hello'); {verdict(probe.FINE)}")
    assert cuda_aware.try_alone(0) is None


def test_a_process_that_cannot_be_started_is_a_no(device, monkeypatch, child):
    monkeypatch.setattr(cuda_aware, "query", lambda: None)
    child(None)
    aware, reason = cuda_aware.ask(MPI.COMM_SELF)
    assert not aware and "/nowhere/python" in reason


def test_that_process_is_a_job_of_its_own(monkeypatch, child):
    launcher_s = ["PMI_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "SLURM_PROCID"]
    names = [*launcher_s, "OMPI_MCA_btl"]
    for name in names:
        monkeypatch.setenv(name, "1")
    child(f"import os; print({probe.VERDICT!r} + ' '.join(n for n in {names} if n in os.environ))")
    assert cuda_aware.try_alone(0).endswith(": OMPI_MCA_btl")


def test_an_mpi_that_touches_device_memory_itself_is_found_out(device, monkeypatch):
    """The stand-in ends the process that does."""
    if cuda_aware.query() is None:
        pytest.skip("this MPI may be CUDA-aware")
    monkeypatch.setattr(cuda_aware, "query", lambda: None)
    aware, reason = cuda_aware.ask(MPI.COMM_SELF)
    assert not aware
    assert "sending device memory failed in a separate process: it ended with status" in reason


def test_a_process_that_crashes_leaves_nothing_in_shared_memory(device):
    program = """
import os
from collectives.memory import probe
probe.exchange = lambda *_: (str([path for path in probe._segments() if os.path.exists(path)]), 0)
print(probe.main(0))
"""
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert output.stdout == "[]\n", output.stderr


# --- between ranks


class Comm:
    """What an MPI makes of a message from a rank to itself, on the stand-in.

    Args:
        device: tests' own.
        probed: the probe's.
        flags: of the stream that it copies on, None: it copies nothing; and it waits for that.
    """

    rank, size = 0, 1

    def __init__(self, device, probed, flags):
        self.device, self.probed = device, probed
        self.stream = None if flags is None else device.create_stream(flags)

    def Irecv(self, buffer, source):
        return MPI.REQUEST_NULL

    def Isend(self, buffer, target):
        if self.stream is not None:
            addresses = map(ctypes.c_ulonglong, (self.probed.received, self.probed.sent))
            size, stream = ctypes.c_size_t(len(buffer[0])), ctypes.c_void_p(self.stream)
            self.device.call("cuMemcpyAsync", *addresses, size, stream)
            self.device.synchronize(self.stream)
        return MPI.REQUEST_NULL


class Lost(Comm):
    """One in which no message arrives."""

    def Irecv(self, buffer, source):
        self.request = MPI.COMM_SELF.Irecv(bytearray(1))
        return self.request


@pytest.fixture
def probed(device):
    probed = probe.Device(0)
    with probed.current():
        yield probed
    probed.busy = False
    probed.close()


@pytest.mark.parametrize("size", probe.SIZES)
def test_bytes_that_arrive_are_all_right(device, probed, size):
    comm = Comm(device, probed, LEGACY_TOO)
    assert probe.exchange(comm, probed, size, 20) == (None, False)


def test_bytes_that_do_not_arrive_are_seen(device, probed):
    wrong, _ = probe.exchange(Comm(device, probed, None), probed, SIZE, 1)
    assert wrong == "not all of 4096 bytes arrive as sent"


def test_a_message_that_is_lost_keeps_its_memory(device, probed):
    comm = Lost(device, probed, None)
    wrong, _ = probe.exchange(comm, probed, SIZE, 0.05)
    assert wrong == "4096 bytes have not arrived after 0.05 s"
    before = device.counts().device_bytes
    probed.close()
    assert device.counts().device_bytes == before
    comm.request.Cancel()
    comm.request.Wait()


@pytest.mark.parametrize(("flags", "early"), [(NON_BLOCKING, True), (LEGACY_TOO, False)])
def test_copies_that_wait_for_the_default_stream_are_seen(device, probed, flags, early):
    comm = Comm(device, probed, flags)
    assert probe.exchange(comm, probed, SIZE, 20, hold=4) == (None, early)


def inquire(monkeypatch, device, flags):
    """Ask of an MPI that copies on streams with these flags, and passes what comes before."""
    monkeypatch.setattr(cuda_aware, "query", lambda: None)
    monkeypatch.setattr(cuda_aware, "try_alone", lambda place: None)
    monkeypatch.setattr(cuda_aware, "HOLDS", (0.1, 1.0))
    exchange, holds = probe.exchange, []

    def exchange_otherwise(comm, probed, size, limit, hold=0.0):
        holds.append(hold)
        return exchange(Comm(device, probed, flags), probed, size, limit, hold)

    monkeypatch.setattr(probe, "exchange", exchange_otherwise)
    return cuda_aware.ask(MPI.COMM_SELF), holds


def test_an_mpi_that_waits_for_nothing_is_aware(device, monkeypatch):
    before = device.counts().device_bytes
    (aware, reason), holds = inquire(monkeypatch, device, NON_BLOCKING)
    assert aware, reason
    assert reason == "device memory arrives, even while the device has other work"
    assert holds[:4] == [0.0] * 4
    assert device.counts().device_bytes == before


def test_an_mpi_that_waits_for_the_default_stream_is_not(device, monkeypatch):
    answer, holds = inquire(monkeypatch, device, LEGACY_TOO)
    assert answer == Answer(False, cuda_aware.WAITS)
    assert holds[4:] == [*cuda_aware.HOLDS]


def test_an_mpi_that_sends_anything_is_not(device, monkeypatch):
    answer, holds = inquire(monkeypatch, device, None)
    assert answer.reason == "between ranks: not all of 4096 bytes arrive as sent"
    assert holds == [0.0]


def test_what_the_driver_says_is_the_reason(device, monkeypatch):
    monkeypatch.setattr(cuda_aware, "query", lambda: None)
    monkeypatch.setattr(cuda_aware, "try_alone", lambda place: None)
    device.fail(700)
    assert cuda_aware.ask(MPI.COMM_SELF).reason == "cuInit returned CUDA_ERROR_ILLEGAL_ADDRESS"


def test_a_device_that_fails_on_the_way_is_the_reason(device, monkeypatch):
    def fail(comm, probed, *_):
        device.fail(700)
        probed.read(probed.sent, SIZE)

    monkeypatch.setattr(cuda_aware, "query", lambda: None)
    monkeypatch.setattr(cuda_aware, "try_alone", lambda place: None)
    monkeypatch.setattr(probe, "exchange", fail)
    reason = cuda_aware.ask(MPI.COMM_SELF).reason
    assert reason == "cuMemcpyDtoHAsync_v2 returned CUDA_ERROR_ILLEGAL_ADDRESS"


# --- as the ranks of a job find out together


@pytest.mark.mpi
@pytest.mark.transports()
def test_one_rank_s_no_is_every_rank_s(comm, device, monkeypatch):
    if comm.rank == 1:
        monkeypatch.setenv("WAGMA_CUDA_LIBRARY", "/nowhere/libcuda.so.1")
    answer, reason = cuda_aware.ask(comm)
    assert not answer
    assert reason.startswith("no CUDA driver: /nowhere/libcuda.so.1: ")
    assert reason.endswith(" on rank 1")


@pytest.mark.mpi
@pytest.mark.transports()
def test_one_rank_s_variable_is_every_rank_s(comm, monkeypatch):
    if comm.rank == 1:
        monkeypatch.setenv("WAGMA_CUDA_AWARE", "1")
    assert cuda_aware.ask(comm) == Answer(True, "WAGMA_CUDA_AWARE=1")


@pytest.mark.mpi
@pytest.mark.transports()
def test_a_process_that_fails_is_one_answer(comm, device, monkeypatch):
    monkeypatch.setattr(cuda_aware, "query", lambda: None)
    monkeypatch.setattr(cuda_aware, "COMMAND", ("false",))
    reason = "sending device memory failed in a separate process: it ended with status 1 on rank 0"
    assert cuda_aware.ask(comm) == Answer(False, reason)
