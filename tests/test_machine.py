"""Machine facts: read here, described, and on systems that lack things."""

import ctypes
import dataclasses
import json
import os
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from strata.base.errors import BadArgument
from strata.cli import doctor as doctor_cli
from strata.cpu import tiers
from strata.planner import health, machine, probes
from strata.planner.cards import GIB, card_by_name, find_card, known_cards, link_gbps
from strata.planner.cuda_context import context_bytes, has_context
from strata.planner.machine import Machine
from strata.planner.nvml import read_gpus

TINY = Path(__file__).parents[1] / "examples/models/tiny-flash-next/tiny-flash-next-IQ3_XXS-00001-of-00002.gguf"


# ---- cards


def test_cards_are_found_by_any_usual_spelling():
    for name in ("RTX 5070", "NVIDIA GeForce RTX 5070", "rtx5070", "GeForce RTX 5070"):
        card = card_by_name(name)
        assert (card.name, card.vram_bytes, card.bandwidth_gbps) == ("RTX 5070", 12 * GIB, 672.0)
    assert card_by_name("RTX 5070 Ti").vram_bytes == 16 * GIB
    assert card_by_name("RTX 4060Ti 16 GB").vram_bytes == 16 * GIB


def test_driver_names_are_matched_with_their_memory():
    assert find_card("NVIDIA GeForce RTX 4060 Ti", 16380 << 20).name == "RTX 4060 Ti 16GB"
    assert find_card("NVIDIA GeForce RTX 4060 Ti", 8188 << 20).name == "RTX 4060 Ti"
    assert find_card("NVIDIA H200", 143771 << 20).name == "H200"
    assert find_card("NVIDIA A100-SXM4-80GB", 81920 << 20).name == "A100 80GB"
    assert find_card("NVIDIA GeForce RTX 4060 Ti", 40 << 30) is None, "a card whose memory differs is another card"
    assert find_card("Radeon RX 7900", 24 << 30) is None


def test_unknown_card_names_the_closest():
    with pytest.raises(BadArgument, match="RTX 5070") as refused:
        card_by_name("RTX 507")
    assert f"one of {len(known_cards())}, as " in refused.value.needed and "..." not in str(refused.value)
    listed = Path(refused.value.advice.removeprefix("All are listed in ").partition(". ")[0])
    assert listed.name == "cards.json" and listed.is_file()


def test_every_known_card_is_plausible_and_named_once():
    cards = known_cards()
    assert len({c.name for c in cards}) == len(cards) >= 40
    for c in cards:
        assert 4 * GIB <= c.vram_bytes <= 200 * GIB and 150 < c.bandwidth_gbps < 6000 and c.capability >= (7, 5)
        assert find_card(c.name) == c
    assert 50 < link_gbps(5, 16) < 55 and link_gbps(4, 8) == pytest.approx(link_gbps(5, 16) / 4, rel=0.01)


# ---- described machines


def test_describe_fills_in_a_known_card():
    m = Machine.describe(gpu="RTX 4090", ram_gib=64, cores=16)
    (gpu,) = m.gpus
    assert gpu.total_bytes == 24 * GIB and gpu.free_bytes < gpu.total_bytes and gpu.link == (4, 16)
    assert m.ram_total_bytes == 64 * GIB and m.ram_available_bytes < m.ram_total_bytes
    assert m.described and m.usable_cores == 16 and "RTX 4090" in m.name


def test_describe_without_a_card_and_with_a_card_of_a_size():
    assert Machine.describe(ram_gib=16).gpus == ()
    (gpu,) = Machine.describe(vram_gib=11, vram_gbps=500, link_gbps=10).gpus
    assert (gpu.total_bytes, gpu.vram_gbps, gpu.link_gbps) == (11 * GIB, 500, 10)


@pytest.mark.parametrize(
    "bad",
    [
        {"vram_gib": 0},
        {"ram_gib": -1},
        {"cores": 0},
        {"cpu_tier": "sse"},
        {"vram_gbps": 5},
        {"vram_gib": 8, "vram_free_gib": 9},
        {"ram_gib": 8, "ram_available_gib": 9},
    ],
)
def test_describe_refuses_nonsense(bad):
    with pytest.raises(BadArgument):
        Machine.describe(**bad)


# ---- this machine


