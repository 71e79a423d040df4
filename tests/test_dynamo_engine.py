"""The Dynamo backend against the interface of ai-dynamo, in this process and as a worker."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from stepgraph import AsyncEngine, Engine, EngineConfig, SamplingParams
from stepgraph.runtime.errors import CheckpointError, RequestError

if importlib.util.find_spec("dynamo") is None:
    pytest.skip("needs ai-dynamo", allow_module_level=True)

from dynamo._core import Context, DistributedRuntime
from dynamo.common.backend import LLMEngine
from stepgraph.runtime.service.dynamo_engine import DynamoEngine

CONFIG = EngineConfig(mode="eager", threads=1, dtype="float32", max_num_seqs=2, num_blocks=256)
PROMPT = [5, 9, 200, 31, 7, 88, 4]
GREEDY = {"temperature": 0.0}
SECONDS = 120


@asynccontextmanager
async def started() -> AsyncIterator[DynamoEngine]:
    engine = DynamoEngine("demo", AsyncEngine.from_pretrained("demo", CONFIG))
    try:
        await engine.start(1)
        yield engine
    finally:
        await engine.cleanup()
        await engine.cleanup()


async def collect(engine: LLMEngine, **request: Any) -> list[dict[str, Any]]:
    whole = {"token_ids": PROMPT, "sampling_options": GREEDY, **request}
    return [chunk async for chunk in engine.generate(whole, Context())]


def tokens_of(chunks: list[dict[str, Any]], index: int = 0) -> list[int]:
    return [token for chunk in chunks if chunk["index"] == index for token in chunk["token_ids"]]


@pytest.fixture(scope="module")
def expected() -> list[int]:
    with Engine.from_pretrained("demo", CONFIG) as engine:
        params = SamplingParams(max_tokens=12, temperature=0)
        return list(engine.generate([PROMPT], params)[0].token_ids)


def test_chunks_have_the_tokens_of_the_engine(expected: list[int]) -> None:
    async def run() -> None:
        async with started() as engine:
            chunks = await collect(engine, stop_conditions={"max_tokens": 12})
            assert tokens_of(chunks) == expected
            assert [chunk.get("finish_reason") for chunk in chunks[:-1]] == [None] * (
                len(chunks) - 1
            )
            assert chunks[-1]["finish_reason"] == "length"
            usage = chunks[-1]["completion_usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), 12)
            stopped = await collect(
                engine, stop_conditions={"max_tokens": 12, "stop_token_ids_hidden": [expected[3]]}
            )
            assert tokens_of(stopped) == expected[: expected.index(expected[3]) + 1]
            assert stopped[-1]["finish_reason"] == "stop"
            both = await collect(
                engine,
                sampling_options={"n": 2, "temperature": 1.0, "seed": 3},
                stop_conditions={"max_tokens": 4},
                output_options={"logprobs": 2},
            )
            assert [len(tokens_of(both, index)) for index in (0, 1)] == [4, 4]
            assert sum("completion_usage" in chunk for chunk in both) == 1
            for chunk in both:
                assert len(chunk["log_probs"]) == len(chunk["token_ids"])
                for entries in chunk["top_logprobs"]:
                    assert [entry["rank"] for entry in entries] == [1, 2]
                    assert entries[0]["logprob"] >= entries[1]["logprob"]
            packed = b"".join(token.to_bytes(4, "little") for token in PROMPT)
            again = await collect(engine, token_ids=packed, stop_conditions={"max_tokens": 12})
            assert tokens_of(again) == expected

    asyncio.run(run())


def test_registration_and_probe() -> None:
    async def run() -> None:
        engine = DynamoEngine("demo", AsyncEngine.from_pretrained("demo", CONFIG))
        registered = await engine.start(1)
        assert registered.llm.total_kv_blocks == 255
        assert registered.llm.kv_cache_block_size == 16
        assert registered.llm.max_num_seqs == 2
        payload = await engine.health_check_payload()
        chunks = [chunk async for chunk in engine.generate(payload, Context())]
        assert len(tokens_of(chunks)) == 1
        await engine.cleanup()

    asyncio.run(run())


def test_an_aborted_request_ends_and_leaves_nothing() -> None:
    async def run() -> None:
        async with started() as engine:
            context = Context()
            request = {
                "token_ids": PROMPT,
                "stop_conditions": {"max_tokens": 1500, "ignore_eos": True},
            }
            chunks = []
            async for chunk in engine.generate(request, context):
                chunks.append(chunk)
                if len(chunks) == 3:
                    await engine.abort(context)
            assert chunks[-1]["finish_reason"] == "cancelled"
            assert len(tokens_of(chunks)) < 1500
            assert tokens_of(await collect(engine, stop_conditions={"max_tokens": 2}))

    asyncio.run(run())


@pytest.mark.parametrize(
    "request_fields",
    [
        {"token_ids": []},
        {"token_ids": [1 << 40]},
        {"sampling_options": {"guided_decoding": {"json": {}}}},
        {"sampling_options": {"temperature": -1}},
    ],
)
def test_requests_that_cannot_be_served(request_fields: dict[str, Any]) -> None:
    async def run() -> None:
        async with started() as engine:
            with pytest.raises(RequestError):
                await collect(engine, **request_fields)

    asyncio.run(run())


def test_a_start_that_fails_is_cleaned_up() -> None:
    async def run() -> None:
        engine = DynamoEngine("none", AsyncEngine.from_pretrained("/no/such/model", CONFIG))
        with pytest.raises(CheckpointError):
            await engine.start(1)
        await engine.cleanup()

    asyncio.run(run())


@pytest.mark.slow
def test_a_worker_serves_clients_of_its_runtime(tmp_path: Path, expected: list[int]) -> None:
    """A worker process registers itself, and a client of the runtime finds it and streams."""
    environment = {**os.environ, "DYN_FILE_KV": str(tmp_path)}
    demo = Path(sys.modules["stepgraph.runtime"].__path__[0], "demo")
    worker = subprocess.Popen(
        [
            *(sys.executable, "-m", "stepgraph.runtime.service.dynamo_engine", str(demo)),
            *("--discovery-backend", "file", "--event-plane", "zmq", "--mode", "eager"),
            *("--threads", "1", "--dtype", "float32", "--num-blocks", "256"),
        ],
        env=environment,
    )

    async def run() -> None:
        loop = asyncio.get_running_loop()
        runtime = DistributedRuntime(loop, "file", "tcp", event_plane="zmq")
        try:
            client = await runtime.endpoint("dynamo.backend.generate").client()
            async with asyncio.timeout(SECONDS):
                await client.wait_for_instances()
                body = {
                    "token_ids": PROMPT,
                    "sampling_options": GREEDY,
                    "stop_conditions": {"max_tokens": 12},
                    "output_options": {},
                    "model": str(demo),
                    "eos_token_ids": [],
                    "annotations": [],
                }
                stream = await client.random(body)
                chunks = [item.data() async for item in stream]
        finally:
            runtime.shutdown()
        assert [token for chunk in chunks for token in chunk["token_ids"]] == expected
        assert chunks[-1]["finish_reason"] == "length"

    try:
        os.environ["DYN_FILE_KV"] = str(tmp_path)
        asyncio.run(run())
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(SECONDS) == 0
    finally:
        os.environ.pop("DYN_FILE_KV", None)
        worker.kill()
        worker.wait()
