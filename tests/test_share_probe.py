"""The share of a load by costs that it times: what is timed, what is set, and that windows go on behind it."""

from __future__ import annotations

import numpy as np
import pytest

from strata import loading
from strata.planner.split import SplitCosts
from strata.runtime import share_probe
from strata.runtime.share_probe import ShareProbe, _line, _Timed
from tests.gpu.run_on_cpu import needs_compiler
from tests.gpu.shared_model import E, K, L, answer, load, nothing_is_left, patch, path, shared

__all__ = ["nothing_is_left", "patch", "path"]
pytestmark = needs_compiler


@pytest.fixture(scope="module")
def expected(path, patch):
    with load(path, slots=4, pcie_share=0) as model:
        return answer(model)


@pytest.mark.parametrize(("slots", "experts"), [(0, "pinned"), (9, "pinned"), (9, "resident")])
def test_a_load_times_what_its_experts_cost(path, patch, expected, slots, experts):
    with load(path, slots=slots, experts=experts) as model:
        o = shared(model)
        assert o.costs.expert_bytes == o.layout.blob_bytes(0) and o.costs.cpu_us[0] > 0
        alone = max(o.costs.link_gbps, o.costs.expert_bytes / o.costs.cpu_us[0] / 1e3)
        assert o.costs.link_gbps > 0 and o.costs.memory_gbps >= alone * (1 - 1e-9)
        assert model.stats()["experts"]["costs"]["link_gbps"] == o.costs.link_gbps
        assert answer(model) == expected, "requests of windows follow those of the probe"
        service = model.stats()["experts"]["service"]
        assert service["failures"] == 0 and service["requests"] == service["replies"]


@pytest.mark.parametrize(("link_gbps", "share"), [(0.0, 0.0), (1.0, 0.5)])
def test_the_share_follows_the_costs(path, patch, expected, monkeypatch, link_gbps, share):
    costs = SplitCosts((1.0,), 1e3, link_gbps)  # of the CPU: 1 GB/s
    monkeypatch.setattr(ShareProbe, "measure", lambda self: costs)
    with load(path, slots=4) as model:
        assert shared(model).hybrid.share == share and shared(model).hybrid.form is (
            shared(model).hybrid.split if share else shared(model).hybrid._unlinked)  # fmt: skip
        assert answer(model) == expected
        experts = model.stats()["experts"]["experts"]
        assert (experts["link"] > 0) == (share > 0) and experts["cpu"] > 0


def test_what_was_asked_for_or_kept_is_not_timed(path, patch, monkeypatch):
    monkeypatch.setattr(ShareProbe, "measure", lambda self: pytest.fail("timed"))
    with load(path, slots=4, pcie_share=0.25) as model:
        assert shared(model).hybrid.share == 0.25 and model.stats()["experts"]["costs"] is None
    monkeypatch.setattr(loading, "kept_share", lambda machine, path: 0.75)
    with load(path, slots=4) as model:
        assert shared(model).hybrid.share == 0.75


def test_too_few_experts_in_ram_tell_nothing(path, patch, expected):
    """VRAM holds all but a few of each layer, and RAM only those."""
    with load(path, slots=(E - K + 1) * L, experts="resident") as model:
        o = shared(model)
        assert o.costs is None and o.hybrid.share == pytest.approx(model.plan.pcie_share, abs=1 / 512)
        assert answer(model) == expected


def test_a_line_through_two_sizes():
    assert _line([_Timed([90.0, 110.0, 90.0], 10), _Timed([36.0], 4)]) == pytest.approx((9.0, 0.0))
    assert _line([_Timed([100.0], 10), _Timed([52.0], 4)]) == pytest.approx((8.0, 20.0))
    assert _line([_Timed([100.0], 10), _Timed([120.0], 4)]) == pytest.approx((7.5, 25.0)), "noise"
    assert _line([_Timed([7.0], 1)]) == (7.0, 0.0)
    assert share_probe._usual([1.0, 1.0, 1.0, 50.0, 60.0]) == 1.0, "what others took is no cost"


def test_costs_change_the_line_little():
    """A small error of a time is a small error of the costs, also where the bounds of the slope begin."""
    for base in np.linspace(40, 130, 60):
        one, two = (_line([_Timed([100.0], 10), _Timed([base + d], 4)]) for d in (0.0, 0.01))
        assert one == pytest.approx(two, abs=0.05)
