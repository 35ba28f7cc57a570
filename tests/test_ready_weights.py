"""How much members of a group count in Partial Reduce, and what groups make of a run: its ρ."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ready_groups import Controller, settings

from collectives import dynamic_weights
from collectives.topology import averaging_matrix, convergence_condition, rho

# ρ of the groups of a run


HISTORIES = {
    "all pairs of three": (3, [(0, 1), (1, 2), (0, 2)], 0.5),
    "one half as fast": (3, [(0, 1), (0, 1), (1, 2), (0, 2)], 0.625),
    "all at once": (4, [(0, 1, 2, 3)], 0.0),
    "frozen pairs": (4, [(0, 1), (2, 3)], 1.0),
    "nobody": (2, [(0,), (1,)], 1.0),
    "one rank": (1, [(0,)], 0.0),
}


@pytest.mark.parametrize(("size", "groups", "expected"), HISTORIES.values(), ids=HISTORIES)
def test_rho_is_the_papers_on_its_histories(size, groups, expected):
    matrix = averaging_matrix(groups, size)
    np.testing.assert_allclose(matrix.sum(axis=1), 1, rtol=1e-14)
    assert rho(matrix) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("size", "group_size"), [(3, 2), (5, 2), (6, 3), (8, 5), (7, 7)])
def test_rho_of_uniformly_random_groups(size, group_size):
    groups = itertools.combinations(range(size), group_size)
    expected = (size - group_size) / (size - 1)
    assert rho(averaging_matrix(groups, size)) == pytest.approx(expected, abs=1e-12)


def test_an_averaging_matrix_is_the_mean_of_its_groups():
    generator = np.random.default_rng(1)
    groups = [generator.choice(6, generator.integers(1, 7), replace=False) for _ in range(20)]
    total = np.zeros((6, 6))
    for group in groups:
        each = np.eye(6)
        each[np.ix_(group, group)] = 1 / len(group)
        total += each / 20
    np.testing.assert_allclose(averaging_matrix(map(tuple, groups), 6), total, atol=1e-14)


WRONG = {
    "no group": (averaging_matrix, ([], 3), "groups is empty"),
    "twice": (averaging_matrix, ([(0, 1, 0)], 3), "not a group"),
    "empty": (averaging_matrix, ([()], 3), "not a group"),
    "no rank": (averaging_matrix, ([(0, 3)], 3), "rank 3 is not in a world of 3"),
    "not square": (rho, (np.ones((2, 3)),), r"shape \(2, 3\)"),
    "not symmetric": (rho, ([[0.5, 0.5], [0.4, 0.6]],), "not symmetric"),
    "no average": (rho, (2 * np.eye(2),), "does not sum to 1"),
    "rho": (convergence_condition, (0.1, 1, 1.5, 4, 2), "rho is 1.5"),
    "rate": (convergence_condition, (-0.1, 1, 0.5, 4, 2), "learning_rate .* not -0.1 and 1"),
    "group": (convergence_condition, (0.1, 1, 0.5, 4, 5), "group size 5"),
}


@pytest.mark.parametrize(("function", "arguments", "text"), WRONG.values(), ids=WRONG)
def test_what_has_no_rho_is_named(function, arguments, text):
    with pytest.raises(ValueError, match=text):
        function(*arguments)


def test_theorem_1s_condition():
    # η = 2 · 0.02 / 4 = 0.01; ρ̄ = 1/3 + 2 · 0.5 / 0.25 = 13/3
    expected = 0.01 * 3 + 2 * 64 * (0.01 * 3) ** 2 * (1 / 3 + 4) / 4
    assert convergence_condition(0.02, 3, 0.25, 4, 2) == pytest.approx(expected)
    assert convergence_condition(0.1, 5, 0, 4, 4) == pytest.approx(0.1 * 5)
    assert convergence_condition(0.1, 5, 1, 4, 2) == math.inf


# Weights


def weights_by_definition(iterations, alpha, missing):
    newest = max(iterations)
    behind = [newest - iteration + 1 for iteration in iterations]
    oldest = max(behind)
    betas = {j: (1 - alpha) * alpha ** (j - 1) / (1 - alpha**oldest) for j in range(1, oldest + 1)}
    got, initial = dict.fromkeys(set(behind), 0.0), 0.0
    for j, beta in betas.items():
        if j in got or missing == "nearest":
            got[min(got, key=lambda k: (abs(k - j), k))] += beta
        else:
            initial += beta
    return [got[k] / behind.count(k) for k in behind], initial


def test_dynamic_weights_are_the_papers():
    weights, initial = dynamic_weights((5, 5, 3), 0.5, "initial")
    np.testing.assert_allclose([*weights, initial], [0.2857, 0.2857, 0.1429, 0.2857], atol=5e-5)
    # Of two that are as near to what is missing, the newer one gets it.
    weights, initial = dynamic_weights((5, 5, 3))
    np.testing.assert_allclose([*weights, initial], [3 / 7, 3 / 7, 1 / 7, 0], rtol=1e-14)


@pytest.mark.parametrize(("gap", "expected"), [(1, 0), (2, 0.29), (3, 0.40), (5, 0.48)])
def test_the_initial_models_weight_by_gaps(gap, expected):
    assert dynamic_weights((9, 9 - gap), 0.5, "initial")[1] == pytest.approx(expected, abs=0.005)
    assert dynamic_weights((9, 9 - gap), 0.5, "nearest")[1] == 0


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=8),
    st.sampled_from((0.0, 0.1, 0.5, 0.9)),
    st.sampled_from(("nearest", "initial")),
)
def test_dynamic_weights_are_as_defined(iterations, alpha, missing):
    weights, initial = dynamic_weights(iterations, alpha, missing)
    expected, share = weights_by_definition(iterations, alpha, missing)
    np.testing.assert_allclose(weights, expected, rtol=1e-9, atol=1e-15)
    assert initial == pytest.approx(share, rel=1e-9, abs=1e-15)
    assert weights.sum() + initial == pytest.approx(1, rel=1e-12)


def test_one_old_model_may_weigh_more_than_each_of_several_new_ones_unless_each_has_its_weight():
    iterations = (5, 5, 5, 5, 4)
    np.testing.assert_allclose(dynamic_weights(iterations)[0], [1 / 6] * 4 + [1 / 3])
    weights, initial = dynamic_weights(iterations, each=True)
    np.testing.assert_allclose(weights, [2 / 9] * 4 + [1 / 9])
    assert initial == 0


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=8),
    st.sampled_from((0.0, 0.1, 0.5, 0.9)),
)
def test_each_models_weight_is_lower_the_older_it_is(iterations, alpha):
    weights, _ = dynamic_weights(iterations, alpha, each=True)
    expected = alpha ** (max(iterations) - np.array(iterations))
    np.testing.assert_allclose(weights, expected / expected.sum(), rtol=1e-12)


def test_the_controllers_weights_are_the_same():
    generator = np.random.default_rng(3)
    for missing, each in (("nearest", False), ("initial", False), ("nearest", True)):
        for _ in range(100):
            count = int(generator.integers(1, 9))
            iterations = generator.integers(0, 10**6, count)
            given_settings = settings(8, 9, True, 0.9, missing == "nearest", each)
            controller = Controller(8, *given_settings)
            for rank in range(count, 8):
                controller.withdraw(rank, 0, 1, True)
            for rank, iteration in enumerate(iterations):
                controller.signal(rank, int(iteration), 0, False)
            assert controller.form()
            weights, initial = dynamic_weights(iterations, 0.9, missing, each=each)
            assert controller.group.listed()[1] == tuple(weights)
            assert controller.initial == initial
            assert controller.newest == iterations.max()


def test_far_older_models_have_no_weight():
    assert dynamic_weights((0, 10**12), 0.5)[0].tolist() == [0, 1]
    weights, initial = dynamic_weights((0, 10**12), 0.5, "initial")
    assert weights.tolist() == [0, 0.5]
    assert initial == 0.5


BAD = {
    "none": (((),), ValueError, "iterations is empty"),
    "half": (((1, 0.5),), TypeError, "an iteration is 0.5"),
    "alpha": (((1,), 1), ValueError, "alpha is 1, but must be at least 0 and less than 1"),
    "no number": (((1,), float("nan")), ValueError, "alpha is nan"),
    "a word": (((1,), "0.5"), TypeError, "alpha is '0.5', not a number"),
    "missing": (((1,), 0.5, "last"), ValueError, "missing is 'last', not one of nearest, initial"),
}


@pytest.mark.parametrize(("arguments", "error", "text"), BAD.values(), ids=BAD)
def test_what_has_no_dynamic_weights_is_named(arguments, error, text):
    with pytest.raises(error, match=text):
        dynamic_weights(*arguments)
