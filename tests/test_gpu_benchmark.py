"""The benchmark of GPUs, on the driver's stand-in: that it measures all it says, whatever fails."""

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import stand_in

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
PATHS = "staged", "direct, shared"
QUEUE = 256  # operations that a stream takes
SMALL = ("--kib=64", "--parameters=6000", "--busy-mib=1", "--rounds=1", "--seconds=0.1")
ONE = argparse.Namespace(rank=0, size=1)  # a communicator
# Lets MPI, which is not CUDA-aware, have the memory of devices.
OPENED = """
import ctypes, os, runpy, sys
ctypes.CDLL(os.environ["WAGMA_CUDA_LIBRARY"]).stand_in_open_memory(1)
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def environment(library, **more):
    """Return what has a job of the benchmark use a driver."""
    paths = [str(BENCHMARKS.parent), str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(filter(None, paths))
    return {"WAGMA_CUDA_LIBRARY": library, "STAND_IN_DELAY": "1", "PYTHONPATH": path, **more}


@pytest.mark.extra
@pytest.mark.long
@pytest.mark.launch
def test_it_measures_what_it_says(mpirun, tmp_path):
    """On a driver that has no function for tests, as a real one."""
    torch_device = pytest.importorskip("torch_device")
    stand_in.require()
    torch_device.build()
    mpirun(
        *(None, BENCHMARKS / "gpu.py", "--all", "--results", tmp_path, *SMALL),
        *("--torch-device", "torch_device", "--most-ranks", "2", "--tests", "bits and bfloat16"),
        timeout=240,
        env=environment(
            *(stand_in.plain_library(),),
            CUDA_MPS_PIPE_DIRECTORY=str(tmp_path),
            STAND_IN_IPC="1",
            STAND_IN_QUEUE=str(QUEUE),
        ),
    ).check()
    contents = json.loads((tmp_path / "gpu.json").read_text())
    assert contents["device"] == "stand-in 0" and contents["driver"] == "13.0"
    assert contents["machine"]["mpi"] and contents["machine"]["date"]
    parts = contents["results"]
    alone = parts["tests-1"]["without MPI"]
    assert (alone["exit status"], alone["failed"]) == (0, {})
    assert alone["passed"] >= 3 or alone["skipped"]
    times = {"to host", "to device", "on the device", "finite kernel", "call of one rank, numpy"}
    assert set(parts["copies-1"]["seconds"]) == times
    assert all(value > 0 for value in parts["copies-1"]["seconds"].values())
    (row,) = parts["staged-2"]
    assert row["bytes"] == 64 << 10
    blocks = {f"blocks of {mib} MiB" for mib in (1, 4, 16)}
    assert set(row["seconds"]) == {"numpy", "copies", *blocks}
    assert contents["preflight"]["collectives on MPI"].endswith("2 ranks have averaged")
    named = {f"2 ranks, 64 KiB, {each}: device ÷ (numpy + copies)" for each in blocks}
    named.add("2 ranks, 64 KiB: shared ÷ two copies on the device")
    bounds = {figure["figure"]: figure["bound"] for figure in contents["figures"]}
    assert {name for name, bound in bounds.items() if bound == 1.5} == named
    assert all(contents["ratios"][name]["median"] > 0 for name in named)
    assert parts["aware-2"]["aware"] is False
    assert parts["direct-2"]["shared"]["path"] == "direct"
    assert list(parts["direct-2"]["messages"]) == ["not measured"]
    cases = [f"{path}, device {how}" for path in PATHS for how in ("idle", "busy")]
    assert set(parts["passive-2"]) == {"numpy", *cases}
    assert all(each["calls"] >= 1 for each in parts["passive-2"].values())
    check_queue(parts["queue-2"])
    for path in PATHS:
        check_calls(parts["calls-2"][path], path)
    assert set(parts["step-2"]["seconds"]) == {"local step", "gloo", "WAGMA"}
    assert parts["memory-2"]["2 ranks, staged: memory on the device ÷ vector"] == 0
    assert parts["checkpoints-2"]["seconds"]["writing"] > 0
    values = {each["figure"]: each["value"] for each in contents["figures"]}
    differ = [value for name, value in values.items() if "numbers that differ" in name]
    assert len(differ) == 14 and not any(differ)
    assert parts["staged-2, MPS"]["not measured"].startswith("MPS is there already")
    assert set(contents["seconds of parts"]) == set(parts)
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]


def check_queue(measured):
    full = {"queue full", "queue full, call started"}
    cases = {f"{path}, {case}" for path in PATHS for case in {"queue empty", *full}}
    assert set(measured) == cases
    for name, each in measured.items():
        assert each["calls"] >= 1
        if not name.endswith("queue empty"):
            assert QUEUE - 8 < each["operations until the driver blocked"] <= QUEUE
            assert each["longest operation"] > 0.025


@pytest.mark.extra
@pytest.mark.long
@pytest.mark.launch
@pytest.mark.parametrize("part, name", [("tests", "staged"), ("direct-tests", "shared")])
def test_tests_of_four_ranks_pass_on_a_driver_that_can_only_what_a_real_one_can(
    mpirun, tmp_path, part, name
):
    library = stand_in.plain_library()
    mpirun(
        *(4, BENCHMARKS / "gpu.py", "--part", part, "--results", tmp_path),
        timeout=120,
        env=environment(library, TEST_CUDA_LIBRARY=library, STAND_IN_IPC="1", OMP_NUM_THREADS="1"),
    ).check()
    measured = json.loads((tmp_path / f"gpu-{part}-4.json").read_text())["results"]["measured"]
    assert (measured[name]["failed"], measured[name]["skipped"]) == ({}, {})
    assert measured[name]["passed"] > 15
    if part == "direct-tests":
        assert measured["messages"] == {"not measured": "MPI is not CUDA-aware"}


def check_calls(calls, path):
    assert calls.pop("functions that wait, in 5 calls") == {}
    assert {"idle", "allocating 1 MiB", "1024 fillings"} <= set(calls)
    for kind, first in (("CUDA", "cu"), ("MPI", "MPI_")):
        found = [each[kind] for each in calls.values() if each[kind]]
        # Staged, the progress thread calls no function of the driver.
        assert found or (kind, path) == ("CUDA", "staged")
        assert all(each["function"].startswith(first) for each in found)
        assert all(each["calls"] > 0 < each["seconds"] for each in found)


@pytest.mark.launch
@pytest.mark.parametrize("part", ["aware", "direct", "memory"])
def test_devices_that_average_are_measured(mpirun, tmp_path, part):
    (tmp_path / "opened.py").write_text(OPENED)
    mpirun(
        *(2, tmp_path / "opened.py", BENCHMARKS / "gpu.py", "--part", part, *SMALL),
        *("--results", tmp_path),
        timeout=60,
        env=environment(stand_in.require(), WAGMA_CUDA_AWARE="1"),
    ).check()
    contents = json.loads((tmp_path / f"gpu-{part}-2.json").read_text())
    measured = contents["results"]["measured"]
    if part == "aware":
        assert measured.pop("aware") is True
        assert measured.pop("reason") == "WAGMA_CUDA_AWARE=1"
        assert len(measured) == 4
        assert all(each["wrong"] is None for each in measured.values())
    elif part == "direct":
        assert measured["messages"]["path"] == "direct"
        (name,) = contents["ratios"]
        assert name == "2 ranks, 64 KiB: messages ÷ two copies on the device"
        assert set(measured["seconds"]) == {"copies", "messages", "staged"}
    else:
        taken = measured["2 ranks, direct: memory on the device ÷ vector"]
        assert taken >= 1 and taken == pytest.approx(contents["figures"][2]["value"])


@pytest.mark.slow
def test_without_a_gpu_it_says_so(mpirun, tmp_path):
    """And what else is missing, before anything is measured."""
    command = [BENCHMARKS / "gpu.py", "--all", "--results", tmp_path, "--most-ranks", "2"]
    env = environment(str(tmp_path / "none.so"), CC="no-compiler")
    ended = mpirun(None, *command, timeout=60, env=env)
    assert ended.returncode == 2
    assert ended.stderr.startswith("gpu.py: no GPU: ") and "none.so" in ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0] == "=== preflight"
    assert "  MISSING  C compiler: not on PATH; not measured: calls" in lines
    assert any(line.startswith("  MISSING  GPU: ") for line in lines)
    assert any(line.startswith("  MISSING  kernels: ") for line in lines)
    assert "  found    collectives on MPI: " in ended.stdout
    assert not list(tmp_path.iterdir())


# What fails, and what is not there


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gpu")


def test_a_part_that_fails_leaves_the_others_theirs(gpu, monkeypatch, tmp_path, capsys):
    @contextlib.contextmanager
    def no_mps():
        yield {}, "no MPS here"

    plan = [
        gpu.Job(*job) for job in (("copies", 1, 60), ("staged", 2, 60), ("passive", 2, 60, True))
    ]
    plan += [gpu.Job("direct-tests", 4, 60), gpu.Job("memory", 2, 60)]
    started = []

    def run_for(command, limit):
        part, results = command[-3], Path(command[-1])
        started.append(part)
        if part == "staged":
            gpu.gpu_parts.keep(ONE, argparse.Namespace(results=results), [{"bytes": 4}])
            return None, "ValueError: the last words\n=====\n= BAD TERMINATION OF ONE OF ..."
        contents = {"results": {"device": "X", "measured": {"ratio": 2.0}}}
        contents |= {"ratios": {}, "figures": [gpu.figure("ratio", 2.0, 1.5)]}
        ranks = command[command.index("-n") + 1]
        (results / f"gpu-{part}-{ranks}.json").write_text(json.dumps(contents))
        return 0, ""

    monkeypatch.setattr(gpu, "run_for", run_for)
    monkeypatch.setattr(gpu, "PLAN", plan)
    monkeypatch.setattr(gpu, "mps", no_mps)
    without_checks(gpu, monkeypatch)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--all", "--results", str(tmp_path)])
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    assert gpu.main() == 1
    assert started == ["copies", "staged", "direct-tests", "memory"]
    parts = json.loads((tmp_path / "gpu.json").read_text())["results"]
    assert parts == {
        "copies-1": {"ratio": 2.0},
        "staged-2": {
            "failed": "ValueError: the last words\n=====\n= BAD TERMINATION OF ONE OF ..."
            "\nno end after 60 s",
            "so far": [{"bytes": 4}],
        },
        "passive-2, MPS": {"not measured": "no MPS here"},
        "direct-tests-4": {"ratio": 2.0},
        "memory-2": {"ratio": 2.0},
    }
    table = capsys.readouterr().out.split("=== device X")[1]
    assert "2     1.5  MISSED: ratio" in table and "2  copies-1: ratio\n" in table
    assert "  passive-2, MPS: not measured: no MPS here\n" in table
    assert "  staged-2: failed: no end after 60 s: ValueError: the last words\n" in table


def without_checks(gpu, monkeypatch, *missing):
    """Let the preflight find everything but these parts' requirements, and open no context."""

    def look(checks, jobs):
        made = gpu.gpu_preflight.Check("torch", None, missing)
        return [gpu.gpu_preflight.Finding(made, "", "no torch here")]

    context = contextlib.nullcontext(argparse.Namespace(facts={"device": "X"}))
    monkeypatch.setattr(gpu.gpu_preflight, "Context", lambda: context)
    monkeypatch.setattr(gpu.gpu_preflight, "look", look)


