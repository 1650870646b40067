"""Sampling: parameters, the distribution after the chain, and the draw.

Chain: penalties -> bias -> top_k -> top_p -> min_p -> temperature -> draw. Temperature comes last, so top_p and min_p
judge the untempered distribution. `strata.runtime.chain` defines the filters and the draw exactly;
`strata.cpu.head_rows` defines penalties and bias. A draw depends on the row, the parameters and (seed, position):
not on the window, and not on whether 64 candidates or the whole row were read.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from strata.base.errors import BadArgument, need
from strata.base.numbers import plain, real_number, shown, whole_number
from strata.base.window import CANDIDATES, SUMMARY_TOP, HeadRequest, HeadRows
from strata.cpu.head_rows import log_sum_exp, modified_row, summarise
from strata.runtime import chain
from strata.runtime.rng import MAX_SEED, PICK, uniform

DEFAULT_LAST_N = 64
MAX_LAST_N = 4096
MAX_TEMPERATURE = 100.0
MAX_BIAS = 100.0
_NUMBERS = {"temperature": float, "top_k": int, "top_p": float, "min_p": float, "repetition_penalty": float,
            "presence_penalty": float, "frequency_penalty": float, "penalty_last_n": int, "seed": int,
            "top_logprobs": int}  # fmt: skip
_NAN = float("nan")
_of_thread = threading.local()


def _check(name: str, value: object, kind: type, low: float, high: float, needed: str | None = None) -> None:
    """Raise BadArgument unless `value` is a number of this kind (no bool) within [low, high]."""
    wanted = needed or f"{'an integer' if kind is int else 'a number'} from {low:g} to {high:g}"
    good = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    need(good and low <= value <= high, f"{name} is out of range", found=shown(value), needed=wanted)


def _own(value: object, kind: type) -> object:
    """A number of any library as Python's int or float; what is none of this kind stays, to be refused by its name."""
    if kind is float and isinstance(value, float | np.floating):  # infinite ones too
        return float(value)
    number = whole_number(value) if kind is int else real_number(value)
    return value if number is None else number


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. Without a temperature: the most likely one.

    temperature          None or 0: greedy; else at most 100
    top_k                keep the k most likely tokens, any k; None or 0: off
    top_p                in (0, 1]: keep the most likely tokens that reach this mass; 1: off
    min_p                in [0, 1]: keep tokens at least min_p times as likely as the most likely one; 0: off
    repetition_penalty   in [0.01, 100]: divides positive and multiplies negative logits of tokens seen; 1: off
    presence_penalty     in [-100, 100]: subtracted from the logits of tokens seen
    frequency_penalty    in [-100, 100]: subtracted once per occurrence
    penalty_last_n       how many of the latest tokens, prompt included, count as seen, 0..4096; 0: penalties off
    logit_bias           token id -> number in [-100, 100] added to its logit, or -inf to ban it
    seed                 0..2^64-1; None: `seeded()` takes one from the operating system
    logprobs             report the log-probability of the chosen token, from the unmodified logits
    top_logprobs         0..20: and of this many most likely tokens; needs logprobs

    Numbers of other libraries become Python's own.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = DEFAULT_LAST_N
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        for name, kind in _NUMBERS.items():
            object.__setattr__(self, name, _own(getattr(self, name), kind))
        object.__setattr__(self, "logprobs", plain(self.logprobs))
        if isinstance(self.logit_bias, Mapping):
            bias = {_own(token, int): _own(value, float) for token, value in self.logit_bias.items()}
            object.__setattr__(self, "logit_bias", bias)

    @cached_property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return not self.temperature

    @cached_property
    def penalised(self) -> bool:
        """Whether tokens seen change the logits."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return self.penalty_last_n != 0 and penalties != (1.0, 0.0, 0.0)

    @cached_property
    def modified(self) -> bool:
        """Whether penalties or bias change the logits."""
        return self.penalised or bool(self.logit_bias)

    @cached_property
    def filters(self) -> tuple[int, float, float]:
        """top_k, top_p, min_p as numbers; 0, 1.0, 0.0 are off."""
        return min(int(self.top_k or 0), 1 << 31), float(self.top_p), float(self.min_p)

    def validate(self, vocab: int) -> None:
        """Raise BadArgument (found, needed) for the first value out of its range; `vocab` is the vocabulary's size."""
        if self.temperature is not None:
            needed = f"None or a number from 0 to {MAX_TEMPERATURE:g} (0 is greedy)"
            _check("temperature", self.temperature, float, 0, MAX_TEMPERATURE, needed)
        if self.top_k is not None:
            _check("top_k", self.top_k, int, 0, math.inf, "None, 0 (both off) or a positive integer")
        _check("top_p", self.top_p, float, math.ulp(0.0), 1, "a number above 0, up to 1")
        _check("min_p", self.min_p, float, 0, 1)
        _check("repetition_penalty", self.repetition_penalty, float, 0.01, 100)
        _check("presence_penalty", self.presence_penalty, float, -100, 100)
        _check("frequency_penalty", self.frequency_penalty, float, -100, 100)
        _check("penalty_last_n", self.penalty_last_n, int, 0, MAX_LAST_N)
        if self.seed is not None:
            _check("seed", self.seed, int, 0, MAX_SEED, f"None or an integer from 0 to {MAX_SEED}")
        need(isinstance(self.logprobs, bool), "logprobs is not a truth value", found=shown(self.logprobs),
             needed="True or False")  # fmt: skip
        _check("top_logprobs", self.top_logprobs, int, 0, SUMMARY_TOP)
        need(self.logprobs or self.top_logprobs == 0, "top_logprobs is asked for without logprobs",
             found=self.top_logprobs, needed=0, advice="Set logprobs=True.")  # fmt: skip
        need(isinstance(self.logit_bias, Mapping), "logit_bias is no mapping", found=type(self.logit_bias).__name__,
             needed="token id -> bias")  # fmt: skip
        for token, bias in self.logit_bias.items():
            _check("a token of logit_bias", token, int, 0, vocab - 1, f"a token id from 0 to {vocab - 1}")
            if not (isinstance(bias, float) and bias == -math.inf):
                needed = f"a number from {-MAX_BIAS:g} to {MAX_BIAS:g}, or -inf"
                _check(f"logit_bias of token {token}", bias, float, -MAX_BIAS, MAX_BIAS, needed)

    def seeded(self) -> SamplingParams:
        """These parameters with a seed: the given one, else 64 bits of the operating system. Report `.seed`."""
        return self if self.seed is not None else replace(self, seed=int.from_bytes(os.urandom(8), "little"))

    def head_request(self, history: np.ndarray | Sequence[int], rows: np.ndarray | Sequence[int]) -> HeadRequest:
        """What a window must report so that `sample` can choose from its rows.

        history  token ids consumed before row 0, prompt included (only the last penalty_last_n are kept)
        rows     (T,) token ids of the window
        """
        k = self.filters[0]
        # logits of chosen tokens that no list of HeadRows has are read from the full row
        full = (not self.greedy and not 0 < k <= CANDIDATES) or (self.logprobs and self.modified)
        if not self.modified:
            return HeadRequest(greedy=self.greedy, summary=self.logprobs, full=full)
        if not self.penalised:
            return HeadRequest(greedy=self.greedy, summary=self.logprobs, full=full, bias=dict(self.logit_bias))
        history = history[len(history) - min(len(history), self.penalty_last_n - 1) :]
        return HeadRequest(
            greedy=self.greedy, summary=self.logprobs, full=full, repetition=self.repetition_penalty,
            presence=self.presence_penalty, frequency=self.frequency_penalty, history=np.array(history, np.int32),
            rows=np.array(rows, np.int32), bias=dict(self.logit_bias), last_n=self.penalty_last_n,
        )  # fmt: skip


