"""Prices of everything but experts: the lines a backend allocates, in order, from geometry and file facts.

Window and prefill buffers are those of the programs that the architecture emits; what single ops need besides is
written here until the ops say it themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from strata.arch.flash_next import mtp, program
from strata.base.geometry import CELL_ROWS, DRAFT_RING_ROWS, WINDOW_ROWS, Geometry
from strata.base.plan import MIB, PlanLine
from strata.base.program import Buffer, Program
from strata.gpu.memory import INBOX_SKIPS
from strata.pack.grids import GRID, SIGNS
from strata.pack.ngram_rows import WAYS
from strata.pack.ngram_ticket import kept_ticket_bytes
from strata.pack.tensor_class import vram_line
from strata.planner import state_bytes as state
from strata.planner import vram_bytes
from strata.planner.cuda_context import context_bytes
from strata.planner.draft import DraftFacts
from strata.planner.facts import ModelFacts
from strata.planner.machine import Gpu
from strata.planner.vram_bytes import aligned

MODULE_BYTES = 16 * MIB
"""Kernel modules, all loaded at once, so that no later load finds the card full."""

GRAPH_NODE_BYTES = 1024
GRAPH_NODES_PER_LAYER = 16

RING_BYTES = 384 * 1_382_400
"""Ring of experts on their way to a prefill chunk, from chunks of 1,024 rows up."""

RING_FROM_ROWS = 1024

UPLOAD_RING_BYTES, UPLOAD_MAP_BYTES = 32 * MIB, 2 * MIB
"""Bytes on their way to the device, on either side, and the tables by which its kernels relay them."""

PREFILL_WORKSPACE_BYTES = 128 * MIB

EXPERT_PLACE_BYTES = 3 * 8
"""Addresses of one expert's projections."""

LOOKUP_TOKENS, LOOKUP_TOKEN_BYTES = 1 << 18, 24
"""Tokens that the index of earlier text holds at most, and its bytes for each."""

STACK_BYTES = 1 << 20
"""What a thread touches of its stack, generously."""

INBOX_BYTES = 256
"""Tokens, positions and the like of a window."""

@dataclass(frozen=True)
class HostNeeds:
    """What RAM is held for: sessions, checkpoints of each, whether drafts are also looked up in earlier text, the draft
    layer, if any, threads, bytes of the n-gram table's own reader, and rows of the largest piece of a prompt."""

    sessions: int
    checkpoints: int
    lookup: bool
    draft: DraftFacts | None
    threads: int
    reader_bytes: int = 0
    prompt_rows: int = CELL_ROWS


PREFILL = 3
"""Place of the chunk program among the priced ones."""


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
    for one in programs[PREFILL : PREFILL + 1] if prefill else programs[:PREFILL] + programs[PREFILL + 1 :]:
        for buffer in one.buffers.values():
            known = found.get(buffer.name)
            if buffer.role in ("scratch", "io") and buffer.name != "logits":
                found[buffer.name] = buffer if known is None or buffer.n_bytes > known.n_bytes else known
    return tuple(found.values())


@lru_cache(maxsize=64)
def attention_shapes(g: Geometry, draft_rows: int = 0) -> frozenset[tuple[int, int, int, int, int]]:
    """Attentions of windows and of the draft layer; see `vram_bytes.attention_shapes`."""
    programs = priced_programs(g, draft_rows)
    return vram_bytes.attention_shapes(programs[:PREFILL] + programs[PREFILL + 1 :])


