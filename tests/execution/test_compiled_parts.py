"""torch limits the versions of a compiled method; sizes of steps must not use them up."""

from __future__ import annotations

import pytest
import torch
from stepgraph.runtime.execution.step_functions import CompiledParts, compile_settings
from torch.testing import assert_close


class Steps:
    """A part with as many tokens in each row."""

    def totals(self, token_ids_BN: torch.Tensor, counts_B: torch.Tensor) -> torch.Tensor:
        n = token_ids_BN.shape[1]
        valid_BN = torch.arange(n) < counts_B[:, None]
        lanes_TN = token_ids_BN[:, None].expand(-1, n, -1).reshape(-1, n)
        return lanes_TN.sum(1) + torch.where(valid_BN, token_ids_BN, 0).flatten()


def test_code_is_shared_by_all_rows_and_tokens_per_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """One version for one row, one for more; as many rows as tokens are no case of their own."""
    compile_, versions = torch.compile, []

    def count(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        versions.append(graph)
        return graph

    monkeypatch.setattr(
        torch, "compile", lambda code, *, options, **own: compile_(code, backend=count, **own)
    )
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 2)
    steps, parts = Steps(), CompiledParts(())
    parts.add(steps.totals)
    with compile_settings():
        for rows in (4, 2, 6, 1):
            for tokens in (4, 3, 2, 8):
                given = torch.randint(9, (rows, tokens)), torch.randint(1, 9, (rows,))
                found = parts.call(steps.totals, *parts.inputs(steps.totals, *given))
                assert_close(found, steps.totals(*given))
            assert len(versions) == (1 if rows > 1 else 2)
    parts.close()
    assert not parts.compiles(steps.totals)
