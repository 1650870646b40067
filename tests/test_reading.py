"""How a prompt is cut into chunks and windows."""

from hypothesis import given
from hypothesis import strategies as st

from strata.base.geometry import CELL_ROWS, WINDOW_ROWS
from strata.runtime.reading import CHECKPOINT_EVERY, checkpoint_marks, pieces

places = st.integers(0, 40 * CELL_ROWS)
chunks = st.integers(1, 32).map(lambda n: n * CELL_ROWS)


@given(places, places, st.lists(places, max_size=4), chunks)
def test_pieces_cover_the_rows_in_order(a, b, marks, chunk_rows):
    start, stop = min(a, b), max(a, b)
    at = start
    for piece in pieces(start, stop, marks, chunk_rows=chunk_rows):
        assert piece.start == at and 0 < piece.n <= (chunk_rows if piece.cell else WINDOW_ROWS)
        if piece.cell:
            assert piece.start % CELL_ROWS == 0 and piece.n % CELL_ROWS == 0
        assert not any(piece.start < m < piece.start + piece.n for m in marks)
        at += piece.n
    assert at == stop


@given(places, places, st.lists(places, max_size=4), chunks)
def test_the_same_rows_form_cells_whatever_the_chunk(a, b, marks, chunk_rows):
    def cells(rows):
        return [
            cell
            for piece in pieces(min(a, b), max(a, b), marks, chunk_rows=rows)
            if piece.cell
            for cell in range(piece.start, piece.start + piece.n, CELL_ROWS)
        ]

    assert cells(chunk_rows) == cells(CELL_ROWS)


def test_chunks_are_as_long_as_they_may_be():
    found = [(p.start, p.n, p.cell) for p in pieces(0, 2100, chunk_rows=1024)]
    assert found[:3] == [(0, 1024, True), (1024, 1024, True), (2048, 8, False)]
    assert [p.n for p in pieces(1024, 2048, [1536], chunk_rows=8192)] == [512, 512]
    assert not any(p.cell for p in pieces(0, 600, windows_only=True, chunk_rows=8192))


@given(places, places, st.lists(places, max_size=4), chunks)
def test_automatic_checkpoints_do_not_cut_chunks(a, b, turns, chunk_rows):
    start, stop = min(a, b), max(a, b)
    marks = checkpoint_marks(start, stop, turns, chunk_rows)
    assert marks == sorted(set(marks)) and all(start < m <= stop for m in marks)
    assert {t for t in turns if start < t <= stop} <= set(marks)
    every = [m for m in marks if m not in turns]
    assert all(m % max(CHECKPOINT_EVERY, chunk_rows) == 0 for m in every)
