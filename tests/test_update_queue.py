"""The queue of updates by itself, and Figures 4 and 8 of Hop's paper with one of each worker."""

import threading

import numpy as np
import pytest

from collectives import UpdateQueue, graphs
from collectives.update_queue import Update


def filled(max_gap=None):
    queue = UpdateQueue(max_gap)
    for iteration, sender in ((0, 1), (1, 2), (0, 2), (1, 1), (2, 2)):
        queue.enqueue(f"{sender} of {iteration}", iteration, sender)
    return queue


@pytest.mark.parametrize("max_gap", (None, 2, 5))
def test_size_counts_what_has_the_tags(max_gap):
    queue = filled(max_gap)
    assert queue.size() == 5
    assert queue.size(sender=2) == 3
    assert queue.size(0) == 2
    assert [queue.size(iteration, 1) for iteration in range(3)] == [1, 1, 0]


@pytest.mark.parametrize("max_gap", (None, 2, 5))
def test_dequeue_takes_the_first_with_the_tags_out(max_gap):
    queue = filled(max_gap)
    assert queue.dequeue(1, sender=2) == [Update("2 of 1", 1, 2)]
    assert queue.dequeue(2, 0) == [Update("1 of 0", 0, 1), Update("2 of 0", 0, 2)]
    assert queue.dequeue(0, 2) == []
    assert [update.update for update in queue.dequeue(2)] == ["1 of 1", "2 of 2"]
    assert queue.size() == 0


@pytest.mark.parametrize("count", (-1, 1.5, True, None))
def test_a_bad_count_raises_and_takes_nothing_out(count):
    queue = filled()
    with pytest.raises((TypeError, ValueError), match=f"count is {count}"):
        queue.dequeue(count, timeout=1)
    assert queue.size() == 5


def test_one_without_tags_is_a_plain_queue():
    queue = UpdateQueue()
    for number in range(3):
        queue.enqueue(number)
    assert queue.dequeue(2) == [(0, None, None), (1, None, None)]
    assert queue.size() == 1


def test_what_is_late_is_discarded_and_what_is_early_kept_where_queues_are_used_again():
    queue = UpdateQueue(2)
    for iteration in (0, 3, 1, 0, 4):  # 0 and 3 share a queue
        queue.enqueue(np.full(3, iteration), iteration, 1)
    message = "after 0 s there are 0 updates with iteration 6 and sender None, not 1"
    with pytest.raises(TimeoutError, match=message):
        UpdateQueue(2).dequeue(1, 6, timeout=0)
    (update,) = queue.dequeue(1, 3)
    np.testing.assert_array_equal(update.update, 3)
    assert [queue.size(iteration) for iteration in (0, 1, 4)] == [0, 1, 1]
    queue.dequeue(1, 4)
    assert queue.size() == 0


def test_arrays_on_devices_are_kept_where_they_are(device):
    queue, stream = UpdateQueue(2), device.create_stream()
    updates = [device.array(np.full(100, float(k)), stream) for k in range(3)]
    before = device.counts()
    with device.holding(stream):
        for k, update in enumerate(updates):
            queue.enqueue(update, k, 1)
        assert [queue.dequeue(1, k)[0].update for k in range(3)] == updates
    assert device.counts() == before


def test_a_dequeue_waits_until_there_is_enough():
    queue, taken = UpdateQueue(), []
    waiting = threading.Thread(target=lambda: taken.extend(queue.dequeue(2, 1, timeout=30)))
    waiting.start()
    for iteration, sender in ((1, 0), (0, 0), (1, 1)):
        assert not taken
        queue.enqueue(None, iteration, sender)
    waiting.join()
    assert [update.sender for update in taken] == [0, 1]
    assert queue.size() == 1


@pytest.mark.parametrize("max_gap", (0, 1.5, True))
def test_a_bad_gap_raises(max_gap):
    with pytest.raises((TypeError, ValueError), match="max_gap is"):
        UpdateQueue(max_gap)
    with pytest.raises(ValueError, match="iteration is None"):
        UpdateQueue(1).enqueue(1)


@pytest.mark.parametrize("backup", (0, 1))
def test_workers_in_threads_train_as_figures_4_and_8_say(backup):
    size, iterations = 6, 20
    edges = graphs.ring(size)
    # Theorem 1: 3 edges to the farthest; workers of a figure 8 without tokens know no bound.
    queues = [UpdateQueue(None if backup else 3) for _ in range(size)]
    models = [np.zeros(size) for _ in range(size)]
    counts = []

    def work(rank):
        model = np.eye(size)[rank]
        for k in range(iterations):
            for other in [rank, *graphs.destinations(edges, rank)]:
                queues[other].enqueue(model, k, rank)
            received = queues[rank].dequeue(3 - backup, k, timeout=60)
            received += queues[rank].dequeue(queues[rank].size(k), k)
            counts.append(len(received))
            model = np.mean([each.update for each in received], axis=0)
        models[rank] = model

    threads = [threading.Thread(target=work, args=[rank]) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counts) == size * iterations
    np.testing.assert_allclose(np.sum(models, axis=1), 1, rtol=1e-12)
    if backup:
        assert set(counts) <= {2, 3}
    else:
        matrix = graphs.mixing_matrix(edges, size)
        expected = np.linalg.matrix_power(matrix, iterations)
        np.testing.assert_allclose(models, expected, rtol=1e-12)
        assert all(queue.size() == 0 for queue in queues)
