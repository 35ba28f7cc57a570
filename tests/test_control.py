"""Reinforcement learning: rollouts, advantages, PPO's loss, and what is refused."""

import itertools
import json
import logging
import math

import numpy as np
import pytest
import torch
from training import metrics, said, train_several

from wagma.cli import main
from wagma.job import UsageError
from wagma.tasks import contract

gymnasium = pytest.importorskip("gymnasium")
control = pytest.importorskip("wagma.tasks.control")


class Counting(gymnasium.Env):
    """Shows the frame's number, pays it, and ends after `reset`'s seed, or is cut at 7."""

    observation_space = gymnasium.spaces.Box(0, 100, (1,))
    action_space = gymnasium.spaces.Discrete(3, start=5)
    lengths = itertools.cycle([3, 9, 5])

    def reset(self, *, seed=None, options=None):
        self.frame, self.length = 0, next(type(self).lengths)
        return np.zeros(1), {}

    def step(self, action):
        assert action in (5, 6, 7)
        self.frame += 1
        ended, cut = self.frame == self.length, self.frame == 7
        return np.full(1, self.frame), self.frame, ended, cut, {}


class Gripper(Counting):
    """Takes vectors within bounds."""

    action_space = gymnasium.spaces.Box(-0.1, 0.1, (2, 3))

    def step(self, action):
        assert action.shape == (2, 3) and np.abs(action).max() <= 0.1 + 1e-6
        return super().step(5)


class Unending(Counting):
    """Never ends, nor is cut."""

    def step(self, action):
        self.frame += 1
        return np.full(1, self.frame), 1.0, False, False, {}


class Talking(Counting):
    """Takes and shows what is no vector."""

    action_space = gymnasium.spaces.MultiBinary(2)


class Telling(Counting):
    observation_space = gymnasium.spaces.Sequence(gymnasium.spaces.Discrete(2))


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for kind in (Counting, Gripper, Unending, Talking, Telling):
        name = f"{kind.__name__}-v0"
        monkeypatch.setitem(
            gymnasium.registry, name, gymnasium.envs.registration.EnvSpec(name, entry_point=kind)
        )
    monkeypatch.setattr(Counting, "lengths", itertools.cycle([3, 9, 5]))


class Knowing(torch.nn.Module):
    """A policy that draws the first action, and whose values are ten times the frames' numbers."""

    discrete = True

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def critic(self, observations):
        return 10 * observations

    def forward(self, observations):
        logits = torch.tensor([50.0, 0, 0]).expand(len(observations), 3) + self.weight
        return torch.distributions.Categorical(logits=logits), 10 * observations.squeeze(-1)


def settings(name, by_steps, seconds=0.0):
    return control.Settings(f"{name}-v0", by_steps, seconds)


def test_a_rollout_by_episodes_has_one_of_each_environment_whatever_their_lengths():
    environments = control.Environments(settings("Counting", False), 3, seed=0)
    rollout = environments.play(Knowing())
    frames = [list(range(length)) for length in (3, 7, 5)]
    assert rollout.observations.squeeze(-1).tolist() == list(itertools.chain(*frames))
    assert rollout.observations.dtype == rollout.returns.dtype == torch.float32
    assert rollout.actions.tolist() == 15 * [0]
    assert sorted(environments.returns) == [6, 15, 28]
    assert environments.frames == 15
    assert rollout.advantages.mean().item() == pytest.approx(0, abs=1e-6)
    assert rollout.advantages.std(correction=0).item() == pytest.approx(1, rel=1e-4)


def test_a_rollout_by_steps_has_equally_many_of_each_and_goes_on_later(monkeypatch):
    monkeypatch.setattr(control, "FRAMES", 4)
    environments = control.Environments(settings("Counting", True), 2, seed=0)
    assert environments.players[0].environment.unwrapped.length == 3
    first, second = (environments.play(Knowing()).observations.squeeze(-1) for _ in range(2))
    assert first.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert second.tolist() == [1, 2, 3, 4, 4, 5, 6, 0]
    assert sorted(environments.returns) == [6, 15, 28]


def test_an_end_is_worth_nothing_and_what_was_cut_goes_on_in_value():
    """γ-discounted surprises, with the value of the last frame's successor unless it was an end."""
    decay, expected = control.DISCOUNT * control.TRACE, []
    for length, beyond in ((3, 0.0), (7, 70.0)):
        values = [10.0 * frame for frame in range(length)]
        surprises = [
            frame + 1 + control.DISCOUNT * following - value
            for frame, (value, following) in enumerate(zip(values, [*values[1:], beyond]))
        ]
        for frame, value in enumerate(values):
            following = enumerate(surprises[frame:])
            expected.append(value + sum(decay**later * each for later, each in following))
    environments = control.Environments(settings("Counting", False), 2, seed=0)
    rollout = environments.play(Knowing())
    assert rollout.returns.tolist() == pytest.approx(expected, rel=1e-5)


