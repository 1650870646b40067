"""The split of missed experts between CPU and link, and calibrated settings: choice, comparison, memory."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata import calibration
from strata.base.errors import BadArgument, FileError
from strata.calibration import Trial, compare, try_settings, worker_counts
from strata.model import load
from strata.planner import remembered
from strata.planner.estimate import pcie_split
from strata.planner.machine import Machine
from strata.planner.remembered import Settings
from strata.planner.split import Branches, SplitCosts, choose_split, cpu_line, predict

MB = 1e6

# ---- the model of a layer


def costs_of(cpu_gbps: float, link_gbps: float, memory_gbps: float = float("inf"), **more: float) -> SplitCosts:
    """Experts of 1 MB: so many us as a thousand divided by the rate."""
    return SplitCosts((1e3 / cpu_gbps,), MB, link_gbps, memory_gbps=memory_gbps, **more)


def test_a_layer_by_hand():
    """24 experts of 1 MB are missed; CPU 20 GB/s, link 12 GB/s; hits take 200 us, a staged expert 5 us."""
    costs = costs_of(20, 12)
    assert predict(costs, 24, 0.0).cpu_us == pytest.approx(1200)
    half = predict(costs, 24, 0.5)
    assert (half.cpu_us, half.link_us) == pytest.approx((600, 1000))
    split = choose_split(costs, 24)
    assert split.fraction == pytest.approx(12 / 32) and split.pcie_num == 96
    assert split.chosen.total_us == pytest.approx(750) and split.gain == pytest.approx(0.375)
    gpu = replace(costs, gpu_us=5.0, join_us=50.0, link_fixed_us=10.0)
    b = predict(gpu, 24, 0.25, hits=40)
    assert b.hits_us == 200 and b.cpu_us == pytest.approx(0.75 * 1200 + 50)
    assert b.link_us == pytest.approx(6 * (1000 / 12 + 10) + 6 * 5)
    assert predict(gpu, 24, 0.01, hits=40).link_us == pytest.approx(200 + 0.24 * 5), "staged experts wait for the hits"


def test_memory_is_shared_while_both_read():
    """CPU 20, link 12, memory 24 GB/s: both at three quarters, and the CPU alone again when the link is done."""
    costs = costs_of(20, 12, 24)
    b = predict(costs, 24, 0.25)
    link_alone, cpu_alone = 500, 900
    assert b.link_us == pytest.approx(link_alone * 32 / 24)
    assert b.cpu_us == pytest.approx(link_alone * 32 / 24 + (cpu_alone - link_alone))
    assert predict(costs_of(40, 12, 20), 10, 0.0).cpu_us == pytest.approx(500), "the CPU alone is bound by memory too"


def test_the_link_must_gain_a_tenth():
    assert choose_split(costs_of(20, 0), 24).pcie_num == 0
    assert choose_split(costs_of(20, 12), 0).pcie_num == 0
    # balanced, the gain is link / (cpu + link)
    assert choose_split(costs_of(20, 2.2), 24).fraction == 0
    just = choose_split(costs_of(20, 2.3), 24)
    assert 0.10 < just.gain < 0.11 and 0 < just.fraction < 2.3 / 22.3
    full = choose_split(costs_of(20, 4), 24)
    assert full.gain > 0.15 and full.fraction == pytest.approx(4 / 24)
    assert choose_split(costs_of(20, 12, 20), 24).fraction == 0, "memory is the limit: the link gains nothing"
    assert choose_split(costs_of(20, 12, gpu_us=50.0), 10, hits=20).fraction == 0, "the hits take longer than the CPU"
    assert choose_split(costs_of(0.5, 60), 10).fraction > 0.98


@given(st.integers(0, 80), st.integers(1, 60), st.integers(1, 60))
def test_whole_experts_go_where_the_layer_ends_first(n, cpu, link):
    """By the device's rule, with the share where both sides would end together."""
    m = min(n, (n + 1) * cpu // (cpu + link))
    ends = [max((n - k) * cpu, k * link) for k in range(n + 1)]
    assert ends[m] == min(ends)


@given(st.floats(1, 80), st.floats(1, 60), st.floats(10, 200))
def test_it_agrees_with_the_planner(cpu, link, memory):
    """Without fixed costs the balance is the planner's, which switches at the same gain."""
    split = choose_split(costs_of(cpu, link, memory), 20)
    expected = pcie_split(cpu, link, memory)
    if split.gain >= 0.151:
        assert split.fraction == pytest.approx(expected, rel=1e-6)
    elif split.gain < 0.0999:
        assert split.fraction == expected == 0


COSTS = {
    "one_us": (5, 400), "ratio": (1, 8), "expert_bytes": (2e5, 4e6), "link_gbps": (1, 60), "link_fixed_us": (0, 40),
    "gpu_us": (0.2, 20), "join_us": (0, 60), "memory_gbps": (8, 300), "misses": (0.01, 80), "rows": (1, 8),
    "hits": (0, 80),
}  # fmt: skip


def situation(v: dict[str, float]) -> tuple[SplitCosts, float, float, float]:
    line = cpu_line(v["one_us"], v["one_us"] * v["ratio"])
    costs = SplitCosts(line, v["expert_bytes"], v["link_gbps"], v["link_fixed_us"], v["gpu_us"], v["join_us"],
                       v["memory_gbps"])  # fmt: skip
    return costs, v["misses"], v["rows"], v["hits"]


values = st.fixed_dictionaries({name: st.floats(low, high) for name, (low, high) in COSTS.items()})


def at_the_steepest(v, w, output) -> float:
    """Between two situations: the change of an output over a 2^-30th of the way, where halving again and again led."""

    def between(t: float) -> float:
        split = choose_split(*situation({name: (1 - t) * v[name] + t * w[name] for name in COSTS}))
        return output(split) if output is fraction_of else output(split) / split.alone.total_us

    low, high = 0.0, 1.0
    at_low, at_high = between(low), between(high)
    for _ in range(30):
        middle = (low + high) / 2
        at_middle = between(middle)
        if abs(at_middle - at_low) > abs(at_high - at_middle):
            high, at_high = middle, at_middle
        else:
            low, at_low = middle, at_middle
    return abs(at_high - at_low)


def fraction_of(split):
    return split.fraction


@given(values, values, st.sampled_from([fraction_of, lambda s: s.chosen.total_us, lambda s: s.chosen.cpu_us]))
@settings(max_examples=150)
def test_the_choice_has_no_jumps(v, w, output):
    """A jump anywhere on the way would be what is left when the way is halved towards the larger change."""
    assert at_the_steepest(v, w, output) <= 1e-4


@given(values, st.sampled_from(sorted(COSTS)), st.floats(-1, 1))
@settings(max_examples=200)
def test_the_choice_is_not_steep(v, name, step):
    """A change of any input by one part in a hundred thousand changes times by little more, and the share by at most a
    hundred times that."""
    small = 1e-5
    low, high = COSTS[name]
    moved = v | {name: min(max(v[name] + step * small * max(v[name], 0.01 * high), low), high)}
    one, two = choose_split(*situation(v)), choose_split(*situation(moved))
    assert abs(one.fraction - two.fraction) <= 150 * small
    scale = max(one.alone.total_us, two.alone.total_us)
    for a, b in ((one.chosen, two.chosen), (one.alone, two.alone)):
        assert abs(a.total_us - b.total_us) <= 150 * small * scale
        assert abs(a.cpu_us - b.cpu_us) <= 150 * small * scale + 1e-9


@given(values, st.floats(0, 1))
@settings(max_examples=200)
def test_the_choice_is_the_best_and_never_loses(v, fraction):
    costs, misses, rows, hits = situation(v)
    split = choose_split(costs, misses, rows, hits)
    assert 0 <= split.fraction <= 1 and 0 <= split.pcie_num <= 256
    assert split.chosen.total_us <= split.alone.total_us * (1 + 1e-9)
    other = predict(costs, misses, fraction, rows, hits)
    best = split.alone.total_us * (1 - split.gain)
    assert best <= other.total_us * (1 + 1e-6) + 1e-9
    if split.fraction > 0:
        assert best <= 0.9 * split.alone.total_us * (1 + 1e-9)
    if split.gain >= 0.15 and split.gain < 0.999:
        assert split.chosen.cpu_us == pytest.approx(split.chosen.link_us, rel=1e-6, abs=1e-6)


def test_costs_between_measured_rows():
    line = cpu_line(10, 24)
    assert line == pytest.approx((10, 12, 14, 16, 18, 20, 22, 24))
    costs = SplitCosts(line, MB, 10)
    assert [costs.cpu_us_at(r) for r in (0.5, 1, 1.25, 7.5, 8, 12)] == pytest.approx([10, 10, 10.5, 23, 24, 24])
    assert SplitCosts((7,), MB, 10).cpu_us_at(5) == 7
    assert Branches(1, 3, 2).total_us == 3
    for bad in ({"cpu_us": ()}, {"cpu_us": (0.0,)}, {"expert_bytes": 0}, {"link_gbps": -1}, {"memory_gbps": 0}):
        with pytest.raises(BadArgument):
            SplitCosts(**{"cpu_us": (1.0,), "expert_bytes": MB, "link_gbps": 1.0} | bad)
    with pytest.raises(BadArgument):
        predict(costs, 1, 1.5)


# ---- comparing


def scripted(ms: dict[Settings, float], log: list):
    """An opener whose timers tell scripted times, the first of each 50 times too long."""

    @contextlib.contextmanager
    def opener(chosen):
        log.append(("open", chosen))
        slow = iter([50.0])

        def timer():
            log.append(chosen)
            return ms[chosen] * next(slow, 1.0)

        yield timer
        log.append(("close", chosen))

    return opener


def test_turns_alternate_and_medians_count():
    order = []
    times = {"a": iter([9.0, 5, 5, 5, 1, 5, 5]), "b": iter([4.0, 4, 90, 4, 4, 4, 4])}

    def timer(name):
        return lambda: order.append(name) or next(times[name])

    base, candidate, spread = compare(timer("a"), timer("b"), 7)
    assert (base, candidate) == (5, 4)
    assert spread == pytest.approx(3.2), "gains of turns: -17 and 0.56 do not count, -3 and 0.2 do"
    assert "".join(order) == "abbaabbaabbaab"
    for turns in (0, 1, 2):
        with pytest.raises(BadArgument, match="turns"):
            compare(timer("a"), timer("b"), turns)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([3, 5, 7, 9]), st.sampled_from([0.05, 0.2, 0.5]))
