"""The tokenizer of a GGUF file: byte-level BPE with the pre-tokeniser the file names.

Text is not normalised. The HF form of this vocabulary composes accents first (NFC); here the bytes that go in are the
bytes that come out, `decode(encode(s)) == s` for every valid string, as an answer about a file's exact bytes needs.

Token kinds follow `tokenizer.ggml.token_type`:

1  normal        text in the GPT-2 byte alphabet, reached by merges
3  control       literal text, matched only when special parsing is on
4  user-defined  literal text, always matched
5  unused        never produced; decodes to nothing
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers

from strata.base.errors import BadArgument, ModelError, about, need
from strata.base.numbers import not_unicode, shown
from strata.pack.gguf_file import AGAIN
from strata.pack.gguf_metadata import HeaderStrings, Metadata

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
_TOKENS = "the vocabulary (key tokenizer.ggml.tokens)"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

# qwen35 differs from qwen2 by the combining marks (\p{M}), which stay with the letters they follow.
PATTERNS = {
    "qwen35": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    "qwen2": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
}

# The regex engine gives up (and panics) at ten million backtracking steps, one per character of a run of spaces.
LONGEST_SPACE_RUN = 1_000_000


def _byte_alphabet() -> list[str]:
    """The character of each byte: printable bytes stand for themselves, the other 68 follow from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet, moved = [], 0
    for byte in range(256):
        if byte in printable:
            alphabet.append(chr(byte))
        else:
            alphabet.append(chr(0x100 + moved))
            moved += 1
    return alphabet


BYTE_ALPHABET = _byte_alphabet()
_BYTE_OF = {char: byte for byte, char in enumerate(BYTE_ALPHABET)}


def _is_strings(value: object) -> bool:
    if isinstance(value, HeaderStrings):
        return True
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(text, str) for text in value)


def _is_integers(value: object) -> bool:
    array = np.asarray(value) if isinstance(value, np.ndarray | Sequence) else np.empty(0)
    return array.ndim == 1 and array.dtype.kind in "iu"


_FORMS: dict[str, Callable[[object], bool]] = {
    "a string": lambda value: isinstance(value, str),
    "an integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "an array of strings": _is_strings,
    "an array of integers": _is_integers,
}


def _required(metadata: Mapping[str, Any], name: str, form: str) -> Any:
    """The value of key `tokenizer.ggml.<name>`, which must have a form of _FORMS."""
    value = _optional(metadata, name, form)
    if value is None:
        raise ModelError(
            f"the file has no tokenizer.ggml.{name}",
            found="no such key",
            needed=form,
            advice="Use a GGUF made with its tokenizer; the first shard carries it.",
        )
    return value


def _optional(metadata: Mapping[str, Any], name: str, form: str) -> Any:
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key)
    if value is not None and not _FORMS[form](value):
        found = metadata.type_name(key) if isinstance(metadata, Metadata) else type(value).__name__
        raise ModelError(f"key {key} has another type", found=found, needed=form)
    return value


