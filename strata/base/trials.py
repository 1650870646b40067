"""What a comparison of two settings must have and show before one is kept."""

from __future__ import annotations

LEAST_GAIN = 0.03
"""Share of the time; a setting that is faster by less is not kept."""

LEAST_TURNS = 3
"""Turns of a comparison; medians of fewer say nothing."""
