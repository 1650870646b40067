"""Options of a plan and facts of a card: numbers of any library, and the driver's share."""

import json
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

import strata
from strata.base.errors import BadArgument
from strata.base.geometry import LEAST_CONTEXT
from strata.base.plan import MIB
from strata.planner.machine import Machine
from strata.planner.memory import plan, read_facts
from strata.planner.options import PlanOptions, make_options
from tests.header_maker import make_release

WHOLE = ("context", "sessions", "slots", "checkpoints", "ngram_cache_rows", "threads", "draft_vocabulary")
REAL = ("reserve_mib", "hit_rate", "pcie_share", "vram_gib", "ram_gib")


def test_numbers_of_other_libraries_are_numbers(tiny_path):
    for name in WHOLE:
        for number in (np.int64(512), np.uint8(40), np.array(70)):
            value = getattr(PlanOptions(**{name: number}), name)
            assert type(value) is int and value == number, name
    for name in REAL:
        for number in (np.float32(0.5), np.float16(0.25), np.int64(1), Fraction(1, 4)):
            value = getattr(PlanOptions(**{name: number}), name)
            assert type(value) is float and value == float(number), name
    assert PlanOptions(prefill=np.int64(512)).prefill == 512
    machine = Machine.describe(vram_gib=np.float32(12), ram_gib=np.int64(64), cores=np.int16(4))
    p = strata.plan(tiny_path, machine=machine, context=np.int64(1024), vram_gib=np.float32(8))
    assert p.fits and type(p.context) is int and json.dumps(p.to_json())


@pytest.mark.parametrize("number", [True, np.True_, np.nan, np.float32("inf"), -np.inf, np.int64(-1), -0.5, "1", b"1",
                                    1j, np.complex64(1), np.array([1.0, 2.0]), [1], object()])  # fmt: skip
def test_what_is_no_number_is_refused_by_its_name(number):
    for name in (*WHOLE, *REAL, "prefill"):
        with pytest.raises(BadArgument, match=name):
            PlanOptions(**{name: number})
    for name in ("vram_gib", "ram_gib", "cores"):
        with pytest.raises(BadArgument, match=name):
            Machine.describe(**{name: number})


def test_the_context_of_the_driver_is_that_of_the_card(tmp_path):
    """An H200 has 132 multiprocessors. A context that is there is not taken again, whether there is a cap or not."""
    facts = read_facts(make_release(tmp_path, "Q2_0", vocabulary=False))
    for card, mib in (("RTX 5070", 352), ("H200", 527), ("RTX 4060", 302)):
        p = plan(facts, Machine.describe(gpu=card, ram_gib=64), context=4096)
        assert p.line("CUDA context").n_bytes == mib * MIB, card
    here = Machine.describe(gpu="RTX 5070", ram_gib=64)
    there = replace(here, gpus=(replace(here.gpus[0], has_context=True),))
    for cap in (None, 8):
        fresh, again = (plan(facts, m, context=4096, vram_gib=cap) for m in (here, there))
        assert again.line("CUDA context").n_bytes == 0 and again.fits
        gained = (again.n_slots - fresh.n_slots) * max(fresh.slot_bytes)
        assert gained == pytest.approx(352 * MIB, abs=2 * max(fresh.slot_bytes))


def test_a_context_that_no_load_takes_is_refused():
    for cells in (0, LEAST_CONTEXT - 1):
        with pytest.raises(BadArgument, match=f"context is out of range; found {cells}; needed an integer >= 10"):
            make_options(context=cells)
    assert make_options(context=LEAST_CONTEXT).context == LEAST_CONTEXT


@pytest.mark.parametrize("profile", [42, [], {}, object()])
def test_what_is_no_profile_is_refused(profile):
    with pytest.raises(BadArgument, match="profile is unusable"):
        make_options(profile=profile)


def test_what_is_no_machine_is_refused(tiny_path):
    with pytest.raises(BadArgument, match="machine is no Machine"):
        strata.plan(tiny_path, machine=1)
