"""The inner loops of WP-SGD: steps on single rows of a CSR matrix, each O(non-zeros of its row).

They are in Cython, like all native code of this package: numba would be one more dependency, and
compile at the first call on every rank of a job.

The model is w = scale · values, so that the regularizer, which shrinks all of w, is one product.
"""

from libc.math cimport exp, fabs, fmax, fmin, pow
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, nanosleep, timespec

import numpy as np

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *, const void *)
    int pthread_mutex_lock(pthread_mutex_t *)
    int pthread_mutex_unlock(pthread_mutex_t *)
    int pthread_mutex_destroy(pthread_mutex_t *)
cdef extern from *:
    void __builtin_prefetch(const void *) noexcept nogil  # gcc's and clang's

cdef double LEAST_SCALE = 1e-9  # below it the scale is multiplied into `values`, which grow
cdef enum:
    AHEAD = 2  # the memory of the sample this many ahead is prefetched
    LONGEST = 64  # updates: longer delays are counted together, and too long for Check's memory
    OFTEN = 16  # samples between readings of the clock, which cost as much as a few non-zeros
LATEST = LONGEST  # for Python
cdef double LONG_SAMPLE = 1e-5  # seconds: after each sample at least this long the clock is read
cdef double SHORTEST = 1e-4  # a thread's shortest sleep, in seconds
cdef double LOOK = 1e-3  # seconds between a sleeping thread's looks whether to stop


cdef double now() noexcept nogil:
    cdef timespec time
    clock_gettime(CLOCK_MONOTONIC, &time)
    return time.tv_sec + 1e-9 * time.tv_nsec


cdef void sleep(double seconds) noexcept nogil:
    cdef timespec time
    time.tv_sec = <long>seconds
    time.tv_nsec = <long>(1e9 * (seconds - time.tv_sec))
    nanosleep(&time, NULL)


