"""How to get optional packages, for errors. By the packages and not by an extra of this one, whose name on an index
of packages another project may have; a test compares them with pyproject.toml."""

from __future__ import annotations

CUPY = {"cuda12": "cupy-cuda12x[ctk]>=14,<15", "cuda13": "cupy-cuda13x[ctk]>=14,<15"}
"""By extra: CuPy with the compiler and libraries of that CUDA version."""
LLAMA = "xllamacpp==2026.10.11549"
"""llama.cpp, of the extra bench."""


def pip_install(package: str) -> str:
    """The command, as a shell takes it."""
    return f"pip install '{package}'"


INSTALL_CUPY = " or ".join(map(pip_install, CUPY.values())) + ", after the CUDA version of the driver."
