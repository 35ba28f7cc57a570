"""The README and the pages of docs/: links, examples and command lines."""

import ast
import difflib
import importlib
import inspect
import json
import re
import shlex
import sys
import textwrap
import types

import docstrings
import launch
import numpy as np
import pages
import pytest
import recorded

import collectives
from wagma import cli, optim
from wagma.commands import compare, train
from wagma.commands.preparation import check_ranks
from wagma.methods import METHODS
from wagma.methods.__main__ import table

KINDS = {"python", "sh", "text"}  # text: what a command prints
MOST_LINES = 130  # of the README, which is read first
MODULES = (
    "collectives",
    "wagma.checkpoint",
    "wagma.methods",
    "wagma.optim",
    "wagma.simulation",
    "wagma.wpsgd",
)
COMMON = {"comm", "options"}


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_links_lead_to_files_and_headings_that_are_there(page):
    assert pages.dead_links(page) == []


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_files_of_the_source_tree_that_are_named_are_there(page):
    folders = "benchmarks|collectives|docs|examples|slurm|tests|wagma"
    paths = [code for code in pages.inline(page) if re.fullmatch(rf"({folders})/\S*", code)]
    gone = [path for path in paths if not (pages.ROOT / path).exists()]
    assert [path for path in gone if "NAME" not in path] == []


@pytest.mark.parametrize("name", MODULES)
def test_the_api_pages_show_every_public_object(name):
    """Functions and classes in full; constants are named in what is shown."""
    module = importlib.import_module(name)
    public = {each: getattr(module, each) for each in module.__all__}
    shown = [each for each, owner in docstrings.public().values() if owner is None]
    text = "".join(each.__doc__ or "" for each in shown)
    missing = [
        each
        for each, value in public.items()
        if not (value in shown if callable(value) else f"`{each}`" in text)
    ]
    assert missing == []


def test_the_environment_s_variables_are_explained():
    files = [f for folder in ("collectives", "wagma") for f in (pages.ROOT / folder).rglob("*.py")]
    read = {name for f in files for name in re.findall(r"\bWAGMA_[A-Z_]+", f.read_text())}
    assert len(read) > 9
    assert read - set(re.findall(r"\bWAGMA_[A-Z_]+", pages.text())) == set()


def test_every_collective_has_a_place_on_their_page():
    text = (pages.ROOT / "docs" / "collectives.md").read_text()
    public = {*collectives.__all__} - {*collectives.errors.__all__, "DEFAULT_LATE"}
    assert {name for name in public if not re.search(rf"\b{name}\(?", text)} == set()


def test_the_readme_is_short_and_leads_to_every_page():
    assert len(pages.README.read_text().splitlines()) <= MOST_LINES
    assert {pages.name(page) for page in pages.PAGES[1:]} <= set(pages.links(pages.README))


def test_the_readme_s_figures_are_those_of_the_results():
    benchmarks = pages.ROOT / "benchmarks"
    results = [
        json.loads((benchmarks / "results" / f"{name}.json").read_text())
        for name in ("learning-traces-32", "own-pace-8")
    ]
    trained, measured = (each["results"] for each in results)
    rows = []
    for each, trace in zip(trained.values(), ("SE", "AR", "ST"), strict=True):
        steps = np.loadtxt(benchmarks / "traces" / f"bytedance-{trace}.csv", delimiter=",")
        bound = (1 / steps.mean(axis=0)).mean() * steps.max(axis=1).mean()
        one = each["Allreduce"]["samples_per_s"]
        cells = [
            f"{each[name]['samples_per_s'] / one:.2f}, {each[name]['target_s']:,.0f} s"
            for name in ("Allreduce", "WAGMA", "own pace", "AD-PSGD")
        ]
        rows.append([*cells, f"{bound:.2f}"])
    for kind in ("random, 6 × slow", "one 4 × slow", "undisturbed"):
        each = measured[kind]
        names = ("Allreduce", "common pace", "own pace", "AD-PSGD")
        cells = [f"{each[name]['over_Allreduce']:.2f}" for name in names]
        own = each["own pace"]  # by what its steps would take with no waiting
        rows.append([*cells, f"{own['over_Allreduce'] / own['of_bound']:.2f}"])
    text = pages.README.read_text()
    table = re.search(r"^\| \| Allreduce .*\n\|-.*\n((?:\|.*\n)+)", text, re.MULTILINE)[1]
    assert [row.split(" | ")[1:] for row in table.replace(" |\n", "\n").splitlines()] == rows
    for each in (result["machine"] for result in results):
        made_on = f"two cores of an {each['processor'].split(' (')[0]}, MPICH 5.0.2, {each['date']}"
        assert made_on in text and each["cores"] == 2 and each["mpi"].endswith(" 5.0.2")


