# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The inner loops of WP-SGD: steps on single rows of a CSR matrix, each O(non-zeros of its row).

They are Cython's, as all that is native here: numba would be one more dependency, and compile at
the first call, on every rank of a job.

The model is w = scale · values, so that the regularizer, which shrinks all of w, is one product.
"""

from libc.math cimport exp, fabs, fmax, fmin, pow

import numpy as np

cdef double LEAST_SCALE = 1e-9  # below it `values`, which grow as it shrinks, take it over


cdef class Steps:
    """A linear model and the steps that one node makes with it.

    A step on a sample (x, y), of which ŷ = x·w, is w ← (1 − ηλ)·w − η·L'(y, ŷ)·x. With several
    workers ŷ is that of the model that the sample's worker has pulled: workers take turns, as
    those of equal speed do, so that τ = workers − 1 updates come between. The regularizer then
    acts on the current model and not on the pulled one, which differ by
    O(ηλ‖w_{j−1} − w_{j−1−τ}‖): the pulled one would have to be a copy.

    Args:
        samples: the `Samples` that rows are of.
        start: float64 array of shape (features,), which is copied.
        learning_rate, regularization: η and λ, of which the product is below 1.
        logistic: whether the loss L is log(1 + exp(−y·ŷ)); else max(0, 1 − y·ŷ).
        workers: how many pull, compute and push.
        check: whether an update is abandoned unless `wagma.wpsgd.check` accepts it, in
            O((τ + 3)·non-zeros).

    Attributes:
        consumed: samples that were drawn; the last workers − 1 of them have not been pushed.
        applied, abandoned: updates, of those that were pushed.

    Source: WP-SGD, Equation 5, and Algorithms 3 and 4.
    """

    cdef readonly long long consumed, applied, abandoned
    cdef readonly object samples
    cdef const long long[::1] indptr
    cdef const int[::1] indices
    cdef const double[::1] data, labels
    cdef double[::1] values
    cdef double scale, rate, shrink, square
    cdef bint logistic, check
    cdef int workers
    # Of each worker that has pulled: the row, L' there, and the number of the iterate.
    cdef long long[::1] pulled_row, pulled_at
    cdef double[::1] pulled_slope
    cdef int pulled, oldest
    # Of the last iterates: ‖w‖², and the row and η·L' of the step that followed.
    cdef long long iterate
    cdef int kept
    cdef long long[::1] step_row
    cdef double[::1] step_size, norms, iota

    def __init__(self, samples, start, double learning_rate, double regularization, *,
                 bint logistic=False, int workers=1, bint check=False):
        if not (learning_rate > 0 and regularization >= 0 and learning_rate * regularization < 1):
            raise ValueError(
                f"η must be above 0, λ 0 or more and ηλ below 1, not {learning_rate} and "
                f"{regularization}")
        if workers < 1:
            raise ValueError(f"workers must be 1 or more, not {workers}")
        if np.shape(start) != (samples.features,):
            raise ValueError(f"a start of shape {np.shape(start)} for {samples.features} features")
        self.samples = samples
        self.indptr, self.indices, self.data = samples.indptr, samples.indices, samples.data
        self.labels = samples.labels
        self.rate, self.shrink = learning_rate, 1 - learning_rate * regularization
        self.logistic, self.workers, self.check = logistic, workers, check
        self.pulled_row, self.pulled_at = np.empty((2, workers), np.int64)
        self.pulled_slope = np.empty(workers)
        self.kept = workers + 3
        self.step_row = np.empty(self.kept, np.int64)
        self.step_size, self.norms, self.iota = np.empty((3, self.kept + 1))
        self.load(start)

    def load(self, model):
        """Go on from this model; workers that have pulled pull it again, for the same samples."""
        cdef int each
        self.values = np.array(model, np.float64)
        self.scale, self.iterate = 1, 0
        self.norms[0] = np.dot(self.values, self.values) if self.check else 0
        for each in range(self.pulled):
            self._pull((self.oldest + each) % self.workers, self.pulled_row[
                (self.oldest + each) % self.workers])

    def model(self):
        """Return the model: float64 array of shape (features,)."""
        return np.asarray(self.values) * self.scale

    def advance(self, const long long[::1] rows):
        """Consume the samples of these rows, one after the other."""
        cdef Py_ssize_t i
        self._check(rows)
        with nogil:
            for i in range(rows.shape[0]):
                self._pull((self.oldest + self.pulled) % self.workers, rows[i])
                self.pulled += 1
                if self.pulled == self.workers:
                    self._push()
                    self.pulled -= 1
        self.consumed += rows.shape[0]

    def advance_together(self, const long long[:, ::1] rows):
        """Make one step for the mean gradient of each line of rows, all at the same model.

        It is what nodes do that average after every step, one column each.
        """
        cdef double[::1] sizes = np.empty(rows.shape[1])
        cdef Py_ssize_t i, node
        self._check(np.ravel(rows))
        with nogil:
            for i in range(rows.shape[0]):
                for node in range(rows.shape[1]):
                    sizes[node] = self._slope(rows[i, node]) * self.rate / rows.shape[1]
                self._shrink()
                for node in range(rows.shape[1]):
                    self._add(rows[i, node], -sizes[node])
        self.consumed += rows.shape[0]
        self.applied += rows.shape[0]

    def _check(self, rows):
        """Raise IndexError for rows that the samples do not have."""
        rows = np.asarray(rows)
        if rows.size and not (0 <= rows.min() and rows.max() < self.labels.shape[0]):
            raise IndexError(f"rows from {rows.min()} to {rows.max()} of {self.labels.shape[0]}")

    cdef double _dot(self, long long row) noexcept nogil:
        """Return x·w."""
        cdef long long k
        cdef double total = 0
        for k in range(self.indptr[row], self.indptr[row + 1]):
            total += self.data[k] * self.values[self.indices[k]]
        return total * self.scale

    cdef double _between(self, long long one, long long other) noexcept nogil:
        """Return the product of two rows, whose indices ascend."""
        cdef long long i = self.indptr[one], j = self.indptr[other]
        cdef double total = 0
        while i < self.indptr[one + 1] and j < self.indptr[other + 1]:
            if self.indices[i] == self.indices[j]:
                total += self.data[i] * self.data[j]
                i += 1
                j += 1
            elif self.indices[i] < self.indices[j]:
                i += 1
            else:
                j += 1
        return total

    cdef double _slope(self, long long row) noexcept nogil:
        """Return L' of a row at the current model."""
        cdef double y = self.labels[row], margin = y * self._dot(row)
        if self.logistic:
            return -y / (1 + exp(margin))
        return -y if margin < 1 else 0

    cdef void _shrink(self) noexcept nogil:
        cdef Py_ssize_t i
        self.scale *= self.shrink
        if self.scale < LEAST_SCALE:
            for i in range(self.values.shape[0]):
                self.values[i] *= self.scale
            self.scale = 1

    cdef void _add(self, long long row, double size) noexcept nogil:
        """w += size · x."""
        cdef long long k
        if size == 0:
            return
        size /= self.scale
        for k in range(self.indptr[row], self.indptr[row + 1]):
            self.values[self.indices[k]] += size * self.data[k]

    cdef void _pull(self, int worker, long long row) noexcept nogil:
        self.pulled_row[worker] = row
        self.pulled_slope[worker] = self._slope(row)
        self.pulled_at[worker] = self.iterate

    cdef void _push(self) noexcept nogil:
        """The worker that has pulled first pushes; the update is applied, or abandoned."""
        cdef long long row = self.pulled_row[self.oldest]
        cdef double slope = self.pulled_slope[self.oldest]
        cdef int delay = <int>(self.iterate - self.pulled_at[self.oldest])
        self.oldest = (self.oldest + 1) % self.workers
        if self.check and not self._accepts(row, slope, delay):
            self.abandoned += 1
            return
        self._shrink()
        self._add(row, -self.rate * slope)
        self.iterate += 1
        self.applied += 1

    cdef bint _accepts(self, long long row, double slope, int delay) noexcept nogil:
        """Whether Check accepts the update; if so, it is noted for the next ones.

        Earlier iterates' projections follow from the current one's: the step from w_k to w_{k+1}
        is undone by w_k = (w_{k+1} + η·L'_k·x_k) / (1 − ηλ).
        """
        cdef long long k, first, following = self.iterate + 1
        cdef double size = self.rate * slope, square = self._between(row, row)
        cdef double rate, least, a = self.shrink
        cdef int m, place = <int>(self.iterate % self.kept)
        cdef bint accepted = True
        # iota[m] is x·w of iterate `following` − m.
        self.iota[1] = self._dot(row)
        self.iota[0] = a * self.iota[1] - size * square
        if delay > 0:
            rate = pow(1 - a + fabs(slope) * self.rate * square, 1.0 / delay)
            if not rate < 1:
                return False
            first = max(0, following - 3 - delay)
            for k in range(self.iterate - 1, first - 1, -1):
                m = <int>(following - k)
                self.iota[m] = (self.iota[m - 1] + self.step_size[k % self.kept]
                                * self._between(row, self.step_row[k % self.kept])) / a
            for k in range(following, max(1, following - 2 - delay), -1):
                m = <int>(following - k)
                least = (self.iota[m + 1] - rate * self.iota[m + 2]) / (1 - rate)
                accepted = (
                    fmin(least, self.iota[m + 1]) <= self.iota[m] <= fmax(least, self.iota[m + 1])
                    and self._apart(k - 2, m + 2, square) >= self._apart(k - 1, m + 1, square))
                if not accepted:
                    return False
        self.step_row[place], self.step_size[place] = row, size
        self.norms[<int>(following % self.kept)] = (
            a * a * self.norms[place] - 2 * a * size * self.iota[1] + size * size * square)
        return True

    cdef double _apart(self, long long k, int m, double square) noexcept nogil:
        """Return ‖w⊥‖² of iterate k, whose x·w is iota[m]: of the part that is orthogonal to x."""
        cdef double along = self.iota[m] * self.iota[m] / square if square > 0 else 0
        return self.norms[<int>(k % self.kept)] - along
