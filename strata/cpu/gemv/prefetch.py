"""How far ahead of their use the bytes of a matrix are asked for, and into which cache: the kernels' own choice, and
others to be measured against it. The results of a kernel do not depend on it."""

from __future__ import annotations

from dataclasses import dataclass

from strata.base.errors import need
from strata.cpu.simd import Simd, Value, i64
from strata.cpu.tiers import needs_asking

LINE_BYTES = 64
MOST_BYTES, MOST_STEPS = 1 << 20, 64
NONE = "none"


@dataclass(frozen=True)
class Ahead:
    """Prefetches n_bytes behind a step of a row, into the cache of a level (1 to 3) and those below it.

    steps  0: every line of the step; else one line in every so many steps, a power of two
    """

    level: int
    n_bytes: int
    steps: int = 0

    def __str__(self) -> str:
        return f"{self.level}:{self.n_bytes}" + (f"/{self.steps}" if self.steps else "")


Prefetch = tuple[Ahead, ...]
"""All that a kernel asks for at a step; empty: nothing."""

NEAR: Prefetch = (Ahead(1, 4096),)
"""Every line, far enough for memory to answer: the hardware's own prefetcher stops at pages."""

FAR: Prefetch = (Ahead(2, 8192), Ahead(1, 1024))
"""Every line into the second cache, two pages ahead, and from there into the first just before its use."""

HINTS: Prefetch = (Ahead(2, 2048, steps=4),)
"""Of kernels that only hint: the processor fetches the lines between, hints lead it over the ends of pages."""


FAR_FORMATS = ("Q4_K", "Q5_K", "IQ4_XS")
"""Formats that ask FAR on a processor that follows by itself (a Zen 4)."""
FAR_FORMATS_ASKING = ("Q4_K", "Q5_K", "Q6_K", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")
"""Formats that ask FAR where kernels must ask for every line (a Xeon)."""


def asks_far(name: str) -> bool:
    """Whether the kernel of a format for one activation row, tier 512, asks FAR.

    Measured from memory. On a Zen 4, in long products over huge pages and in whole layers over small ones, FAR_FORMATS
    gain 1 to 8 % in every run. Formats of small blocks gain up to 12 % in the one and lose up to 4 % in some runs of
    the other; formats with more work a byte, and kernels of several rows, lose up to 15 % in most layers. In tier 256
    nothing gains. On a Xeon layers of FAR_FORMATS_ASKING gain 1 to 9 % with 8, 12 and 14 threads; those of Q2_0, Q3_K,
    IQ2_S, IQ3_XXS and of four rows do not.
    """
    return name in (FAR_FORMATS_ASKING if needs_asking() else FAR_FORMATS)


def text_of(prefetch: Prefetch) -> str:
    """2:8192+1:1024, as `prefetch_of` reads it."""
    return "+".join(map(str, prefetch)) or NONE


def prefetch_of(text: str) -> Prefetch:
    """LEVEL:BYTES for every line, LEVEL:BYTES/STEPS for one line in so many steps, several joined by +, or none.

    BadArgument if the text is something else.
    """
    return () if text == NONE else tuple(_ahead(part, text) for part in text.split("+"))


def suffix_of(asked: str) -> str:
    """A prefetch's text as the end of a function's name, which is part of file names."""
    return asked.translate({ord(":"): "_", ord("+"): "_and_", ord("/"): "_in_"})


def _ahead(part: str, text: str) -> Ahead:
    level, colon, rest = part.partition(":")
    n_bytes, slash, steps = rest.partition("/")
    words = [level, n_bytes, steps] if slash else [level, n_bytes]
    good = bool(colon) and all(w.isascii() and w.isdecimal() and len(w) < 9 for w in words)
    need(good, "the prefetch cannot be read", found=repr(text),
         needed="LEVEL:BYTES, as 2:8192 or 2:8192+1:1024, or none")  # fmt: skip
    found = Ahead(int(level), int(n_bytes), int(steps) if slash else 0)
    need(1 <= found.level <= 3, "there is no such cache level", found=repr(text), needed="1, 2 or 3")
    need(LINE_BYTES <= found.n_bytes <= MOST_BYTES and found.n_bytes % LINE_BYTES == 0,
         "the prefetch distance is out of range", found=repr(text),
         needed=f"a multiple of {LINE_BYTES} bytes, at most {MOST_BYTES}")  # fmt: skip
    n = found.steps
    need(not slash or (1 <= n <= MOST_STEPS and n & (n - 1) == 0), "the prefetch steps are out of range",
         found=repr(text), needed=f"a power of two, at most {MOST_STEPS}")  # fmt: skip
    return found


def emit_prefetch(s: Simd, prefetch: Prefetch, place: Value, u: Value, step_bytes: int) -> None:
    """The prefetches of step u, whose bytes begin at `place`."""
    for ahead in prefetch:
        if not ahead.steps:
            for line in range(0, step_bytes, LINE_BYTES):
                s.prefetch(place, ahead.n_bytes + line, ahead.level)
        else:
            due = s.b.icmp_unsigned("==", s.b.and_(u, s.const(i64, ahead.steps - 1)), s.const(i64, 0))
            with s.b.if_then(due):
                s.prefetch(place, ahead.n_bytes, ahead.level)
