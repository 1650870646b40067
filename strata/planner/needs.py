"""Prices of everything but experts: the lines a backend allocates, in order, from geometry and file facts.

Window and prefill buffers are those of the programs that the architecture emits; what single ops need besides is
written here until the ops say it themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from strata.arch.flash_next import mtp, program
from strata.base.geometry import CELL_ROWS, WINDOW_ROWS, Geometry
from strata.base.plan import MIB, PlanLine
from strata.base.program import Buffer, Program
from strata.pack.ngram_rows import WAYS
from strata.planner import state_bytes as state
from strata.planner.draft import DraftFacts
from strata.planner.facts import ModelFacts

ALIGNMENT = 256

CUDA_CONTEXT_BYTES = 352 * MIB
"""What the driver keeps for a process with one context, before any allocation of ours."""

MODULE_BYTES = 32 * MIB
"""Kernel modules, all loaded at once, so that no later load finds the card full."""

GRAPH_NODE_BYTES = 1024
GRAPH_NODES_PER_LAYER = 16

ATTENTION_TILE = 64
"""Cells of one attention tile; a window keeps every tile's maximum, sum and output until they are merged."""

RING_BYTES = 384 * 1_382_400
"""Ring of experts on their way to a prefill chunk, from chunks of 1,024 rows up."""

RING_FROM_ROWS = 1024

PREFILL_WORKSPACE_BYTES = 128 * MIB

EXCHANGE_DEPTH = 4

EXPERT_PLACE_BYTES = 3 * 8
"""Addresses of one expert's projections."""

LOOKUP_TOKENS, LOOKUP_TOKEN_BYTES = 1 << 18, 24
"""Tokens that the index of earlier text holds at most, and its bytes for each."""

STACK_BYTES = 1 << 20
"""What a thread touches of its stack, generously."""

DRAFT_QUEUE_ROWS = 64
"""Rows that may wait for the draft layer."""


@dataclass(frozen=True)
class HostNeeds:
    """What RAM is held for: sessions, checkpoints of each, whether drafts are also looked up in earlier text, the draft
    layer, if any, and threads."""

    sessions: int
    checkpoints: int
    lookup: bool
    draft: DraftFacts | None
    threads: int


