"""The weights of WP-SGD and its conditions, beside numpy and the paper's own numbers."""

import numpy as np
import pytest

from wagma.wpsgd import (
    averages_help,
    beats_fastest,
    bound_ratio,
    contraction_rate,
    delay_contracts,
    weights,
)

# Table 1: 13 nodes are fast, the 7 with an E5-2640 have 50 % to 70 % of their speed (6.2.1).
SPEEDS = np.concatenate([np.ones(13), np.linspace(0.5, 0.7, 7)])


@pytest.mark.parametrize("r", [0.5, 0.9, 0.9999, 0.999999, 1.0])
def test_weights_are_equation_6(r):
    delays = np.array([0, 3, 17, 17, 40])
    np.testing.assert_allclose(weights(delays, r), r**delays / (r**delays).sum(), rtol=1e-14)


def test_weights_of_very_long_delays_do_not_underflow():
    long = 10**7
    assert weights([long, long], 0.9).tolist() == [0.5, 0.5]
    assert weights([0, long], 0.9).tolist() == [1.0, 0.0]
    ratio = weights([long, long + 1], 0.9999)
    assert ratio[1] / ratio[0] == pytest.approx(0.9999, rel=1e-12)
    assert weights([0, long], 0.999999)[1] == pytest.approx(np.exp(-10) / (1 + np.exp(-10)), 1e-4)


def test_equal_delays_give_the_plain_mean_and_a_rate_of_0_the_fastest():
    assert weights([5] * 8, 0.99).tolist() == [1 / 8] * 8
    assert weights([0, 100, 10**7], 1.0).tolist() == [1 / 3] * 3
    assert weights([7, 0, 1], 0.0).tolist() == [0, 1, 0]
    assert weights([0, 0, 1], 0.0).tolist() == [0.5, 0.5, 0]


@pytest.mark.parametrize(
    ("delays", "r", "says"),
    [
        ([], 0.5, "at least one number"),
        ([0, -1], 0.5, "of at least 0"),
        ([0, np.nan], 0.5, "of at least 0"),
        ([0], 1.5, "r must be from 0 to 1, not 1.5"),
        ([0], float("nan"), "r must be from 0 to 1"),
    ],
)
def test_what_is_no_delay_or_rate_is_refused(delays, r, says):
    for function in (weights, bound_ratio, beats_fastest, averages_help):
        with pytest.raises(ValueError, match=says):
            function(delays, r)


def test_corollary_4_on_the_paper_s_cluster():
    delays = {t: t - t * SPEEDS for t in (1_000, 10_000, 10**6)}
    assert beats_fastest(delays[1_000], 0.9999)
    # 2 Σ r^T > √20 + 20 needs Σ r^T above 12.24, and 13 nodes are not behind at all.
    assert beats_fastest(delays[10**6], 0.9999)
    assert not beats_fastest([0, 10**6], 0.9999)
    assert beats_fastest([0, 0], 0.9999)
    assert not beats_fastest([0], 0.9999)  # itself


def test_the_ratio_of_bounds_is_above_1_where_corollary_4_holds():
    assert bound_ratio([0, 100], 0.99) == pytest.approx(2 * (1 + 0.99**100) / (2 + 2**0.5))
    assert bound_ratio([0], 0.9) == 1
    for r in (0.9, 0.95, 0.99):
        delays = [0, 0, 3, 20]
        assert beats_fastest(delays, r) == (bound_ratio(delays, r) > 1)
    assert beats_fastest(delays, 0.99) and not beats_fastest(delays, 0.7)


def test_averages_help_while_the_powers_sum_to_more_than_the_root():
    assert averages_help([0, 0, 10**6, 10**6, 10**6], 0.999) is False  # 2 < √5
    assert averages_help([0, 0, 0, 10**6, 10**6], 0.999) is True
    assert averages_help([0], 0.5) is False


def test_lemma_4_in_both_of_the_paper_s_settings():
    real_sim = {"learning_rate": 0.1, "regularization": 0.001, "slope": 1.0}
    assert delay_contracts(**real_sim, square=1.0, delay=1)
    assert delay_contracts(**real_sim, square=9.99, delay=0)
    assert not delay_contracts(**real_sim, square=9.9985, delay=5)
    assert not delay_contracts(**real_sim, square=50.0, delay=1)  # fifty features of 1
    assert delay_contracts(0.0001, 0.01, 40.0, 1.0, 5)  # KDD 2010


@pytest.mark.parametrize("every", [1, 1000])
@pytest.mark.parametrize("r", [0.9, 0.99, 0.999])
def test_a_rate_is_found_again(r, every):
    losses = 0.25 + 12_000 * r ** np.arange(2000)
    assert contraction_rate(losses, every) ** every == pytest.approx(r, rel=1e-7)


def test_a_rate_is_found_in_noise():
    noise = np.random.default_rng(1).normal(scale=50, size=500)
    found = contraction_rate(3.0 + 12_000 * 0.9999 ** (1000 * np.arange(500)) + noise, 1000)
    assert 1 - found == pytest.approx(1e-4, rel=0.03)


@pytest.mark.parametrize(
    "losses", [[3, 2, 1], [1, 1, 1, 1], [1, 2, 3, 4], [4, 3, np.nan, 1], [8, 4, 2, np.inf]]
)
def test_losses_without_a_rate_are_refused(losses):
    with pytest.raises(ValueError, match="losses"):
        contraction_rate(losses)


def test_a_rate_per_sample_needs_samples():
    with pytest.raises(ValueError, match="every must be 1 or more, not 0"):
        contraction_rate([8, 4, 2, 1], 0)
