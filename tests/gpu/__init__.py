"""Runs .cu files on the CPU: a header that g++ compiles them with, and a harness that launches their kernels."""