class Tokenizer:
    """Text to token ids and back. Make one with `Tokenizer.from_metadata`; it is immutable and thread-safe.

    vocab_size  number of ids
    eos_id      end-of-turn id of the file
    bos_id      first-token id of the file or None; never added by `encode`
    stop_ids    ids that end generation, ascending: eos, bos (the document separator), <|endoftext|>, <|im_end|>
    """

    def __init__(
        self,
        tokens: Sequence[str],
        token_types: np.ndarray,
        merges: Sequence[str],
        *,
        pre: str,
        eos_id: int,
        bos_id: int | None = None,
        extra_stop_ids: Iterable[int] = (),
    ):
        self._tokens = list(tokens)
        self._types = np.asarray(token_types, dtype=np.int32)
        self.vocab_size = len(self._tokens)
        if self._types.shape != (self.vocab_size,):
            raise ModelError(
                "keys tokenizer.ggml.token_type and tokenizer.ggml.tokens differ in length",
                found=f"{self._types.size} types",
                needed=f"{self.vocab_size}, one a token",
            )
        self._bpe = _build_bpe(self._tokens, self._types, merges, pre)
        self._bytes: list[bytes | None] = [None] * self.vocab_size
        self._literals = _literal_ids(self._tokens, self._types)
        control = {text for text, i in self._literals.items() if self._types[i] == CONTROL}
        self._split_all = _alternation(self._literals)
        self._split_user = _alternation(text for text in self._literals if text not in control)
        self.eos_id = self._checked_special("eos", eos_id)
        self.bos_id = None if bos_id is None else self._checked_special("bos", bos_id)
        known = [self.eos_id, self.bos_id, self._literals.get("<|endoftext|>"), self._literals.get("<|im_end|>")]
        known += [self._checked_special("extra stop", i) for i in extra_stop_ids]
        self.stop_ids: tuple[int, ...] = tuple(sorted({i for i in known if i is not None}))

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build from the `tokenizer.ggml.*` keys of a GGUF file. Raises ModelError naming the key that does not fit."""
        with about(getattr(metadata, "file_name", ""), AGAIN):
            return cls._from_keys(metadata)

    @classmethod
    def _from_keys(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        model = _required(metadata, "model", "a string")
        if model != "gpt2":
            raise ModelError(
                "the tokenizer of key tokenizer.ggml.model is not supported",
                found=shown(model),
                needed="'gpt2' (byte-level BPE)",
            )
        pre = _required(metadata, "pre", "a string")
        if pre not in PATTERNS:
            raise ModelError(
                "the pre-tokeniser of key tokenizer.ggml.pre is not supported",
                found=shown(pre),
                needed=" or ".join(map(repr, PATTERNS)),
            )
        if metadata.get("tokenizer.ggml.add_bos_token"):
            raise ModelError(
                "the tokenizer wants a first token", found="add_bos_token = true", needed="false or absent"
            )
        turn_ends = (_optional(metadata, f"{name}_token_id", "an integer") for name in ("eot", "eom"))
        return cls(
            _required(metadata, "tokens", "an array of strings"),
            _required(metadata, "token_type", "an array of integers"),
            _required(metadata, "merges", "an array of strings"),
            pre=pre,
            eos_id=_required(metadata, "eos_token_id", "an integer"),
            bos_id=_optional(metadata, "bos_token_id", "an integer"),
            extra_stop_ids=[i for i in turn_ends if i is not None],
        )

    def encode(self, text: str, special: bool = True) -> np.ndarray:
        """Token ids of `text`, (n,) int32. Control literals become single tokens only with `special`.

        Literals are matched leftmost first, the longest at each place. Raises BadArgument for text that is not valid
        Unicode (lone surrogates).
        """
        check_text(text)
        ids: list[int] = []
        pattern = self._split_all if special else self._split_user
        start = 0
        for match in pattern.finditer(text) if pattern else ():
            self._encode_plain(text[start : match.start()], ids)
            ids.append(self._literals[match.group()])
            start = match.end()
        self._encode_plain(text[start:], ids)
        return np.array(ids, dtype=np.int32)

    def _encode_plain(self, text: str, ids: list[int]) -> None:
        if text:
            ids.extend(self._bpe.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. `skip_special` leaves control tokens out."""
        ids = [int(i) for i in ids]
        if skip_special:
            ids = [i for i in ids if not self.is_special(i)]
        return b"".join(map(self.bytes_of, ids)).decode("utf-8", errors="replace")

    def bytes_of(self, token: int) -> bytes:
        """The bytes a token stands for; often part of a UTF-8 character."""
        self._check_id(token)
        known = self._bytes[token]
        if known is None:
            text, kind = self._tokens[token], self._types[token]
            if kind == NORMAL:
                known = bytes(map(_BYTE_OF.__getitem__, text))
            else:
                known = b"" if kind == UNUSED else text.encode("utf-8")
            self._bytes[token] = known
        return known

    def token_id(self, text: str) -> int | None:
        """Id of the one token that stands for exactly `text`, or None."""
        literal = self._literals.get(text)
        if literal is not None:
            return literal
        check_text(text)
        return self._bpe.token_to_id("".join(BYTE_ALPHABET[byte] for byte in text.encode("utf-8")))

    def is_special(self, token: int) -> bool:
        """Whether the token is a control token (type 3), such as <|im_end|>; <think> is not."""
        self._check_id(token)
        return bool(self._types[token] == CONTROL)

    def _check_id(self, token: int) -> None:
        # Negative ids would index from the end.
        if not 0 <= token < self.vocab_size:
            raise BadArgument("token id outside the vocabulary", found=token, needed=f"0 to {self.vocab_size - 1}")

    def _checked_special(self, name: str, token: int) -> int:
        if not 0 <= token < self.vocab_size:
            raise ModelError(
                f"{name} token id outside the vocabulary", found=token, needed=f"0 to {self.vocab_size - 1}"
            )
        return token


