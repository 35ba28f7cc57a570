"""A rank's process ends, and the others go on: under Open MPI's `mpiexec --with-ft ulfm`."""

import json
import re

import launch
import pytest
from launch import ULFM
from training import metrics

from wagma.checkpoint import files

pytestmark = pytest.mark.launch


@pytest.fixture(scope="module", autouse=True)
def ulfm():
    if not launch.has_ulfm():
        pytest.skip("this mpiexec has no ULFM: no rank can go on without another")


HEAD = """
import os, random, signal, sys, threading
import torch
from mpi4py import MPI
from collectives import RankDiedError
from wagma import checkpoint, optim
from wagma.checkpoint import saving

torch.set_num_threads(1)
comm = MPI.COMM_WORLD
me = comm.rank  # for ever


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 1))


def make(name, comm=comm, **options):
    "Return a model, its averager, and the list of what the rank is told."
    mine, told = model(), []
    sgd = torch.optim.SGD(mine.parameters(), lr=0.01, momentum=0.9)
    return mine, getattr(optim, name)(mine, sgd, comm=comm, survive=told.append, **options), told


def step_of(mine, averager, worth=1.0):
    (optimizer,) = averager.optimizers.given
    optimizer.zero_grad()
    (mine(torch.randn(8, 64)).square().mean() * worth).backward()
    optimizer.step()


def train(mine, averager, told, living):
    "Make steps until so many ranks are left, and ten more; return how many."
    made = 0
    while averager.comm.size > living or made < told[-1].version + 10:
        step_of(mine, averager)
        made += 1
        if made % 7 == 0:
            with averager.averaged():
                pass
    return made


def checked(mine, averager, made):
    "Check what holds for all that are left, and close."
    averager.synchronize()
    values = torch.cat([each.detach().flatten() for each in mine.parameters()])
    assert values.isfinite().all()
    everyone = averager.comm.allgather((values.tolist(), made))
    assert all(each == everyone[0] for each in everyone)
    averager.close()
"""


@pytest.fixture
def job(mpirun_text):
    def run(body, ranks=4, options=ULFM, **more):
        return mpirun_text(ranks, HEAD, body, options=options, **more)

    return run


@pytest.mark.parametrize("seed", [pytest.param(1, marks=pytest.mark.brief), 2])
def test_others_go_on_until_one_is_left_whatever_the_method(job, seed):
    """At random moments a rank dies in each of three trainings, one after the other."""
    result = job(
        f"""
        draw = random.Random({seed})
        order = draw.sample(range(4), 3)
        after = [draw.uniform(0.02, 0.4) for _ in order]
        trainings = [
            ("WAGMA", dict(overlap={seed == 1})),
            ("LocalSGD", dict(sync_period=3)),
            ("Allreduce", {{}}),
        ]
        group = comm
        for (name, options), victim, seconds in zip(trainings, order, after):
            mine, averager, told = make(name, group, **options)
            if me == victim:
                threading.Timer(seconds, die).start()
            made = train(mine, averager, told, group.size - 1)
            assert len(told) == 1 and len(told[0].dead) == 1, told
            assert told[0].counted == (() if name == "Allreduce" else told[0].dead), told
            checked(mine, averager, made)
            group = averager.comm
        print("went on", group.size, told[0], flush=True)
        """,
    )
    assert "went on 1 rank" in result.check().stdout


@pytest.mark.brief
@pytest.mark.parametrize("transport", ["shared", "messages"])
def test_two_die_at_once_and_one_more_during_the_recovery(job, transport):
    result = job(
        """
        from wagma.optim import recovery

        def dying(*arguments):
            die()

        if me == 3:
            recovery.average = dying
        mine, averager, told = make("WAGMA", group_size=4)
        if me in (0, 1):
            threading.Timer(0.2, die).start()
        made = train(mine, averager, told, 2)
        checked(mine, averager, made)
        dead = [each for recovery in told for each in recovery.dead]
        print("went on", averager.comm.size, len(dead), flush=True)
        """,
        ranks=5,
        env={"WAGMA_TRANSPORT": transport},
    )
    assert result.check().stdout.count("went on 2 3") == 2


