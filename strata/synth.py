"""Synthetic models: the real geometry and mix of types with random weights, for measuring speed without a download.

A model of any number of layers is written to a file, or held in memory that other code opens like a file. Random
weights would send every token to the same experts after two layers, which makes prompts look several times too fast.
So embeddings are large beside what layers add, weights have mean 0, and a bench may replay routing (`strata.replay`).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from strata.arch.flash_next.contract import MATRIX, VECTOR, required_tensors
from strata.base.errors import BadArgument, DoesNotFit, FileError, need
from strata.base.geometry import Geometry, NgramGeometry
from strata.cpu.cores import core_facts, usable_cores
from strata.pack.formats import FORMATS, by_name
from strata.pack.gguf_write import FileLayout, NewTensor, file_layout
from strata.pack.random_blocks import random_rows
from strata.planner.machine import Machine
from strata.text_vocabulary import byte_vocabulary

VOCABULARY = 248_320
MULTIPLIERS = (23703573157769, 20109073645365, 8052911324071)
"""Of the n-gram hash."""

MOST_LAYERS, MOST_SEED = 1024, (1 << 64) - 1
ROUTED, MOST_EXPERTS = 10, 4096
"""Experts of a row, and the most of a layer."""

EMBEDDING_STD = 8.0
ROUTER_GAIN = 4.0
PIECE_BYTES = 8 << 20
"""What a thread makes at a time."""

DENSE_TYPES: dict[str, tuple[str, ...]] = {
    "token_embd": ("Q3_K",),
    "output": ("Q5_K",),
    "per_layer_token_embd": ("IQ4_NL",),
    "attn_qkv": ("IQ4_XS", "Q3_K"),
    "attn_gate": ("IQ4_XS", "Q4_K"),
    "ssm_out": ("Q4_K", "Q3_K"),
    "attn_q": ("IQ4_XS",),
    "attn_k": ("Q6_K",),
    "attn_v": ("Q5_K",),
    "attn_output": ("Q4_K", "Q3_K"),
    "ffn_gate_shexp": ("Q2_0", "Q3_K", "IQ4_XS"),
    "ffn_up_shexp": ("Q2_0", "Q3_K", "IQ4_XS"),
    "ffn_down_shexp": ("Q2_0", "Q5_0"),
    "ple_key": ("Q2_0",),
    "ffn_gate_inp_shexp": ("BF16",),
    "ple_conv1d": ("F16",),
}
"""Types of the Q2_0 release by tensor, in turn over layers; other matrices are BF16 and other vectors F32."""
NOT_DENSE = ("token_embd", "output", "per_layer_token_embd", "ffn_gate_inp_shexp", "ple_conv1d")
"""Those of them that `SynthSpec.dense` leaves alone: tables, the head, and what releases keep in 16 bits."""


@dataclass(frozen=True)
class SynthSpec:
    """What to make. layers; types of gate and up, and of down, of the routed experts; experts a layer; vocabulary;
    ngram_rows: least rows of each of the n-gram table's heads (real: 20 million); distinct_pieces: of a tensor of
    routed experts, pieces of 8 MiB that are drawn before they repeat, which is faster (0: all are drawn); dense: type
    of all dense matrices of layers whose rows are a multiple of its blocks ("": those of DENSE_TYPES)."""

    layers: int = 2
    gate_up: str = "Q4_K"
    down: str = "IQ4_NL"
    experts: int = 512
    vocabulary: int = VOCABULARY
    ngram_rows: int = 20_000
    seed: int = 1
    distinct_pieces: int = 0
    dense: str = ""

    def __post_init__(self) -> None:
        need(1 <= self.layers <= MOST_LAYERS, "layers is out of range", found=self.layers, needed=f"1 to {MOST_LAYERS}")
        need(0 <= self.seed <= MOST_SEED, "seed is out of range", found=self.seed, needed=f"0 to {MOST_SEED}")
        need(ROUTED <= self.experts <= MOST_EXPERTS, "number of experts is out of range", found=self.experts,
             needed=f"{ROUTED} to {MOST_EXPERTS}")  # fmt: skip
        need(600 <= self.vocabulary <= 1 << 20, "vocabulary is out of range", found=self.vocabulary,
             needed="600 to 1048576")  # fmt: skip
        for kind, width in ((self.gate_up, 2560), (self.down, 640)):
            _need_products(kind)
            by_name(kind).row_bytes(width)
        if self.dense:
            _need_products(self.dense)

    @staticmethod
    def of_types(text: str, **others: Any) -> SynthSpec:
        """From the types of the experts as "Q4_K/IQ4_NL": gate and up, then down."""
        gate_up, _, down = text.partition("/")
        if not down:
            raise BadArgument("types of the experts cannot be read", found=repr(text), needed="GATE_UP/DOWN")
        return SynthSpec(gate_up=gate_up, down=down, **others)

    def need_replayable(self) -> None:
        """BadArgument if it has too few experts for replayed routing (`strata.replay`)."""
        need(self.experts >= 2 * ROUTED, "too few experts to replay routing", found=self.experts,
             needed=f">= {2 * ROUTED}")  # fmt: skip

    @property
    def name(self) -> str:
        return f"synthetic-{self.layers}-{self.gate_up}-{self.down}" + f"-{self.dense}" * bool(self.dense)


def _need_products(kind: str) -> None:
    good = [f.name for f in FORMATS.values() if f.activation != "none"]
    need(kind in good, f"no matrix can be of type {kind!r}", found=repr(kind), needed="one of " + ", ".join(good))


# ---- geometry and keys


def _primes(least: int, n: int) -> tuple[int, ...]:
    found: list[int] = []
    at = least
    while len(found) < n:
        if at > 1 and all(at % d for d in range(2, int(at**0.5) + 1)):
            found.append(at)
        at += 1
    return tuple(found)


def geometry_of(spec: SynthSpec) -> Geometry:
    """The real widths and order: every fourth layer is attention, and layer 1 has the n-gram block. Of two or three
    layers the last one is attention, and of two the first one has the n-gram block: every kind of op is there."""
    period = spec.layers if spec.layers in (2, 3) else 4
    kinds = tuple("qsa" if i % period == period - 1 else "gdn" for i in range(spec.layers))
    moduli = _primes(spec.ngram_rows, 16)
    offsets = tuple(int(o) for o in np.cumsum((0, *moduli))[:-1])
    reset = spec.vocabulary - 276
    ngram = NgramGeometry(0 if spec.layers == 2 else 1, 3, 8, 160, 4, reset, reset + 12, MULTIPLIERS, moduli, offsets)
    return Geometry(
        architecture="qwen4exp", L=spec.layers, D=2560, V=spec.vocabulary, trained_context=262_144,
        rms_eps=float(np.float32(1e-6)), C=4, hc_rank=320, kinds=kinds, H=24, Hkv=2, dh=256, rotary_dims=64,
        rope_base=1e7, indexer_heads=4, indexer_dim=128, budget_cells=2048 if "qsa" in kinds else 0,
        block_cells=4 if "qsa" in kinds else 0,
        gdn_key_heads=16, gdn_value_heads=48, gdn_key_dim=128, gdn_value_dim=128, gdn_conv_taps=4,
        E=spec.experts, K=ROUTED, F=640, shared_width=640, router_scale=1.0, ngram=ngram if spec.layers > 1 else None,
    )  # fmt: skip


def _keys(spec: SynthSpec, g: Geometry) -> dict[str, tuple[str, Any]]:
    numbers = {
        "block_count": g.L, "context_length": g.trained_context, "embedding_length": g.D,
        "attention.head_count": g.H, "attention.head_count_kv": g.Hkv, "attention.key_length": g.dh,
        "attention.value_length": g.dh, "rope.dimension_count": g.rotary_dims, "expert_count": g.E,
        "expert_used_count": g.K, "expert_feed_forward_length": g.F,
        "expert_shared_feed_forward_length": g.shared_width, "ssm.conv_kernel": g.gdn_conv_taps,
        "ssm.state_size": g.gdn_key_dim, "ssm.group_count": g.gdn_key_heads,
        "ssm.time_step_rank": g.gdn_value_heads, "ssm.inner_size": g.gdn_value_width,
        "full_attention_interval": g.kinds.index("qsa") + 1 if "qsa" in g.kinds else 4,
        "hyper_connection.count": g.C, "hyper_connection.low_rank": g.hc_rank,
        "attention.indexer.head_count": g.indexer_heads, "attention.indexer.key_length": g.indexer_dim,
        "attention.indexer.top_k": g.budget_cells,
    }  # fmt: skip
    own: dict[str, tuple[str, Any]] = {name: ("u32", value) for name, value in numbers.items()}
    own["attention.layer_norm_rms_epsilon"] = ("f32", g.rms_eps)
    own["rope.freq_base"] = ("f32", g.rope_base)
    own["rope.dimension_sections"] = ("i32[]", (11, 11, 10, 0))
    own["attention.compress_ratios"] = ("i32[]", [g.block_cells if kind == "qsa" else 0 for kind in g.kinds])
    if n := g.ngram:
        own |= {
            "ple.layers": ("i32[]", [n.layer]), "ple.ngram_size": ("u32", n.order),
            "ple.heads_per_ngram": ("u32", n.heads_per_order), "ple.conv_kernel": ("u32", n.conv_taps),
            "ple.eos_token_id": ("u32", n.reset_token), "ple.image_token_id": ("u32", n.image_token),
            "embedding_length_per_layer_input": ("u32", n.row_width),
            "ple.layer_multipliers": ("u64[]", n.multipliers), "ple.head_vocab_sizes": ("u64[]", n.moduli),
            "ple.head_offsets": ("u64[]", n.offsets),
        }  # fmt: skip
    about = {"general.architecture": ("string", g.architecture), "general.name": ("string", spec.name)}
    prefixed = {f"{g.architecture}.{name}": value for name, value in own.items()}
    return about | prefixed | byte_vocabulary(spec.vocabulary, end=spec.vocabulary - 276)


# ---- tensors


def _part(name: str) -> tuple[str, int]:
    """(kind of tensor, layer or 0) of a tensor's name."""
    words = name.removesuffix(".weight").split(".")
    return (".".join(words[2:]), int(words[1])) if words[0] == "blk" else (".".join(words), 0)


