"""strata bench gpu-kernels: every part as a command at small sizes, that its checks see errors, what it refuses.

Kernels run on the CPU through the shim, or on a GPU with STRATA_TEST_DEVICE=cuda.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from strata import gpu_speed
from strata.base.errors import StrataError
from strata.cli import app
from strata.cli.bench.gpu_kernels import PARTS, nodes, ops, products, uploads, wide
from strata.cli.bench.gpu_kernels.timer import Timer
from strata.gpu import device, early_launch
from strata.gpu.compile import compile_source
from strata.gpu.gemv import choices
from strata.gpu_speed import Effort
from strata.pack.formats import by_name
from tests.gpu.host_device import HostDevice
from tests.gpu.run_on_cpu import ON_DEVICE, needs_compiler
from tests.test_gpu_compile import needs_nvrtc

LEAST = Effort(nodes=1, rounds=1, copy_bytes=1 << 16, windows=1)

pytestmark = needs_compiler


@pytest.fixture
def quick(monkeypatch):
    """Little is measured; returns what sets sizes of a module."""
    monkeypatch.setattr(gpu_speed, "DEFAULT_EFFORT", LEAST)
    if not ON_DEVICE:
        monkeypatch.setattr(device, "CupyDevice", lambda index: HostDevice())
    return lambda module, **sizes: [monkeypatch.setattr(module, name, value) for name, value in sizes.items()]


@pytest.fixture
def timer():
    made = Timer(device.CupyDevice() if ON_DEVICE else HostDevice(), LEAST)
    yield made
    made.device.close()


def run(*words: str) -> dict:
    done = CliRunner().invoke(app, ["bench", "gpu-kernels", *words, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["copy_gbps"] > 0 and found["device"]
    assert all(f["part"] == words[0] and f["us"] > 0 for f in found["figures"])
    for f in found["figures"]:
        assert f["gbps"] == pytest.approx(f["n_bytes"] / f["us"] / 1e3)
    return found


def test_data_is_what_was_asked_for(timer):
    at, stride = timer.copies(np.arange(100, dtype=np.float32), 5)
    assert stride == 512
    for i in range(5):
        assert np.array_equal(timer.get(at + i * stride, 100), np.arange(100, dtype=np.float32))
    values = timer.get(timer.floats(1000, scale=2.0), 1000)
    assert 1.5 < values.std() < 2.5 and len(np.unique(values)) > 900
    halves = np.empty(700, np.float16)
    timer.device.download(timer.halves(700), halves)
    assert 0.5 <= halves.min() < halves.max() <= 1
    tile = np.arange(7, dtype=np.uint8)
    out, at = np.empty(100, np.uint8), timer.device.alloc(100)
    timer.device.download(timer.repeat(at, 100, tile), out)
    assert np.array_equal(out, np.resize(tile, 100))


def test_ops(quick):
    quick(ops, LAUNCHES=2, D=256, RANK=32, V=4096, F=64, E=32, K=4, HK=1, HV=2, H=4, HKV=1, CONTEXT=512, BUDGET=16,
          KEY_COPIES=2, CELL_COPIES=2, STATE_COPIES=2)  # fmt: skip
    found = run("ops", "--rows", "2")
    names = [f["name"] for f in found["figures"]]
    assert len(names) == len(set(names)) and all("T=2" in name for name in names)
    for part in ("hc down", "router", "gdn_window", "gdn_commit", "qsa_scores", "qsa_merge", "scores to merge",
                 "tiles and merge", "n-gram value", "logits, then router", "head_top", "head_lanes"):  # fmt: skip
        assert any(part in name for name in names), part
    only = run("ops", "--rows", "1", "--groups", "small")["figures"]
    assert 0 < len(only) < len(names) and all("T=1" in f["name"] for f in only)
    one = run("ops", "--rows", "1", "--groups", "floats")["figures"]
    assert sum(f["name"].startswith("logits with router") for f in one) == 1


def test_products(quick):
    lists = ((("BF16", 3), ("Q4_K", 9)), (("BF16", 3), ("IQ4_XS", 9)))
    quick(products, DENSE=((64, 2560),), LISTS=lists, EXPERTS=(("Q4_K", "IQ4_NL"),), WIDTH=64, D=256,
          CHOICES=2, N_EXPERTS=4, LAUNCHES=1, MOST_COPIES=1, CHECKED_ROWS=16,
          CHECKED_COLUMNS={256: (256,), 32: (64,)})  # fmt: skip
    found = run("products", "--types", "Q4_K", "--rows", "2")
    assert found["values_compared"] > 1000
    names = [f["name"] for f in found["figures"]]
    assert names[:2] == [f"Q4_K [64 x 2560] T=2 {form}, {form}<Q4_K, 4>" for form in ("product", "split")]
    assert sum(n.startswith("gate+up+SwiGLU Q4_K T=2") for n in names) == 2, "the same experts, and others for each row"
    assert sum("in free order" in n for n in names) == 2 and any(n.startswith("SwiGLU alone") for n in names)
    assert [n for n in names if n.startswith("list")] == ["list T=2 BF16 3 + Q4_K 9, mixed<4, true>"]
    tensor = run("products", "--types", "Q4_K", "--rows", "2", "--tensor-from", "2")["figures"]
    without = run("products", "--types", "Q4_K", "--rows", "2", "--tensor-from", "99")["figures"]
    assert "list T=2 BF16 3 + Q4_K 9, mixed<4>" in [f["name"] for f in without]
    assert "half_rows" in tensor[0]["name"] and "half_split" in tensor[1]["name"] and choices.HALF_FROM > 2


def test_products_that_differ_are_refused(timer, monkeypatch):
    monkeypatch.setattr(products, "CHECKED_ROWS", 16)
    monkeypatch.setattr(products, "CHECKED_COLUMNS", {32: (64,)})
    assert products.check_dense(timer, by_name("Q8_0"), [1]) == 4 * 16, "four forms"
    exact = products.exact

    def nearly(format, raw, codes, scales):
        out = exact(format, raw, codes, scales).astype(np.float32)
        out[3] = np.nextafter(out[3], np.float32(np.inf))
        return out

    monkeypatch.setattr(products, "exact", nearly)
    with pytest.raises(StrataError, match="1 of 16 values differ"):
        products.check_dense(timer, by_name("Q8_0"), [1])


def test_wide(quick):
    quick(wide, D=256, F=64, E=4, K=2, DENSE=(("Q4_K", 64, 256),), FLOATS=(("BF16", 64, 256),), BATCHES=(4,),
          EXPERTS=(("Q4_K", "IQ4_NL"),))  # fmt: skip
    figures = run("wide", "--rows", "64")["figures"]
    by_name = {f["name"].strip(): f for f in figures}
    assert {"Q4_K [64 x 256]", "BF16 [64 x 256]", "experts Q4_K/IQ4_NL, expanded, 4 at once",
            "experts Q4_K/IQ4_NL, unpacked inside, 4 at once", "experts Q4_K/IQ4_NL: down"} <= set(by_name)  # fmt: skip
    one = by_name["Q4_K [64 x 256]"]
    assert one["tera_per_s"] == pytest.approx(2 * 64 * 64 * 256 / one["us"] / 1e6)


def test_nodes(quick):
    quick(nodes, NODES=10, ORDERED_VALUES=2048)
    before = early_launch.START_EARLY, early_launch.REFUSAL_IS_ERROR
    found = run("nodes", "--blocks", "1,3")
    names = [f["name"] for f in found["figures"] if f["name"].endswith("plain")]
    assert names == ["1 blocks, plain", "3 blocks, plain", "1 blocks, a fork every 8, plain",
                     "3 blocks, a fork every 8, plain", "a chain that needs its order, plain"]  # fmt: skip
    assert (early_launch.START_EARLY, early_launch.REFUSAL_IS_ERROR) == before
    assert nodes.refusal(Timer(HostDevice(), LEAST)) is None


@needs_nvrtc
@pytest.mark.parametrize("source", [nodes.SOURCE, products.FREE], ids=lambda s: s.path.stem)
def test_own_kernels_compile_for_a_gpu(source):
    usage = compile_source(source, 90).usage
    assert set(usage) == set(source.instances) and not any(u.spill_bytes for u in usage.values())


def test_an_order_that_is_not_kept_is_refused(timer, monkeypatch):
    monkeypatch.setattr(nodes, "NODES", 4)
    monkeypatch.setattr(nodes, "ORDERED_VALUES", 1024)
    real = nodes.ordered
    monkeypatch.setattr(nodes, "ordered", lambda *a: real(*a)[::-1])
    with pytest.raises(StrataError, match="does not keep its order"):
        nodes.measure(timer, [1])


def test_marked_kernels_wait():
    """The kernels are found by the mark that the product's are."""
    assert early_launch.early_kernels(nodes.SOURCE) == {"empty_node", "ordered_node"}