def test_here_reads_plausible_facts_without_cupy():
    import sys

    had = "cupy" in sys.modules
    m = Machine.here(TINY, measure=True)
    assert ("cupy" in sys.modules) == had, "facts are read without importing CuPy"
    assert 0 < m.ram_available_bytes <= m.ram_total_bytes
    assert 1 <= m.usable_cores <= m.logical_cores
    assert m.cpu_tier in machine.TIERS and m.page_bytes in (4096, 16384, 65536)
    assert 0.5 < m.ram_gbps < 2000 and m.ram_gbps_measured
    assert m.disk is not None and m.disk.free_bytes > 0
    assert m.gpus or m.gpu_problem


@pytest.mark.parametrize(
    ("features", "tier"),
    [
        ({"avx", "avx2", "fma", "f16c"}, "avx2"),
        ({"sse2"}, "portable"),
        ({"avx2", "fma", "f16c", "avx512f", "avx512bw"}, "avx2"),
        (None, "avx512"),
    ],
)
def test_cpu_tier_is_that_of_the_kernels_rule(monkeypatch, features, tier):
    if features is None:
        features = tiers._NEEDS[512]
    monkeypatch.setattr(tiers, "target_features", lambda: frozenset(features))
    assert machine.cpu_tier() == tier
    assert machine.TIERS == tuple(machine.TIER_NAMES[t] for t in tiers.TIERS)


def test_kernel_tier_is_the_one_that_is_asked_for(monkeypatch):
    monkeypatch.setenv(tiers.VARIABLE, "0")
    assert machine.kernel_tier() == "portable" and machine.cpu_tier() in machine.TIERS


# ---- control groups


def _tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_cgroup_v2_takes_the_tightest_limit_and_counts_cache_as_free(tmp_path):
    _tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            "cg/outer/inner/memory.max": "max",
            "cg/outer/inner/memory.current": "100",
            "cg/outer/memory.max": "1000",
            "cg/outer/memory.current": "700",
            "cg/outer/memory.stat": "anon 300\ninactive_file 250\nactive_file 150\n",
        },
    )
    assert probes.cgroup_memory(tmp_path / "cg", tmp_path / "proc") == (1000, 700)


def test_cgroup_v1_and_no_limit(tmp_path):
    _tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/x\n3:memory:/docker/a\n",
            "cg/memory/docker/a/memory.limit_in_bytes": "2000",
            "cg/memory/docker/a/memory.usage_in_bytes": "500",
            "cg/memory/memory.limit_in_bytes": str(2**63 - 4096),
            "cg/memory/memory.usage_in_bytes": "9",
        },
    )
    assert probes.cgroup_memory(tmp_path / "cg", tmp_path / "proc") == (2000, 1500)
    assert probes.cgroup_memory(tmp_path / "nothing", tmp_path / "nowhere") is None


def test_container_limit_bounds_the_machine(monkeypatch):
    monkeypatch.setattr(probes, "cgroup_memory", lambda: (3 << 30, 1 << 30))
    m = Machine.here()
    assert m.cgroup_limit_bytes == 3 << 30 and m.ram_available_bytes <= 1 << 30


# ---- small probes


def test_block_device_reads_the_partition_s_parent(tmp_path, monkeypatch):
    device = os.stat(tmp_path).st_dev
    disk = tmp_path / "sys/devices/sda"
    _tree(disk, {"queue/rotational": "1", "sda1/partition": "1"})
    link = tmp_path / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    link.parent.mkdir(parents=True)
    link.symlink_to(disk / "sda1")
    assert probes.block_device(tmp_path, tmp_path / "sys") == ("sda", True)
    assert probes.block_device(tmp_path, tmp_path / "nowhere") is None
    assert probes.block_device(tmp_path / "absent") is None


def test_wsl_and_huge_pages(tmp_path):
    _tree(
        tmp_path,
        {
            "version": "Linux version 5.15 Microsoft-standard-WSL2",
            "kernel/mm/transparent_hugepage/enabled": "always madvise [never]",
        },
    )
    assert probes.is_wsl(tmp_path) and not probes.is_wsl(tmp_path / "none")
    assert probes.huge_pages(tmp_path) == "never" and probes.huge_pages(tmp_path / "none") is None


