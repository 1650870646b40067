"""The doctor beside things that cannot be looked at."""

from pathlib import Path

import pytest

from strata.base.errors import FileError
from strata.planner import health
from strata.planner.machine import TIERS


def test_doctor_reads_beside_what_it_may_not_look_at(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(bytes(1 << 20))
    (tmp_path / "locked").touch()
    seen = Path.stat

    def guarded(path, **options):
        if path.name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return seen(path, **options)

    monkeypatch.setattr(Path, "stat", guarded)
    report = health.examine(tmp_path)
    assert report.problems == [] and report.facts["model disk"]["probed file"] == "model.gguf"


def test_doctor_does_not_praise_what_it_has_not_seen():
    assert health.Report().text().endswith("no slow part found.")
    assert "no slow part found in what could be looked at." in health.Report(problems=["machine: gone"]).text()


@pytest.mark.parametrize("wanted", ["fast", "-1"])
def test_doctor_advises_on_a_tier_that_is_none(tmp_path, monkeypatch, wanted):
    monkeypatch.setenv("STRATA_CPU_TIER", wanted)
    report = health.examine(tmp_path)
    assert report.problems == [] and report.facts["CPU"]["tier of the CPU"] in TIERS and "RAM" in report.facts
    assert report.facts["CPU"]["kernel tier"] == "none, as STRATA_CPU_TIER asks"
    (found,) = [a for a in report.advice if a.what == "every load"]
    assert f"STRATA_CPU_TIER names no kernel tier: found '{wanted}', needed one of portable, " in found.why
    assert found.do == "unset STRATA_CPU_TIER"
    assert "Error" not in report.text() and report.text().index("slow: every load") > 0


def test_what_a_probe_refuses_is_a_plain_sentence(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise FileError("the file is odd", found=1, needed=2)

    def break_down(*_):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(health.Machine, "here", refuse)
    monkeypatch.setattr(health.probes, "huge_pages", break_down)
    assert health.examine(tmp_path).problems == ["machine: the file is odd; found 1; needed 2",
                                                 "huge pages: ZeroDivisionError: by zero"]  # fmt: skip


def test_doctor_lists_a_kernel_cache_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr("numba.config.CACHE_DIR", "")
    monkeypatch.setenv("STRATA_CACHE", str(tmp_path / "new"))
    assert health._cache_advice() == [] and list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    monkeypatch.setenv("STRATA_CACHE", str(tmp_path / "file"))
    report = health.examine(tmp_path)
    (found,) = [a for a in report.advice if a.what == "every start"]
    assert "is no folder" in found.why and "STRATA_CACHE" in found.do
