"""Geometry from metadata keys and row counts, read independently of strata.arch."""

from __future__ import annotations

from strata.base.geometry import Geometry, NgramGeometry

from .weights import FileWeights

PREFIX = "qwen4exp."


def read_geometry(weights: FileWeights) -> Geometry:
    """Every number the reference needs, as the file states it."""
    metadata = weights.file.metadata

    def number(key: str, default: int | None = None) -> int:
        return int(metadata.get(PREFIX + key, default) if default is not None else metadata[PREFIX + key])

    def numbers(key: str) -> tuple[int, ...]:
        return tuple(int(v) for v in metadata[PREFIX + key])

    mtp_layers = number("nextn_predict_layers", 0)
    L = number("block_count") - mtp_layers
    period = number("full_attention_interval")
    value_heads = number("ssm.time_step_rank")
    ngram = None
    if PREFIX + "ple.layers" in metadata:
        ngram = NgramGeometry(
            layer=numbers("ple.layers")[0],
            order=number("ple.ngram_size"),
            heads_per_order=number("ple.heads_per_ngram"),
            row_width=number("embedding_length_per_layer_input"),
            conv_taps=number("ple.conv_kernel"),
            reset_token=number("ple.eos_token_id"),
            image_token=number("ple.image_token_id"),
            multipliers=numbers("ple.layer_multipliers"),
            moduli=numbers("ple.head_vocab_sizes"),
            offsets=numbers("ple.head_offsets"),
        )
    return Geometry(
        architecture=str(metadata["general.architecture"]),
        L=L,
        D=number("embedding_length"),
        V=weights.n_rows("token_embd.weight"),
        trained_context=number("context_length"),
        rms_eps=float(metadata[PREFIX + "attention.layer_norm_rms_epsilon"]),
        C=number("hyper_connection.count"),
        hc_rank=number("hyper_connection.low_rank"),
        kinds=tuple("qsa" if layer % period == period - 1 else "gdn" for layer in range(L)),
        H=number("attention.head_count"),
        Hkv=number("attention.head_count_kv"),
        dh=number("attention.key_length"),
        rotary_dims=number("rope.dimension_count"),
        rope_base=float(metadata[PREFIX + "rope.freq_base"]),
        indexer_heads=number("attention.indexer.head_count"),
        indexer_dim=number("attention.indexer.key_length"),
        budget_cells=number("attention.indexer.top_k"),
        block_cells=max(numbers("attention.compress_ratios")[:L]),
        gdn_key_heads=number("ssm.group_count"),
        gdn_value_heads=value_heads,
        gdn_key_dim=number("ssm.state_size"),
        gdn_value_dim=number("ssm.inner_size") // value_heads,
        gdn_conv_taps=number("ssm.conv_kernel"),
        E=number("expert_count"),
        K=number("expert_used_count"),
        F=number("expert_feed_forward_length"),
        shared_width=number("expert_shared_feed_forward_length"),
        router_scale=1.0,
        ngram=ngram,
        mtp_layers=mtp_layers,
    )
