"""Qwen3.8-Flash-Next (GGUF architecture `qwen4exp`): geometry, contract and programs.

Gated DeltaNet and sparse attention (QSA) mixers between four residual streams, a mixture of experts in every layer, one
block of hashed n-gram embeddings, and an optional draft layer (MTP).
"""

from strata.arch.flash_next.contract import check_contract, check_draft
from strata.arch.flash_next.geometry import read_geometry
from strata.arch.flash_next.programs import build_programs, session_buffers

__all__ = ["build_programs", "check_contract", "check_draft", "read_geometry", "session_buffers"]
