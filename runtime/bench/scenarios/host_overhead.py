"""Host overhead per step (plan, launch, commit), with a model that computes nothing.

Scheduler, cache, loop, row state and inputs are those that serve requests. Only the steps are not:
each returns outputs that were made beforehand, so the time of a call of `StepLoop.step` is the
host's own. Every row decodes; prompt lengths differ, so that in every step some rows begin a block,
publish one, and update their block tables. The compared rigs are interleaved, a few steps each.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ....cache.arena import Arena
from ....cache.kv_cache import KVCache
from ....graphs.library import StepLibrary
from ....graphs.steps import EagerStep, Step
from ....profiling.stats import Summary
from ...config import EngineConfig
from ...engine.intake import RequestBuilder
from ...engine.loop import StepLoop
from ...engine.startup import layer_groups
from ...execution.runner import Runner
from ...execution.step_key import StepKey, StepOutput
from ...kernels import select_kernels
from ...models.config import ModelConfig
from ...models.decoder import Decoder
from ...models.resolved_config import ResolvedConfig
from ...sampling.sample_output import SampleOutput
from ...sampling_params import MAX_LOGPROBS, SamplingParams
from ...scheduling.scheduler import Scheduler
from ..workload import interleave

__all__ = ["HostCost", "HostRig", "idle_library", "measure_host"]

MODEL = ModelConfig(
    vocab_size=1024,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
    eos_token_ids=(0,),
)
"""Its vocabulary sizes the state of the rows; nothing computes it."""

BLOCK_SIZE = 16
PROMPT_LEN = 64
"""Tokens of the shortest prompt; the longest is a block shorter than twice this."""
ROWS = (1, 32, 256)
POINTS = ((10, 20_000), (100_000, 20_000), (10, 1_000_000))
"""Waiting requests and blocks of the cache."""
TURN = 20
"""Steps of a rig in one turn."""
WARMUP_STEPS = 60


@dataclass(frozen=True, slots=True)
class HostCost:
    """Host time of a step of one rig."""

    rows: int
    """Rows that decode."""
    queued: int
    """Requests that wait for a row."""
    num_blocks: int
    """Blocks of the cache."""
    host_us: Summary
    """Microseconds of a call of `StepLoop.step`, outputs included."""


class HostRig:
    """A loop over a model that computes nothing, all of whose rows decode."""

    def __init__(
        self,
        rows: int,
        queued: int,
        num_blocks: int,
        *,
        num_steps: int,
        params: SamplingParams | None = None,
        in_flight: int = 0,
        block_size: int = BLOCK_SIZE,
        seed: int = 0,
    ) -> None:
        """Prefill `rows` requests, and queue others.

        Args:
            rows: requests that decode.
            queued: requests that wait.
            num_blocks: blocks of the cache, without memory.
            num_steps: steps before a row ends; the cache must hold them.
            params: of the decoding requests (default: greedy); `max_tokens` is set here.
            in_flight: steps that may be in flight when `step` returns.
            block_size: slots of a block.
            seed: of prompts and tokens.

        Raises:
            ValueError: the cache cannot hold the rows for the steps, or a row cannot.
        """
        self.rng = random.Random(seed)
        user = EngineConfig(
            device="cpu", mode="eager", max_num_seqs=rows, block_size=block_size, dtype="float32"
        )
        prefill_steps = -(-rows * 2 * PROMPT_LEN // user.prefill_chunk)
        max_tokens = num_steps + prefill_steps + 2
        longest = 2 * PROMPT_LEN + max_tokens
        if longest > MODEL.max_position_embeddings:
            raise ValueError(
                f"{num_steps} steps make sequences of {longest} tokens, and may make no more than"
                f" {MODEL.max_position_embeddings}: choose fewer"
            )
        most = rows * -(-longest // block_size)
        if most >= num_blocks:
            raise ValueError(
                f"{rows} rows need {most} blocks for {num_steps} steps, num_blocks is {num_blocks}:"
                " choose more blocks, or fewer steps"
            )
        config = ResolvedConfig.resolve(user, MODEL)
        groups = layer_groups(MODEL, config)
        kernels = select_kernels(config.device, config.mode, config.dtype)
        model = Decoder(MODEL, kernels, config.dtype, config.device, groups)
        arena = Arena(groups, 2, block_size, config.dtype, config.device)
        self.runner = Runner(model, config, arena, groups)
        self.runner.library = idle_library(self.runner.sizes.keys(), MODEL.vocab_size, self.rng)
        self.cache = KVCache(groups, num_blocks, block_size, chunk=user.prefill_chunk)
        scheduler = Scheduler(
            self.cache,
            max_num_seqs=rows,
            max_batch_tokens=rows + user.prefill_chunk,
            prefill_chunk=user.prefill_chunk,
            max_prefill_rows=self.runner.max_prefill_rows,
        )
        self.loop = StepLoop(scheduler, self.runner, in_flight=in_flight)
        self._intake = RequestBuilder(
            MODEL,
            None,
            longest_sequence=MODEL.max_position_embeddings,
            seed=seed,
            prefix_block_size=block_size,
            embeds_dtype=None,
        )
        greedy = SamplingParams(temperature=0.0)
        for number in range(rows):
            self.add(f"row {number}", params or greedy, max_tokens)
        while scheduler.num_running < rows or not all(
            request.num_output
            for group in self.loop.requests.groups.values()
            for request in group.requests
        ):
            self.loop.step()
        for number in range(queued):
            self.add(f"queued {number}", greedy, max_tokens)

    def add(self, request_id: str, params: SamplingParams, max_tokens: int) -> None:
        """Queue a request with a prompt of its own."""
        length = PROMPT_LEN + self.rng.randrange(PROMPT_LEN - BLOCK_SIZE)
        prompt = self.rng.choices(range(1, MODEL.vocab_size), k=length)
        params = dataclasses.replace(params, max_tokens=max_tokens)
        self.loop.requests.add(self._intake.accept(request_id, prompt, params, priority=0))

    def run(self, steps: int) -> list[int]:
        """Return the nanoseconds of each of the next steps."""
        step, clock = self.loop.step, time.perf_counter_ns
        times = []
        for _ in range(steps):
            started = clock()
            step()
            times.append(clock() - started)
        return times


def measure_host(*, num_steps: int, seed: int) -> list[HostCost]:
    """Measure the host's time of a step at each of `POINTS`, for each number of `ROWS`.

    Raises:
        ValueError: a cache cannot hold the rows that long.
    """
    costs = []
    for rows in ROWS:
        rigs = [HostRig(rows, *p, num_steps=num_steps + WARMUP_STEPS, seed=seed) for p in POINTS]
        for rig in rigs:
            rig.run(WARMUP_STEPS)
        times: list[list[int]] = [[] for _ in rigs]
        gc.collect()
        interleave(
            [partial(_turn, rig, ns, num_steps) for rig, ns in zip(rigs, times, strict=True)],
            -(-num_steps // TURN),
        )
        for point, ns in zip(POINTS, times, strict=True):
            costs.append(HostCost(rows, *point, Summary.of(t / 1000 for t in ns)))
    return costs


def _turn(rig: HostRig, times: list[int], num_steps: int) -> None:
    times += rig.run(min(TURN, num_steps - len(times)))


def idle_library(
    keys: Sequence[StepKey], vocab_size: int, rng: random.Random
) -> StepLibrary[StepKey, StepOutput]:
    """Return a prepared library whose steps compute nothing: each returns the same random tokens
    every time.
    """

    def make_step(key: StepKey) -> Step[StepOutput]:
        rows = key.size
        tokens = torch.tensor(rng.choices(range(1, vocab_size), k=rows))
        details = None
        if key.full_sampler:
            details = SampleOutput(
                tokens,
                logprob=torch.full((rows,), -1.0),
                top_logprobs=torch.full((rows, MAX_LOGPROBS), -1.0),
                top_ids=torch.zeros(rows, MAX_LOGPROBS, dtype=torch.int64),
            )
        output = StepOutput(tokens, torch.empty(0), details)
        return EagerStep(lambda: output, str(key))

    library = StepLibrary(make_step, keys, lambda key: key.size, make_step)
    library.prepare()
    return library
