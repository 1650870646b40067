"""Whether CuPy is installed and finds a CUDA device that strata can compute on."""

from __future__ import annotations

from typing import Any

from strata.base.errors import NoDevice, StrataError
from strata.base.install import INSTALL_CUPY

LEAST_CAPABILITY = (7, 5)


def import_cupy() -> Any:
    """CuPy, or NoDevice saying how to get it."""
    try:
        import cupy
    except ImportError as error:
        raise NoDevice(
            "the GPU backend needs CuPy",
            found=str(error),
            needed="CuPy for the CUDA version of the driver",
            advice=INSTALL_CUPY,
        ) from error
    return cupy


def cuda_problem(index: int, capability: tuple[int, int] | None) -> StrataError | None:
    """Why this process cannot compute on CUDA device `index`, or None. Makes no context on it."""
    if capability is not None and capability < LEAST_CAPABILITY:
        return NoDevice(
            f"CUDA device {index} is too old",
            found="compute capability {}.{}".format(*capability),
            needed="{}.{} or newer".format(*LEAST_CAPABILITY),
            advice='Load with device="cpu".',
        )
    try:
        cp = import_cupy()
    except StrataError as error:
        return error
    try:
        count = cp.cuda.runtime.getDeviceCount()
    except cp.cuda.runtime.CUDARuntimeError as error:
        return NoDevice("CuPy finds no CUDA device", found=str(error), needed="an NVIDIA GPU and its driver",
                        advice="`strata doctor` shows devices and driver.")  # fmt: skip
    if index >= count:
        return NoDevice(f"CuPy finds no CUDA device {index}", found=f"{count} devices",
                        needed=f"{index + 1} or more that CUDA_VISIBLE_DEVICES does not hide",
                        advice="`strata doctor` shows devices and driver.")  # fmt: skip
    return None
