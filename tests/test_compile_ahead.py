"""The processes that help a first load: when they are started, what they compile, that they end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from strata.base.compiled import CFunction, is_kept
from strata.base.errors import StrataError
from strata.cpu.qsa_attend import qsa_attend
from strata.runtime import compile_ahead
from strata.runtime.compile_ahead import EXPERTS, MODULES, SAMPLING, compile_parts, second_process, shares


class Process:
    """Stands for a process that was started; `done` is what happened to it."""

    def __init__(self, command, env, **streams):
        self.command, self.env, self.streams, self.done = command, env, streams, []
        STARTED.append(self)

    def wait(self, limit=None):
        self.done.append("wait")

    def kill(self):
        self.done.append("kill")


STARTED: list[Process] = []


@pytest.fixture()
def cold(monkeypatch):
    """Nothing is compiled yet, and two CPUs are there."""
    STARTED.clear()
    monkeypatch.setattr(compile_ahead, "is_kept", lambda function: False)
    monkeypatch.setattr(compile_ahead, "usable_cores", lambda facts: 2)
    monkeypatch.setattr(subprocess, "Popen", Process)


@pytest.mark.parametrize("cpu", [True, False])
def test_a_cold_load_starts_one_that_ends(cold, cpu):
    with second_process(cpu) as finish:
        finish()
    (process,) = STARTED
    assert process.command[1:] == ["-m", "strata.runtime.compile_ahead", SAMPLING, *(MODULES if cpu else ())]
    root = process.env["PYTHONPATH"].split(os.pathsep)[0]
    assert os.path.isdir(os.path.join(root, "strata")) and set(process.streams.values()) == {subprocess.DEVNULL}
    assert process.done == ["wait", "kill", "wait"]
    with pytest.raises(StrataError), second_process(cpu):
        raise StrataError("the load failed")
    assert STARTED[1].done == ["kill", "wait"]


@pytest.mark.parametrize("cores, started", [(3, 2), (5, 4), (64, 4)])
def test_more_cores_more_processes(cold, monkeypatch, cores, started):
    """Everything is compiled by one of them, and by one alone; where only sampling is left, one is enough."""
    monkeypatch.setattr(compile_ahead, "usable_cores", lambda facts: cores)
    with second_process(True) as finish:
        finish()
    dealt = [part for process in STARTED for part in process.command[3:]]
    assert len(STARTED) == started and sorted(dealt) == sorted([SAMPLING, *MODULES, *EXPERTS])
    assert all(process.done == ["wait", "kill", "wait"] for process in STARTED)
    STARTED.clear()
    with second_process(False):
        pass
    assert [process.command[3:] for process in STARTED] == [[SAMPLING]]


def test_long_parts_are_in_different_shares():
    first = [share[0] for share in shares(True, 4)]
    assert first == [SAMPLING, "gated_delta", "qsa_attend", "expert_jobs"]


def test_where_none_helps_none_is_started(cold, monkeypatch):
    def nothing_started():
        with second_process(True) as finish:
            finish()
        return not STARTED

    for holder, name, value in (
        (compile_ahead, "is_kept", lambda function: True), (compile_ahead, "is_kept", lambda function: None),
        (compile_ahead, "usable_cores", lambda facts: 1), (sys, "executable", "/usr/bin/uwsgi"),
        (sys, "executable", None), (sys, "frozen", True), (subprocess, "Popen", _fails),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(holder, name, value, raising=False)
            assert nothing_started(), (name, value)
    assert not nothing_started()


def _fails(*command, **options):
    raise OSError("no more processes")


def test_it_compiles_the_steps_of_its_modules(monkeypatch):
    touched = []
    monkeypatch.setattr(CFunction, "address", property(lambda self: touched.append(self.__qualname__)))
    compile_parts([SAMPLING])
    assert touched == []
    compile_parts([*MODULES, *EXPERTS])
    assert {"experts_chunk", "qsa_attend", "qsa_select", "qsa_append", "qsa_index", "gdn_commit"} <= set(touched)
    assert {"experts", "ngram_mix"} <= set(touched)
    assert len(touched) == len(set(touched)) >= len(MODULES) + len(EXPERTS)


def _never_compiled(a):
    return a


def test_what_lies_on_disk():
    assert qsa_attend.address
    assert is_kept(qsa_attend.py_func) is True
    assert is_kept(_never_compiled) is False
