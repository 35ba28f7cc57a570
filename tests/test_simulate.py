"""``wagma simulate`` from outside: its table, its files, and what it refuses."""

import json
import signal
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
from launch import Signal

from wagma import cli, simulate

pytestmark = pytest.mark.launch
COMMAND = ("-m", "wagma", "simulate", "--name", "mine")


def rows(text):
    lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
    return [line for line in lines if line[0].isdigit()]


def test_it_prints_a_table_and_leaves_all_of_it_in_files(mpirun, tmp_path):
    methods = ("allreduce", "ad-psgd", "wagma")
    options = ("--ranks", "8,16", "--steps", "20", "--imbalance", "cloud", "--group-size", "8")
    options += ("--algorithms", ",".join(methods))
    ended = mpirun(None, *COMMAND, *options, timeout=60, cwd=tmp_path, plots=True).check()
    assert ended.stderr == ""
    run = tmp_path / "runs" / "mine"
    record = json.loads((run / "simulation.json").read_text())
    assert record["settings"]["ranks"] == [8, 16]
    assert record["machine"]["injection"] == 10.2e9
    steps, machine = ended.stdout.splitlines()[:2]
    assert steps == "# 20 log-normal steps, 25,559,081 parameters of 4 bytes, imbalance cloud"
    assert machine.startswith("# aries: latency 0.9 µs, overhead 0.35 µs, gap 0.6 µs, a rank's")
    table = rows(ended.stdout)
    assert [line[:2] for line in table] == [
        [ranks, name] for ranks in ("8", "16") for name in methods
    ]
    for line in table:
        result = record["results"][line[1]][line[0] == "16"]
        assert result["ranks"] == int(line[0])
        assert line[2] == f"{result['wall_s']:.2f}"
        assert line[3] == f"{result['steps_per_s']:.2f}"
        assert line[5] == f"{result['idle_share']:.1%}"
        stale = line[1] == "wagma"
        assert bool(sum(result["staleness"])) == stale and len(line) == (10 if stale else 6)
        assert not stale or line[6] == f"{result['timely_share']:.1%}"
    assert (run / "simulation.png").exists() == (find_spec("matplotlib") is not None)


