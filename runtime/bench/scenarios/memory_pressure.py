"""Memory of an engine, step time as the cache fills, and the cost of too few blocks.

An engine has as many blocks as `batch_size` rows of the longest context take; its plan is compared
with measurements at start. Then rows decode after prompts of increasing length, up to the one that
fills the pool. At last as many requests decode to their end with room for half of them: preempted
ones are swapped to the host on one engine and recomputed on another, in turns with the engine that
has room for all. Prompts are random tokens, decoded greedily; prefix caches should be off.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ....cache.memory.device_memory import resident_bytes
from ....profiling.device_state import watch
from ....profiling.stats import Summary
from ...config import EngineConfig
from ...engine.engine import Engine
from ...engine.request_output import RequestOutput
from ...loading.loader import resolve_source
from ...models.decoder_model import DecoderConfig
from ..benchmark_run import BenchmarkRun, ModelKind, StepMode
from ..engine_memory import RequestBlocks
from ..results.result_document import describe_engine
from ..step_watch import MeasuredStep, StepWatch, decode_whole_batch, mean_roofline
from ..workload import abort_all, equal_share, greedy, interleave, random_prompts, spread
from .steady import BenchmarkCase

__all__ = ["MemoryCase", "Scarcity", "measure_full_cache", "measure_scarcity", "run_memory"]


@dataclass(frozen=True, slots=True)
class MemoryCase:
    """`batch_size` rows after prompts of each of `input_lens` tokens, `num_steps` steps each.

    With scarce blocks they have the shortest of these prompts, and decode `output_len` tokens.
    """

    batch_size: int
    input_lens: tuple[int, ...]
    """Ascending."""
    output_len: int
    num_steps: int

    @property
    def scarce_len(self) -> int:
        """Tokens of a sequence with scarce blocks, prompt and output."""
        return self.input_lens[0] + self.output_len

    def longest_sequence(self, prefill_chunk: int) -> int:
        """Return the tokens of the longest sequence, prompt and output."""
        return max(self._whole(self.input_lens[-1], prefill_chunk), self.scarce_len)

    def room(self, input_len: int, prefill_chunk: int) -> int:
        """Return the most tokens that rows with prompts of this length decode."""
        return self._whole(input_len, prefill_chunk) - input_len

    def _whole(self, input_len: int, prefill_chunk: int) -> int:
        case = BenchmarkCase(self.batch_size, input_len, self.num_steps + 1)
        return case.longest_sequence(prefill_chunk)

    def roomy(self, config: EngineConfig, model: DecoderConfig) -> EngineConfig:
        """Return the configuration of an engine with blocks for all rows.

        Raises:
            ConfigError: it does not work on this device or with this model.
        """
        longest = self.longest_sequence(config.prefill_chunk)
        config = dataclasses.replace(config, max_num_seqs=self.batch_size, max_model_len=longest)
        blocks = RequestBlocks.of(model, config, longest).full_pool(self.batch_size)
        return dataclasses.replace(config, num_blocks=blocks)

    def scarce(self, config: EngineConfig, model: DecoderConfig) -> dict[str, EngineConfig]:
        """Return configurations with blocks for half of the rows, by `preemption`.

        Empty for a single row, which is never preempted.
        """
        if self.batch_size == 1:
            return {}
        config = dataclasses.replace(
            config, max_num_seqs=self.batch_size, max_model_len=self.scarce_len
        )
        blocks = RequestBlocks.of(model, config, self.scarce_len)
        config = dataclasses.replace(config, num_blocks=self.batch_size // 2 * blocks.each + 1)
        host_bytes = self.batch_size * blocks.each * blocks.block_bytes
        return {
            "recompute": dataclasses.replace(config, preemption="recompute"),
            "swap": dataclasses.replace(config, preemption="swap", host_cache_bytes=host_bytes),
        }


@dataclass(frozen=True, slots=True)
class FullCache:
    """Steps of the whole batch after prompts of one length."""

    input_len: int
    steps: list[MeasuredStep]
    blocks_in_use: int
    """After the last of them."""

    def to_json(self, engine: Engine, bandwidth: float) -> dict[str, Any]:
        """Return an entry of `steps` in the JSON. `bandwidth` is in bytes per second."""
        plan, steps = engine.memory_plan, self.steps
        step_ms = Summary.of(step.ms for step in steps)
        contexts = [context for step in steps for context in step.contexts]
        held = self.blocks_in_use * (plan.cache // plan.num_blocks)
        padded_rows = sum(step.record.bucket for step in steps)
        return {
            "input_len": self.input_len,
            "mean_context": statistics.fmean(contexts),
            "blocks_in_use": self.blocks_in_use,
            "fill": self.blocks_in_use / plan.usable_blocks,
            "slack": 1 - sum(map(engine.kv_bytes_read, steps[-1].contexts)) / held,
            "padding": 1 - sum(step.record.rows for step in steps) / padded_rows,
            "kv_bytes": sum(map(engine.kv_bytes_read, contexts)) // len(steps),
            "step_ms": step_ms.to_json(),
            "roofline": mean_roofline(engine, steps, bandwidth, ms=step_ms.p50),
        }


def measure_full_cache(engine: Engine, case: MemoryCase, *, seed: int) -> list[FullCache]:
    """Run a case on an idle engine with room for it; return a measurement per prompt length.

    Raises:
        RequestError: the sequences do not fit the engine.
    """
    measured = []
    for input_len in case.input_lens:
        prompts = random_prompts(engine.model_config, case.batch_size, input_len, seed)
        params = greedy(case.room(input_len, engine.config.user.prefill_chunk))
        watch = StepWatch(engine)
        ids = [watch.add_request(prompt, params) for prompt in prompts]
        decode_whole_batch(watch, ids, case.num_steps)
        blocks = engine.stats()["blocks"]
        steps = watch.decode_steps(case.batch_size)
        measured.append(FullCache(input_len, steps, blocks["usable"] - blocks["free"]))
        abort_all(engine, ids)
    return measured


@dataclass(slots=True)
class Scarcity:
    """Observations of requests that run to their end; times in milliseconds."""

    engine: Engine
    case: MemoryCase
    seed: int
    """Of the first repetition; each further one adds 1."""
    seconds: list[float] = field(default_factory=list)
    """Of each repetition, from the first arrival to the last token."""
    itl_ms: list[float] = field(default_factory=list)
    decode_steps: list[MeasuredStep] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Over all repetitions: preemptions, swapped blocks, and tokens that were prefilled again."""
    token_ids: list[list[int]] = field(default_factory=list)
    """Of each request of each repetition."""

    def repeat(self) -> None:
        """Decode prompts that arrive at once to their end, and add the observations.

        Raises:
            AssertionError: blocks are neither free nor cached afterwards.
        """
        engine, case = self.engine, self.case
        seed = self.seed + len(self.seconds)
        input_len = case.input_lens[0]
        prompts = random_prompts(engine.model_config, case.batch_size, input_len, seed)
        params = greedy(case.output_len)
        before = _counters(engine)
        watch = StepWatch(engine)
        started = time.perf_counter()
        ids = [watch.add_request(prompt, params) for prompt in prompts]
        done: dict[str, RequestOutput] = {}
        while engine.has_unfinished():
            done.update((o.request_id, o) for o in watch.step() if o.finished)
        self.seconds.append(time.perf_counter() - started)
        engine.check_integrity()
        self.decode_steps += watch.decode_steps()
        after = _counters(engine)
        self.counts.update({name: after[name] - before[name] for name in after})
        prefilled = sum(record.prefill_tokens for record in engine.timeline().records())
        self.counts["recomputed_tokens"] += prefilled - sum(map(len, prompts))
        for output in (done[request_id] for request_id in ids):
            assert output.timing is not None, "it ended with all its tokens"
            self.itl_ms += output.timing.itl_ms
            self.token_ids.append(output.token_ids)

    def to_json(self, preemption: str, reference: Scarcity, bandwidth: float) -> dict[str, Any]:
        """Return an entry of `scarcity` in the JSON; `reference` has blocks for all rows."""
        case, blocks = self.case, self.engine.stats()["blocks"]
        rates = [case.batch_size * case.output_len / seconds for seconds in self.seconds]
        return {
            "preemption": preemption,
            "usable_blocks": blocks["usable"],
            "host_blocks": blocks["host"],
            "input_len": case.input_lens[0],
            "output_len": case.output_len,
            "repetitions": len(rates),
            **self.counts,
            "tokens_per_second": statistics.median(rates),
            "spread": spread(self.seconds),
            "itl_ms": Summary.of(self.itl_ms).to_json(),
            "roofline": mean_roofline(self.engine, self.decode_steps, bandwidth),
            "tokens_equal": equal_share(self.token_ids, reference.token_ids),
            "blocks_left": blocks["usable"] - blocks["free"] + blocks["host"] - blocks["host_free"],
        }


