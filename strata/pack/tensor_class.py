"""The class of a tensor by its name: what a plan prices together and a backend reports together."""

from __future__ import annotations

EMBEDDING, HEAD, EXPERTS, NGRAM_TABLE, DRAFT = "embedding", "head", "experts", "n-gram table", "draft layer"
DRAFT_HEAD = "draft head"
DENSE_CLASSES = (
    "hyper-connections",
    "GDN",
    "attention",
    "indexer",
    "router",
    "shared experts",
    "n-gram block",
    "other",
)
"""Classes of the trunk's dense weights, in the order of the plan."""

_LINES = {HEAD: "LM head", EXPERTS: "expert cache", DRAFT: "draft layer", DRAFT_HEAD: "draft head"}


def classify(name: str) -> str:
    """The class of a tensor of the file, or of a draft layer in memory, by its name."""
    if name == "token_embd.weight":
        return EMBEDDING
    if name == "output.weight":
        return HEAD
    if name == "per_layer_token_embd.weight":
        return NGRAM_TABLE
    if name == "mtp.output.weight":
        return DRAFT_HEAD
    part = name.split(".", 2)[2] if name.startswith("blk.") else name
    if part.startswith(("nextn.", "mtp.")):
        return DRAFT
    if "_exps." in part:
        return EXPERTS
    if part.startswith(("hc_", "output_hc_")):
        return "hyper-connections"
    if part.startswith("indexer."):
        return "indexer"
    if part.startswith("ffn_gate_inp"):
        return "router"
    if "_shexp." in part:
        return "shared experts"
    if part.startswith("ple_"):
        return "n-gram block"
    if part.startswith(("ssm_", "attn_qkv.", "attn_gate.")):
        return "GDN"
    if part.startswith("attn_"):
        return "attention"
    return "other"


def vram_line(tensor_class: str) -> str:
    """The plan line that holds a class in VRAM."""
    return _LINES.get(tensor_class) or f"weights: {tensor_class}"
