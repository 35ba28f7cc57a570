"""The command lines of the README and the pages of docs/ run, with fewer steps, and end well.

`test_docs.py` parses all of them. Those of `wagma` with one number of ranks run one after the other
in one job, which loads torch once.
"""

import json
import os
import re
import shlex
import subprocess
import sys

import pages
import pytest
from launch import mpiexec
from squares import squares

pytestmark = [pytest.mark.extra, pytest.mark.launch]

# Later options overrule those that a page gives.
LESS = {
    "--seconds": "0.5",
    "--steps": "4",
    "--step-time": "1",
    "--seeds": "1",
    "--samples": "400",
    "--ranks": "4,16",
    "--evaluate-every": "2",
}
ALWAYS = {
    "compare": ["--steps", "--evaluate-every"],
    "info": [],
    "report": [],
    "simulate": [],
    "svm": ["--samples"],
    "timeline": [],
    "train": ["--steps"],
    "watch": [],
}
# Lines that are not run here, and where they are tested instead.
ELSEWHERE = {
    "make train": ".ci/run trains by it",
    "make test": "this suite",
    "make lint": ".ci/run",
    "make docs": ".ci/run",
    "make train MPICC=/opt/mpi/bin/mpicc": "no MPI is there; test_library.py looks for compilers",
    "pip install mpich mpi4py": "make dist, in .ci/run",
    "pip install .[train,plot]": "make dist, in .ci/run, without the extras",
    "mpiexec -n 4 python train.py": "test_docs.py, with the README's script",
    "python tools/gpu_bundle.py gpu-bundle --python python3.12": "downloads; test_gpu_bundle.py",
    "python3 gpu-bundle/measure.py": "needs a GPU; --rehearse of the line before",
    "mpiexec --with-ft ulfm -n 4 wagma train --survive": "Open MPI's; test_survival.py",
    "sbatch slurm/train-cpu.sbatch --imbalance cloud": "needs Slurm; test_slurm.py has its parts",
    "printf node1:4\\nnode2:4\\n > hosts": "needs two hosts",
}
JOB = """
import json

from mpi4py import MPI

from wagma import cli

for number, words in enumerate(json.loads(open("lines.json").read())):
    try:
        status = cli.main(words)
    except SystemExit as ended:
        status = ended.code
    if MPI.COMM_WORLD.rank == 0:
        print(f"\\nline {number}: {status}", flush=True)
"""


ALL = [words for page in pages.PAGES for words in pages.command_lines(page)]


def lines():
    """Return by number of ranks the arguments of `wagma`, of all lines."""
    found = {}
    for words in filter(is_of_wagma, ALL):
        start = words.index("wagma")
        ranks = int(words[words.index("-n") + 1]) if start else 1
        if words[start + 1 :] not in found.setdefault(ranks, []):
            found[ranks].append(words[start + 1 :])
    return found


def is_of_wagma(words):
    return "wagma" in words and words[0] in ("mpiexec", "wagma") and "--with-ft" not in words


def shortened(words):
    """Return a line's words, and what makes it short."""
    trains = "--train" in words
    always = ["--steps"] if trains else ALWAYS[words[0]]
    always = always if "--seconds" not in words else []
    less = {name: LESS[name] for name in LESS if name in words or name in always}
    if trains and "--trace" not in words:
        less["--step-time"] = "100"  # of simulated time
    if trains and "translation" in words:  # a second for each test
        less |= {"--ranks": "2,4", "--evaluate-every": "4"}
    return [*words, *(word for pair in less.items() for word in pair)]


# Runs whose times other lines simulate, or whose timelines they show.
RECORDED = [
    ["train", "--name", "mine", "--steps", "4"],
    ["train", "--name", "seen", "--steps", "4", "--timeline"],
    [
        "compare", "--algorithms", "allreduce,wagma,wagma:pace=own", "--steps", "4",
        "--name", "straggler", "--timeline",
    ],
]  # fmt: skip
LINES = lines()
OTHERS = [words for words in ALL if not is_of_wagma(words) and " ".join(words) not in ELSEWHERE]


def test_lines_of_each_command_are_found():
    assert {words[0] for each in LINES.values() for words in each} == ALWAYS.keys()
    assert LINES.keys() == {1, 4, 8} and len(LINES[4]) > 10


def test_lines_that_are_left_out_are_in_the_pages():
    assert {" ".join(words) for words in ALL} >= ELSEWHERE.keys()
    assert len(OTHERS) == 5


@pytest.mark.timeout(300)
def test_lines_of_other_programs_run(tmp_path):
    """Where a line names results or runs, there are some."""
    for name in ("benchmarks", "tools"):
        (tmp_path / name).symlink_to(pages.ROOT / name)
    for name in ("OLD.json", "NEW.json"):
        (tmp_path / name).symlink_to(pages.ROOT / "benchmarks" / "results" / "latency-4.json")
    programs = {
        "eval": ["bash", "-c", 'eval "eval \\"$0\\""; complete -p wagma'],
        "mpiexec": mpiexec(),
        "python": [sys.executable],
    }
    env = os.environ | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    for words in OTHERS:
        command = [part for word in words for part in programs.get(word, [word])]
        cwd = pages.ROOT if "-m" in words else tmp_path
        ended = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
        assert ended.returncode == 0, (words, ended)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", LINES)
def test_lines_run(mpirun, tmp_path, ranks):
    (tmp_path / "my_task.py").write_text(pages.task_scripts()[0])
    squares(tmp_path / "flowers")
    lines = [shortened(words) for words in LINES[ranks]]
    if ranks == 1:
        lines[:0] = RECORDED
        (tmp_path / "docs").mkdir()
    (tmp_path / "lines.json").write_text(json.dumps(lines))
    ended = mpirun(ranks, "-c", JOB, timeout=280, cwd=tmp_path, plots=True).check()
    statuses = re.findall(r"^line (\d+): (\S+)$", ended.stdout, re.MULTILINE)
    wrong = [shlex.join(line) for line, (_, status) in zip(lines, statuses) if status != "0"]
    assert len(statuses) == len(lines) and not wrong, (wrong, ended)
