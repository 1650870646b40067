"""What a load tells while it works, and the line that the command line makes of it."""

from __future__ import annotations

import contextlib
import re
import threading

import pytest

import strata
from strata.arch.flash_next.geometry import read_geometry
from strata.arch.flash_next.programs import build_programs
from strata.base.progress import COMPILING, SELF_TEST, UPLOADING, LoadProgress, listening, report
from strata.cli import flags, output
from strata.cpu.weights import Weights
from strata.gpu.backend import GpuBackend
from strata.pack.experts import expert_layout
from strata.pack.gguf_file import GgufFile
from strata.pack.tensors import Tensors
from tests.gpu.host_device import HostDevice
from tests.gpu.run_on_cpu import needs_compiler
from tests.session_probe import CONTEXT, write_model
from tests.test_cli import call


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def test_a_load_tells_every_kind_of_op_and_every_format(path, monkeypatch):
    formats = set()
    layout = Weights.layout

    def asked(self, name):
        formats.add(self.tensors.info(name).format.name)
        return layout(self, name)

    monkeypatch.setattr(Weights, "layout", asked)
    told = []
    with strata.load(path, context=CONTEXT, threads=1, on_progress=told.append) as model:
        programs = model._backend.programs
        kinds = {op.kind for program in programs.all() for op in program.ops}
    assert all(isinstance(p, LoadProgress) for p in told)
    assert [(p.name, p.done, p.total) for p in told[-2:]] == [("sampling", 0, 1), ("", 1, 1)]
    compiling = [p for p in told[:-2] if p.what == COMPILING]
    total = len(kinds) + len(formats)
    assert {p.total for p in compiling} == {total}
    assert [p.done for p in compiling] == list(range(total + 1))
    assert {p.name for p in compiling[:-1]} == kinds | formats and compiling[-1].name == ""
    assert {p.name for p in told if p.what == SELF_TEST} == formats


def test_who_listens_may_end_the_load(path):
    before = threading.active_count()

    def stop(told):
        if told.name == "linear":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        strata.load(path, context=CONTEXT, threads=2, on_progress=stop)
    assert threading.active_count() == before
    strata.load(path, context=CONTEXT, threads=1).close()  # and nobody listens any more


def test_reports_go_to_the_thread_that_loads():
    mine, inner, other = [], [], []
    report(COMPILING, 0, 1)
    with listening(mine.append):
        report(COMPILING, 0, 2, "a")
        thread = threading.Thread(target=report, args=(COMPILING, 1, 2, "b"))
        thread.start()
        thread.join()
        with listening(inner.append), contextlib.suppress(ValueError):
            report(COMPILING, 0, 3)
            raise ValueError
        report(COMPILING, 2, 2)
    report(COMPILING, 0, 1)
    assert [p.done for p in mine] == [0, 2] and [p.total for p in inner] == [3] and other == []


@needs_compiler
def test_uploads_are_told_in_bytes(path):
    told = []
    with GgufFile(path) as gguf:
        g = read_geometry(gguf)
        with listening(told.append):
            GpuBackend(Tensors(gguf), g, expert_layout(gguf, g.L), build_programs(g, 256, "f16"), HostDevice())
    uploads = [p for p in told if p.what == UPLOADING]
    ends = [i for i, p in enumerate(uploads) if p.done == p.total]
    dense, experts = uploads[: ends[0] + 1], uploads[ends[0] + 1 :]
    for part in (dense, experts):
        assert part[0].done == 0 and len({p.total for p in part}) == 1
        assert [p.done for p in part] == sorted(p.done for p in part) and part[-1].done == part[-1].total > 0
    assert experts[0].name == "experts of layer 0"


# ---- the command line


def test_a_terminal_sees_one_line_that_changes(path, monkeypatch):
    lines = []

    @contextlib.contextmanager
    def watched(text):
        lines.append(text)
        yield lines.append

    monkeypatch.setattr(flags, "working", watched)
    with flags.loaded(path, context=CONTEXT, threads=1):
        pass
    assert lines[0] == "loading model.gguf"
    assert "loading model.gguf: compiling sampling" in lines
    assert any(re.fullmatch(r"loading model\.gguf: self-test [A-Z]\w+, \d+ of \d+", line) for line in lines)
    assert output.progress_text(LoadProgress(UPLOADING, 3 << 20, 5 << 30, "x")) == "uploading, 3 of 5,120 MiB"


def test_no_terminal_sees_nothing(path):
    strata.load(path, context=CONTEXT, threads=1).close()  # a kernel that is not kept yet would be told
    done = call("run", "ab", "-n", "1", "--model", str(path), "--threads", "1")
    assert (done.exit_code, done.stderr) == (0, "")
