"""Fixtures that all tests share, and which tests run where."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:  # before numpy is there: workers that each take all cores would wait for them
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "examples" / "models" / "tiny-flash-next"
DATA = ROOT / "tests" / "data"

# Compiling kernels and reading weights make the first example slow: a deadline would measure that.
_SLOW = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("local", deadline=None, max_examples=30, suppress_health_check=_SLOW)
settings.register_profile("ci", deadline=None, max_examples=30, suppress_health_check=_SLOW, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "local")


@cache
def _no_gpu_reason() -> str | None:
    """Why tests marked gpu cannot run here, or None."""
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except ImportError:
        return "CuPy is not installed"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA device: {error}"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips soak tests unless -m asks for them, and gpu tests where there is no device."""
    wants_soak = "soak" in config.getoption("-m")
    for item in items:
        if item.get_closest_marker("soak") and not wants_soak:
            item.add_marker(pytest.mark.skip(reason="long run: pytest -m soak"))
        if item.get_closest_marker("gpu") and _no_gpu_reason():
            item.add_marker(pytest.mark.skip(reason=_no_gpu_reason()))


def _set_aside() -> None:
    """Garbage collections from now on leave out what is there now; all of it took them half a second each."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and test items live as long as the process."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        _set_aside()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """So does what a file leaves behind its last test, such as compiled functions."""
    try:
        return (yield)
    finally:
        if nextitem is not None and nextitem.path != item.path:
            _set_aside()


@pytest.fixture(scope="session", autouse=True)
def _loads_mean_the_cpu() -> None:
    """A load that names no device is one on the CPU, also where there is a GPU."""
    if _no_gpu_reason() is None:
        from strata.model import load

        load.__kwdefaults__["device"] = "cpu"


@pytest.fixture(scope="session")
def tiny_path() -> Path:
    """First shard of the bundled model."""
    return TINY / "tiny-flash-next-IQ3_XXS-00001-of-00002.gguf"


@pytest.fixture(scope="session")
def kernels_kept(tiny_path: Path) -> None:
    """Kernels of the bundled model lie on disk: commands have nothing to say about compiling them."""
    import strata

    strata.load(tiny_path, context=512, threads=1, draft="auto").close()  # a draft layer takes kernels of its own


@pytest.fixture(scope="session")
def mtp_path() -> Path:
    """Draft layer of the bundled model."""
    return TINY / "mtp.safetensors"


@pytest.fixture(scope="session")
def golden() -> dict[str, np.ndarray]:
    """Outputs of an independent implementation: keys `<variant>.<prompt>.<field>` and `ppl.<kind>.<...>`."""
    with np.load(DATA / "golden.npz") as data:
        return dict(data)


@pytest.fixture(scope="session")
def val() -> dict[str, np.ndarray]:
    """Held-out token streams: code, doc, chat (uint16)."""
    with np.load(DATA / "val.npz") as data:
        return dict(data)


@pytest.fixture(scope="session")
def reference(tiny_path: Path):
    """The naive float64 forward of the bundled model."""
    from tests.reference.forward import ReferenceModel

    return ReferenceModel(tiny_path)


@pytest.fixture(scope="session")
def test_models_dir() -> Path:
    """Folder of larger test models, from the variable STRATA_TEST_MODELS."""
    folder = os.environ.get("STRATA_TEST_MODELS")
    if not folder:
        pytest.skip("STRATA_TEST_MODELS names no folder of test models")
    return Path(folder)
