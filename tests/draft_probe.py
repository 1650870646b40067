"""Driving a draft layer by hand: drafts along a given text, and a GGUF with a draft layer inside."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

import strata
from strata.arch.flash_next import read_geometry
from strata.pack.gguf_file import GgufFile
from strata.pack.mtp_files import from_safetensors
from strata.runtime.session import SessionState
from strata.spec.mtp import MtpDrafter
from tests.gguf_maker import Made, MadeTensor, Typed
from tests.tiny_models import PREFIX, U32
from tests.tiny_models import _typed as typed

N_DRAFTS = 3


def new_session(model: strata.Model, checkpoints: int = 0) -> SessionState:
    """A session of a model loaded with a draft layer."""
    drafter = MtpDrafter(model._backend.draft)
    return SessionState(model._backend, model.context, checkpoints, drafter)


@dataclass(frozen=True)
class Forced:
    """Drafts and their probabilities (n, 3) after each token of a given text."""

    tokens: np.ndarray
    probabilities: np.ndarray

    def agreement(self, other: np.ndarray) -> int:
        return int((self.tokens == other[: len(self.tokens)]).sum())


def forced_drafts(model: strata.Model, prompt: np.ndarray, text: np.ndarray) -> Forced:
    """Read the prompt, then walk along `text` whatever the drafts say."""
    session, tokens, probabilities = new_session(model), [], []
    session.read(prompt.astype(np.int32))
    for token in text.astype(np.int32):
        drafts, p = session.mtp.propose(session.state, int(token), N_DRAFTS)
        tokens.append(drafts)
        probabilities.append(p)
        session.window(np.array([token], np.int32))
        session.commit(np.array([token], np.int32), 1)
    return Forced(np.array(tokens), np.array(probabilities))


def nextn_tensors(safetensors: Path, block: int, merged: bool = False) -> list[MadeTensor]:
    """The draft layer as the tensors of a GGUF block: projections and experts Q8_0."""
    layer = {n.removeprefix("mtp.").removesuffix(".weight"): t for n, t in from_safetensors(safetensors).items()}
    names = {
        "norm_embedding": "nextn.enorm",
        "norm_hidden": "nextn.hnorm",
        "output_hc_norm": "nextn.hc_head_norm",
        "output_hc_down": "nextn.hc_head_down",
        "output_hc_up": "nextn.hc_head_up",
    }
    out = []

    def add(name: str, shape: tuple[int, ...], kind: int, data: np.ndarray) -> None:
        out.append(MadeTensor(f"blk.{block}.{name}.weight", shape, kind, np.ascontiguousarray(data).tobytes()))

    embedding, hidden = layer.pop("fc_embedding"), layer.pop("fc_hidden")
    D = embedding.shape[0]
    side_by_side = np.concatenate([embedding.data, hidden.data], axis=1)
    add("nextn.eh_proj", (D, 2 * D), embedding.ggml_type, side_by_side)
    if merged:
        gate, up = layer.pop("ffn_gate_exps"), layer.pop("ffn_up_exps")
        E, F, _ = gate.shape
        both = np.concatenate([t.data.reshape(E, F, -1) for t in (gate, up)], axis=1)
        add("ffn_gate_up_exps", (E, 2 * F, D), gate.ggml_type, both)
    for name, t in layer.items():
        add(names.get(name, name), t.shape, t.ggml_type, t.data)
    return out


def with_nextn(model: Path, safetensors: Path, path: Path) -> Path:
    """A copy of a model, one shard, with the draft layer as its last block."""
    with GgufFile(model) as gguf:
        keys = {k: typed(v) for k, v in gguf.metadata.items() if not k.startswith("split.")}
        tensors = [MadeTensor(n, t.shape, t.ggml_type, gguf.raw(n).tobytes()) for n, t in gguf.tensors.items()]
        L = read_geometry(gguf).L
    keys[PREFIX + "block_count"] = Typed(U32, L + 1)
    keys[PREFIX + "nextn_predict_layers"] = Typed(U32, 1)
    return Made(keys=list(keys.items()), tensors=tensors + nextn_tensors(safetensors, L)).write(path)


def draft_alone(model: Path, safetensors: Path, path: Path, **changes) -> Path:
    """A GGUF of nothing but the block; changes: see `nextn_tensors`."""
    with GgufFile(model) as gguf:
        L = read_geometry(gguf).L
        keys = [("general.architecture", typed(gguf.architecture))]
    return Made(keys=keys, tensors=nextn_tensors(safetensors, L, **changes)).write(path)