def _counters(engine: Engine) -> dict[str, int]:
    stats = engine.stats()
    cache = stats["cache"]
    return {"preemptions": stats["preemptions"]} | {
        name: cache[name] for name in ("swapped_out", "swapped_in")
    }


def measure_scarcity(
    engines: Mapping[str, Engine], case: MemoryCase, *, num_warmup: int, num_iters: int, seed: int
) -> dict[str, Scarcity]:
    """Decode the same prompts to their end on idle engines, interleaved.

    Every repetition has new prompts. Engines are named by their preemption.

    Raises:
        RequestError: the sequences do not fit the engines.
    """
    runs = {name: Scarcity(engine, case, seed) for name, engine in engines.items()}
    for engine in engines.values():
        for _ in range(num_warmup):
            Scarcity(engine, case, seed).repeat()
    interleave([run.repeat for run in runs.values()], num_iters)
    return runs


def to_json(
    engine: Engine, model: str, full: Sequence[FullCache], held: Mapping[str, int], bandwidth: float
) -> dict[str, Any]:
    """Return an entry of `memory` in the JSON, without the runs with scarce blocks.

    `held` are the resident bytes `before` the engine was started and when it was `started`.
    """
    plan, blocks = engine.memory_plan, engine.stats()["blocks"]
    return {
        **describe_engine(engine, model),
        "batch_size": engine.config.user.max_num_seqs,
        "memory": engine.stats()["memory"],
        "process_bytes": {**held, "filled": resident_bytes(engine.config.device)},
        "usable_blocks": blocks["usable"],
        "block_size": blocks["size"],
        "block_bytes": plan.cache // plan.num_blocks,
        "context_tokens": plan.context_tokens,
        "longest_request": plan.longest_request,
        "steps": [measured.to_json(engine, bandwidth) for measured in full],
    }


