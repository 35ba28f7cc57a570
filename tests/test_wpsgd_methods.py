"""The methods of WP-SGD in modelled time: what their models are, and which is ahead when."""

from dataclasses import replace

import numpy as np
import pytest

import wagma.wpsgd
from wagma.simulation import FREE, MACHINES
from wagma.simulation.core import allreduce_time
from wagma.wpsgd import bound_ratio, fit_contraction, weights
from wagma.wpsgd.methods import METHODS, PAPER_LINKS, PAPER_SPEEDS, PRESETS
from wagma.wpsgd.modelled import Modelled
from wagma.wpsgd.samples import generate
from wagma.wpsgd.training import Problem, run

SAMPLES = generate(3400, 2000, 30, seed=2)
TRAIN, TEST = SAMPLES.take(np.arange(3000)), SAMPLES.take(np.arange(3000, 3400))
PROBLEM = Problem(TRAIN, TEST, start=20.0, lr=0.1, l2=0.01, span=100)
SPEEDS = (1.0, 0.5, 0.9, 1.0)
ETHERNET = MACHINES["10gbe"]


def train(name, samples=1000, speeds=SPEEDS, machine=FREE, every=10**9, seed=0, **settings):
    """Return a team that has trained by a method, and its points."""
    problem = replace(PROBLEM, **settings)
    team = Modelled(METHODS[name], problem, speeds, machine, 1e-5, seed)
    return team, list(run(METHODS[name], team, problem.span, samples, every))


def test_names_that_are_exported_are_there():
    for name in wagma.wpsgd.__all__:
        assert callable(getattr(wagma.wpsgd, name))
    with pytest.raises(AttributeError, match="no attribute 'median'"):
        wagma.wpsgd.median  # noqa: B018


def test_equal_delays_give_simuparallel_exactly():
    equal = (0.7,) * 5
    expected = train("simuparallel", speeds=equal)[0].model()
    assert (train("wp", speeds=equal)[0].model() == expected).all()
    assert (train("direct", speeds=equal)[0].model() == expected).all()
    assert (train("delay", speeds=equal, workers=1)[0].model() == expected).all()
    assert (train("wp", speeds=(0.7, 0.7, 0.7, 0.7, 0.6))[0].model() != expected).any()


def test_a_rate_of_0_gives_the_fastest_node_s_model():
    speeds = (0.5, 0.9, 1.0, 0.7)
    team, _ = train("wp", speeds=speeds, rate=0.0)
    assert (team.model() == team.nodes[2].model()).all()
    near = train("wp", speeds=speeds, rate=0.9)[0].model()
    np.testing.assert_allclose(near, team.model(), rtol=1e-3)


def test_nodes_consume_what_their_speeds_say_and_weigh_by_how_far_they_are_behind():
    team, points = train("wp", samples=999)
    assert [node.consumed for node in team.nodes] == [999, 499, 899, 999]
    assert team.delays().tolist() == [0, 500, 100, 0]
    assert points[-1].bound_ratio == bound_ratio([0, 500, 100, 0], 0.999)
    q = weights([0, 500, 100, 0], 0.999)
    expected = sum(each * node.model() for each, node in zip(q, team.nodes))
    np.testing.assert_allclose(team.model(), expected, rtol=1e-12)
    plain = train("direct", samples=999)[0]
    expected = sum(node.model() for node in plain.nodes) / 4
    np.testing.assert_allclose(plain.model(), expected, rtol=1e-12)


def test_delays_count_updates_since_the_last_average():
    team, _ = train("delay-wp", samples=250)
    assert team.delays().tolist() == [0, 25, 5, 0]
    team, _ = train("delay-wp", samples=300)
    assert team.delays().tolist() == [0, 0, 0, 0]
    models = [node.model() for node in team.nodes]
    assert all((model == models[0]).all() for model in models)


def test_delays_may_count_the_updates_of_the_whole_run():
    team, _ = train("delay-wp", samples=300, total_delays=True)
    assert team.delays().tolist() == [0, 150, 30, 0]
    q = weights([0, 150, 30, 0], 0.999)
    assert team.weighing.delays.tolist() == [0, 150, 30, 0]
    assert team.weighing.weights.tolist() == q.tolist()
    one, other = (train("delay-wp", samples=100, total_delays=total)[0] for total in (False, True))
    np.testing.assert_allclose(one.model(), other.model(), rtol=1e-12)  # of the first average
    assert one.weighing.weights.tolist() == other.weighing.weights.tolist()


