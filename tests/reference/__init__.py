"""Naive float64 forward of the qwen4exp architecture: plain numpy, one loop over time, the oracle of the fast versions.

Letters as in strata.base.geometry. Matrices are [out, in] and y = W x; arrays carry the rows T first.
"""
