"""All programs of one model at one context and KV format."""

from __future__ import annotations

from strata.arch.flash_next.mtp import append_program, draft_state_buffers, step_program
from strata.arch.flash_next.program import commit_program, head_program, state_buffers, trunk_program
from strata.base.errors import need
from strata.base.geometry import CELL_ROWS, WINDOW_ROWS, Geometry
from strata.base.program import Buffer, DraftPrograms, ProgramSet

WINDOWS = range(1, WINDOW_ROWS + 1)


def session_buffers(g: Geometry, cells: int, kv: str, draft: bool) -> list[Buffer]:
    """Everything one session holds; `draft`: with a draft layer."""
    return state_buffers(g, cells, kv) + (draft_state_buffers(g, cells, kv) if draft else [])


def build_programs(g: Geometry, cells: int, kv: str, draft_rows: int = 0, chunk_rows: int = 0) -> ProgramSet:
    """cells: context in cells, a multiple of 256; draft_rows: rows of the draft layer's head, 0 without one.

    chunk_rows: rows of the largest prefill chunk, whole cells; 0 where prompts are read cell by cell.
    """
    need(chunk_rows % CELL_ROWS == 0, "rows of a prefill chunk", found=chunk_rows, needed=f"a multiple of {CELL_ROWS}")
    draft = None
    if draft_rows:
        appends = {T: append_program(g, T, cells, kv) for T in WINDOWS}
        wide = append_program(g, max(chunk_rows // 2, CELL_ROWS), cells, kv) if chunk_rows else None
        draft = DraftPrograms(appends, step_program(g, cells, kv, draft_rows), wide)
    return ProgramSet(
        windows={T: trunk_program(g, T, cells, kv) for T in WINDOWS},
        heads={T: head_program(g, T) for T in WINDOWS},
        commit=commit_program(g, WINDOW_ROWS, cells, kv),
        prefill=trunk_program(g, CELL_ROWS, cells, kv, advance=True),
        states=tuple(session_buffers(g, cells, kv, draft is not None)),
        draft=draft,
        chunk=trunk_program(g, chunk_rows, cells, kv, advance=True) if chunk_rows else None,
    )