def test_random_reads_are_timed_and_refuse_what_is_too_small(tmp_path):
    file = tmp_path / "data"
    file.write_bytes(os.urandom(1 << 20))
    median, slow = probes.random_read_us(file, reads=16)
    assert 0 < median <= slow < 1e7
    file.write_bytes(b"x")
    assert probes.random_read_us(file) is None and probes.random_read_us(tmp_path / "absent") is None


# ---- the driver's library


class _FakeDriver:
    """Answers like the driver's library; `broken` calls return an error."""

    def __init__(self, broken=()):
        self.broken = set(broken)

    def __getattr__(self, name):
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*args):
            if name in self.broken:
                return 9
            return getattr(self, "_" + name, lambda *a: 0)(*args)

        return call

    def _nvmlSystemGetDriverVersion(self, text, n):
        text.value = b"580.1"
        return 0

    def _nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 1
        return 0

    def _nvmlDeviceGetMemoryInfo(self, handle, memory):
        memory._obj.total, memory._obj.free = 12227 << 20, 11000 << 20
        return 0

    def _nvmlDeviceGetName(self, handle, text, n):
        text.value = b"NVIDIA GeForce RTX 5070"
        return 0

    def _nvmlDeviceGetCudaComputeCapability(self, handle, major, minor):
        major._obj.value, minor._obj.value = 12, 0
        return 0

    def _nvmlDeviceGetNumGpuCores(self, handle, cores):
        cores._obj.value = 6144
        return 0

    def _nvmlDeviceGetMaxPcieLinkGeneration(self, handle, value):
        value._obj.value = 5
        return 0

    def _nvmlDeviceGetMaxPcieLinkWidth(self, handle, value):
        value._obj.value = 8
        return 0


def test_gpu_facts_come_from_the_driver():
    report = read_gpus(_FakeDriver())
    assert report.driver == "580.1" and report.problem is None
    (gpu,) = report.gpus
    assert (gpu.name, gpu.capability, gpu.link) == ("NVIDIA GeForce RTX 5070", (12, 0), (5, 8))
    facts = machine._gpu_facts(gpu)
    assert facts.vram_gbps == 672 and facts.rates_known and facts.link_gbps == pytest.approx(link_gbps(5, 8))
    assert gpu.multiprocessors == facts.multiprocessors == 48
    (silent,) = read_gpus(_FakeDriver(["nvmlDeviceGetNumGpuCores"])).gpus
    assert silent.multiprocessors is None and machine._gpu_facts(silent).multiprocessors == 48, "known by name"


class _FakeCuda:
    """libcuda of a process that has a context on device 1 of 2."""

    def __init__(self, started=True):
        self.started = started

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = ordinal.value
        return 0 if self.started and ordinal.value < 2 else 3

    def cuDevicePrimaryCtxGetState(self, device, flags, active):
        active._obj.value = device.value == 1
        return 0


def test_a_context_that_is_there_is_seen_and_none_is_made():
    assert [has_context(i, _FakeCuda()) for i in range(3)] == [False, True, False]
    assert not has_context(1, _FakeCuda(started=False))
    assert not has_context(0, ctypes.CDLL(None)), "no driver at all"


def test_a_context_grows_with_the_card():
    """The two cards that were measured, and one in between; a card that nobody knows counts as the smaller."""
    assert [context_bytes(n) >> 20 for n in (48, 132, None)] == [352, 527, 352]
    assert context_bytes(48) < context_bytes(80) < context_bytes(132) < context_bytes(170)
    assert all(10 <= c.multiprocessors <= 200 for c in known_cards())


@pytest.mark.parametrize(
    "call", ["nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetMemoryInfo"]
)
def test_a_broken_driver_gives_no_gpu_and_a_reason(call):
    report = read_gpus(_FakeDriver([call]))
    assert report.gpus == () and report.problem


def test_a_card_that_tells_little_is_still_a_card():
    report = read_gpus(
        _FakeDriver(["nvmlDeviceGetName", "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetMaxPcieLinkWidth"])
    )
    (gpu,) = report.gpus
    assert (gpu.name, gpu.capability, gpu.link) == ("unknown GPU", None, None)
    facts = machine._gpu_facts(gpu)
    assert not facts.rates_known and facts.vram_gbps > 0 and facts.link_gbps > 0


