"""How many splits attention of a decode step has: plain numbers, which need no Triton."""

from __future__ import annotations

__all__ = ["MOST_SPLITS", "choose_splits"]

MOST_SPLITS = 32


def choose_splits(
    rows: int, kv_heads: int, most_positions: int, multiprocessors: int, tile_positions: int = 64
) -> int:
    """How many splits a captured step of `rows` rows gets.

    As many programs as processors for few rows, where each split costs the kernel that combines
    them more than a second program on a processor brings; twice as many for more rows. No more
    than there can be tiles.
    """
    programs = multiprocessors * (1 if rows <= 2 else 2)
    tiles = -(-most_positions // tile_positions)
    return max(1, min(programs // (rows * kv_heads), tiles, MOST_SPLITS))