def measured_by(gpu, tmp_path, *options, seconds_ago=0.0):
    """Return the `Measured` of a benchmark with these options, begun so long ago."""
    given = {"limit": gpu.LIMIT, "parts": None, "seconds": 15.0, "results": tmp_path}
    arguments = argparse.Namespace(**given, **dict(options))
    return gpu.Measured(arguments, time.monotonic() - seconds_ago)


@pytest.mark.parametrize(
    ("answer", "said"),
    [({}, "0"), ({"aware": False}, "0"), ({"aware": True}, "1"), ({"failed": "it ended"}, "0")],
)
def test_devices_average_in_tests_by_what_is_there(gpu, tmp_path, answer, said):
    def told(part):
        env = gpu.environment(gpu.Job(part, 4, 60), {"aware-2": answer}, None, tmp_path)
        return env.get("WAGMA_CUDA_AWARE")

    assert told("direct-tests") == said
    assert told("tests") == "0"
    # What ends an MPI is not tried again.
    assert told("passive") == ("0" if "failed" in answer else None)


def test_of_tests_that_do_not_end_those_that_have_are_named(gpu, monkeypatch, tmp_path):
    def run_for(command, limit):
        arguments = argparse.Namespace(results=Path(command[-1]), tests="")
        runs = gpu.gpu_tests.Runs(ONE, arguments)
        monkeypatch.setattr(gpu.gpu_tests, "run", begin)
        runs("staged", gpu.gpu_tests.STAGED)
        return None, "the last words"

    def begin(selected, mpi, more_names, found):
        found.passed, found.failed = ["a", "b"], {"c": "why"}
        found.pytest_runtest_logstart("d")

    monkeypatch.setattr(gpu, "run_for", run_for)
    with pytest.raises(gpu.Failed, match="the last words\nno end after 60 s") as raised:
        gpu.run(gpu.Job("tests", 4, 60), measured_by(gpu, tmp_path), None)
    outcomes = {"passed": 2, "failed": {"c": "why"}, "begun": "d"}
    assert raised.value.so_far == {"staged": outcomes}