@lru_cache(maxsize=64)
def window_program_bytes(g: Geometry, draft_rows: int = 0) -> int:
    """Buffers of a window's programs and the draft layer's, without the logits. Small inputs lie side by side, and
    every state of a session has a word that tells where it is."""
    buffers, programs = program_buffers(g, False, draft_rows), priced_programs(g, draft_rows)
    inbox = {b.name: -(-b.n_bytes // 8) * 8 for b in buffers if b.role == "io" and b.name not in INBOX_SKIPS}
    states = {b.name for p in programs for b in p.buffers.values() if b.role not in ("io", "scratch", "table")}
    rest = sum(aligned(b.n_bytes) for b in buffers if b.name not in inbox)
    return aligned(sum(inbox.values())) + aligned(8 * max(len(states), 1)) + rest


def chunk_program_bytes(g: Geometry, rows: int) -> int:
    """Buffers of a chunk of `rows` rows: all of them hold so many values a row."""
    return -(-sum(b.n_bytes for b in program_buffers(g, True)) // CELL_ROWS) * rows


def ngram_cache_bytes(rows: int, table_rows: int, row_bytes: int) -> int:
    """Row cache of the n-gram table: rows, their keys and marks, in sets."""
    sets = -(-min(rows, table_rows) // WAYS)
    return sets * (WAYS * (8 + 1 + row_bytes) + 1)


def gpu_window_bytes(g: Geometry, context: int, draft_rows: int = 0, private_bytes: int = 0) -> int:
    """Everything a window of the widest size writes in VRAM besides state and logits, and what a cell of a prompt adds
    that is read as windows. private_bytes: what ops ask for besides, without what grows with the context."""
    inner = private_bytes + vram_bytes.context_bytes(g, attention_shapes(g, draft_rows), context)
    return window_program_bytes(g, draft_rows) + inner + vram_bytes.stream_bytes(g) + vram_bytes.OUTBOX_BYTES


def prefill_bytes(g: Geometry, rows: int, max_expert_bytes: int) -> int:
    """Buffers of a prefill chunk of `rows` rows: program buffers, gathered expert rows, a fixed workspace (block
    scores of a
    slab of rows, product tiles), and from 1,024 rows up a ring for experts on their way. Independent of the context."""
    if rows == 0:
        return 0
    gathered = rows * (g.K + 1) * (g.D + 3 * max(g.F, g.shared_width)) * 2
    ring = max(RING_BYTES // max_expert_bytes, 1) * max_expert_bytes if rows >= RING_FROM_ROWS else 0
    return chunk_program_bytes(g, rows) + aligned(gathered) + PREFILL_WORKSPACE_BYTES + ring


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
        lines.append(PlanLine(vram_line(c.name), "vram", c.vram_bytes, "as in the file: " + ", ".join(kinds)))
    return lines


def gpu_table_bytes(m: ModelFacts) -> int:
    """Small tables besides the rotations: places and factors of experts, the codebook of the embedding's format."""
    (kind,) = m.embedding.by_type
    codebook = sum(aligned(t.nbytes) for t in (GRID[kind], SIGNS)) if kind in GRID else 0
    g = m.geometry
    places = aligned(EXPERT_PLACE_BYTES * g.E * g.L)
    return aligned(WINDOW_ROWS * g.C * 4) + places + codebook + 3 * m.scaled_layers * aligned(4 * g.E)


def draft_lines(g: Geometry, draft: DraftFacts, context: int, kv: str, sessions: int, device: str) -> list[PlanLine]:
    """The draft layer. On the CPU what lies in files stays there: pages of its own files have a line, those of the
    model's file are counted with the model's."""
    cells = state.round_context(context)
    on_cpu = device == "ram"
    layer = draft.memory_bytes if on_cpu else draft.vram_bytes
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
        PlanLine(
            "draft head",
            device,
            draft.head_bytes if on_cpu else draft.vram_head_bytes,
            f"{draft.vocabulary:,} rows of the head",
        ),
    ]
    if not on_cpu:
        ids = aligned(4 * draft.vocabulary) if draft.head_bytes else 0
        rows = sessions * aligned(DRAFT_RING_ROWS * g.CD * 4) + ids
        what = f"{each}streams of {DRAFT_RING_ROWS} rows; tokens of the head"
        lines.append(PlanLine("draft rows", device, rows, what))
    if on_cpu:
        where = "used in place, in the draft layer's own files"
        lines.insert(1, PlanLine("draft layer (mapped)", device, draft.mapped_bytes, where, kind="map"))
    return [line for line in lines if line.n_bytes]


def context_line(gpu: Gpu) -> PlanLine:
    """The driver's share for a process; nothing where free memory is without it already."""
    if gpu.has_context:
        return PlanLine("CUDA context", "vram", 0, "this process has one already", kind="driver")
    n = gpu.multiprocessors
    reason = "driver's share for this process" + (f", by {n} multiprocessors" if n is not None else "")
    return PlanLine("CUDA context", "vram", context_bytes(n), reason, kind="driver")


def gpu_fixed_lines(
    m: ModelFacts, gpu: Gpu, context: int, kv: str, sessions: int, draft: DraftFacts | None,
    form: tuple[bool, bool] | None = None,
) -> list[PlanLine]:  # fmt: skip
    """VRAM lines in order of allocation, up to the prefill buffers: everything but reserve and expert cache. form: None
    where VRAM holds every expert, else see `vram_bytes.private_bytes`."""
    g = m.geometry
    lines = [context_line(gpu), *gpu_weight_lines(m)]
    lines += session_lines(g, context, kv, sessions, "vram")
    back = "a recurrent state, for chunks that fail"
    lines.append(PlanLine("way back", "vram", state.recurrent_bytes(g), back))
    split = m.split if form is not None else None
    linked = split is not None and form[1]
    tables = gpu_table_bytes(m) + (split.tables if linked else 0)
    lines.append(PlanLine("small tables", "vram", tables, "places of experts, codebooks"))
    if draft is not None:
        lines += draft_lines(g, draft, context, kv, sessions, "vram")
    drafted, private = (draft.vocabulary, draft.gpu_private_bytes) if draft else (0, m.gpu_private_bytes)
    if split is not None:
        private = (split.drafted if draft else split.private)[form]
        lines.append(PlanLine("expert exchange", "vram", split.exchange[linked], "decisions, lists, times"))
        if linked:
            lines.append(PlanLine("link staging", "vram", split.staging, "experts over the link"))
    lines += [
        PlanLine("LM head", "vram", m.head.vram_bytes, "before the cache: it must never find the card full"),
        PlanLine(
            "logits",
            "vram",
            vram_bytes.logits_bytes(g.V),
            f"{WINDOW_ROWS} rows, as they are and after penalties, and their summaries",
        ),
        PlanLine(
            "window scratch",
            "vram",
            gpu_window_bytes(g, state.round_context(context), drafted, private),
            f"windows of up to {WINDOW_ROWS} rows",
        ),
        PlanLine(
            "upload staging",
            "vram",
            UPLOAD_RING_BYTES + UPLOAD_MAP_BYTES,
            "raw weights and experts on their way, and how they are relaid",
        ),
        PlanLine(
            "graphs and kernels",
            "vram",
            MODULE_BYTES + WINDOW_ROWS * (g.L + 2) * GRAPH_NODES_PER_LAYER * GRAPH_NODE_BYTES,
            f"{WINDOW_ROWS} graphs; all modules loaded before the cache is sized",
            kind="driver",
        ),
    ]
    return lines


TICKETS = "n-gram tickets"


def ticket_line(g: Geometry, row_bytes: int, rows: int, direct: bool) -> PlanLine:
    """Where rows of the n-gram table land on their way, for pieces of a prompt of up to `rows` rows."""
    n_bytes = kept_ticket_bytes(rows * g.ngram.heads, row_bytes, direct)
    return PlanLine(TICKETS, "ram", n_bytes, f"rows on their way, of up to {rows:,} tokens", kind="later")


def host_lines(m: ModelFacts, context: int, ngram_rows: int, s: HostNeeds, on_gpu: bool = False) -> list[PlanLine]:
    """RAM lines that both backends have; on_gpu: rows that wait for the draft layer are not among them."""
    g, sessions, checkpoints, draft = m.geometry, s.sessions, s.checkpoints, s.draft
    each = " a session" if sessions > 1 else ""
    lines = []
    if m.ngram_rows:
        n_bytes = ngram_cache_bytes(ngram_rows, m.ngram_rows, m.ngram_row_bytes) + s.reader_bytes
        reason = f"{min(ngram_rows, m.ngram_rows):,} rows of {m.ngram_row_bytes} bytes"
        if s.reader_bytes:
            reason += "; pages read past the system's cache"
        lines.append(PlanLine("n-gram cache", "ram", n_bytes, reason))
        lines.append(ticket_line(g, m.ngram_row_bytes, s.prompt_rows, s.reader_bytes > 0))
    if checkpoints:
        n_bytes = sessions * state.checkpoint_bytes(g, checkpoints)
        lines.append(PlanLine("checkpoints", "ram", n_bytes, f"up to {checkpoints} recurrent states{each}"))
    n_bytes, reason = 4 * context, "token ids"
    if s.lookup:
        n_bytes += LOOKUP_TOKEN_BYTES * min(context, LOOKUP_TOKENS)
        reason += "; index of earlier text"
    if draft is not None:
        n_bytes += (checkpoints + (0 if on_gpu else DRAFT_RING_ROWS)) * g.CD * 4
        reason += "; rows that wait for the draft layer"
    lines.append(PlanLine("conversations", "ram", sessions * n_bytes, reason + each, kind="later"))
    stacks = f"stacks of {s.threads} thread{'s' if s.threads > 1 else ''}"
    lines.append(PlanLine("workers", "ram", s.threads * STACK_BYTES, stacks, kind="later"))
    return lines


def exchange_bytes(g: Geometry, shared: int = 0) -> int:
    """Pinned memory through which windows and the host talk: n-gram rows, results, full logits, places of experts; and
    what sharing experts with the CPU takes."""
    rows = WINDOW_ROWS * g.ngram.width * 4 if g.ngram is not None else 0
    places = EXPERT_PLACE_BYTES * g.E * g.L
    return rows + shared + places + vram_bytes.OUTBOX_BYTES + INBOX_BYTES + WINDOW_ROWS * g.V * 4


def gpu_host_lines(m: ModelFacts, context: int, ngram_rows: int, s: HostNeeds, every_expert: bool) -> list[PlanLine]:
    g = m.geometry
    lines = host_lines(m, context, ngram_rows, s, on_gpu=True)
    if s.draft is not None and s.draft.head_bytes:
        lines.append(PlanLine("token ids of drafts", "ram", 4 * s.draft.vocabulary, "of the head's rows"))
    lines.append(PlanLine("upload ring", "ram", UPLOAD_RING_BYTES, "pinned: weights and experts on their way"))
    shared = 0 if every_expert or m.split is None else m.split.pinned
    if shared:
        lines.append(PlanLine("CPU experts", "ram", m.split.service, "scratch of the threads that compute them"))
    what = "n-gram rows, full logits" if every_expert else "rows for the CPU's experts, their results, full logits"
    return [*lines, PlanLine("exchange", "ram", exchange_bytes(g, shared), f"pinned: {what}")]


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
