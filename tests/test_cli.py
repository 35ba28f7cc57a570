"""The command line: what it refuses, in how many words, and what it loads before that."""

import json
import os
import pty
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pages
import pytest
from training import STATUSES

import collectives
import wagma
from collectives import agreement
from wagma import cli, job, logs, progress
from wagma.commands.preparation import check_ranks
from wagma.methods import METHODS, REFERENCES
from wagma.methods.declarations import SHARED

MISTAKES = {
    "": "the following arguments are required: COMMAND",
    "fly": "argument COMMAND: invalid choice: 'fly'",
    "train --fly": "unrecognized arguments: --fly (see wagma train --help)",
    "train --step 3": "unrecognized arguments: --step 3, did you mean --steps? (see wagma train -",
    "compare --sync_period=3": "unrecognized arguments: --sync_period=3, did you mean "
    "--sync-period? (see wagma compare --help)",
    "simulate 3 --rank 3": "unrecognized arguments: 3 --rank 3, did you mean --ranks? (see wagma s",
    "train --steps": "argument --steps: expected one argument",
    "train --steps 0": "argument --steps: must be an integer of at least 1, not '0'",
    "train --steps 1e3": "argument --steps: must be an integer of at least 1, not '1e3'",
    "train --batch-size -1": "argument --batch-size: must be an integer of at least 1, not '-1'",
    "train --lr -1": "argument --lr: must be a number above 0, not '-1'",
    "train --lr fast": "argument --lr: must be a number above 0, not 'fast'",
    "train --lr nan": "argument --lr: must be a number above 0, not 'nan'",
    "train --momentum 1": "argument --momentum: must be a number of at least 0 and below 1, not "
    "'1'",
    "train --optimizer adam": "argument --optimizer: invalid choice: 'adam'",
    "train --optimizer adamw --momentum 0.5": "argument --momentum: not allowed with argument "
    "--optimizer adamw",
    "train --weight-decay -1": "argument --weight-decay: must be a number of at least 0, not '-1'",
    "train --clip-norm 0": "argument --clip-norm: must be a number above 0, not '0'",
    "train --accumulate 0": "argument --accumulate: must be an integer of at least 1, not '0'",
    "train --algorithm allreduce:compute_limit=0 --accumulate 2": "argument --algorithm: allreduce:"
    "compute_limit=0: compute_limit must be a number above 0, not '0'",
    "train --algorithm allreduce:compute_limit=1": "argument --accumulate: allreduce:compute_limit="
    "1 needs 2 or more batches per step",
    "compare --algorithms allreduce:compute_limit=1": "argument --accumulate: allreduce:compute_",
    "simulate --algorithms allreduce:compute_limit=1": "argument --accumulate: allreduce:compute_",
    "simulate --accumulate 2": "argument --accumulate: not allowed without --train",
    "train --checkpoint-every 0": "argument --checkpoint-every: must be an integer of at least 1",
    "train --checkpoint-every 5d": "argument --checkpoint-every: must be a number above 0, with s, "
    "m or h for its unit, not '5d'",
    "train --checkpoint-keep 0": "argument --checkpoint-keep: must be an integer of at least 1",
    "train --time-limit 0": "argument --time-limit: must be a number above 0, with s, m or h",
    "train --requeue 256": "argument --requeue: must be from 1 to 255, not 256",
    "train --resume runs/a --name b": "argument --name: not allowed with argument --resume DIR",
    "train --shards mine": "argument --shards: invalid choice: 'mine'",
    "train --seed -1": "argument --seed: must be an integer of at least 0, not '-1'",
    "train --group-size 0": "argument --group-size: must be an integer of at least 1, not '0'",
    "train --sync-period 0": "argument --sync-period: must be an integer of at least 1, not '0'",
    "train --algorithm wagma:wait=all": "argument --algorithm: wagma:wait=all: wait must be nobody "
    "or group, not 'all'",
    "train --algorithm wagma:late": "argument --algorithm: wagma:late: late needs a value: "
    "late=paper|conserving",
    "train --algorithm wagma:overlap=maybe": "argument --algorithm: wagma:overlap=maybe: overlap "
    "must be true or false, not 'maybe'",
    "train --algorithm sgp:neighbors=2:neighbors=1": "argument --algorithm: sgp:neighbors=2:"
    "neighbors=1: neighbors is given twice",
    "train --late paper": "argument --late: belongs to an algorithm: write --algorithm "
    "wagma:late=paper|conserving",
    "train --overlap --seed 3": "argument --overlap: belongs to an algorithm: write --algorithm "
    "wagma:overlap (see wagma train --help)",
    "compare --mode=asp": "argument --mode: belongs to an algorithm: write --algorithms "
    "parameter-server:mode=bsp|backup|asp|hete|ringmaster|async-local",
    "simulate --neighbors 2": "argument --neighbors: belongs to an algorithm: write --algorithms "
    "sgp:neighbors=N",
    "train --step-time inf": "argument --step-time: must be a number of at least 0, not 'inf'",
    "train --imbalance sun": "argument --imbalance: invalid choice: 'sun'",
    "train --imbalance-scale -1": "argument --imbalance-scale: must be a number of at least 0",
    "train --slow-rank 3": "argument --slow-rank: must be R:FACTOR",
    "train --slow-rank 3:0.5": "argument --slow-rank: must be R:FACTOR",
    "train --slow-rank x:2": "argument --slow-rank: must be R:FACTOR",
    "train --slow-rank 3:2 --slow-rank 3:4": "argument --slow-rank: rank 3 is given twice",
    "train --name a/b": "argument --name: must be the name of one directory, not 'a/b'",
    "train --name ..": "argument --name: must be the name of one directory, not '..'",
    "train --image-size 7": "argument --image-size: must be an integer of at least 8, not '7'",
    "train --image-size 64": "argument --image-size: not allowed with argument --task digits",
    "train --task chess": "argument --task: invalid choice: 'chess'",
    "train --script a.py --task digits": "argument --task: not allowed with argument --script",
    "train --script a.py --packing": "argument --packing: not allowed with argument --script",
    "train --task language --images b": "argument --images: not allowed with argument --task lang",
    "train --task language --momentum 0.5": "argument --momentum: not allowed with argument "
    "--optimizer adamw",
    "train --task images --augment-with torchvision": "argument --augment-with: not allowed "
    "without argument --augment",
    "train --task digits --augment-with own": "argument --augment-with: not allowed with argument "
    "--task digits",
    "train --task translation --text a": "argument --text: translation needs two files, which are "
    "each other's translation, not 1",
    "train --task translation --batch-by steps": "argument --batch-by: translation has sentences "
    "and tokens, not steps",
    "compare --task control --shards iid": "argument --shards: not allowed with argument --task co",
    "simulate --train --task control --environment-time 4": "argument --environment-time: not "
    "allowed in simulated time",
    "train --environment-time 3": "argument --environment-time: not allowed with argument --task "
    "digits",
    "simulate --task language": "argument --task: not allowed without --train",
    "train --script a.py --images b": "argument --images: not allowed with argument --script",
    "train --script a.py --shards iid": "argument --shards: not allowed with argument --script",
    "train --dirichlet-alpha 1": "argument --dirichlet-alpha: not allowed without argument "
    "--shards dirichlet",
    "train --shards dirichlet --dirichlet-alpha 0": "argument --dirichlet-alpha: must be a number "
    "from 0.001 to 1000, not '0'",
    "train --algorithm hope": "argument --algorithm: must be one of wagma, allreduce, ",
    "train --algorithm allreduce --group-size 2": "argument --group-size: not allowed with "
    "argument --algorithm allreduce",
    "train --sync-period 10 --algorithm allreduce": "argument --sync-period: not allowed with "
    "argument --algorithm allreduce",
    "train --algorithm local-sgd:overlap": "argument --algorithm: local-sgd:overlap: local-sgd has "
    "no option 'overlap': it has sync_period, trigger, average_state, correction, "
    "weights, contraction, wire_dtype, transport",
    "train --evaluate-every 0": "argument --evaluate-every: must be an integer of at least 1",
    "train --algorithm ddp": "argument --algorithm: must be one of wagma, allreduce, ",
    "compare --algorithms hope": "argument --algorithms: must be one of wagma, allreduce, ",
    "compare --algorithms wagma,wagma": "argument --algorithms: repeats a value",
    "compare --algorithms wagma:speed=3": "argument --algorithms: wagma:speed=3: wagma has no "
    "option 'speed': it has group_size, ",
    "compare --algorithms allreduce:group-size=2": "argument --algorithms: allreduce:group-size=2: "
    "allreduce has no option 'group-size': it has compute_limit, transport",
    "compare --algorithms ddp:wait=group": "argument --algorithms: ddp:wait=group: ddp has no "
    "option 'wait': it has none",
    "compare --algorithms wagma:wait=all": "argument --algorithms: wagma:wait=all: wait must be ",
    "compare --algorithms wagma:group_size": "argument --algorithms: wagma:group_size: group_size "
    "needs a value: group_size=S",
    "compare --algorithms allreduce,ddp --group-size 2": "argument --group-size: none of the ",
    "simulate --algorithms sgp --dedicated-server": "argument --dedicated-server: parameter-server",
    "simulate --algorithms sgp --sync-period 2": "argument --sync-period: none of the algorithms",
    "compare --seeds 0": "argument --seeds: must be an integer of at least 1, not '0'",
    "compare --target 0": "argument --target: must be a number above 0, not '0'",
    "compare --script a.py --shards iid": "argument --shards: not allowed with argument --script",
    "train --log-level loud": "argument --log-level: invalid choice: 'loud'",
    "simulate --algorithms wagma,hope": "argument --algorithms: must be one of "
    "wagma, allreduce, local-sgd, eager-sgd, d-psgd, sgp, ad-psgd, parameter-server, "
    "partial-reduce, ripples, hop, not 'hope'",
    "simulate --algorithms hop:graph=wheel": "argument --algorithms: hop:graph=wheel: graph must "
    "be ring, ring-based, double-ring or hierarchical-A+B+",
    "train --algorithm hop:max_gap=0": "argument --algorithm: hop:max_gap=0: max_gap must be an "
    "integer of at least 1, not '0'; or auto, or none",
    "simulate --algorithms wagma,eager-sgd-majority": "argument --algorithms: no algorithm "
    "eager-sgd-majority: write eager-sgd:trigger=majority",
    "simulate --algorithms wagma,wagma": "argument --algorithms: repeats a value",
    "simulate --ranks 4,0": "argument --ranks: must be an integer of at least 1, not '0'",
    "simulate --machine abacus": "argument --machine: invalid choice: 'abacus'",
    "simulate --set speed=1": "argument --set: must be one of latency, overhead, gap, byte_gap, ",
    "simulate --set latency=-1": "argument --set: must be a number of at least 0, not '-1'",
    "simulate --set latency": "argument --set: must be a number of at least 0, not ''",
    "simulate --set gap=1 --set gap=2": "argument --set: gap is given twice",
    "simulate --trace a --step-time 5": "argument --step-time: not allowed with argument --trace",
    "simulate --step-times long-tailed --step-time 5": "argument --step-time: not allowed with "
    "argument --step-times long-tailed",
    "simulate --step-times constant --sigma 1": "argument --sigma: not allowed with argument "
    "--step-times constant",
    "simulate --ranks 2,4 --slow-rank 3:2": "argument --slow-rank: no rank 3 in a job of 2 ranks",
    "simulate --trace a --step-times constant": "argument --step-times: not allowed with argument",
    "svm --method wp,median": "argument --method: must be one of wp, simuparallel, delay, ",
    "svm --method wp,wp": "argument --method: repeats a value",
    "svm --preset mnist": "argument --preset: invalid choice: 'mnist'",
    "svm --lr 0": "argument --lr: must be a number above 0, not '0'",
    "svm --l2 10": "argument --l2: must be below 1 / RATE",
    "svm --rate 1.5": "argument --rate: must be a number from 0 to 1, not '1.5'",
    "svm --workers 0": "argument --workers: must be an integer of at least 1, not '0'",
    "svm --check mine": "argument --check: invalid choice: 'mine'",
    "svm --start inf": "argument --start: must be a number that is finite, not 'inf'",
    "svm --slow-rank 1": "argument --slow-rank: must be R:FACTOR, a rank and a number above 0, ",
    "svm --slow-rank 1:0": "argument --slow-rank: must be R:FACTOR, a rank and a number above 0, ",
    "svm --cluster 1,2": "argument --cluster: must be a number above 0, up to 1, not '2'",
    "svm --cluster 1,1 --slow-rank 1:2": "argument --slow-rank: not allowed with argument --clus",
    "svm --machine hdr": "argument --machine: not allowed without argument --cluster",
    "svm --test a.svm": "argument --test: not allowed without argument --data",
    "info --steps 3": "unrecognized arguments: --steps 3 (see wagma info --help)",
}
TORCHRUN = {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "RANK": "1", "TORCHELASTIC_RUN_ID": "none"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    launchers = (*job.RANK_VARIABLES, *agreement.TASK_COUNTS, *TORCHRUN)
    for variable in (*launchers, logs.VARIABLE):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def refuse(capsys):
    """Return a function that runs a command line which must fail, and returns what it prints."""

    def run(line):
        with pytest.raises(SystemExit) as ended:
            cli.main(line.split())
        assert ended.value.code == 2
        output = capsys.readouterr()
        assert output.out == ""
        return output.err

    return run


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line_and_status_2(refuse, line):
    message = refuse(line)
    assert message.startswith(f"wagma: error: {MISTAKES[line]}")
    assert message.endswith("--help)\n")
    assert message.count("\n") == 1


def test_the_variable_of_the_log_level_is_checked_and_the_option_comes_first(refuse, monkeypatch):
    monkeypatch.setenv(logs.VARIABLE, "loud")
    message = refuse("train")
    assert message.startswith(f"wagma: error: {logs.VARIABLE} must be one of debug, info, ")
    assert message.endswith("not 'loud' (see wagma train --help)\n")

    def level(*options):
        return cli.log_level(cli.make_parser().parse_args(["info", *options]))

    assert level("--log-level", "info") == "info"
    monkeypatch.setenv(logs.VARIABLE, "debug")
    assert level() == "debug"
    monkeypatch.setenv(logs.VARIABLE, "")
    assert level() == "warning"


@pytest.mark.parametrize("variable", job.RANK_VARIABLES)
def test_only_rank_0_speaks(refuse, monkeypatch, variable):
    monkeypatch.setattr(job, "SPEAK_FIRST", 0)
    monkeypatch.setenv(variable, "1")
    assert refuse("train --lr -1") == ""
    monkeypatch.setenv(variable, "0")
    assert refuse("train --lr -1") != ""


def test_a_slurm_batch_script_is_no_rank_of_the_mpiexec_in_it(refuse, monkeypatch):
    monkeypatch.setattr(job, "SPEAK_FIRST", 0)
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("PMI_RANK", "3")
    assert refuse("train --lr -1") == ""


def test_torchrun_s_rank_counts_where_it_is_at_work_or_nothing_else_does(monkeypatch):
    monkeypatch.setenv("RANK", "5")
    assert job.launcher_rank() == 0
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert job.launcher_rank() == 5
    monkeypatch.setenv("PMI_RANK", "3")
    assert job.launcher_rank() == 3
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert job.launcher_rank() == 5


STARTING = "wagma train: starting on 2 ranks, loading MPI and torch\n"


def test_a_job_s_first_line_comes_from_rank_0_before_mpi_and_torch_are_loaded():
    program = """
import sys
from wagma import cli, job

def run(command, settings):
    loaded = {"mpi4py", "torch"} & set(sys.modules)
    assert not loaded, loaded

job.run = run
sys.exit(cli.main(["train"]))
"""

    def output(**variables):
        command = [sys.executable, "-c", program]
        ended = subprocess.run(
            command, env=os.environ | variables, capture_output=True, text=True, check=True
        )
        return ended.stdout

    assert output() == "wagma train: starting, loading MPI and torch\n"
    assert output(PMI_SIZE="2", PMI_RANK="0") == STARTING
    assert output(PMI_SIZE="2", PMI_RANK="1") == ""


@pytest.mark.parametrize(
    "line",
    [["--help"], ["--version"], ["train", "--x"]]
    + [[command, "--help"] for command in ("train", "compare", "simulate", "svm")],
)
def test_help_version_and_mistakes_load_neither_mpi_nor_torch(line):
    program = f"""
import sys
from wagma.cli import main
try:
    main({line})
finally:
    loaded = {{"mpi4py", "torch", "numpy", "sklearn", "rich", "collectives"}} & set(sys.modules)
    assert not loaded, loaded
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "AssertionError" not in ended.stderr
    assert ended.returncode == (2 if "--x" in line else 0)


def test_importing_the_package_loads_neither_mpi_nor_torch():
    program = "import sys, wagma; assert not {'mpi4py', 'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_package_offers_the_optimizer():
    from wagma.optim import WAGMA

    assert wagma.WAGMA is WAGMA
    with pytest.raises(AttributeError, match="has no attribute 'ADPSGD'"):
        wagma.ADPSGD  # noqa: B018


@pytest.fixture
def help_of(capsys):
    """Return a function that returns the help of a command line."""

    def show(*command):
        with pytest.raises(SystemExit) as ended:
            cli.main([*command, "--help"])
        assert ended.value.code == 0
        return capsys.readouterr().out

    return show


@pytest.mark.parametrize(
    ("command", "example"),
    [
        ([], "mpiexec -n 4 wagma train\n"),
        (["train"], "mpiexec -n 4 wagma train\n"),
        (["train"], "srun --mpi=pmi2 -n 4 wagma train"),
        (["train"], "wagma train --script my_task.py"),
        (["compare"], "wagma compare --algorithms allreduce,ddp,wagma --seeds 5 --target 0.95\n"),
        (["info"], "mpiexec -n 4 wagma info\n"),
        (["simulate"], "wagma simulate --ranks 64 --trace runs/mine"),
        (["svm"], "mpiexec -n 4 wagma svm --slow-rank 1:0.5\n"),
    ],
)
def test_help_has_examples_and_the_exit_statuses(help_of, command, example):
    text = help_of(*command)
    assert example in text
    for status in (0, 1, 2, 130, 138, 143):
        assert f"\n  {status} " in text
    assert "\x1b" not in text  # no terminal here
    assert all(len(line) < 100 for line in text.splitlines())


def test_help_says_what_each_method_does_and_all_its_options(help_of):
    for command, named in (("train", {}), ("compare", REFERENCES), ("simulate", {})):
        text = " ".join(help_of(command).split())
        for name, method in (METHODS | named).items():
            options = [each for each in method.options if each.simulated or command != "simulate"]
            shared = ", ".join(each.flag for each in options if each in SHARED)
            assert f" {name} {method.help} {shared and 'takes ' + shared}" in text
            for option in options:
                usage = option.flag if option in SHARED else f":{option.usage}"
                assert usage in text and option.help_with_default in text
    assert METHODS["wagma"].option("late").otherwise == collectives.DEFAULT_LATE


def settings_of(*words):
    """Return the settings that a command line becomes."""
    settings = cli.make_parser().parse_args(words)
    settings.check(settings)
    return settings


@pytest.mark.parametrize("name", METHODS)
def test_a_method_s_options_have_their_defaults_and_no_others_are_there(name):
    settings = settings_of("train", "--algorithm", name)
    assert settings.algorithm.label == name
    assert settings.algorithm.options == {each.name: each.default for each in METHODS[name].options}
    assert not any(hasattr(settings, option.name) for option in SHARED)


def test_an_option_of_the_method_comes_before_the_one_for_all():
    words = ("--algorithm", "wagma:sync-period=5:late=paper:overlap", "--sync-period", "20")
    options = settings_of("train", *words, "--group-size", "2").algorithm.options
    given = {"sync_period": 5, "late": "paper", "overlap": True, "group_size": 2}
    assert options == METHODS["wagma"].resolved({}) | given


@pytest.fixture
def terminal(monkeypatch):
    """Let the command find a terminal that knows colors."""
    _, end = pty.openpty()
    monkeypatch.setattr(progress, "terminal", lambda: os.fdopen(os.dup(end), "w"))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    for variable in ("NO_COLOR", "TTY_COMPATIBLE", "FORCE_COLOR"):
        monkeypatch.delenv(variable, raising=False)
    yield
    os.close(end)


@pytest.mark.parametrize("command", [[], ["train"], ["compare"], ["info"], ["simulate"], ["svm"]])
def test_help_on_a_terminal_has_the_same_words_in_color(help_of, terminal, monkeypatch, command):
    pytest.importorskip("rich_argparse")
    colored = help_of(*command)
    assert "\x1b[36m--help\x1b[0m" in colored
    monkeypatch.setattr(progress, "terminal", lambda: None)
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored).split() == help_of(*command).split()


def test_help_is_plain_without_rich_argparse(help_of, terminal, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich_argparse", None)
    assert "\x1b" not in help_of("train")


def test_the_documentation_has_the_exit_statuses(help_of):
    rows = dict(re.findall(r"^\| `(\d+)` \| (.*) \|$", pages.text(), re.MULTILINE))
    assert rows == {str(int(status)): text for status, text in job.EXIT_STATUSES.items()}
    assert list(job.EXIT_STATUSES) == [0, 1, 2, 85, 130, 138, 143]


def test_the_version_is_the_distribution_s(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"wagma {wagma.__version__}\n"
    assert metadata.version("wagma") == wagma.__version__


def test_the_files_beside_the_readme_name_the_version():
    root = Path(wagma.__file__).parents[1]
    newest = re.search(r"^## (\S+) – (\S+)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = (root / "CITATION.cff").read_text()
    assert newest[1] == wagma.__version__
    assert f'\nversion: {newest[1]}\ndate-released: "{newest[2]}"\n' in citation
    papers = citation.partition("\nreferences:\n")[2].split("\n  - type: ")
    assert len(papers) == 5
    assert all(re.search(r"^    doi: 10\.\d+/\S+$", paper, re.MULTILINE) for paper in papers)


@pytest.mark.parametrize(
    ("options", "modules"),
    [
        ([], "rich, sklearn, torch"),
        (["--script", "a.py"], "rich, torch"),
        (["--images", "a"], "PIL, rich, torch"),
        (["--task", "images"], "rich, sklearn, torch"),
        (["--task", "language"], "rich, torch"),
    ],
)
def test_modules_that_are_not_installed_are_named(capsys, monkeypatch, options, modules):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", *options])
    assert ended.value.code == 1
    message = f"wagma: error: {modules} not installed: pip install 'wagma[train]'\n"
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("there", [False, True])
def test_torchvision_changes_images_only_where_it_is_asked_for_and_there(
    capsys, monkeypatch, there
):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: 1 if there else None)
    words = ["train", "--task", "images", "--augment", "crop"]
    assert settings_of(*words).augment_with == "own"
    words += ["--augment-with", "torchvision"]
    if there:
        assert settings_of(*words).augment_with == "torchvision"
        return
    with pytest.raises(SystemExit) as ended:
        settings_of(*words)
    assert ended.value.code == 2
    message = "argument --augment-with: not installed: pip install torchvision"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "hidden", "modules"),
    [
        ("translation", ["sacrebleu"], "sacrebleu"),
        ("translation", ["sacrebleu", "sentencepiece"], "sacrebleu, sentencepiece"),
        ("control", ["gymnasium", "rich"], "gymnasium, rich"),
    ],
)
def test_the_extra_of_a_task_is_named(capsys, monkeypatch, task, hidden, modules):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None if name in hidden else 1)
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--task", task])
    assert ended.value.code == 1
    message = f"wagma: error: {modules} not installed: pip install 'wagma[tasks]'\n"
    assert capsys.readouterr().err == message


def test_without_an_mpi_library_one_line_says_what_to_do():
    """In the command, and where a collective or an optimizer is made."""
    env = {**os.environ, "MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    said = "no MPI library was found (cannot load MPI library; /nowhere/libmpi.so: cannot open"
    command = [sys.executable, "-m", "wagma", "info"]
    ended = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith(f"wagma: error: {said}")
    assert "): pip install mpich, or " in ended.stderr and ended.stderr.count("\n") == 1
    collective = "import collectives, numpy; collectives.GroupAllreduce(None, numpy.zeros(3))"
    ended = subprocess.run(
        [sys.executable, "-c", collective], env=env, capture_output=True, text=True
    )
    assert ended.stderr.splitlines()[-1].startswith(f"ImportError: {said}")


@pytest.mark.launch
def test_a_job_of_two_says_a_mistake_once(mpirun):
    code = "import sys; from wagma import cli, job; job.SPEAK_FIRST = 8; sys.exit(cli.main())"
    ended = mpirun(2, "-c", code, "train", "--lr", "-1", timeout=100)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert_mistakes(ended, "argument --lr: must be a number above 0, not '-1'")


@pytest.mark.launch
def test_a_job_of_three_says_once_what_it_finds_after_its_start(mpirun, tmp_path):
    (tmp_path / "used").mkdir()
    for name in ("red", "blue"):
        (tmp_path / "few" / "train" / name).mkdir(parents=True)
        (tmp_path / "few" / "train" / name / "0.png").touch()
    messages = {
        "--group-size 4": "algorithm wagma: group_size is 4, more than the number of ranks, 3",
        "--name used": "used exists: choose another --name, or remove it",
        "--script gone.py": "argument --script: cannot read gone.py: No such file",
        "--images few": "2 training images are too few for 3 ranks",
        "--step-time-per-work 1": "digits has no work(batch), by which its steps could take time",
    }
    commands = [["train", "--runs-dir", ".", *flags.split()] for flags in messages]
    ended = mpirun(
        3, "-c", STATUSES, json.dumps(commands), timeout=60, cwd=tmp_path, forked=True
    ).check()
    starting = STARTING.strip().replace("2", "3")
    statuses = f"statuses {len(messages) * [2]}"
    assert ended.stdout.splitlines() == len(messages) * [starting] + 3 * [statuses]
    assert_mistakes(ended, *messages.values())


def test_a_slow_rank_that_there_is_not_is_a_mistake():
    settings = settings_of("train", "--slow-rank", "2:2")
    check_ranks(settings, 3)
    with pytest.raises(job.UsageError, match="--slow-rank: no rank 2 in a job of 2 ranks"):
        check_ranks(settings, 2)


def assert_mistakes(ended, *messages):
    """All ranks together have said each in one line."""
    for line, message in zip(ended.complaints.splitlines(), messages, strict=True):
        assert line.startswith("wagma: error: ")
        assert message in line


@pytest.mark.launch
def test_a_job_of_four_prints_its_help_once(mpirun):
    ended = mpirun(4, "-m", "wagma", "--help", timeout=100).check()
    assert ended.stdout.count("usage: wagma") == 1


@pytest.mark.launch
@pytest.mark.parametrize("command", ["train", "info"])
def test_tasks_that_mpi_took_for_jobs_of_their_own_are_refused(mpirun, tmp_path, command):
    variables = {"SLURM_STEP_NUM_TASKS": "4"}
    ended = mpirun(1, "-m", "wagma", command, timeout=100, env=variables, cwd=tmp_path)
    assert ended.returncode == 2
    assert "each of the job's 4 tasks (SLURM_STEP_NUM_TASKS) a job of its own" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.launch
@pytest.mark.parametrize("rank", [0, 1])
def test_under_torchrun_rank_0_says_what_to_start_it_with(mpirun, tmp_path, rank):
    variables = TORCHRUN | {"RANK": str(rank)}
    ended = mpirun(None, "-m", "wagma", "train", timeout=100, env=variables, cwd=tmp_path)
    assert ended.returncode == 2
    said = "wagma: error: MPI made each of the job's 2 processes (WORLD_SIZE) a job of its own"
    assert ended.stderr.startswith(said) == (rank == 0)
    assert ended.stderr.endswith("start it with mpiexec or srun\n") == (rank == 0)
    assert ended.stderr.count("\n") == (rank == 0)
    assert not any(tmp_path.iterdir())


@pytest.mark.launch
def test_a_job_that_mpiexec_has_started_may_have_torchrun_s_variables(mpirun):
    variables = TORCHRUN | {"WAGMA_TRANSPORT": "messages"}
    ended = mpirun(2, "-m", "wagma", "info", timeout=100, env=variables).check()
    assert re.search("^ranks +2$", ended.stdout, re.MULTILINE)
    assert re.search("^transport +messages$", ended.stdout, re.MULTILINE)


@pytest.mark.launch
def test_a_collective_under_torchrun_is_refused_too(mpirun):
    program = """
import numpy as np
from mpi4py import MPI
from collectives import GroupAllreduce
GroupAllreduce(MPI.COMM_WORLD, np.zeros(1), group_size=1)
"""
    ended = mpirun(None, "-c", program, timeout=100, env=TORCHRUN)
    assert ended.returncode == 1
    assert ended.stderr.endswith("does not know torchrun: start it with mpiexec or srun\n")


@pytest.mark.parametrize(
    ("given", "under_mps", "queues"),
    [(None, False, "32"), ("8", False, "8"), (None, True, None), ("8", True, "8")],
)
def test_training_gives_streams_queues_of_their_own_before_the_driver_starts(
    monkeypatch, tmp_path, given, under_mps, queues
):
    seen = []
    monkeypatch.setattr(
        "wagma.job.run",
        lambda command, settings: seen.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")),
    )
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    if under_mps:
        (tmp_path / "control").touch()
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given or "")  # restored afterwards
    if given is None:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    cli.main(["train"])
    assert seen == [queues]