def test_the_weights_of_the_last_average_are_kept():
    team, _ = train("delay-wp", samples=300)
    assert team.weighing.delays.tolist() == [0, 50, 10, 0]  # not the zeros after the average
    assert team.weighing.weights.tolist() == weights([0, 50, 10, 0], 0.999).tolist()
    for name, delays in {"direct": [0, 150, 30, 0], "minibatch": 4 * [0]}.items():
        team, _ = train(name, samples=300)
        assert team.weighing.delays.tolist() == delays
        assert team.weighing.weights.tolist() == 4 * [0.25]
        assert len(team.consumed()) == 4
    assert train("sequential", samples=300)[0].weighing.weights.tolist() == [1]


def test_a_rate_is_fitted_to_the_objective_s_decrease():
    """Far from the minimum the objective is the square of a norm that falls by 1 − ηλ."""
    far = replace(PROBLEM, start=300.0)
    found = fit_contraction(far, 20_000)
    assert found.samples == 1000 and len(found.objectives) == 41
    assert found.rate == pytest.approx((1 - 0.1 * 0.01) ** 2, rel=1e-4)
    assert (found.objectives == fit_contraction(far, 20_000).objectives).all()
    assert fit_contraction(replace(far, l2=0.001), 10**6).samples == 10_000  # 1 / (ηλ)
    assert fit_contraction(replace(far, l2=0.001), 20_000).samples == 2000  # a tenth
    near = fit_contraction(replace(PROBLEM, start=0.0, l2=0.0), 10**5)
    assert near.rate < 1


def test_a_fitted_rate_is_at_most_the_paper_s_bound_and_may_not_be_there():
    with pytest.raises(ValueError, match="losses"):  # they grow
        fit_contraction(replace(PROBLEM, start=0.0, lr=100.0, l2=0.0), 10_000)
    slow = fit_contraction(replace(PROBLEM, start=3.0, lr=1e-3, l2=0.9), 10_000)
    assert slow.rate <= 1 - 9e-4


def test_with_the_fitted_rate_weighted_averages_are_not_held_back_by_slow_nodes():
    far = {"start": 300.0}
    fitted = fit_contraction(replace(PROBLEM, **far), 20_000).rate
    then = {
        (name, rate): train(name, 4000, **far, rate=rate)[1][-1].objective
        for name, rate in (("wp", None), ("wp", fitted), ("sequential", None))
    }
    alone = then["sequential", None]
    assert then["wp", fitted] - alone < 0.5 * (then["wp", None] - alone)


def test_an_allreduce_takes_as_long_as_its_slowest_link():
    slow = replace(ETHERNET, byte_gap=10 * ETHERNET.byte_gap, injection=ETHERNET.injection / 10)
    team = Modelled(METHODS["wp"], PROBLEM, SPEEDS, ETHERNET, links=(1, 0.1, 1, 1))
    expected = allreduce_time(slow.for_job(4), 4, 8 * 2000)
    assert team._average_seconds == pytest.approx(expected)
    assert expected > allreduce_time(ETHERNET.for_job(4), 4, 8 * 2000)
    assert sorted(PAPER_LINKS) == 5 * [0.1] + 15 * [1]
    assert all(speed == 1 for speed, link in zip(PAPER_SPEEDS, PAPER_LINKS) if link < 1)


@pytest.mark.parametrize("nodes", [1, 4])
def test_minibatch_is_the_average_after_every_sample(nodes):
    speeds = SPEEDS[:nodes]
    together = train("minibatch", samples=60, speeds=speeds)[0].model()
    apart = Modelled(METHODS["simuparallel"], PROBLEM, speeds, FREE)
    for samples in range(1, 61):
        apart.advance(samples)
        apart.average()
    np.testing.assert_allclose(together, apart.model(), rtol=1e-10)


def test_check_abandons_and_the_run_ends_all_the_same():
    team, _ = train("delay", samples=500, speeds=(1.0, 1.0), check=True)
    updates = team.updates()
    assert [node.consumed for node in team.nodes] == [500, 500]
    assert updates.applied + updates.abandoned == 2 * 499 and 0.4 < updates.abandoned / 998 < 0.6
    assert updates.late.sum() == 998 and updates.longest == 1
    assert train("wp", samples=500, check=True)[0].updates().abandoned == 0  # none is late


