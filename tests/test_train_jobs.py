"""`wagma train` with other tasks, and how it ends otherwise."""

import json
import re
import signal

import launch
import pytest
import torch
from launch import Signal
from squares import squares
from training import STATUSES, TIMEOUT, metrics, said, train, train_several

pytestmark = pytest.mark.launch

# --- ranks with fewer steps than others, and with none


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of three runs of one job of three ranks, and the job's lines."""
    folder = tmp_path_factory.mktemp("runs")
    squares(folder / "squares")
    skipping = ["--steps", 60, "--step-time", 5, "--slow-rank", "2:20", "--evaluate-every", 20]
    skipping += ["--algorithm", "hop:backup=1:max_skip=10"]
    controlled = ["--algorithm", "partial-reduce", "--controller-only", "--controller-rank", "1"]
    controlled += ["--steps", "12", "--evaluate-every", "6"]
    images = ["--images", folder / "squares", "--image-size", 16, "--steps", 30]
    images += ["--batch-size", 8, "--algorithm", "wagma:wait=group"]
    trained = {"skipping": skipping, "controlled": controlled, "images": images}
    return folder, said(train_several(folder, trained, ranks=3, plots=True).check())


@pytest.fixture
def folder(runs):
    return runs[0]


def test_a_rank_that_skips_iterations_ends_with_the_others_after_fewer_steps(folder):
    """Rank 2 is behind the others, and never past them, so these skip nothing."""
    summary = json.loads((folder / "skipping" / "summary.json").read_text())
    steps, skipped = summary["steps_of_rank"], summary["skipped_of_rank"]
    # One of the others skips, too, where it is held up.
    assert max(steps[:2]) > 40 > steps[2]
    assert [sum(both) for both in zip(steps, skipped)] == [60, 60, 60]
    assert len(metrics(folder / "skipping", 2)) == steps[2]
    assert len(summary["evaluations"]) == 3
    assert summary["bound_over_wall"] > 0


# --- other tasks

SCRIPT = """
import logging, sys, warnings
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.modules["matplotlib"] = None


def model():
    return nn.Linear(4, 1)


def data(rank, size, batch_size, seed):
    warnings.warn(f"one warning of rank {rank}")
    logging.getLogger("mine").error("an error of rank %d", rank)
    inputs = torch.randn(120, 4, generator=torch.Generator().manual_seed(seed))
    targets = inputs.sum(1, keepdim=True)
    mine = TensorDataset(inputs[20 + rank :: size], targets[20 + rank :: size])
    return DataLoader(mine, batch_size, shuffle=True), [(inputs[:20], targets[:20])]


def loss(model, batch):
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)
"""


def test_a_script_is_trained_and_what_its_ranks_say_is_in_their_logs(tmp_path):
    script = tmp_path / "my_task.py"
    script.write_text(SCRIPT)
    options = [
        "--steps",
        60,
        "--batch-size",
        16,
        "--lr",
        0.1,
        "--momentum",
        0,
        "--algorithm",
        "wagma:wait=group",
    ]
    options += ["--script", script, "--log-level", "info"]
    ended = train(tmp_path, "script", *options, ranks=2, plots=True).check()
    outcome = said(ended)[-2]
    assert re.match(r"test loss [\d.e-]+, wall time ", outcome)
    run = tmp_path / "script"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["loss"] < 0.1  # the targets' variance is 4
    assert json.loads((run / "config.json").read_text())["script"] == str(script)
    # A rank's 50 pairs are three batches of 16 and one of 2, over and over.
    assert [one["samples"] for one in metrics(run, 1)[:8]] == [16, 16, 16, 2] * 2
    assert not list(run.glob("*.png"))
    assert ended.stderr.count("wagma.plots: warning: no loss.png and time.png: matplotlib is") == 1
    assert ended.stderr.count("one warning of rank 0") == 1
    assert ended.stderr.count("mine: error: an error of rank 0\n") == 1
    assert "INFO" not in ended.stderr and "wagma.train: info: made 60 steps" in ended.stderr
    assert "rank 1" not in ended.stderr
    log = (run / "rank-0001.log").read_text()
    assert "one warning of rank 1" in log
    assert "ERROR mine: an error of rank 1\n" in log


