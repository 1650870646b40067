"""Time of a whole layer of experts beside the time of its kernels alone, over weights that no cache holds.

The layer is the op a model runs: grouping, gate and up, activation, quantising, down, and the exact sum, of K routed
experts and the shared one. Sets of K experts are taken in turn, so their bytes come from memory each time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from strata.arch.flash_next.program import trunk_program
from strata.base.compiled import step
from strata.base.errors import need
from strata.base.program import ERROR_WORDS
from strata.cpu.lower import Lowering, Memory
from strata.cpu.machine_code import copy_bytes, i64_view
from strata.cpu.pool import Pool
from strata.cpu.walker import WalkList, walk
from strata.cpu.weights import Weights
from strata.kernel_speed import Job, Product, activation_records, core_seconds, kernels_of, multiplying
from strata.pack.experts import expert_layout
from strata.pack.formats import by_name
from strata.pack.gguf_file import GgufFile
from strata.pack.tensors import Tensors
from strata.synth import SynthSpec, geometry_of, memory_model

VOCABULARY = 600


def layer_spec(types: str, n_bytes: int) -> SynthSpec:
    """One layer whose routed experts take at least n_bytes, in whole sets of ten."""
    spec = SynthSpec.of_types(types, layers=1, vocabulary=VOCABULARY, experts=10)
    expert_bytes = 2 * 640 * by_name(spec.gate_up).row_bytes(2560) + 2560 * by_name(spec.down).row_bytes(640)
    return replace(spec, experts=10 * max(2, -(-n_bytes // (10 * expert_bytes))))


@step
def layer_of_ids(a):
    """A layer's steps with its routing replaced. Record: ids, their place, bytes, steps, number of steps, error."""
    p = i64_view(a, 6)
    copy_bytes(p[1], p[0], p[2])
    walk(p[3], p[4], p[5])


@dataclass(frozen=True)
class LayerTimes:
    """One core; us a layer, one figure a pass over all sets: the op, and its products alone over the same matrices.
    n_bytes: weights of one layer, the shared expert's included."""

    R: int
    n_bytes: int
    layer_us: list[float]
    kernels_us: list[float]


class LayerBench:
    """A layer of ten routed experts and the shared one, in memory. Use as a context manager."""

    def __init__(self, types: str, tier: int, n_bytes: int):
        self.types, self.spec, self.tier = types, layer_spec(types, n_bytes), tier
        self.geometry = geometry_of(self.spec)
        self._model = memory_model(self.spec)
        self._gguf = GgufFile(self._model.__enter__())
        self.tensors = Tensors(self._gguf)
        self.weights = Weights(self.tensors, expert_layout(self._gguf, 1), tier)
        self.sets = np.random.default_rng(1).permutation(self.spec.experts).astype(np.int32).reshape(-1, 10)

    def __enter__(self) -> LayerBench:
        return self

    def __exit__(self, *_: object) -> None:
        del self.weights, self.tensors
        self._gguf.close()
        self._model.__exit__(None, None, None)

    @property
    def pass_bytes(self) -> int:
        """Weights of a layer for each set, the shared expert's every time."""
        names = [f"blk.0.ffn_{part}_{{}}.weight" for part in ("gate", "up", "down")]
        routed, shared = (sum(self.tensors.info(n.format(which)).n_bytes for n in names) for which in ("exps", "shexp"))
        return routed + shared * len(self.sets)

    def layer(self, R: int, pool: Pool) -> Layer:
        return Layer(self, R, pool)

    def kernels(self, R: int) -> list[Job]:
        """For each set, the products of its experts and of the shared one, in the order of the layer."""
        names = [f"blk.0.ffn_{part}_{{}}.weight" for part in ("gate", "up", "down")]
        out = np.zeros((R, 2560), np.float32)
        made = {}

        def product(name: str, expert: int) -> Product:
            info = self.tensors.info(name)
            rows, K = info.shape[-2:]
            if name not in made:
                made[name] = kernels_of(info.format, self.tier), activation_records(info.format, K, R, self.tier)
            kernels, records = made[name]
            address = self.tensors.address(name) + expert * rows * info.row_bytes
            return Product(address, info.row_bytes, rows, K, kernels, records, out)

        jobs = []
        for chosen in self.sets:
            products = [product(n.format("exps"), int(e)) for e in chosen for n in names[:2]]
            products += [product(n.format("shexp"), 0) for n in names[:2]]
            products += [product(names[2].format("exps"), int(e)) for e in chosen]
            products.append(product(names[2].format("shexp"), 0))
            jobs.append(multiplying(products, R))
        return jobs

    def one_core(self, R: int, repeats: int) -> LayerTimes:
        """The op and its kernels in turn, R rows that all want the same ten experts."""
        layer_us: list[float] = []
        kernels_us: list[float] = []
        with Pool(1) as pool:
            layer, jobs = self.layer(R, pool), self.kernels(R)
            for i in range(-1, repeats):
                op_s = layer.core_seconds()
                sum_s = sum(core_seconds(job, pool) for job in jobs)
                if i >= 0:
                    layer_us.append(1e6 * op_s / len(self.sets))
                    kernels_us.append(1e6 * sum_s / len(self.sets))
        return LayerTimes(R, jobs[0].n_bytes, layer_us, kernels_us)


class Layer:
    """The experts op of R rows over a pool, with its routing in the caller's hands."""

    def __init__(self, bench: LayerBench, R: int, pool: Pool):
        program = trunk_program(bench.geometry, R, 256, "f16")
        op = next(op for op in program.ops if op.kind == "experts")
        program = replace(program, ops=(op,), buffers={n: program.buffers[n] for n in op.buffers.values()
                                                       if n in program.buffers})  # fmt: skip
        self._memory = Memory([program], {})
        self._error = np.zeros(ERROR_WORDS, np.int64)
        self._pool = pool

        def lowered() -> Lowering:
            lowering = Lowering(program, self._memory, bench.weights, pool.address, pool.threads,
                                self._error.ctypes.data)  # fmt: skip
            lowering.run()
            return lowering

        lowered()
        self._memory.allocate()
        self.walk = lowered().walk
        arrays = self._memory.arrays
        arrays["u"][:] = np.random.default_rng(2).standard_normal(arrays["u"].shape)
        arrays["moe.weights"][:] = 0.1
        self.ids, self.y = arrays["moe.ids"], arrays["y"]
        self.walk.freeze()
        steps = self.walk.step_words
        self._layers = WalkList(self._error.ctypes.data)
        for chosen in bench.sets:
            ids = np.ascontiguousarray(np.broadcast_to(chosen, self.ids.shape))
            self._layers.add(layer_of_ids, ids, self.ids, ids.nbytes, steps, len(steps), self._error.ctypes.data)

    def records(self, name: str, words: int) -> list[np.ndarray]:
        """Argument records of the layer's steps of that name, to be changed at will."""
        return [self.walk.record(i, words) for i, other in enumerate(self.walk.names) if other == name]

    def pass_over(self) -> None:
        """The layer once for each set of experts, one behind the other as the layers of a model."""
        failed = self._layers.run()
        need(failed < 0, "the layer of the bench stopped", found=self._error.tolist(), needed="no error")

    def core_seconds(self) -> float:
        began = time.thread_time()
        self.pass_over()
        return time.thread_time() - began

    def wall_seconds(self, passes: int) -> float:
        began = time.perf_counter()
        for _ in range(passes):
            self.pass_over()
        return time.perf_counter() - began
