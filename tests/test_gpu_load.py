"""Loading on a GPU: options, plan and allocations, and everything a model does, with the bits of the CPU.

Kernels run on the CPU through the shim, or on a GPU with STRATA_TEST_DEVICE=cuda.
"""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

import strata
from strata.arch.flash_next.geometry import read_geometry
from strata.arch.flash_next.programs import build_programs
from strata.base.errors import BadArgument, ContextFull, DoesNotFit, NotFinite
from strata.base.plan import MIB
from strata.gpu import upload
from strata.gpu.backend import measure
from strata.gpu.memory import aligned
from strata.pack.experts import expert_layout
from strata.pack.fingerprint import fingerprint
from strata.pack.gguf_file import GgufFile
from strata.pack.mtp_files import read_draft
from strata.pack.tensors import Tensors
from strata.planner import needs
from strata.planner.machine import Machine
from strata.planner.memory import facts_of, plan
from tests.gpu.loaded import lend_gpu
from tests.gpu.run_on_cpu import needs_compiler
from tests.header_maker import make_release
from tests.model_maker import make_wide_model

PROMPT = "def f(x):"


@pytest.fixture(scope="module")
def patch():
    with pytest.MonkeyPatch.context() as made:
        lend_gpu(made)
        yield made


@pytest.fixture(scope="module")
def gpu(tiny_path, patch):
    with strata.load(tiny_path, context=512, sessions=2, checkpoints=2, device="cuda", draft="auto") as model:
        yield model


@pytest.fixture(scope="module")
def cpu(tiny_path):
    with strata.load(tiny_path, context=512, sessions=2, checkpoints=2, device="cpu", draft="auto", threads=1) as model:
        yield model


# ---- what a model does


@needs_compiler
class TestModel:
    def test_it_computes_on_the_device_and_takes_what_was_planned(self, gpu):
        stats = gpu.stats()
        assert (stats["backend"], stats["device"], stats["pool"]) == ("gpu", "cuda:0", None)
        assert gpu.mismatches == [] and stats["plan"]["mismatches"] == []
        assert {"LM head", "expert cache", "draft layer", "window scratch", "exchange"} <= stats["memory_bytes"].keys()
        assert json.dumps(stats)

    def test_answers_with_and_without_drafts_are_those_of_the_cpu(self, gpu, cpu):
        wanted = cpu.generate(PROMPT, max_tokens=4).tokens
        plain = gpu.generate(PROMPT, max_tokens=4, drafts=False)
        drafted = gpu.generate(PROMPT, max_tokens=4)
        assert plain.tokens == drafted.tokens == wanted
        assert drafted.drafts["windows"] > 0

    def test_draft_layers_propose_the_same(self, gpu, cpu):
        made = []
        for model in (gpu, cpu):
            with model.session() as session:
                state = session._state
                with model.turn():
                    state.read(model.tokenize(PROMPT), windows_only=True)
                    made.append(state.mtp.propose(state.state, int(model.tokenize("\n")[0]), 2))
        assert made[0] == made[1] and len(made[0][0]) == 2

    def test_sampling_with_penalties_and_logprobs(self, gpu, cpu):
        options = dict(max_tokens=2, temperature=1.5, seed=3, repetition_penalty=1.2, logprobs=True, top_logprobs=2)
        found, wanted = (m.generate(PROMPT, drafts=False, **options) for m in (gpu, cpu))
        assert found.tokens == wanted.tokens and found.logprobs == wanted.logprobs

    def test_logits_and_scores_have_the_same_bits(self, gpu, cpu):
        ids = cpu.tokenize("import os\nx = 1")[:5]
        assert np.array_equal(gpu.logits(ids).view(np.int32), cpu.logits(ids).view(np.int32))
        assert gpu.score(ids[:3]) == cpu.score(ids[:3])

    def test_sessions_are_independent_and_checkpoints_work(self, gpu, cpu):
        gpu._default.close()
        gpu._own = None
        one, two = gpu.session(), gpu.session()
        with pytest.raises(DoesNotFit, match="every session"):
            gpu.session()
        first = one.generate(PROMPT, max_tokens=2, drafts=False).tokens
        two.generate("x = [", max_tokens=2, drafts=False)
        mark = one.checkpoint()
        more = one.generate([*one.tokens, first[-1]], max_tokens=2, drafts=False).tokens
        one.restore(mark)
        again = one.generate([*one.tokens, first[-1]], max_tokens=2, drafts=False).tokens
        assert again == more
        with cpu.session() as same:
            wanted = same.generate(PROMPT, max_tokens=4, drafts=False).tokens
        assert first + more[: len(wanted) - len(first)] == wanted
        one.close()
        two.close()

    def test_another_thread_streams_a_chat(self, gpu, cpu):
        texts = []
        ask = [{"role": "user", "content": "x"}]

        def answer(model):
            with model.session() as session:
                stream = session.chat(ask, stream=True, max_tokens=1, thinking=False, drafts=False)
                texts.append("".join(chunk.text for chunk in stream))

        for model in (gpu, cpu):
            worker = threading.Thread(target=answer, args=(model,))
            worker.start()
            worker.join()
        assert len(texts) == 2 and texts[0] == texts[1]

    def test_an_error_in_a_window_leaves_the_session_usable(self, gpu, cpu):
        with gpu.session() as session, cpu.session() as other:
            for s in (session, other):
                s.generate(PROMPT, max_tokens=1, drafts=False)
            held, state = session.tokens, session._state.state
            good = state.recurrent.copy()
            broken = good.copy()
            broken[:4096].view(np.float32)[:] = np.nan
            state.recurrent[:] = broken
            with pytest.raises(NotFinite, match="layer"):
                session.generate([*held, 5], max_tokens=1, drafts=False)
            state.recurrent[:] = good
            found, wanted = (s.generate([*held, 5], max_tokens=2, drafts=False) for s in (session, other))
            assert found.tokens == wanted.tokens