def test_time_is_samples_by_the_slow_factor_and_every_average_s_allreduce():
    average = allreduce_time(ETHERNET.for_job(4), 4, 8 * 2000)
    assert 1e-5 < average < 1e-3
    expected = {
        "wp": 1000 * 1e-5 + average,
        "direct": 1000 * 1e-5 + average,
        "delay": 1000 * 1e-5 + average,
        "sequential": 1000 * 1e-5,
        "simuparallel": 2 * 1000 * 1e-5 + average,
        "delay-wp": 1000 * 1e-5 + 10 * average,
        "minibatch": 1000 * (2 * 1e-5 + average),
    }
    assert expected.keys() == METHODS.keys()
    for name, seconds in expected.items():
        _, points = train(name, machine=ETHERNET, every=400)
        assert [point.samples for point in points] == [400, 800, 1000]
        assert points[-1].seconds == pytest.approx(seconds), name
        assert points[0].seconds < points[1].seconds < points[2].seconds


def test_runs_are_repeatable_and_have_seeds():
    one, again, other = (train("delay-wp", samples=300, seed=seed)[1] for seed in (3, 3, 4))
    assert one == again and one[-1].objective != other[-1].objective


def test_a_run_that_is_asked_to_stop_has_its_model_and_a_last_point():
    method = METHODS["delay-wp"]
    team = Modelled(method, PROBLEM, SPEEDS, FREE, asked_to_stop=lambda: team.seconds > 0)
    points = list(run(method, team, 100, 1000, 1000))
    assert [point.samples for point in points] == [100]
    assert points[0].objective == PROBLEM.objective(team.model())


FOLD = 5000  # samples in which (1 − λη)^n falls to 1/e
SEEDS = (0, 1)


@pytest.fixture(scope="module")
def unbalanced():
    """The points of all methods on the paper's cluster with a fitted rate; means over the seeds."""
    samples = generate(11_000, 5000, 30, seed=5)
    far = {
        **{"start": 100.0, "lr": 0.2, "l2": 0.001, "span": FOLD // 10},
        "train": samples.take(np.arange(10_000)),
        "test": samples.take(np.arange(10_000, 11_000)),
    }

    far["rate"] = fit_contraction(replace(PROBLEM, **far), 12 * FOLD).rate

    def points(name, seed):
        run = train(name, 12 * FOLD, PAPER_SPEEDS, ETHERNET, FOLD // 2, seed, **far)[1]
        return [(point.seconds, point.objective) for point in run]

    return {name: np.mean([points(name, seed) for seed in SEEDS], axis=0) for name in METHODS}


@pytest.mark.slow
def test_by_samples_methods_are_in_the_paper_s_order_once_they_are_near(unbalanced):
    then = {name: points[2 * 9 - 1, 1] for name, points in unbalanced.items()}
    order = ["minibatch", "delay-wp", "simuparallel", "wp", "sequential", "direct"]
    assert sorted(order, key=then.get) == order, then


@pytest.mark.slow
def test_by_time_methods_end_in_the_paper_s_order(unbalanced):
    end = unbalanced["wp"][-1, 0]
    order = ["delay-wp", "wp", "simuparallel", "minibatch"]
    then = {name: at(unbalanced[name], end) for name in order}
    assert sorted(order, key=then.get) == order, then


def at(points, seconds):
    """Return the objective of the last average that was there by then."""
    there = points[points[:, 0] <= seconds, 1]
    return there[-1] if there.size else np.inf


@pytest.mark.slow
def test_on_the_way_the_fastest_node_alone_is_ahead_of_averages(unbalanced):
    """From far away what counts is the distance, which averages with nodes behind make longer."""
    way = {name: points[2 * 3 - 1, 1] for name, points in unbalanced.items()}
    assert way["sequential"] < 0.9 * way["wp"]
    assert way["wp"] < way["delay-wp"] < way["direct"]


def test_presets_are_the_paper_s():
    real, kdd = PRESETS["real-sim"], PRESETS["kdd2010"]
    assert (real.lr, real.l2, real.start, real.span, real.every) == (0.1, 0.001, 100, 1000, 1000)
    assert (kdd.lr, kdd.l2, kdd.start, kdd.span, kdd.every) == (1e-4, 0.01, 4, 1000, 100_000)
    assert (real.seeds, kdd.seeds) == (20, 20)
    assert 1 - kdd.lr * kdd.l2 == 0.999999
    assert len(PAPER_SPEEDS) == 20
    slow = [speed for speed in PAPER_SPEEDS if speed < 1]
    assert (len(slow), min(slow), max(slow)) == (7, 0.5, pytest.approx(0.7))
