"""What the loop makes of the tokens: stops, limits, aborts, errors, counts, outputs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ..rigs.fake_device import oracle
from ..rigs.scheduler_rig import Rig


@pytest.mark.parametrize("in_flight", [0, 1])
def test_a_stopped_request_never_shows_the_token_it_had_under_way(in_flight: int) -> None:
    rig = Rig(in_flight=in_flight)
    probe = rig.group(3, max_tokens=6).requests[0]
    rig.arrivals -= 1  # the same prompt and seed again
    output = oracle(probe)[0]
    request = rig.add(3, max_tokens=6, stop={output[2]})
    final = rig.drain()[-1]
    assert (final.token_ids, final.finish_reason) == oracle(request)
    assert len(final.token_ids) <= 3


@pytest.mark.parametrize("in_flight", [0, 1])
def test_max_tokens_wastes_no_step(in_flight: int) -> None:
    """How long the output gets is known beforehand, so nothing is launched past it."""
    rig = Rig(in_flight=in_flight)
    rig.add(3, max_tokens=5)
    rig.drain()
    assert rig.runner.launched == 5


def test_an_error_in_the_text_of_one_request_ends_that_one_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken:
        text, num_chars, stopped = "so far", 6, None
        pushed = 0

        def push(self, token_ids: Sequence[int]) -> str:
            self.pushed += 1
            if self.pushed == 2:
                raise ZeroDivisionError("broken")
            return ""

    rig = Rig()
    healthy = rig.add(3, max_tokens=6)
    bad = rig.add(3, max_tokens=6)
    bad.detokenizer = Broken()  # type: ignore[assignment]
    finished = {o.request_id: o for o in rig.drain() if o.finished}
    failed = finished["request-2"]
    assert (failed.finish_reason, failed.text) == ("error", "so far")
    assert isinstance(failed.error, ZeroDivisionError)
    assert finished["request-1"].token_ids == oracle(healthy)[0]
    assert "request-2" in caplog.text
