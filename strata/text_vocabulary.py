"""A byte-level vocabulary of any size for models that have no text to speak of."""

from __future__ import annotations

from typing import Any

from strata.text.tokenizer import BYTE_ALPHABET, CONTROL, NORMAL, UNUSED

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_vocabulary(size: int, end: int) -> dict[str, tuple[str, Any]]:
    """Keys of a GGUF file: the 256 bytes first, three control tokens from id `end` on, all other ids unused."""
    tokens = [*BYTE_ALPHABET, *(f"<unused_{i}>" for i in range(256, size))]
    kinds = [NORMAL] * 256 + [UNUSED] * (size - 256)
    for i, text in enumerate(SPECIALS, start=end):
        tokens[i], kinds[i] = text, CONTROL
    return {
        "tokenizer.ggml.model": ("string", "gpt2"),
        "tokenizer.ggml.pre": ("string", "qwen35"),
        "tokenizer.ggml.tokens": ("string[]", tokens),
        "tokenizer.ggml.token_type": ("i32[]", kinds),
        "tokenizer.ggml.merges": ("string[]", []),
        "tokenizer.ggml.bos_token_id": ("u32", end),
        "tokenizer.ggml.eos_token_id": ("u32", end + 2),
        "tokenizer.ggml.padding_token_id": ("u32", end),
        "tokenizer.ggml.add_bos_token": ("bool", False),
    }