class Candidates(NamedTuple):
    """The largest logits of a row after penalties and bias: (n,) int32 ids, (n,) float32 logits in order, and the
    log-sum-exp of the whole row (None if no filter needs it)."""

    ids: np.ndarray
    logits: np.ndarray
    logsumexp: float | None = None


class Draw(NamedTuple):
    """A chosen token.

    logprob  of the token, natural logarithm, from the unmodified logits; None unless logprobs were asked for
    top      (id, logprob) of the most likely tokens, top_logprobs of them; None likewise
    """

    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None


def _candidates(rows: HeadRows, j: int) -> Candidates:
    if rows.mod_ids is None:
        raise BadArgument("these rows hold no candidates", found="another request's rows",
                          needed="rows of SamplingParams.head_request")  # fmt: skip
    sums = rows.mod_logsumexp
    return Candidates(rows.mod_ids[j], rows.mod_logits[j], None if sums is None else sums[j])


def _n_kept(candidates: Candidates, params: SamplingParams) -> int:
    total = _NAN if candidates.logsumexp is None else candidates.logsumexp
    return chain.candidates_kept(candidates.logits, total, *params.filters)


def _full_row(rows: HeadRows, j: int, params: SamplingParams, request: HeadRequest | None) -> np.ndarray:
    """The whole row after penalties and bias."""
    need(rows.full is not None, "this list of candidates needs the full row", found="no full logits",
         needed="HeadRequest(full=True)", advice="Use SamplingParams.head_request.")  # fmt: skip
    if not params.modified:
        return rows.full[j]
    need(request is not None, "penalties or bias on a full row need the window's request", found="no request",
         needed="request=HeadRequest")  # fmt: skip
    return modified_row(rows.full[j], request, j, len(rows.full))


