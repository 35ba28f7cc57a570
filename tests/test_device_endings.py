"""How jobs with arrays on devices begin without a driver, and end."""

import pytest
import stand_in

# The device may have to be compiled.
pytestmark = [pytest.mark.launch, pytest.mark.timeout(400)]

HEAD = """
import os
import sys

import numpy as np

sys.path.insert(0, os.environ["TESTS"])
import stand_in
from mpi4py import MPI

import collectives
from collectives import CudaError, GroupAllreduce

comm = MPI.COMM_WORLD
"""
DEVICE = """
device = stand_in.Device()
stream = device.create_stream()
vector = device.array(np.full(5000, float(comm.rank)), stream)
average = GroupAllreduce(comm, vector, group_size=comm.size, wait="group")
assert average.path == os.environ["EXPECTED"], average.path_reason
"""
on_either_path = pytest.mark.parametrize("job", ["staged", "direct"], indirect=True)


@pytest.fixture
def job(request, mpirun_text):
    """Start a job whose vectors are averaged on the host or, of a "direct" one, on devices."""
    env = {
        "TESTS": str(stand_in.SOURCES.parent),
        "WAGMA_CUDA_LIBRARY": stand_in.require(),
        "STAND_IN_DELAY": "300",
        "EXPECTED": getattr(request, "param", "staged"),
    }
    if env["EXPECTED"] == "direct":
        env["STAND_IN_IPC"] = "1"

    def run(body, head=HEAD + DEVICE, **more):
        return mpirun_text(2, head, body, env=env | more)

    return run


@pytest.mark.parametrize("library", ["/nowhere/libcuda.so.1", "libm.so.6"])
def test_a_rank_without_a_driver_is_an_error_on_all_that_names_the_library(job, library):
    result = job(
        """
        vector = stand_in.Device().array(np.zeros(100))
        if comm.rank == 1:
            os.environ["WAGMA_CUDA_LIBRARY"] = sys.argv[1]
        for kind in GroupAllreduce, collectives.TriggeredAverage, collectives.PushSum:
            try:
                kind(comm, vector)
            except CudaError as error:
                text = str(error)
            assert "no CUDA driver" in text and sys.argv[1] in text, text
            assert text.startswith("rank 1:") or comm.rank == 1, text
        # Numpy's arrays need none.
        x = np.full(100, float(comm.rank))
        with GroupAllreduce(comm, x, group_size=2, wait="group") as average:
            average(x)
        assert (x == 0.5).all()
        """.replace("sys.argv[1]", repr(library)),
        head=HEAD,
    )
    assert result.check().stderr == ""


def test_numpy_s_arrays_load_no_driver(job):
    result = job(
        """
        x = np.full(100, float(comm.rank))
        with GroupAllreduce(comm, x, group_size=2) as average:
            average(x)
        loaded = open("/proc/self/maps").read()
        assert "libcuda" not in loaded and "cupy" not in sys.modules
        """,
        head=HEAD.replace("import stand_in\n", ""),
    )
    assert result.check().stderr == ""


@on_either_path
@pytest.mark.parametrize("engine", ["adaptive", "none"])
def test_what_nobody_closed_is_closed_at_exit_with_a_call_that_waits_for_its_device(job, engine):
    result = job(
        """
        device.write(vector, np.full(5000, comm.rank + 1.0), stream)
        device.sleep(0.1, stream)
        call = average.start(vector)
        """,
        # What is registered first runs last.
        head=HEAD
        + "import atexit\n"
        + "said = lambda: (average.closed, call.test(), *set(vector.get().tolist()))\n"
        + "atexit.register(lambda: print(*said()))\n"
        + DEVICE,
        WAGMA_ENGINE=engine,
    )
    assert result.check().stderr == ""
    assert result.stdout.splitlines() == ["True True 1.5"] * 2


MODEL = """
import atexit

import torch_device
from methods import METHODS, backward, make_model

# What is registered first runs last.
atexit.register(lambda: print(averager.closed, averager.collective.version))
torch_device.load()
model = make_model(comm.rank).to("standin")
averager = METHODS["wagma-overlap"].make(model, comm)
assert averager.collective.path == os.environ["EXPECTED"], averager.collective.path_reason
"""


@on_either_path
def test_an_averager_that_nobody_closed_is_closed_at_exit_with_an_average_under_way(job):
    pytest.importorskip("torch_device").build()
    result = job(
        """
        backward(model, comm.rank, 0)
        if comm.rank == 0:
            atexit.register(comm.send, None, 1)  # rank 1 begins once rank 0 is about to end
        else:
            comm.recv(source=0)
        averager.optimizers.given[0].step()
        """,
        head=HEAD + MODEL,
    )
    assert result.check().stderr == ""
    assert result.stdout.splitlines() == ["True 1"] * 2


@on_either_path
def test_a_driver_that_has_gone_before_is_no_error_at_exit(job):
    """CUDA_ERROR_DEINITIALIZED is what each of its functions returns then."""
    result = job(
        """
        import atexit

        average(vector)
        device.synchronize(stream)
        atexit.register(device.fail, 4)  # runs before what was registered earlier
        """
    )
    assert result.check().stderr == ""


@on_either_path
def test_a_forked_child_neither_uses_nor_disturbs_the_device(job):
    result = job(
        """
        average(vector)
        child = os.fork()
        if child == 0:
            import gc
            try:
                average(vector)
            except RuntimeError as error:
                assert "a forked child cannot use it" in str(error), error
            else:
                os._exit(1)
            device.unused.clear()
            del average
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        average(vector)
        average.close()
        assert (vector.get() == 0.5).all()
        """
    )
    assert result.check().stderr == ""


def test_an_exception_with_a_call_that_waits_for_its_device_ends_the_job(job):
    result = job(
        """
        with average:
            average(vector)
            if comm.rank == 1:
                device.call("stand_in_hold", stand_in.handle(stream))
                average.start(vector)
                import threading
                threading.Timer(1, device.open).start()
                raise KeyError("the dataset is gone")
            average(vector)
        """
    )
    assert result.returncode != 0
    assert "the dataset is gone" in result.stderr
    assert "stand-in[" not in result.stderr
    assert result.seconds < 60
