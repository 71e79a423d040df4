"""Models with recurrent state on native kernels: the tokens of transformers."""

from __future__ import annotations

import pytest
from stepgraph.runtime.kernels import have_compiler

from ..rigs.engine_rig import Open, greedy, tokens_of
from ..rigs.tiny_models import Tiny

VARIANTS = (
    *("lfm2", "qwen3_5", "olmo_hybrid", "olmo_hybrid_rotated"),
    *("granite4_hybrid_dense", "granite4_hybrid", "bamba", "qwen3_5_moe", "qwen3_next"),
)

pytestmark = pytest.mark.skipif(not have_compiler(), reason="needs a C++ compiler")


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("chunk", [13, 64, 512])
@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_equal_transformers(
    open_engine: Open, tiny: Tiny, variant: str, chunk: int, kernels: str
) -> None:
    model = tiny(variant)
    prompts = model.prompts(1, 15, 16, 17, 63, 64, 65, 130, seed=3)
    engine = open_engine(
        variant, kernels=kernels, dtype="float32", prefill_chunk=chunk, num_blocks=200
    )
    expected = [[model.greedy([prompt], 24)[0]] for prompt in prompts]
    assert tokens_of(engine.generate(prompts, greedy(24))) == expected