def test_the_spread_is_that_of_the_turns(seed, turns, noise):
    """It is at most what the gains of all turns span, and a gain within it is never kept."""
    rng = np.random.default_rng(seed)
    ms = np.exp(noise * rng.standard_normal((2, turns)))
    base, candidate, spread = compare(iter(ms[0]).__next__, iter(ms[1]).__next__, turns)
    gains = 1 - ms[1] / ms[0]
    assert 0 <= spread <= np.ptp(gains) and (base, candidate) == tuple(np.median(ms, axis=1))
    trial = Trial(Settings(threads=1), base, candidate, spread)
    assert trial.kept == (trial.gain >= 0.03 and trial.gain > spread)


@pytest.mark.parametrize("turns, most", [(3, 0.08), (5, 0.01), (7, 0.01)])
def test_noise_is_seldom_kept_and_a_gain_is(turns, most):
    """Two settings that cost the same on a noisy machine, and one that saves a half, 400 comparisons each."""
    rng = np.random.default_rng(turns)

    def kept(factor: float) -> float:
        def timer(ms: float):
            return lambda: ms * float(np.exp(0.08 * rng.standard_normal()))

        found = [Trial(Settings(threads=1), *compare(timer(1), timer(factor), turns)).kept for _ in range(400)]
        return float(np.mean(found))

    assert kept(1.0) <= most
    assert kept(0.5) >= 0.9


