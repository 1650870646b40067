"""The doctor beside things that cannot be looked at."""

from pathlib import Path

from strata.planner import health


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
