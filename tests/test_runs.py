"""A run's directory: new, and one job's alone."""

import errno
import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from training import TIMEOUT

from wagma import runs
from wagma.job import UsageError

TOGETHER = 8


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch):
    for variable in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def noon(monkeypatch):
    """Stop the clock."""
    monkeypatch.setattr(time, "strftime", lambda form: "noon")


def made_together(directory, name):
    """Return what several callers get who ask for a directory at the same time."""
    ready, results = threading.Barrier(TOGETHER), []

    def make():
        ready.wait()
        try:
            results.append(runs.new_directory(directory, name))
        except UsageError as error:
            results.append(str(error))

    threads = [threading.Thread(target=make) for _ in range(TOGETHER)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_of_jobs_with_the_same_name_one_gets_the_directory(tmp_path):
    results = made_together(tmp_path / "runs", "mine")
    run = tmp_path / "runs" / "mine"
    refused = [result for result in results if result != run]
    assert refused == [f"{run} exists: choose another --name, or remove it"] * (TOGETHER - 1)
    assert run.is_dir()


def test_jobs_without_a_name_get_directories_of_their_own(tmp_path, noon):
    results = made_together(tmp_path, None)
    names = {"noon", *(f"noon-{number}" for number in range(2, TOGETHER + 1))}
    assert sorted(result.name for result in results) == sorted(names)


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, "noon"),
        ({"SLURM_JOB_ID": "17"}, "noon_17"),
        (
            {"SLURM_JOB_ID": "17", "SLURM_ARRAY_JOB_ID": "15", "SLURM_ARRAY_TASK_ID": "2"},
            "noon_15_2",
        ),
    ],
)
def test_default_names_have_slurm_s_numbers(monkeypatch, noon, variables, name):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert list(itertools.islice(runs.default_names(), 3)) == [name, f"{name}-2", f"{name}-3"]


@pytest.mark.parametrize("name", [None, "mine"])
def test_a_directory_that_cannot_be_made_is_named(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot make the directory .*file: File exists"):
        runs.new_directory(tmp_path / "file", name)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="link exists"):
        runs.new_directory(tmp_path, "link")


class Disk:
    """A file of a disk that has room for so many bytes more."""

    def __init__(self, file, free):
        self._file, self.free = file, free

    def write(self, held):
        fits = bytes(held[: self.free])
        if not fits:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.free -= len(fits)
        return self._file.write(fits)

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._file.close()


def test_records_stay_in_memory_while_a_disk_is_full(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(runs, "FLUSH_EVERY", 0)
    path = tmp_path / "rank-0000.jsonl"
    lines = runs.JsonLines(path)
    disk = lines._file = Disk(lines._file, 17)
    records = [{"step": step} for step in range(4)]
    for record in records[:3]:
        lines.write(record)
    assert path.stat().st_size == 17
    (message,) = caplog.messages
    assert message == f"cannot write {path} for now: No space left on device"
    with pytest.raises(OSError, match="No space left"):
        lines.size()
    disk.free = 1000
    lines.write(records[3])
    assert lines.size() == path.stat().st_size
    lines.close()
    assert list(map(json.loads, path.read_text().splitlines())) == records


def test_a_training_whose_last_records_do_not_fit_goes_on_to_its_end(tmp_path, caplog):
    """It may have been stopped, and be continued: what is lost is cut off then anyway."""
    path = tmp_path / "rank-0000.jsonl"
    with runs.JsonLines(path) as lines:
        lines._file = Disk(lines._file, 0)
        lines.write({"step": 0})
    assert caplog.messages == [f"{path} lacks its last lines: No space left on device"]
    assert lines._file.closed


@pytest.mark.launch
def test_of_commands_that_start_together_one_gets_the_name(mpirun, tmp_path):
    command = ["-m", "wagma", "train", "--steps", "1", "--name", "mine"]
    with ThreadPoolExecutor() as jobs:
        started = [
            jobs.submit(mpirun, None, *command, timeout=TIMEOUT, cwd=tmp_path) for _ in range(2)
        ]
    trained, refused = sorted((job.result() for job in started), key=lambda job: job.returncode)
    assert (trained.returncode, refused.returncode) == (0, 2)
    assert "training on 1 rank" in trained.stdout
    taken = "wagma: error: runs/mine exists: choose another --name, or remove it\n"
    assert refused.stderr == taken
    assert {path.name for path in (tmp_path / "runs" / "mine").glob("rank-*")} == {
        "rank-0000.jsonl",
        "rank-0000.log",
    }
