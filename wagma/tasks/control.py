"""Reinforcement learning by PPO on an environment of gymnasium: `wagma train --task control`.

A rank plays with its own environments and its own policy until it has a rollout, waits for no other
rank meanwhile, and learns from the rollout in several steps (Schulman et al., Proximal policy
optimization algorithms, 2017).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import nn
from torch.distributions import Categorical, Distribution, Independent, Normal
from torch.nn import functional

from wagma.devices import device_of
from wagma.job import UsageError
from wagma.tasks.contract import Task

WIDTH = 64
DISCOUNT, TRACE = 0.99, 0.95  # γ, and λ of generalized advantage estimation
CLIP, VALUE, ENTROPY = 0.2, 0.5, 0.01
PASSES, PARTS = 4, 4  # over a rollout, and minibatches of each
FRAMES = 32  # of each environment in a rollout by steps
EPISODES = 100  # whose mean return is reported
LONGEST = 10_000  # frames of an episode, in an environment that has no limit itself
PLAY_STREAM = 7
TEST_SEED = 100_000

log = logging.getLogger(__name__)


class Settings(NamedTuple):
    """What is played.

    Args:
        environment: The environment's id in gymnasium.
        by_steps: Whether rollouts have equally many steps of each environment, in place of one
            episode of each.
        seconds: That a step of the environments takes, which are side by side, besides its
            computation.
    """

    environment: str
    by_steps: bool
    seconds: float = 0.0


class Rollout(NamedTuple):
    """What was played: n transitions.

    Args:
        observations: float32, shape (n, width of the observations).
        actions: int64, shape (n,), or float32, shape (n, width of the actions).
        logs: The logarithms of their probabilities, or densities, float32, shape (n,).
        advantages: float32, shape (n,), of mean 0 and standard deviation 1.
        returns: What the values are to predict, float32, shape (n,).
    """

    observations: torch.Tensor
    actions: torch.Tensor
    logs: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor


class Policy(nn.Module):
    """A distribution of actions, and the expected return.

    Args:
        width: Of the observations.
        actions: The space of actions, `Discrete` or `Box`.
    """

    def __init__(self, width: int, actions: spaces.Space[Any]) -> None:
        super().__init__()
        self.discrete = isinstance(actions, spaces.Discrete)
        self.actor = perceptron(width, int(spaces.flatdim(actions)), last=0.01)
        self.critic = perceptron(width, 1, last=1.0)
        if not self.discrete:
            self.spread = nn.Parameter(torch.zeros(int(spaces.flatdim(actions))))

    def forward(self, observations: torch.Tensor) -> tuple[Distribution, torch.Tensor]:
        """Return the actions' distribution and the values, shape (n,), for observations."""
        return self.act(observations), self.critic(observations).squeeze(-1)

    def act(self, observations: torch.Tensor) -> Distribution:
        """Return the actions' distribution.

        Its arguments may be NaN, as those of other tasks' losses: the loss then is, too.
        """
        output = self.actor(observations)
        if self.discrete:
            return Categorical(logits=output, validate_args=False)
        normal = Normal(output, self.spread.exp(), validate_args=False)
        return Independent(normal, 1, validate_args=False)


def perceptron(inputs: int, outputs: int, last: float) -> nn.Sequential:
    """Return a perceptron with two hidden layers, the last layer's weights scaled by ``last``."""
    layers = [nn.Linear(inputs, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, outputs)]
    for layer, gain in zip(layers, (2**0.5, 2**0.5, last)):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def make(environment: str) -> gymnasium.Env:
    """Return an environment with flat observations, whose episodes all end.

    Raises:
        UsageError: There is no such one, or not with observations and actions of numbers.
    """
    try:
        made = gymnasium.make(environment, disable_env_checker=True)
    except (gymnasium.error.Error, ImportError) as error:
        raise UsageError(f"argument --environment: {error}") from error
    for name, space, takes in (
        (
            "actions",
            made.action_space,
            isinstance(made.action_space, (spaces.Discrete, spaces.Box)),
        ),
        ("observations", made.observation_space, made.observation_space.is_np_flattenable),
    ):
        if not takes:
            raise UsageError(
                f"argument --environment: {environment} has {name} of the space "
                f"{type(space).__name__}, which are no vectors of one length"
            )
    if made.spec is None or made.spec.max_episode_steps is None:
        made = gymnasium.wrappers.TimeLimit(made, LONGEST)
    return gymnasium.wrappers.FlattenObservation(made)