@pytest.mark.parametrize("name", [*METHODS, "wp-sgd"])
def test_each_method_has_a_page_that_begins_alike(name):
    """A table, pseudocode, and when to use it."""
    page = pages.ROOT / "docs" / f"{name}.md"
    text = page.read_text()
    table, _, rest = text.partition("\n    ")
    rows = re.findall(r"^\| (\w[\w ]*) \| .+ \|$", table, re.MULTILINE)
    assert rows[:3] == ["averaged", "who waits", "in the code"] and rows[3] in ("paper", "papers")
    assert rest.partition("\n## ")[2].startswith("When to use it\n")
    assert f"{name}.md" in pages.links(pages.ROOT / "docs" / "methods.md")
    if name in METHODS:
        assert f"`--algorithm {name}`" in text
        assert "## Options" in text.splitlines()


DEAD = ["gone.md", "gone.png", "#gone", "other.md#gone", "other.md#not-a-heading", "#a-b-2"]
ALIVE = ["other.md", "#a-b", "#a-b-1", "other.md#the-papers-τ-9-of-10", "https://a.example/gone"]


@pytest.mark.parametrize("link", DEAD + ALIVE)
@pytest.mark.parametrize("form", ["[a\nb](%s)", "![](%s)", "[`a`][1]\n\n[1]: %s", '<a href="%s">'])
def test_dead_links_are_found(tmp_path, form, link):
    page = tmp_path / "page.md"
    page.write_text(f"# A B\n\n`[](gone)`\n\n```sh\n[](gone)\n```\n\n## A `B`\n\n{form % link}\n")
    other = "## The [paper's](x) τ, 9 of 10\n\n```sh\n# Not a heading\n```\n"
    (tmp_path / "other.md").write_text(other)
    assert pages.dead_links(page) == ([link] if link in DEAD else [])


# --- Python


NEW_METHOD = (pages.ROOT / "tests" / "test_new_method.py").read_text()  # trained there
TRAPS = pages.ROOT / "docs" / "traps.md"
WATCHING = pages.ROOT / "docs" / "watching.md"
FROM_DDP = pages.ROOT / "docs" / "from-ddp.md"


def python(page):
    return [text for language, text in pages.blocks(page) if language == "python"]


def calls(block):
    """Return the calls of a block that says which arguments there are; of others, nothing."""
    statements = ast.parse(block).body
    if not all(isinstance(s, ast.Expr) and isinstance(s.value, ast.Call) for s in statements):
        return []
    return [statement.value for statement in statements]


def needs_cupy(block):
    return "import cupy\n" in block


def scripts(page):
    """Return a page's examples. What imports neither MPI nor DDP goes on with the one before."""
    found = []
    for block in python(page) if page != TRAPS else ():
        # What `wagma train --script` takes is in test_tasks.py.
        if block in pages.task_scripts() or block in NEW_METHOD:
            continue
        if calls(block) or needs_cupy(block) or block in TRACKERS:
            continue
        if "from mpi4py import MPI\n" in block or "import torch.distributed" in block:
            found.append("")
        found[-1] += block
    return found