def test_tests_that_cannot_begin_have_not_passed(gpu, monkeypatch):
    monkeypatch.setattr(pytest, "main", lambda *_, **__: pytest.ExitCode.USAGE_ERROR)
    tests = gpu.gpu_tests
    with pytest.raises(RuntimeError, match="pytest ended with exit status 4"):
        tests.run(tests.ALONE, False, "", tests.Found(lambda so_far: None))


def test_a_test_that_fails_is_a_failure(gpu, tmp_path):
    measured = measured_by(gpu, tmp_path)
    measured.figures = [gpu.figure("slow", 2.0, 1.5), gpu.figure("tests: failed", 0, 0)]
    assert not measured.has_failed
    measured.figures.append(gpu.figure("tests: failed", 1, 0))
    assert measured.has_failed


def test_what_parts_need_is_looked_for(gpu, monkeypatch, tmp_path):
    """And only they are not measured without it."""
    without_checks(gpu, monkeypatch, "step")
    plan = [gpu.Job("step", 2, 60), gpu.Job("calls", 2, 60)]
    findings = gpu.gpu_preflight.look([], plan)
    assert str(findings[0]) == "  MISSING  torch: no torch here; not measured: step"
    measured = measured_by(gpu, tmp_path)
    measured.findings = findings
    with pytest.raises(gpu.NotMeasured, match=r"^torch: no torch here$"):
        gpu.run(plan[0], measured, None)
    assert gpu.gpu_preflight.why_not(plan[1], findings) is None


