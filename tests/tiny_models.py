"""Small GGUF models of any geometry with random weights, and damaged or converted copies of real ones."""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, quants

from strata.base.geometry import Geometry, NgramGeometry
from strata.pack.formats import by_name
from strata.pack.gguf_file import GgufFile
from strata.text.tokenizer import BYTE_ALPHABET
from tests.block_data import random_rows
from tests.gguf_maker import Made, MadeTensor, Typed, array, string

PREFIX = "qwen4exp."
U32, I32, F32, BOOL, U64 = 4, 5, 6, 7, 10
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
IMAGE_TOKEN = 4
QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16", "F32", "MXFP4")
"""Formats that real values are quantised to; blocks of any other format are random."""


def small(**changes: Any) -> Geometry:
    """A geometry of four layers (the last one attention), with `changes`; period and n-gram block included."""
    values: dict[str, Any] = dict(
        architecture="qwen4exp", L=4, D=64, V=300, trained_context=1024, rms_eps=2.0**-20, C=4, hc_rank=8,
        kinds=("gdn", "gdn", "gdn", "qsa"), H=4, Hkv=2, dh=64, rotary_dims=16, rope_base=1e4,
        indexer_heads=2, indexer_dim=32, budget_cells=16, block_cells=4,
        gdn_key_heads=2, gdn_value_heads=4, gdn_key_dim=16, gdn_value_dim=32, gdn_conv_taps=4,
        E=8, K=2, F=32, shared_width=64, router_scale=1.0, ngram=ngram(),
    )  # fmt: skip
    return Geometry(**values | changes)


def ngram(layer: int = 1, heads_per_order: int = 2, row_width: int = 32, taps: int = 4) -> NgramGeometry:
    heads = 2 * heads_per_order
    moduli = tuple(97 + i for i in range(heads))
    offsets = tuple(int(o) for o in np.cumsum((0, *moduli))[:-1])
    return NgramGeometry(layer, 3, heads_per_order, row_width, taps, 256, IMAGE_TOKEN,
                         (2043359076095531, 1677619451946387, 1270917961443223), moduli, offsets)  # fmt: skip


