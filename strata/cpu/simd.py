"""A small vocabulary over llvmlite for functions written as vectors: the kernels of the tiers 512 and 256.

A kernel is one whole LLVM function, all arguments int64. `kernel_intrinsic` makes it callable from compiled code; rows,
format and tier are literals there, so ordinary Python loops unroll and ordinary Python conditions choose.

    def _emit(s, name, R):                       # s: Simd; the literals follow
        x = s.pointer(s.args[0])
        with s.loop(s.args[1]) as i:
            v = s.load(x, s.times(i, 64), f32, 16)
            ...

    _sum = kernel_intrinsic("sum", _emit, n_args=2)    # a global of its module: in a closure it would defeat the cache

    def sum_of(name, R):
        def f(x, n):
            _sum(name, R, x, n)
        f.__qualname__ = f"sum_{name}_{R}"             # the disk cache keeps one index per qualified name
        return CFunction(f, 2)

Vectors are LLVM values `<n x kind>`; every load and store may be unaligned unless it says otherwise. Methods named like
instructions are those instructions, at 128, 256 or 512 bits by the size of their operands. `s.b` is the IRBuilder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import Parameter, Signature, signature

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

i1, i8, i16, i32, i64, i128 = (ir.IntType(n) for n in (1, 8, 16, 32, 64, 128))
f16, f32 = ir.HalfType(), ir.FloatType()

_BYTES = i8.as_pointer()
_ROUND_BY_MXCSR = 4

Kind = ir.Type
Value = ir.Value


def vector(kind: Kind, n: int) -> ir.VectorType:
    """The type of n values of `kind`."""
    return ir.VectorType(kind, n)


def _suffix(kind: Kind) -> str:
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{_suffix(kind.element)}"
    return {f16: "f16", f32: "f32"}.get(kind) or f"i{kind.width}"


def _bits(value: Value) -> int:
    kind = value.type.element
    return value.type.count * ({f16: 16, f32: 32}.get(kind) or kind.width)


class Simd:
    """Writes the body of one LLVM function: void, `n_args` int64 arguments, visible in its module only."""

    def __init__(self, module: ir.Module, name: str, n_args: int):
        self.module = module
        self.function = ir.Function(module, ir.FunctionType(ir.VoidType(), [i64] * n_args), name)
        self.function.linkage = "internal"
        self.function.attributes.add("noinline")
        self.args: Sequence[Value] = self.function.args
        self.b = ir.IRBuilder(self.function.append_basic_block("entry"))
        self._entry = self.b.block

    # ---- constants

    def const(self, kind: Kind, value: int | float) -> Value:
        return ir.Constant(kind, value)

    def splat(self, kind: Kind, n: int, value: int | float) -> Value:
        return ir.Constant(vector(kind, n), [value] * n)

    def constant(self, kind: Kind, values: Sequence[int | float]) -> Value:
        return ir.Constant(vector(kind, len(values)), list(values))

    def zero(self, kind: Kind, n: int) -> Value:
        return ir.Constant(vector(kind, n), None)

    def table(self, name: str, kind: Kind, values: Sequence[int]) -> Value:
        """Pointer to a constant array of this module, 64-byte aligned."""
        known = self.module.globals.get(name)
        if known is None:
            array = ir.ArrayType(kind, len(values))
            known = ir.GlobalVariable(self.module, array, name)
            known.initializer = ir.Constant(array, [int(v) for v in values])
            known.global_constant, known.linkage, known.align = True, "internal", 64
        return self.b.bitcast(known, _BYTES)

    def zero_bytes(self, n: int) -> Value:
        """Pointer to n constant zero bytes, to read from where a block is missing."""
        return self.table(f"strata_zeros_{n}", i8, [0] * n)

    # ---- memory

    def pointer(self, address: Value) -> Value:
        return self.b.inttoptr(address, _BYTES)

    def at(self, pointer: Value, offset: int | Value) -> Value:
        """pointer + offset bytes."""
        return self.b.gep(pointer, [ir.Constant(i64, offset) if isinstance(offset, int) else offset])

    def load(self, pointer: Value, offset: int | Value, kind: Kind, n: int | None = None, align: int = 1) -> Value:
        """A vector of n values, or one value without n."""
        wanted = kind if n is None else vector(kind, n)
        return self.b.load(self.b.bitcast(self.at(pointer, offset), wanted.as_pointer()), align=align)

    def store(self, value: Value, pointer: Value, offset: int | Value = 0, align: int = 1) -> None:
        self.b.store(value, self.b.bitcast(self.at(pointer, offset), value.type.as_pointer()), align=align)

    def load_masked(self, pointer: Value, offset: int | Value, kind: Kind, n: int, mask: Value) -> Value:
        """n values, 0 and not read where the mask is 0. mask: an integer of n bits, or n x i1.

        Bytes and 16-bit values need the tier 512; there is no such load in AVX2.
        """
        wanted, picks = vector(kind, n), vector(i1, n)
        mask = mask if isinstance(mask.type, ir.VectorType) else self.b.bitcast(mask, picks)
        place = self.b.bitcast(self.at(pointer, offset), wanted.as_pointer())
        name = f"llvm.masked.load.{_suffix(wanted)}.p0"
        return self.call(name, wanted, place, ir.Constant(i32, 1), mask, ir.Constant(wanted, None))

    def low_bits(self, kind: Kind, count: Value) -> Value:
        """An integer of type `kind` with the lowest `count` bits set; count (int64) below the width of `kind`."""
        width = kind.width
        count = self.b.zext(count, kind) if width > 64 else self.b.trunc(count, kind) if width < 64 else count
        return self.b.sub(self.b.shl(ir.Constant(kind, 1), count), ir.Constant(kind, 1))

    def prefetch(self, pointer: Value, offset: int | Value = 0, level: int = 1) -> None:
        """Ask for the cache line there, down to that level. Any address will do, mapped or not."""
        arguments = (self.at(pointer, offset), ir.Constant(i32, 0), ir.Constant(i32, 4 - level), ir.Constant(i32, 1))
        self.call("llvm.prefetch.p0", ir.VoidType(), *arguments)

    # ---- shape

    def cast(self, value: Value, kind: Kind, n: int | None = None) -> Value:
        """The same bits as n values of `kind`, or as one."""
        return self.b.bitcast(value, kind if n is None else vector(kind, n))

    def spread(self, scalar: Value, n: int) -> Value:
        """n times the same value."""
        one = self.b.insert_element(ir.Constant(vector(scalar.type, n), ir.Undefined), scalar, ir.Constant(i32, 0))
        return self.pick(one, [0] * n)

    def gather(self, scalars: Sequence[Value]) -> Value:
        """Scalars as a vector."""
        whole = ir.Constant(vector(scalars[0].type, len(scalars)), ir.Undefined)
        for k, scalar in enumerate(scalars):
            whole = self.b.insert_element(whole, scalar, ir.Constant(i32, k))
        return whole

    def pick(self, a: Value, index: Sequence[int], b: Value | None = None) -> Value:
        """Elements of a, then b, by an index known when compiling."""
        b = ir.Constant(a.type, ir.Undefined) if b is None else b
        return self.b.shuffle_vector(a, b, ir.Constant(vector(i32, len(index)), [int(i) for i in index]))

    def part(self, value: Value, start: int, n: int) -> Value:
        return value if n == value.type.count else self.pick(value, range(start, start + n))

    def join(self, *parts: Value) -> Value:
        """Parts of equal type, one behind the other; their number is a power of two."""
        while len(parts) > 1:
            n = 2 * parts[0].type.count
            parts = tuple(self.pick(a, range(n), b) for a, b in zip(parts[::2], parts[1::2], strict=True))
        return parts[0]

    def element(self, value: Value, index: int) -> Value:
        return self.b.extract_element(value, ir.Constant(i32, index))

    # ---- integers; `bits` is a number, the same in all elements

    def _same(self, value: Value, number: int) -> Value:
        return ir.Constant(value.type, [number] * value.type.count)

    def and_(self, value: Value, bits: int) -> Value:
        return self.b.and_(value, self._same(value, bits))

    def or_(self, value: Value, bits: int) -> Value:
        return self.b.or_(value, self._same(value, bits))

    def shl(self, value: Value, count: int) -> Value:
        return self.b.shl(value, self._same(value, count)) if count else value

    def shr(self, value: Value, count: int) -> Value:
        """Logical shift to the right."""
        return self.b.lshr(value, self._same(value, count)) if count else value

    def shr_bytes(self, value: Value, count: int) -> Value:
        """Bytes shifted right as 16-bit words: bits of the neighbour come in on top, for the caller to mask."""
        return self.cast(self.shr(self.cast(value, i16, value.type.count // 2), count), i8, value.type.count)

    def negate(self, value: Value) -> Value:
        return self.b.sub(ir.Constant(value.type, None), value)

    def abs(self, value: Value) -> Value:
        return self.call(f"llvm.abs.{_suffix(value.type)}", value.type, value, ir.Constant(i1, 0))

    def umax(self, a: Value, b: Value) -> Value:
        return self.call(f"llvm.umax.{_suffix(a.type)}", a.type, a, b)

    def smax(self, a: Value, b: Value) -> Value:
        return self.call(f"llvm.smax.{_suffix(a.type)}", a.type, a, b)

    def largest(self, value: Value) -> Value:
        """The largest element, unsigned."""
        return self.call(f"llvm.vector.reduce.umax.{_suffix(value.type)}", value.type.element, value)

    # ---- instructions

    def call(self, name: str, result: Kind, *arguments: Value) -> Value:
        """A function or LLVM intrinsic by name."""
        known = self.module.globals.get(name)
        if known is None:
            known = ir.Function(self.module, ir.FunctionType(result, [a.type for a in arguments]), name)
        return self.b.call(known, arguments)

    def dpbusd(self, total: Value, unsigned: Value, signed: Value) -> Value:
        """total (n x i32) + sums of four products of bytes (4n), unsigned times signed. AVX-512 VNNI."""
        bits, words = _bits(unsigned), total.type.count
        a, b = (self.cast(v, i32, words) for v in (unsigned, signed))
        return self.call(f"llvm.x86.avx512.vpdpbusd.{bits}", total.type, total, a, b)

    def dpwssd(self, total: Value, a: Value, b: Value) -> Value:
        """total (n x i32) + sums of two products of i16 (2n). AVX-512 VNNI."""
        bits, words = _bits(a), total.type.count
        a, b = (self.cast(v, i32, words) for v in (a, b))
        return self.call(f"llvm.x86.avx512.vpdpwssd.{bits}", total.type, total, a, b)

    def maddubs(self, unsigned: Value, signed: Value) -> Value:
        """Sums of two products of bytes, unsigned times signed, as i16 with saturation."""
        names = {128: "ssse3.pmadd.ub.sw.128", 256: "avx2.pmadd.ub.sw", 512: "avx512.pmaddubs.w.512"}
        result = vector(i16, unsigned.type.count // 2)
        return self.call(f"llvm.x86.{names[_bits(unsigned)]}", result, unsigned, signed)

    def maddwd(self, a: Value, b: Value) -> Value:
        """Sums of two products of i16, as i32."""
        names = {128: "sse2.pmadd.wd", 256: "avx2.pmadd.wd", 512: "avx512.pmaddw.d.512"}
        return self.call(f"llvm.x86.{names[_bits(a)]}", vector(i32, a.type.count // 2), a, b)

    def pairs(self, words: Value) -> Value:
        """Sums of two neighbouring i16, as i32."""
        return self.maddwd(words, self._same(words, 1))

    def pshufb(self, table: Value, index: Value) -> Value:
        """Bytes of a table by the low 4 bits of an index, within 128-bit parts; 0 where the top bit is set."""
        names = {128: "ssse3.pshuf.b.128", 256: "avx2.pshuf.b", 512: "avx512.pshuf.b.512"}
        return self.call(f"llvm.x86.{names[_bits(table)]}", table.type, table, index)

    def psignb(self, value: Value, sign: Value) -> Value:
        """Bytes times the sign (-1, 0, 1) of other bytes. AVX2, 256 bits."""
        return self.call("llvm.x86.avx2.psign.b", value.type, value, sign)

    def permb(self, table: Value, index: Value) -> Value:
        """Bytes of a table anywhere, by the low bits of an index. AVX-512 VBMI."""
        return self.call(f"llvm.x86.avx512.permvar.qi.{_bits(table)}", table.type, table, index)

    def permi2b(self, low: Value, index: Value, high: Value) -> Value:
        """Bytes of a table of two registers. AVX-512 VBMI."""
        return self.call(f"llvm.x86.avx512.vpermi2var.qi.{_bits(low)}", low.type, low, index, high)

    def permi2w(self, low: Value, index: Value, high: Value) -> Value:
        """16-bit words of a table of two registers. AVX-512 BW."""
        return self.call(f"llvm.x86.avx512.vpermi2var.hi.{_bits(low)}", low.type, low, index, high)

    def multishift(self, starts: Value, value: Value) -> Value:
        """Every byte: 8 bits of its 64-bit part of `value`, from the bit that `starts` names. AVX-512 VBMI."""
        return self.call(f"llvm.x86.avx512.pmultishift.qb.{_bits(value)}", value.type, starts, value)

    def shufbit(self, value: Value, index: Value) -> Value:
        """n x i1: for every byte, the bit `index` of its 64-bit part of `value`. AVX-512 BITALG."""
        name = f"llvm.x86.avx512.vpshufbitqmb.{_bits(value)}"
        return self.call(name, vector(i1, value.type.count), value, index)

    def affine(self, value: Value, matrix: Value) -> Value:
        """Every byte, as 8 bits, times the bit matrix of its 64-bit part, rows from the result's bit 7 down. GFNI."""
        name = f"llvm.x86.vgf2p8affineqb.{_bits(value)}"
        return self.call(name, value.type, value, matrix, ir.Constant(i8, 0))

    # ---- floats

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        return self.call(f"llvm.fma.{_suffix(a.type)}", a.type, a, b, c)

    def to_float(self, integers: Value) -> Value:
        """Signed integers as float32, one rounding."""
        kind = vector(f32, integers.type.count) if isinstance(integers.type, ir.VectorType) else f32
        return self.b.sitofp(integers, kind)

    def widen_half(self, halves: Value) -> Value:
        """float16, or integers with their bits, to float32: exact."""
        if isinstance(halves.type, ir.VectorType):
            n = _bits(halves) // 16
            return self.b.fpext(self.cast(halves, f16, n), vector(f32, n))
        return self.b.fpext(self.cast(halves, f16), f32)

    def widen_bfloat(self, words: Value) -> Value:
        """bfloat16 as n x i16 to float32: exact."""
        n = words.type.count
        return self.cast(self.shl(self.b.zext(words, vector(i32, n)), 16), f32, n)

    def round_to_int(self, x: Value) -> Value:
        """float32 (4, 8 or 16) to the nearest int32, ties to even; NaN and what does not fit become -2^31."""
        n, result = x.type.count, vector(i32, x.type.count)
        if n == 16:
            arguments = (x, ir.Constant(result, None), ir.Constant(i16, -1), ir.Constant(i32, _ROUND_BY_MXCSR))
            return self.call("llvm.x86.avx512.mask.cvtps2dq.512", result, *arguments)
        return self.call({4: "llvm.x86.sse2.cvtps2dq", 8: "llvm.x86.avx.cvt.ps2dq.256"}[n], result, x)

    def tree(self, lanes: Value) -> Value:
        """Sum by halving: v[i] += v[i + n/2], and so on; a scalar."""
        n = lanes.type.count
        while n > 1:
            n //= 2
            lanes = self.b.fadd(self.part(lanes, 0, n), self.part(lanes, n, n))
        return self.element(lanes, 0)

    # ---- control

    def variable(self, kind: Kind) -> Value:
        """A place for a value that changes in a loop; registers in the end. Use `get` and `set`."""
        with self.b.goto_block(self._entry):
            return self.b.alloca(kind)

    def get(self, variable: Value) -> Value:
        return self.b.load(variable)

    def set(self, variable: Value, value: Value) -> None:
        self.b.store(value, variable)

    def scratch(self, n_bytes: int) -> Value:
        """Pointer to n bytes of the stack, 64-byte aligned, not cleared."""
        with self.b.goto_block(self._entry):
            space = self.b.alloca(ir.ArrayType(i8, n_bytes))
            space.align = 64
            return self.b.bitcast(space, _BYTES)

    @contextmanager
    def loop(self, count: int | Value) -> Iterator[Value]:
        """The body runs `count` times, not at all for count <= 0; yields the index, int64."""
        count = ir.Constant(i64, count) if isinstance(count, int) else count
        with cgutils.for_range(self.b, count) as loop:
            yield loop.index

    def times(self, value: Value, factor: int) -> Value:
        """int64 times a number."""
        return self.b.mul(value, ir.Constant(i64, factor))


