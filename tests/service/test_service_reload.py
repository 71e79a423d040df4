"""`AsyncEngine.reload`, `sleep` and `wake`: which model serves, and which memory is held."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
import torch
from stepgraph.runtime import AsyncEngine, Engine, EngineConfig
from stepgraph.runtime.errors import CheckpointError

from ..rigs.engine_rig import greedy
from ..rigs.service_rig import in_event_loop, resident_bytes
from ..rigs.tiny_models import Tiny, TinyModel, changed_checkpoint

TOKENS = [5, 1, 19, 7, 30, 2, 11, 23]
CONFIG = EngineConfig(device="cpu", mode="eager", max_num_seqs=4, weight_dtype="int8")


@pytest.fixture
def other(base: TinyModel, tmp_path: Path) -> Path:
    """A checkpoint of the same shapes as `base` with other weights."""

    def flip(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {name: tensor.flip(0) for name, tensor in tensors.items()}

    return changed_checkpoint(base.directory, tmp_path / "other", flip)


def tokens_of(source: Path) -> list[int]:
    with Engine.from_pretrained(source, CONFIG) as engine:
        return engine.generate([TOKENS], greedy())[0].token_ids


async def generate(engine: AsyncEngine) -> list[int]:
    return (await engine.generate(TOKENS, greedy())).token_ids


@in_event_loop
async def test_weights_of_the_same_shapes_are_taken_in_place(base: TinyModel, other: Path) -> None:
    async with AsyncEngine.from_pretrained(base.directory, CONFIG) as engine:
        before, after = await generate(engine), tokens_of(other)
        running = [asyncio.create_task(generate(engine)) for _ in range(3)]
        await asyncio.sleep(0)
        result = await engine.reload(other)
        assert result.in_place
        assert result.reason is None
        assert result.seconds > 0
        assert [await task for task in running] == [before] * 3
        assert await generate(engine) == after != before
        await engine.sleep()
        await engine.wake()
        assert await generate(engine) == after


@in_event_loop
async def test_another_model_gets_a_new_engine(base: TinyModel, other: Path, tiny: Tiny) -> None:
    async with AsyncEngine.from_pretrained(base.directory, CONFIG) as engine:
        larger = tiny("biases").directory
        result = await engine.reload(larger)
        assert not result.in_place
        assert "attention_bias is True" in str(result.reason)
        assert await generate(engine) == tokens_of(larger)
        await engine.sleep()
        result = await engine.reload(other)
        assert not result.in_place
        assert result.reason == "the engine was asleep"
        assert await generate(engine) == tokens_of(other)


def make_unsupported(directory: Path) -> None:
    changed_checkpoint(directory, directory, model_type="unknown")


def put_nan_into_a_later_weight(directory: Path) -> None:
    """It is found when some weights are replaced already."""
    name = "model.layers.2.mlp.down_proj.weight"
    changed_checkpoint(directory, directory, lambda tensors: tensors[name][0, 0].fill_(torch.nan))


@in_event_loop
async def test_what_cannot_be_loaded_leaves_the_present_model(base: TinyModel, other: Path) -> None:
    async with AsyncEngine.from_pretrained(base.directory, CONFIG) as engine:
        before = await generate(engine)
        for damage in (put_nan_into_a_later_weight, make_unsupported, shutil.rmtree):
            damage(other)
            with pytest.raises(CheckpointError):
                await engine.reload(other)
            assert engine.health().ready
            assert await generate(engine) == before


@pytest.mark.slow
@in_event_loop
async def test_sleep_gives_memory_back() -> None:
    """A model of 257 MiB and its cache: at most a tenth of it stays resident."""

    def resident() -> float:
        return resident_bytes() / 2**20

    config = EngineConfig(
        device="cpu", max_num_seqs=2, max_model_len=512, prefill_chunk=64, memory_tokens=1024
    )

    async with AsyncEngine.from_pretrained("preset:smollm2-135m", config) as engine:
        tokens = await generate(engine)
        await engine.sleep()
        asleep = resident()  # code and libraries are loaded from here on
        for _ in range(3):
            await engine.wake()
            assert await generate(engine) == tokens
            assert resident() > asleep + 200
            await engine.sleep()
            assert resident() < asleep + 25