def test_parts_are_chosen_with_those_that_they_depend_on(gpu):
    def planned(**options):
        return [job.name for job in gpu.planned(argparse.Namespace(**options))]

    assert planned(parts=["direct-tests"], most_ranks=4) == ["aware-2", "direct-tests-4"]
    assert planned(parts=["direct"], most_ranks=2) == ["direct-2", "direct-2, MPS"]
    assert len(planned(parts=None, most_ranks=4)) == len(gpu.PLAN)
    assert gpu.names_of("copies,step") == ["copies", "step"]
    with pytest.raises(argparse.ArgumentTypeError, match="no part 'steps': there are tests, "):
        gpu.names_of("copies,steps")


def test_one_context_is_open_until_the_end(gpu, monkeypatch):
    monkeypatch.setenv("WAGMA_CUDA_LIBRARY", stand_in.require())
    with gpu.gpu_preflight.Context() as context:
        assert context.said("GPU").startswith("stand-in 0, driver 13.0 (")
        assert context.facts["device"] == "stand-in 0"
        process = context._process
        assert process.poll() is None
    assert process.returncode == 0


def test_a_context_that_cannot_be_opened_says_why(gpu, monkeypatch):
    monkeypatch.setenv("WAGMA_CUDA_LIBRARY", stand_in.require())
    monkeypatch.setenv("STAND_IN_DEVICES", "0")
    with gpu.gpu_preflight.Context() as context:
        for name in ("GPU", "kernels"):
            with pytest.raises(gpu.gpu_preflight.Missing, match="CUDA_ERROR_NO_DEVICE"):
                context.said(name)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_work_is_calibrated_while_no_other_rank_works(gpu, rank):
    """Or ranks that share a device would take each other's work for their own."""
    log = []
    device = argparse.Namespace(
        stream=lambda: 1,
        allocate=lambda size: 2,
        fill=lambda *_: log.append("fill"),
        synchronize=lambda stream: log.append("wait"),
    )
    comm = argparse.Namespace(rank=rank, size=4, Barrier=lambda: log.append("barrier"))
    cuda_driver = importlib.import_module("cuda_driver")
    cuda_driver.Work(comm, device, 1024)
    measured = 2 * [*4 * ["fill"], "wait"]
    assert log == [*rank * ["barrier"], *measured, *(4 - rank) * ["barrier"]]