def test_only_gains_of_three_percent_are_kept():
    a, b, c, d = (Settings(threads=n) for n in (6, 5, 4, 3))
    log: list = []
    best, trials = try_settings([a, b, c, d], scripted({Settings(): 10, a: 9.8, b: 9.0, c: 9.5, d: 8.9}, log), 7)
    assert best == b
    assert [t.kept for t in trials] == [False, True, False, False]
    assert [t.base_ms for t in trials] == [10, 10, 9, 9] and trials[1].gain == pytest.approx(0.1)
    opened = [entry[1] for entry in log if isinstance(entry, tuple) and entry[0] == "open"]
    closed = [entry[1] for entry in log if isinstance(entry, tuple) and entry[0] == "close"]
    assert opened == [Settings(), a, b, c, d] and sorted(map(str, closed)) == sorted(map(str, opened))
    assert Trial(a, 100, 97.1, 0).kept is False and Trial(a, 100, 97, 0).kept is True
    assert Trial(a, 100, 90, 0.11).kept is False and Trial(a, 100, 90, 0.09).kept is True
    log.clear()
    assert try_settings([], scripted({Settings(): 1}, log), 3) == (Settings(), [])


def test_numbers_of_workers():
    assert worker_counts(16) == [11, 8, 4]
    assert worker_counts(2) == [1]
    assert worker_counts(3) == [2, 1]
    assert worker_counts(1) == []


