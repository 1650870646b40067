"""Min-heaps in arrays, for compiled code."""

from __future__ import annotations

from numba import njit


@njit(error_model="numpy")
def sift_down(heap, at, n):
    """Restore a min-heap of heap[:n] in which only the value at `at` may be too large."""
    value = heap[at]
    while True:
        child = 2 * at + 1
        if child >= n:
            break
        if child + 1 < n and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= value:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = value


@njit(error_model="numpy")
def sift_up(heap, at):
    """Restore a min-heap in which only the value at `at` may be too small."""
    value = heap[at]
    while at > 0 and heap[(at - 1) // 2] > value:
        heap[at] = heap[(at - 1) // 2]
        at = (at - 1) // 2
    heap[at] = value