class Part:
    """An episode, or a part of one: lists with a value for each frame."""

    def __init__(self) -> None:
        self.observations: list[np.ndarray] = []
        self.actions: list[np.ndarray] = []
        self.logs: list[float] = []
        self.values: list[float] = []
        self.rewards: list[float] = []
        self.beyond = 0.0  # the value of what follows: nothing after an end

    def advantages(self) -> np.ndarray:
        """Return the generalized advantage estimates of the frames, float32."""
        following = np.array([*self.values[1:], self.beyond])
        surprises = np.array(self.rewards) + DISCOUNT * following - np.array(self.values)
        found, advantage = np.empty(len(surprises), dtype=np.float32), 0.0
        for frame in reversed(range(len(surprises))):
            advantage = surprises[frame] + DISCOUNT * TRACE * advantage
            found[frame] = advantage
        return found


class Player:
    """An environment that is being played.

    Args:
        environment: Its id in gymnasium.
        seed: Of its first episode, and of all after it.

    Attributes:
        observation: The newest, float32, shape (width,).
        total: The sum of the episode's rewards so far.
        over, cut: Whether the episode has ended, and if so, whether too early.
        parts: What was played in a rollout, the newest part last.
    """

    def __init__(self, environment: str, seed: int) -> None:
        self.environment = make(environment)
        self.parts: list[Part] = []
        self.begin(seed)

    def begin(self, seed: int | None = None) -> None:
        """Begin an episode, and a part."""
        self._see(self.environment.reset(seed=seed)[0])
        self.total, self.over, self.cut = 0.0, False, False
        self.parts.append(Part())

    def act(self, action: np.ndarray) -> float:
        """Return the reward of an action."""
        space: Any = self.environment.action_space
        if isinstance(space, spaces.Box):
            done = self.environment.step(action.reshape(space.shape).clip(space.low, space.high))
        else:
            done = self.environment.step(space.start + int(action))
        observation, reward, ended, cut, _ = done
        self._see(observation)
        self.total += float(reward)
        self.over, self.cut = ended or cut, cut and not ended
        return float(reward)

    def play(self, action: np.ndarray, its_log: float, value: float) -> None:
        """Act, and add that to the newest part.

        Args:
            action: What the policy has drawn for the observation.
            its_log: The logarithm of its probability.
            value: The value of the observation.
        """
        part = self.parts[-1]
        part.observations.append(self.observation)
        part.rewards.append(self.act(action))
        part.actions.append(action)
        part.logs.append(its_log)
        part.values.append(value)

    def _see(self, observation: Any) -> None:
        self.observation = np.asarray(observation, dtype=np.float32)


