"""Measurements and commands around shared experts. Kernels run on the CPU through the shim, or on a GPU."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from strata import capped_experts, experts_speed
from strata.base.errors import BadArgument, StrataError
from strata.cli import app
from strata.cli.bench import link_shares
from strata.cli.bench.experts import capped_lines, lines
from strata.cli.experts_text import expert_lines
from strata.experts_speed import measure
from strata.measure import Speed
from strata.memory_speed import PIECE_BYTES, memory_rates
from tests.gpu.run_on_cpu import ON_DEVICE, needs_compiler
from tests.gpu.shared_model import E, K, L, answer, load, nothing_is_left, patch, path

__all__ = ["nothing_is_left", "patch", "path"]
pytestmark = needs_compiler


@pytest.fixture(scope="module")
def speed(path, patch):
    with pytest.MonkeyPatch.context() as quick:
        quick.setattr(experts_speed, "WARM_UP", 1)
        brief = partial(memory_rates, n_bytes=1 << 22, link_bytes=PIECE_BYTES, seconds=0.02)
        quick.setattr(experts_speed, "memory_rates", brief)
        return measure(path, windows=2, shares=(0.0, 0.5), threads=1, context=256)


def test_every_setting_is_measured_with_its_bound(speed):
    assert [(r.name, r.share) for r in speed.runs] == [
        ("no slots", 0.0), ("no slots", 0.5), ("no slots", 1.0), ("hits alone", 0.0), ("half", 0.0), ("half", 0.5)
    ]  # fmt: skip
    for r in speed.runs:
        assert r.window_us > 0 and r.bound_us > 0 and r.serial_us + r.shared_us == pytest.approx(r.window_us)
        assert r.hit_entries + r.link_experts + r.cpu_experts == K * L, "one row: every entry is an expert of its own"
        assert sum(r.waited_for.values()) == 2 * L
    cpu, half, link, hits = (speed.runs[i] for i in (0, 1, 2, 3))
    assert (cpu.cpu_experts, cpu.link_experts, cpu.slots) == (K * L, 0, 0)
    assert half.link_experts == half.cpu_experts == K * L / 2
    assert link.cpu_experts == 0 and link.waited_for["link"] == 2 * L and link.link_gbps > 0
    assert hits.hit_entries == K * L and hits.slots == E // 2 * L and hits.waited_for["hits"] == 2 * L
    assert json.dumps(speed.record()) and len(lines(speed)) == 5 + len(speed.runs)


def test_the_bound_of_parts():
    alone = experts_speed._Alone()
    base = dict(slots=0, rows=1, wall_us=0.0, window_us=0.0, shared_us=0.0, link_gbps=0.0, cpu_gbps=0.0, waited_for={})
    none = dict(serial_us=0.0, hits_us=0.0, link_us=0.0, cpu_us=0.0, join_us=0.0, hit_entries=0, link_experts=0,
                cpu_experts=0)  # fmt: skip
    for name, share, more in (("no slots", 0.0, {"cpu_us": 200.0, "cpu_experts": 10, "join_us": 7.0}),
                              ("no slots", 1.0, {"link_us": 400.0, "link_experts": 10}),
                              ("hits alone", 0.0, {"hits_us": 50.0, "hit_entries": 10, "serial_us": 90.0}),):
        alone.learn(experts_speed.Run(name=name, share=share, **base, **(none | more)))
    mixed = experts_speed.Run(name="half", share=0.5, **base | {"window_us": 200.0},
                              **(none | {"hit_entries": 4, "link_experts": 2, "cpu_experts": 4}))  # fmt: skip
    found = experts_speed._with_bound(mixed, alone)
    assert found.bound_us == 90 + 80 + 7 and found.beyond_bound == pytest.approx(1 - 177 / 200)
    alone.ram = 15.0
    ram = experts_speed._with_bound(mixed, alone)
    assert ram.bound_us == 90 + 90 + 7, "memory that both read"
    assert ram.parts_us == found.parts_us == 177 and ram.of_parts == pytest.approx(177 / 200)


def test_bad_requests_are_refused(path, patch):
    for bad in ({"rows": 9}, {"windows": 1}, {"shares": (2.0,)}):
        with pytest.raises(BadArgument):
            measure(path, **bad)
    with pytest.raises((BadArgument, StrataError)):
        measure(path, device="cpu")


def test_the_parts_of_a_token_add_up(path, patch):
    with load(path, slots=8, pcie_share=0.5) as model:
        sample = Speed(model, "some text to begin with").decode(3, profile=True)
        parts = sample.shared_parts()
        wall = parts.pop("wall")
        assert sum(parts.values()) == pytest.approx(wall, rel=1e-6) and min(parts.values()) >= -0.03 * wall
        assert parts["rest of the window"] > 0 and parts["head, commit, swaps"] > 0
        assert {"post", "wait for hits", "wait for link", "wait for cpu", "join"} <= parts.keys()


def test_lines_for_people(path, patch):
    with load(path, slots=8, pcie_share=0.5) as model:
        answer(model, 1)
        said = "\n".join(expert_lines(model.stats()["experts"]))
        assert "of 8 slots filled" in said and "over the link" in said and "waited for" in said


def test_commands_take_these_options(path, patch):
    runner, model = CliRunner(), ["--model", str(path), "--context", "256", "--device", "cuda", "--threads", "1"]
    shared = ["--slots", "5", "--experts", "pinned", "--pcie-share", "0.5", "--prefill", "windows"]
    done = runner.invoke(app, ["run", "ab", *model, *shared, "-n", "1", "--stats", "--json"])
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["experts"]["pcie_share"] == 0.5 and record["experts"]["tiers"]["slots"] == 5
    bad = runner.invoke(app, ["run", "ab", *model, "--slots", "few"])
    assert bad.exit_code != 0 and "--slots cannot be read" in bad.output
    for verb in (["run"], ["chat"], ["score"], ["bench", "decode"]):
        helped = runner.invoke(app, [*verb, "--help"]).output
        assert all(flag in helped for flag in ("--slots", "--experts", "--pcie-share", "--profile"))
    assert "--shares" in runner.invoke(app, ["bench", "experts", "--help"]).output


# ---- few slots


@pytest.fixture(scope="module")
def told():
    return []


@pytest.fixture(scope="module", autouse=True)
def _short_rests():
    """On the CPU nothing is learnt from seconds in which nothing happens."""
    with pytest.MonkeyPatch.context() as quick:
        if not ON_DEVICE:
            quick.setattr(capped_experts, "IDLE_S", 0.02)
            quick.setattr(capped_experts, "WATCHED_S", 0.1)
        yield


@pytest.fixture(scope="module")
def capped(path, patch, told):
    options = {"tokens": 10, "learnt": 20, "threads": 1, "context": 256, "busy": True}
    return capped_experts.measure(path, 0.25, so_far=told.append, **options)


def test_the_card_that_is_idle_is_the_one_that_was_measured(monkeypatch):
    monkeypatch.setattr(capped_experts, "busy_percent", lambda index: 10 * index)
    assert capped_experts._idle(3)[1] == 30


def test_lines_come_as_they_are_found(capped, told):
    """What was told stays as it is, and more follows."""
    texts = [capped_lines(found) for found in told]
    assert told[-1] == capped and len(texts[0]) == 4
    for few, more in pairwise(texts):
        assert len(few) < len(more) and more[: len(few)] == few


def test_a_run_beside_a_busy_thread_ends_in_time(path, patch, monkeypatch):
    """However slow it is. The command prints the report, every line once."""
    monkeypatch.setattr(capped_experts, "BUSY_S", 1e-6)
    options = ["--model", str(path), "--context", "256", "--device", "cuda", "--threads", "1", "-n", "3"]
    done = CliRunner().invoke(app, ["bench", "experts", *options, "--fraction", "0.25", "--busy-python"])
    text = done.stdout.splitlines()
    assert done.exit_code == 0 and "3 tokens a run" in text[1], done.output
    assert sum(line.endswith(" 1 tokens") for line in text) == 1 + len(capped_experts.INTERVALS)
    assert [line.split()[0] for line in text if line][-4:] == ["simulated", "steady", "moving", "idle,"]
    assert len(text) == len(set(text)) + text.count("") - 1


def test_few_slots_by_share(path, patch, monkeypatch):
    brief = partial(memory_rates, n_bytes=1 << 22, link_bytes=PIECE_BYTES, seconds=0.02)
    monkeypatch.setattr(link_shares, "memory_rates", brief)
    told = []
    options = {"tokens": 6, "learnt": 10, "threads": 1, "context": 256}
    found = link_shares.measure(path, 0.25, [0.0, 0.5], so_far=told.append, **options)
    settings = [(r.share, r.run.policy) for r in found.runs]
    assert settings == [(s, p) for s in (found.load_share, 0.0, 0.5) for p in ("static", "ours")]
    assert len(found.chosen) in (0, link_shares.CHOSEN_AGAIN)
    assert all(0 <= c.share <= 1 and c.cpu_us > 0 for c in found.chosen)
    for r in found.runs:
        assert r.run.tokens == 6 and r.run.tokens_per_s > 0 and r.median_us > 0
        assert not r.places or r.run.policy == "ours"
    assert found.memory.threads_gbps > 0 and json.dumps(found.record())
    texts = [link_shares.lines(part) for part in told]
    for few, more in pairwise(texts):
        assert len(few) <= len(more) and more[: len(few)] == few
    assert sum(line.startswith("share ") for line in texts[-1]) == 6


def test_windows_behind_an_adaptation():
    """Sums become what each window had; what comes before the first copies has no place."""
    copies, tokens, beside = [0, 0, 3, 3, 3, 5, 5, 5, 5, 5, 5, 5], [], 0.0
    for i, n in enumerate(copies):
        beside += i
        tokens.append(capped_experts.Token(100.0 + i, beside, n))
    first, second, third, fourth, later = link_shares.places_of(tokens)
    assert (first.place, first.windows, first.copies, first.window_us, first.beside_us) == (0, 2, 2.5, 103.5, 3.5)
    assert (second.windows, third.windows, fourth.windows) == (2, 2, 1) and fourth.window_us == 108
    assert (later.place, later.windows, later.copies, later.window_us) == (link_shares.PLACES, 3, 0, 110)


def test_the_command_takes_shares_with_a_fraction(path, patch, monkeypatch):
    asked = []

    def measure(path, fraction, shares, **options):
        asked.append((fraction, shares, options["tokens"]))
        raise StrataError("enough")

    monkeypatch.setattr(link_shares, "measure", measure)
    words = ["bench", "experts", "--model", str(path), "--fraction", "0.25", "-n", "7", "--device", "cuda"]
    done = CliRunner().invoke(app, [*words, "--shares", "0.2,0.4"])
    assert asked == [(0.25, [0.0, 0.2, 0.4], 7)] and "enough" in done.output
    done = CliRunner().invoke(app, [*words, "--shares", "0.2", "--busy-python"])
    assert done.exit_code == 2 and "--busy-python does nothing with --shares" in done.stderr


def test_few_slots_static_and_following(capped):
    assert [(r.routing, r.policy) for r in capped.runs] == [
        ("steady", "static"), ("steady", "ours"), ("moving", "static"), ("moving", "ours")
    ]  # fmt: skip
    assert capped.slots == L * E // 4
    for r in capped.runs:
        assert r.tokens_per_s > 0 and 0 < r.hit_rate <= r.without < 1
        assert sum(r.parts_us.values()) == pytest.approx(r.window_us)
        assert r.copies_per_window == 0 or r.policy == "ours"  # whether a copy comes to pass is a matter of time
        assert r.tokens == 10 and 1e6 / r.tokens_per_s == pytest.approx(r.window_us + r.other_us)


def test_the_simulator_sees_the_same_routing(capped):
    """Its static policy hits what static slots on the device hit."""
    for sim, static in zip(capped.simulated, capped.runs[::2], strict=True):
        found = {p.policy: p.hit_rate for p in sim.policies}
        assert found["static"] == static.hit_rate < found["oracle"] and list(found) == list(capped_experts.SIMULATED)


def test_what_is_told_of_few_slots(capped):
    """That slots follow is what test_orchestrator.py shows; ten tokens of a fast card hide no copy."""
    assert [b.interval_s for b in capped.busy] == [0.0, *capped_experts.INTERVALS]
    assert capped.idle_cpu < 1 or not ON_DEVICE
    text = capped_lines(capped)
    assert len(text) == 4 + 4 + 2 + len(capped_experts.INTERVALS) + 2 + 2 + 1 and text[-1].startswith("idle")
    assert sum("slower" in line for line in text) == len(capped_experts.INTERVALS)
    assert json.dumps(capped.record())
    with pytest.raises(BadArgument, match="fraction"):
        capped_experts.measure("nothing.gguf", 1.0)