# ---- remembering


@pytest.fixture
def here(tmp_path, monkeypatch):
    """(machine, model file of two shards) with an empty cache folder."""
    monkeypatch.setenv("STRATA_CACHE", str(tmp_path / "cache"))
    for i in (1, 2):
        (tmp_path / f"m-0000{i}-of-00002.gguf").write_bytes(b"x" * i)
    return Machine.describe(cores=8), tmp_path / "m-00001-of-00002.gguf"


def test_settings_are_remembered_for_machine_and_file(here):
    machine, model = here
    assert remembered.remembered(machine, model) is None
    path = remembered.remember(machine, model, Settings(threads=6), {"gain": 0.1})
    assert path.name == "calibration.json" and [p.name for p in path.parent.iterdir()] == [path.name]
    assert remembered.remembered(machine, model) == Settings(threads=6)
    assert remembered.remembered(machine, model.with_name("m-00002-of-00002.gguf")) == Settings(threads=6)
    for other in (Machine.describe(cores=4), Machine.describe(cores=8, ram_gib=64),
                  Machine.describe(cores=8, gpu="RTX 5070"), replace(machine, cpu_name="another")):  # fmt: skip
        assert remembered.remembered(other, model) is None
    card = Machine.describe(cores=8, gpu="RTX 5070")
    remembered.remember(card, model, Settings(pcie_num=80))
    remembered.remember(machine, model, Settings(threads=5))
    assert remembered.remembered(machine, model) == Settings(threads=5)
    assert remembered.remembered(card, model) == Settings(pcie_num=80)
    assert len(json.loads(path.read_text())["entries"]) == 2
    assert remembered.forget(machine, model) and not remembered.forget(machine, model)
    assert remembered.remembered(machine, model) is None and remembered.remembered(card, model) == Settings(pcie_num=80)
    model.with_name("m-00002-of-00002.gguf").write_bytes(b"changed")
    assert remembered.remembered(card, model) is None, "another file"
    with pytest.raises(FileError, match="cannot look at"):
        remembered.remembered(machine, model.with_name("none.gguf"))


def test_damaged_settings_warn_and_count_as_none(here, caplog):
    machine, model = here
    path = remembered.remember(machine, model, Settings(threads=6))
    good = path.read_text()
    broken = json.loads(good)
    broken["entries"][0]["settings"] = {"threads": 0, "pcie_num": None}
    strange = json.loads(good)
    strange["entries"][0]["settings"] = {"colour": "red"}
    version = json.loads(good) | {"strata_calibration": 2}
    for text in (good[:40], "[]", json.dumps(broken), json.dumps(strange), json.dumps(version)):
        path.write_text(text)
        caplog.clear()
        assert remembered.remembered(machine, model) is None
        assert "are not used" in caplog.text
    assert remembered.remember(machine, model, Settings(threads=3)) == path
    assert remembered.remembered(machine, model) == Settings(threads=3)
    for bad in ({"threads": 0}, {"threads": True}, {"pcie_num": 257}, {"threads": 2.0}):
        with pytest.raises(BadArgument):
            Settings(**bad)


