"""A method of one's own: its protocol, its collective, its averager, and one declaration."""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from wagma import methods

FILES = {
    "protocol.py": '''
from collectives.protocols.formed_groups import Group


class PairsProtocol:
    """In every call a rank averages with its neighbor on one side, then on the other."""

    passive, due = False, 2**62  # never

    def __init__(self, port, rank, size, both):
        self.port, self.rank, self.size, self.both = port, rank, size, both
        self.calls, self.calling, self.leaving = 0, False, False

    def call(self):
        self.calling = True
        for side in range(1 + self.both):
            other = (self.rank + side ^ 1) - side
            if 0 <= other < self.size:
                pair = sorted((self.rank, other))
                self.port.reduce(Group((2 * self.calls + side) * self.size + pair[0], pair))
        self.port.return_model()

    def returned(self):
        self.calling = False
        self.calls += 1

    def leave(self):
        self.leaving = True

    def is_quiet(self):
        return not self.calling

    def waits_for(self, rank):
        return False

    def ignore(self, *event):
        pass

    begin = passed = arrived = reduced = overdue = pause = resume = restart = ignore
''',
    "collective.py": '''
from collectives.formed_groups import FormedGroupCollective
from collectives.protocols.scripted import ScriptedGroupProtocol
from toy.protocol import PairsProtocol


class PairsAverage(FormedGroupCollective):
    """Averages of pairs of neighboring ranks."""

    def __init__(self, comm, like, *, both, **options):
        def make(port, rank, size):
            return PairsProtocol(port, rank, size, both)

        def plan():
            return {"both": both}, lambda *rank: ScriptedGroupProtocol(*rank, make)

        super().__init__(comm, like, plan, **options)
''',
    "averager.py": '''
from toy.collective import PairsAverage
from wagma.optim.averager import Averager


class Pairs(Averager):
    """Average the model in pairs."""

    def __init__(self, model, optimizer=None, *, both=False, **options):
        super().__init__(model, optimizer, {"both": both}, **options)

    def _make_collective(self, comm, *, both, **options):
        return PairsAverage(comm, self.flat.vectors, both=both, **options)

    _is_weighted = False
''',
    "simulated.py": """
from collectives.protocols.scripted import ScriptedGroupProtocol
from toy.protocol import PairsProtocol
from wagma.simulation.formed_groups import FormedGroupMethod


def pairs(settings, ranks):
    def make(port, rank, size):
        return PairsProtocol(port, rank, size, settings.both)

    return FormedGroupMethod(
        lambda *rank: ScriptedGroupProtocol(*rank, make), settings.nbytes
    )
""",
    "declaration.py": """
from wagma.methods.method import Method, Option, on_or_off

METHOD = Method(
    "pairs",
    "models of pairs of neighboring ranks",
    averager="toy.averager.Pairs",
    simulated="toy.simulated.pairs",
    options=(Option("both", "one pair, then the other", False, convert=on_or_off),),
)
""",
    "__init__.py": "",
}
POINTS = """
[wagma.methods]
pairs = toy.declaration:METHOD
"""
COMMAND = ("-m", "wagma")


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Install the package, which declares its method by an entry point, for launched jobs."""
    (tmp_path / "toy").mkdir()
    for name, text in FILES.items():
        (tmp_path / "toy" / name).write_text(text)
    installed = tmp_path / "toy-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(POINTS)
    path = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


@pytest.mark.launch
def test_a_method_of_ones_own_trains_is_compared_and_simulated(toy, mpirun, tmp_path):
    for words in (["--help"], ["simulate", "--help"]):
        text = mpirun(
            None, *COMMAND, *(words if words[1:] else ["train", *words]), timeout=100, forked=True
        )
        assert "pairs             models of pairs of neighboring ranks" in text.check().stdout
        assert ":both" in text.stdout

    # What trains here is what trains in `wagma train`.
    options = ["--steps", 10, "--name", "both", "--algorithms", "allreduce,pairs,pairs:both"]
    ended = mpirun(3, *COMMAND, "compare", *options, timeout=90, cwd=tmp_path, forked=True).check()
    assert ended.stderr == ""
    compared = json.loads((tmp_path / "runs" / "both" / "comparison.json").read_text())
    for figures in compared["results"].values():
        assert figures["ratio"] > 0 and 0 < figures["bound_over_wall"] <= 1.01
    run = tmp_path / "runs" / "both" / "seed-0" / "pairs,both"
    assert json.loads((run / "config.json").read_text())["options"] == {"both": True}
    records = (run / "rank-0001.jsonl").read_text().splitlines()
    assert [json.loads(record)["group"] for record in records] == 10 * [[1, 2]]

    options = ["--ranks", "4,64", "--name", "simulated", "--algorithms", "pairs,pairs:both"]
    ended = mpirun(
        None, *COMMAND, "simulate", *options, timeout=60, cwd=tmp_path, forked=True
    ).check()
    assert ended.stderr == ""
    results = json.loads((tmp_path / "runs" / "simulated" / "simulation.json").read_text())
    one, both = results["results"].values()
    # Whoever waits on both sides waits longer.
    assert [a["waited_s"] < b["waited_s"] for a, b in zip(one, both)] == [True, True]
    assert all(each["idle_share"] < 0.5 for each in (*one, *both))


@pytest.mark.launch
def test_a_method_s_mistakes_are_one_line(toy, mpirun, tmp_path):
    words = ["train", "--algorithm", "pairs:sides=2"]
    ended = mpirun(None, *COMMAND, *words, timeout=100, cwd=tmp_path, forked=True)
    assert ended.returncode == 2
    assert "pairs:sides=2: pairs has no option 'sides': it has both" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("nowhere:METHOD", "ModuleNotFoundError: No module named 'nowhere'"),
        ("argparse:SUPPRESS", "it is a str, not a wagma.methods.Method"),
        ("wagma.methods:HOP", "there is a method 'hop' already"),
    ],
)
def test_an_entry_point_that_cannot_be_used_is_named_and_left_out(monkeypatch, value, says):
    point = EntryPoint("another", value, "wagma.methods")
    monkeypatch.setattr(methods, "HOP", methods.METHODS["hop"], raising=False)
    monkeypatch.setattr(methods, "entry_points", lambda group: EntryPoints([point]))
    with pytest.warns(UserWarning, match=f"entry point '{value}' of wagma.methods: {says}"):
        assert list(methods.declared()) == []


def test_the_first_of_two_methods_with_one_name_is_found(monkeypatch):
    points = [EntryPoint(name, "toy:METHOD", "wagma.methods") for name in ("a", "b")]
    method = replace(methods.METHODS["hop"], name="another")
    monkeypatch.setattr(EntryPoint, "load", lambda point: method)
    monkeypatch.setattr(methods, "entry_points", lambda group: EntryPoints(points))
    with pytest.warns(UserWarning, match="there is a method 'another' already"):
        assert list(methods.declared()) == [method]


def completions(line):
    """Return what argcomplete tells a shell."""
    pytest.importorskip("argcomplete")
    environment = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": "/dev/stdout",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    ended = subprocess.run(
        [sys.executable, "-m", "wagma"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return ended.stdout.split()


@pytest.mark.launch
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("wagma sim", {"simulate"}),
        ("wagma train --algorithm d", {"d-psgd"}),
        (
            "wagma train --algorithm parameter-server:mode=",
            {"bsp", "backup", "asp", "hete", "ringmaster", "async-local"},
        ),
        ("wagma compare --algorithms wagma,dd", {"wagma,ddp"}),
        ("wagma simulate --algorithms allreduce,sgp:ne", {"allreduce,sgp:neighbors="}),
    ],
)
def test_a_shell_learns_of_methods_and_their_options(line, expected):
    found = completions(line)
    assert {word.rpartition("mode=")[2] for word in found} == expected


def test_arguments_of_ones_own_are_checked_as_the_command_checks_them():
    from wagma.methods import METHODS

    method = METHODS["parameter-server"]
    assert method.given(["mode=backup", "backups=2"]) == {"mode": "backup", "backups": 2}
    with pytest.raises(
        argparse.ArgumentTypeError, match="backups must be an integer of at least 0"
    ):
        method.given(["backups=-1"])
    problem = "backups is 4, but must be less than the number of ranks, 4"
    assert method.problem(method.resolved({"backups": 4}), 4) == problem
    assert method.problem(method.resolved({"backups": 3}), 4) is None
    old = method.given(["mode=ringmaster", "max_age=2"])
    assert method.problem(method.resolved(old), 4) is None
    old["mode"] = "asp"
    assert method.problem(method.resolved(old), 4) == "max_age is 2, but mode is not ringmaster"
    local = method.given(["mode=async-local", "local_steps=4+4+1", "outer_momentum=0.5"])
    assert local["local_steps"] == (4, 4, 1)
    assert method.problem(method.resolved(local), 3) is None
    problem = "local_steps has 3 numbers, not one for each of 4 ranks"
    assert method.problem(method.resolved(local), 4) == problem
    dynamic = method.given(["mode=async-local", "local_steps=4+1", "dynamic_steps"])
    problem = "local_steps has a number for each rank, but dynamic_steps is set"
    assert method.problem(method.resolved(dynamic), 2) == problem
    dynamic = method.given(["dynamic_steps"])
    problem = "dynamic_steps is True, but mode is not async-local"
    assert method.problem(method.resolved(dynamic), 2) == problem
    with pytest.raises(argparse.ArgumentTypeError, match="outer_momentum must be a number of at"):
        method.given(["outer_momentum=1"])

    hop = METHODS["hop"]
    assert hop.given(["max_gap=none", "staleness=5"]) == {"max_gap": None, "staleness": 5}
    for words, problem in (
        (["backup=4"], "backup is 4, not between 0 and 3"),
        (["backup=1", "max_gap=none"], "backup needs tokens"),
        (
            ["staleness=2", "mode=notify-ack"],
            "notify-ack cannot be combined with backup, staleness",
        ),
        (["backup=3", "max_skip=2"], None),
    ):
        found = hop.problem(hop.resolved(hop.given(words)), 8)
        assert found is problem or problem in found
