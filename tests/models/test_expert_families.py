"""Engines of every family with experts compute what transformers computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from stepgraph.runtime import Engine

from ..rigs.expert_models import EXPERT_VARIANTS
from .test_families import assert_parity

if TYPE_CHECKING:
    from conftest import TinyModel


REPEATED = (  # of parts that others have
    *("mixtral_one", "mixtral_all", "qwen3_moe_sliding", "gpt_oss_odd", "deepseek_v2_greedy"),
    *("deepseek_v3_scaled", "llama4_maverick"),
)
CASES = [
    pytest.param(variant, marks=pytest.mark.slow) if variant in REPEATED else variant
    for variant in EXPERT_VARIANTS
]


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("variant", CASES)
def test_eager_engine_equals_transformers(
    open_engine: Callable[..., Engine], tiny: Callable[[str], TinyModel], variant: str
) -> None:
    assert_parity(open_engine(variant, prefill_chunk=32, block_size=4), tiny(variant))