def check_text(text: str, name: str = "text") -> None:
    """Raise BadArgument for what cannot be tokenised, with its place in the text. name: what the caller knows it as."""
    need(isinstance(text, str), f"{name} must be a str", found=type(text).__name__, needed="str")
    wrong = not_unicode(text)
    need(wrong is None, f"{name} is not valid Unicode", found=wrong, needed="text that UTF-8 can hold",
         advice="Decode input with errors='replace'.")  # fmt: skip
    if len(text) > LONGEST_SPACE_RUN:
        run = re.search(rf"\s{{{LONGEST_SPACE_RUN}}}", text)
        need(
            run is None,
            f"{name} has too long a run of white space",
            found=f"more than {LONGEST_SPACE_RUN:,} characters" + (f" from character {run.start():,}" if run else ""),
            needed=f"runs below {LONGEST_SPACE_RUN:,}",
        )


def _build_bpe(tokens: list[str], types: np.ndarray, merges: Sequence[str], pre: str) -> tokenizers.Tokenizer:
    """The merge engine over normal tokens only: merges must never make a literal token."""
    normal = np.flatnonzero(types == NORMAL).tolist()
    vocab = {tokens[i]: i for i in normal}
    if len(vocab) != len(normal):
        twice = next(tokens[i] for i in normal if vocab[tokens[i]] != i)
        raise ModelError(f"a token is in {_TOKENS} twice", found=shown(twice), needed="each token once")
    missing = [byte for byte in range(256) if BYTE_ALPHABET[byte] not in vocab]
    if missing:
        raise ModelError(f"{_TOKENS} lacks single bytes", found=f"bytes {missing[:8]} missing", needed="all 256 bytes")
    if not set("".join(vocab)) <= _BYTE_OF.keys():
        token = next(i for i in normal if not set(tokens[i]) <= _BYTE_OF.keys())
        raise ModelError(
            f"token {token} is not in the byte alphabet",
            found=shown(tokens[token]),
            needed="characters that stand for bytes",
        )
    merges = list(merges)
    pairs = [tuple(line.split(" ")) for line in merges]
    wrong = next((line for line, pair in zip(merges, pairs, strict=True) if len(pair) != 2), None)
    if wrong is not None:
        raise ModelError(
            "a merge of key tokenizer.ggml.merges is not two tokens", found=shown(wrong), needed="'left right'"
        )
    try:
        bpe = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    except Exception as error:  # the library raises plain Exception for a merge whose parts or result are unknown
        raise ModelError(
            "keys tokenizer.ggml.merges and tokenizer.ggml.tokens do not fit together",
            found=str(error),
            needed="merges of tokens into tokens",
        ) from error
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PATTERNS[pre]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return bpe


def _literal_ids(tokens: list[str], types: np.ndarray) -> dict[str, int]:
    """Text to id of control and user-defined tokens."""
    literals: dict[str, int] = {}
    for i in np.flatnonzero((types == CONTROL) | (types == USER_DEFINED)).tolist():
        if not tokens[i]:
            raise ModelError(f"special token {i} has no text", found="''", needed="at least one character")
        if tokens[i] in literals:
            raise ModelError(f"a special token is in {_TOKENS} twice", found=shown(tokens[i]), needed="each token once")
        literals[tokens[i]] = i
    return literals


def _alternation(literals: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that finds the longest literal at the leftmost place, or None without literals."""
    longest_first = sorted(literals, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
