"""Quantised products in numpy, exactly by the lane rules: the oracle of every GEMV kernel."""

from strata.pack.lanes.integers import Weights, read_weights
from strata.pack.lanes.product import gemv

__all__ = ["Weights", "gemv", "read_weights"]