def _up(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


@lru_cache(maxsize=16)
def trunk_programs(g: Geometry) -> tuple[Program, ...]:
    """The widest programs: a window's trunk, head and commit, and a prefill chunk of one cell.

    Scratch depends neither on the context nor on the KV format, so both are the smallest.
    """
    return (
        program.trunk_program(g, WINDOW_ROWS, CELL_ROWS, "f16"),
        program.head_program(g, WINDOW_ROWS),
        program.commit_program(g, WINDOW_ROWS, CELL_ROWS, "f16"),
        program.trunk_program(g, CELL_ROWS, CELL_ROWS, "f16", advance=True),
    )


@lru_cache(maxsize=16)
def priced_programs(g: Geometry, draft_rows: int = 0) -> tuple[Program, ...]:
    """The trunk's programs and, with `draft_rows` rows of a draft layer's head, that layer's append and step."""
    if not draft_rows:
        return trunk_programs(g)
    append = mtp.append_program(g, WINDOW_ROWS, CELL_ROWS, "f16")
    return (*trunk_programs(g), append, mtp.step_program(g, CELL_ROWS, "f16", draft_rows))


@lru_cache(maxsize=16)
def program_buffers(g: Geometry, prefill: bool, draft_rows: int = 0) -> tuple[Buffer, ...]:
    """Scratch and io buffers, each name once at its largest, without the logits: of the chunk program, or of a window's
    programs and the draft layer's."""
    programs = priced_programs(g, draft_rows)
    found: dict[str, Buffer] = {}
    for one in programs[3:4] if prefill else programs[:3] + programs[4:]:
        for buffer in one.buffers.values():
            known = found.get(buffer.name)
            if buffer.role in ("scratch", "io") and buffer.name != "logits":
                found[buffer.name] = buffer if known is None or buffer.n_bytes > known.n_bytes else known
    return tuple(found.values())


def window_program_bytes(g: Geometry, draft_rows: int = 0) -> int:
    return sum(_up(b.n_bytes) for b in program_buffers(g, False, draft_rows))


def chunk_program_bytes(g: Geometry, rows: int) -> int:
    """Buffers of a chunk of `rows` rows: all of them hold so many values a row."""
    return -(-sum(b.n_bytes for b in program_buffers(g, True)) // CELL_ROWS) * rows


def ngram_cache_bytes(rows: int, table_rows: int, row_bytes: int) -> int:
    """Row cache of the n-gram table: rows, their keys and marks, in sets."""
    sets = -(-min(rows, table_rows) // WAYS)
    return sets * (WAYS * (8 + 1 + row_bytes) + 1)


def expert_scratch_bytes(g: Geometry, rows: int) -> int:
    """Intermediate values of the routed and shared experts of `rows` rows, and the exact sums they are combined in."""
    entries = rows * (g.K + 1)
    width = max(g.F, g.shared_width)
    return _up(entries * 3 * width * 4) + _up(rows * g.D * 8) + _up(rows * g.D * 2)


def select_scratch_bytes(g: Geometry, rows: int, context: int) -> int:
    """Scores of every block of the context for each row."""
    return _up(rows * (context // g.block_cells) * 4) if g.block_cells else 0


def attention_scratch_bytes(g: Geometry, rows: int, context: int) -> int:
    """Partial results of the attention tiles of `rows` rows; dense attention has tiles over the whole context."""
    cells = g.budget_cells + g.block_cells if g.block_cells else context
    tiles = -(-min(cells, context) // ATTENTION_TILE)
    return _up(rows * g.H * tiles * (g.dh + 2) * 4)


def gpu_window_bytes(g: Geometry, context: int, draft_rows: int = 0) -> int:
    """Everything a window of the widest size writes in VRAM besides state and logits."""
    t = WINDOW_ROWS
    inner = expert_scratch_bytes(g, t) + select_scratch_bytes(g, t, context) + attention_scratch_bytes(g, t, context)
    return window_program_bytes(g, draft_rows) + inner


def prefill_bytes(g: Geometry, rows: int, max_expert_bytes: int) -> int:
    """Buffers of a prefill chunk of `rows` rows: program buffers, gathered expert rows, a fixed workspace (block
    scores of a
    slab of rows, product tiles), and from 1,024 rows up a ring for experts on their way. Independent of the context."""
    if rows == 0:
        return 0
    gathered = rows * (g.K + 1) * (g.D + 3 * max(g.F, g.shared_width)) * 2
    ring = max(RING_BYTES // max_expert_bytes, 1) * max_expert_bytes if rows >= RING_FROM_ROWS else 0
    return chunk_program_bytes(g, rows) + _up(gathered) + PREFILL_WORKSPACE_BYTES + ring


def session_lines(g: Geometry, context: int, kv: str, sessions: int, device: str) -> list[PlanLine]:
    """State of all sessions and the shared table of rotations. `context` is rounded up to whole cells."""
    cells = state.round_context(context)
    each = f"{sessions} sessions, " if sessions > 1 else ""
    lines = [
        PlanLine(
            "KV cache",
            device,
            sessions * state.kv_bytes(g, cells, kv),
            f"{each}{cells:,} cells, {kv}, {len(g.qsa_layers)} layers of {state.kv_cell_bytes(g, kv):,} bytes a cell",
        ),
        PlanLine(
            "pooled keys",
            device,
            sessions * state.pooled_key_bytes(g, cells),
            f"{each}one float32 key of {g.indexer_dim} per {g.block_cells} cells and layer",
        ),
        PlanLine(
            "recurrent state",
            device,
            sessions * state.recurrent_bytes(g),
            f"{each}{len(g.gdn_layers)} GDN layers, raw key rings, n-gram history; not grown by context",
        ),
        PlanLine("RoPE table", device, state.rope_table_bytes(g, cells), "angles of every position, shared"),
    ]
    return [line for line in lines if line.n_bytes]


def gpu_weight_lines(m: ModelFacts) -> list[PlanLine]:
    lines = []
    for c in (*m.dense, m.embedding):
        kinds = sorted(c.by_type, key=lambda k: -c.by_type[k])
        lines.append(
            PlanLine(
                f"weights: {c.name}", "vram", c.n_bytes + ALIGNMENT * c.n_tensors, "as in the file: " + ", ".join(kinds)
            )
        )
    return lines


def draft_lines(g: Geometry, draft: DraftFacts, context: int, kv: str, sessions: int, device: str) -> list[PlanLine]:
    """The draft layer. On the CPU what lies in files stays there: pages of its own files have a line, those of the
    model's file are counted with the model's."""
    cells = state.round_context(context)
    on_cpu = device == "ram"
    layer = draft.memory_bytes if on_cpu else draft.dense_bytes + draft.experts_bytes
    what = "experts and projections, converted or regrouped" if on_cpu else f"dense weights and {g.E} experts"
    each = f"{sessions} sessions, " if sessions > 1 else ""
    lines = [
        PlanLine("draft layer", device, layer, f"{what} ({Path(draft.source).name})"),
        PlanLine(
            "draft KV cache",
            device,
            sessions * cells * state.kv_cell_bytes(g, kv),
            f"{each}one attention layer, {cells:,} cells, {kv}",
        ),
        PlanLine("draft head", device, draft.head_bytes, f"{draft.vocabulary:,} rows of the head"),
    ]
    if on_cpu:
        where = "used in place, in the draft layer's own files"
        lines.insert(1, PlanLine("draft layer (mapped)", device, draft.mapped_bytes, where, kind="map"))
    return [line for line in lines if line.n_bytes]


def gpu_fixed_lines(m: ModelFacts, context: int, kv: str, sessions: int, draft: DraftFacts | None) -> list[PlanLine]:
    """VRAM lines in order of allocation, up to the prefill buffers: everything but reserve and expert cache."""
    g = m.geometry
    lines = [
        PlanLine("CUDA context", "vram", CUDA_CONTEXT_BYTES, "driver's share for this process"),
        *gpu_weight_lines(m),
    ]
    lines += session_lines(g, context, kv, sessions, "vram")
    if draft is not None:
        lines += draft_lines(g, draft, context, kv, sessions, "vram")
    drafted = draft.vocabulary if draft is not None else 0
    lines += [
        PlanLine("LM head", "vram", m.head.n_bytes + ALIGNMENT, "before the cache: it must never find the card full"),
        PlanLine(
            "logits",
            "vram",
            WINDOW_ROWS * (2 * g.V + drafted) * 4,
            f"{WINDOW_ROWS} rows, unmodified and after penalties",
        ),
        PlanLine(
            "window scratch",
            "vram",
            gpu_window_bytes(g, state.round_context(context), drafted),
            f"windows of up to {WINDOW_ROWS} rows",
        ),
        PlanLine(
            "graphs and kernels",
            "vram",
            MODULE_BYTES + WINDOW_ROWS * (g.L + 2) * GRAPH_NODES_PER_LAYER * GRAPH_NODE_BYTES,
            f"{WINDOW_ROWS} graphs; all modules loaded before the cache is sized",
        ),
    ]
    return lines


def host_lines(m: ModelFacts, context: int, ngram_rows: int, s: HostNeeds) -> list[PlanLine]:
    """RAM lines that both backends have."""
    g, sessions, checkpoints, draft = m.geometry, s.sessions, s.checkpoints, s.draft
    each = " a session" if sessions > 1 else ""
    lines = []
    if m.ngram_rows:
        n_bytes = ngram_cache_bytes(ngram_rows, m.ngram_rows, m.ngram_row_bytes)
        lines.append(
            PlanLine(
                "n-gram cache", "ram", n_bytes, f"{min(ngram_rows, m.ngram_rows):,} rows of {m.ngram_row_bytes} bytes"
            )
        )
    if checkpoints:
        n_bytes = sessions * state.checkpoint_bytes(g, checkpoints)
        lines.append(PlanLine("checkpoints", "ram", n_bytes, f"up to {checkpoints} recurrent states{each}"))
    n_bytes, reason = 4 * context, "token ids"
    if s.lookup:
        n_bytes += LOOKUP_TOKEN_BYTES * min(context, LOOKUP_TOKENS)
        reason += "; index of earlier text"
    if draft is not None:
        n_bytes += (DRAFT_QUEUE_ROWS + 2 + checkpoints) * g.CD * 4
        reason += "; rows that wait for the draft layer"
    lines.append(PlanLine("conversations", "ram", sessions * n_bytes, reason + each, kind="later"))
    stacks = f"stacks of {s.threads} thread{'s' if s.threads > 1 else ''}"
    lines.append(PlanLine("workers", "ram", s.threads * STACK_BYTES, stacks, kind="later"))
    return lines


def gpu_host_lines(m: ModelFacts, context: int, ngram_rows: int, s: HostNeeds) -> list[PlanLine]:
    g = m.geometry
    rows = WINDOW_ROWS * EXCHANGE_DEPTH
    exchange = rows * (2 * g.D + g.D * 8 + (g.K + 1) * 12) + WINDOW_ROWS * g.V * 4
    return [
        *host_lines(m, context, ngram_rows, s),
        PlanLine("exchange", "ram", exchange, "pinned: rows for the CPU's experts, their results, full logits"),
    ]


@lru_cache(maxsize=64)
def cpu_shared_bytes(g: Geometry, draft_rows: int = 0) -> int:
    """Scratch and io buffers of the CPU backend: one place per name, as large as its widest program needs; no
    logits."""
    widest: dict[str, int] = {}
    for buffer in (*program_buffers(g, False, draft_rows), *program_buffers(g, True)):
        widest[buffer.name] = max(widest.get(buffer.name, 0), buffer.n_bytes)
    return sum(widest.values())


def cpu_lines(m: ModelFacts, context: int, kv: str, ngram_rows: int, s: HostNeeds) -> list[PlanLine]:
    """RAM lines of the CPU backend besides the mapped weights."""
    g, sessions, draft = m.geometry, s.sessions, s.draft
    cells = state.round_context(context)
    lines = []
    for line in session_lines(g, context, kv, sessions, "ram"):
        if line.line == "recurrent state":  # a failed chunk goes back to a copy
            more = line.n_bytes + state.recurrent_bytes(g)
            lines.append(PlanLine(line.line, "ram", more, line.reason + "; one copy for a chunk's way back"))
        elif line.line == "RoPE table":
            tables = state.rope_table_bytes(g, cells) + WINDOW_ROWS * g.C * 4
            tables += m.vector_bytes + g.L * g.E * EXPERT_PLACE_BYTES
            if draft is not None:
                tables += draft.vector_bytes + g.E * EXPERT_PLACE_BYTES
            lines.append(
                PlanLine(
                    "tables", "ram", tables, "angles of every position; small vectors in float32; places of experts"
                )
            )
        else:
            lines.append(line)
    window = cpu_shared_bytes(g, draft.vocabulary if draft else 0)
    window += draft.private_bytes if draft else m.cpu_private_bytes
    widest = f"windows of up to {WINDOW_ROWS} rows, prefill chunks of {CELL_ROWS}"
    return [
        *lines,
        *(draft_lines(g, draft, context, kv, sessions, "ram") if draft else []),
        *host_lines(m, context, ngram_rows, s),
        PlanLine("window scratch", "ram", window, widest),
        PlanLine("logits", "ram", WINDOW_ROWS * g.V * 4, f"{WINDOW_ROWS} rows"),
    ]
