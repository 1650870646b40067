"""Products of few and long rows of Q4_K with several columns, the GPU's code on the CPU: the bits of the lane rules."""

from dataclasses import replace

import numpy as np
import pytest

from strata.gpu.activations import Activations
from strata.gpu.gemv import choices, gemv, relayout
from strata.gpu.launch import Launch, Source
from strata.pack.formats import by_name
from tests.block_data import MODES, random_activations, random_rows
from tests.canonical.call import assert_same, check_guards, room
from tests.gpu.run_on_cpu import ON_DEVICE, address, needs_compiler, run_all
from tests.test_gpu_gemv import aligned, area_of, wanted

pytestmark = needs_compiler
Q4_K = by_name("Q4_K")


@pytest.fixture(autouse=True)
def all_lengths(monkeypatch):
    monkeypatch.setattr(choices, "HALF_SPLIT_FROM", 2)
    monkeypatch.setattr(choices, "HALF_SPLIT_VALUES", 0)


def of_turing(one: Launch) -> Launch:
    """The same with as many chunks a round as Turing has room for."""
    kernel = "half_split<4>"
    return replace(one, kernel=kernel, source=Source(one.source.file, (kernel,)),
                   shared_bytes=one.shared_bytes - one.ring_bytes)  # fmt: skip


def check(mode: str, K: int, rows: int, columns: tuple[int, ...], change=lambda one: one) -> None:
    """All bits of products with so many columns, outputs of neighbouring columns three values apart."""
    raw, x = random_rows(Q4_K, rows, K, mode, seed=K), random_activations(max(columns), K, mode, seed=K + 1)
    weights, expected = aligned(relayout(Q4_K, raw)), wanted(Q4_K, raw, x)
    for T in columns:
        y, area = room(T, rows + 3), area_of(x[:T], Q4_K.group)
        launches = gemv(Q4_K, address(weights), rows, area.places, address(y), rows + 3, form="split")
        assert [one.source.file for one in launches] == ["gemv/half_split.cu"]
        run_all([change(one) for one in launches], reverse=T in (3, 6))
        check_guards(y)
        assert (y[:, rows:].view(np.uint8) == 0x5A).all(), "written between the rows"
        assert_same(y[:, :rows], expected[:T], f"{mode} K {K} rows {rows} T {T}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("K", "rows", "columns"), [(768, 20, (2, 3, 4)), (2048, 37, (2, 4, 6)), (6912, 5, (3, 4, 8))])
def test_all_modes(K, rows, columns, mode):
    """Fewer chunks than a round, one round, several; rows that end in each part of a tile."""
    check(mode, K, rows, columns)


@pytest.mark.parametrize("rows", [1, 4, 16, 17, 21, 40])
def test_rows(rows):
    check("mid", 2304, rows, (4, 5))


@pytest.mark.parametrize("chunks", [1, 2, 4, 5, 7, 9, 12, 13])
def test_rounds_that_are_not_full(chunks):
    check("mid", 256 * chunks, 20, (4,))


@pytest.mark.skipif(ON_DEVICE, reason="a kernel as older cards have it")
@pytest.mark.parametrize("K", [768, 1024, 3328])
def test_rounds_of_older_cards(K):
    check("mid", K, 41, (2, 3, 4), of_turing)


def test_what_older_cards_have_room_for():
    (one,) = gemv(Q4_K, 64, 2560, Activations.at(1 << 20, 4, 6144, 256), 64, form="split")
    assert one.grid == (1, 128, 1), "no more blocks than a card has processors"
    assert one.shared_bytes <= 99 << 10 and one.shared_bytes - one.ring_bytes <= 64 << 10
