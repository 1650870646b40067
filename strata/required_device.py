"""A GPU for what runs on nothing else."""

from __future__ import annotations

from strata.base.errors import NoDevice, StrataError
from strata.gpu import device
from strata.gpu.device import CupyDevice
from strata.planner.machine import Machine, cpu_tier
from strata.planner.memory import why_no_gpu


def required_device(what: str, index: int = 0) -> CupyDevice:
    """A CUDA device; NoDevice saying that `what` needs one: as a load does where the machine has none, else what is
    missing and how to get it."""
    try:
        return device.CupyDevice(index)
    except StrataError as error:
        machine = Machine.here(tier=cpu_tier())
        lacking = why_no_gpu(machine)
        if lacking is not None:  # CuPy would not help
            raise NoDevice(f"{what} needs a GPU", found=f"GPUs: {len(machine.gpus)}", needed="one",
                           advice=lacking) from error  # fmt: skip
        raise NoDevice(
            f"{what} needs a GPU: {error.message}",
            found=error.found,
            needed="an NVIDIA GPU, its driver, CuPy and NVRTC",
            advice=error.advice or "`strata doctor` shows devices and driver.",
        ) from error
