"""Weights are used where they lie in the file's mapping: a loaded and used model needs little more than that."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.conftest import ROOT

GIB = 1 << 30
SCRIPT = '''
import json, sys
import numpy as np
import strata

def status(field):
    """Bytes; unlike the peak of getrusage, VmHWM does not count the process that started this one."""
    for line in open("/proc/self/status"):
        if line.startswith(field):
            return int(line.split()[1]) * 1024

with strata.load(sys.argv[1], context=4096, sessions=2, threads=2) as model:
    loaded = status("RssAnon:")
    answer = model.generate(np.arange(600), max_tokens=8, ignore_eos=True)
    model.logits(np.arange(100, 120))
    used = status("RssAnon:")
    lines = model.stats()["memory_bytes"]
    print(json.dumps({
        "peak": status("VmHWM:"), "loaded": loaded, "used": used,
        "lines": lines, "tokens": len(answer.tokens),
    }))
'''


def test_resident_memory(tiny_path):
    """In a process of its own: peak <= mapped file + 1 GiB; no copy of any matrix among the model's own memory."""
    command = [sys.executable, "-c", SCRIPT, tiny_path]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    mapped = found["lines"].pop("weights (mapped)")
    assert mapped > 15 << 20
    print({k: f"{v / 2**20:.1f} MiB" for k, v in found.items() if isinstance(v, int)})
    assert found["tokens"] == 8
    assert found["peak"] <= mapped + GIB
    # Dequantised to float32 the weights would be 150 MiB; answering must not add memory beyond Python's own noise.
    assert found["used"] - found["loaded"] <= 64 << 20
    assert all(n >= 0 for n in found["lines"].values())