def emitted(module: ir.Module, name: str, n_args: int, emit: Callable[[Simd], None]) -> ir.Function:
    """The function `name` of the module, written by emit(simd) if it is not there yet."""
    known = module.globals.get(name)
    if known is None:
        s = Simd(module, name, n_args)
        emit(s)
        s.b.ret_void()
        known = s.function
    return known


def kernel_intrinsic(name: str, emit: Callable[..., None], n_args: int):
    """A function for compiled code: f(*literals, *arguments), `n_args` int64 arguments, no result.

    emit(simd, *literals) writes its body, once per module and set of literals (strings and integers).
    """
    n_literals = len(signature(emit).parameters) - 1

    def typer(typingctx, *arguments):
        literals = arguments[:n_literals]
        if not all(isinstance(a, types.Literal) for a in literals):
            return None
        values = [a.literal_value for a in literals]

        def generate(context, builder, types_of_call, operands):
            full_name = "_".join(["strata", name, *map(str, values)])
            function = emitted(builder.module, full_name, n_args, lambda s: emit(s, *values))
            builder.call(function, operands[len(values) :])
            return context.get_dummy_value()

        return types.void(*(types.literal(v) for v in values), *[types.int64] * n_args), generate

    names = ["typingctx", *list(signature(emit).parameters)[1:], *(f"a{k}" for k in range(n_args))]
    typer.__signature__ = Signature([Parameter(n, Parameter.POSITIONAL_OR_KEYWORD) for n in names])
    typer.__name__ = typer.__qualname__ = name
    return intrinsic(prefer_literal=True)(typer)
