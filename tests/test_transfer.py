"""Exported sessions whose checksum is right and whose content is not: refused, or read without what is wrong."""

from __future__ import annotations

import json
import zlib

import pytest

import strata
from strata.base.errors import BadArgument
from tests.gpu.loaded import lend_gpu
from tests.gpu.run_on_cpu import needs_compiler

PROMPT = "def f(x):"
START = len(b"strata session\n") + 4
"""Of the header's length; the header follows."""


@pytest.fixture(scope="module")
def cpu(tiny_path):
    with strata.load(tiny_path, context=256, kv="f16", device="cpu", draft="auto", threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def gpu(tiny_path):
    with pytest.MonkeyPatch.context() as patch:
        lend_gpu(patch)
        with strata.load(tiny_path, context=256, kv="f16", device="cuda", draft="auto", checkpoints=0) as model:
            yield model


@pytest.fixture(scope="module")
def blob(cpu):
    with cpu.session() as session:
        session.generate(PROMPT, max_tokens=2)
        return session.export()


class Forger:
    """Variants of an export, each with its own checksum."""

    def __init__(self, blob: bytes):
        n = int.from_bytes(blob[START : START + 4], "little")
        self.head, self.body = blob[:START], blob[START + 4 + n : -4]
        self.header = json.loads(blob[START + 4 : START + 4 + n])

    def text(self, text: bytes, body: bytes | None = None) -> bytes:
        data = self.head + len(text).to_bytes(4, "little") + text + (self.body if body is None else body)
        return data + zlib.crc32(data).to_bytes(4, "little")

    def without(self, key: str) -> bytes:
        return self.text(json.dumps({k: v for k, v in self.header.items() if k != key}).encode())

    def having(self, **changes: object) -> bytes:
        return self.text(json.dumps(self.header | changes).encode())

    def array(self, name: str, at: int, value: object) -> bytes:
        """With another name (at 0), dtype (1) or shape (2) of an array."""
        return self.having(arrays=[[value if a[0] == name and i == at else x for i, x in enumerate(a)]
                                   for a in self.header["arrays"]])  # fmt: skip


def test_an_export_sealed_again_is_the_same(blob):
    forger = Forger(blob)
    assert forger.having() == blob


def test_wrong_content_is_refused_and_changes_nothing(cpu, blob):
    forger = Forger(blob)
    (n,) = forger.header["arrays"][0][2]
    bad = [forger.text(text) for text in (b"{", b"[]", b"\xff", b"5", b"[" * 99_999)]
    bad += [forger.without(key) for key in ("model", "kv", "layout", "drafter", "arrays")]
    bad += [forger.having(model=5), forger.having(kv=None), forger.having(drafter=5)]
    bad += [forger.having(drafter={"rows": n}), forger.having(arrays=5), forger.having(arrays=[5])]
    bad.append(forger.having(layout=5))
    bad += [forger.array("tokens", 1, kind) for kind in ("O", "zz", "<f4", 5)]
    bad += [forger.array("tokens", 2, shape) for shape in ([-n], [1, n], [n - 1], [2**60], [2.5], "n", None)]
    bad += [forger.array(name, 0, "other") for name in ("tokens", "recurrent", "qsa.3.k")]
    bad += [forger.array("recurrent", 1, "|i1"), forger.array("qsa.3.k", 1, "<i2")]
    for token in (-1, cpu.geometry.V):
        bad.append(forger.text(json.dumps(forger.header).encode(), token.to_bytes(4, "little", signed=True)
                               + forger.body[4:]))  # fmt: skip
    with cpu.session() as session:
        session.import_(blob)
        for one in bad:
            with pytest.raises(BadArgument, match=r"damaged|another geometry"):
                session.import_(one)
        with pytest.raises(BadArgument, match="no exported"):
            session.import_(memoryview(blob)[::2])
        assert session.export() == blob


@needs_compiler
@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_a_wrong_row_of_the_draft_layer_is_left_out(request, blob, target):
    forger = Forger(blob)
    drafter, (values,) = forger.header["drafter"], forger.header["arrays"][-1][2]
    assert forger.header["arrays"][-1][0] == "drafter.x"
    with request.getfixturevalue(target).session() as session:
        state = session._state
        session.import_(blob)
        assert state.mtp.snapshot(state.state).x is not None
        for wrong in (
            forger.array("drafter.x", 2, [values // 2]), forger.array("drafter.x", 2, [2, values // 2]),
            forger.array("drafter.x", 1, "<i4"), forger.having(drafter=drafter | {"first": -1}),
            forger.having(drafter=drafter | {"first": drafter["rows"]}),
            forger.having(drafter=drafter | {"first": "x"}),
        ):  # fmt: skip
            session.import_(wrong)
            assert state.mtp.snapshot(state.state).x is None
            assert len(session.tokens) == drafter["rows"]