# ---- measuring


def test_calibration_of_the_bundled_model(tiny_path):
    """Times are positive and eight rows cost more than one; without a GPU there is no link and no split."""
    machine = replace(Machine.here(tiny_path), gpus=(), ram_gbps=50.0)
    said: list[str] = []
    found = calibration.calibrate(tiny_path, machine=machine, windows=2, turns=3, say=said.append)
    assert found.device == "cpu" and found.link_gbps is None and found.split is None
    assert 0 < found.experts.one_us < found.experts.eight_us < 8 * 20 * found.experts.one_us
    counts = worker_counts(found.experts.threads)
    assert [t.candidate.threads for t in found.trials] == counts
    assert all(t.base_ms > 0 and t.candidate_ms > 0 for t in found.trials)
    assert found.settings in [Settings(), *(t.candidate for t in found.trials if t.kept)]
    json.dumps(found.record())
    assert said[0] == "timing experts on the CPU"


def test_costs_of_a_split_from_facts(tiny_path):
    from strata.planner.memory import read_facts

    facts = read_facts(tiny_path)
    card = Machine.describe(gpu="RTX 5070", ram_gbps=60).gpus[0]
    costs = calibration.split_costs(facts, calibration.ExpertTimes(8, 40.0, 120.0), card, 25.0, 60.0)
    assert costs.expert_bytes == pytest.approx(facts.experts_bytes / (8 * 32))
    assert costs.cpu_us[0] == 40 and costs.cpu_us[7] == 120 and costs.memory_gbps == 60
    assert np.isclose(costs.gpu_us, costs.expert_bytes / card.vram_gbps / 1e3)


def test_a_link_gives_a_suggestion(tiny_path, monkeypatch):
    """With a card whose link is measured, costs become a split; a load that computes on the CPU still tries threads."""
    card = Machine.describe(gpu="RTX 5070").gpus
    machine = replace(Machine.here(tiny_path), gpus=card, ram_gbps=500.0)
    monkeypatch.setattr(calibration, "_link", lambda gpu, notes: 25.0)
    found = calibration.calibrate(tiny_path, machine=machine, windows=1, turns=3)
    assert found.device == "cpu" and found.link_gbps == 25.0 and 0 <= found.split.pcie_num <= 256
    assert [t.candidate.threads for t in found.trials] == worker_counts(found.experts.threads)
    assert found.record()["split"]["pcie_num"] == found.split.pcie_num
    alone = calibration.calibrate(tiny_path, machine=machine, windows=1, turns=3, device="cpu")
    assert alone.split is None and alone.link_gbps is None


def test_shares_are_compared_on_one_model(tiny_path, monkeypatch):
    """Turns set the share that they time; the fastest by 3 % is kept."""

    class Shared:
        def __init__(self) -> None:
            self.share, self.set_to = 0.25, []

        def set_share(self, share: float) -> None:
            self.share = share
            self.set_to.append(share)

    hybrid = Shared()
    ms = {0.25: 3.0, 0.5: 2.0, 0.0: 4.0}
    monkeypatch.setattr(calibration.WindowTimer, "__call__", lambda self: ms[hybrid.share])
    split = choose_split(costs_of(20, 20), 10)
    assert split.pcie_num == 128
    with load(tiny_path, context=64, device="cpu") as model:
        best, trials = calibration._try_shares(model, hybrid, split, 1, 3)
    assert best == Settings(pcie_num=128)
    assert [(t.candidate.pcie_num, t.base_ms, t.candidate_ms) for t in trials] == [(128, 3.0, 2.0), (0, 2.0, 4.0)]
    assert hybrid.set_to == [0.25, 0.5, 0.5, 0.25, 0.25, 0.5, 0.5, 0.0, 0.0, 0.5, 0.5, 0.0]


@pytest.mark.gpu
def test_link_rate():
    from strata.gpu.link_speed import link_gbps

    assert 1 < link_gbps(n_bytes=64 << 20) < 1000
