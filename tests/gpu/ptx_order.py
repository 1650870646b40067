"""What kernels do before they wait for their inputs, read from their PTX: every path from the entry is followed."""

from __future__ import annotations

import re

from strata.gpu.compile import OPTIONS, headers_of
from strata.gpu.launch import Source

_ENTRY = re.compile(r"\.entry (\w+)\s*\([^)]*\)[^{]*\{(.*?)\n\}", re.DOTALL)
_LABEL = re.compile(r"^(\$?[\w$]+):")
_WRITES = ("st.global", "st.volatile", "st.release", "st.relaxed", "red.", "atom.")
_HARMLESS_LOADS = ("ld.param", "ld.const", "ld.shared", "ld.global.nc", "ld.local", "ld.relaxed.gpu.global")
"""Of parameters, constants and shared memory; through the read-only path; `peek`."""


def ptx_of(source: Source, arch: int) -> dict[str, str]:
    """Name expression -> body of the kernel in PTX."""
    from cupy.cuda import nvrtc

    headers = headers_of(source.path)
    texts, names = (tuple(s.encode() for s in side) for side in (headers.values(), headers))
    program = nvrtc.createProgram(source.path.read_text(encoding="utf-8"), source.file, texts, names)
    try:
        for name in source.instances:
            nvrtc.addNameExpression(program, name)
        options = tuple(o for o in OPTIONS if "ptxas" not in o)
        nvrtc.compileProgram(program, (f"-arch=compute_{arch}", *options))
        lowered = {nvrtc.getLoweredName(program, name): name for name in source.instances}
        text = nvrtc.getPTX(program)
    finally:
        nvrtc.destroyProgram(program)
    lowered = {k.decode() if isinstance(k, bytes) else k: v for k, v in lowered.items()}
    text = text.decode() if isinstance(text, bytes) else text
    return {lowered[symbol]: body for symbol, body in _ENTRY.findall(text) if symbol in lowered}


def _statements(body: str) -> list[str]:
    """Instructions and labels ("name:") of a kernel, in order, without scopes and directives."""
    out = []
    for line in re.sub(r"//[^\n]*", "", body).splitlines():
        line = line.strip().strip("{}").strip()
        label = _LABEL.match(line)
        if label:
            out.append(label[1] + ":")
            line = line[label.end() :].strip()
        out += [part.strip() for part in line.split(";") if part.strip() and not part.strip().startswith(".")]
    return out


def _is_kind(operation: str, kinds: tuple[str, ...]) -> bool:
    return operation.startswith(kinds)


def too_early(body: str) -> list[str]:
    """Statements that a path reaches before `griddepcontrol.wait` and that must come after it: global stores and
    atomics, loads of what other kernels may write, the end of the kernel. Empty: every path waits first."""
    code = _statements(body)
    at = {s[:-1]: i for i, s in enumerate(code) if s.endswith(":")}
    found: list[str] = []
    seen: set[int] = set()
    waiting = [0]
    while waiting:
        i = waiting.pop()
        if i in seen:
            continue
        seen.add(i)
        if i == len(code):
            found.append("the end of the body")
            continue
        statement = code[i]
        guarded = statement.startswith("@")
        operation = statement.partition(" ")[2].strip() if guarded else statement
        if operation == "griddepcontrol.wait" and not guarded:
            continue
        loads = operation.startswith(("ld.", "ldu.")) and not _is_kind(operation, _HARMLESS_LOADS)
        ends = operation.startswith(("ret", "exit"))
        if loads or ends or _is_kind(operation, _WRITES) or re.match(r"st\.(?!shared|local|param)", operation):
            found.append(statement)
        assert not operation.startswith(("brx", "call")), f"a path that is not followed: {statement}"
        if operation.startswith("bra"):
            waiting.append(at[operation.split()[-1]])
        if guarded or not (ends or operation.startswith("bra")):
            waiting.append(i + 1)
    return found


def waits(body: str) -> bool:
    """Whether a kernel waits anywhere."""
    return "griddepcontrol.wait" in body


def lets_next_start(body: str) -> bool:
    """Whether a kernel lets the next one start before its own end."""
    return "griddepcontrol.launch_dependents" in body