def test_folders_of_images_are_learnt(runs):
    folder, lines = runs
    assert re.match("test accuracy [0-9.]+%, wall time ", lines[-2])
    run = folder / "images"
    assert json.loads((run / "summary.json").read_text())["accuracy"] >= 0.9
    assert torch.load(run / "model.pt")["14.weight"].shape == (3, 128)


def test_a_job_of_one_trains_and_names_its_run_by_the_time(mpirun, tmp_path):
    flags = ["--steps", "30", "--imbalance", "cloud", "--imbalance-scale", "0.01"]
    arguments = ["-m", "wagma", "train", *flags, "--runs-dir", tmp_path]
    ended = mpirun(1, *arguments, timeout=TIMEOUT, forked=True).check()
    assert ended.stdout.count("training on 1 rank: start more of them with mpiexec") == 1
    (run,) = tmp_path.iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", run.name)
    assert [one["group"] for one in metrics(run, 0)] == [[0]] * 30
    assert (run / "model.pt").exists()


def test_a_rank_may_have_the_controller_and_no_steps(folder):
    run = folder / "controlled"
    assert [len(metrics(run, rank)) for rank in range(3)] == [12, 0, 12]
    assert {tuple(one["group"]) for one in metrics(run, 0)} == {(0, 2)}
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps_of_rank"] == [12, 0, 12]
    assert [one["step"] for one in summary["evaluations"]] == [6, 12]
    assert summary["rho"] < 1e-6


def test_the_progress_is_that_of_the_first_rank_that_makes_steps(tmp_path):
    only = ["--algorithm", "partial-reduce", "--controller-only", "--steps", 12]
    lines = said(train(tmp_path, "only", *only, ranks=3).check())
    assert sum(line.startswith("step ") for line in lines) == 12
    assert any(line.startswith("step 12/12 ") for line in lines)


# --- how it ends otherwise


def test_an_exception_on_one_rank_ends_the_job_with_its_traceback(mpirun, tmp_path):
    script = tmp_path / "my_task.py"
    script.write_text(SCRIPT + FAILING)
    flags = ["--runs-dir", tmp_path / "runs", "--steps", "100000", "--step-time", "5"]
    ended = mpirun(
        2, "-m", "wagma", "train", *flags, "--script", script, timeout=TIMEOUT, forked=True
    )
    assert ended.returncode == 1
    assert ended.left == ()
    assert ended.stderr.count("Traceback") == 1
    assert ended.stderr.count("\nRuntimeError: no batch fits\n") == 1
    lines = [line for line in ended.stderr.splitlines() if line.startswith("wagma: rank ")]
    told = "rank 1 failed, so only close() is allowed here: RuntimeError: no batch fits"
    assert sorted(lines) == [f"wagma: rank 0 of 2: {told}", "wagma: rank 1 of 2 failed:"]
    after = ended.stderr.partition("Traceback")[2]
    frames = [line for line in after.splitlines() if line.startswith("  ")]
    assert re.fullmatch(r"  \[… \d+ frames of wagma: --traceback shows them\]", frames[0])
    assert frames[1].startswith(f'  File "{script}", line ')
    assert frames[2:] == ['    raise RuntimeError("no batch fits")']


FAILING = """
calls = 0

def loss(model, batch):
    global calls
    calls += 1
    if (calls, MPI.COMM_WORLD.rank) == (8, 1):
        raise RuntimeError("no batch fits")
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)

from mpi4py import MPI
from wagma import job

job.PATIENCE[job.OWN] = 20.0  # a rank may be held up
"""


