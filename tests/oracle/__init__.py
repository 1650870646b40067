"""Oracles nobody of this project wrote."""