def test_uploads(quick):
    quick(uploads, ROWS=64, K=256, MOST_EXPERTS=8, SWAP_ROUNDS=2, THREADS=(1, 2), SPARE_BYTES=1 << 20)
    figures = run("uploads", "--mib", "1", "--types", "Q4_K")["figures"]
    names = [f["name"] for f in figures]
    assert all(f["gbps"] > 0 for f in figures) and len(names) == len(set(names))
    for name in ("plain copy, pageable", "plain copy, registered", "through pinned pieces, 2 threads",
                 "Q4_K, the layout's kernel alone", "Q2_0/Q2_0, registered: 3 swaps landed",
                 "registering touched memory", "registering a shared read-only file"):  # fmt: skip
        assert name in names, name
    assert sum(name.startswith("Q4_K, registered, ring of") for name in names) == 2


def test_what_is_read_by_people(quick):
    quick(nodes, NODES=4, ORDERED_VALUES=1024)
    done = CliRunner().invoke(app, ["bench", "gpu-kernels", "nodes", "--blocks", "1"])
    lines = done.stdout.splitlines()
    assert done.exit_code == 0 and "copies at" in lines[0] and sum(line.endswith(" us") for line in lines) >= 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["everything"], "no such part"),
        (["ops", "--rows", "9"], "--rows cannot be read"),
        (["ops", "--groups", "large"], "--groups cannot be read"),
        (["ops", "--types", "Q4_K"], "does nothing with ops"),
        (["products", "--types", "F32"], "no quantised products"),
        (["products", "--types", "Q9"], "no block format"),
        (["products", "--tensor-from", "1"], "--tensor-from is out of range"),
        (["uploads", "--mib", "0"], "--mib is out of range"),
        (["nodes", "--blocks", "x"], "--blocks cannot be read"),
    ],
)
def test_refusals(words, message):
    done = CliRunner().invoke(app, ["bench", "gpu-kernels", *words])
    assert done.exit_code == 2 and message in done.stderr, done.output


@pytest.mark.skipif(ON_DEVICE, reason="describes a machine without a GPU")
@pytest.mark.parametrize("part", PARTS)
def test_without_a_gpu(part, monkeypatch):
    def none(index):
        raise StrataError("no driver")

    monkeypatch.setattr(device, "CupyDevice", none)
    done = CliRunner().invoke(app, ["bench", "gpu-kernels", part])
    assert done.exit_code == 1 and "needs a GPU" in done.stderr
