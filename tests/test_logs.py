"""Where log messages go."""

import logging
import warnings

import pytest

from collectives.settings import resolve, set_log_level
from wagma import logs


@pytest.fixture(autouse=True)
def as_before():
    """Leave Python's logging as it was."""
    levels = [(logger, logger.level) for logger in map(logging.getLogger, logs.LOGGERS)]
    yield
    logs.stop()
    for logger, level in levels:
        logger.setLevel(level)


def speak():
    log = logging.getLogger("wagma.train")
    log.debug("a detail")
    log.info("a fact")
    logging.getLogger("collectives").warning("rank 3 is missing")
    logging.getLogger("somebody").info("not ours")
    log.error("a mistake")


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("debug", ["a detail", "a fact", "rank 3 is missing", "a mistake"]),
        ("info", ["a fact", "rank 3 is missing", "a mistake"]),
        ("warning", ["rank 3 is missing", "a mistake"]),
        ("error", ["a mistake"]),
    ],
)
def test_the_level_says_what_rank_0_shows(capsys, level, shown):
    logs.start(level, rank=0)
    speak()
    output = capsys.readouterr()
    assert output.out == ""
    assert [line.split(": ", 2)[2] for line in output.err.splitlines()] == shown


def test_a_line_names_the_logger_and_the_level(capsys):
    logs.start("warning", rank=0)
    speak()
    first, second = capsys.readouterr().err.splitlines()
    assert first == "collectives: warning: rank 3 is missing"
    assert second == "wagma.train: error: a mistake"


def test_a_second_command_of_a_process_has_a_terminal_and_a_file_of_its_own(capsys, tmp_path):
    handlers = logging.getLogger().handlers[:]
    for rank in range(2):
        logs.start("warning", rank=0)
        logs.to_file(tmp_path, rank)
    speak()
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0001.log"]
    logs.stop()
    assert logging.getLogger().handlers == handlers


def test_the_variable_does_not_overrule_the_command(monkeypatch):
    monkeypatch.setenv(logs.VARIABLE, "error")
    logs.start("info", rank=1)
    set_log_level(resolve(None, {})["log_level"])
    assert logging.getLogger("collectives").isEnabledFor(logging.INFO)


@pytest.mark.parametrize(("level", "lines"), [("debug", 4), ("info", 3), ("error", 3)])
def test_other_ranks_are_silent_and_their_file_has_all_from_info_on(capsys, tmp_path, level, lines):
    logs.start(level, rank=3)
    logs.to_file(tmp_path, rank=3)
    assert not list(tmp_path.iterdir())
    speak()
    output = capsys.readouterr()
    assert output.out == output.err == ""
    written = (tmp_path / "rank-0003.log").read_text().splitlines()
    assert len(written) == lines
    assert written[-2].endswith(" WARNING collectives: rank 3 is missing")
    assert written[-1].endswith(" ERROR wagma.train: a mistake")


def test_python_s_warnings_are_logged_too(capsys, tmp_path):
    logs.start("warning", rank=1)
    logs.to_file(tmp_path, rank=1)
    with warnings.catch_warnings():
        # pytest records warnings; the command's go where Python's do.
        warnings.showwarning = logging._showwarning
        warnings.simplefilter("always")
        warnings.warn("an old function", stacklevel=1)
    assert capsys.readouterr().err == ""
    assert "an old function" in (tmp_path / "rank-0001.log").read_text()
