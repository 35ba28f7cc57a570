"""`wagma info`: what it says, and with how little it can say it."""

import re
import subprocess
import sys

import pytest
from launch import is_open_mpi
from mpi4py import MPI

import wagma
from wagma import info

MODE = "engine mode"
CUDA = "CUDA-aware MPI"


def table(text):
    """Return the rows of a plain table as a dictionary."""
    return dict(re.split("  +", line, maxsplit=1) for line in text.splitlines())


def test_nodes_are_named_with_their_ranks():
    assert info.nodes([0], ["a"]) == "1 on a"
    assert info.nodes([0, 0, 2, 2], ["a", "a", "b", "b"]) == "2 on each of a, b"
    assert info.nodes([0, 1, 0, 3, 0], list("babcb")) == "3 on b; 1 on each of a, c"


def test_ranks_that_cannot_share_memory_are_on_nodes_of_their_own_whatever_these_are_called():
    assert info.nodes([0, 0, 2], ["a", "a", "a"]) == "2 on a; 1 on a"


def test_values_that_differ_are_shown_with_their_ranks():
    assert info.by_rank(["1.0", "1.0"]) == "1.0"
    assert info.by_rank(["1.0", "2.0", "1.0"]) == "1.0 on ranks 0, 2; 2.0 on rank 1"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "adaptive (default)"),
        ("dedicated", "dedicated (WAGMA_ENGINE)"),
        ("fast", "'fast' (WAGMA_ENGINE), not one of adaptive, dedicated, none"),
    ],
)
def test_the_engine_s_mode_is_the_variable_s(monkeypatch, value, shown):
    monkeypatch.delenv("WAGMA_ENGINE", raising=False)
    if value:
        monkeypatch.setenv("WAGMA_ENGINE", value)
    assert info.engine_mode() == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "no: no CUDA driver: [^()]*"),
        ("0", "no: WAGMA_CUDA_AWARE=0"),
        ("1", "yes: WAGMA_CUDA_AWARE=1"),
        ("yes", "no: no CUDA driver: .* \\(WAGMA_CUDA_AWARE is 'yes', neither 0 nor 1\\)"),
    ],
)
def test_cuda_awareness_is_what_the_variable_says_or_is_found_out(monkeypatch, value, shown):
    monkeypatch.setenv("WAGMA_CUDA_LIBRARY", "/nowhere/libcuda.so.1")
    monkeypatch.delenv("WAGMA_CUDA_AWARE", raising=False)
    if value:
        monkeypatch.setenv("WAGMA_CUDA_AWARE", value)
    assert re.fullmatch(shown, info.cuda_awareness(MPI.COMM_SELF))


def test_an_engine_for_another_mpi_is_named(monkeypatch):
    def refuse():
        raise ImportError("wagma's extensions were built for MPICH 4")

    monkeypatch.setattr("collectives.process.native", refuse)
    expected = "cannot be loaded: wagma's extensions were built for MPICH 4"
    assert info.native_engine() == expected


def test_what_torch_knows_of_gpus(monkeypatch):
    torch = pytest.importorskip("torch")
    # Another test may have loaded torch's test device.
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "none")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert info.device() == ("cpu", "torch is built without CUDA")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert info.device() == ("cpu", "torch sees no GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", ["H100", "H200", "H100"].__getitem__)
    assert info.device() == ("cuda", "2 × H100, 1 × H200")


def test_models_on_devices_are_averaged_through_host_memory():
    assert info.path_of("cpu", "no: MPI says so", "no").startswith("host: ")
    path = info.path_of("cuda", "no: MPI says so", "no: no CUDA driver")
    assert path == "staged: through pinned host memory; MPI says so"


def test_models_on_devices_that_ranks_or_mpi_can_use_are_averaged_there(monkeypatch):
    shared = info.path_of("cuda", "no: MPI says so", "yes: all bytes arrive")
    assert shared.startswith("direct: ranks use each other's device memory")
    assert info.path_of("cuda", "yes: tried", "no").startswith("direct: MPI takes device memory")
    assert info.path_of("cpu", "yes: tried", "yes: all bytes arrive").startswith("host: ")
    monkeypatch.setenv("WAGMA_CUDA_LIBRARY", "/nowhere/libcuda.so.1")
    assert info.device_sharing(MPI.COMM_SELF).startswith("no: no CUDA driver")


def test_without_torch_rich_and_scikit_learn_it_is_a_plain_table():
    program = """
import sys
from importlib import metadata
absent = {"torch", "rich", "sklearn", "scikit-learn"}
sys.modules |= dict.fromkeys(absent)
version = metadata.version
def installed(name):
    if name in absent:
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = installed
from wagma.cli import main
sys.exit(main(["info"]))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    rows = table(ended.stdout)
    assert rows["torch"] == rows["rich"] == rows["scikit-learn"] == "not installed"
    assert rows["device"] == "cpu: torch is not installed"
    assert rows[CUDA].startswith("no: ")
    assert rows["ranks"] == "1"
    assert rows["transport"] == "none: one rank"


def test_on_a_terminal_it_is_a_rich_table(monkeypatch, tmp_path):
    pytest.importorskip("rich")
    with (tmp_path / "terminal").open("w") as terminal:
        monkeypatch.setattr(info.progress, "terminal", lambda: terminal)
        info.show([("MPI library", "MPICH [5]"), ("ranks", "4")])
    shown = (tmp_path / "terminal").read_text()
    assert re.search("│ MPI library │ MPICH \\[5\\] +│", shown)
    assert re.search("│ ranks       │ 4 +│", shown)


@pytest.mark.launch
def test_a_job_of_three_prints_one_table(mpirun):
    variables = {"WAGMA_ENGINE": "dedicated", "WAGMA_CUDA_AWARE": "0"}
    ended = mpirun(3, "-m", "wagma", "info", timeout=100, env=variables).check()
    assert ended.stderr == ""
    rows = table(ended.stdout)
    assert len(rows) == len(ended.stdout.splitlines())
    assert rows["MPI library"].startswith(("MPICH", "Open MPI"))
    assert rows["ranks"] == "3"
    assert rows["ranks per node"].startswith("3 on ")
    assert rows["thread level"].split(":")[0] in info.THREAD_LEVELS
    assert rows[MODE] == "dedicated (WAGMA_ENGINE)"
    assert rows["native engine"] == "loaded"
    assert rows["transport"] == "shared"
    assert rows["device"].startswith(("cpu: torch ", "cuda: "))
    assert rows["path"].startswith(("host: ", "staged: "))
    assert rows[CUDA] == "no: WAGMA_CUDA_AWARE=0"
    assert rows["wagma"] == wagma.__version__
    assert rows["Python"] == sys.version.split()[0]
    assert {"mpi4py", "numpy", "torch", "cupy"} <= rows.keys()


@pytest.mark.launch
def test_nodes_are_those_that_share_memory(mpirun):
    if is_open_mpi():
        pytest.skip("only MPICH can take one node for several")
    variables = {"MPIR_CVAR_NUM_CLIQUES": "2", "WAGMA_CUDA_AWARE": "0"}
    ended = mpirun(4, "-m", "wagma", "info", timeout=100, env=variables).check()
    rows = table(ended.stdout)
    assert rows["ranks per node"].startswith("2 on each of ")
    assert rows["transport"] == "shared within nodes, messages between"
