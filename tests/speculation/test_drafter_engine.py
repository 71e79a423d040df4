"""Engines with a drafter on the device: its drafts change no token, and a good one is accepted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from stepgraph.runtime import Engine, EngineConfig, SamplingParams
from stepgraph.runtime.kernels import have_compiler

from ..loading.test_weight_formats import save_as
from ..rigs.engine_rig import MIXED_PARAMS, Open, greedy, loop_of, parts_of
from ..rigs.fake_graphs import FakeGraphs, make_fake_graphs  # noqa: F401
from ..rigs.head_references import write_dflash, write_eagle3
from ..rigs.mtp_models import IN_PYTORCH, KINDS, write_predictable
from ..rigs.structured_rig import GRAMMARS
from ..rigs.tiny_models import Tiny, TinyModel
from .test_speculation import CASES, SIZES, run_mixed

pytestmark = [
    pytest.mark.native_kernels,
    pytest.mark.filterwarnings("ignore:no native decoder layers"),
]


MTP = tuple(f"mtp {kind}" for kind in KINDS)
"""Drafters that are in the checkpoint of their target."""
CAPTURED = ("eagle3", "dflash", "mtp mimo", *(f"mtp {kind}" for kind in IN_PYTORCH))
"""Drafters whose steps can be captured on a CPU. Experts in PyTorch cannot, nor layers in C++."""
SHARED = {"mapped": False, "without": ("embed_tokens.weight", "lm_head.weight")}
"""Changes of an EAGLE-3 head that has neither an embedding nor an output projection."""
MODES: dict[str, dict[str, Any]] = {
    "plain": {"kernels": "torch"},
    "native": {"kernels": "native"},
    "cache in 8 bits": {"kernels": "native", "kv_dtype": "int8"},
    "captured": {"mode": "graph", "compile": False, "buckets": (4,)},
    "preempted": {"kernels": "native", "num_blocks": 19},
}


def drafting(directory: Any, drafts: int, *, adaptive: bool = False) -> dict[str, Any]:
    return {
        "method": "draft_model",
        "model": str(directory),
        "num_speculative_tokens": drafts,
        "adaptive": adaptive,
    }


def speculation(
    kind: str, base: TinyModel, directory: Path, drafts: int = 3
) -> tuple[Path, dict[str, Any]]:
    """Write a drafter; return its target and the field of the configuration."""
    method, _, variant = kind.partition(" ")
    fields = drafting(base.directory, drafts) | {"method": method}
    if method == "mtp":
        write_predictable(directory, variant, "embedding", layers=0.25)
        del fields["model"]
        return directory, fields
    if method == "eagle3":
        fields["model"] = str(write_eagle3(directory, **(SHARED if variant else {}))[0])
    elif method == "dflash":
        fields["model"] = str(write_dflash(directory)[0])
    return base.directory, fields


def prompts(directory: Path) -> list[list[int]]:
    vocab = json.loads((directory / "config.json").read_text())["vocab_size"]
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab, (n,), generator=generator).tolist() for n in (30, 4, 12, 7)]


def config_of(case: dict[str, Any], fake_graphs: FakeGraphs, kind: str = "") -> dict[str, Any]:
    """The settings of an engine, whose steps may be captured."""
    config = SIZES | {"dtype": "float32"} | case
    captured, own = config.get("mode") == "graph", kind.removeprefix("mtp ")
    if config.get("mode") == "compile" or (captured and own in IN_PYTORCH):
        fake_graphs.kernels = "compile"  # experts in PyTorch cannot be captured
    native = fake_graphs.kernels == "compile" or config.get("kernels") == "native"
    if native and not have_compiler():
        pytest.skip("needs a C++ compiler")
    if own in IN_PYTORCH and config.get("kernels") == "native":
        config["kernels"] = "auto"  # there are no layers in C++
    if "num_blocks" in config:
        config["num_blocks"] = {"mimo": 45, "mimo_v2_flash": 45, "qwen3_next": 23}.get(own, 19)
    return config


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *product(("eagle3", "dflash", *MTP), [mode for mode in MODES if mode != "captured"]),
        *((kind, "captured") for kind in CAPTURED),
        ("dflash", "compile"),
        *product(("draft_model own", "draft_model other"), CASES),
    ],
)
def test_drafts_change_no_token(
    open_engine: Open, tiny: Tiny, fake_graphs: FakeGraphs, kind: str, case: str, tmp_path: Path
) -> None:
    """Greedy rows and rows with seeds. The prompts are cached the second time.

    Drafts of a module or of the model itself are mostly right.
    """
    variant, config = "base", MODES.get(case, {"mode": case})
    if "draft_model" in kind:
        variant, config = CASES[case]
    config = config_of(config, fake_graphs, kind)
    drafts = 1 if config.get("mode") == "graph" else 3
    target, own = speculation(kind, tiny(variant), tmp_path, drafts)
    if kind == "draft_model other":
        own["model"] = str(tiny("base").directory)
    source = variant if "draft_model" in kind else target
    plain, engine = (open_engine(source, **config, speculation=s) for s in (None, own))
    fake_graphs.stream.behind = config.get("mode") == "graph"  # from now on, the device is late
    expected = run_mixed(plain, prompts(target), MIXED_PARAMS)
    for _ in range(2):
        assert run_mixed(engine, prompts(target), MIXED_PARAMS) == expected
    stats = engine.stats()
    drafted, accepted = (stats["speculation"][name] for name in ("drafted", "accepted"))
    assert stats["fallbacks"] == 0
    assert stats["preemptions"] >= ("num_blocks" in config)
    assert stats["cache"]["hit_tokens"] > 0
    assert drafted > 50
    if kind in MTP:
        assert 20 < accepted <= drafted - 20
    assert accepted > 20 or kind != "draft_model own"


def test_a_draft_model_stays_in_the_codes_of_its_checkpoint(
    open_engine: Open, tiny: Tiny, tmp_path: Path
) -> None:
    save_as("awq", tiny("wide_groups"), tmp_path)
    sizes = SIZES | {"dtype": "float32", "kernels": "native"}
    plain = open_engine(tmp_path, **sizes)
    engine = open_engine(tmp_path, **sizes, speculation=drafting(tmp_path, 3))
    assert run_mixed(engine, prompts(tmp_path), MIXED_PARAMS) == run_mixed(
        plain, prompts(tmp_path), MIXED_PARAMS
    )
    held, both = (each.stats()["memory"]["weights"] for each in (plain, engine))
    assert both["planned"] == both["measured"] == 2 * held["measured"]
    assert engine.stats()["speculation"]["accepted"] > 20


@pytest.mark.parametrize("reads", ["embedding", "hidden"])
@pytest.mark.parametrize("mode", ["plain", "native"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_module_that_knows_the_next_token_is_right(
    open_engine: Open, fake_graphs: FakeGraphs, kind: str, mode: str, reads: str, tmp_path: Path
) -> None:
    """It is given the hidden states and the tokens that it was made for, in all of 4 drafts, of
    several prompts in a step and in chunks that end before the prompt does, too."""
    write_predictable(tmp_path, kind, reads)
    config = config_of(MODES[mode], fake_graphs, f"mtp {kind}")
    config |= {"prefill_chunk": 16, "block_size": 8}
    own = {"method": "mtp", "num_speculative_tokens": 4, "adaptive": False}
    engine = open_engine(tmp_path, **config, speculation=own)
    outputs = engine.generate(prompts(tmp_path), greedy(31))
    assert all(
        after == (7 * token + 3) % 40
        for output in outputs
        for token, after in zip(output.token_ids, output.token_ids[1:], strict=False)
    )
    stats = engine.stats()
    assert stats["speculation"]["drafted"] == stats["speculation"]["accepted"] > 80
    for term in ("weights", "cache"):
        assert stats["memory"][term]["measured"] == stats["memory"][term]["planned"], term


def test_auto_drafts_with_the_module_of_a_checkpoint(
    open_engine: Open, base: TinyModel, tmp_path: Path
) -> None:
    """Which the memory plan counts; adaptive, so that it pays or rests."""
    write_predictable(tmp_path, "glm4_moe", "embedding")
    sizes = SIZES | {"dtype": "float32", "kernels": "torch"}
    plain, drafting, other = (
        open_engine(source, **sizes, speculation=method)
        for source, method in ((tmp_path, None), (tmp_path, "auto"), (base.directory, "auto"))
    )
    expected, found = (
        [output.token_ids for output in engine.generate(prompts(tmp_path), greedy(20))]
        for engine in (plain, drafting)
    )
    assert found == expected
    stats = drafting.stats()
    assert stats["speculation"]["method"] == "mtp"
    assert stats["memory"]["weights"]["planned"] > plain.stats()["memory"]["weights"]["planned"]
    for term in ("weights", "cache"):
        assert stats["memory"][term]["measured"] == stats["memory"][term]["planned"]
    assert other.stats()["speculation"]["method"] == "suffix"


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"prefill_chunk": 16},
        {"num_blocks": 19, "host_cache_bytes": 1 << 20},
        {"num_blocks": 19},
    ],
)
def test_the_model_itself_is_a_perfect_drafter(
    open_engine: Open, base: TinyModel, config: dict[str, Any]
) -> None:
    """Greedy, in float32: a slot that is missing or wrong would cost an accepted draft."""
    own = drafting(base.directory, 3)
    engine = open_engine("base", **SIZES | config, dtype="float32", speculation=own)
    params = [greedy(28), greedy(40), greedy(33), greedy(19, n=2)]
    for _ in range(2):  # the second time prompts are cached
        run_mixed(engine, base.prompts(30, 4, 12, 7), params)
    stats = engine.stats()["speculation"]
    assert stats["verify_steps"] > 15
    assert stats["accepted"] == stats["drafted"]
    assert engine.stats()["preemptions"] >= 2 * ("num_blocks" in config)


@pytest.mark.parametrize("kernels", ["native", pytest.param("torch", marks=pytest.mark.slow)])
@pytest.mark.parametrize("chunk", [32, 8])
def test_the_step_after_a_prompt_verifies_drafts(
    open_engine: Open, base: TinyModel, kernels: str, chunk: int
) -> None:
    """Wherever blocks and chunks end: 5 tokens are one of the prompt's step, 3 drafts, one more."""
    sizes = SIZES | {"prefill_chunk": chunk, "kernels": kernels, "dtype": "float32"}
    sizes["max_batch_tokens"] = 64  # so that chunks leave room for drafts
    engine = open_engine("base", **sizes, speculation=drafting(base.directory, 3))
    accepted = 0
    for length in range(1, 10):
        for _ in range(2):  # the second time prompts are cached
            engine.generate(base.prompts(length, length + 7), greedy(5))
            accepted += 6
            stats = engine.stats()["speculation"]
            assert stats["accepted"] == stats["drafted"] == accepted
    engine.generate(base.prompts(9), greedy(5, n=2))  # there are 3 slots left, and none are added
    assert engine.stats()["speculation"]["accepted"] == accepted + 4
    engine.check_integrity()


