"""``wagma svm`` from outside: its table and files, on ranks and on simulated nodes."""

import json
import re
import shutil
import signal
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
from launch import Signal
from training import STATUSES

from wagma import cli, svm
from wagma.wpsgd import weights
from wagma.wpsgd.methods import METHODS

pytestmark = pytest.mark.launch
COMMAND = ("-m", "wagma", "svm", "--name", "mine")
# Samples on both sides of a line, with a little of a third feature.
PAIRS = [(a, b) for a in range(1, 9) for b in range(1, 9) if a != b]
LINES = [f"{int(a > b)} 1:{a / 10} 2:{b / 10} 3:0.01" for a, b in PAIRS]
NO_MPI = """
import sys
from wagma import cli

status = cli.main(sys.argv[1:])
loaded = {"mpi4py.MPI", "torch"} & set(sys.modules)
assert not loaded, loaded
sys.exit(status)
"""


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "some.svm"
    path.write_text("\n".join(LINES) + "\n")
    return path


def outcome(tmp_path, ended, plots=True):
    """Return the printed rows and the figures of a run, which go together."""
    assert ended.stderr == ""
    run = tmp_path / "runs" / "mine"
    record = json.loads((run / "svm.json").read_text())
    rows = [line.split() for line in ended.stdout.splitlines() if line.split()[0] in METHODS]
    assert [row[0] for row in rows] == list(record["results"])
    for row in rows:
        result = record["results"][row[0]]
        samples, _, objective, _ = result["points"][-1]
        assert row[1] == f"{samples:,.0f}" and row[3] == f"{objective:.5g}"
        assert row[4] == f"{result['accuracy']:.2%}"
        assert np.isfinite(np.load(run / f"{row[0]}.npz")["model"]).all()
    assert (run / "svm.png").exists() == (plots and find_spec("matplotlib") is not None)
    return record


def test_simulated_nodes_train_by_all_methods_without_mpi_and_torch(mpirun, tmp_path, data):
    options = ("--cluster", "1,1,0.5", "--method", ",".join(METHODS), "--samples", "2000")
    options += ("--data", data, "--evaluate-every", "1000", "--seeds", "2", "--start", "1")
    options += ("--check", "paper")
    words = ("-c", NO_MPI, *COMMAND[2:], *options)
    ended = mpirun(None, *words, timeout=60, cwd=tmp_path, plots=True).check()
    record = outcome(tmp_path, ended)
    assert record["settings"]["cluster"] == [1, 1, 0.5]
    for name, result in record["results"].items():
        assert result["accuracy"] >= 0.9
        assert [len(run) for run in result["runs"]] == [2, 2]
        assert result["points"][0] == np.mean([run[0] for run in result["runs"]], 0).tolist()
        assert (result["abandoned"] > 0) == METHODS[name].delayed
        assert f"{name:<14}" in ended.stdout
    late = record["results"]["delay"]
    share = late["abandoned"] / (late["applied"] + late["abandoned"])
    assert f"{share:.1%} abandoned" in ended.stdout
    assert late["longest_delay"] == 1 and len(late["updates_by_delay"]) == 2
    once, twice = (100 * n / sum(late["updates_by_delay"]) for n in late["updates_by_delay"])
    assert f"late by 0: {once:.1f}%, 1: {twice:.1f}%, more: 0.0%," in ended.stdout
    assert record["results"]["wp"]["points"][-1][1] == pytest.approx(0.02, rel=0.1)
    shown = r"^sample (\d+)/28000  objective \d+\.\d{4}  [\d,]+ samples/s$"
    assert re.findall(shown, ended.stdout, re.MULTILINE)[-1] == "28000"


def test_ranks_train_at_their_own_speeds(mpirun, tmp_path, data):
    options = ("--slow-rank", "1:0.125", "--sample-time", "100", "--data", data)
    options += ("--method", "wp,sequential,delay-wp", "--samples", "1000", "--start", "1")
    options += ("--evaluate-every", "500", "--span", "100")
    ended = mpirun(3, *COMMAND, *options, timeout=60, cwd=tmp_path, plots=True).check()
    record = outcome(tmp_path, ended)
    for result in record["results"].values():
        assert [point[0] for point in result["points"]] == [500, 1000]
        assert result["accuracy"] >= 0.9
    applied = {name: result["applied"] for name, result in record["results"].items()}
    assert applied["sequential"] == 1000
    assert 1000 < applied["wp"] < 3000
    assert record["settings"]["slow_rank"] == {"1": 8.0}