def test_ranks_that_have_joined_go_on_as_well(job):
    """Rank 0 has no more steps to make when rank 1 dies; ranks 2 and 3 have."""
    result = job(
        """
        mine, averager, told = make("WAGMA")
        with averager.join():
            for step in range(30 * me):
                if (me, step) == (1, 20):
                    die()
                step_of(mine, averager)
        checked(mine, averager, averager.collective.version)
        print("went on", averager.comm.size, told[0].dead, flush=True)
        """,
    )
    assert result.check().stdout.count("went on 3 (1,)") == 3


@pytest.mark.parametrize("again", [False, True])
def test_the_last_model_of_a_dead_rank_counts_once_and_then_no_more(job, again):
    """Also if a rank cannot build anew at first, when another one has."""
    result = job(
        f"""
        again = {again}
        """
        """
        mine = torch.nn.Linear(3, 1, bias=False)
        told = []
        optimizer = torch.optim.SGD(mine.parameters(), lr=0)
        averager = optim.LocalSGD(mine, optimizer, sync_period=10**6, survive=told.append)

        def step_with(value):
            mine.weight.data.fill_(value)
            mine.weight.grad = torch.zeros_like(mine.weight)
            optimizer.step()

        step_with(2.0**me)  # published, and not averaged
        if again and me == 1:
            build = averager._recovery._build_again

            def failing(*arguments):
                averager._recovery._build_again = build
                build(*arguments)
                raise RankDiedError("not yet")

            averager._recovery._build_again = failing
        MPI.COMM_WORLD.Barrier()
        if me == 2:
            die()
        while not told:
            step_with(2.0**me)
        assert (told[0].dead, told[0].counted) == ((2,), (2,))
        assert mine.weight.eq(15 / 4).all(), mine.weight
        for _ in range(told[0].behind):
            optimizer.step()
        step_with(float(me))
        averager.synchronize()
        assert mine.weight.allclose(torch.tensor(4 / 3)), mine.weight  # of ranks 0, 1 and 3
        averager.close()
        print(told[0].lost, flush=True)
        """,
    )
    assert re.search(r"of rank 2, at most the step after its step 1\b", result.check().stdout)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("WAGMA", {"correction": "control-variates", "average_state": True}),
        ("LocalSGD", {"correction": "control-variates", "sync_period": 3}),
        ("WAGMA", {"overlap": True}),
        ("Allreduce", {}),
    ],
)
def test_a_step_without_finite_gradients_in_which_a_rank_dies_spoils_nothing(job, name, options):
    """Rank 1 dies when it has published what it made of them; rank 2 goes on from the others'."""
    result = job(
        f"""
        mine, averager, told = make({name!r}, **{options!r})
        """
        """
        survival = averager._recovery.state
        for step in range(40):
            if (me, step) == (1, 8):
                publish = survival.publish
                survival.publish = lambda memory: (publish(memory), die())
            step_of(mine, averager, float("nan") if step == 8 and me in (1, 2) else 1.0)
        assert (told[0].dead, told[0].counted) == ((1,), ()), told
        checked(mine, averager, 40)
        print("went on", averager.comm.size, flush=True)
        """,
    )
    assert result.check().stdout.count("went on 3") == 3


def test_ranks_at_their_own_pace_go_on_as_well(job):
    result = job(
        """
        mine, averager, told = make("WAGMA", pace="own", sync_period=4)
        with averager.join():
            for step in range(40 + 20 * me):
                if (me, step) == (2, 30):
                    die()
                step_of(mine, averager)
        assert told[0].dead == (2,) and told[0].behind == 0, told
        checked(mine, averager, None)
        print("went on", averager.comm.size, flush=True)
        """,
    )
    assert result.check().stdout.count("went on 3") == 3