TRACKERS = [block for block in python(WATCHING) if "def log(record)" in block]
EXAMPLES = [script for page in pages.PAGES for script in scripts(page)]
OPTIONS = [block for page in pages.PAGES for block in python(page) if calls(block)]
ALL_OF_THEM = f"""
import runpy, sys
{launch.LIKE_TORCHRUN}
for script in sys.argv[1:]:
    runpy.run_path(script, run_name="__main__")
"""
# A step of each method with the options that its page shows.
RUN_OPTIONS = """
import json
import torch
from wagma.optim import *

with open("options.json") as file:
    options = json.load(file)
for written in options:
    model = torch.nn.Linear(8, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with eval(written) as averager, averager.join():
        model(torch.randn(32, 8)).square().mean().backward()
        sgd.step()
        assert averager.result.version == 0, written
"""
# Each trap after the page's first block, and for each what it raises on which rank.
RUN_TRAPS = """
import json
from mpi4py import MPI

with open("traps.json") as file:
    setup, *traps = json.load(file)
raised = []
for trap in traps:
    names, error = {}, None
    exec(setup, names)
    try:
        exec(trap, names)
    except Exception as caught:
        error = type(caught).__name__
    raised.append(MPI.COMM_WORLD.allgather(error))
if MPI.COMM_WORLD.rank == 0:
    with open("raised.json", "w") as file:
        json.dump(raised, file)
"""


def test_every_block_is_of_a_kind_that_is_tested():
    assert {language for page in pages.PAGES for language, _ in pages.blocks(page)} == KINDS
    assert len(EXAMPLES) == 10


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_indented_blocks_are_pseudocode(page):
    """Python has a fence, so that it runs."""
    for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", pages.prose(page), re.MULTILINE):
        with pytest.raises(SyntaxError):
            ast.parse(textwrap.dedent(block))


@pytest.mark.launch
def test_examples_options_and_traps_run_on_four_ranks(mpirun, tmp_path):
    """One after the other, in one job: in each example every rank prints a line."""
    names = [f"train_{number}.py" for number in range(len(EXAMPLES))]
    last = {"options.py": RUN_OPTIONS, "traps.py": RUN_TRAPS}
    for name, script in (dict(zip(names, EXAMPLES)) | last).items():
        (tmp_path / name).write_text(script)
    (tmp_path / "options.json").write_text(json.dumps(OPTIONS))
    (tmp_path / "traps.json").write_text(json.dumps(python(TRAPS)))
    ended = mpirun(4, "-c", ALL_OF_THEM, *names, *last, timeout=90, cwd=tmp_path).check()
    assert len(ended.stdout.splitlines()) == 4 * len(names)

    raised = json.loads((tmp_path / "raised.json").read_text())
    said = [re.findall(r"# (\w+Error)", trap) for trap in python(TRAPS)[1:]]
    assert [{*errors} - {None, "RankFailedError"} for errors in raised] == [{*e} for e in said]
    assert sum(map(len, said)) == 8


def test_a_ddp_loop_changes_in_ten_lines():
    before, after = (block.splitlines() for block in python(FROM_DDP)[:2])
    changed = [line[0] for line in difflib.ndiff(before, after) if line.strip("+- ")]
    assert "DistributedDataParallel" in "".join(before) and changed.count("-") <= 10
    assert 0 < changed.count("+") <= 10


def test_a_trap_is_followed_by_what_to_do_instead():
    bodies = re.findall(r"^## (?!More).*\n((?:(?!## ).*\n)*)", TRAPS.read_text(), re.MULTILINE)
    kinds = [re.findall(r"^(DO NOT|INSTEAD)\n\n```python", body, re.MULTILINE) for body in bodies]
    assert kinds and all(found == ["DO NOT", "INSTEAD"] for found in kinds)


