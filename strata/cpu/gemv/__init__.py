"""Matrix times a few rows (GEMV), and what goes with it: quantisers of the activations, SwiGLU.

`table` is the seam: it names the compiled kernel and the activation layout of every (format, tier). The portable tier
runs on every machine: `unpack_*` turn blocks into signed bytes with scalar loops, `vectors` sums them in generic vector
code built from the lane rules in `rules`, `rows` is the loop around both, `floats` the same for float matrices.

The tiers 512 and 256 are written with `strata.cpu.simd`: `frame` is the loop around a step of `small512` and `small256`
(blocks of 32 and 64 values, facts in `small`, activations in `records`), `super*` and `records256` are those of 256
values, `float_simd` has the float matrices of both.
"""
