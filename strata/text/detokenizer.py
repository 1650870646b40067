"""Tokens to text while they arrive, never half a character."""

from __future__ import annotations

import codecs

from strata.text.tokenizer import Tokenizer


class Detokenizer:
    """Incremental decode: the pieces of `push` and `finish` concatenate to `tokenizer.decode` of all ids.

    Bytes that may still become a character are held back; bytes that cannot become U+FFFD, as in a full decode.
    skip_special  leave control tokens (such as <|im_end|>) out
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = False):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that became complete with this token, often empty within a character of several tokens."""
        token = int(token)
        if self._skip_special and self._tokenizer.is_special(token):
            return ""
        return self._decoder.decode(self._tokenizer.bytes_of(token))

    def finish(self) -> str:
        """U+FFFD for an incomplete character at the end, else nothing. The object is then as new."""
        return self._decoder.decode(b"", final=True)
