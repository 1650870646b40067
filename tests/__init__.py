"""Tests of strata, with a naive reference (tests.reference) and outside oracles (tests.oracle)."""
