"""The device layout back into bytes of the file, on the device."""

import numpy as np
import pytest

from strata.base.errors import BadArgument
from strata.gpu.relayout import relayout
from strata.gpu.restore_kernel import back_map, restore_launches
from strata.pack.formats import FORMATS, by_name
from tests.gpu.run_on_cpu import address, needs_compiler, run_all
from tests.test_gpu_gemv import aligned


@needs_compiler
@pytest.mark.parametrize("format", [f for f in FORMATS.values() if f.group], ids=lambda f: f.name)
def test_the_bytes_of_the_file_come_back(format):
    rng = np.random.default_rng(format.ggml_id)
    for rows, blocks in ((1, 1), (9, 3), (4, 8), (6, 11), (5, 20)):
        K = blocks * format.block_values
        raw = rng.integers(0, 256, (rows, blocks * format.block_bytes), dtype=np.uint8)
        relaid, bits = aligned(relayout(format, raw)), aligned(back_map(format, K).view(np.uint8))
        out = aligned(np.full(raw.size, 7, np.uint8))
        run_all(restore_launches(format, address(relaid), address(out), rows, K, address(bits)), reverse=rows == 9)
        np.testing.assert_array_equal(out.reshape(raw.shape), raw)
        assert (np.lib.stride_tricks.as_strided(out[-1:], (17,))[1:] == 0xA5).all(), "written behind the matrix"


def test_refusals():
    with pytest.raises(BadArgument, match="restore"):
        restore_launches(by_name("Q8_0"), 8, 256, 4, 64, 256)
    with pytest.raises(BadArgument, match="F32"):
        restore_launches(by_name("F32"), 256, 256, 4, 64, 256)
