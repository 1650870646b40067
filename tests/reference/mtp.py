"""The draft layer (MTP): one attention layer over the trunk's streams that guesses the token after next."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import hyper_connection as hc
from .forward import ReferenceModel
from .moe import mixture
from .qsa import attend, project
from .safetensors import read_safetensors

LAYER = "mtp.layers.0."
NAMES = {
    "attn_q.weight": LAYER + "self_attn.q_proj.weight",
    "attn_k.weight": LAYER + "self_attn.k_proj.weight",
    "attn_v.weight": LAYER + "self_attn.v_proj.weight",
    "attn_output.weight": LAYER + "self_attn.o_proj.weight",
    "attn_q_norm.weight": LAYER + "self_attn.q_norm.weight",
    "attn_k_norm.weight": LAYER + "self_attn.k_norm.weight",
    "ffn_gate_inp.weight": LAYER + "mlp.gate.weight",
    "ffn_gate_inp_shexp.weight": LAYER + "mlp.shared_expert_gate.weight",
    "ffn_gate_shexp.weight": LAYER + "mlp.shared_expert.gate_proj.weight",
    "ffn_up_shexp.weight": LAYER + "mlp.shared_expert.up_proj.weight",
    "ffn_down_shexp.weight": LAYER + "mlp.shared_expert.down_proj.weight",
    "ffn_down_exps.weight": LAYER + "mlp.experts.down_proj",
    "fc_embedding": "mtp.fc_embedding.weight",
    "fc_hidden": "mtp.fc_hidden.weight",
    "norm_embedding": "mtp.pre_fc_norm_embedding.weight",
    "norm_hidden": "mtp.pre_fc_norm_hidden.weight",
}
HYPER_CONNECTIONS = {
    "hc_attn": LAYER + "attn_hyper_connection.",
    "hc_ffn": LAYER + "mlp_hyper_connection.",
    "output_hc": "mtp.hyper_connection_mixer.",
}
HYPER_CONNECTION_PARTS = {
    "norm": "hc_norm",
    "down": "input_mix_weight_down",
    "up": "input_mix_weight_up",
    "inject": "block_inject_weight",
}


class MtpWeights:
    """The draft layer's tensors under the short names of a trunk layer; norms with the 1 added."""

    def __init__(self, path: str | Path):
        tensors = read_safetensors(path)
        names = dict(NAMES)
        for short, long in HYPER_CONNECTIONS.items():
            for part, tail in HYPER_CONNECTION_PARTS.items():
                if f"{long}{tail}.weight" in tensors:
                    names[f"{short}_{part}.weight"] = f"{long}{tail}.weight"
        # Norms are the only vectors of this file, and they are stored as their difference from 1.
        self._tensors = {s: tensors[n] + 1.0 if tensors[n].ndim == 1 else tensors[n] for s, n in names.items()}
        gate_up = tensors[LAYER + "mlp.experts.gate_up_proj"]
        half = gate_up.shape[1] // 2
        self._tensors["ffn_gate_exps.weight"] = gate_up[:, :half]
        self._tensors["ffn_up_exps.weight"] = gate_up[:, half:]

    def vector(self, name: str) -> np.ndarray:
        return self._tensors[name].reshape(-1)

    def product(self, name: str, x: np.ndarray, expert: int | None = None) -> np.ndarray:
        matrix = self._tensors[name] if expert is None else self._tensors[name][expert]
        return x @ matrix.T


@dataclass(frozen=True)
class Cells:
    """Rotated keys and values (n, Hkv, dh) of the layer's cells 0..n-1."""

    keys: np.ndarray
    values: np.ndarray

    def first(self, n: int) -> Cells:
        return Cells(self.keys[:n], self.values[:n])


class MtpReference:
    """The draft layer of `trunk`, whose embedding and head it shares.

    Its attention is dense: every earlier cell counts, and its indexer is not used.
    """

    def __init__(self, path: str | Path, trunk: ReferenceModel):
        self.weights, self.trunk = MtpWeights(path), trunk

    def empty_cells(self) -> Cells:
        g = self.trunk.geometry
        return Cells(np.zeros((0, g.Hkv, g.dh)), np.zeros((0, g.Hkv, g.dh)))

    def forward(self, streams: np.ndarray, next_tokens, cells: Cells) -> tuple[np.ndarray, np.ndarray, Cells]:
        """Cells that follow `cells`: cell i pairs the streams of position i with the token of position i + 1.

        streams (T, C, D), next_tokens (T,). Returns logits (T, V) of the tokens at i + 2, the layer's own streams
        (T, C, D) and all cells.
        """
        g, w = self.trunk.geometry, self.weights
        T, start = len(streams), len(cells.keys)
        embedded = hc.rms(self.trunk.embed(np.asarray(next_tokens)), w.vector("norm_embedding"), g.rms_eps)
        # One norm over all streams together, unlike every other norm of the streams.
        hidden = hc.rms(streams.reshape(T, g.CD), w.vector("norm_hidden"), g.rms_eps).reshape(T, g.C, g.D)
        X = w.product("fc_hidden", hidden) + w.product("fc_embedding", embedded)[:, None, :]

        u, N = hc.read(X, w, "hc_attn", g.rms_eps)
        q, gate, k, v = project(u, w, g, np.arange(start, start + T))
        cells = Cells(np.concatenate([cells.keys, k]), np.concatenate([cells.values, v]))
        seen = [cells.first(start + t + 1) for t in range(T)]
        mixed = np.array([attend(q[t], gate[t], seen[t].keys, seen[t].values) for t in range(T)])
        X = hc.add(X, hc.inject(N, w, "hc_attn", g.C), w.product("attn_output.weight", mixed))

        u, N = hc.read(X, w, "hc_ffn", g.rms_eps)
        y, _, _ = mixture(u, w, g)
        X = hc.add(X, hc.inject(N, w, "hc_ffn", g.C), y)

        u, _ = hc.read(X, w, "output_hc", g.rms_eps)
        return self.trunk.unembed(u), X, cells

    def chain(self, logits, streams, cells: Cells, n_drafts: int) -> tuple[list[int], list[float]]:
        """Greedy drafts and their probabilities, starting from the last cell of `cells`.

        logits (V,) and streams (C, D) are that cell's results; every further draft adds a cell made from the layer's
        own streams and the token drafted last.
        """
        tokens, probabilities = [], []
        while True:
            tokens.append(int(np.argmax(logits)))
            probabilities.append(float(1.0 / np.exp(logits - logits.max()).sum()))
            if len(tokens) == n_drafts:
                return tokens, probabilities
            row_logits, row_streams, cells = self.forward(streams[None], tokens[-1:], cells)
            logits, streams = row_logits[0], row_streams[0]

    def drafts(self, streams: np.ndarray, next_tokens, first: int, n_drafts: int) -> tuple[np.ndarray, np.ndarray]:
        """Drafts at every cell from `first` on: tokens and probabilities (T - first, n_drafts).

        streams (T, C, D) of the trunk from position 0, next_tokens (T,) the tokens one position later. The chain at
        cell i sees the exact cells 0..i and its own.
        """
        logits, own, cells = self.forward(streams, next_tokens, self.empty_cells())
        chains = [self.chain(logits[i], own[i], cells.first(i + 1), n_drafts) for i in range(first, len(streams))]
        return np.array([c[0] for c in chains]), np.array([c[1] for c in chains])