@pytest.mark.parametrize("weight_dtype", ["auto", "int8", "int4"])
def test_memory_is_planned_for_a_drafter_as_it_is_stored(
    open_engine: Open, base: TinyModel, weight_dtype: str
) -> None:
    """Its weights have the names of the target's, which may be codes."""
    sizes = SIZES | {"kernels": "native", "weight_dtype": weight_dtype}
    engine = open_engine("base", **sizes, speculation=drafting(base.directory, 3))
    parts = parts_of(engine)
    drafter = parts.runner.drafter
    assert drafter is not None
    stored = parts.model.weight_bytes + drafter.drafter.weight_bytes
    assert parts.plan.terms["weights"] == stored


def test_nothing_of_an_earlier_request_is_left_in_new_blocks(
    open_engine: Open, base: TinyModel
) -> None:
    """Rows decode while the drafter rests, in blocks that others have filled with NaN. These are
    zeroed when it proposes next."""
    engine = open_engine("base", **SIZES, speculation=drafting(base.directory, 3, adaptive=True))
    loop = loop_of(engine)
    speculator: Any = loop.speculator
    speculator._credit = -1e9
    assert loop.runner.drafter is not None
    arena = loop.runner.drafter.arena.tensor
    arena[:, :, 1:] = float("nan")
    (prompt,) = base.prompts(9)
    engine.add_request(prompt, greedy(20), "r")
    for _ in range(12):
        engine.step()
    table = loop.scheduler.cache.block_table("r/0")
    assert len(table) > 3
    proposed = engine.stats()["speculation"]["proposing_steps"]
    speculator._credit = 10.0
    engine.step()
    assert engine.stats()["speculation"]["proposing_steps"] == proposed + 1
    assert not arena[:, :, list(table)].isnan().any()
    engine.abort("r")
    engine.step()
    engine.check_integrity()


