"""Speculation: drafters, suffix lookup, the policy that prices drafts, acceptance. Pure: no clock, no model, no state.

Import the modules themselves; this file stays empty of imports so that reading a record does not load numba.
"""