def test_checkpoints_are_saved_by_those_that_are_left(job, tmp_path):
    """Ranks die in an average for a checkpoint, before its directory is made, and while writing."""
    result = job(
        f"""
        directory = {str(tmp_path)!r}
        """
        """
        mine, averager, told = make("WAGMA")
        saver = checkpoint.Saver(directory, averager, keep=9)
        dies_at = {3: (2, averager, "_settle"), 2: (4, saver, "_make_directory"),
                   0: (6, saving, "save_file")}
        for number in range(1, 9):
            for _ in range(5):
                step_of(mine, averager)
            save, owner, name = dies_at.get(me, (0, None, None))
            if number == save:
                setattr(owner, name, lambda *arguments, **options: die())
            saver.begin(step=5 * number, number=number)
        assert saver.finish().name == "000007-step-40"
        assert [each.dead for each in told] == [(3,), (2,), (0,)], told
        averager.close()
        print("saved", flush=True)
        """,
    )
    assert result.check().stdout == "saved\n"
    saved = {}
    for path in files.found(tmp_path):
        manifest = files.read_json(path / files.MANIFEST)
        files.check(path, manifest, manifest["files"])
        assert manifest["ranks_at_first"] == 4
        saved[manifest["step"]] = manifest["ranks"]
    # The one of step 30 died with rank 0, that was writing it.
    assert saved == {5: 4, 10: 3, 15: 3, 20: 2, 25: 2, 35: 1, 40: 1}


@pytest.mark.parametrize("name", ["WAGMA", "LocalSGD"])
def test_a_rank_that_dies_before_its_first_step_counts_by_what_it_has_loaded(job, tmp_path, name):
    result = job(
        f"""
        name, directory = {name!r}, {str(tmp_path)!r}
        """
        """
        mine, averager, told = make(name)
        with torch.no_grad():
            for parameter in mine.parameters():
                parameter.fill_(3)  # far from what a new model has
        checkpoint.save(directory, averager)
        averager.close()
        mine, averager, told = make(name)
        checkpoint.load(directory, averager)
        MPI.COMM_WORLD.Barrier()
        if me == 1:
            die()
        averager.synchronize()
        assert (told[0].dead, told[0].counted) == ((1,), (1,)), told
        assert all(each.allclose(torch.tensor(3.0)) for each in mine.parameters())
        averager.close()
        print("went on", averager.comm.size, flush=True)
        """,
        ranks=3,
    )
    assert result.check().stdout.count("went on 2") == 2


@pytest.mark.brief
def test_wagma_train_goes_on_with_the_data_of_the_dead(mpirun, tmp_path):
    """And saves checkpoints, from which as many ranks continue as are left."""
    script = tmp_path / "task.py"
    script.write_text(
        """
import os, signal
import torch

calls = 0


def model():
    return torch.nn.Linear(2, 1)


def data(rank, size, batch_size, seed):
    print(f"dealt {rank} of {size}", flush=True)
    batches = [(torch.ones(4, 2), torch.ones(4, 1))] * 5
    return batches, batches[:1]


def loss(model, batch):
    global calls
    calls += 1
    if calls == 20 and os.environ.get("DIES") == os.environ["OMPI_COMM_WORLD_RANK"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return (model(batch[0]) - batch[1]).square().mean()
"""
    )
    words = ["-m", "wagma", "train", "--script", script, "--survive", "scale", "--timeline"]
    words += ["--runs-dir", tmp_path, "--name", "one", "--sync-period", "4"]
    more = ["--steps", "60", "--checkpoint-every", "25"]
    result = mpirun(
        3, *words, *more, timeout=60, options=ULFM, forked=True, env={"DIES": "0"}
    ).check()
    assert {"dealt 0 of 2", "dealt 1 of 2"} <= set(result.stdout.splitlines())
    summary = json.loads((tmp_path / "one" / "summary.json").read_text())
    (recovery,) = summary["recoveries"]
    assert recovery["dead"] == [0] and recovery["size"] == 2
    assert summary["steps_of_rank"] == [60, 60]
    # Those of the averages before the death are counted, too.
    waited = [sum(each["waiting_s"] for each in metrics(tmp_path / "one", rank)) for rank in (1, 2)]
    assert min(each["waiting_s"] for each in metrics(tmp_path / "one", 1)) >= 0
    known = [each["waiting"] for each in summary["seconds_of_rank"]]
    # A third of the steps was before the death. The last checkpoint's waiting is beside them.
    assert all(each >= 0.99 * of_steps for each, of_steps in zip(known, waited))
    assert "rank 0 of 3 has died" in result.stderr
    drawn = mpirun(None, "-m", "wagma", "timeline", tmp_path / "one", timeout=60).check()
    assert "events of 3 ranks" in drawn.stdout  # also what the dead one did
    newest = files.found(tmp_path / "one" / "checkpoints")[0]
    assert newest.name == "000003-step-60"
    manifest = files.read_json(newest / files.MANIFEST)
    assert (manifest["ranks"], manifest["ranks_at_first"]) == (2, 3)
    more = ["--steps", "80", "--resume"]
    result = mpirun(2, *words, *more, timeout=60, options=ULFM, forked=True).check()
    assert "continuing from" in result.stdout
    # As on another number of ranks: what ranks 1 and 2 had recorded is not that of ranks 0 and 1.
    summary = json.loads((tmp_path / "one" / "summary.json").read_text())
    assert summary["steps_of_rank"] == [20, 20]
    before = {path.name for path in (tmp_path / "one" / "until-step-60").iterdir()}
    assert before == {"rank-0000.jsonl", "rank-0001.jsonl", "rank-0002.jsonl"}


