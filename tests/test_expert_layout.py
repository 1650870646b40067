"""Expert layout: addresses, types per layer, merged gate and up, per-expert scales, and its refusals."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from strata.base.errors import BadArgument, FileError, ModelError
from strata.pack.experts import PARTS, expert_layout
from strata.pack.gguf_file import GgufFile
from tests.gguf_maker import Made, MadeTensor

E, F, D = 3, 64, 256
IQ3_XXS, IQ4_NL, Q2_0 = 18, 20, 42


def layer(l: int, gate_up: int = IQ3_XXS, down: int = Q2_0, merged: bool = False, **changes) -> list[MadeTensor]:
    """Tensors of one layer, random data; `changes` maps a short name to another shape or None."""
    shapes = {"gate_inp": (E, D), "down_exps": (E, D, F)}
    shapes |= {"gate_up_exps": (E, 2 * F, D)} if merged else {"gate_exps": (E, F, D), "up_exps": (E, F, D)}
    shapes |= changes
    rng = np.random.default_rng(l)
    made = []
    for short, shape in shapes.items():
        if shape is not None:
            kind = 0 if short == "gate_inp" or "scale" in short else down if short == "down_exps" else gate_up
            name = f"blk.{l}.ffn_{short}" + ("" if "scale" in short else ".weight")
            tensor = MadeTensor(name, shape, kind)
            tensor.data = rng.integers(0, 256, tensor.n_bytes, np.uint8).tobytes()
            made.append(tensor)
    return made


def opened(path, *layers: list[MadeTensor], headers_only: bool = False) -> GgufFile:
    return GgufFile(Made(tensors=[t for tensors in layers for t in tensors]).write(path), headers_only)


def test_every_expert_of_mixed_layers(tmp_path):
    """Types differ between layers; layer 1 has gate and up merged."""
    file = opened(tmp_path / "m.gguf", layer(0), layer(1, IQ4_NL, IQ4_NL, merged=True), layer(2, Q2_0, IQ4_NL))
    layout = expert_layout(file, 3)
    assert (layout.E, layout.F, layout.D, layout.n_layers) == (E, F, D, 3)
    assert layout.types.tolist() == [[18, 18, 42], [20, 20, 20], [42, 42, 20]]
    assert [layout.blob_bytes(l) for l in range(3)] == [
        2 * 64 * 98 + 256 * 18,
        2 * 64 * 144 + 256 * 36,
        2 * 64 * 72 + 9216,
    ]
    assert layout.total_bytes == sum(t.n_bytes for t in file.tensors.values() if "exps" in t.name)
    for l in range(3):
        whole = {part: file.raw(f"blk.{l}.ffn_{part}_exps.weight") for part in PARTS if (l, part) not in MERGED}
        if l == 1:
            both = file.raw("blk.1.ffn_gate_up_exps.weight").reshape(E, 2, F, -1)
            whole |= {"gate": both[:, 0].reshape(E * F, -1), "up": both[:, 1].reshape(E * F, -1)}
        for e in range(E):
            for i, part in enumerate(PARTS):
                rows = D if part == "down" else F
                wanted = whole[part][e * rows : (e + 1) * rows]
                np.testing.assert_array_equal(layout.raw(l, e, part), wanted)
                assert ctypes.string_at(int(layout.addresses[l, e, i]), wanted.size) == wanted.tobytes()
                p = layout.layers[l].projections[i]
                assert (p.rows, p.columns) == wanted.shape[:1] + ((F,) if part == "down" else (D,))
                with file.shards[p.tensor.shard].path.open("rb") as handle:
                    handle.seek(p.file_offset(e))
                    assert handle.read(p.n_bytes) == wanted.tobytes()
    for part, l, e in (("gat", 0, 0), ("gate", 3, 0), ("gate", 0, E), ("gate", 0, -1)):
        with pytest.raises(BadArgument):
            layout.raw(l, e, part)


MERGED = {(1, "gate"), (1, "up")}


def test_addresses_outlive_the_file(tmp_path):
    file = opened(tmp_path / "m.gguf", layer(0))
    layout = expert_layout(file, 1)
    wanted, address = layout.raw(0, 2, "down").tobytes(), int(layout.addresses[0, 2, 2])
    file.close()
    assert ctypes.string_at(address, len(wanted)) == wanted


def test_per_expert_scales(tmp_path):
    changes = {"down_exps.scale": (E,), "up_exps.scale": (E,)}
    file = opened(tmp_path / "m.gguf", layer(0, **changes), layer(1))
    layout = expert_layout(file, 2)
    scales = layout.scales(0)
    assert scales.shape == (3, E) and (scales[0] == 1).all() and (layout.scales(1) == 1).all()
    assert scales[1].tobytes() == file.raw("blk.0.ffn_up_exps.scale").tobytes()
    assert scales[2].tobytes() == file.raw("blk.0.ffn_down_exps.scale").tobytes()
    assert layout.layers[0].down.scale is not None and layout.layers[0].gate.scale is None


def test_layout_of_an_incomplete_file(tmp_path):
    path = tmp_path / "m.gguf"
    opened(path, layer(0)).close()
    path.write_bytes(path.read_bytes()[:4096])
    layout = expert_layout(GgufFile(path, headers_only=True), 1)
    assert layout.blob_bytes(0) == 2 * 64 * 98 + 256 * 18
    with pytest.raises(FileError, match="missing"):
        _ = layout.addresses


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([layer(0), layer(1, gate_inp=(4, D))], ("experts", "3 in layer 0, 4 in layer 1")),
        ([layer(0), layer(1, gate_inp=(E, 512))], ("hidden size", "512 in layer 1")),
        (
            [layer(0), layer(1, gate_exps=(E, 128, D), up_exps=(E, 128, D), down_exps=(E, D, 128))],
            ("width", "128 in layer 1"),
        ),
        ([layer(0, gate_inp=(4, D))], ("blk.0.ffn_down_exps.weight", "(3, 256, 64)", "(4, 256, 64)")),
        ([layer(0, up_exps=(E, 128, D))], ("blk.0.ffn_up_exps.weight", "(3, 128, 256)", "(3, 64, 256)")),
        ([layer(0, gate_exps=None)], ("blk.0.ffn_gate_exps.weight", "no such tensor")),
        ([layer(0), layer(1, gate_inp=None)], ("blk.1.ffn_gate_inp.weight", "no such tensor")),
        ([layer(0, down_exps=(E * D, F))], ("blk.0.ffn_down_exps.weight", "3 axes")),
        ([layer(0, merged=True, gate_up_exps=(E, F, D))], ("ffn_gate_up_exps", "(3, 64, 256)", "(3, 128, 256)")),
        ([layer(0, merged=True, up_exps=(E, F, D))], ("both", "ffn_gate_up_exps", "ffn_up_exps")),
        ([layer(0, **{"up_exps.scale": (E + 1,)})], ("blk.0.ffn_up_exps.scale", "(4,)", "(3,)")),
    ],
)
def test_refusals(tmp_path, layers, words):
    file = opened(tmp_path / "m.gguf", *layers)
    with pytest.raises(ModelError) as caught:
        expert_layout(file, len(layers))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_bundled_model(tiny_path):
    with GgufFile(tiny_path) as file:
        layout = expert_layout(file, 8)
        assert (layout.E, layout.F, layout.D) == (32, 128, 256) and layout.types[4].tolist() == [22, 22, 42]
        down = layout.raw(3, 5, "down")
        assert down.ctypes.data == int(layout.addresses[3, 5, 2]) and down.shape == (256, 72)
        with pytest.raises(BadArgument):
            expert_layout(file, 0)
        with pytest.raises(ModelError, match=r"blk\.8"):
            expert_layout(file, 9)