LEVEL = """
import sys
import mpi4py

mpi4py.rc.thread_level = sys.argv.pop(1)
from mpi4py import MPI
from wagma import cli

assert MPI.Query_thread() == getattr(MPI, f"THREAD_{mpi4py.rc.thread_level.upper()}")
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("level", ["serialized", "funneled"])
def test_it_needs_no_more_of_mpi_than_one_thread_that_calls_it(mpirun, tmp_path, data, level):
    methods = "delay-wp,minibatch,sequential"
    options = ("--data", data, "--method", methods, "--samples", "300", "--start", "1")
    options += ("--span", "100", "--evaluate-every", "150")
    words = ("-c", LEVEL, level, *COMMAND[2:], *options)
    ended = mpirun(2, *words, timeout=60, cwd=tmp_path, env={"WAGMA_ENGINE": "adaptive"}).check()
    record = outcome(tmp_path, ended, plots=False)
    assert ",".join(record["results"]) == methods
    late = record["results"]["delay-wp"]
    assert sum(late["updates_by_delay"]) == late["applied"] >= 300


def test_mistakes_are_one_line(mpirun, tmp_path):
    (tmp_path / "bad.svm").write_text("1 1:1\n0 1\n")
    messages = {
        ("--slow-rank", "2:2"): "argument --slow-rank: no rank 2 in a job of 2 ranks",
        ("--data", "bad.svm"): "bad.svm, line 2 is malformed: '0 1'",
    }
    commands = [[*COMMAND[2:], *options] for options in messages]
    ended = mpirun(2, "-c", STATUSES, json.dumps(commands), timeout=60, cwd=tmp_path).check()
    assert ended.stdout.splitlines() == 2 * ["statuses [2, 2]"]
    for line, message in zip(ended.complaints.splitlines(), messages.values(), strict=True):
        assert line.startswith(f"wagma: error: {message}")
    assert not (tmp_path / "runs").exists()


PROGRAM = """
import sys
from wagma import cli, svm
from wagma.wpsgd import training

def run(*arguments):
    for count, point in enumerate(training.run(*arguments)):
        if count == 2:
            print("wagma is up", flush=True)
        yield point

svm.run = run
sys.exit(cli.main(sys.argv[1:]))
"""


def test_ctrl_c_ends_it_and_leaves_what_there_is(mpirun, tmp_path, data):
    options = ("--data", data, "--samples", "100000000", "--evaluate-every", "1000")
    options += ("--method", "wp,direct", "--sample-time", "20")
    at = Signal(signal.SIGINT, "wagma is up", to="ranks")
    words = ("-c", PROGRAM, *COMMAND[2:], *options)
    ended = mpirun(2, *words, timeout=60, cwd=tmp_path, signals=[at])
    assert ended.returncode == 130
    assert ended.complaints == "wagma: stopped: partial results are in runs/mine\n"
    results = json.loads((tmp_path / "runs" / "mine" / "svm.json").read_text())["results"]
    assert list(results) == ["wp"] and len(results["wp"]["points"]) >= 3
    assert (tmp_path / "runs" / "mine" / "wp.npz").exists()


def test_a_run_that_was_stopped_before_its_first_step_has_no_outcome():
    closed = []
    team = SimpleNamespace(stopped=True, close=lambda: closed.append(True))
    settings = SimpleNamespace(
        samples=10, methods=["wp", "direct"], seeds=1, seed=0, span=5, every=5
    )
    assert svm.train_all(settings, lambda name, seed: team, None, rank=1) == {}
    assert closed == [True]


ASLEEP = """
import sys
from wagma import cli
from wagma.wpsgd.ranks import Ranks

def announced(advance):
    def announce(self, samples):
        if self._comm.rank == 0:
            print("wagma is up", flush=True)
        advance(self, samples)

    return announce

Ranks.advance = announced(Ranks.advance)
Ranks.advance_together = announced(Ranks.advance_together)
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("method", "to"), [("simuparallel", "ranks"), ("delay", 0), ("minibatch", 0)]
)
def test_sigterm_ends_it_in_the_middle_of_a_sample_s_sleep(mpirun, tmp_path, data, method, to):
    options = ("--data", data, "--samples", "100000", "--method", method, "--sample-time", "5000")
    words = ("-c", ASLEEP, *COMMAND[2:], *options, "--slow-rank", "1:1e9")
    at = Signal(signal.SIGTERM, "wagma is up", to=to)
    ended = mpirun(2, *words, timeout=100, cwd=tmp_path, signals=[at])
    assert ended.returncode == 143
    assert ended.complaints == "wagma: stopped: partial results are in runs/mine\n"


def test_r_is_fitted_before_the_run_unless_it_is_given(tmp_path, monkeypatch, capsys, data):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # plots take longer
    found = {}
    for options in ((), ("--no-fit-contraction",), ("--rate", "0.5")):
        words = ("--cluster", "1,0.5", "--data", str(data), "--samples", "20000", "--start", "100")
        assert cli.main([*COMMAND[2:], *words, *options]) == 0
        printed = capsys.readouterr().out
        record = json.loads((tmp_path / "runs" / "mine" / "svm.json").read_text())
        shutil.rmtree(tmp_path / "runs")
        contraction, result = record["contraction"], record["results"]["wp"]
        found[options[:1]] = contraction["r"]
        assert f"r: 1 - {1 - contraction['r']:.3g}, from {contraction['from']}" in printed
        assert result["T"] == [[0, 10_000]] and result["consumed"] == [[20_000, 10_000]]
        assert result["q"] == [weights([0, 10_000], contraction["r"]).tolist()]
        assert record["columns"] == ["samples", "seconds", "objective", "bound_ratio"]
        assert record["settings"]["links"] == [1, 1]
    assert found[("--rate",)] == 0.5
    assert found[("--no-fit-contraction",)] == pytest.approx(0.9999, abs=1e-12)
    # Far from its minimum the objective is the square of the model's norm.
    assert 1 - found[()] == pytest.approx(2e-4, rel=0.05)