def test_episodes_without_a_limit_are_cut(monkeypatch):
    monkeypatch.setattr(control, "LONGEST", 20)
    environments = control.Environments(settings("Unending", False), 2, seed=0)
    rollout = environments.play(Knowing())
    assert rollout.observations.squeeze(-1).tolist() == 2 * list(range(20))
    assert [player.parts[0].beyond for player in environments.players] == [200.0, 200.0]
    policy = control.Policy(1, Unending.action_space)
    assert control.metrics(policy, control.Trial("Unending-v0", range(2))) == {"return": 20}


def test_vectors_of_actions_are_within_their_bounds():
    task = control.task(settings("Gripper", False))
    policy = task.model()
    batch = next(iter(task.data(0, 1, 4, 0)[0]))
    task.loss(policy, batch).backward()
    assert batch.transitions(policy).actions.shape[1:] == (6,)
    assert all(parameter.grad is not None for parameter in policy.parameters())


def test_a_rollout_is_played_once_by_the_policy_of_its_first_step():
    task = control.task(settings("Counting", False))
    batches = iter(task.data(0, 1, 4, 0)[0])
    policy = task.model()
    first = [next(batches) for _ in range(control.PASSES * control.PARTS)]
    assert {batch.shape for batch in first} == {()}
    parts = [batch.transitions(policy) for batch in first]
    pending = {id(batch._pending) for batch in first}
    assert len(pending) == 1 and next(batches)._pending is not first[0]._pending
    assert [task.work(batch) for batch in first] == [len(part.returns) for part in parts]
    name, each = task.reported
    assert name == "environment_steps" and sum(map(task.work, first)) / each == (
        first[0]._pending.environments.frames
    )
    whole = first[0]._pending.played(policy)
    assert [batch.played for batch in first] == [len(whole.returns)] + [0] * (len(first) - 1)
    for start in range(0, len(parts), control.PARTS):
        one_pass = torch.cat([part.returns for part in parts[start : start + control.PARTS]])
        assert sorted(one_pass.tolist()) == sorted(whole.returns.tolist())
    assert not torch.equal(parts[0].returns, parts[control.PARTS].returns)


