"""What ranks tell each other before they start."""

import pytest

from collectives import agreement
from collectives.agreement import name_ranks, raise_collectively, singleton_error


class Ranks:
    """A communicator whose allgather returns what the test says."""

    def __init__(self, *values):
        self.values = values

    def allgather(self, _):
        return list(self.values)


def test_nobody_raises_where_nothing_is_wrong():
    raise_collectively(Ranks(None, None), None)


def test_an_error_of_all_ranks_is_said_once():
    with pytest.raises(TypeError, match="^a$"):
        raise_collectively(Ranks(TypeError("a"), TypeError("a")), None)


def test_errors_of_some_ranks_name_them():
    errors = Ranks(ValueError("a"), None, ValueError("a"), ValueError("b"))
    with pytest.raises(ValueError, match="^ranks 0, 2: a; rank 3: b$"):
        raise_collectively(errors, None)


class Odd(Exception):
    """An error that cannot be made of a text."""

    def __init__(self, what, where):
        super().__init__(what, where)


class OneRank:
    def allgather(self, value):
        return [value]


@pytest.mark.parametrize("local", [False, True])
def test_an_error_that_cannot_be_sent_is_a_runtime_error(local):
    """No rank may raise before it has told the others."""

    class Local(Exception):
        pass

    error = Local("a") if local else Odd("a", "b")
    with pytest.raises(RuntimeError, match=f"^{type(error).__name__}: .*a"):
        raise_collectively(OneRank(), error)


def test_ranks_are_named_as_a_reader_wants_them():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([0, 1, 2, 3, 7, 9, 10]) == "ranks 0-3, 7, 9-10"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    torch = (agreement.TORCH_COUNT, "LOCAL_RANK", "TORCHELASTIC_RUN_ID")
    for variable in (*agreement.TASK_COUNTS, *torch):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(("tasks", "alone"), [("4", True), ("1", False), ("", False)])
def test_one_rank_of_many_tasks_is_a_singleton(monkeypatch, tasks, alone):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", tasks)
    assert (singleton_error(1) is not None) == alone
    assert singleton_error(4) is None


SRUN = {"SLURM_STEP_NUM_TASKS": "2"}
TORCH = {"WORLD_SIZE": "8", "LOCAL_RANK": "0"}
AT_WORK = {"TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("variables", "tasks", "name"),
    [
        ({"WORLD_SIZE": "8"}, 1, ""),
        ({"WORLD_SIZE": "1", "LOCAL_RANK": "0"} | AT_WORK, 1, ""),
        (TORCH, 8, "WORLD_SIZE"),
        (TORCH | SRUN, 2, "SLURM_STEP_NUM_TASKS"),
        (TORCH | SRUN | AT_WORK, 8, "WORLD_SIZE"),
    ],
)
def test_torchrun_s_variables_count_where_it_is_at_work(monkeypatch, variables, tasks, name):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert agreement.launched_tasks() == (tasks, name)
    assert singleton_error(8) is None
    message = str(singleton_error(1))
    assert message.endswith("start it with mpiexec or srun") == (name == "WORLD_SIZE")