@dataclass
class TinyModel:
    """What to write. types: tensor name pattern -> format; later patterns win; matrices are F32 without one.

    merged  gate and up experts in one tensor          edit  last change of the file's keys and tensors
    keys    keys to set (None: leave out)              shards  1, or 2 with the n-gram table alone in the second
    """

    geometry: Geometry
    types: Mapping[str, str] = field(default_factory=dict)
    merged: bool = False
    keys: Mapping[str, Typed | None] = field(default_factory=dict)
    edit: Callable[[Made], None] | None = None
    seed: int = 0

    def made(self) -> Made:
        made = Made(keys=list((self.metadata() | dict(self.keys)).items()), tensors=list(self.tensors()))
        made.keys = [(k, v) for k, v in made.keys if v is not None]
        if self.edit:
            self.edit(made)
        return made

    def write(self, path: Path) -> Path:
        return self.made().write(path)

    # ---- keys

    def metadata(self) -> dict[str, Typed | None]:
        g = self.geometry
        n = g.ngram
        period = g.kinds.index("qsa") + 1 if "qsa" in g.kinds else 0
        numbers = {
            "block_count": g.L, "context_length": g.trained_context, "embedding_length": g.D,
            "attention.head_count": g.H, "attention.head_count_kv": g.Hkv, "attention.key_length": g.dh,
            "attention.value_length": g.dh, "rope.dimension_count": g.rotary_dims, "expert_count": g.E,
            "expert_used_count": g.K, "expert_feed_forward_length": g.F,
            "expert_shared_feed_forward_length": g.shared_width, "ssm.conv_kernel": g.gdn_conv_taps,
            "ssm.state_size": g.gdn_key_dim, "ssm.group_count": g.gdn_key_heads,
            "ssm.time_step_rank": g.gdn_value_heads, "ssm.inner_size": g.gdn_value_width,
            "full_attention_interval": period, "hyper_connection.count": g.C, "hyper_connection.low_rank": g.hc_rank,
            "attention.indexer.head_count": g.indexer_heads, "attention.indexer.key_length": g.indexer_dim,
            "attention.indexer.top_k": g.budget_cells,
        }  # fmt: skip
        keys: dict[str, Typed | None] = {"general.architecture": string("qwen4exp")}
        keys |= {PREFIX + k: Typed(U32, v) for k, v in numbers.items()}
        keys[PREFIX + "attention.layer_norm_rms_epsilon"] = Typed(F32, g.rms_eps)
        keys[PREFIX + "rope.freq_base"] = Typed(F32, g.rope_base)
        ratios = [g.block_cells if kind == "qsa" else 0 for kind in g.kinds]
        keys[PREFIX + "attention.compress_ratios"] = array(I32, ratios)
        if n:
            keys |= {
                PREFIX + "ple.layers": array(I32, [n.layer]),
                PREFIX + "ple.ngram_size": Typed(U32, n.order),
                PREFIX + "ple.heads_per_ngram": Typed(U32, n.heads_per_order),
                PREFIX + "ple.conv_kernel": Typed(U32, n.conv_taps),
                PREFIX + "ple.eos_token_id": Typed(U32, n.reset_token),
                PREFIX + "ple.image_token_id": Typed(U32, n.image_token),
                PREFIX + "embedding_length_per_layer_input": Typed(U32, n.row_width),
                PREFIX + "ple.layer_multipliers": array(U64, n.multipliers),
                PREFIX + "ple.head_vocab_sizes": array(U64, n.moduli),
                PREFIX + "ple.head_offsets": array(U64, n.offsets),
            }
        tokens = [*BYTE_ALPHABET, *SPECIALS]
        tokens += [f"<extra_{i}>" for i in range(len(tokens), g.V)]
        kinds = [1] * 256 + [3] * len(SPECIALS) + [4] * (len(tokens) - 256 - len(SPECIALS))
        keys |= {
            "tokenizer.ggml.model": string("gpt2"),
            "tokenizer.ggml.pre": string("qwen35"),
            "tokenizer.ggml.tokens": array(8, tokens),
            "tokenizer.ggml.token_type": array(I32, kinds),
            "tokenizer.ggml.merges": array(8, []),
            "tokenizer.ggml.bos_token_id": Typed(U32, 256),
            "tokenizer.ggml.eos_token_id": Typed(U32, 258),
            "tokenizer.ggml.add_bos_token": Typed(BOOL, False),
        }
        return keys

    # ---- tensors

    def tensors(self) -> list[MadeTensor]:
        from strata.arch.flash_next.contract import VECTOR, required_tensors

        merged = frozenset(range(self.geometry.L)) if self.merged else frozenset()
        out = []
        for need in required_tensors(self.geometry, merged):
            if need.name.endswith("ffn_gate_up_exps.weight"):
                halves = [need.name.replace("gate_up", part) for part in ("gate", "up")]
                shape = (need.shape[0], need.shape[1] // 2, need.shape[2])
                values = np.concatenate([self.values(name, shape) for name in halves], axis=1)
            else:
                values = self.values(need.name, need.shape)
            kind = self._type(need.name, vector=need.use == VECTOR)
            out.append(MadeTensor(need.name, need.shape, by_name(kind).ggml_id, self._packed(values, kind)))
        return out

    def _type(self, name: str, vector: bool) -> str:
        kind = "F32"
        for pattern, wanted in self.types.items():
            if fnmatch.fnmatch(name, pattern):
                kind = wanted
        return kind if not vector or kind in ("F32", "F16", "BF16") else "F32"

    def values(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Random float32 values that keep activations near 1; they depend on the name and the seed alone."""
        rng = np.random.default_rng([self.seed, *name.encode()])
        x = rng.standard_normal(shape)
        if name.endswith("norm.weight") or "_norm_" in name:
            return (1 + 0.2 * x).astype(np.float32)
        if name.endswith("ssm_a"):
            return -np.exp(0.5 * x).astype(np.float32)
        if name.endswith("ssm_dt.bias"):
            return (0.5 * x - 1).astype(np.float32)
        if "conv1d" in name:
            return (0.4 * x).astype(np.float32)
        gain = {"output.weight": 2.0, "token_embd.weight": shape[-1] ** 0.5}.get(name, 1.0)
        if name.startswith("per_layer"):
            gain = shape[-1] ** 0.5
        return (x * gain / shape[-1] ** 0.5).astype(np.float32)

    def _packed(self, values: np.ndarray, kind: str) -> bytes:
        if kind in QUANTISED:
            flat = values.reshape(-1, values.shape[-1])
            return np.ascontiguousarray(quants.quantize(flat, GGMLQuantizationType[kind])).tobytes()
        rows = int(np.prod(values.shape[:-1]))
        raw = random_rows(by_name(kind), rows, values.shape[-1], seed=self.seed)
        return raw.tobytes()


# ---- copies of existing files


def copy_shards(first: Path, folder: Path) -> Path:
    """Writable copies of every shard of a two-shard model; returns the first."""
    for shard in first.parent.glob(first.name.replace("-00001-of-", "-0000?-of-")):
        shutil.copy(shard, folder / shard.name)
    return folder / first.name


def poke(path: Path, tensor: str, at: int, data: bytes) -> None:
    """Overwrite bytes of a tensor's data, `at` bytes from its start, in whichever shard it lies."""
    with GgufFile(path) as gguf:
        info = gguf.info(tensor)
        shard, offset = gguf.shards[info.shard].path, info.offset
        assert 0 <= at and at + len(data) <= info.n_bytes
    with shard.open("r+b") as file:
        file.seek(offset + at)
        file.write(data)


def as_float32(first: Path, path: Path) -> Path:
    """One file with every tensor of `first` dequantised to F32 and the same keys."""
    with GgufFile(first) as gguf:
        keys = [(k, _typed(v)) for k, v in gguf.metadata.items() if not k.startswith("split.")]
        tensors = [MadeTensor(n, t.shape, 0, gguf.values(n).tobytes()) for n, t in gguf.tensors.items()]
    return Made(keys=keys, tensors=tensors).write(path)


def _typed(value: Any) -> Typed:
    """A metadata value as read, as one to write."""
    if isinstance(value, bool):
        return Typed(BOOL, value)
    if isinstance(value, str):
        return string(value)
    if isinstance(value, float):
        return Typed(F32, value)
    if isinstance(value, int):
        return Typed(U64 if value >= 1 << 32 else U32, value)
    if isinstance(value, np.ndarray):
        kind = {"i4": I32, "u8": U64, "u4": U32, "f4": F32, "b1": BOOL}[value.dtype.str[1:]]
        return array(kind, value.tolist())
    return array(8, list(value))


# ---- a model that says what it is told


def scripted(*texts: bytes | str, logit: float = 20.0) -> TinyModel:
    """A model whose most likely next token depends on the last token alone: it continues along each of `texts`.

    A text is bytes or a string, one token a byte; the last byte is followed by the end of the turn. No byte may have
    two different successors. Tokens that no text holds are followed by the end of the turn too.
    """
    g = small(L=1, kinds=("gdn",), ngram=None, D=320, C=2, hc_rank=4, block_cells=0, budget_cells=0)
    end = 258
    following = dict.fromkeys(range(g.V), end)
    for text in texts:
        data = text.encode() if isinstance(text, str) else text
        for a, b in pairwise(data):
            assert following[a] in (end, b), f"byte {a} has two successors"
            following[a] = b

    def edit(made: Made) -> None:
        for t in made.tensors:
            if t.name.endswith(("ssm_out.weight", "down_exps.weight", "down_shexp.weight", "_up.weight")):
                t.data = None
            if t.name == "token_embd.weight":
                t.data = np.eye(g.V, g.D, dtype=np.float32).tobytes()
            if t.name == "output.weight":
                # a one-hot row of D values has an RMS of D^-0.5, and half of the normalised row is read
                matrix = np.zeros((g.V, g.D), np.float32)
                for token, after in following.items():
                    matrix[after, token] = logit * 2 / g.D**0.5
                t.data = matrix.tobytes()
            if t.name.endswith("hc_norm.weight"):
                t.data = np.ones(t.shape, np.float32).tobytes()

    return TinyModel(g, edit=edit)
