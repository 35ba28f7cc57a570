"""The native steps of WP-SGD beside the same steps on whole vectors."""

import numpy as np
import pytest

from wagma.wpsgd import check
from wagma.wpsgd.samples import Order, Samples, generate, of_matrix, shards
from wagma.wpsgd.steps import Steps

SAMPLES = generate(300, 80, 8, seed=3)
DENSE = SAMPLES.matrix.toarray()
ROWS = np.random.default_rng(5).integers(300, size=1000)


def slope(logistic, y, score):
    if logistic:
        return -y / (1 + np.exp(y * score))
    return -y if y * score < 1 else 0.0


def reference(rows, start, eta, lam, logistic=False, workers=1, checked=False):
    """Return all iterates on whole vectors, and how many updates were abandoned."""
    iterates, pulled, abandoned = [start], [], 0
    for row in rows:
        at = len(iterates) - 1
        pulled.append((row, slope(logistic, SAMPLES.labels[row], DENSE[row] @ iterates[-1]), at))
        if len(pulled) < workers:
            continue
        row, found, at = pulled.pop(0)
        w = (1 - eta * lam) * iterates[-1] - eta * found * DENSE[row]
        delay = len(iterates) - 1 - at
        window = [*iterates, w][-(delay + 4) :]
        if checked and not check(window, DENSE[row], found, delay, eta, lam):
            abandoned += 1
        else:
            iterates.append(w)
    return iterates, abandoned


@pytest.mark.parametrize("logistic", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize(("eta", "lam"), [(0.1, 0.001), (0.5, 0.3), (0.01, 0.0)])
def test_steps_are_those_on_whole_vectors(logistic, workers, eta, lam):
    start = np.full(80, 2.0)
    steps = Steps(SAMPLES, start, eta, lam, logistic=logistic, workers=workers)
    for part in np.split(ROWS, [1, 3, 400]):
        steps.advance(part)
    iterates, _ = reference(ROWS, start, eta, lam, logistic, workers)
    np.testing.assert_allclose(steps.model(), iterates[-1], rtol=1e-9, atol=1e-12)
    assert (steps.consumed, steps.applied) == (1000, 1001 - workers)
    assert (start == 2.0).all()


def test_a_step_touches_no_other_features():
    matrix = np.zeros((1, 5))
    matrix[0, 2] = 3.0
    from scipy.sparse import csr_matrix

    steps = Steps(of_matrix(csr_matrix(matrix), [-1.0]), np.ones(5), 0.5, 0.0)
    steps.advance(np.array([0]))
    assert steps.model().tolist() == [1, 1, 1 - 0.5 * 3, 1, 1]


@pytest.mark.parametrize("nodes", [1, 3])
def test_steps_together_are_those_of_the_mean_gradient(nodes):
    rows = np.ascontiguousarray(ROWS[:300].reshape(-1, nodes))
    steps = Steps(SAMPLES, np.ones(80), 0.2, 0.01)
    steps.advance_together(rows)
    w = np.ones(80)
    for line in rows:
        mean = sum(slope(False, SAMPLES.labels[r], DENSE[r] @ w) * DENSE[r] for r in line) / nodes
        w = (1 - 0.002) * w - 0.2 * mean
    np.testing.assert_allclose(steps.model(), w, rtol=1e-10)
    assert steps.applied == len(rows)


def test_steps_go_on_from_a_model_that_workers_then_pull_again():
    steps = Steps(SAMPLES, np.zeros(80), 0.1, 0.01, workers=3)
    steps.advance(ROWS[:10])
    steps.load(np.ones(80))
    steps.advance(ROWS[10:20])
    expected, _ = reference(ROWS[8:20], np.ones(80), 0.1, 0.01, workers=3)
    np.testing.assert_allclose(steps.model(), expected[-1], rtol=1e-12)


# --- Check


@pytest.mark.parametrize("workers", [1, 2, 3, 6])
@pytest.mark.parametrize(("eta", "lam"), [(0.1, 0.001), (0.05, 0.5)])
def test_check_abandons_what_it_does_on_whole_vectors(workers, eta, lam):
    start = np.full(80, 4.0)
    steps = Steps(SAMPLES, start, eta, lam, workers=workers, check=True)
    steps.advance(ROWS)
    iterates, abandoned = reference(ROWS, start, eta, lam, workers=workers, checked=True)
    assert (steps.applied, steps.abandoned) == (len(iterates) - 1, abandoned)
    assert (abandoned == 0) == (workers == 1)
    np.testing.assert_allclose(steps.model(), iterates[-1], rtol=1e-9)
    assert steps.consumed == 1000


X = np.array([2.0, 0.0])
SETTINGS = {"x": X, "slope": -1.0, "delay": 1, "learning_rate": 0.1, "regularization": 1.0}
RATE = 0.1 + 0.1 * 4  # (λη + c*·η·β²)^{1/τ}


def iterates(*along, apart=(8.0, 7.0, 6.0, 5.0)):
    """Return iterates whose x·w are these; all of `apart` is orthogonal to x."""
    return [np.array([iota / 2, other]) for iota, other in zip(along, apart)]


@pytest.mark.parametrize(
    ("last", "accepted"),
    [
        # From 16 to 14: ι_min = (14 − 0.5·16) / 0.5 = 12.
        (14.0, True), (13.0, True), (12.0, True), (11.9, False), (14.1, False),
    ],
)  # fmt: skip
def test_an_update_is_accepted_between_the_last_iterate_and_the_least(last, accepted):
    assert check(iterates(16.0, 14.0, last), **SETTINGS) is accepted
    assert check([-w for w in iterates(16.0, 14.0, last)], **SETTINGS) is accepted


def test_every_iterate_in_the_window_counts_but_those_before_the_first():
    # The third is 9, and not between ι_min = 12 and 14; the fourth would do.
    assert check(iterates(16.0, 14.0, 9.0, 8.0), **SETTINGS) is False
    assert check(iterates(14.0, 9.0, 8.0), **SETTINGS) is True
    assert check(iterates(9.0, 8.0), **SETTINGS) is True
    # From 13 to 12: ι_min = 11.
    assert check(iterates(16.0, 14.0, 13.0, 12.0), **SETTINGS) is True


def test_what_is_orthogonal_to_the_sample_must_not_grow():
    alike = iterates(16.0, 14.0, 13.0, apart=(8.0, 8.0, 9.0))
    assert check(alike, **SETTINGS) is True  # the update's own is not asked
    grown = iterates(16.0, 14.0, 13.0, apart=(8.0, 8.1, 7.0))
    assert check(grown, **SETTINGS) is False


def test_a_delay_of_0_accepts_and_a_rate_of_1_rejects():
    far = iterates(16.0, 14.0, -100.0)
    assert check(far, **SETTINGS) is False
    assert check(far, **{**SETTINGS, "delay": 0}) is True
    near = iterates(16.0, 15.0, 15.0)
    assert check(near, **{**SETTINGS, "learning_rate": 0.19}) is True
    assert check(near, **{**SETTINGS, "learning_rate": 0.2}) is False


def test_a_longer_delay_brings_the_rate_nearer_to_1():
    assert RATE == 0.5
    near = iterates(16.0, 14.0, 11.0)  # ι_min is 12 for a delay of 1, below 9.2 for 2
    assert check(near, **SETTINGS) is False
    assert check(near, **{**SETTINGS, "delay": 2}) is True


def test_native_updates_meet_the_same_hand_made_bounds():
    from scipy.sparse import csr_matrix

    # Two workers pull w_0 = 4, with x = 2 and y = −1: ŷ = 8, so that both push.
    samples = of_matrix(csr_matrix(np.array([[2.0]])), [-1.0])
    steps = Steps(samples, np.full(1, 4.0), 0.1, 0.0, workers=2, check=True)
    steps.advance(np.zeros(2, np.int64))  # τ = 0
    assert (steps.applied, steps.abandoned) == (1, 0)
    steps.advance(np.zeros(1, np.int64))  # ι: 8, 7.6, 7.2, rate 0.4: ι_min = 7.33
    assert (steps.applied, steps.abandoned) == (1, 1)
    assert steps.model()[0] == pytest.approx(3.8)


# --- arguments, samples, order


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"learning_rate": 0.0}, "η must be above 0"),
        ({"learning_rate": 2.0, "regularization": 0.5}, "ηλ below 1"),
        ({"regularization": -1.0}, "λ 0 or more"),
        ({"workers": 0}, "workers must be 1 or more, not 0"),
        ({"start": np.zeros(79)}, r"start has the shape \(79,\), not \(80,\)"),
    ],
)
def test_what_no_step_can_be_made_with_is_refused(options, says):
    given = {"start": np.zeros(80), "learning_rate": 0.1, "regularization": 0.1, **options}
    with pytest.raises(ValueError, match=says):
        Steps(SAMPLES, given.pop("start"), given.pop("learning_rate"),
              given.pop("regularization"), **given)  # fmt: skip


