"""Records for other tools: TensorBoard's files, and a script's log()."""

import importlib.util
import json

import pytest
import training
from recorded import record

from wagma import cli

SCRIPT = """
import json, torch

def model(): return torch.nn.Linear(2, 1)
def data(rank, size, batch_size, seed): return [torch.ones(4, 2)], [torch.ones(4, 2)]
def loss(model, batch): return model(batch).square().mean()
def log(record): print("LOGGED", json.dumps(record), flush=True)
"""


def scalars(run, rank):
    """Return a rank's scalars: pairs of step and value by name."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(run / "tensorboard" / f"rank-{rank:04}"))
    events.Reload()
    return {
        tag: [(each.step, each.value) for each in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_every_rank_writes_its_times_and_rank_0_the_rest(tmp_path):
    pytest.importorskip("tensorboard")
    from wagma.scalars import Scalars, add_evaluations

    for rank in range(2):
        written = Scalars(tmp_path, rank)
        for step in range(3):
            written.add(record(step, 0.1 * (1 + rank), 0.05))
        written.close()
    add_evaluations(tmp_path, [{"step": 2, "accuracy": 0.5}], ["accuracy"])
    first, second = scalars(tmp_path, 0), scalars(tmp_path, 1)
    assert {*second} == {"time/step_ms", "time/waiting_ms"}
    assert second["time/step_ms"] == [(step, pytest.approx(200)) for step in range(3)]
    assert first["train/loss"] == [(step, pytest.approx(2 - 0.01 * step)) for step in range(3)]
    assert first["test/accuracy"] == [(2, 0.5)]


def test_without_tensorboard_its_option_is_an_error_of_one_line(monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tensorboard" else found(name)
    )
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--tensorboard"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("wagma: error: argument --tensorboard: not installed: pip install")
    assert error.count("\n") == 1


@pytest.mark.launch
def test_a_script_s_log_gets_the_records_of_its_rank(tmp_path):
    (tmp_path / "my_task.py").write_text(SCRIPT)
    options = ["--script", tmp_path / "my_task.py", "--steps", "3"]
    if importlib.util.find_spec("tensorboard"):
        options.append("--tensorboard")
    ended = training.train(tmp_path, "a", *map(str, options), ranks=2).check()
    lines = [line for line in ended.stdout.splitlines() if "LOGGED" in line]
    logged = [json.loads(line.partition("LOGGED ")[2]) for line in lines]
    for rank in range(2):
        records = training.metrics(tmp_path / "a", rank)
        of_rank = [each for each in logged if each["rank"] == rank]
        assert of_rank == [{"rank": rank, **each} for each in records] and len(records) == 3
    if importlib.util.find_spec("tensorboard"):
        assert {len(of) for of in scalars(tmp_path / "a", 1).values()} == {3}
        assert len(scalars(tmp_path / "a", 0)["test/loss"]) == 1
