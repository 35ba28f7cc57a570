"""What all tests share: hypothesis' profile, the MPI plugin, `comm`, `device` and `mpirun`."""

import gc
import os
import textwrap

import hypothesis
import launch
import lockstep
import numpy as np
import pytest
import stand_in

TRANSPORTS = ("messages", "shared")

hypothesis.settings.register_profile("wagma", deadline=None)
hypothesis.settings.load_profile("wagma")


def pytest_addoption(parser):
    parser.addoption(
        "--transport", choices=TRANSPORTS, help="leave out MPI tests with another transport"
    )


def pytest_configure(config):
    stand_in.reports = os.dup(2)  # a test's is captured, and lost where the process ends in it
    if config.getoption("with_mpi"):
        config.pluginmanager.register(lockstep.Lockstep(config))


def pytest_ignore_collect(collection_path, config):
    """Do not import what has no test of the kind asked for: that would take long, on every rank."""
    wanted = config.getoption("markexpr").split(" and ")
    kinds = [kind for kind in wanted if kind in ("mpi", "launch", "torch_device", "extra", "brief")]
    if kinds and collection_path.suffix == ".py":
        text = collection_path.read_text()
        return any(f"mark.{kind}" not in text for kind in kinds) or None
    return None


def pytest_generate_tests(metafunc):
    """Run every MPI test with each transport, but for those that say which by `transports`."""
    if metafunc.definition.get_closest_marker("mpi") is None or "comm" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("transports")
    names = marker.args if marker else TRANSPORTS
    if not names:
        return
    if metafunc.config.getoption("with_mpi"):
        names = lockstep.transports(metafunc.definition, names)
    metafunc.parametrize("transport", names, indirect=True)


def pytest_collection_modifyitems(config, items):
    for item in items:
        lockstep.check_ranks(item)
    if only := config.getoption("transport"):
        others = [item for item in items if transport_of(item) not in (only, None)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if transport_of(item) in (only, None)]
    # Torch counts the devices when the first gradient of a process is computed.
    items.sort(key=lambda item: item.get_closest_marker("torch_device") is None)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # what was imported, torch for one, need not be looked through in every test


def transport_of(item):
    """Return the transport of an MPI test, None where it is one of no transport."""
    return item.callspec.params.get("transport") if hasattr(item, "callspec") else None


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    passed = session.config.pluginmanager.get_plugin("terminalreporter").stats.get("passed")
    # A run that skipped everything has tested nothing.
    if exitstatus == pytest.ExitCode.OK and not (passed or session.config.option.collectonly):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.fixture(autouse=True)
def transport(request, monkeypatch):
    """The transport of the test's collectives, where the test does not say another; or None."""
    name = getattr(request, "param", None)
    if name:
        monkeypatch.setenv("WAGMA_TRANSPORT", name)
    return name


@pytest.fixture
def through_memory(monkeypatch):
    """Long arrays are copied through shared memory, also where the kernel would copy them.

    The kernel's copies need no stopped rank, unless it stops in the middle of one.
    """
    monkeypatch.setattr("collectives.memory.other_processes.shortest", None)


@pytest.fixture
def comm():
    """A duplicate of COMM_WORLD."""
    from mpi4py import MPI

    duplicate = MPI.COMM_WORLD.Dup()
    yield duplicate
    duplicate.Free()


@pytest.fixture(autouse=True)
def patience(request):
    """Ranks wait long for others that are to form groups, as on a machine that holds these up.

    A test of late ranks needs `usual_patience`.
    """
    if "comm" not in request.fixturenames or "usual_patience" in request.fixturenames:
        yield
        return
    from collectives.protocols import paces

    paces.set_least(20 * 10**9)
    yield
    paces.set_least()


@pytest.fixture
def usual_patience():
    """A test with this is one of ranks that come too late for their groups: see `patience`."""


@pytest.fixture
def device(request, monkeypatch):
    """The first of two devices of the stand-in for the CUDA driver, whose vectors are staged.

    Those of a real driver would not be where ranks can average on it, unless the test wants that:
    see `direct`.
    """
    pytest.importorskip("ml_dtypes")
    monkeypatch.setenv("WAGMA_CUDA_LIBRARY", stand_in.require())
    monkeypatch.setenv("STAND_IN_DELAY", "300")
    monkeypatch.setenv("STAND_IN_DEVICES", "2")
    monkeypatch.setattr("collectives.device.BLOCK", 8192)  # several even of short vectors
    device = stand_in.Device()
    if not device.is_stand_in and "direct" not in request.fixturenames:
        for way in ("WAGMA_CUDA_IPC", "WAGMA_CUDA_AWARE"):
            monkeypatch.setenv(way, "0")
        monkeypatch.setattr("collectives.device._answer", None)
    yield device
    device.reset()


@pytest.fixture
def direct(device, transport, monkeypatch):
    """That device, where it averages vectors itself: see `stand_in.averaging`."""
    if not device.is_stand_in:
        if transport != "shared" and os.environ.get("WAGMA_CUDA_AWARE") != "1":
            pytest.skip("not known to be CUDA-aware: WAGMA_CUDA_AWARE is not 1")
        monkeypatch.setattr("collectives.device._answer", None)
        yield device
        return
    with stand_in.averaging(monkeypatch, transport):
        yield device


@pytest.fixture
def stream(device):
    """A stream of that device's."""
    return device.create_stream()


@pytest.fixture
def in_blocks(comm, device, stream, monkeypatch):
    """A vector of a device's that is copied in several blocks, and how many."""
    monkeypatch.setattr("collectives.device.BLOCK", 2**18)
    return device.array(np.full(2**20, float(comm.rank), np.float32), stream), 16


@pytest.fixture
def mpirun():
    """`launch.mpirun`: start an MPI job, bounded in time and clean at its end."""
    return launch.mpirun


@pytest.fixture
def mpirun_text(mpirun, tmp_path):
    """`mpirun_text(ranks, head, body, **options)`: start a job of a script with this text."""

    def run(ranks, head, body, **options):
        script = tmp_path / "job.py"
        script.write_text(head + textwrap.dedent(body))
        return mpirun(ranks, script, timeout=100, **options)

    return run
