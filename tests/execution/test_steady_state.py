"""In the steady state a step allocates no tensor, copies nothing to the device, and leaves nothing.

Steady: no row joins or leaves, and none begins a block. The loop, the scheduler, the cache and the
runner are the real ones, over steps that return outputs made beforehand (see `HostRig`): on a CPU a
step's own temporaries are the device's work, not the loop's.
"""

from __future__ import annotations

import cProfile
import dataclasses
import gc
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from stepgraph.cache.arena import Arena
from stepgraph.cache.kv_cache import KVCache
from stepgraph.cache.spec import group_layers
from stepgraph.graphs.steps import Step, StepLibrary
from stepgraph.runtime import EngineConfig, SamplingParams
from stepgraph.runtime.engine.loop import StepLoop
from stepgraph.runtime.engine.request_builder import RequestBuilder
from stepgraph.runtime.execution.outputs import HostOutputs
from stepgraph.runtime.execution.runner import Runner
from stepgraph.runtime.execution.step_key import StepKey, StepOutput
from stepgraph.runtime.kernels import select_kernels
from stepgraph.runtime.models.decoder import Decoder
from stepgraph.runtime.models.plan import plan_of
from stepgraph.runtime.models.resolved_config import ResolvedConfig
from stepgraph.runtime.sampling.reference_sampler import SampleOutput
from stepgraph.runtime.sampling_params import MAX_LOGPROBS
from stepgraph.runtime.scheduling.scheduler import Scheduler
from torch.utils._python_dispatch import TorchDispatchMode

from ..rigs.engine_rig import Open
from ..rigs.fake_engine import MODEL

pytestmark = pytest.mark.native_kernels

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.7, seed=1)
SHOWN = SamplingParams(temperature=0.7, seed=1, logprobs=3)
NO_BLOCKS = {"num_blocks": 200, "block_size": 1024}  # one holds what a row gets in most tests


class HostRig:
    """A loop over a model that computes nothing: `rows` requests decode, `queued` others wait.

    Scheduler, cache, loop, row state and inputs are those that serve requests. Prompt lengths
    differ, so that rows begin blocks in different steps.
    """

    def __init__(
        self,
        rows: int,
        queued: int,
        num_blocks: int,
        *,
        num_steps: int,
        params: SamplingParams = GREEDY,
        in_flight: int = 0,
        block_size: int = 16,
    ) -> None:
        self.rng = random.Random(0)
        user = EngineConfig(
            device="cpu", mode="eager", max_num_seqs=rows, block_size=block_size, dtype="float32"
        )
        self.config = config = ResolvedConfig.resolve(user, MODEL)
        groups = group_layers(plan_of(MODEL).states)
        kernels = select_kernels(config.device, config.mode, config.dtype)
        model = Decoder(MODEL, kernels, config.dtype, config.device, groups)
        arena = Arena(groups, 2, block_size, config.dtype, config.device)
        self.runner = Runner(model, config, arena, groups)
        self.runner.library = idle_library(self.runner.sizes.keys(), self.rng)
        cache = KVCache(groups, num_blocks, block_size, chunk=user.prefill_chunk)
        scheduler = Scheduler(
            cache,
            max_num_seqs=rows,
            max_batch_tokens=rows + user.prefill_chunk,
            prefill_chunk=user.prefill_chunk,
            max_prefill_rows=config.max_prefill_rows,
        )
        self.loop = StepLoop(scheduler, self.runner, in_flight=in_flight)
        self._builder = RequestBuilder(MODEL, None, config)
        max_tokens = num_steps + rows + 2  # prompts are prefilled while the first ones decode
        for number in range(rows):
            self.add(f"row {number}", params, max_tokens)
        open_groups = self.loop.requests.groups.values()
        while not all(request.num_output for group in open_groups for request in group.requests):
            self.loop.step()
        for number in range(queued):
            self.add(f"queued {number}", GREEDY, max_tokens)

    def add(self, request_id: str, params: SamplingParams, max_tokens: int) -> None:
        """Queue a request with a prompt of its own."""
        prompt = self.rng.choices(range(1, MODEL.vocab_size), k=self.rng.randrange(64, 112))
        params = dataclasses.replace(params, max_tokens=max_tokens)
        self.loop.requests.add(self._builder.accept(request_id, prompt, params, priority=0))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.loop.step()


def idle_library(keys: Sequence[StepKey], rng: random.Random) -> StepLibrary[StepKey, StepOutput]:
    """Return a prepared library whose steps return the same random tokens every time."""

    def make_step(key: StepKey) -> Step[StepOutput]:
        rows = key.size
        tokens = torch.tensor(rng.choices(range(1, MODEL.vocab_size), k=rows))
        details = None
        if key.full_sampler:
            packed = torch.zeros(SampleOutput.packed_bytes(rows, MAX_LOGPROBS), dtype=torch.uint8)
            details = SampleOutput.unpack(packed, rows, MAX_LOGPROBS)
            details.tokens.copy_(tokens)
        output = StepOutput(tokens, torch.empty(0), details)
        return Step("eager", lambda: output, str(key))

    library = StepLibrary(make_step, keys, lambda key: key.size, lambda key: make_step(key).run)
    library.prepare()
    return library


