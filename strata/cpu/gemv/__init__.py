"""Matrix times a few rows (GEMV), and what goes with it: quantisers of the activations, SwiGLU.

`table` is the seam: it names the compiled kernel and the activation layout of every (format, tier). The portable tier
runs on every machine: `unpack_*` turn blocks into signed bytes with scalar loops, `vectors` sums them in generic vector
code built from the lane rules in `rules`, `rows` is the loop around both, `floats` the same for float matrices.
"""
