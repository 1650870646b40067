"""GPU facts from the NVIDIA management library through ctypes: no CuPy, no CUDA context, no memory taken."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

LIBRARIES = ("libnvidia-ml.so.1", "libnvidia-ml.so", "nvml.dll")


@dataclass(frozen=True)
class NvmlGpu:
    """What the driver says about one card; None: it does not tell. link is (generation, lanes) at its widest."""

    index: int
    name: str
    capability: tuple[int, int] | None
    total_bytes: int
    free_bytes: int
    link: tuple[int, int] | None
    multiprocessors: int | None = None


CORES_PER_MULTIPROCESSOR = {(7, 5): 64, (8, 0): 64, (8, 6): 128, (8, 7): 128, (8, 9): 128, (9, 0): 128, (10, 0): 128,
                            (12, 0): 128}  # fmt: skip
"""By compute capability: the driver tells the cores."""


@dataclass(frozen=True)
class NvmlReport:
    """driver is None and gpus empty where there is no driver; `problem` says why."""

    driver: str | None
    gpus: tuple[NvmlGpu, ...]
    problem: str | None


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def _open_library() -> ctypes.CDLL | None:
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def read_gpus(library: ctypes.CDLL | None = None) -> NvmlReport:
    """All GPUs the driver knows. Never raises: a missing or broken driver gives an empty list and the reason."""
    lib = library if library is not None else _open_library()
    if lib is None:
        return NvmlReport(None, (), "no NVIDIA driver library found")
    try:
        rc = lib.nvmlInit_v2()
        if rc != 0:
            return NvmlReport(None, (), f"the NVIDIA driver does not answer (NVML error {rc})")
        try:
            return _read(lib)
        finally:
            lib.nvmlShutdown()
    except (AttributeError, OSError, ctypes.ArgumentError) as error:
        return NvmlReport(None, (), f"the NVIDIA driver library is not usable: {error}")


class _Utilisation(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


def busy_percent(index: int = 0, library: ctypes.CDLL | None = None) -> int | None:
    """Per cent of the last fraction of a second in which a card ran kernels of anyone; None where nothing tells."""
    lib = library if library is not None else _open_library()
    if lib is None:
        return None
    handle, found = ctypes.c_void_p(), _Utilisation()
    try:
        if lib.nvmlInit_v2() != 0:
            return None
        try:
            if lib.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
                return None
            return int(found.gpu) if lib.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(found)) == 0 else None
        finally:
            lib.nvmlShutdown()
    except (AttributeError, OSError, ctypes.ArgumentError):
        return None


def _read(lib: ctypes.CDLL) -> NvmlReport:
    text = ctypes.create_string_buffer(96)
    driver = text.value.decode() if lib.nvmlSystemGetDriverVersion(text, 96) == 0 else None
    count = ctypes.c_uint(0)
    rc = lib.nvmlDeviceGetCount_v2(ctypes.byref(count))
    if rc != 0:
        return NvmlReport(driver, (), f"the NVIDIA driver cannot list its cards (NVML error {rc})")
    gpus = []
    for index in range(count.value):
        gpu = _read_one(lib, index)
        if gpu is not None:
            gpus.append(gpu)
    problem = None if len(gpus) == count.value else f"{count.value - len(gpus)} of {count.value} cards did not answer"
    return NvmlReport(driver, tuple(gpus), problem)


def _read_one(lib: ctypes.CDLL, index: int) -> NvmlGpu | None:
    handle, memory = ctypes.c_void_p(), _Memory()
    if lib.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
        return None
    if lib.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
        return None
    text = ctypes.create_string_buffer(96)
    name = text.value.decode(errors="replace") if lib.nvmlDeviceGetName(handle, text, 96) == 0 else "unknown GPU"
    major, minor, gen, width = ctypes.c_int(), ctypes.c_int(), ctypes.c_uint(), ctypes.c_uint()
    known = lib.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)) == 0
    linked = (
        lib.nvmlDeviceGetMaxPcieLinkGeneration(handle, ctypes.byref(gen)) == 0
        and lib.nvmlDeviceGetMaxPcieLinkWidth(handle, ctypes.byref(width)) == 0
        and gen.value > 0
        and width.value > 0
    )
    capability = (major.value, minor.value) if known else None
    return NvmlGpu(
        index=index,
        name=name,
        capability=capability,
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        link=(gen.value, width.value) if linked else None,
        multiprocessors=_multiprocessors(lib, handle, capability),
    )


def _multiprocessors(lib: ctypes.CDLL, handle: ctypes.c_void_p, capability: tuple[int, int] | None) -> int | None:
    """None where the driver is too old to tell its cores, or the card too new to know how many belong together."""
    each, cores = CORES_PER_MULTIPROCESSOR.get(capability), ctypes.c_uint()
    try:
        if each is None or lib.nvmlDeviceGetNumGpuCores(handle, ctypes.byref(cores)) != 0:
            return None
    except AttributeError:
        return None
    return cores.value // each or None