def test_rows_and_features_that_are_not_there_are_refused():
    steps = Steps(SAMPLES, np.zeros(80), 0.1, 0.1)
    for rows in ([300], [-1], [0, 1, 1000]):
        with pytest.raises(IndexError, match="below 300"):
            steps.advance(np.array(rows))
    with pytest.raises(ValueError, match="below 80, the number of features"):
        Samples(np.array([0, 1]), np.array([80], np.int32), np.ones(1), np.ones(1), 80)


@pytest.mark.parametrize("logistic", [False, True])
def test_the_objective_is_equation_4(logistic):
    w = np.random.default_rng(0).normal(size=80)
    margins = SAMPLES.labels * (DENSE @ w)
    losses = np.log1p(np.exp(-margins)) if logistic else np.maximum(0, 1 - margins)
    expected = 0.05 * (w**2).sum() + losses.mean()
    assert SAMPLES.objective(w, 0.1, logistic) == pytest.approx(expected, rel=1e-12)


def test_generated_samples_are_seeded_sparse_and_of_two_classes():
    again = generate(300, 80, 8, seed=3)
    assert (again.data == SAMPLES.data).all() and (again.labels == SAMPLES.labels).all()
    assert (generate(300, 80, 8, seed=4).labels != SAMPLES.labels).any()
    np.testing.assert_allclose(np.linalg.norm(DENSE, axis=1), 1)
    assert SAMPLES.largest_square() == pytest.approx(1)
    assert 120 < (SAMPLES.labels > 0).sum() < 180
    assert all(np.diff(SAMPLES.indices[a:b]).min(initial=1) > 0
               for a, b in zip(SAMPLES.indptr[:-1], SAMPLES.indptr[1:]))  # fmt: skip
    counts = np.bincount(SAMPLES.indices, minlength=80)
    assert counts.max() > 5 * np.median(counts)


def test_shards_are_all_rows_once_and_an_order_all_of_them_in_every_epoch():
    parts = shards(23, 4, np.random.default_rng(0))
    assert sorted(np.concatenate(parts)) == list(range(23))
    assert sorted(map(len, parts)) == [5, 6, 6, 6]
    order = Order(parts[0], seed=1)
    taken = np.concatenate([order.take(5), order.take(0), order.take(13)])
    assert len(taken) == 18
    for epoch in np.split(taken, 3):
        assert sorted(epoch) == sorted(parts[0])
    assert (taken[:6] != taken[6:12]).any()
    assert (Order(parts[0], seed=1).take(18) == taken).all()