def run_memory(run: BenchmarkRun, kind: ModelKind, mode: StepMode) -> Iterator[dict[str, Any]]:
    """Yield an entry for each number of rows; all are checked before the first is measured."""
    options = run.options
    source = resolve_source(kind.model, config_only=True).config
    base = run.config(kind, mode)
    input_lens = tuple(sorted(set(options.input_len)))
    lengths = ", ".join(map(str, input_lens))
    sized = []
    for output_len, rows in itertools.product(options.output_len, options.batch_size):
        case = MemoryCase(rows, input_lens, output_len, options.num_steps)
        sized.append((case, case.roomy(base, source), case.scarce(base, source)))
    for case, roomy, scarce in sized:
        before = resident_bytes(run.device)
        with ExitStack() as stack:
            what = f"{case.batch_size} rows, prompts of {lengths}"
            engine = stack.enter_context(run.start(kind, roomy, what))
            held = {"before": before, "started": resident_bytes(run.device)}
            read_again = watch(run.monitor)
            full = measure_full_cache(engine, case, seed=options.seed)
            entry = to_json(engine, kind.model, full, held, run.bandwidth)
            runs: dict[str, Scarcity] = {}
            if scarce:
                engines = {"none": engine}
                for name, config in scarce.items():
                    engines[name] = stack.enter_context(run.start(kind, config))
                how = {name: getattr(options, name) for name in ("num_warmup", "num_iters", "seed")}
                runs = measure_scarcity(engines, case, **how)
            scarcity = [
                one.to_json(name, runs["none"], run.bandwidth) for name, one in runs.items()
            ]
            yield entry | {"interleaved": True, "scarcity": scarcity, "device_state": read_again()}