def _room(V: int) -> chain.Scratch:
    room = getattr(_of_thread, "room", None)
    if room is None or room.ids.size != V:
        room = _of_thread.room = chain.scratch(V)
    return room


def _row_kept(row: np.ndarray, total: float | None, params: SamplingParams) -> tuple[np.ndarray, np.ndarray, float]:
    """Ids and logits kept (views, valid until this thread's next call) and the largest logit."""
    largest = float(row.max())
    need(largest > -math.inf, "every token is banned", found=f"{row.size} logits of -inf",
         needed="at least one token without a bias of -inf")  # fmt: skip
    if total is None:
        total = log_sum_exp(row) if params.filters[0] == 0 and params.filters[1] < 1 else _NAN
    room = _room(row.size)
    n = chain.row_kept(row, largest, total, *params.filters, room)
    return room.ids[:n], room.values[:n], largest


def _with_probabilities(ids, logits, largest, params) -> tuple[np.ndarray, np.ndarray]:
    order = np.lexsort((ids, -logits))
    mass = chain.weights(logits, largest, float(params.temperature))[order]
    return ids[order], mass / float(mass.sum())


def _point(token: int) -> tuple[np.ndarray, np.ndarray]:
    return np.array([token], np.int32), np.ones(1)


def distribution(source: np.ndarray | Candidates, params: SamplingParams, counts: Mapping[int, int] | None = None):
    """The distribution that `sample` draws from: (ids int32, probabilities float64), most likely first.

    source  (V,) float32 unmodified logits of a row, or Candidates, which are already modified
    counts  token -> occurrences among the tokens that penalties look at; only with a row
    Equal probabilities are in order of logits, then of ids; greedy parameters give one token. Kept tokens whose
    probability is below 2^-55 or so are listed with 0 and never drawn.
    Raises BadArgument if the candidates are too few for these filters.
    """
    if isinstance(source, Candidates):
        need(not counts, "candidates are modified already", found=f"{len(counts or ())} counts", needed="no counts")
        n = 1 if params.greedy else _n_kept(source, params)
        need(n > 0, "the candidates are too few for these filters", found=len(source.ids), needed="the whole row")
        if params.greedy:
            return _point(source.ids[0])
        return _with_probabilities(source.ids[:n], source.logits[:n], float(source.logits[0]), params)
    row = np.ascontiguousarray(source, np.float32)
    if params.modified:
        counted = counts if counts and params.penalised else {}
        seen = np.repeat(np.array(list(counted), np.int32), np.array(list(counted.values()), np.int64))
        request = HeadRequest(repetition=params.repetition_penalty, presence=params.presence_penalty,
                              frequency=params.frequency_penalty, bias=dict(params.logit_bias), history=seen,
                              rows=np.empty(0, np.int32))  # fmt: skip
        row = modified_row(row, request, 0, 0)
    if params.greedy:
        return _point(int(row.argmax()))
    return _with_probabilities(*_row_kept(row, None, params), params)


