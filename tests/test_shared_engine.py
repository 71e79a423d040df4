"""Threads, re-entry and forks: who may call an engine when, and what the others see."""

from __future__ import annotations

from .fake_engine import check_serves, fake_engine


def test_it_serves() -> None:
    engine = fake_engine()
    check_serves(engine)
    print(engine.score([1, 2, 3, 4], 2))
    check_serves(engine)