@needs_compiler
class TestMoving:
    """Session.export and import_."""

    @pytest.mark.parametrize("way", ["to the gpu", "to the cpu"])
    def test_a_conversation_goes_on_with_the_same_tokens(self, gpu, cpu, way):
        source, target = (cpu, gpu) if way == "to the gpu" else (gpu, cpu)
        with source.session() as old, target.session() as new:
            old.generate(PROMPT, max_tokens=2, drafts=False)
            blob = old.export()
            new.import_(blob)
            assert np.array_equal(new.tokens, old.tokens)
            digests = []
            for s, model in ((old, source), (new, target)):
                with model.turn():
                    digests.append(s._state.state.digest())
                    mtp = s._state.mtp.snapshot(s._state.state)
                digests.append((mtp.rows, mtp.first, mtp.x.tobytes()))
            assert digests[:2] == digests[2:]
            prompt = [*old.tokens, 7]
            wanted = old.generate(prompt, max_tokens=3)
            found = new.generate(prompt, max_tokens=3)
            assert found.tokens == wanted.tokens and found.usage.reused_tokens == len(prompt) - 1
            assert new.export()[:15] == blob[:15]

    def test_importing_kills_checkpoints(self, cpu):
        with cpu.session() as session:
            session.generate(PROMPT, max_tokens=2)
            mark, blob = session.checkpoint(), session.export()
            session.import_(blob)
            with pytest.raises(BadArgument, match="dead"):
                session.restore(mark)

    def test_foreign_and_damaged_bytes_are_refused_and_change_nothing(self, cpu, tiny_path, tmp_path):
        with cpu.session() as session:
            session.generate(PROMPT, max_tokens=2)
            blob, held = session.export(), session.tokens
            hurt = bytearray(blob)
            hurt[len(hurt) // 2] ^= 1
            for bad, text in (
                (hurt, "damaged"), (blob[:-9], "damaged"), (b"", "no exported"), (b"x" * 99, "no exported"),
                ("text", "bytes"), (blob[:15] + b"\7" + blob[16:], "another format"),
            ):  # fmt: skip
                with pytest.raises(BadArgument, match=text):
                    session.import_(bad)
            assert np.array_equal(session.tokens, held) and session.export() == blob
        with strata.load(tiny_path, context=256, kv="int8", device="cpu", threads=1) as model:
            session = model.session()
            with pytest.raises(BadArgument, match="KV format"):
                session.import_(blob)
        wide = make_wide_model(tmp_path)
        with GgufFile(wide) as a, GgufFile(tiny_path) as b:
            assert fingerprint(a) != fingerprint(b)

    def test_another_context_and_a_model_without_a_draft_layer(self, cpu, tiny_path):
        with cpu.session() as session:
            session.generate(PROMPT, max_tokens=9)
            blob, prompt = session.export(), [*session.tokens, 9]
            wanted = session.generate(prompt, max_tokens=3).tokens
        with strata.load(tiny_path, context=256, kv="f16", device="cpu", threads=1) as plain, plain.session() as other:
            other.import_(blob)
            assert other.generate(prompt, max_tokens=3).tokens == wanted
            back, prompt = other.export(), [*other.tokens, 9]
            wanted = other.generate(prompt, max_tokens=3).tokens
        with cpu.session() as session:
            session.import_(back)  # without the draft layer's cells
            assert session.generate(prompt, max_tokens=3).tokens == wanted
        with strata.load(tiny_path, context=12, kv="f16", device="cpu", threads=1) as tight:
            small = tight.session()
            with pytest.raises(ContextFull, match="longer than the context"):
                small.import_(back)


# ---- plan and allocations


@needs_compiler
@pytest.mark.parametrize(("draft", "kv", "sessions"), [("off", "int8", 2), ("subset", "f16", 1)])
def test_a_load_takes_what_its_plan_says(patch, tiny_path, mtp_path, tmp_path, draft, kv, sessions):
    if draft == "subset":
        (tmp_path / "mtp.safetensors").symlink_to(mtp_path)
        np.arange(0, 2100, 3, dtype="<i4").tofile(tmp_path / "draft_vocab.bin")
        draft = tmp_path / "mtp.safetensors"
    with strata.load(tiny_path, context=1000, kv=kv, sessions=sessions, draft=draft, device="cuda:0") as model:
        assert model.mismatches == []
        lines = model.stats()["plan"]["lines"]
        assert all(v["planned_bytes"] or not v["taken_bytes"] for v in lines.values())
        taken = sum(a.n_bytes for a in model.taken if a.device == "vram")
        assert abs(taken - model._backend.device.taken_bytes) < 64 << 10, "nothing is taken that has no line"
    model.close()
    assert model.closed


def _measured(path, context, draft=None):
    """(plan, window scratch and logits, weights by line) as priced and as the backend measures them."""
    with GgufFile(path, headers_only=True) as gguf:
        g = read_geometry(gguf)
        layer = read_draft(draft, gguf, g) if draft else None
        made = plan(facts_of(gguf, g, draft), Machine.describe(vram_gib=192, ram_gib=256), context=context, kv="f16",
                    draft="auto" if draft else "off")  # fmt: skip
        programs = build_programs(g, needs.state.round_context(context), "f16", layer.head_rows if layer else 0)
        memory, weights = measure(programs, g, Tensors(gguf, layer.tensors if layer else {}), expert_layout(gguf, g.L))
        chunk = aligned(programs.prefill.buffers["streams"].n_bytes)
        return made, memory.n_bytes + chunk, weights.bytes_by_line()


def _check_measured(made, scratch, weights):
    """To the byte."""
    assert made.line("window scratch").n_bytes + made.line("logits").n_bytes == scratch
    assert "LM head" in weights and "small tables" in weights
    for line, n_bytes in weights.items():
        assert made.line(line, "vram").n_bytes == n_bytes, line


@pytest.mark.parametrize("context", [256, 5000, 32768])
def test_prices_are_what_the_measuring_walk_finds(tiny_path, mtp_path, context):
    _check_measured(*_measured(tiny_path, context))
    _check_measured(*_measured(tiny_path, context, mtp_path))


@pytest.mark.parametrize(("release", "context"), [("Q2_0", 131_072), ("IQ3_XXS", 4096), ("UD-Q4_K_XL", 32_768)])
def test_prices_of_released_sizes_are_what_the_measuring_walk_finds(tmp_path, release, context):
    _check_measured(*_measured(make_release(tmp_path, release, vocabulary=False), context))


def test_prices_of_wide_layers_are_what_the_measuring_walk_finds(tmp_path):
    _check_measured(*_measured(make_wide_model(tmp_path), 2048))


def test_staging_is_priced_as_it_is():
    assert needs.UPLOAD_RING_BYTES + needs.UPLOAD_MAP_BYTES == upload.UPLOAD_STAGING_BYTES
    assert needs.UPLOAD_RING_BYTES == upload.UPLOAD_HOST_BYTES


# ---- which device


@pytest.mark.gpu
def test_long_prompts_by_windows_have_the_bits_of_the_cpu(tiny_path, val):
    ids = val["code"][:700].astype(np.int32)
    found, texts = [], []
    for device in ("cuda:0", "cpu"):
        with strata.load(tiny_path, context=1024, device=device, prefill="windows") as model:
            worker = threading.Thread(target=lambda m=model: found.append(m.logits(ids)))
            worker.start()
            worker.join()
            texts.append(model.generate(ids[:600], max_tokens=40).tokens)
    assert np.array_equal(found[0].view(np.int32), found[1].view(np.int32)) and texts[0] == texts[1]


@pytest.mark.gpu
@pytest.mark.parametrize(("draft", "sessions", "context"), [("off", 1, 2048), ("auto", 2, 32_768)])
def test_a_card_loses_what_the_plan_says(tiny_path, draft, sessions, context):
    """Free memory before and after, the driver's lines included: within 1 % of the total or 16 MiB."""
    import cupy

    cupy.cuda.Device(0).use()
    cupy.cuda.runtime.free(0)
    before = cupy.cuda.runtime.memGetInfo()[0]
    with strata.load(tiny_path, context=context, draft=draft, sessions=sessions, device="cuda:0") as model:
        taken = before - cupy.cuda.runtime.memGetInfo()[0]
        lines = [x for x in model.plan.lines if x.device == "vram" and x.kind != "reserve"]
        planned = sum(x.n_bytes for x in lines if x.line != "CUDA context")  # there before
        print(f"{draft} x{sessions} {context}: planned {planned / MIB:.1f} MiB, taken {taken / MIB:.1f} MiB")
        print("  ours", sum(a.n_bytes for a in model.taken if a.device == "vram") / MIB)
        assert abs(taken - planned) <= max(16 * MIB, 0.01 * planned)
        model.generate(PROMPT, max_tokens=8)
    left = before - cupy.cuda.runtime.memGetInfo()[0]
    print(f"  left after close {left / MIB:.1f} MiB")
