"""torch limits the versions of a compiled method; tokens per row must not use them up."""

from __future__ import annotations

import pytest
import torch
from stepgraph.runtime.execution.compiled_parts import CompiledParts
from torch.testing import assert_close


class Steps:
    """A part that torch compiles anew for each number of drafts."""

    def accept(self, drafts_BK: torch.Tensor, counts_B: torch.Tensor) -> torch.Tensor:
        total_B = counts_B
        for draft_B in drafts_BK.unbind(1):
            total_B = torch.where(draft_B > counts_B, total_B + draft_B, total_B)
        return total_B


def test_each_number_of_drafts_has_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda code, *, options, **own: compile_(code, backend="eager", **own)
    )
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 1)
    steps, parts = Steps(), CompiledParts(())
    parts.add(steps.accept)
    for drafts in (2, 3):
        for rows in (4, 6):
            given = torch.randint(9, (rows, drafts)), torch.randint(1, 9, (rows,))
            found = parts.call(steps.accept, *parts.inputs(steps.accept, *given))
            assert_close(found, steps.accept(*given))
    parts.close()
    assert not parts.compiles(steps.accept)