def tensors_of(spec: SynthSpec, g: Geometry) -> list[NewTensor]:
    """Every tensor of the file, in order."""
    experts = {"ffn_gate_exps": spec.gate_up, "ffn_up_exps": spec.gate_up, "ffn_down_exps": spec.down}
    turns = {layer: g.kinds[:layer].count(kind) for layer, kind in enumerate(g.kinds)}
    made = []
    for wanted in required_tensors(g):
        part, layer = _part(wanted.name)
        if part in experts:
            kind = experts[part]
        elif part in DENSE_TYPES:
            turn = turns[layer] if part.startswith(("attn_", "ssm_")) else layer
            kind = DENSE_TYPES[part][turn % len(DENSE_TYPES[part])]
            if spec.dense and part not in NOT_DENSE and wanted.shape[-1] % by_name(spec.dense).block_values == 0:
                kind = spec.dense
        else:
            kind = {VECTOR: "F32", MATRIX: "BF16"}[wanted.use]
        made.append(NewTensor(wanted.name, wanted.shape, kind))
    return made


def _rows(tensor: NewTensor, first: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 (n, row_bytes) of a tensor."""
    part, _ = _part(tensor.name)
    K = tensor.shape[-1]
    if len(tensor.shape) == 1 and tensor.format_name == "F32":
        x = rng.standard_normal(K, np.float32)
        if part == "ssm_a":
            x = -np.exp(0.5 * x)
        elif part == "ssm_dt.bias":
            x = 0.5 * x - 1
        else:
            x = 1 + 0.2 * x
        return x.astype(np.float32).view(np.uint8)[None]
    std = {"token_embd": EMBEDDING_STD, "per_layer_token_embd": 1.0, "ffn_gate_inp": ROUTER_GAIN / K**0.5,
           "output": 2 / K**0.5, "ssm_conv1d": 0.4, "ple_conv1d": 0.4}.get(part, K**-0.5)  # fmt: skip
    return random_rows(tensor.format, n, K, std, rng)


def _fill(target: mmap.mmap, layout: FileLayout, tensors: list[NewTensor], spec: SynthSpec,
          on_progress: Callable[[int, int], None] | None, threads: int | None) -> None:  # fmt: skip
    """Write all tensors. Bytes depend on the spec alone, not on the number of threads."""
    target[: len(layout.header)] = layout.header
    view = np.frombuffer(target, np.uint8)
    drawn: list[tuple[int, int, int]] = []
    again: list[tuple[int, int, int, int]] = []
    for index, t in enumerate(tensors):
        step = max(1, PIECE_BYTES // t.row_bytes)
        period = step * spec.distinct_pieces if len(t.shape) == 3 else 0
        for row in range(0, t.rows, step):
            piece = (index, row, min(step, t.rows - row))
            if period and row >= period:
                again.append((*piece, row % period))
            else:
                drawn.append(piece)

    def make(piece: tuple[int, int, int]) -> int:
        index, first, n = piece
        t = tensors[index]
        rng = np.random.Generator(np.random.SFC64([spec.seed, index, first]))
        at = layout.offsets[index] + first * t.row_bytes
        view[at : at + n * t.row_bytes] = _rows(t, first, n, rng).reshape(-1)
        return n * t.row_bytes

    def repeat(piece: tuple[int, int, int, int]) -> int:
        index, first, n, source = piece
        start, row_bytes = layout.offsets[index], tensors[index].row_bytes
        at, by = start + first * row_bytes, start + source * row_bytes
        view[at : at + n * row_bytes] = view[by : by + n * row_bytes]
        return n * row_bytes

    done, total = 0, sum(t.n_bytes for t in tensors)
    with ThreadPoolExecutor(threads or usable_cores(core_facts())) as pool:
        for work, pieces in ((make, drawn), (repeat, again)):
            for n_bytes in pool.map(work, pieces):
                done += n_bytes
                if on_progress is not None:
                    on_progress(done, total)


def _make(
    fd: int, spec: SynthSpec, on_progress: Callable[[int, int], None] | None, threads: int | None = None
) -> None:
    g = geometry_of(spec)
    tensors = tensors_of(spec, g)
    layout = file_layout(_keys(spec, g), tensors)
    os.posix_fallocate(fd, 0, layout.n_bytes)  # here, not as a bus error in the middle
    target = mmap.mmap(fd, layout.n_bytes)
    try:
        _fill(target, layout, tensors, spec, on_progress, threads)
    finally:
        # Arrays over it live on in the traceback of a failure, which is the error to see; it is unmapped with them.
        with contextlib.suppress(BufferError):
            target.close()


def write_model(folder: str | Path, spec: SynthSpec, on_progress: Callable[[int, int], None] | None = None) -> Path:
    """Write the model into `folder` (made if it is not there) and return its path; an existing file is kept.

    on_progress(done, total) in bytes. FileError if the folder cannot be written, DoesNotFit if the disk is too small.
    """
    folder = Path(folder)
    path = folder / f"{spec.name}.gguf"
    part = path.with_suffix(f".{os.getpid()}.part")  # nobody else writes it
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            raise FileError(f"'{path}' is there already", found=f"{path.stat().st_size:,} bytes",
                            needed="a folder without it", advice="Use it, or remove it.")  # fmt: skip
        with part.open("x+b") as file:
            _make(file.fileno(), spec, on_progress)
        part.rename(path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # what went wrong first is what counts
            part.unlink()
        if not isinstance(error, OSError):
            raise
        if error.errno == errno.ENOSPC:
            raise DoesNotFit(f"the disk of '{folder}' is too small", found=error.strerror,
                             needed=f"{model_bytes(spec) / 1e9:.1f} GB",
                             advice="Make fewer layers or experts, or give another folder.") from error  # fmt: skip
        raise FileError(f"'{path}' cannot be written", found=error.strerror or str(error),
                        needed="a folder that can be written", advice="Give another folder.") from error  # fmt: skip
    return path


def model_bytes(spec: SynthSpec) -> int:
    """Bytes of the model's tensors."""
    return sum(t.n_bytes for t in tensors_of(spec, geometry_of(spec)))


MOST_OF_MEMORY = 0.9
"""Of what is free, that a model may take."""
INSTEAD = "Make fewer layers or experts, or write the model to a folder."


@contextlib.contextmanager
def memory_model(
    spec: SynthSpec, on_progress: Callable[[int, int], None] | None = None, threads: int | None = None
) -> Iterator[Path]:
    """A path of this process under which the model can be opened while the block runs; it lies in memory alone.

    threads that make it; None: one for each core.

    DoesNotFit, before anything is made, if that much memory is not free: the system would end some process for it.
    """
    if not hasattr(os, "memfd_create"):
        raise BadArgument("models in memory need Linux", found=sys.platform, needed="linux",
                          advice="Write the model to a folder.")  # fmt: skip
    needed, free = model_bytes(spec), Machine.here().ram_available_bytes
    if needed > MOST_OF_MEMORY * free:
        raise DoesNotFit("the model does not fit into memory", found=f"{free / 1e9:.1f} GB free",
                         needed=f"{needed / 1e9 / MOST_OF_MEMORY:.1f} GB", advice=INSTEAD)  # fmt: skip
    fd = os.memfd_create(spec.name)
    try:
        try:
            _make(fd, spec, on_progress, threads)
        except OSError as error:
            raise DoesNotFit("the memory is too small", found=error.strerror or str(error),
                             needed=f"{needed / 1e9:.1f} GB", advice=INSTEAD) from error  # fmt: skip
        yield Path(f"/proc/{os.getpid()}/fd/{fd}")
    finally:
        os.close(fd)
