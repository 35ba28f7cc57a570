"""The examples: each runs at a small size, and the page about them is true."""

import ast
import json
import re
import shlex

import launch
import pages
import pytest

from wagma import optim

EXAMPLES = sorted((pages.ROOT / "examples").glob("*.py"))
PAGE = pages.ROOT / "docs" / "examples.md"
MOST_LINES = 120
DIGITS = ["digits.py", "--steps", "20", "--delay", "0", "--method"]
SMALL = [
    ["least_squares.py", "--steps", "20"],  # first, to see that it does without torch
    ["gpt.py", "--steps", "5"],
    *([*DIGITS, name] for name in optim.__all__),
    ["gan.py", "--steps", "60"],
    ["episodes.py", "--frames", "300"],
    ["checkpoints.py", "--epochs", "1"],
    ["checkpoints.py", "--epochs", "2", "--resume"],
    ["ddp_before.py", "--epochs", "1"],
    ["ddp_after.py", "--epochs", "1"],
]
ALL_OF_THEM = f"""
import json, runpy, sys
{launch.LIKE_TORCHRUN}
for sys.argv in json.loads(sys.argv[1]):
    runpy.run_path(sys.argv[0], run_name="__main__")
    comm.Barrier()
    if comm.rank == 0:
        print("== end", "with" if "torch" in sys.modules else "without", "torch", flush=True)
"""


def needs_cupy(path):
    return "import cupy" in path.read_text()


@pytest.mark.launch
@pytest.mark.timeout(200)
def test_examples_do_on_two_ranks_what_they_say(mpirun, tmp_path):
    """One after the other, in one job, which imports torch once."""
    argv = [[str(pages.ROOT / "examples" / name), *arguments] for name, *arguments in SMALL]
    ended = mpirun(2, "-c", ALL_OF_THEM, json.dumps(argv), timeout=180, cwd=tmp_path).check()
    printed = re.split(r"^== end (\w+) torch\n", ended.stdout, flags=re.MULTILINE)
    assert printed[1] == "without" and {*printed[3::2]} == {"with"}
    assert printed.pop() == ""

    starts = {}
    for (name, *arguments), output in zip(SMALL, printed[::2], strict=True):
        said = f"{name} {shlex.join(arguments)}\n{output}"
        before, after = re.search(r": (\S+) before, (\S+) after ", output).groups()
        starts[name] = before
        if name == "episodes.py":
            first, second = re.search(r"episodes of each rank: (\d+) (\d+)$", output, re.M).groups()
            assert int(first) > 1 < int(second), said
        elif name == "digits.py":
            assert float(before) < 0.3 and float(after) > 0.5, said
        else:
            assert float(after) < 0.9 * float(before), said
        assert "the same" not in output or re.search(r"the same \w+: True$", output, re.M), said
        assert output.splitlines()[-1].startswith("expected"), said
    assert starts["ddp_before.py"] == starts["ddp_after.py"]
    assert (tmp_path / "model.pt").exists()


def test_every_example_is_run_and_listed():
    names = {path.name for path in EXAMPLES if not needs_cupy(path)}
    assert names == {name for name, *_ in SMALL}
    listed = re.findall(r"^\| `(\S+)` \| .*\.? \|$", PAGE.read_text(), re.MULTILINE)
    assert listed == sorted(listed) == [f"examples/{path.name}" for path in EXAMPLES]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_says_how_it_is_started(path):
    assert len(path.read_text().splitlines()) < MOST_LINES
    lines = re.findall(r"^    (\S.*)$", ast.get_docstring(ast.parse(path.read_text())), re.M)
    start = rf"\b(mpiexec -n \d python|torchrun --nproc-per-node \d) {path.name}\b"
    assert any(re.search(start, line) for line in lines), lines
