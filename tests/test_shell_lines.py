"""The command lines of the README and the pages of docs/ run, with fewer steps, and end well.

`test_docs.py` parses all of them. Those of one number of ranks run one after the other in one job,
which loads torch once. What installs, needs a batch system or is this suite itself is left out.
"""

import json
import re
import shlex

import pages
import pytest
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
    "compare": ["--steps"],
    "info": [],
    "simulate": [],
    "svm": ["--samples"],
    "train": ["--steps"],
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


def lines():
    """Return by number of ranks the arguments of `wagma`, of all lines."""
    found = {}
    for words in (words for page in pages.PAGES for words in pages.command_lines(page)):
        if "wagma" in words and words[0] in ("mpiexec", "wagma"):
            start = words.index("wagma")
            ranks = int(words[words.index("-n") + 1]) if start else 1
            if words[start + 1 :] not in found.setdefault(ranks, []):
                found[ranks].append(words[start + 1 :])
    return found


def shortened(words):
    """Return a line's words, and what makes it short."""
    always = ALWAYS[words[0]] if "--seconds" not in words else []
    less = [name for name in LESS if name in words or name in always]
    return [*words, *(word for name in less for word in (name, LESS[name]))]


LINES = lines()


def test_lines_of_each_command_are_found():
    assert {words[0] for each in LINES.values() for words in each} == ALWAYS.keys()
    assert LINES.keys() == {1, 4, 8} and len(LINES[4]) > 10


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", LINES)
def test_lines_run(mpirun, tmp_path, ranks):
    (tmp_path / "my_task.py").write_text(pages.task_scripts()[0])
    squares(tmp_path / "flowers")
    lines = [shortened(words) for words in LINES[ranks]]
    if ranks == 1:
        lines.insert(0, ["train", "--name", "mine", "--steps", "4"])  # whose times are simulated
    (tmp_path / "lines.json").write_text(json.dumps(lines))
    ended = mpirun(ranks, "-c", JOB, timeout=280, cwd=tmp_path).check()
    statuses = re.findall(r"^line (\d+): (\S+)$", ended.stdout, re.MULTILINE)
    wrong = [shlex.join(line) for line, (_, status) in zip(lines, statuses) if status != "0"]
    assert len(statuses) == len(lines) and not wrong, (wrong, ended)
