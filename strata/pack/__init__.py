"""Bytes on disk: GGUF shards, block formats, expert layout, n-gram table, expert profiles, routing traces.

Import the modules themselves; this file stays empty of imports so that reading a header does not load numba.
"""
