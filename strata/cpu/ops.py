"""Which function lowers which kind of op."""

from __future__ import annotations

from collections.abc import Callable

from strata.base.program import Op
from strata.cpu.embed import lower_embed, lower_ngram_wait
from strata.cpu.experts import lower_experts
from strata.cpu.gated_delta import lower_gdn_commit, lower_gdn_conv, lower_gdn_heads, lower_history_commit
from strata.cpu.hyper_connection import lower_hc_add, lower_hc_mix, lower_hc_norm, lower_hc_squeeze
from strata.cpu.linear import lower_linear
from strata.cpu.lower import Lowering
from strata.cpu.ngram_mix import lower_ngram_mix
from strata.cpu.qsa_append import lower_qsa_append, lower_qsa_index
from strata.cpu.qsa_attend import lower_qsa_attend
from strata.cpu.qsa_select import lower_qsa_select
from strata.cpu.router import lower_router

LOWERING: dict[str, Callable[[Lowering, Op], None]] = {
    "embed": lower_embed,
    "ngram_wait": lower_ngram_wait,
    "ngram_mix": lower_ngram_mix,
    "hc_norm": lower_hc_norm,
    "hc_squeeze": lower_hc_squeeze,
    "hc_mix": lower_hc_mix,
    "hc_add": lower_hc_add,
    "linear": lower_linear,
    "gdn_conv": lower_gdn_conv,
    "gdn_heads": lower_gdn_heads,
    "gdn_commit": lower_gdn_commit,
    "history_commit": lower_history_commit,
    "qsa_append": lower_qsa_append,
    "qsa_index": lower_qsa_index,
    "qsa_select": lower_qsa_select,
    "qsa_attend": lower_qsa_attend,
    "router": lower_router,
    "experts": lower_experts,
}
