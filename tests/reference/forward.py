"""The whole model: embedding, layers, head; one call for a prompt, a window or a single token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from strata.base.geometry import Geometry

from . import hyper_connection as hc
from .gated_delta import GdnState, gated_delta
from .geometry import read_geometry
from .moe import mixture
from .ngram import NgramState, ngram_block
from .qsa import QsaState, sparse_attention
from .weights import FileWeights, Matmul, Scope


@dataclass(frozen=True)
class ReferenceState:
    """Everything a sequence leaves behind; never changed in place, so any state may be continued more than once.

    position  rows seen so far
    layers    per layer a GdnState or QsaState
    ngram     NgramState, or None where the model has no n-gram block
    """

    position: int
    layers: tuple[GdnState | QsaState, ...]
    ngram: NgramState | None


@dataclass(frozen=True)
class Trace:
    """What a forward of T rows saw, float64. n is the number of `rows` asked for, m the number of `stream_rows`.

    logits          (n, V)
    router_ids      (L, T, K) int64, largest weight first; router_weights (L, T, K)
    inputs          (L, 2, T, D): what the mixer (0) and the experts (1) of each layer read
    outputs         (L, 2, T, D): what they gave back, before the injection
    layer_streams   (L, m, C, D) after each layer
    streams         (T, C, D) before the final mixer
    selections      layer -> per row the cells attended, ascending (QSA layers)
    block_scores    layer -> per row the scores of the complete blocks (QSA layers)
    state           the state after the last row
    """

    logits: np.ndarray
    router_ids: np.ndarray
    router_weights: np.ndarray
    inputs: np.ndarray
    outputs: np.ndarray
    layer_streams: np.ndarray
    streams: np.ndarray
    selections: dict[int, list[np.ndarray]]
    block_scores: dict[int, list[np.ndarray]]
    state: ReferenceState


class ReferenceModel:
    """Weights of a GGUF file (first shard) behind a plain float64 forward.

    matmul  replaces every product with a matrix: (tensor name, x (T, in), expert or None) -> (T, out). It may use
            `model.weights`. Norms, convolutions and the shared expert's gate vector are no matrix products.
    """

    def __init__(self, path: str | Path, matmul: Matmul | None = None):
        self.weights = FileWeights(path)
        self.geometry: Geometry = read_geometry(self.weights)
        self.matmul: Matmul = matmul or self.product

    def product(self, name: str, x: np.ndarray, expert: int | None = None) -> np.ndarray:
        """x (T, in) times the dequantised matrix, float64: (T, out)."""
        if expert is None:
            return x @ self.weights.matrix(name).T
        return x @ self.weights.expert(name, expert, self.geometry.E).T

    def scope(self, layer: int | None = None) -> Scope:
        """The tensors of one layer by their short names, or all tensors by their full names."""
        return Scope(self.weights, "" if layer is None else f"blk.{layer}.", self.matmul)

    def empty_state(self) -> ReferenceState:
        g = self.geometry
        layers = tuple(QsaState.empty(g) if kind == "qsa" else GdnState.empty(g) for kind in g.kinds)
        return ReferenceState(0, layers, NgramState.empty(g) if g.ngram else None)

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """Embedding rows (T, D)."""
        return self.weights.rows("token_embd.weight", tokens)

    def head(self, streams: np.ndarray) -> np.ndarray:
        """Logits (T, V) of streams (T, C, D)."""
        u, _ = hc.read(streams, self.scope(), "output_hc", self.geometry.rms_eps)
        return self.unembed(u)

    def unembed(self, u: np.ndarray) -> np.ndarray:
        """Logits (T, V) of u (T, D)."""
        return self.matmul("output.weight" if "output.weight" in self.weights else "token_embd.weight", u, None)

    def forward(self, tokens, state: ReferenceState | None = None, rows=None, stream_rows=()) -> Trace:
        """Read `tokens` (T,) after `state` (default: an empty sequence).

        rows         rows of this call whose logits are wanted, default all
        stream_rows  rows of this call whose streams are kept after every layer
        """
        g = self.geometry
        tokens = [int(t) for t in tokens]
        state = state or self.empty_state()
        stream_rows = np.asarray(stream_rows, np.int64)
        X = np.repeat(self.embed(np.array(tokens))[:, None, :], g.C, axis=1)
        ngram, layers = state.ngram, []
        ids, weights, inputs, outputs, kept = [], [], [], [], []
        selections: dict[int, list[np.ndarray]] = {}
        block_scores: dict[int, list[np.ndarray]] = {}

        for layer, kind in enumerate(g.kinds):
            scope = self.scope(layer)
            if g.ngram and layer == g.ngram.layer:
                X, ngram = ngram_block(X, tokens, self.weights, scope, g, ngram)

            u_mixer, N = hc.read(X, scope, "hc_attn", g.rms_eps)
            if kind == "gdn":
                y_mixer, layer_state = gated_delta(u_mixer, scope, g, state.layers[layer])
            else:
                y_mixer, layer_state, cells, scores = sparse_attention(u_mixer, scope, g, state.layers[layer])
                selections[layer], block_scores[layer] = cells, scores
            X = hc.add(X, hc.inject(N, scope, "hc_attn", g.C), y_mixer)

            u_experts, N = hc.read(X, scope, "hc_ffn", g.rms_eps)
            y_experts, layer_ids, layer_weights = mixture(u_experts, scope, g)
            X = hc.add(X, hc.inject(N, scope, "hc_ffn", g.C), y_experts)

            layers.append(layer_state)
            ids.append(layer_ids)
            weights.append(layer_weights)
            inputs.append([u_mixer, u_experts])
            outputs.append([y_mixer, y_experts])
            kept.append(X[stream_rows])

        logits = self.head(X if rows is None else X[np.asarray(rows, np.int64)])
        after = ReferenceState(state.position + len(tokens), tuple(layers), ngram)
        return Trace(
            logits, np.array(ids), np.array(weights), np.array(inputs), np.array(outputs), np.array(kept), X,
            selections, block_scores, after,
        )  # fmt: skip

    def greedy(self, tokens, n: int) -> tuple[list[int], list[float]]:
        """The n most likely next tokens, one after the other, and the gap of the two best logits at each of them."""
        out: list[int] = []
        gaps: list[float] = []
        trace = self.forward(tokens, rows=[len(tokens) - 1])
        while True:
            best = np.sort(trace.logits[0])
            out.append(int(np.argmax(trace.logits[0])))
            gaps.append(float(best[-1] - best[-2]))
            if len(out) == n:
                return out, gaps
            trace = self.forward(out[-1:], trace.state)
