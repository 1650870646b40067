"""Matrix times a few rows (GEMV), and what goes with it: quantisers of the activations, SwiGLU.

`table` is the seam: it names the compiled kernel and the activation layout of every (format, tier). The portable tier
here is scalar loops over 32-bit words that the compiler vectorises; it runs on every machine and is the oracle of the
SIMD tiers.
"""
