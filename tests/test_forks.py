"""A forked child has a copy of the model without its threads: it is told so, at once, whatever they were doing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.session_probe import write_model
from tests.test_cli import START_S, environment

_CHILD = """
import faulthandler, os, sys, time
import strata
from tests.session_probe import Paused, PROMPT, GREEDY, started

model = strata.load(sys.argv[1], context=800, sessions=3, threads=2)
other = model.session()
model.generate(PROMPT[:3], **GREEDY)
paused = Paused()
thread, outcome = started(model._default.read_logits, PROMPT, paused, "windows")
paused.reached.wait(60)  # the thread holds the session and the backend
stream = other.stream(PROMPT[:5], **GREEDY)
reader, chunks = started(list, stream)
while stream._working.acquire(blocking=False):  # until that thread is in the middle of the next chunk
    stream._working.release()
    time.sleep(0.001)
child = os.fork()
if child == 0:
    faulthandler.dump_traceback_later(30, exit=True)  # instead of a hang
    for call in (
        lambda: model.generate(PROMPT, wait=True), lambda: other.generate(PROMPT, wait=True), model.session,
        lambda: model.stream(PROMPT), model.stats, lambda: model.logits(PROMPT[:3]), other.checkpoint, other.export,
        lambda: next(stream), lambda: list(stream), stream.run,
    ):
        try:
            call()
        except strata.StrataError as error:
            assert "made in another process" in str(error) and str(os.getppid()) in str(error), error
        else:
            os._exit(3)
    stream.close()
    other.close()
    model.close()
    sys.exit(7)
paused.go.set()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
thread.join()
reader.join()
assert len(stream.result.tokens) == 12 and chunks[0][-1].finish_reason == "length"
assert outcome == [None], outcome
assert other.generate(PROMPT, **GREEDY).tokens == model.generate(PROMPT, **GREEDY).tokens
model.close()
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_of_a_busy_process(tmp_path):
    path = write_model(tmp_path)
    done = subprocess.run([sys.executable, "-c", _CHILD, str(path)], env=environment(), timeout=START_S,
                          capture_output=True, text=True)  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-3000:]