class Environments:
    """A rank's environments, side by side.

    Args:
        settings: What is played.
        count: The number of environments.
        seed: Of the first one; the others have those after it.

    Attributes:
        returns: Of the last `EPISODES` episodes that have ended.
        frames: The number of steps of all environments so far.
    """

    def __init__(self, settings: Settings, count: int, seed: int) -> None:
        self.settings = settings
        self.players = [Player(settings.environment, seed + n) for n in range(count)]
        self.returns: deque[float] = deque(maxlen=EPISODES)
        self.frames = 0

    @property
    def average_return(self) -> float | None:
        """The mean of `returns`; None before the end of an episode."""
        return sum(self.returns) / len(self.returns) if self.returns else None

    @torch.no_grad()
    def play(self, policy: Policy) -> Rollout:
        """Return a rollout, after the time that it takes."""
        for player in self.players:
            player.parts = [Part()]
        active, steps = self.players, 0
        while active:
            steps += 1
            self.frames += len(active)
            for player, *decided in zip(active, *self._decide(active, policy)):
                player.play(*decided)
            over = [player for player in active if player.over]
            if self.settings.by_steps:
                active = active if steps < FRAMES else []
            else:
                active = [player for player in active if not player.over]
            for player in over:
                self._begin_again(player, policy)
        for player in self.players:
            player.parts[-1].beyond = value_of(policy, player.observation)
        time.sleep(steps * self.settings.seconds)
        if self.returns:
            log.info(
                "average return of the last %d episodes: %.1f, after %d steps of the environments",
                *(len(self.returns), self.average_return, self.frames),
            )
        return rollout_of([part for player in self.players for part in player.parts])

    def _begin_again(self, player: Player, policy: Policy) -> None:
        """Count an episode that is over, and begin the next one."""
        self.returns.append(player.total)
        if player.cut:
            player.parts[-1].beyond = value_of(policy, player.observation)
        player.begin()

    def _decide(
        self, active: list[Player], policy: Policy
    ) -> tuple[np.ndarray, list[float], list[float]]:
        """Return the actions that the policy draws, their log probabilities, and the values."""
        observations = np.stack([player.observation for player in active])
        chances, values = policy(torch.from_numpy(observations).to(device_of(policy)))
        actions = likeliest(chances)
        if chances.log_prob(actions).isfinite().all():  # else none can be drawn
            actions = chances.sample()
        return actions.cpu().numpy(), chances.log_prob(actions).tolist(), values.tolist()


def likeliest(chances: Distribution) -> torch.Tensor:
    """Return the likeliest actions; any where these are NaN."""
    return chances.mode.nan_to_num()


def value_of(policy: Policy, observation: np.ndarray) -> float:
    """Return the value of an observation."""
    return policy.critic(torch.from_numpy(observation).to(device_of(policy))).item()


def rollout_of(parts: list[Part]) -> Rollout:
    """Return the transitions of all parts, of which some may have none."""
    parts = [part for part in parts if part.rewards]
    advantages = torch.from_numpy(np.concatenate([part.advantages() for part in parts]))

    def together(name: str) -> torch.Tensor:
        return torch.from_numpy(np.array([row for part in parts for row in getattr(part, name)]))

    values = together("values").float()
    return Rollout(
        together("observations"),
        together("actions"),
        together("logs").float(),
        (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8),
        advantages + values,
    )


class Pending:
    """A rollout that is played when it is first needed, with the policy of then.

    Args:
        environments: The rank's.
    """

    def __init__(self, environments: Environments) -> None:
        self.environments = environments
        self._rollout: Rollout | None = None

    def played(self, policy: Policy) -> Rollout:
        """Return the rollout."""
        if self._rollout is None:
            self._rollout = self.environments.play(policy)
        return self._rollout


class Minibatch:
    """A part of a pass over a rollout: a batch of the training.

    Args:
        pending: The rollout.
        seed: Of the pass's order.
        number: Of the part, 0 to `PARTS` - 1.
        first: Whether it is the rollout's first minibatch.

    Attributes:
        shape: (n,) with the number of transitions, once they are known; before that, ().
        played: The number of transitions that are played for it, once they are known: those of the
            rollout for its first minibatch, 0 for the others.
    """

    def __init__(self, pending: Pending, seed: int, number: int, first: bool) -> None:
        self._pending, self._seed, self._number, self._first = pending, seed, number, first
        self.shape: tuple[int, ...] = ()
        self.played = 0

    def transitions(self, policy: Policy) -> Rollout:
        """Return its part of the rollout, on the policy's device.

        It is played by the policy itself, also if torch's DistributedDataParallel has wrapped it.
        """
        whole = self._pending.played(getattr(policy, "module", policy))
        order = np.random.default_rng(self._seed).permutation(len(whole.returns))
        chosen = torch.from_numpy(np.array_split(order, PARTS)[self._number])
        self.shape = (len(chosen),)
        self.played = len(order) if self._first else 0
        return Rollout(*(each[chosen].to(device_of(policy)) for each in whole))

    @property
    def average_return(self) -> float | None:
        """The mean return of the rank's last `EPISODES` episodes; None before the first's end."""
        return self._pending.environments.average_return


