"""`wagma watch`: what is shown of a run, while it trains and afterwards."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import time

import pytest
from recorded import age, append, record, write
from rich.console import Console

from wagma import cli, following, watch
from wagma.following import Lines, Run

TIMEOUT = 30  # seconds


def polled(directory):
    run = Run(directory)
    run.poll()
    return run


def shown(run, width=80, height=24):
    """Return the lines of a view."""
    console = Console(width=width, height=height, markup=False, highlight=False)
    with console.capture() as capture:
        console.print(watch.frame(run, width, height))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_rank_s_recent_steps_are_compared_with_the_others(tmp_path):
    lines = shown(polled(write(tmp_path / "a", [0.1, 0.1, 0.2, 0.1])))
    assert lines[0].startswith("running  4 ranks  wagma  ")
    assert lines[2] == "step 40 of 80, 10 s, 10 s remaining, 512 samples/s, loss 1.705"
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines[4:9]]
    assert rows[0][:-1] == ["rank", "step", "samples/s", "loss", "step ms", "÷ others", "wait"]
    assert rows[1] == ["0", "40", "128", "1.705", "100", "1.00", "60%", "0"]
    assert rows[3] == ["2", "40", "128", "1.705", "200", "2.00", "20%", "0", "slow"]
    assert lines[-1] == "late now: rank 2 takes 2.0 × the others' time"


def test_what_a_task_has_added_to_records_is_shown_as_the_mean_of_the_ranks(tmp_path):
    directory = write(tmp_path / "a", [0.1, 0.1, 0.1], recorded=["training_return"])
    assert "return" not in shown(polled(directory), 120)[2]
    for rank, value in enumerate((20.0, 25.5)):
        append(directory, rank, [record(40, training_return=value)])
    assert ", training return 22.75" in shown(polled(directory), 120)[2]


def test_a_file_is_followed_as_it_grows_also_by_parts_of_lines(tmp_path):
    run = polled(write(tmp_path / "a", [0.1, 0.1], steps=3))
    text = json.dumps(record(3)) + "\n" + json.dumps(record(4)) + "\n"
    for part in (text[:7], text[7:-5]):
        with (tmp_path / "a" / "rank-0001.jsonl").open("a") as file:
            file.write(part)
        run.poll()
    assert [rank.steps for rank in run.ranks.values()] == [3, 4]
    with (tmp_path / "a" / "rank-0001.jsonl").open("a") as file:
        file.write(text[-5:])
    append(tmp_path / "a", 2, [record(0)])  # a rank that made its first step late
    run.poll()
    assert {number: rank.steps for number, rank in run.ranks.items()} == {0: 3, 1: 5, 2: 1}


def test_of_a_long_file_only_the_end_is_read(tmp_path):
    count = 3 * following.TAIL // len(json.dumps(record(0)))
    run = write(tmp_path / "a", [0.1], steps=count)
    lines = Lines(run / "rank-0000.jsonl")
    read = [each["step"] for each in lines.read()]
    assert read == list(range(read[0], count)) and following.RECENT < len(read) < count / 2
    append(run, 0, [record(count)])
    assert [each["step"] for each in lines.read()] == [count]
    assert lines.read() == []


def test_a_run_that_was_killed_is_followed_where_it_is_continued(tmp_path):
    """From its checkpoint: the records since that are cut off."""
    run = polled(write(tmp_path / "a", [0.1], steps=10))
    path = tmp_path / "a" / "rank-0000.jsonl"
    with path.open("a") as file:
        file.write('{"step": 10')
    run.poll()
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))
    append(tmp_path / "a", 0, [record(5)])
    run.poll()
    assert [each["step"] for each in run.ranks[0].recent] == list(range(6))
    assert run.ranks[0].damaged == 0


def test_damaged_lines_are_left_out_and_counted(tmp_path):
    directory = write(tmp_path / "a", [0.1, 0.1])
    with (directory / "rank-0001.jsonl").open("ab") as file:
        file.write(b'{"step": 4{"step": 41, "loss"\n\0\0\xff\n[1]\n')
    append(directory, 1, [record(40)])
    run = polled(directory)
    assert [rank.steps for rank in run.ranks.values()] == [40, 41]
    assert shown(run, 120)[2].endswith(", 3 damaged lines left out")


def test_a_rank_that_has_died_is_silent_and_comes_first(tmp_path):
    directory = write(tmp_path / "a", 30 * [0.1])
    age(directory / "rank-0021.jsonl", 130)
    lines = shown(polled(directory))
    assert len(lines) <= 24 and all(len(line) <= 80 for line in lines)
    assert re.match(r" *21 +40 .* silent 2:1\d min$", lines[5])
    assert re.match("late now: rank 21 has not written for 2:1", lines[-1])
    assert [line.split()[0] for line in lines[-5:-2]] == ["least", "median", "most"]


def test_if_no_rank_writes_the_job_may_be_gone(tmp_path):
    directory = write(tmp_path / "a", [0.1, 0.1])
    for rank in range(2):
        age(directory / f"rank-{rank:04}.jsonl", 45 + rank)
    lines = shown(polled(directory))
    assert (
        re.search(r"silent for [45]\d s", lines[0]) and "stopped, evaluating or killed" in lines[0]
    )


def test_a_rank_is_not_silent_before_ten_of_its_steps(tmp_path):
    directory = write(tmp_path / "a", [0.1, 0.1])
    append(directory, 0, [record(step, 3.0) for step in range(40, 80)])
    age(directory / "rank-0000.jsonl", 20)
    age(directory / "rank-0001.jsonl", 20)
    assert [rank.is_silent for rank in polled(directory).ranks.values()] == [False, True]


def test_ranks_that_are_behind_and_late_are_shown(tmp_path):
    directory = write(tmp_path / "a", [0.1, 0.1], pace="own", total_steps=200, total=100)
    late = [record(step, 0.1, 0.15, timely=step % 2 == 0) for step in range(40, 45)]
    append(directory, 1, [*late, record(45, timely=False), record(46, timely=False)])
    run = polled(directory)
    lines = shown(run)
    assert lines[2].startswith("step 44 of 100, ")  # the mean, as the ranks have a common total
    assert lines[5].endswith("7 behind") and lines[6].split()[-1] == "2"


def test_a_run_by_time_and_one_of_unknown_length(tmp_path):
    run = polled(write(tmp_path / "a", [0.1], total=None, seconds=20))
    assert (run.done, round(run.remaining_s)) == (0.5, 10)
    assert "10 s of 20 s, 10 s remaining" in shown(run)[2]
    run = polled(write(tmp_path / "b", [0.1], total=None))
    assert (run.done, run.remaining_s) == (None, None)
    assert shown(run)[2].startswith("step 40, 10 s, 128 samples/s")


@pytest.mark.parametrize("size", [(80, 24), (60, 16), (140, 60)])
@pytest.mark.parametrize("ranks", [1, 4, 64, 300])
def test_a_view_fits_into_the_terminal(tmp_path, size, ranks):
    run = polled(write(tmp_path / "a", ranks * [0.1], steps=2, algorithm="wagma:" + 80 * "x"))
    lines = shown(run, *size)
    assert len(lines) < size[1] and all(len(line) <= size[0] for line in lines)


def test_ranks_that_have_not_begun_are_shown_as_such(tmp_path):
    directory = write(tmp_path / "a", [0.1, 0.1], steps=0)
    assert shown(polled(directory))[2] == "step 0 of 80, 0 s, 0 samples/s"


def test_losses_that_json_lacks_are_left_out(tmp_path):
    directory = write(tmp_path / "a", [0.1])
    append(directory, 0, [record(step, loss=None) for step in range(40, 60)])
    assert "–" in shown(polled(directory))[5]


def test_one_view_is_printed_for_scripts(tmp_path, capsys):
    directory = write(tmp_path / "a", [0.1, 0.1])
    assert cli.main(["watch", str(directory), "--once"]) == 0
    assert "step 40 of 80" in capsys.readouterr().out


def test_the_newest_run_of_a_comparison_is_shown(tmp_path, capsys):
    (tmp_path / "seed-0").mkdir()
    write(tmp_path / "seed-0" / "allreduce", [0.1])
    age(tmp_path / "seed-0" / "allreduce" / "config.json", 60)
    write(tmp_path / "seed-0" / "sgp", [0.1], algorithm="sgp")
    assert cli.main(["watch", str(tmp_path), "--once"]) == 0
    assert capsys.readouterr().out.startswith("running  1 rank  sgp  ")


@pytest.mark.parametrize("name", ["gone", "empty"])
def test_a_directory_without_a_run_is_one_line(tmp_path, capsys, name):
    (tmp_path / "empty").mkdir()
    assert cli.main(["watch", str(tmp_path / name), "--once"]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and str(tmp_path / name) in text


def test_neither_mpi_nor_torch_is_loaded(tmp_path):
    directory = write(tmp_path / "a", [0.1, 0.1])
    program = (
        "import sys; from wagma import cli; status = cli.main(['watch', sys.argv[1], '--once']); "
        "print('LOADED', *({'mpi4py.MPI', 'torch', 'matplotlib'} & {*sys.modules}), status)"
    )
    command = [sys.executable, "-c", program, str(directory)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert ended.stdout.splitlines()[-1] == "LOADED 0", ended


@contextlib.contextmanager
def watching(directory):
    """Watch a directory on a terminal; yield that, and wait for the end of the program."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "wagma", "watch", str(directory), "--interval", "0.1"]
    env = os.environ | {"COLUMNS": "80", "LINES": "24", "TERM": "xterm"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, env=env) as process:
        os.close(theirs)
        yield ours
        assert process.wait(TIMEOUT) == 0
    os.close(ours)


