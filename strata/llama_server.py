"""llama.cpp beside this library: its server in this process, through the package xllamacpp, to compare with.

The package wants an address to serve on: a socket in a private folder, so that no network port is opened.
"""

from __future__ import annotations

import importlib
import shutil
import tempfile
from pathlib import Path
from typing import Any, Self

from strata.base.errors import StrataError
from strata.base.install import LLAMA, pip_install


def xllamacpp() -> Any:
    """The package; StrataError where it is not installed."""
    try:
        return importlib.import_module("xllamacpp")
    except ImportError as error:
        raise StrataError("llama.cpp is not there", found=str(error), needed="the package xllamacpp",
                          advice=f"Install it: {pip_install(LLAMA)}.") from error  # fmt: skip


class LlamaServer:
    """A GGUF model (first shard) in llama.cpp on the CPU. Use as a context manager, or call close().

    context  cells for prompt and answer
    threads  of the computation; results do not depend on them, speed does
    """

    def __init__(self, path: str | Path, context: int, threads: int):
        package = xllamacpp()
        self._folder = tempfile.mkdtemp(prefix="strata-llama-")
        try:
            self._server = package.Server(self._parameters(package, path, context, threads))
        except BaseException as error:
            self.close()
            if isinstance(error, RuntimeError):
                raise StrataError(f"llama.cpp does not load '{path}'", found=str(error),
                                  needed="a model that it knows") from error  # fmt: skip
            raise

    def _parameters(self, package: Any, path: str | Path, context: int, threads: int) -> Any:
        params = package.CommonParams()
        params.model.path = str(path)
        params.n_ctx = context
        params.n_parallel = 1
        params.n_gpu_layers = 0
        params.cpuparams.n_threads = threads
        params.cpuparams_batch.n_threads = threads
        params.warmup = False
        params.fit_params = False
        params.cache_ram_mib = 0
        params.verbosity = 0
        params.hostnames = [str(self.socket)]
        return params

    @property
    def socket(self) -> Path:
        """Where it serves."""
        return Path(self._folder) / "llama.sock"

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request of its completion interface."""
        reply = self._server.handle_completions(request)
        if "error" in reply:
            raise StrataError("llama.cpp refused a request", found=reply["error"].get("message"),
                              needed="what its completion interface takes")  # fmt: skip
        return reply

    def close(self) -> None:
        """Stop the server and remove its socket."""
        self._server = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
