"""The step of a quantised product in generic vector code: any CPU, any vector width, the compiler cuts it to size.

`take_step` is one LLVM function per format, built from its rule. The scalar form of the same loops depends on what the
compiler's vectoriser makes of them; this form is as fast on every machine as its registers allow and compiles faster.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from strata.cpu.float_bits import HAS_FMA
from strata.cpu.gemv.rules import RULES, Sum

_i8, _i16, _i32, _i64 = (ir.IntType(n) for n in (8, 16, 32, 64))
_f32, _f64 = ir.FloatType(), ir.DoubleType()

SCALES_BYTES = 256
"""Unpacked scales of 256 values: 16 float32 weight scales at 0, 16 int32 sub-scales, 16 int32 minima, 16 float32 scales
of the minima."""

SUB_SCALES, SUB_MINIMA, MIN_SCALES = 64, 128, 192


def _vector(kind: ir.Type, n: int) -> ir.VectorType:
    return ir.VectorType(kind, n)


def _splat(vector: ir.VectorType, value: int | float) -> ir.Constant:
    return ir.Constant(vector, [value] * vector.count)


class Vectors:
    """Values and memory as vectors, on top of an IRBuilder. Addresses are int64."""

    def __init__(self, builder: ir.IRBuilder):
        self.builder = builder

    def _pointer(self, address: ir.Value, offset: int, kind: ir.Type) -> ir.Value:
        return self.builder.inttoptr(self.builder.add(address, ir.Constant(_i64, offset)), kind.as_pointer())

    def load(self, address: ir.Value, offset: int, kind: ir.Type, n: int) -> ir.Value:
        return self.builder.load(self._pointer(address, offset, _vector(kind, n)), align=1)

    def store(self, value: ir.Value, address: ir.Value, offset: int = 0) -> None:
        self.builder.store(value, self._pointer(address, offset, value.type), align=1)

    def pick(self, value: ir.Value, index: Sequence[int]) -> ir.Value:
        """value[index], index known when compiling."""
        if list(index) == list(range(value.type.count)):
            return value
        undefined = ir.Constant(value.type, ir.Undefined)
        return self.builder.shuffle_vector(value, undefined, ir.Constant(_vector(_i32, len(index)), list(index)))

    def dots(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """int8 (4n,) as int32 (n,) words -> int32 (n,): sums of four products.

        Even and odd bytes become int16; a product of two bytes fits into int16 except (-128)^2, and -128 is no
        activation code. Sums of neighbours are a single instruction on most machines.
        """
        n, build = a.type.count, self.builder
        half, wide = _vector(_i16, 2 * n), _vector(_i32, 2 * n)
        eight = _splat(half, 8)
        total = None
        for even in (True, False):
            x, y = (build.bitcast(v, half) for v in (a, b))
            if even:
                x, y = build.shl(x, eight), build.shl(y, eight)
            x, y = (build.sext(build.ashr(v, eight), wide) for v in (x, y))
            product = build.mul(x, y)
            pair = build.add(self.pick(product, range(0, 2 * n, 2)), self.pick(product, range(1, 2 * n, 2)))
            total = pair if total is None else build.add(total, pair)
        return total

    def fma(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        if not HAS_FMA:
            return self._fma_in_double(x, y, z)
        name = f"llvm.fma.v{x.type.count}f32"
        module = self.builder.module
        function = module.globals.get(name) or ir.Function(module, ir.FunctionType(x.type, [x.type] * 3), name)
        return self.builder.call(function, [x, y, z])

    def _fma_in_double(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        """`fma_soft` on vectors."""
        build, single = self.builder, x.type
        double, bits = _vector(_f64, single.count), _vector(_i64, single.count)
        x, y, z = (build.fpext(v, double) for v in (x, y, z))
        product = build.fmul(x, y)
        total = build.fadd(product, z)
        back = build.fsub(total, product)
        error = build.fadd(build.fsub(product, build.fsub(total, back)), build.fsub(z, back))
        zero, exponent = _splat(double, 0.0), _splat(bits, 0x7FF0000000000000)
        pattern = build.bitcast(total, bits)
        even = build.icmp_signed("==", build.and_(pattern, _splat(bits, 1)), _splat(bits, 0))
        finite = build.icmp_signed("!=", build.and_(pattern, exponent), exponent)
        inexact = build.fcmp_unordered("!=", error, zero)
        away = build.icmp_signed("==", build.fcmp_ordered(">", error, zero), build.fcmp_ordered(">", total, zero))
        moved = build.add(pattern, build.select(away, _splat(bits, 1), _splat(bits, -1)))
        pattern = build.select(build.and_(build.and_(even, finite), inexact), moved, pattern)
        return build.fptrunc(build.bitcast(pattern, double), single)


def _accumulate(v: Vectors, rule: Sum, source, factors, weight, x_scales, lanes_address) -> None:
    """One fma per lane and step of `rule` into the float32 lanes at `lanes_address`."""
    build = v.builder
    integers = None
    for k, index in enumerate(rule.terms):
        term = v.pick(source, index)
        if rule.factors is not None:
            term = build.mul(term, v.pick(factors, rule.factors[k]))
        integers = term if integers is None else build.add(integers, term)
    if rule.negative:
        integers = build.sub(_splat(integers.type, 0), integers)
    scales = build.fmul(v.pick(weight, rule.weight), v.pick(x_scales, rule.x))
    reals = build.sitofp(integers, scales.type)
    lanes = v.load(lanes_address, 0, _f32, rule.width)
    for start in range(0, reals.type.count, rule.width):
        step = range(start, start + rule.width)
        lanes = v.fma(v.pick(reals, step), v.pick(scales, step), lanes)
    v.store(lanes, lanes_address)


def _step_function(module: ir.Module, name: str) -> ir.Function:
    function_name = f"strata_portable_step_{name}"
    if function_name in module.globals:
        return module.globals[function_name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_i64] * 7), function_name)
    function.linkage = "internal"
    codes, scales, x, x_scales, x_sums, lanes, lowest = function.args
    v = Vectors(ir.IRBuilder(function.append_basic_block()))
    rule = RULES[name]
    d = v.load(x_scales, 0, _f32, 256 // rule.group)
    dots = v.dots(v.load(codes, 0, _i32, 64), v.load(x, 0, _i32, 64))
    _accumulate(v, rule.lanes, dots, v.load(scales, SUB_SCALES, _i32, 16), v.load(scales, 0, _f32, 16), d, lanes)
    if rule.lowest is not None:
        sums = v.load(x_sums, 0, _i32, 8 if rule.group == 32 else 16)
        minima, min_scales = v.load(scales, SUB_MINIMA, _i32, 16), v.load(scales, MIN_SCALES, _f32, 16)
        _accumulate(v, rule.lowest, sums, minima, min_scales, d, lowest)
    v.builder.ret_void()
    return function


@intrinsic(prefer_literal=True)
def take_step(typingctx, name, codes, scales, x, x_scales, x_sums, lanes, lowest):
    """256 values of a product, all arguments but the format's name addresses.

    codes, scales   what an unpacker wrote
    x               256 activation codes; x_scales, x_sums: the scales and sums of these 256
    lanes, lowest   16 and 4 float32 lanes, updated
    """
    text = name.literal_value

    def generate(context, builder, signature, arguments):
        builder.call(_step_function(builder.module, text), arguments[1:])
        return context.get_dummy_value()

    return types.void(types.literal(text), *[types.int64] * 7), generate


@intrinsic
def sum_lanes(typingctx, lanes, lowest):
    """Halving trees of 16 and 4 float32 lanes, their sum, + 0."""

    def generate(context, builder, signature, arguments):
        v = Vectors(builder)
        totals = []
        for address, n in zip(arguments, (16, 4), strict=True):
            value = v.load(address, 0, _f32, n)
            while n > 1:
                n //= 2
                value = builder.fadd(v.pick(value, range(n)), v.pick(value, range(n, 2 * n)))
            totals.append(builder.extract_element(value, ir.Constant(_i32, 0)))
        return builder.fadd(builder.fadd(*totals), ir.Constant(_f32, 0.0))

    return types.float32(types.int64, types.int64), generate
