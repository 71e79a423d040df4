"""An exception at a line of a public method: the engine serves on, or says that it failed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from stepgraph.runtime import Engine, EngineFailedError, RequestError, RequestOutput

from ..rigs.fake_engine import check_serves, expected, fake_engine, params
from ..rigs.line_faults import LineFault

BYSTANDER = [8, 1, 8, 2, 8]
PROMPTS = [[1, 2, 3, 4, 5], [6, 7]]


def close_and_open(engine: Engine) -> None:
    with engine:
        pass


USES: dict[str, Callable[[Engine], object]] = {
    "step": lambda engine: engine.step(),
    "generate": lambda engine: engine.generate(PROMPTS, [params(1, 3), params(2, 2)]),
    "add_request": lambda engine: engine.add_request(PROMPTS[0], params(3), "new"),
    "abort": lambda engine: engine.abort("bystander"),
    "reset_prefix_cache": lambda engine: engine.reset_prefix_cache(),
    "score": lambda engine: engine.score([1, 2, 3, 4], 2),
    "close": lambda engine: engine.close(),
    "with": close_and_open,
}
ERRORS = (KeyboardInterrupt, MemoryError)


def prepared(name: str) -> Engine:
    """An engine with a request half done, one that waits, and blocks in the prefix cache."""
    engine = fake_engine(max_num_seqs=3)
    engine.generate([PROMPTS[0]], params(5))
    if name != "score":  # which an engine with requests refuses
        engine.add_request(BYSTANDER, params(9, 7), "bystander")
        engine.step()
        engine.step()
    return engine


def check_after(engine: Engine, outputs: list[RequestOutput], aborted: bool) -> None:
    """Assert that an engine serves, and has not lost the bystander; or that it has failed."""
    try:
        for _ in range(100):
            if not engine.has_unfinished():
                break
            outputs += engine.step()
        assert not engine.has_unfinished(), "steps make no progress"
        check_serves(engine)
    except EngineFailedError:
        assert engine.stats()["healthy"] is False
        with pytest.raises(EngineFailedError):
            engine.add_request([1])
        with pytest.raises(EngineFailedError):
            engine.generate([[1]])
        engine.close()
        return
    final = [o for o in outputs if o.finished and o.request_id == "bystander"]
    assert len(final) <= 1, "one last output"
    if final and not aborted:
        assert final[0].token_ids == expected(engine, BYSTANDER, params(9, 7))
    engine.add_request([1], params(1), "bystander")  # its id is free
    engine.close()


def interrupt(name: str, at: int, error: type[BaseException]) -> None:
    engine = prepared(name)
    outputs: list[RequestOutput] = []
    fault = LineFault(at, error)
    # What a prompt raises while it is read is the request's error.
    with suppress(error, EngineFailedError, RequestError), fault:
        made = USES[name](engine)
        if name == "step":
            outputs += made  # type: ignore[operator]
    try:
        if name in ("close", "with"):
            engine.close()
            engine.close()
            return
        check_after(engine, outputs, name == "abort")
    except BaseException as caught:
        caught.add_note(f"{error.__name__} at line event {at}: {fault.where}")
        raise


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", USES)
def test_an_exception_at_a_line(name: str, every: bool) -> None:
    """At some, and at the last ones, where a call gives the engine back to others."""
    engine = prepared(name)
    with LineFault(-1, KeyboardInterrupt) as fault:
        USES[name](engine)
    lines = fault.lines
    assert lines > 2
    for at in range(1, lines + 1):
        if every or at > lines - 8 or not (at - 1) % max(1, lines // 8):
            for error in ERRORS if every else ERRORS[at % 2 :][:1]:
                interrupt(name, at, error)