# Steps of torch.compile ---------------------------------------------------------------------------


COMPILED: dict[str, Any] = {
    "device": "cpu",
    "mode": "compile",
    "kernels": "torch",
    "dtype": "float32",
    "max_num_seqs": 2,
    "max_model_len": 128,
    "prefill_chunk": 32,
    "num_blocks": 64,
    "structured_output": True,
}
needs_compiler = pytest.mark.skipif(not have_compiler(), reason="needs a C++ compiler")


def versions(engine: Engine) -> int:
    """How many pieces of code were compiled, or found in the cache."""
    return sum(engine.stats()["start"]["code_cache"].values())


def demo_tokens(engine: Engine) -> dict[str, Any]:
    assert engine.tokenizer is not None
    texts = ["def add(a, b):\n    return", "import os\nimport", "x = [1, 2, 3]\nfor"]
    prompts = [engine.tokenizer.encode(text) for text in [*texts, *texts]]
    params = [
        SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=30, temperature=0.8, top_p=0.9, seed=3, presence_penalty=0.3),
        SamplingParams(max_tokens=30, temperature=0.0, n=2),
        SamplingParams(max_tokens=24, temperature=0.0, structured=GRAMMARS[1]),
        SamplingParams(max_tokens=24, seed=4, structured=GRAMMARS[0], logprobs=2),
        SamplingParams(max_tokens=24, temperature=0.7, seed=5, repetition_penalty=1.2),
    ]
    return run_mixed(engine, prompts, params)


