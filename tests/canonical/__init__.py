"""Naive float32 references of the ops: plain numpy on strata.base.arithmetic, written from docs/arithmetic.md.

Compiled ops must return the same bits. `call` runs a compiled op without a model.
"""