class Rollouts:
    """A rank's minibatches, without end. Each iteration begins with new environments.

    Args:
        settings: What is played.
        count: The number of environments.
        seed: Two numbers: the job's seed and this rank.
    """

    def __init__(self, settings: Settings, count: int, seed: tuple[int, int]) -> None:
        self.settings, self.count, self.seed = settings, count, seed

    def __iter__(self) -> Iterator[Minibatch]:
        generator = np.random.default_rng([PLAY_STREAM, *self.seed])
        first = int(generator.integers(TEST_SEED, 2**31 - self.count))
        environments = Environments(self.settings, self.count, first)
        while True:
            pending = Pending(environments)
            for each in range(PASSES):
                seed = int(generator.integers(2**32))
                for number in range(PARTS):
                    yield Minibatch(pending, seed, number, first=each == number == 0)


class Trial(NamedTuple):
    """Episodes that a policy is tested by, each in an environment of its own.

    Args:
        environment: Its id in gymnasium.
        seeds: Of the episodes.
    """

    environment: str
    seeds: range

    @property
    def shape(self) -> tuple[int]:
        """(n,) with the number of episodes, by which the mean over the ranks is weighted."""
        return (len(self.seeds),)


def task(settings: Settings) -> Task:
    """Return an environment as a task."""
    made = make(settings.environment)
    width, actions = int(spaces.flatdim(made.observation_space)), made.action_space
    model = partial(Policy, width, actions)
    return Task(
        "control",
        model,
        partial(batches, settings),
        loss,
        metrics,
        work=transitions,
        unit="transitions",
        recorded={"training_return": lambda batch: batch.average_return},
        reported=("environment_steps", PASSES),
    )


def batches(
    settings: Settings, rank: int, size: int, batch_size: int, seed: int
) -> tuple[Rollouts, list[Trial]]:
    """Return a rank's minibatches without end, and its part of the episodes of tests.

    Args:
        settings: What is played.
        rank, size, seed: As the contract has them.
        batch_size: The number of the rank's environments.

    Raises:
        UsageError: They are too few.
    """
    if batch_size < PARTS:
        raise UsageError(
            f"argument --batch-size: {batch_size} environments are too few for minibatches: "
            f"{PARTS} are needed"
        )
    seeds = range(rank, EPISODES, size)
    trials = [Trial(settings.environment, seeds)] if seeds else []
    return Rollouts(settings, batch_size, (seed, rank)), trials


def loss(policy: Any, batch: Minibatch) -> torch.Tensor:
    """Return PPO's loss: of the policy with its ratios clipped, of the values, and of entropy."""
    observations, actions, logs, advantages, returns = batch.transitions(policy)
    chances, values = policy(observations)
    ratios = (chances.log_prob(actions) - logs).exp()
    clipped = ratios.clamp(1 - CLIP, 1 + CLIP)
    gained = torch.min(ratios * advantages, clipped * advantages).mean()
    error = functional.mse_loss(values, returns)
    return VALUE * error - gained - ENTROPY * chances.entropy().mean()


def metrics(policy: Any, trial: Trial) -> dict[str, float]:
    """Return the mean return of a trial's episodes, with the likeliest action in each frame."""
    players = [Player(trial.environment, seed) for seed in trial.seeds]
    active = players
    while active:
        observations = torch.from_numpy(np.stack([each.observation for each in active]))
        actions = likeliest(policy.act(observations.to(device_of(policy)))).cpu().numpy()
        for each, action in zip(active, actions):
            each.act(action)
        active = [each for each in active if not each.over]
    return {"return": sum(each.total for each in players) / len(players)}


def transitions(batch: Minibatch) -> int:
    """Return the number of a minibatch's transitions."""
    return batch.shape[0]
