"""What a node of a chain costs, plain and with early starts: python -m tests.gpu.time_early [--blocks N ...]

Needs CuPy, a GPU of sm_90 or later, and little else of this package: two kernels of its own, in a chain. Prints
us a node, and the driver's words where it refuses. It also checks that a chain of early launches keeps its order.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from strata.gpu.early_launch import EarlyFunction, problem

TEXT = r"""
extern "C" __global__ void empty(int *p) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
// p[i] = 3 p[i] + number, so that a chain gives the right numbers only in order. The last thread of the grid dawdles.
extern "C" __global__ void step(int *p, int number, int n) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    int i = blockIdx.x * blockDim.x + threadIdx.x, from = n - 1 - i;
    if (i >= n / 2) return;
    int a = p[i], b = p[from];
    p[i] = 3 * b + number;
    p[from] = 3 * a + number;
}
"""


def compiled(arch: int) -> bytes:
    """The kernels' cubin."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(TEXT, "time_early.cu", (), ())
    nvrtc.compileProgram(program, (f"-arch=sm_{arch}",))
    return nvrtc.getCUBIN(program)


def _chain(cp: Any, stream: Any, nodes: list[tuple[Any, tuple]], fork_every: int, side: Any) -> Any:
    """A captured chain; with fork_every, every so many nodes one runs on the side stream, beside the main one."""
    stream.begin_capture()
    try:
        for i, (function, call) in enumerate(nodes):
            if fork_every and i % fork_every == fork_every - 1:
                start, end = (cp.cuda.Event(disable_timing=True) for _ in range(2))
                start.record(stream)
                side.wait_event(start)
                function(*call, side)
                function(*call, stream)
                end.record(side)
                stream.wait_event(end)
            else:
                function(*call, stream)
    finally:
        graph = stream.end_capture()
    return graph


def _us(cp: Any, stream: Any, graph: Any, nodes: int, rounds: int = 15) -> float:
    times = []
    for _ in range(rounds):
        start, end = cp.cuda.Event(), cp.cuda.Event()
        start.record(stream)
        graph.launch(stream)
        end.record(stream)
        end.synchronize()
        times.append(1000 * cp.cuda.get_elapsed_time(start, end) / nodes)
    return statistics.median(times)


def _expected(n: int, numbers: list[int]) -> np.ndarray:
    p = np.arange(n, dtype=np.int32)
    for number in numbers:
        p = (3 * p[::-1] + np.int32(number)).astype(np.int32)
    return p


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", nargs="*", type=int, default=[1, 74, 132, 320, 1072])
    parser.add_argument("--nodes", type=int, default=400)
    options = parser.parse_args()
    import cupy as cp

    device, runtime = cp.cuda.Device(0), cp.cuda.runtime
    device.use()
    arch, version = int(device.compute_capability), runtime.driverGetVersion()
    print(f"sm_{arch}, driver {version}, runtime {runtime.runtimeGetVersion()}, CuPy {cp.__version__}")
    print("can start early:", problem(arch, version) or "yes")
    module = cp.cuda.function.Module()
    module.load(compiled(arch))
    empty, step = (module.get_function(name) for name in ("empty", "step"))
    stream, side = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)
    memory = cp.zeros(1 << 20, cp.int32)
    device.synchronize()
    at = np.uint64(memory.data.ptr)
    forms: dict[str, Callable[[Any], Any]] = {"plain": lambda f: f, "early": EarlyFunction}
    failed = 0
    for fork_every in (0, 8):
        for blocks in options.blocks:
            found = {}
            for form, wrap in forms.items():
                call = ((blocks, 1, 1), (128, 1, 1), (at,), 0)
                try:
                    nodes = [(empty, call)] + [(wrap(empty), call)] * (options.nodes - 1)
                    graph = _chain(cp, stream, nodes, fork_every, side)
                    n = options.nodes + (options.nodes // fork_every if fork_every else 0)
                    found[form] = f"{_us(cp, stream, graph, n):.3f}"
                except Exception as error:
                    failed += 1
                    found[form] = f"refused: {type(error).__name__}: {error}"
            forks = f"a fork every {fork_every} nodes, all early" if fork_every else "a chain"
            print(
                f"{blocks:5d} blocks of an empty kernel, {forks}: us a node "
                + ", ".join(f"{k} {v}" for k, v in found.items())
            )
    n, numbers = 1 << 19, [7 * i % 1000 for i in range(options.nodes)]
    right = _expected(n, numbers)
    for form, wrap in forms.items():
        memory[:n] = cp.arange(n, dtype=cp.int32)
        device.synchronize()
        function = wrap(step)
        nodes = [(function, ((n // 512, 1, 1), (256, 1, 1), (at, np.int32(k), np.int32(n)), 0)) for k in numbers]
        try:
            graph = _chain(cp, stream, nodes, 0, side)
            graph.launch(stream)
            stream.synchronize()
            same = bool((memory[:n].get() == right).all())
            failed += not same
            us = _us(cp, stream, graph, len(numbers))
            print(f"a chain that needs its order, {form}: {'right' if same else 'WRONG'}, {us:.3f} us a node")
        except Exception as error:
            failed += 1
            print(f"a chain that needs its order, {form}: refused: {error}")
            traceback.print_exc(file=sys.stdout)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