cdef class Steps:
    """A linear model and the steps that one node makes with it.

    A step on a sample (x, y), with ŷ = x·w, is w ← (1 − ηλ)·w − η·L'(y, ŷ)·x: a worker pulls the
    model's values for the sample's features, computes L', and pushes the update. With several
    workers, τ updates of others come between. In `advance` workers take turns, as if of equal
    speed, so that τ = workers − 1; or each is a thread that calls `work`, and τ varies. The
    regularizer acts on the model at the push, which differs from the pulled one by
    O(ηλ‖w_{j−1} − w_{j−1−τ}‖): otherwise all features would have to be pulled.

    Args:
        samples: the `Samples` that contain the rows.
        start: float64 array of shape (features,), which is copied.
        learning_rate, regularization: η and λ, with a product below 1.
        logistic: whether the loss L is log(1 + exp(−y·ŷ)); else max(0, 1 − y·ŷ).
        workers: number of workers that pull, compute and push.
        check: whether an update is abandoned unless `wagma.wpsgd.check` accepts it, in
            O((τ + 3)·non-zeros); one with a τ above 64 is abandoned unseen.

    Attributes:
        consumed: number of samples drawn; if workers take turns, the last workers − 1 of them have
            not been pushed.
        applied, abandoned: number of pushed updates that were applied, and that were abandoned.
        longest: the greatest τ of a pushed update.

    Source: WP-SGD, Equation 5, and Algorithms 3 and 4.
    """

    cdef readonly long long consumed, applied, abandoned, longest
    cdef readonly object samples
    cdef const long long[::1] indptr
    cdef const int[::1] indices
    cdef const double[::1] data, labels
    cdef double[::1] values
    cdef double scale, rate, shrink, square
    cdef bint logistic, check
    cdef readonly int workers
    cdef long long[::1] pushed  # updates with each τ
    # Of each worker that has pulled: the row, the number of the iterate, its values for the row's
    # features ÷ scale, the scale, and L' there.
    cdef long long[::1] pulled_row, pulled_at
    cdef double[:, ::1] pulled_values
    cdef double[::1] pulled_scale, pulled_slope
    cdef int pulled, oldest  # if they take turns
    # If they are threads: the rows to consume, and the time that each has yet to sleep. All except
    # a worker's pulled values is read and written under the lock.
    cdef pthread_mutex_t lock
    cdef const long long[::1] rows
    cdef Py_ssize_t drawn
    cdef bint stopping
    cdef double[::1] owed
    # Of the last iterates: ‖w‖², and the row and η·L' of the step that followed.
    cdef long long iterate
    cdef int kept
    cdef long long[::1] step_row
    cdef double[::1] step_size, norms, iota

    def __cinit__(self, *_, **__):
        pthread_mutex_init(&self.lock, NULL)

    def __dealloc__(self):
        pthread_mutex_destroy(&self.lock)

    def __init__(self, samples, start, double learning_rate, double regularization, *,
                 bint logistic=False, int workers=1, bint check=False):
        if not (learning_rate > 0 and regularization >= 0 and learning_rate * regularization < 1):
            raise ValueError(
                f"η must be above 0, λ 0 or more and ηλ below 1, not {learning_rate} and "
                f"{regularization}")
        if workers < 1:
            raise ValueError(f"workers must be 1 or more, not {workers}")
        if np.shape(start) != (samples.features,):
            raise ValueError(f"start has the shape {np.shape(start)}, not ({samples.features},)")
        self.samples = samples
        self.indptr, self.indices, self.data = samples.indptr, samples.indices, samples.data
        self.labels = samples.labels
        self.rate, self.shrink = learning_rate, 1 - learning_rate * regularization
        self.logistic, self.workers, self.check = logistic, workers, check
        self.pulled_row, self.pulled_at = np.empty((2, workers), np.int64)
        self.pulled_values = np.empty((workers, np.diff(samples.indptr).max(initial=0)))
        self.pulled_scale, self.pulled_slope = np.empty((2, workers))
        self.owed, self.pushed = np.zeros(workers), np.zeros(LONGEST + 1, np.int64)
        self.values = np.empty(samples.features)
        self.kept = max(workers, LONGEST + 1) + 3
        self.step_row = np.empty(self.kept, np.int64)
        self.step_size, self.norms, self.iota = np.empty((3, self.kept + 1))
        self.load(start)

    def load(self, model):
        """Continue from this model; workers that have pulled pull again for the same samples."""
        cdef int each, worker
        np.copyto(np.asarray(self.values), model)
        self.scale, self.iterate = 1, 0
        self.norms[0] = np.dot(self.values, self.values) if self.check else 0
        for each in range(self.pulled):
            worker = (self.oldest + each) % self.workers
            self._pull(worker, self.pulled_row[worker])
            self._compute(worker)

    def model(self):
        """Return the model: float64 array of shape (features,)."""
        return np.asarray(self.values) * self.scale

    @property
    def delays(self):
        """Number of pushed updates by their delay in updates: int64 array of shape (65,).

        The last entry counts delays of 64 and more.
        """
        return np.array(self.pushed)

    def advance(self, const long long[::1] rows):
        """Consume the samples of these rows, one after the other; the workers take turns."""
        cdef Py_ssize_t i
        cdef int worker
        self._check(rows)
        with nogil:
            for i in range(rows.shape[0]):
                worker = (self.oldest + self.pulled) % self.workers
                self._fetch(rows, i + AHEAD)
                self._pull(worker, rows[i])
                self._compute(worker)
                self.pulled += 1
                if self.pulled == self.workers:
                    self._push(self.oldest)
                    self.oldest = (self.oldest + 1) % self.workers
                    self.pulled -= 1
        self.consumed += rows.shape[0]

    def begin(self, const long long[::1] rows):
        """Set the rows that workers consume as threads, each in a call of `work`.

        Raises:
            RuntimeError: workers that take turns have pulled without having pushed yet.
        """
        if self.pulled:
            raise RuntimeError("workers that take turns have updates that they have not pushed")
        self._check(rows)
        self.rows, self.drawn, self.stopping = rows, 0, False

    def stop(self):
        """Make workers that are threads draw no more samples.

        One that sleeps pushes at once, and sleeps for the rest of the time in its next sample.
        """
        pthread_mutex_lock(&self.lock)
        self.stopping = True
        pthread_mutex_unlock(&self.lock)

    def work(self, int worker, double factor=1.0, double sample_seconds=0.0):
        """Draw samples, and pull, compute and push for each, until none is left or all stop.

        It releases the GIL. All drawn samples have been pushed when it returns.

        Args:
            worker: number of the worker, from 0; each is called by one thread at a time.
            factor: factor by which samples take longer: the worker sleeps between computing an
                update and pushing it.
            sample_seconds: least seconds per sample, times the factor.
        """
        cdef bint paced = factor > 1 or sample_seconds > 0
        cdef int often = 1 if sample_seconds >= LONG_SAMPLE else OFTEN
        cdef int made = 0  # since the last reading of the clock
        cdef long long row
        cdef double before = now()
        if not 0 <= worker < self.workers:
            raise IndexError(f"no worker {worker} among {self.workers}")
        with nogil:
            while True:
                pthread_mutex_lock(&self.lock)
                if self.stopping or self.drawn == self.rows.shape[0]:
                    break
                row = self.rows[self.drawn]
                self._fetch(self.rows, self.drawn + AHEAD)
                self.drawn += 1
                self.consumed += 1
                self._pull(worker, row)
                pthread_mutex_unlock(&self.lock)
                self._compute(worker)
                made += 1
                if paced and made == often:
                    before = self._pace(worker, before, factor, made * sample_seconds)
                    made = 0
                pthread_mutex_lock(&self.lock)
                self._push(worker)
                pthread_mutex_unlock(&self.lock)
            pthread_mutex_unlock(&self.lock)
            if paced and made:
                self._pace(worker, before, factor, made * sample_seconds)

    def advance_together(self, const long long[:, ::1] rows):
        """Make one step with the mean gradient of each line of rows, all at the same model.

        This is what nodes do that average after every step; each has a column.
        """
        cdef double[::1] sizes = np.empty(rows.shape[1])
        cdef Py_ssize_t i, node
        self._check(np.ravel(rows))
        with nogil:
            for i in range(rows.shape[0]):
                for node in range(rows.shape[1]):
                    self._pull(0, rows[i, node])
                    self._compute(0)
                    sizes[node] = self.pulled_slope[0] * self.rate / rows.shape[1]
                self._shrink()
                for node in range(rows.shape[1]):
                    self._add(rows[i, node], -sizes[node])
        self.consumed += rows.shape[0]
        self.applied += rows.shape[0]

    def _check(self, rows):
        """Raise IndexError for rows that the samples do not have."""
        rows = np.asarray(rows)
        if rows.size and not (0 <= rows.min() and rows.max() < self.labels.shape[0]):
            raise IndexError(
                f"rows range from {rows.min()} to {rows.max()}, but must be at least 0 and below "
                f"{self.labels.shape[0]}")

    cdef double _dot(self, long long row) noexcept nogil:
        """Return x·w."""
        cdef long long k
        cdef double total = 0
        for k in range(self.indptr[row], self.indptr[row + 1]):
            total += self.data[k] * self.values[self.indices[k]]
        return total * self.scale

    cdef double _between(self, long long one, long long other) noexcept nogil:
        """Return the dot product of two rows, whose indices ascend."""
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

    cdef void _fetch(self, const long long[::1] rows, Py_ssize_t place) noexcept nogil:
        """Prefetch the memory of the sample at `place`, if there is one."""
        cdef long long row, k
        if place < rows.shape[0]:
            row = rows[place]
            for k in range(self.indptr[row], self.indptr[row + 1], 8):  # float64 in a line
                __builtin_prefetch(&self.indices[k])
                __builtin_prefetch(&self.data[k])

    cdef void _pull(self, int worker, long long row) noexcept nogil:
        cdef long long first = self.indptr[row], k
        for k in range(first, self.indptr[row + 1]):
            self.pulled_values[worker, k - first] = self.values[self.indices[k]]
        self.pulled_row[worker] = row
        self.pulled_scale[worker] = self.scale
        self.pulled_at[worker] = self.iterate

    cdef void _compute(self, int worker) noexcept nogil:
        """Compute L' of the pulled row at the pulled model."""
        cdef long long row = self.pulled_row[worker], first = self.indptr[row], k
        cdef double y = self.labels[row], margin = 0
        for k in range(first, self.indptr[row + 1]):
            margin += self.data[k] * self.pulled_values[worker, k - first]
        margin *= y * self.pulled_scale[worker]
        if self.logistic:
            self.pulled_slope[worker] = -y / (1 + exp(margin))
        else:
            self.pulled_slope[worker] = -y if margin < 1 else 0

    cdef void _push(self, int worker) noexcept nogil:
        """Apply the worker's update, or abandon it."""
        cdef long long row = self.pulled_row[worker]
        cdef long long delay = self.iterate - self.pulled_at[worker]
        cdef double slope = self.pulled_slope[worker]
        self.pushed[min(delay, <long long>LONGEST)] += 1
        self.longest = max(self.longest, delay)
        if self.check and not (delay <= self.kept - 4 and self._accepts(row, slope, <int>delay)):
            self.abandoned += 1
            return
        self._shrink()
        self._add(row, -self.rate * slope)
        self.iterate += 1
        self.applied += 1

    cdef double _pace(self, int worker, double before, double factor, double least) noexcept nogil:
        """Sleep for the time by which samples since `before` were too fast; return the time."""
        cdef double after = now(), taken = after - before, end
        self.owed[worker] += factor * fmax(taken, least) - taken
        if self.owed[worker] >= SHORTEST:
            before, end = after, after + self.owed[worker]
            while after < end and not self._stops():
                sleep(fmin(end - after, LOOK))
                after = now()
            self.owed[worker] -= after - before
        return after

    cdef bint _stops(self) noexcept nogil:
        cdef bint stops
        pthread_mutex_lock(&self.lock)
        stops = self.stopping
        pthread_mutex_unlock(&self.lock)
        return stops

    cdef bint _accepts(self, long long row, double slope, int delay) noexcept nogil:
        """Return whether Check accepts the update; if so, record it for the next ones.

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
        """Return ‖w⊥‖² of iterate k, whose x·w is iota[m]; w⊥ is the part orthogonal to x."""
        cdef double along = self.iota[m] * self.iota[m] / square if square > 0 else 0
        return self.norms[<int>(k % self.kept)] - along