def test_a_library_that_is_no_driver_is_a_reason_not_a_crash():
    report = read_gpus(ctypes.CDLL(None))
    assert report.gpus == () and "not usable" in report.problem


def test_visible_devices_are_respected(monkeypatch):
    two = Machine.describe(vram_gib=8).gpus * 2
    two = (two[0], dataclasses.replace(two[1], index=1, name="second"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [g.name for g in machine._visible(two)] == ["second"] and machine._visible(two)[0].index == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine._visible(two) == ()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert machine._visible(two) == ()
    for odd in ("--3", "²", "1_0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", odd)
        assert machine._visible(two) == two, "no number"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert machine._visible(two) == two


# ---- doctor


def test_doctor_reports_and_its_json_is_json():
    report = health.examine(TINY)
    assert report.problems == []
    for topic in ("versions", "CPU", "RAM", "GPU", "memory limits", "model disk"):
        assert topic in report.facts and topic in report.text()
    assert report.facts["model disk"]["4 KiB read, median us"] > 0
    assert json.loads(json.dumps(report.to_json()))["strata_doctor"] == 1


@pytest.mark.parametrize("lost", ["versions", "nvrtc"])
def test_doctor_survives_a_failing_probe_of_its_own(monkeypatch, lost):
    def broken():
        raise OSError("no such thing here")

    monkeypatch.setattr(health, lost, broken)
    assert any("no such thing here" in p for p in health.examine(TINY).problems)


@pytest.mark.parametrize(
    "lost",
    [
        "memlock_limit_bytes",
        "huge_pages",
        "random_read_us",
        "numa_nodes",
        "cpu_name",
        "cgroup_memory",
        "ram_read_gbps",
        "block_device",
        "is_wsl",
        "last_level_cache_bytes",
    ],
)
def test_doctor_survives_a_system_without_a_probe(monkeypatch, lost):
    def broken(*_, **__):
        raise RuntimeError("no such thing here")

    monkeypatch.setattr(probes, lost, broken)
    report = health.examine(TINY)
    assert any("no such thing here" in p for p in report.problems)
    assert json.dumps(report.to_json()) and report.text()


def test_doctor_survives_a_place_that_is_not_there(tmp_path):
    for place in (tmp_path, tmp_path / "absent" / "model.gguf"):
        assert health.examine(place).text()


def _advice(m, **facts):
    given = {
        "compiler": "12.9",
        "lock": None,
        "pages": "madvise",
        "times": ("x", 80.0, 100.0),
        "found": {"cupy-cuda12x": "14"},
    }
    return {a.what: a for a in health.advise(m, **{**given, **facts})}


def test_doctor_names_what_is_slow_and_what_to_do():
    good = Machine.describe(gpu="RTX 4090", ram_gib=64, cpu_tier="avx512")
    assert _advice(good) == {}
    assert "experts on the CPU" in _advice(dataclasses.replace(good, cpu_tier="portable", kernel_tier="portable"))
    held = _advice(dataclasses.replace(good, kernel_tier="avx2"))
    assert tiers.VARIABLE in held["everything on the CPU"].do
    assert "everything" in _advice(good, found={})
    assert "GPU start" in _advice(good, compiler=None)
    assert "n-gram rows" in _advice(good, times=("x", 900.0, 5000.0))
    assert "pinned experts" in _advice(good, lock=64 << 10)
    assert "the PCIe share" in _advice(dataclasses.replace(good, wsl=True))
    assert "large models" in _advice(dataclasses.replace(good, ram_available_bytes=4 << 30))
    assert "experts in RAM" in _advice(good, pages="never")
    slow_disk = dataclasses.replace(good, disk=machine.Disk("/models", "sda", True, 1 << 40))
    assert "SSD" in _advice(slow_disk)["n-gram rows and loading"].do
    narrow = dataclasses.replace(good, gpus=(dataclasses.replace(good.gpus[0], link=(3, 4)),))
    assert any("PCIe 3 x4" in a.why for a in _advice(narrow).values())


def test_doctor_command():
    app = Typer()
    app.command()(doctor_cli.command)
    result = CliRunner().invoke(app, [str(TINY), "--json"])
    assert result.exit_code == 0 and json.loads(result.output)["facts"]["CPU"]["usable cores"] >= 1
    assert CliRunner().invoke(app, []).exit_code == 0
