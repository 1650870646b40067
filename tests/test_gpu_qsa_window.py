"""Attention layers whose heads have the real sizes, in the whole backend: one kernel stores, pools and scores."""

import numpy as np
import pytest

from strata.arch.flash_next.geometry import read_geometry
from strata.arch.flash_next.programs import build_programs
from strata.cpu.backend import CpuBackend
from strata.gpu.backend import GpuBackend
from strata.pack.experts import expert_layout
from strata.pack.gguf_file import GgufFile
from strata.pack.tensors import Tensors
from tests.canonical.call import assert_same
from tests.gpu.host_device import HostDevice
from tests.gpu.run_on_cpu import ON_DEVICE, needs_compiler
from tests.tiny_models import TinyModel, small

pytestmark = needs_compiler
SIZES = {"H": 3, "Hkv": 1, "dh": 256, "rotary_dims": 64, "indexer_heads": 4, "indexer_dim": 128, "budget_cells": 16}
TOKENS = np.random.default_rng(0).integers(0, 256, 200).astype(np.int32)


def new_device(reverse: bool):
    if ON_DEVICE:
        from strata.gpu.device import CupyDevice

        return CupyDevice()
    return HostDevice(reverse)


@pytest.fixture(scope="module", params=[("f16", False), ("int8", True)], ids=["f16", "int8 in reverse"])
def backends(request, tmp_path_factory):
    kv, reverse = request.param
    geometry = small(L=2, kinds=("gdn", "qsa"), ngram=None, **SIZES)
    types = {"*": "Q8_0", "*norm*": "F32", "*indexer*": "BF16", "*hc*": "BF16", "*ffn_gate_inp*": "BF16"}
    with GgufFile(TinyModel(geometry, types=types).write(tmp_path_factory.mktemp("window") / "m.gguf")) as gguf:
        g = read_geometry(gguf)
        programs, tensors, experts = build_programs(g, 256, kv), Tensors(gguf), expert_layout(gguf, g.L)
        cpu = CpuBackend(tensors, g, experts, programs, threads=1)
        gpu = GpuBackend(tensors, g, experts, programs, new_device(reverse))
        yield cpu, gpu
        cpu.close()
        gpu.close()


def test_one_kernel_stores_pools_and_scores(backends):
    _, gpu = backends
    for T in range(1, 9):
        kernels = [one.kernel for one in gpu._lower(gpu.programs.windows[T]).launches]
        assert [k for k in kernels if k.startswith("qsa_s")] == ["qsa_store<true>", "qsa_select"]
        plain = [one.kernel for one in gpu._lower(gpu.programs.windows[T], fuse=False).launches]
        wanted = ["qsa_store<false>", "qsa_store<false>", "qsa_scores_4x128", "qsa_select"]
        assert [k for k in plain if k.startswith("qsa_s")] == wanted


def test_sessions_in_turn_with_rejected_rows(backends):
    """Windows of all sizes on both sides of the budget, some of whose rows are not kept, in two sessions in turn."""
    cpu, gpu = backends
    sessions = [(cpu.new_state(), gpu.new_state()) for _ in range(2)]
    steps = ((8, 7), (8, 8), (3, 1), (1, 1), (2, 2), (5, 3), (4, 4), (1, 1), (6, 0), (7, 5), (1, 1), (8, 3))
    for T, n_keep in steps:
        for number, (cs, gs) in enumerate(sessions):
            at = cs.rows + 50 * number
            previous = (int(TOKENS[at - 1]) if cs.rows else -1, int(TOKENS[at - 2]) if cs.rows > 1 else -1)
            for backend, state in ((cpu, cs), (gpu, gs)):
                backend.window(state, TOKENS[at : at + T], previous)
            assert_same(gpu.streams[:T], np.array(cpu.streams[:T]), f"session {number}: {T} rows at {cs.rows}")
            for backend, state in ((cpu, cs), (gpu, gs)):
                backend.commit(state, n_keep)
            assert gs.rows == cs.rows and gs.digest() == cs.digest()
    assert sessions[0][0].rows > 2 * SIZES["budget_cells"]