def test_ranks_of_unequal_steps_go_on_without_checkpoints_only(mpirun):
    words = ("-m", "wagma", "train", "--survive", "--checkpoint-every", "9", "--seconds", "1")
    result = mpirun(None, *words, timeout=60, forked=True)
    assert result.returncode == 2
    assert "with checkpoints not allowed with argument --seconds" in result.stderr


@pytest.mark.parametrize("noticed", [True, False])
def test_those_that_are_left_end_by_themselves_right_after_a_death(job, noticed):
    """MPI_Finalize hangs then, once in ten jobs, if Open MPI's launcher has its fence there.

    That each has its own exit status shows that nothing but MPI_Finalize has ended them.
    """
    result = job(
        f"""
        noticed = {noticed}
        """
        """
        import ctypes

        left_out = ctypes.c_bool.in_dll(ctypes.CDLL(MPI.__file__), "ompi_async_mpi_finalize")
        assert not left_out.value
        mine, averager, told = make("WAGMA")
        assert left_out.value
        if not noticed:
            averager.close()
        if me == 1:
            die()
        if noticed:
            checked(mine, averager, train(mine, averager, told, 3))
        sys.exit(5 * (me == 2))
        """,
    )
    assert result.returncode == 5, result


def test_without_survive_the_job_ends_with_the_reason(job):
    result = job(
        """
        mine = model()
        with optim.WAGMA(mine) as averager:
            for step in range(10**6):
                if (me, step) == (1, 20):
                    die()
                averager.step()
        """,
        ranks=3,
    )
    assert result.returncode != 0
    assert "RankDiedError: the process of " in result.stderr
    assert result.seconds < 60  # on busy cores three processes alone take ten to start


def test_methods_that_need_every_rank_say_so(job):
    result = job(
        """
        solo = {"trigger": "solo"}
        for name, options in (("PartialReduce", {}), ("DPSGD", {}), ("LocalSGD", solo)):
            try:
                getattr(optim, name)(model(), survive=True, **options)
            except ValueError as error:
                print(error, flush=True)
        """,
        ranks=2,
    )
    said = set(result.check().stdout.splitlines())
    names = ("PartialReduce", "DPSGD", "LocalSGD")
    assert {line.split(";")[0] for line in said} == {
        f"survive: {name} cannot go on without a rank" for name in names
    }


def test_without_ulfm_it_is_refused(job):
    result = job(
        """
        try:
            make("WAGMA")
        except RuntimeError as error:
            print(error, flush=True)
        """,
        ranks=2,
        options=(),
    )
    assert "needs Open MPI 5 and its own `mpiexec --with-ft ulfm`" in result.check().stdout