def test_a_loss_that_no_rank_has_is_an_error_unless_it_is_allowed(mpirun, tmp_path):
    """All files are written, without the NaN that JSON does not know."""
    commands = {
        "error": ["train"],
        "allowed": ["train", "--allow-nan"],
        "compared": ["compare", "--algorithms", "allreduce,wagma"],
    }
    for name, words in commands.items():
        script = tmp_path / f"{name}.py"  # one process imports each name once
        script.write_text(SCRIPT + NOT_A_NUMBER)
        words += ["--runs-dir", str(tmp_path / "runs"), "--name", name, "--steps", "3"]
        words += ["--script", str(script)]
    commands = list(commands.values())
    ended = mpirun(2, "-c", STATUSES, json.dumps(commands), timeout=TIMEOUT, forked=True).check()
    statuses = [line for line in ended.stdout.splitlines() if line.startswith("statuses")]
    assert statuses == ["statuses [1, 0, 1]"] * 2
    since = "since step 1 the loss of no rank is finite: use a lower --lr, or --allow-nan"
    errors = [line for line in ended.complaints.splitlines() if line.startswith("wagma: error")]
    labels = "wagma", "allreduce", "wagma"
    assert errors == [f"wagma: error: {label}: {since}" for label in labels]

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    files = [*(tmp_path / "runs").rglob("*.json"), *(tmp_path / "runs").rglob("*.jsonl")]
    assert len(files) == 4 * 4 + 1  # of each of four runs: two files, and one of each rank
    for file in files:
        text = file.read_text()
        for each in text.splitlines() if file.suffix == ".jsonl" else [text]:
            json.loads(each, parse_constant=refuse)
    assert json.loads((tmp_path / "runs/allowed/summary.json").read_text())["loss"] is None


NOT_A_NUMBER = """
def loss(model, batch):
    inputs, targets = batch
    return float("nan") * nn.functional.mse_loss(model(inputs), targets)
"""


def test_an_image_that_cannot_be_decoded_ends_the_job_in_one_line(mpirun, tmp_path):
    for name in ("train", "test"):
        squares(tmp_path / name)
    broken = tmp_path / "train" / "green" / "3.png"
    broken.write_bytes(broken.read_bytes()[:100])
    flags = ["--images", ".", "--batch-size", "1", "--steps", "1000", "--step-time", "5"]
    ended = mpirun(2, "-m", "wagma", "train", *flags, timeout=TIMEOUT, cwd=tmp_path, forked=True)
    assert ended.returncode == 2
    cannot = r"wagma: error: rank \d: cannot read the image train/green/3.png: .*\n"
    assert re.fullmatch(cannot, ended.complaints)


@pytest.mark.parametrize(
    ("number", "to", "status", "algorithm"),
    [
        (signal.SIGINT, "launcher", 130, "wagma"),
        (signal.SIGUSR1, "ranks", 138, "allreduce"),
        (signal.SIGTERM, 1, 143, "d-psgd"),
    ],
)
def test_a_signal_ends_all_ranks_with_one_line(mpirun, tmp_path, number, to, status, algorithm):
    flags = ["--steps", "500", "--step-time", "10", "--name", "stopped", "--algorithm", algorithm]
    ended = mpirun(
        *(2, "-m", "wagma", "train", "--runs-dir", tmp_path, *flags),
        timeout=TIMEOUT,
        forked=True,
        # Batch systems send theirs twice.
        signals=[Signal(number, "step 50/500", to), *[Signal(number, 0, to)] * (to == "ranks")],
    )
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "stopped" / "summary.json").exists()
    if to == "launcher" and launch.is_open_mpi():
        assert ended.returncode == 1
        return
    assert ended.returncode == status
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("wagma: ")]
    where = " on rank 1" if to == 1 else r"( on rank \d)?"
    assert re.match(f"wagma: stopped by {number.name}{where} after ", line)
    assert line.endswith(f" steps: the average of the current models is in {tmp_path / 'stopped'}")
    assert len(torch.load(tmp_path / "stopped" / "model.pt")) > 4
    for rank in range(2):
        assert 40 <= len(metrics(tmp_path / "stopped", rank)) < 500


PATIENT = """
import signal, time

def model():
    print("setting up", flush=True)
    deadline = time.monotonic() + 30
    while not signal.getsignal(signal.SIGTERM).__self__.received:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return nn.Linear(4, 1)
"""


def test_a_signal_while_the_job_sets_itself_up_ends_it_too(mpirun, tmp_path):
    script = tmp_path / "my_task.py"
    script.write_text(SCRIPT + PATIENT)
    ended = mpirun(
        *(2, "-m", "wagma", "train", "--runs-dir", tmp_path, "--script", script),
        timeout=TIMEOUT,
        forked=True,
        signals=[Signal(signal.SIGTERM, "setting up", "launcher")],
    )
    assert "Traceback" not in ended.stderr
    if launch.is_open_mpi():
        assert ended.returncode == 1
        return
    assert ended.returncode == 143
    assert "wagma: stopped by SIGTERM after 0 steps" in ended.stderr