@pytest.fixture(autouse=True, scope="module")
def only_new_objects_are_collected() -> None:
    """A collection takes a second where torch and transformers are loaded."""
    gc.collect()
    gc.freeze()


class Recorder(TorchDispatchMode):
    """Counts what torch is asked to do, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))


def ops_of(rig: HostRig, steps: int) -> Counter[str]:
    with Recorder() as recorder:
        rig.run(steps)
    return recorder.ops


# Nothing but the tokens moves ---------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize(
    ("params", "known"),
    [(GREEDY, set()), (SAMPLED, set()), (SHOWN, {"aten.detach.default"})],
    ids=["greedy", "sampled", "logprobs"],
)
def test_on_a_cpu_torch_is_asked_for_nothing(
    params: SamplingParams, known: set[str], in_flight: int
) -> None:
    """Log-probabilities are read as arrays, which torch makes a view for."""
    rig = HostRig(5, 10, num_steps=200, params=params, in_flight=in_flight, **NO_BLOCKS)
    rig.run(2)
    assert set(ops_of(rig, 150)) == known


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_elsewhere_only_the_tokens_are_copied(params: SamplingParams) -> None:
    """Into memory that is there already, as from a device that is none; with the full sampler, its
    log-probabilities too, at once."""
    rig = HostRig(5, 10, num_steps=200, params=params, in_flight=1, **NO_BLOCKS)
    assert rig.loop.scheduler.num_running == rig.loop.scheduler.max_num_seqs
    sizes = HostOutputs.sizes(rig.config, MODEL.vocab_size)
    rig.runner.outputs = HostOutputs(sizes, torch.device("cpu"))
    rig.run(3)  # each set has been used
    ops = ops_of(rig, 150)
    assert set(ops) == {"aten.copy_.default"}
    assert ops["aten.copy_.default"] == 150


# Nothing is left behind ---------------------------------------------------------------------------


@contextmanager
def no_automatic_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize("params", [GREEDY, SHOWN], ids=["greedy", "logprobs"])
def test_steps_and_requests_leave_nothing_cyclic(params: SamplingParams, in_flight: int) -> None:
    rig = HostRig(4, 3, 1000, num_steps=150, params=params, in_flight=in_flight)
    several = SamplingParams(temperature=0.0, n=3)
    rig.run(5)
    with no_automatic_collection():
        for number in range(12):
            rig.add(f"late {number}", several if number % 3 else GREEDY, max_tokens=5)
        rig.loop.requests.abort(rig.loop.requests.groups["late 4"])
        rig.loop.requests.abort(rig.loop.requests.groups["row 1"])
        while rig.loop.has_unfinished:
            rig.run(1)
        rig.loop.check_integrity()
        assert gc.collect() == 0
    assert rig.loop.counts["finished"] == rig.loop.counts["requests"]


# What a step costs --------------------------------------------------------------------------------


def calls_of_steps(rig: HostRig, steps: int) -> list[int]:
    """Calls of Python and of C in each of the next steps: work, whatever the machine is busy with.

    Those of the watch over Python's collector, which may run in any step, are not among them.
    """
    counts = []
    with no_automatic_collection():
        for _ in range(steps):
            profile = cProfile.Profile()
            profile.runcall(rig.loop.step)
            counts.append(sum(entry.callcount for entry in profile.getstats()))
    return counts


def test_a_step_does_the_same_however_many_wait_and_however_large_the_cache_is() -> None:
    sizes = (10, 100), (3000, 100), (10, 100_000)
    few, *many = (calls_of_steps(HostRig(3, *size, num_steps=70), 40) for size in sizes)
    assert many == [few, few]


def test_a_row_more_costs_a_few_calls() -> None:
    """In a step in which nobody needs anything."""
    few, many = (
        min(calls_of_steps(HostRig(rows, 10, num_steps=50, **NO_BLOCKS), 20)) for rows in (10, 30)
    )
    assert (many - few) / 20 < 10


# On a device --------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_on_cuda_a_steady_step_allocates_nothing(open_engine: Open, temperature: float) -> None:
    engine = open_engine("base", device="cuda", mode="graph", compile=False, block_size=128)
    params = SamplingParams(max_tokens=60, temperature=temperature, ignore_eos=True)
    for number in range(3):
        engine.add_request([5 + number, 6, 7], params)
    for _ in range(12):
        engine.step()
    before = torch.cuda.memory_stats()
    with Recorder() as recorder:
        for _ in range(30):
            engine.step()
    after = torch.cuda.memory_stats()
    for name in ("allocation.all.allocated", "segment.all.allocated", "num_alloc_retries"):
        assert after[name] == before[name], name
    assert set(recorder.ops) == {"aten.copy_.default"}
    assert recorder.ops["aten.copy_.default"] == 30 * (1 if temperature == 0.0 else 4)