def test_a_staleness_without_effect_is_told_with_the_number_of_ranks(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    algorithms = "hop:staleness=4:max_gap=5,hop:staleness=4"
    assert cli.main(["simulate", "--ranks", "4", "--steps", "2", "--algorithms", algorithms]) == 0
    warned = [line for line in capfd.readouterr().err.splitlines() if "never makes" in line]
    assert len(warned) == 1
    assert "hop:staleness=4:max_gap=5, 4 ranks: staleness 4 never makes a rank wait" in warned[0]


def test_where_the_first_algorithm_makes_no_step_there_is_no_ratio():
    none, some = (
        SimpleNamespace(
            **{"ranks": 4, "wall": 0.5, "throughput": made, "idle_share": 0.25},
            **{"left_out_share": 0.0, "staleness": np.zeros(1, int)},
        )
        for made in (0.0, 8.0)
    )
    assert simulate.line("wagma", 9, some, none).split() == [
        "4",
        "wagma",
        "0.50",
        "8.00",
        "–",
        "25.0%",
    ]
    assert simulate.line("wagma", 9, some, some).split()[4] == "1.00"


def words(*options):
    """Return what the output says of the job and the machine that a command line asks for."""
    settings = cli.make_parser().parse_args(["simulate", *options])
    settings.check(settings)
    machine = simulate.machine_of(settings)
    return simulate.job_in_words(settings), simulate.machine_in_words(settings, machine)


def test_the_machine_and_the_steps_are_said_in_words_and_units():
    options = ("--step-times", "constant", "--slow-rank", "1:4", "--slow-rank", "0:2.5")
    options += ("--imbalance", "random", "--imbalance-scale", "0.5", "--parameters", "9")
    assert words(*options) == (
        "100 constant steps, 9 parameters of 4 bytes, imbalance random × 0.5, "
        "rank 1 takes 4 times as long, rank 0 takes 2.5 times as long",
        "aries: latency 0.9 µs, overhead 0.35 µs, gap 0.6 µs, a rank's messages 9.6 GB/s, "
        "a node's 10.2 GB/s, memory 10 GB/s, ranks per node 1",
    )
    options = ("--machine", "hdr", "--trace", "runs/mine", "--steps", "1", "--itemsize", "1")
    options += ("--set", "latency=0.5", "--set", "ranks_per_node=8", "--set", "byte_gap=0")
    assert words(*options) == (
        "1 recorded step, 25,559,081 parameters of 1 byte",
        "hdr with another latency, ranks_per_node, byte_gap: latency 500,000 µs, "
        "overhead 0.2 µs, gap 0.3 µs, a node's 24.5 GB/s, memory 10 GB/s, ranks per node 8",
    )
    all_else = ("--set", "staging=5e9", "--set", "response=1e-4")
    assert "response 100 µs" in words(*all_else)[1] and "staging 5 GB/s" in words(*all_else)[1]
    near = ("--set", "local_latency=2e-7", "--set", "local_byte_gap=1e-10")
    assert "latency within a node 0.2 µs" in words(*near)[1]
    assert "within a node 10 GB/s" in words(*near)[1]
    server = words("--dedicated-server", "--machine", "hdr")[1]
    assert server.endswith("ranks per node 1, the server on a further node")


def test_a_server_on_a_node_of_its_own_exchanges_messages_with_all_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    taken = []
    for options in ((), ("--dedicated-server",)):
        words = ("--algorithms", "parameter-server", "--set", "ranks_per_node=4", *options)
        command = ["simulate", "--ranks", "4", *words, "--name", f"run{len(taken)}"]
        assert cli.main([*command, "--steps", "3", "--runs-dir", "runs"]) == 0
        record = json.loads((tmp_path / f"runs/run{len(taken)}/simulation.json").read_text())
        taken.append(record["results"]["parameter-server"][0]["messages"])
    # Rank 0 sends its change, and gets the model, by messages as well.
    assert taken == [3 * 2 * 3 + 3, 3 * 2 * 4 + 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--trace", "gone"), "argument --trace: cannot read gone: No such file or directory"),
        (("--trace", "."), "argument --trace: . has no rank-*.jsonl: is it a run of wagma train?"),
        (("--sigma", "1e6"), "cannot simulate 4 ranks: step_times must be finite, 0 or more, and"),
        (
            ("--set", "memory=1e-300"),
            "cannot simulate 4 ranks: the simulated time of allreduce on 4",
        ),
        (("--ranks", "4,99999999999"), "cannot simulate 99999999999 ranks: Unable to allocate"),
        (
            ("--algorithms", "sgp:neighbors=3"),
            "cannot simulate 4 ranks: neighbors is 3, but can be at most 2: distances",
        ),
        (
            ("--algorithms", "parameter-server:backups=4"),
            "cannot simulate 4 ranks: backups is 4, but must be less than the number of ranks, 4",
        ),
        (
            ("--algorithms", "wagma", "--group-size", "1000"),
            "cannot simulate 4 ranks: group_size is 1000, more than the number of ranks, 4",
        ),
        (("--parameters", "9" * 25), "cannot simulate 4 ranks: Python int too large"),
        (
            ("--algorithms", "wagma,wagma:wire_dtype=bfloat16"),
            "argument --algorithms: wagma:wire_dtype=bfloat16: wire_dtype is not simulated without",
        ),
        (
            ("--algorithms", "partial-reduce:controller_only"),
            "argument --algorithms: partial-reduce:controller_only: controller_only is not simul",
        ),
        (("--set", "injection=0"), "argument --set: injection must be above 0, not 0"),
        (("--set", "ranks_per_node=1.5"), "argument --set: ranks_per_node must be an integer"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    try:
        status = cli.main([*COMMAND[2:], *options])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    said = capsys.readouterr().err
    assert said.startswith(f"wagma: error: {message}")
    assert said.count("\n") == 1


def test_a_job_of_several_ranks_is_refused_once(mpirun, tmp_path):
    ended = mpirun(2, *COMMAND, timeout=60, cwd=tmp_path)
    assert ended.returncode == 2
    message = "wagma: error: this command is one process, not a job of 2 "
    assert ended.complaints.startswith(message)
    assert ended.complaints.endswith("start it without a launcher\n")
    assert ended.complaints.count("\n") == 1


def test_ctrl_c_ends_it_and_leaves_what_there_is(mpirun, tmp_path):
    options = ("--ranks", "4,4096", "--steps", "800", "--algorithms", "allreduce,wagma")
    # What is simulated after this row has no Python in it.
    at = Signal(signal.SIGINT, "   4096 allreduce")
    ended = mpirun(None, *COMMAND, *options, timeout=60, cwd=tmp_path, signals=[at])
    assert ended.returncode == 130
    assert ended.stderr == "wagma: stopped: partial results are in runs/mine\n"
    results = json.loads((tmp_path / "runs" / "mine" / "simulation.json").read_text())["results"]
    assert [each["ranks"] for each in results["wagma"]] == [4]
    assert [each["ranks"] for each in results["allreduce"]] == [4, 4096]


def test_it_loads_neither_mpi_nor_torch(mpirun, tmp_path):
    program = f"""
import sys
from wagma import cli
status = cli.main({[*COMMAND[2:], "--ranks", "4"]})
loaded = {{"mpi4py.MPI", "torch"}} & set(sys.modules)
assert not loaded, loaded
sys.exit(status)
"""
    mpirun(None, "-c", program, timeout=60, cwd=tmp_path).check()
