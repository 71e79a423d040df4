"""The operator that computes all drafts of an EAGLE-3 head, against the modules of the head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from stepgraph.runtime import kernels
from stepgraph.runtime.execution.inputs import DeviceRows
from stepgraph.runtime.execution.step_functions import DraftStep, batch_of_slots
from stepgraph.runtime.execution.step_key import StepKey
from stepgraph.runtime.kernels.weights import INT8, MODEL, WeightStorage
from stepgraph.runtime.loading.drafter_loading import find_drafter
from stepgraph.runtime.models.drafters.drafter import FollowedTokens
from stepgraph.runtime.models.drafters.feature_head import Eagle3

from ..rigs.drafter_rig import BLOCK_SIZE, CPU, GROUPS, LENGTH, DrafterRig, load_target
from ..rigs.head_references import random_layer, write_eagle3, write_head
from ..rigs.thread_rig import kernel_threads
from ..rigs.tiny_models import TinyModel
from ..speculation.test_drafters import EAGLE3_VARIANTS

pytestmark = [
    pytest.mark.usefixtures("nan_in_new_memory"),
    pytest.mark.skipif(not kernels.have_compiler(), reason="needs a C++ compiler"),
]

ROWS = 5


def written(directory: Path, variant: str) -> Path:
    """The checkpoint of a variant of `test_drafters.py`, or of a head of two layers."""
    if variant != "two layers":
        return write_eagle3(directory, **EAGLE3_VARIANTS[variant])[0]
    _, config, weights = write_eagle3(directory, speculators=True, num_hidden_layers=2)
    second = random_layer(config, config["hidden_size"])
    stored: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return write_head(
        directory, stored, weights | {f"layers.1.{name}": w for name, w in second.items()}
    )


def step_of(rig: DrafterRig, seed: int) -> tuple[DeviceRows, FollowedTokens, torch.Tensor, int]:
    """A verify step of random rows that has sampled: its tokens, their first ones, read blocks.

    The last lane is padding. A token is not finite.
    """
    random = torch.Generator().manual_seed(seed)
    state = DeviceRows.allocate(ROWS, GROUPS, LENGTH // BLOCK_SIZE, rig.vocab, CPU)
    state.block_tables.copy_(rig.tables)
    state.positions[:ROWS] = torch.randint(0, LENGTH - 12, (ROWS,), generator=random)
    rows = torch.cat((torch.randperm(ROWS, generator=random), torch.tensor([state.null_row])))
    counts = torch.randint(1, 6, (len(rows),), generator=random)
    counts[-1] = 1
    drafts = torch.randint(0, rig.vocab, (len(rows), 5), generator=random)
    token_ids, positions, slots, token_rows, starts = torch.ops.stepgraph.row_inputs.default(
        *(rows, drafts, counts, state.token_ids, state.positions, state.block_tables, BLOCK_SIZE)
    )
    batch = batch_of_slots(
        *(state, BLOCK_SIZE, positions, slots, token_rows, rows),
        LENGTH // BLOCK_SIZE,
        query_start_loc=starts,
    )
    count = len(token_ids)
    next_ids = torch.randint(0, rig.vocab, (count,), generator=random)
    next_ids[count // 2] = -1
    features = torch.randn(count, rig.features, generator=random).to(rig.dtype)
    accepted = 1 + (torch.rand(len(rows), generator=random) * counts).long()
    state.positions[rows[:-1]] += accepted[:-1]
    first = starts[:-1].contiguous()
    return state, FollowedTokens(token_ids, next_ids, features, batch), first, len(rows)


@pytest.mark.parametrize(
    ("variant", "dtype", "weights"),
    [
        *((variant, torch.float32, MODEL) for variant in (*EAGLE3_VARIANTS, "two layers")),
        ("published", torch.bfloat16, MODEL),
        ("published", torch.bfloat16, INT8),
        ("shared modules", torch.bfloat16, INT8),
        ("other hidden size", torch.float32, INT8),
    ],
)
def test_drafts_are_those_of_the_modules(
    base: TinyModel,
    variant: str,
    dtype: torch.dtype,
    weights: WeightStorage,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    target, chosen = load_target(base.directory, dtype, weights=weights)
    config = find_drafter(written(tmp_path / "head", variant), target.config, "eagle3")
    rig = DrafterRig(config, target, chosen, rows=ROWS)
    assert isinstance(rig.drafter, Eagle3)
    rig.arena.normal_()
    rig.arena[:, :, 0] = 0.0
    for seed, drafts in enumerate((1, 3, 4)):
        state, tokens, first, rows = step_of(rig, seed)
        key = StepKey("decode", rows, LENGTH // BLOCK_SIZE, False, drafts=drafts)
        # Some rows have no slot for the last drafts, one has none for any.
        room = torch.arange(rows) % 4
        stops = (state.positions[tokens.batch.rows] + 1 + room).clamp(max=LENGTH)
        step = DraftStep(rig.drafter, rig.arena, state, BLOCK_SIZE, native=True)
        before, found = rig.arena.clone(), []
        for threads in (1, 2):
            rig.arena.copy_(before)
            with kernel_threads(threads), torch.no_grad():
                found.append(
                    (step.propose(key, tokens, tokens.batch.rows, first, stops), rig.arena.clone())
                )
        rig.arena.copy_(before)
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(Eagle3, "operator", None)
            expected = step.propose(key, tokens, tokens.batch.rows, first, stops)
        assert not torch.equal(before, rig.arena)
        for ours, arena in found:
            assert torch.equal(ours.token_ids, expected.token_ids)
            torch.testing.assert_close(
                ours.probabilities, expected.probabilities, rtol=1e-4, atol=1e-6
            )
            # The null block takes what several tokens write, in any order.
            torch.testing.assert_close(arena[:, :, 1:], rig.arena[:, :, 1:], rtol=1e-4, atol=1e-4)