def test_what_a_killed_benchmark_has_written_is_whole(gpu, monkeypatch, tmp_path):
    path = tmp_path / "gpu.json"
    gpu.replace(path, {"first": 1})
    monkeypatch.setattr(gpu.gpu_parts.keep.__globals__["os"], "replace", lambda *_: None)
    gpu.replace(path, {"second": 2})  # killed before its end
    assert json.loads(path.read_text()) == {"first": 1}


def test_where_calls_are_counted_mpi_can_be_tried(gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("WAGMA_CUDA_LIBRARY", stand_in.require())
    env = gpu.environment(gpu.Job("calls", 2, 60), {}, None, tmp_path)
    code = """
from collectives.memory import probe
device = probe.Device(0)
event = device.hold(0.001)
device.synchronize()
assert device.has_ended(event)
device.close()
"""
    subprocess.run([sys.executable, "-c", code], env=os.environ | env, check=True)


def test_where_no_time_is_left_no_job_is_begun(gpu, tmp_path):
    """A part's own measuring takes 15 s; tests may be ended at any time."""
    measured = measured_by(gpu, tmp_path, seconds_ago=gpu.LIMIT - 20)
    with pytest.raises(gpu.NotMeasured, match=r"the others have taken 52\d s"):
        gpu.run(gpu.Job("copies", 1, 60), measured, None)
    gpu.check_time(gpu.Job("tests", 1, 60), measured)


def test_what_is_measured_without_mps_is_measured_with_it(gpu):
    """With 2 and 4 ranks, on each path."""
    for part in ("staged", "direct", "passive"):
        for ranks in (2, 4):
            jobs = [job for job in gpu.PLAN if (job.part, job.ranks) == (part, ranks)]
            assert sorted(job.under_mps for job in jobs) == [False, True]


def test_a_job_that_does_not_end_is_ended(gpu):
    loop = "import time; print('begun', flush=True); time.sleep(60)"
    for limit in (1.0, 30.0):  # the first is too short for a Python on a busy machine
        ended = gpu.run_for([sys.executable, "-c", loop], limit)
        if ended != (None, ""):
            break
    assert ended == (None, "begun\n")
    assert gpu.run_for([sys.executable, "-c", "raise SystemExit(3)"], 9.0) == (3, "")


def test_mps_is_started_tried_and_ended(gpu, monkeypatch, tmp_path):
    control, log = tmp_path / "nvidia-cuda-mps-control", tmp_path / "log"
    control.write_text(f'#!/bin/sh\necho "$@" >> {log}\n[ "$1" = -d ] || cat >> {log}\n')
    control.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setenv("WAGMA_CUDA_LIBRARY", stand_in.require())
    with gpu.mps() as (env, why_not):
        assert why_not is None
        assert Path(env["CUDA_MPS_PIPE_DIRECTORY"]).is_dir()
        assert log.read_text() == "-d\n"
    assert log.read_text() == "-d\n\nquit -t 5\n"
    assert not Path(env["CUDA_MPS_PIPE_DIRECTORY"]).exists()
    monkeypatch.setenv("WAGMA_CUDA_LIBRARY", "/nowhere/libcuda.so")
    with gpu.mps() as (_, why_not):
        assert why_not.startswith("MPS: ") and "/nowhere/libcuda.so" in why_not
    (tmp_path / "control").touch()
    monkeypatch.setattr("wagma.mps.DEFAULT", str(tmp_path))
    with gpu.mps() as (_, why_not):
        assert why_not.startswith("MPS is there already")