class Wrapped(torch.nn.Module):
    """Calls its module, as DistributedDataParallel, and has none of its other attributes."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, observations):
        return self.module(observations)


def test_a_policy_that_is_wrapped_plays_its_rollouts_itself():
    task = control.task(settings("Counting", True))
    policy = Knowing()
    batches, wrapped = iter(task.data(0, 1, 4, 0)[0]), Wrapped(policy)
    wrapped.forward = None  # it is computed for gradients only
    (batch,) = itertools.islice(batches, 1)
    assert len(batch.transitions(wrapped).returns) == control.FRAMES
    del wrapped.forward
    assert task.loss(wrapped, batch).requires_grad


def test_the_loss_is_clipped_where_the_policy_has_changed_too_much():
    torch.manual_seed(0)
    policy = control.Policy(1, gymnasium.spaces.Discrete(2))
    observations = torch.zeros(2, 1)
    chances, values = policy(observations)
    actions = torch.tensor([0, 0])
    logs = chances.log_prob(actions).detach() - torch.tensor([0.0, 1.0])  # ratios 1 and e
    advantages = torch.tensor([1.0, 1.0])
    rollout = control.Rollout(observations, actions, logs, advantages, values.detach())

    class Given:
        def transitions(self, policy):
            return rollout

    entropy = control.ENTROPY * chances.entropy().mean().item()
    expected = -(1 + (1 + control.CLIP)) / 2 - entropy
    assert control.loss(policy, Given()).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["Counting", "Gripper"])
@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_a_policy_that_is_not_finite_has_a_loss_that_is_not(name, lost):
    task = control.task(settings(name, False))
    policy, (batches, trials) = task.model(), task.data(0, 1, 4, 0)
    with torch.no_grad():
        for each in policy.actor.parameters():
            each.fill_(lost)
    assert not task.loss(policy, next(iter(batches))).isfinite()
    assert contract.evaluate(task, policy, trials).means()["return"] > 0


def test_a_policy_without_any_spread_has_a_loss_that_is_not_finite():
    task = control.task(settings("Gripper", False))
    policy = task.model()
    with torch.no_grad():
        policy.spread.fill_(-200)
    assert not task.loss(policy, next(iter(task.data(0, 1, 4, 0)[0]))).isfinite()


def test_environments_take_the_time_of_their_longest_episode(monkeypatch):
    slept = []
    monkeypatch.setattr(control.time, "sleep", slept.append)
    control.Environments(settings("Counting", False, 0.5), 3, seed=0).play(Knowing())
    assert slept == [7 * 0.5]


def test_the_average_return_of_the_last_episodes_is_logged(caplog):
    environments = control.Environments(settings("Counting", False), 3, seed=0)
    with caplog.at_level(logging.INFO):
        environments.play(Knowing())
    assert caplog.messages == [
        "average return of the last 3 episodes: 16.3, after 15 steps of the environments"
    ]


def test_each_step_records_the_average_return_of_the_last_episodes(monkeypatch):
    monkeypatch.setattr(control, "EPISODES", 6)  # of four in a rollout
    task = control.task(settings("Counting", False))
    policy, batches = task.model(), iter(task.data(0, 1, 4, 0)[0])
    told = task.recorded["training_return"]
    returns, averages = [], []
    for _ in range(2):
        rollout = [next(batches) for _ in range(control.PASSES * control.PARTS)]
        assert told(rollout[0]) == (averages[-1] if averages else None)
        for batch in rollout:
            task.loss(policy, batch)
            averages.append(told(batch))
        returns += [6, 15, 28, 28] if returns else [6, 6, 15, 28]  # in the order of their ends
        assert averages[-1] == pytest.approx(sum(returns[-6:]) / len(returns[-6:]))
    assert len(set(averages)) == 2


def test_the_ranks_share_out_the_episodes_of_tests_and_train_on_others():
    task = control.task(settings("Counting", False))
    data = [task.data(rank, 3, 4, 0) for rank in range(3)]
    tested = [seed for _, trials in data for trial in trials for seed in trial.seeds]
    assert sorted(tested) == list(range(control.EPISODES))
    assert control.task(settings("Counting", False)).data(100, 101, 4, 0)[1] == []
    policy = control.Policy(1, Counting.action_space)
    means = [contract.evaluate(task, policy, trials) for _, trials in data]
    assert [each.samples for each in means] == [34, 33, 33]
    assert contract.all_ranks(means)["return"] == pytest.approx(
        sum(each.sums["return"] for each in means) / control.EPISODES
    )


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ("Nope-v0", "Environment `Nope` doesn't exist"),
        ("no_such_module:Nope-v0", "No module named 'no_such_module'"),
        ("Talking-v0", "Talking-v0 has actions of the space MultiBinary, which are no vectors of"),
        ("Telling-v0", "Telling-v0 has observations of the space Sequence, which are no vectors"),
    ],
)
def test_environments_that_cannot_be_played_are_refused(environment, message):
    with pytest.raises(UsageError) as raised:
        control.make(environment)
    assert str(raised.value).startswith(f"argument --environment: {message}")


def test_too_few_environments_for_minibatches_are_refused():
    task = control.task(settings("Counting", False))
    with pytest.raises(UsageError, match="^argument --batch-size: 3 environments are too few "):
        contract.prepare(task, 0, 1, 3, 0)


@pytest.mark.extra
@pytest.mark.long
def test_ppo_learns_to_balance_a_pole():
    task = control.task(control.Settings("CartPole-v1", by_steps=False))
    prepared = contract.prepare(task, 0, 4, 8, seed=0)
    policy = prepared.model
    before = contract.evaluate(task, policy, prepared.test).means()["return"]
    adam = torch.optim.AdamW(policy.parameters(), 3e-3)
    for batch in itertools.islice(prepared.batches, 12 * control.PASSES * control.PARTS):
        adam.zero_grad()
        task.loss(policy, batch).backward()
        adam.step()
    after = contract.evaluate(task, policy, prepared.test).means()["return"]
    assert before < 100 and after > 150


def test_simulated_ranks_play_one_by_one(tmp_path, capsys):
    arguments = ["simulate", "--train", "--task", "control", "--batch-size", "4", "--ranks", "3"]
    arguments += ["--algorithms", "wagma:wait=group", "--group-size", "1", "--steps", "10"]
    assert main([*arguments, "--runs-dir", str(tmp_path), "--name", "played"]) == 0
    assert "test return" in capsys.readouterr().out


@pytest.mark.launch
def test_jobs_play(tmp_path):
    less = ["--task", "control", "--steps", 20, "--batch-size", 4]
    runs = {
        "episodes": [*less, "--environment-time", 0.1, "--evaluate-every", 10],
        "steps": [*less, "--batch-by", "steps", "--environment", "Pendulum-v1"],
    }
    lines = said(train_several(tmp_path, runs, ranks=2).check())
    assert sum(" environment steps/s, " in line for line in lines) == 2
    for name in runs:
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        learned_from = control.PASSES * summary["environment_steps_per_s"]
        assert learned_from == pytest.approx(summary["samples_per_s"])
        assert summary["metrics"] == ["return"]
        assert summary["recorded"] == ["training_return"]
        last = [metrics(tmp_path / name, rank)[-1]["training_return"] for rank in range(2)]
        assert summary["training_return_of_rank"] == last
        assert summary["training_return"] == (
            pytest.approx(sum(last) / 2) if name == "episodes" else None
        )
        assert (summary["return"] > 0) == (name == "episodes")
        assert "average return of the last" in (tmp_path / name / "rank-0001.log").read_text() or (
            name == "steps"  # no episode of a pendulum has ended
        )
