"""Qwen3.8-Flash-Next (GGUF architecture `qwen4exp`): geometry, contract and programs.

Gated DeltaNet and sparse attention (QSA) mixers between four residual streams, a mixture of experts in every layer, one
block of hashed n-gram embeddings.
"""

from strata.arch.flash_next.contract import check_contract
from strata.arch.flash_next.geometry import read_geometry
from strata.arch.flash_next.program import commit_program, head_program, state_buffers, trunk_program

__all__ = ["check_contract", "commit_program", "head_program", "read_geometry", "state_buffers", "trunk_program"]
