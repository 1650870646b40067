"""Settings that a calibration found faster, kept for one machine and one model file."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from strata.base.errors import FileError, need
from strata.base.numbers import shown
from strata.cpu.cores import MOST_THREADS
from strata.pack.gguf_file import shard_paths
from strata.pack.profile import write_atomic
from strata.planner.machine import Machine

log = logging.getLogger("strata")

VERSION = 1


@dataclass(frozen=True)
class Settings:
    """What a load may take instead of its own choice; None: its own choice is as good.

    threads   CPU threads
    pcie_num  share of missed experts for the link, in steps of 1/256
    """

    threads: int | None = None
    pcie_num: int | None = None

    def __post_init__(self) -> None:
        ranges = (("threads", self.threads, 1, MOST_THREADS), ("pcie_num", self.pcie_num, 0, 256))
        for name, value, least, most in ranges:
            good = value is None or (isinstance(value, int) and not isinstance(value, bool) and least <= value <= most)
            need(good, f"{name} is out of range", found=repr(value), needed=f"{least} to {most}")


def settings_path() -> Path:
    """The file: calibration.json in STRATA_CACHE, else in ~/.cache/strata."""
    base = os.environ.get("STRATA_CACHE")
    return (Path(base) if base else Path.home() / ".cache" / "strata") / "calibration.json"


def key_of(machine: Machine, model: str | Path) -> dict[str, Any]:
    """What settings are kept for. Any shard of a model stands for all of them. FileError where one is missing."""
    paths = shard_paths(model)
    try:
        stats = [path.stat() for path in paths]
    except OSError as error:
        raise FileError(f"cannot look at '{error.filename}'", found=error.strerror, needed="a model file") from error
    return {
        "cpu": machine.cpu_name,
        "cores": machine.usable_cores,
        "ram_bytes": machine.ram_total_bytes,
        "gpu": machine.gpus[0].name if machine.gpus else None,
        "file": paths[0].name,
        "file_bytes": sum(s.st_size for s in stats),
        "changed_ns": max(s.st_mtime_ns for s in stats),
    }


def remembered(machine: Machine, model: str | Path) -> Settings | None:
    """Settings kept for this machine and file, or None. A file that cannot be read counts as empty, with a warning."""
    key = key_of(machine, model)
    for entry in _entries():
        if entry.get("key") == key:
            try:
                return Settings(**entry["settings"])
            except (TypeError, KeyError, ValueError) as error:
                log.warning("settings in %s are not used: %s", settings_path(), error)
                return None
    return None


def remember(machine: Machine, model: str | Path, settings: Settings, measured: dict[str, Any] | None = None) -> Path:
    """Keep settings in place of earlier ones for the same machine and file; returns where. measured: plain values that
    they were chosen by, for people. FileError if the file cannot be written."""
    key = key_of(machine, model)
    entries = [e for e in _entries() if e.get("key") != key]
    _write([*entries, {"key": key, "settings": asdict(settings), "measured": measured or {}}])
    return settings_path()


def forget(machine: Machine, model: str | Path) -> bool:
    """Drop what is kept for this machine and file; True if there was anything."""
    key = key_of(machine, model)
    entries = _entries()
    kept = [e for e in entries if e.get("key") != key]
    if len(kept) < len(entries):
        _write(kept)
    return len(kept) < len(entries)


def _entries() -> list[dict[str, Any]]:
    path = settings_path()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["strata_calibration"] != VERSION:
            raise ValueError(f"version {data['strata_calibration']}")
        return [entry for entry in data["entries"] if isinstance(entry, dict)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("settings in %s are not used: %s", path, error)
        return []


def require_place() -> None:
    """Raise FileError where settings could not be kept, for who would measure for minutes first."""
    folder = settings_path().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        why = None if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written"
    except OSError as error:
        why = "a file" if folder.is_file() else error.strerror
    if why is not None:
        raise FileError("settings cannot be kept", found=f"{shown(str(folder))}: {why}",
                        needed="a folder that can be written", advice="Set STRATA_CACHE to one.")  # fmt: skip


def _write(entries: list[dict[str, Any]]) -> None:
    require_place()
    path = settings_path()
    write_atomic(path, json.dumps({"strata_calibration": VERSION, "entries": entries}, indent=1).encode())
