"""The GPU backend as a whole: the bits of the CPU backend on the bundled model.

Kernels run on the CPU through the shim, or on a GPU with STRATA_TEST_DEVICE=cuda.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from strata.arch.flash_next.geometry import read_geometry
from strata.arch.flash_next.programs import build_programs
from strata.base.errors import BadArgument, NotFinite
from strata.base.window import HeadRequest
from strata.cpu.backend import CpuBackend
from strata.gpu import experts_op, hc_ops, ops, route
from strata.gpu.backend import GpuBackend, measure
from strata.gpu.gemv import combines
from strata.gpu.hc_ops import NORM_DOWN_ROWS
from strata.pack.experts import expert_layout
from strata.pack.gguf_file import GgufFile
from strata.pack.mtp_files import read_draft
from strata.pack.tensors import Tensors
from tests.canonical.call import assert_same
from tests.gpu.host_device import HostDevice
from tests.gpu.run_on_cpu import ON_DEVICE, needs_compiler

pytestmark = needs_compiler
CELLS = 512
TOKENS = np.random.default_rng(0).integers(0, 4000, 300).astype(np.int32)


def new_device():
    if ON_DEVICE:
        from strata.gpu.device import CupyDevice

        return CupyDevice()
    return HostDevice()


@dataclass
class Pair:
    """Both backends on the same programs, and one session on each."""

    cpu: CpuBackend
    gpu: GpuBackend

    def fresh(self) -> Pair:
        self.cs, self.gs = self.cpu.new_state(), self.gpu.new_state()
        return self

    def previous(self) -> tuple[int, int]:
        n = self.cs.rows
        return (int(TOKENS[n - 1]) if n > 0 else -1, int(TOKENS[n - 2]) if n > 1 else -1)

    def window(self, T: int) -> np.ndarray:
        """The next T tokens on both; their streams are compared."""
        tokens = TOKENS[self.cs.rows :][:T]
        for backend, state in ((self.cpu, self.cs), (self.gpu, self.gs)):
            backend.window(state, tokens, self.previous())
        assert_same(self.gpu.streams[:T], np.array(self.cpu.streams[:T]), f"streams of {T} rows at {self.cs.rows}")
        return tokens

    def commit(self, n_keep: int) -> None:
        for backend, state in ((self.cpu, self.cs), (self.gpu, self.gs)):
            backend.commit(state, n_keep)
        assert self.cs.rows == self.gs.rows

    def head(self, first: int, T: int, request: HeadRequest) -> None:
        found, wanted = self.gpu.head(first, T, request), self.cpu.head(first, T, request)
        for name in ("argmax", "logsumexp", "top_ids", "top_logits", "mod_ids", "mod_logits", "mod_logsumexp", "full"):
            a, b = getattr(found, name), getattr(wanted, name)
            assert (a is None) == (b is None), name
            if a is not None:
                assert_same(np.array(a), np.array(b), name)


def make_pair(tiny_path, mtp_path, kv: str) -> Pair:
    gguf = GgufFile(tiny_path)
    g = read_geometry(gguf)
    layer = read_draft(mtp_path, gguf, g)
    programs = build_programs(g, CELLS, kv, layer.head_rows)
    tensors, experts = Tensors(gguf, layer.tensors), expert_layout(gguf, g.L)
    cpu = CpuBackend(tensors, g, experts, programs, threads=1)
    return Pair(cpu, GpuBackend(tensors, g, experts, programs, new_device())).fresh()


@pytest.fixture(scope="module", params=["f16", "int8"])
def pair(request, tiny_path, mtp_path):
    made = make_pair(tiny_path, mtp_path, request.param)
    yield made
    made.cpu.close()
    made.gpu.close()


REQUEST = HeadRequest(greedy=False, summary=True, full=True, repetition=1.1, frequency=0.1, bias={7: 1.5, 9: -np.inf})


def test_windows_heads_and_commits(pair):
    pair.fresh()
    for T, n_keep in ((1, 1), (3, 2), (2, 0)) if not ON_DEVICE else [(t, max(0, t - 1)) for t in range(1, 9)] * 3:
        tokens = pair.window(T)
        pair.head(0, T, HeadRequest(**REQUEST.__dict__ | {"history": TOKENS[: pair.cs.rows], "rows": tokens}))
        pair.commit(n_keep)
        assert pair.gs.digest() == pair.cs.digest(), "state after a commit"
    pair.head(0, 1, HeadRequest())
    pair.head(0, 1, HeadRequest(greedy=False))


def test_every_op_by_itself(pair):
    pair.fresh()
    pair.window(2)
    pair.commit(2)
    tokens, buffers = TOKENS[2:4], {}

    def keep(op):
        names = [n for n in op.buffers.values() if n in pair.cpu.memory.arrays]
        buffers[len(buffers)] = [(n, pair.cpu.memory.arrays[n].copy()) for n in names]

    pair.cpu.window(pair.cs, tokens, pair.previous(), after_op=keep)
    steps = iter(range(len(buffers)))

    def compare(op):
        for name, wanted in buffers[next(steps)]:
            if name not in ("ngram.ticket", "hc.inject"):
                found, rows = pair.gpu.read(name), 2 if wanted.shape[0] > 2 else wanted.shape[0]
                assert_same(found[:rows], wanted[:rows], f"{name} after {op.kind} of layer {op.layer}")

    pair.gpu.window(pair.gs, tokens, pair.previous(), after_op=compare)
    assert next(steps, None) is None


def test_a_session_moves_between_backends(pair):
    pair.fresh()
    pair.window(3)
    pair.commit(3)
    moved = pair.gs.export()
    assert moved.digest() == pair.cs.digest()
    back = pair.gpu.new_state()
    back.import_(moved)
    pair.gs = back
    pair.window(1)
    assert pair.gs.digest() == moved.digest(), "a window leaves the state"
    pair.commit(1)
    for state in (pair.gs, pair.cs):  # back to a checkpoint
        state.recurrent[:] = moved.recurrent
        state.rows = 3
    pair.window(2)
    other = build_programs(pair.gpu.geometry, 256, "f16")
    with pytest.raises(BadArgument):
        type(pair.gs)(pair.gpu.device, other.states).import_(moved)


def test_an_error_names_op_and_layer_and_leaves_the_state(pair):
    pair.fresh()
    pair.window(2)
    pair.commit(2)
    host = pair.gs.export()
    host.arrays["gdn.4.state"][0, 1, 2] = np.nan
    pair.gs.recurrent[:] = host.recurrent
    pair.cs.recurrent[:] = host.recurrent
    messages = []
    for backend, state in ((pair.cpu, pair.cs), (pair.gpu, pair.gs)):
        with pytest.raises(NotFinite) as raised:
            backend.window(state, TOKENS[2:4], pair.previous())
        messages.append(str(raised.value))
    assert messages[0] == messages[1] and "gdn_heads, layer 4" in messages[0]
    assert pair.gs.digest() == host.digest()
    pair.gs.clear()
    pair.cs.clear()
    pair.window(1)


def test_draft_layer(pair):
    pair.fresh()
    rng = np.random.default_rng(1)
    x = rng.standard_normal((5, pair.cpu.geometry.CD)).astype(np.float32)
    results = []
    for backend, state in ((pair.cpu, pair.cs), (pair.gpu, pair.gs)):
        layer = backend.draft
        for i, row in enumerate(x):
            layer.set_row(state, 62 + i, row)
        layer.append(state, TOKENS[:3], 62)  # over the end of the ring
        layer.append(state, TOKENS[3:4], 65)
        results.append([
            layer.steps(state, int(TOKENS[4]), 66, 62, 1),
            layer.steps(state, None, 67, 62, 2),
            layer.steps(state, 17, 66, 64, 1),
            layer.row(state, 64).tolist(),
        ])  # fmt: skip
        cells = [name for name, b in state.buffers.items() if name.startswith("mtp.") and b.role == "cells"]
        results[-1].append([state.read_cells(name, 67).tobytes() for name in cells])
    assert results[0] == results[1]
    assert results[0][3] == x[2].tolist()


def test_memory_is_what_was_planned(pair, tiny_path, mtp_path):
    gpu = pair.gpu
    lines = gpu.allocations([pair.gs])
    assert {a.device for a in lines} == {"vram", "ram"} and all(a.n_bytes > 0 for a in lines)
    gguf = GgufFile(tiny_path)
    layer = read_draft(mtp_path, gguf, gpu.geometry)
    memory, weights = measure(
        gpu.programs, gpu.geometry, Tensors(gguf, layer.tensors), expert_layout(gguf, gpu.geometry.L)
    )
    assert memory.n_bytes == gpu.memory.n_bytes and weights.n_bytes == gpu.weights.n_bytes


def combines_of(gpu: GpuBackend, T: int) -> list[bool]:
    """Of every layer, whether its down product may combine."""
    return [combines(gpu.weights.expert_format(layer, 2), T, gpu.geometry.F) for layer in range(gpu.geometry.L)]


def test_nodes_of_a_window(pair):
    counts = pair.gpu.launch_counts()
    print(counts)
    trunks = {int(name.partition("T=")[2]): n for name, n in counts.items() if name.startswith("trunk")}
    L = pair.gpu.geometry.L
    apart = {T: n + sum(combines_of(pair.gpu, T)) + (L if T <= route.ROUTED_ROWS else 0) for T, n in trunks.items()}
    joined = {T for T in apart if T <= NORM_DOWN_ROWS or (pair.gpu.memory.clusters and T in hc_ops.CLUSTERED_ROWS)}
    assert len({n + 2 * L * (T in joined) for T, n in apart.items()}) == 1, "norms are part of the product"
    assert counts["trunk T=1"] <= 30 * L


def test_what_narrow_windows_join_can_be_switched_off(pair, monkeypatch):
    g, program = pair.gpu.geometry, pair.gpu.programs.windows[1]
    kernels = [[one.kernel for one in pair.gpu._lower(program).launches]]
    assert sum(k.startswith("norm_down") for k in kernels[0]) == 2 * g.L
    assert sum(k.startswith("mixed") for k in kernels[0]) >= g.L
    for module, name in ((hc_ops, "NORM_DOWN_ROWS"), (ops, "MIXED_ROWS")):
        monkeypatch.setattr(module, name, 0)
        kernels.append([one.kernel for one in pair.gpu._lower(program).launches])
    assert len(kernels[0]) == len(kernels[1]) - 2 * g.L < len(kernels[2]) - 2 * g.L
    assert not any(k.startswith(("norm_down", "mixed")) for k in kernels[2])


def test_norms_of_four_rows_go_by_clusters_where_there_are_any(pair, monkeypatch):
    g, program, clusters = pair.gpu.geometry, pair.gpu.programs.windows[4], pair.gpu.memory.clusters
    launches = pair.gpu._lower(program).launches
    assert sum(one.cluster > 1 for one in launches) == 2 * g.L * clusters
    monkeypatch.setattr(pair.gpu.memory, "clusters", False)
    plain = pair.gpu._lower(program).launches
    assert not any(one.cluster > 1 for one in plain) and len(plain) == len(launches) + 2 * g.L * clusters
    # And a window of them has the same bits.
    monkeypatch.setitem(pair.gpu._graphs, id(program), pair.gpu._capture(program))
    pair.fresh().window(4)
    pair.commit(3)
    assert pair.gs.digest() == pair.cs.digest()


@pytest.mark.parametrize("T", [1, 2, 8])
def test_the_combine_is_part_of_the_down_product(pair, T, monkeypatch):
    """Four nodes of an experts op for one row: gate and up, down, of either side."""
    program = pair.gpu.programs.windows[T]
    experts = [i for i, op in enumerate(program.ops) if op.kind == "experts"]

    def kernels() -> list[list[str]]:
        lowering = pair.gpu._lower(program)
        found = [lowering.launches_of(i) for i in experts]
        assert all(launches[-1].fork == 0 and launches[-2].fork > 0 for launches in found), "it waits for both sides"
        return [[one.kernel.partition("<")[0] for one in launches] for launches in found]

    together, alone = kernels(), combines_of(pair.gpu, T)
    monkeypatch.setattr(experts_op, "COMBINED_ROWS", 0)
    apart = kernels()
    assert (T == 1) == all(alone) == any(alone)
    for mine, names, before in zip(alone, together, apart, strict=True):
        assert before[-1] == "combine" and len(before) == len(names) + mine
        assert names[-1] in (("product", "short_rows") if mine else ("combine",))
    assert max(map(len, apart)) >= 5 and (T > 1 or min(map(len, together)) == 4)


def test_the_product_of_logits_chooses_the_experts(pair, monkeypatch):
    """A node a layer less in windows of one row, and not where ops run one by one."""
    L = pair.gpu.geometry.L

    def kernels(T: int, fuse: bool = True) -> list[str]:
        launches = pair.gpu._lower(pair.gpu.programs.windows[T], fuse).launches
        return [one.kernel.partition("<")[0] for one in launches]

    together = {T: kernels(T) for T in (1, 2, 8)}
    for T, found in together.items():
        assert (found.count("route"), found.count("router")) == ((L, 0) if T == 1 else (0, L))
        assert "route" not in kernels(T, fuse=False)
    monkeypatch.setattr(route, "ROUTED_ROWS", 0)
    apart = {T: kernels(T) for T in together}
    assert (apart[1].count("route"), apart[1].count("router")) == (0, L)
    assert len(apart[1]) == len(together[1]) + L and all(apart[T] == together[T] for T in (2, 8))


def test_the_shared_expert_runs_beside_the_router(pair):
    def forks(fuse: bool) -> list[tuple[int, bool]]:
        """Of every router: branch, and whether a later launch of its fork is in another one."""
        launches = pair.gpu._lower(pair.gpu.programs.windows[2], fuse).launches
        routers = [one for one in launches if one.kernel.startswith(("route", "router<"))]
        return [(r.branch, r.fork > 0 and any(o.fork == r.fork and o.branch for o in launches)) for r in routers]

    assert forks(True) == [(0, True)] * pair.gpu.geometry.L
    assert forks(False) == [(0, False)] * pair.gpu.geometry.L


@pytest.mark.parametrize("T", [1, 4])
def test_ngram_rows_are_multiplied_ahead(pair, T, monkeypatch):
    """From the wait on, in front of everything but the inbox; the gates meet them. Not where ops run one by one."""
    program = pair.gpu.programs.windows[T]

    def lowered(fuse: bool = True):
        found = pair.gpu._lower(program, fuse)
        launches = found.graph_launches(8, (8, 8, 8))
        ahead = [one.kernel for one in launches if one.ahead]
        assert [one.kernel for one in launches[1 : 1 + len(ahead)]] == ahead
        assert not any(one.fork or one.branch or one.aside for one in launches if one.ahead)
        of = zip(found.op_of_launch, found.launches, strict=True)
        kinds = {found.program.ops[i].kind for i, one in of if one.ahead}
        assert found.op_of_launch == sorted(found.op_of_launch) and len(launches) == len(found.launches) + 2
        return ahead, kinds, [one.kernel.partition("_")[0] for one in launches if one.meets], len(launches)

    ahead, kinds, meets, n = lowered()
    assert ahead[0] == "ngram_wait" and len(ahead) >= 2
    assert kinds == {"ngram_wait", "linear"} and meets == ["ngram"]
    assert lowered(fuse=False)[:3] == ([], set(), [])
    monkeypatch.setattr(ops, "NGRAM_AHEAD", False)
    assert lowered() == ([], set(), [], n)


@pytest.mark.gpu
def test_a_prefill_chunk(pair):
    if not ON_DEVICE:
        pytest.skip("32 windows take minutes in the shim: STRATA_TEST_DEVICE=cuda")
    pair.fresh()
    for backend, state in ((pair.cpu, pair.cs), (pair.gpu, pair.gs)):
        backend.prefill(state, TOKENS[:256], (-1, -1))
    assert pair.gs.digest() == pair.cs.digest()
    assert_same(pair.gpu.streams[:256], np.array(pair.cpu.streams[:256]))
    pair.head(250, 4, REQUEST.__class__(greedy=False, summary=True))
    pair.window(5)