def row_distribution(rows: HeadRows, j: int, params: SamplingParams, request: HeadRequest | None = None):
    """`distribution` of row j of a window, from its candidates where they suffice, else from the full row."""
    if params.greedy:
        return _point(rows.mod_ids[j, 0] if params.modified else rows.argmax[j])
    candidates = _candidates(rows, j)
    if _n_kept(candidates, params) > 0:
        return distribution(candidates, params)
    row = _full_row(rows, j, params, request)
    return _with_probabilities(*_row_kept(row, candidates.logsumexp, params), params)


def sample(rows: HeadRows, j: int, params: SamplingParams, position: int, request: HeadRequest | None = None,
           stream: int = PICK) -> Draw:  # fmt: skip
    """Choose the token after row j of a window.

    rows      answer to `params.head_request(...)`; `request` is that request, needed with penalties or bias when
              the candidates do not suffice (top_k off or above 64)
    position  position of row j in the sequence (p0 + j): the counter of the draw
    stream    of strata.runtime.rng; a drafter draws from DRAFT
    Raises BadArgument without a seed (see `seeded`) or if the rows lack what the parameters need.
    """
    if params.greedy:
        token = int(rows.mod_ids[j, 0] if params.modified else rows.argmax[j])
    else:
        if params.seed is None:
            raise BadArgument("sampling needs a seed", found="none", needed="an integer", advice="Use params.seeded().")
        token = _draw(rows, j, params, uniform(params.seed, position, stream), request)
    if not params.logprobs:
        return Draw(token)
    return Draw(token, *_log_probabilities(rows, j, token, params))


def _draw(rows: HeadRows, j: int, params: SamplingParams, u: float, request: HeadRequest | None) -> int:
    temperature = float(params.temperature)
    candidates = _candidates(rows, j)
    n = _n_kept(candidates, params)
    if n > 0:
        return chain.draw_candidates(candidates.ids, candidates.logits, n, temperature, u)
    row = _full_row(rows, j, params, request)
    if params.filters == (0, 1.0, 0.0):
        return chain.draw_row(row, float(candidates.logits[0]), temperature, u)
    return chain.draw_kept(*_row_kept(row, candidates.logsumexp, params), temperature, u)


def draw_of(rows: HeadRows, j: int, token: int, params: SamplingParams) -> Draw:
    """The Draw of a token chosen otherwise (by a rejection rule) after row j."""
    return Draw(token, *_log_probabilities(rows, j, token, params)) if params.logprobs else Draw(token)


def _log_probabilities(rows: HeadRows, j: int, token: int, params: SamplingParams):
    total, ids, logits = float(rows.logsumexp[j]), rows.top_ids[j], rows.top_logits[j]
    place = np.flatnonzero(ids == token)
    if place.size:
        logit = logits[place[0]]
    elif rows.full is not None:
        logit = rows.full[j, token]
    else:  # head_request asks for the full row when the candidates are modified
        logit = rows.mod_logits[j][rows.mod_ids[j] == token][0]
    n = params.top_logprobs
    return float(logit) - total, [(int(i), float(l) - total) for i, l in zip(ids[:n], logits[:n], strict=True)]


def warm_up() -> None:
    """Compile, or load from disk, every kernel of head rows, chain and generator, so that no token waits for one."""
    logits, short = np.zeros((1, CANDIDATES), np.float32), {"top_k": 2, "top_p": 0.5}
    for filters in (short, {"top_p": 0.5}, {}):
        for bias in ({}, {0: 1.0}):
            params = SamplingParams(temperature=1.0, seed=0, logprobs=True, logit_bias=bias, **filters)
            request = params.head_request([], [0])
            sample(summarise(logits, request), 0, params, 0, request)
            distribution(logits[0], params)
