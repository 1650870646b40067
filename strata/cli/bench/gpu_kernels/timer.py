"""What the parts of `strata bench gpu-kernels` share: data on the device, times of launches, and the figures found."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from strata.gpu.activations import Activations, quantise
from strata.gpu.device import Device
from strata.gpu.launch import Launch
from strata.gpu_speed import Effort, timed_us

WHERE = np.uint64(0)
"""Of errors: nobody asks for their place here."""
TILE_BYTES = 16 << 20
"""Of random data; what is larger repeats it."""


@dataclass(frozen=True)
class Figure:
    """A launch, or the launches of one step: median us, bytes it must touch, their rate and its share of a copy's, or
    tera operations a second where operations count. 0: does not apply."""

    part: str
    name: str
    us: float
    n_bytes: float = 0.0
    gbps: float = 0.0
    copy_share: float = 0.0
    tera_per_s: float = 0.0

    def line(self) -> str:
        """For people."""
        out = f"  {self.name:<52} {self.us:9.2f} us"
        if self.gbps:
            out += f" {self.n_bytes / 1e6:9.2f} MB {self.gbps:6.0f} GB/s {100 * self.copy_share:5.1f} %"
        return out + (f" {self.tera_per_s:6.1f} TFLOP/s" if self.tera_per_s else "")


@dataclass
class Timer:
    """A device with data, and what was found on it. on_found: called with every figure."""

    device: Device
    effort: Effort
    on_found: Callable[[Figure], None] = lambda figure: None
    part: str = ""
    copy_gbps: float = 0.0
    found: list[Figure] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(1)
        self.error = self.words(2**64 - 1)
        self.copy_gbps = self._copy_gbps()

    def _copy_gbps(self) -> float:
        """Of a copy by the driver within the device's memory, read and written."""
        n, times = self.effort.copy_bytes, []
        a, b = self.device.alloc(n), self.device.alloc(n)
        for _ in range(self.effort.rounds + 1):
            begin = self.device.record(timed=True)
            self.device.copy_in(b, a, n)
            end = self.device.record(timed=True)
            self.device.wait(end)
            times.append(self.device.elapsed_ms(begin, end))
        return 2 * n / statistics.median(times[1:]) / 1e6

    # ---- data

    def place(self, array: np.ndarray) -> int:
        """Address of a copy of an array."""
        array = np.ascontiguousarray(array)
        at = self.device.alloc(array.nbytes)
        self.device.upload(at, array)
        return at

    def repeat(self, at: int, n_bytes: int, tile: np.ndarray) -> int:
        """Fill memory with a tile over and over."""
        self.device.upload(at, tile if tile.nbytes <= n_bytes else tile.view(np.uint8)[:n_bytes])
        done = tile.nbytes
        while done < n_bytes:
            more = min(done, n_bytes - done)
            self.device.copy_in(at + done, at, more)
            done += more
        return at

    def _tiled(self, n: int, itemsize: int, draw: Callable[[int], np.ndarray]) -> int:
        return self.repeat(self.device.alloc(n * itemsize), n * itemsize, draw(min(n, TILE_BYTES // itemsize)))

    def floats(self, *shape: int, scale: float = 1.0) -> int:
        """Address of random float32."""
        return self._tiled(prod(shape), 4, lambda n: self.rng.standard_normal(n, np.float32) * np.float32(scale))

    def halves(self, n: int) -> int:
        """Address of n float16 between 0.5 and 1."""
        return self._tiled(n, 2, lambda m: self.rng.integers(0x3800, 0x3C00, m, np.uint16))

    def codes(self, n: int) -> int:
        """Address of n random bytes below 32: blocks of any format with finite scales."""
        return self._tiled(n, 1, lambda m: self.rng.integers(0, 32, m, np.uint8))

    def words(self, *values: int) -> int:
        """Address of uint64."""
        return self.place(np.array(values, np.uint64))

    def copies(self, data: np.ndarray, n: int) -> tuple[int, int]:
        """(address, stride) of n copies of an array."""
        stride = -(-data.nbytes // 256) * 256
        row = np.zeros(stride, np.uint8)
        row[: data.nbytes] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        return self.repeat(self.device.alloc(n * stride), n * stride, row), stride

    def activations(self, x: np.ndarray, group: int) -> Activations:
        """Rows quantised on the device."""
        a = Activations.at(self.device.alloc(Activations.n_bytes(*x.shape, group)), *x.shape, group)
        self.device.run(quantise(self.place(x), a, self.error, WHERE))
        return a

    def get(self, at: int, *shape: int) -> np.ndarray:
        """float32 from the device."""
        out = np.empty(shape, np.float32)
        self.device.download(at, out)
        return out

    # ---- times

    def us(self, launches: Sequence[Launch]) -> float:
        """Median us of launches in a graph that repeats them."""
        return timed_us(self.device, launches, self.effort)

    def add(self, name: str, us: float, n_bytes: float = 0.0, operations: float = 0.0) -> None:
        """Note a figure."""
        gbps = n_bytes / us / 1e3
        self.found.append(
            Figure(self.part, name, us, n_bytes, gbps, gbps / self.copy_gbps, operations / us / 1e6)
        )
        self.on_found(self.found[-1])

    def over(self, name: str, make: Callable[[int], list[Launch]], n_bytes: float, copies: int, nodes: int) -> None:
        """us of one make(i), the launches on copy i of the data; `nodes` of them follow each other."""
        each = [make(i) for i in range(min(copies, nodes))]
        launches = [one for k in range(nodes) for one in each[k % len(each)]]
        self.add(name, self.us(launches) / nodes, n_bytes)