def test_messages_that_are_explained_are_those_of_the_source():
    """Of a message's words between its dots, each piece is somewhere in the sources."""
    files = [f for folder in ("collectives", "wagma") for f in (pages.ROOT / folder).rglob("*.py*")]
    texts = [
        f.read_text() for f in (*files, pages.ROOT / "setup.py") if f.suffix in (".py", ".pyx")
    ]
    source = re.sub(r'"\s*r?f?"', "", "\n".join(texts))
    pattern = r"^\| `([^`]+)` \| .+ \| .+ \|$"
    messages = re.findall(pattern, (pages.ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    pieces = {piece.strip(" ();:") for message in messages for piece in message.split("…")}
    assert len(messages) > 40
    assert [piece for piece in pieces if piece not in source] == []


CUPY = [block for page in pages.PAGES for block in python(page) if needs_cupy(block)]


@pytest.mark.launch
def test_the_example_with_cupy_runs_on_two_ranks(mpirun, tmp_path):
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed, which needs a GPU")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"CuPy finds no device: {error}")
    (script,) = CUPY
    (tmp_path / "train.py").write_text(script)
    ended = mpirun(2, "train.py", timeout=90, cwd=tmp_path).check()
    assert [line.split()[1:] for line in ended.stdout.splitlines()] == 2 * [
        ["True", "(0,", "1)", "True"]
    ]


def test_there_is_one_example_with_cupy():
    (script,) = CUPY
    ast.parse(script)


@pytest.mark.parametrize("block", TRACKERS, ids=["mlflow", "wandb"])
def test_the_examples_of_other_tools_log_what_is_recorded(monkeypatch, block):
    """The tools are stand-ins that collect what they are given."""
    logged = []
    tool = types.SimpleNamespace(run=None, init=lambda **settings: None)
    tool.log = tool.log_metrics = lambda values, step: logged.append((step, values))
    for name in ("mlflow", "wandb"):
        monkeypatch.setitem(sys.modules, name, tool)
    names = {}
    exec(block, names)
    names["log"]({"rank": 0} | recorded.record(7))
    assert logged == [(7, {"loss": 1.93, "compute_s": 0.1, "waiting_s": 0.02})]


def test_methods_have_the_arguments_and_defaults_that_are_written_down():
    written = [call for block in OPTIONS for call in calls(block)]
    assert {call.func.id for call in written} == set(optim.__all__) - {"WAGMA", "Recovery"}
    for call in written:
        parameters = inspect.signature(getattr(optim, call.func.id)).parameters
        defaults = {name: parameters[name].default for name in parameters.keys() - COMMON}
        given = zip(call.args, ("model", "optimizer"), (inspect.Parameter.empty, None), strict=True)
        for argument, name, default in given:
            assert isinstance(argument, ast.Name) and defaults.pop(name) is default
        assert {k.arg: ast.literal_eval(k.value) for k in call.keywords} == defaults


def test_the_arguments_of_wagma_are_those_of_its_page_s_table():
    text = (pages.ROOT / "docs" / "wagma.md").read_text()
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| .+ \| (.+) \|$", text, re.MULTILINE)
    written = {}
    for names, values in rows:
        names = re.findall(r"\w+", names)
        defaults = [value.strip(" `") for value in values.split(", ")]
        written |= zip(names, defaults if len(names) > 1 else [values.strip(" `")])
    parameters = inspect.signature(optim.WAGMA).parameters
    assert written.keys() == parameters.keys() - COMMON - {"optimizer", "model"}
    assert written.pop("group_size") == "√P, rounded up to a power of two"
    assert written.pop("late") == f'"{collectives.DEFAULT_LATE}"'
    for name, value in written.items():
        assert ast.literal_eval(value) == parameters[name].default


def test_the_table_of_methods_is_what_they_declare():
    assert table() in (pages.ROOT / "docs" / "methods.md").read_text()


# --- command lines


def command_lines(page):
    """Return the words of each command line of a page, also of those in its text."""
    inline = [code for code in pages.inline(page) if re.match(r"wagma \w+ --(?!help)", code)]
    return [*pages.command_lines(page), *map(shlex.split, inline)]


COMMANDS = [
    pytest.param(words, id=shlex.join(words))
    for page in pages.PAGES
    for words in command_lines(page)
]


@pytest.mark.parametrize("words", COMMANDS)
def test_command_lines_are_those_of_the_command_and_name_files_that_are_there(words):
    if words[:2] == ["python", "-m"]:
        assert (pages.ROOT / words[2].replace(".", "/")).with_suffix(".py").is_file()
    elif words[0] in ("sbatch", "python"):
        assert (pages.ROOT / words[1]).is_file()
    if words[0] == "sbatch":
        words = ["wagma", "train", *words[2:]]
    if "wagma" not in words:
        return
    if "--tensorboard" in words:
        pytest.importorskip("tensorboard")
    start = words.index("wagma")
    settings = cli.make_parser().parse_args(words[start + 1 :])
    settings.check(settings)
    if words[0] == "mpiexec" and settings.command in (train.run, compare.run):
        check_ranks(settings, int(words[words.index("-n") + 1]))