def test_on_a_terminal_the_view_follows_the_run_until_it_ends(tmp_path):
    directory = write(tmp_path / "a", [0.1, 0.1], steps=3)
    with watching(directory) as terminal:
        read_until(terminal, "step 3 of 80")
        for rank in range(2):
            append(directory, rank, [record(step) for step in range(3, 7)])
        read_until(terminal, "step 7 of 80")
        (directory / "summary.json").write_text("{}")
        read_until(terminal, "ended")


def test_of_a_comparison_one_run_after_another_is_shown_until_it_ends(tmp_path):
    (tmp_path / "seed-0").mkdir()
    first = write(tmp_path / "seed-0" / "allreduce", [0.1], algorithm="allreduce")
    age(first / "config.json", 60)
    (first / "summary.json").write_text("{}")
    with watching(tmp_path) as terminal:
        read_until(terminal, "ended  1 rank  allreduce")
        second = tmp_path / "seed-0" / "sgp"
        second.mkdir()
        (second / "config.json").touch()
        time.sleep(0.5)  # in which it looks at this several times
        for each in write(tmp_path / "elsewhere", [0.1], algorithm="sgp").iterdir():
            each.replace(second / each.name)
        read_until(terminal, "running  1 rank  sgp")
        (tmp_path / "comparison.json").write_text("{}")
        (second / "summary.json").write_text("{}")
        read_until(terminal, "ended  1 rank  sgp")


def read_until(terminal, text):
    """Read what a program writes to its terminal until there is a text; fail after a while."""
    seen, deadline = "", time.monotonic() + TIMEOUT
    while text not in seen:
        assert time.monotonic() < deadline, seen
        seen += os.read(terminal, 4096).decode(errors="replace")
