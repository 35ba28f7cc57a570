"""Injected stragglers: every rank knows whom a step's draw makes slow."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wagma import imbalance


@given(seed=st.integers(0, 2**40), step=st.integers(0, 10**6), size=st.integers(2, 4096))
def test_cloud_draws_two_different_ranks_and_the_same_for_everybody(seed, step, size):
    ranks = imbalance.cloud_ranks(seed, step, size)
    assert len(set(ranks)) == 2
    assert all(0 <= rank < size for rank in ranks)
    assert ranks == imbalance.cloud_ranks(seed, step, size)


def test_cloud_draws_the_only_rank_of_a_job_of_one():
    assert imbalance.cloud_ranks(seed=0, step=0, size=1) == (0,)


def test_cloud_draws_every_rank_equally_often():
    drawn = Counter(rank for step in range(4000) for rank in imbalance.cloud_ranks(7, step, 8))
    assert sorted(drawn) == list(range(8))
    assert all(900 <= times <= 1100 for times in drawn.values())  # 1000 expected, deviation 27


def test_cloud_draws_anew_at_every_step_and_for_every_seed():
    assert len({imbalance.cloud_ranks(0, step, 64) for step in range(100)}) > 90
    assert len({imbalance.cloud_ranks(seed, 0, 64) for seed in range(100)}) > 90


def test_cloud_delays_the_drawn_ranks_by_320_ms_and_nobody_else():
    drawn = imbalance.cloud_ranks(seed=3, step=5, size=8)
    delays = [imbalance.delay("cloud", 3, 5, rank, 8, 0.1) for rank in range(8)]
    assert [rank for rank, delay in enumerate(delays) if delay] == list(drawn)
    assert set(delays) == {0.0, 0.32}


def test_random_makes_a_drawn_rank_s_step_six_times_as_long():
    for step in range(50):
        drawn = imbalance.random_ranks(seed=3, step=step, size=8)
        times = [0.1 + imbalance.delay("random", 3, step, rank, 8, 0.1) for rank in range(8)]
        assert times == pytest.approx([0.6 if rank in drawn else 0.1 for rank in range(8)])


def test_random_draws_every_rank_with_probability_one_over_their_number():
    drawn = Counter(rank for step in range(8000) for rank in imbalance.random_ranks(7, step, 8))
    assert sorted(drawn) == list(range(8))
    assert all(880 <= times <= 1120 for times in drawn.values())  # 1000 expected, deviation 30


def test_without_imbalance_nobody_is_delayed():
    assert all(imbalance.delay("none", 0, step, 0, 2, 0.1) == 0 for step in range(20))


def test_a_slow_rank_takes_its_factor_times_as_long():
    compute = 0.02
    assert compute + imbalance.slow_rank_delay(5, compute) == pytest.approx(0.1)
    assert imbalance.slow_rank_delay(1, compute) == 0
    for sleeping_steps, factor in ((2, 3), (5, 6)):  # Ripples, 7.4
        assert imbalance.slow_rank_delay(factor, compute) == pytest.approx(sleeping_steps * compute)