@pytest.fixture(scope="module")
def demo_expected() -> Iterator[dict[str, Any]]:
    with Engine.from_pretrained("demo", EngineConfig(**COMPILED)) as engine:
        # Prefill; of one row or token, and of several: decode, full sampler, masks, greedy tokens.
        assert versions(engine) == 1 + 2 * 4
        yield demo_tokens(engine)


@needs_compiler
@pytest.mark.slow  # the compiler takes minutes for the full sampler
@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_compiled_steps_with_grammars(demo_expected: dict[str, Any], method: str) -> None:
    """With the head that was trained for the demo model, and with the model itself."""
    own = drafting("demo", 3) | {"method": method}
    if method == "eagle3":
        del own["model"]
    with Engine.from_pretrained("demo", EngineConfig(**COMPILED, speculation=own)) as engine:
        # Of one row and of several: steps that only propose, and that verify, whatever the drafts;
        # the full sampler of these. Masked tokens of verify steps.
        assert versions(engine) == 1 + 2 * 4 + 2 * 3 + 1
        assert demo_tokens(engine) == demo_expected
        stats = engine.stats()
        assert stats["fallbacks"] == 0
        assert stats["speculation"]["accepted"] > 20
        engine.check_integrity()


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dflash", *MTP])
def test_compiled_steps_of_tiny_models(
    open_engine: Open, base: TinyModel, tmp_path: Path, kind: str
) -> None:
    """Drafters read several layers, or the last hidden state before or after its norm."""
    target, own = speculation(kind, base, tmp_path)
    config = COMPILED | {"max_model_len": 64, "structured_output": False}
    plain, engine = (open_engine(target, **config, speculation=s) for s in (None, own))
    expected = run_mixed(plain, prompts(target), MIXED_PARAMS)
    assert run_mixed(engine, prompts(target), MIXED_PARAMS) == expected
    stats = engine.stats()
    assert stats["fallbacks"] == 0
    assert stats["speculation"]["verified_rows"] > 20
    assert stats["speculation"]["accepted"] > 0 or kind == "dflash"  # whose weights are random
