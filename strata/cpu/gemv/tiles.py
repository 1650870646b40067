"""What the kernels for any number of activation rows share: the edges of their tiles, and transposing in registers."""

from __future__ import annotations

from strata.cpu.simd import Simd, Value, f32, i64

N_ARGS = 8
"""Arguments of such a kernel: w, w_stride, n_rows, act, K, T, out, out_stride."""


def lesser(s: Simd, x: Value, y: Value) -> Value:
    return s.b.select(s.b.icmp_signed("<", x, y), x, y)


class Tiles:
    """Matrix rows, activation rows and outputs of a kernel. Rows past the last stand for the last, and are not stored.

    record_bytes: from one activation row to the next. width: values of a vector of outputs.
    """

    def __init__(self, s: Simd, record_bytes: Value, width: int):
        self.s, self.b, self.width, self.record_bytes = s, s.b, width, record_bytes
        w, self.stride, self.n_rows, act, self.K, self.T, out, self.out_stride = s.args
        self.w, self.act, self.out = s.pointer(w), s.pointer(act), s.pointer(out)
        self.spare = s.scratch(4 * width)

    def const(self, n: int) -> Value:
        return self.s.const(i64, n)

    def blocks(self, count: Value, size: int) -> Value:
        return self.b.udiv(self.b.add(count, self.const(size - 1)), self.const(size))

    def _inside(self, first: Value, k: int, end: Value) -> Value:
        return lesser(self.s, self.b.add(first, self.const(k)), self.b.sub(end, self.const(1)))

    def rows(self, first: Value, n: int) -> list[Value]:
        """Pointers to n matrix rows."""
        return [self.s.at(self.w, self.b.mul(self._inside(first, k, self.n_rows), self.stride)) for k in range(n)]

    def xs(self, first: Value, n: int) -> list[Value]:
        """Pointers to n activation rows."""
        return [self.s.at(self.act, self.b.mul(self._inside(first, k, self.T), self.record_bytes)) for k in range(n)]

    def store(self, values: Value, i: Value, t: Value) -> None:
        """values, + 0.0, of matrix rows from i on and activation row t, where there are such rows."""
        s, b, n = self.s, self.b, values.type.count
        values = b.fadd(values, s.splat(f32, n, 0.0))
        count, to = b.sub(self.n_rows, i), s.at(self.out, b.add(s.times(i, 4), b.mul(self.out_stride, t)))
        there = b.icmp_signed("<", t, self.T)
        whole = b.icmp_signed(">=", count, self.const(n))
        with b.if_then(b.and_(there, whole)):
            s.store(values, to, align=4)
        with b.if_then(b.and_(there, b.not_(whole))):
            s.store(values, self.spare)
            with s.loop(count) as k:
                s.store(s.load(self.spare, s.times(k, 4), f32), to, s.times(k, 4), align=4)


def transpose(s: Simd, vectors: list[Value]) -> list[Value]:
    """Element e of vector i becomes element i of vector e, in every part of as many elements as there are vectors."""
    n, distance = vectors[0].type.count, 1
    while distance < len(vectors):
        low = [n + e - distance if e & distance else e for e in range(n)]
        high = [n + e if e & distance else e + distance for e in range(n)]
        turned = list(vectors)
        for i in range(len(vectors)):
            if not i & distance:
                a, b = vectors[i], vectors[i + distance]
                turned[i], turned[i + distance] = s.pick(a, low, b), s.pick(a, high, b)
        vectors, distance = turned, 2 * distance
    return vectors


def halve(s: Simd, vectors: list[Value], until: int = 1) -> list[Value]:
    """Steps of a halving tree that add whole vectors."""
    while len(vectors) > until:
        half = len(vectors) // 2
        vectors = [s.b.fadd(vectors[i], vectors[i + half]) for i in range(half)]
    return vectors
