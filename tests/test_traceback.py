"""What a command shows of a traceback."""

import re
import traceback
from types import SimpleNamespace

import pytest

from wagma import job
from wagma.tasks import script


def below(error):
    """Return an error without the test's own frame, which counts as the user's."""
    return error.with_traceback(error.__traceback__.tb_next)


def failing_script(tmp_path):
    """Return what a script of the user's raises, below frames of ours and of a library's."""
    path = tmp_path / "task.py"
    path.write_text(
        "import json\n\n\ndef loss():\n    return read('{')\n\n\n"
        "def read(text):\n    return json.loads(text)\n"
    )
    module = {}
    exec(compile(path.read_text(), str(path), "exec"), module)
    with pytest.raises(ValueError) as caught:
        job.from_rank_0(module["loss"], SimpleNamespace(rank=0))
    return path, below(caught.value)


def test_a_script_s_frames_are_shown_and_the_others_folded(tmp_path):
    path, error = failing_script(tmp_path)
    lines = job.traceback_of(error).splitlines()
    assert lines[:6] == [
        "Traceback (most recent call last):",
        "  [… 1 frame of wagma: --traceback shows them]",
        f'  File "{path}", line 5, in loss',
        "    return read('{')",
        f'  File "{path}", line 9, in read',
        "    return json.loads(text)",
    ]
    assert re.fullmatch(r"  \[… \d frames of Python: --traceback shows them\]", lines[6])
    assert "decoder.py" in lines[7]
    assert lines[-1].startswith("json.decoder.JSONDecodeError: ")
    assert len(lines) <= 11
    whole = job.traceback_of(error, whole=True)
    assert whole == "".join(traceback.format_exception(error)).rstrip()


def test_of_causes_the_script_s_is_shown_first(tmp_path):
    _, error = failing_script(tmp_path)
    outer = RuntimeError("training with wagma failed")
    outer.__cause__ = error
    text = job.traceback_of(outer)
    assert "Error: Expecting" in text.split(f"\n\n{job.CAUSED}\n\n")[0]
    assert text.endswith(f"\n\n{job.CAUSED}\n\nRuntimeError: training with wagma failed")


def test_a_script_s_syntax_error_is_shown_alone(tmp_path):
    (tmp_path / "task.py").write_text("def loss(:\n")
    with pytest.raises(SyntaxError) as caught:
        script.load(tmp_path / "task.py")
    error = below(caught.value)
    lines = job.traceback_of(error).splitlines()
    assert lines[1].startswith("  [… ") and lines[2] == f'  File "{tmp_path}/task.py", line 1'
    assert lines[-1].startswith("SyntaxError: ")


def test_our_own_failures_have_all_their_frames():
    with pytest.raises(TypeError) as caught:
        job.completed(None, "soon")
    error = below(caught.value)
    assert job.traceback_of(error) == "".join(traceback.format_exception(error)).rstrip()
