"""A scheduler and a loop over the fake device, and the requests given to them."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from stepgraph.cache.blocks import PrefixHashes
from stepgraph.cache.kv_cache import KVCache
from stepgraph.cache.row_states import RowPools
from stepgraph.cache.spec import LayerGroup
from stepgraph.runtime.engine.loop import StepLoop
from stepgraph.runtime.engine.request_output import RequestOutput
from stepgraph.runtime.logprobs import PromptLogprobs
from stepgraph.runtime.request import Request, RequestGroup
from stepgraph.runtime.rope_lengths import RopeLengths
from stepgraph.runtime.sampling_params import SamplingParams
from stepgraph.runtime.scheduling.plan import StepPlan
from stepgraph.runtime.scheduling.scheduler import Scheduler
from stepgraph.runtime.scheduling.step_budget import StepBudget

from .cache_rig import is_published, layer_group
from .fake_device import NAN, NO_ROPES, NO_TOKENS, VOCAB, FakeRunner, Windows, oracle
from .speculation_rig import DeviceDrafts, Guesses, OutputGuesses

MAX_LEN = 40
"""Tokens of the longest sequence, if the cache can hold it."""


def make_request(prompt: Sequence[int], output: Sequence[int] = (), **fields: Any) -> Request:
    """Return a request that has sampled `output`."""
    options: dict[str, Any] = {
        "id": "a/0",
        "params": SamplingParams(),
        "seed": 1,
        "order": (0, 1),
        "max_tokens": 64,
        "stop_token_ids": frozenset(),
        "detokenizer": None,
        "arrival_ns": 0,
    }
    request = Request(prompt_ids=list(prompt), **(options | fields))
    for token_id in output:
        request.append_token(token_id, 0)
    return request


def groups_of(windows: Windows) -> tuple[LayerGroup, ...]:
    return tuple(layer_group(i, window) for i, window in enumerate(windows))


class Rig:
    """Runs requests. With `prefix` they share blocks of equal contents; `n` > 1 always forks.

    With `drafter` drafts are proposed on the device, else by the host.
    """

    def __init__(
        self,
        *,
        windows: Windows = (None,),
        usable_blocks: int = 100,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_batch_tokens: int = 64,
        prefill_chunk: int = 32,
        max_prefill_rows: int = 8,
        in_flight: int = 0,
        prefix: bool = False,
        host_blocks: int = 0,
        step_budget: StepBudget | None = None,
        tokens_per_row: int = 1,
        drafter: bool = False,
        nan_tokens: frozenset[int] = NO_TOKENS,
        ropes: RopeLengths = NO_ROPES,
        snapshots: int | None = None,
    ) -> None:
        """`snapshots`: those that are cached; None without recurrent state."""
        self.windows = windows
        self.nan_tokens = nan_tokens
        self.ropes = ropes
        self.prefix = prefix
        chunk = min(prefill_chunk, max_batch_tokens)
        groups = groups_of(windows)

        def most_blocks(num_tokens: int) -> int:
            return sum(group.most_blocks(num_tokens, block_size, chunk) for group in groups)

        self.oracle = partial(
            oracle, windows=windows, nan_tokens=nan_tokens, ropes=ropes,
            recurrent=snapshots is not None,
        )  # fmt: skip
        pools = None
        if snapshots is not None:
            tokens_per_row = min(tokens_per_row, block_size)
            sizes = max_num_seqs, min(max_prefill_rows, max_num_seqs), block_size
            pools = RowPools.of(*sizes, ahead=tokens_per_row, cached=snapshots, host=host_blocks)
        self.cache = KVCache(
            groups,
            max(usable_blocks, most_blocks(2)) + 1,  # one token in and one out
            block_size,
            chunk=chunk,
            host_blocks=host_blocks,
            row_pools=pools,
        )
        fitting = range(MAX_LEN + 1)
        usable = self.cache.usable_blocks
        self.capacity = bisect_right(fitting, usable, key=most_blocks) - 1
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            prefill_chunk=prefill_chunk,
            max_prefill_rows=max_prefill_rows,
            step_budget=step_budget,
            rope_lengths=ropes,
        )
        self.runner = FakeRunner(self.scheduler, in_flight, windows, nan_tokens, ropes)

        def known(request: Request) -> list[int]:
            return self.oracle(request)[0]

        speculator: Guesses | DeviceDrafts | None = None
        if drafter and tokens_per_row > 1:
            speculator = DeviceDrafts(tokens_per_row, max_num_seqs, is_async_device=in_flight > 0)
            self.runner.draft = OutputGuesses(VOCAB, known)
        elif tokens_per_row > 1:
            speculator = Guesses(lambda rows: range(2, tokens_per_row + 1), VOCAB, known)
        times = None if step_budget is None else step_budget.times
        self.loop = StepLoop(
            self.scheduler,
            self.runner,  # type: ignore[arg-type]
            in_flight=in_flight,
            times=speculator.times if isinstance(speculator, DeviceDrafts) else times,
            step_budget=step_budget,
            speculator=speculator,  # type: ignore[arg-type]
        )
        self.arrivals = 0
        self.work = 0  # tokens that all requests so far have at most

    def group(
        self,
        prompt_len: int,
        *,
        name: str | None = None,
        priority: int = 0,
        max_tokens: int = 50,
        min_tokens: int = 0,
        stop: Iterable[int] = (),
        n: int = 1,
        topic: int = 0,
        shared: int = 0,
        salt: str = "",
        scored: bool = False,
    ) -> RequestGroup:
        """Make a prompt that begins with `shared` tokens which all of its topic begin with."""
        self.arrivals += 1
        rng, ropes = random.Random(self.arrivals), self.ropes
        prompt = [rng.randrange(VOCAB) for _ in range(prompt_len)]
        common = random.Random(f"topic {topic}")
        prompt[:shared] = [common.randrange(VOCAB) for _ in prompt[:shared]]
        max_tokens = min(max_tokens, self.capacity - prompt_len)
        self.work += n * (prompt_len + max_tokens)
        params = SamplingParams(max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), n=n)
        name = name or f"request-{self.arrivals}"
        requests = [
            make_request(
                prompt,
                id=f"{name}/{index}",
                params=params,
                seed=rng.getrandbits(32),
                order=(priority, self.arrivals * 1000 + index),
                max_tokens=max_tokens,
                stop_token_ids=frozenset(stop),
                prefix_hashes=PrefixHashes(self.cache.block_size, salt, ropes.variant(prompt_len))
                if self.prefix
                else None,
                rope_length=prompt_len,
            )
            for index in range(n)
        ]
        if scored:
            requests[0].prompt_logprobs = PromptLogprobs(prompt, 0)
        for request in requests:
            request.siblings = [other for other in requests if other is not request]
        return RequestGroup(name, prompt, requests)

    def add(self, prompt_len: int, **options: Any) -> Request:
        """Queue one completion."""
        (request,) = self.add_group(prompt_len, **options)
        return request

    def add_group(self, prompt_len: int, **options: Any) -> list[Request]:
        """Queue all completions of a prompt."""
        group = self.group(prompt_len, **options)
        self.loop.requests.add(group)
        return group.requests

    def step(self, times: int = 1) -> StepPlan:
        """Run steps and return the last plan that was launched."""
        for _ in range(times):
            self.loop.step()
            self.loop.check_integrity()
        return self.runner.plans[-1]

    def finish(self, *requests: Request, limit: int | None = None) -> None:
        """Run to the end; the output of each of the requests is as if it had run alone."""
        self.drain(limit)
        for request in requests:
            expected = self.oracle(request)
            assert (request.output_ids, request.finish_reason) == expected

    def drain(self, limit: int | None = None) -> list[RequestOutput]:
        """Run to the end, in at most `limit` steps, and look for what was left behind.

        Every step moves on the running request that is served first. Without `limit` there may be
        as many as all requests have tokens, and as many for what is computed again.
        """
        outputs = []
        idle = 0  # steps one after the other that launched nothing, though no copy has failed
        for _ in range(limit or 2 * self.work + 50):
            if not self.loop.has_unfinished:
                break
            before = self.runner.launched + self.runner.seen["failures"]
            outputs += self.loop.step()
            self.loop.check_integrity()
            idle = 0 if self.runner.launched + self.runner.seen["failures"] > before else idle + 1
            assert idle <= 1, "nobody moves"
        assert not self.loop.has_unfinished, "it goes on for ever"
        self.check_empty()
        return outputs

    def check_empty(self) -> None:
        """Assert that nothing of any request is left but cached blocks."""
        cache, scheduler = self.cache, self.scheduler
        assert cache.pool.num_free == cache.usable_blocks
        assert cache.host.num_free == cache.host.num_blocks
        assert cache.pool.num_published <= cache.usable_blocks
        assert not cache._held
        if cache.states is not None:
            for pool in (cache.states.snapshots, cache.states.inputs):
                assert pool.num_free == pool.num_blocks - 1
            for host in cache.states.host:
                assert host.num_free == host.num_blocks
        assert scheduler.num_running == scheduler.num_waiting == 0
        assert not self.loop.requests.groups
        assert not self.runner.unread
        assert self.loop.counts["failed_copies"] == self.runner.seen["failures"]

    def cached_nan(self) -> list[int]:
        """Return the blocks that can be found by content and hold NaN; none is verified."""
        device, found = self.runner.device, list[int]()
        cached = [(self.cache.pool, device.blocks)]
        if self.cache.states is not None:
            cached.append((self.cache.states.snapshots, device.snapshots))
        for pool, memory in cached:
            published = [block for block in range(pool.num_blocks) if is_published(pool, block)]
            own = [block for block in published if NAN in memory.get(block, {}).values()]
            assert not any(pool._verified[block] for block in own)
            found += own
        return found

    def check_output(self, output: RequestOutput, requests: list[Request]) -> None:
        """Assert that a finished output is that of requests which run alone."""
        for completion, request in zip(output.completions, requests, strict=True):
            expected = self.oracle(request)
            assert (completion.token_ids, completion.finish_reason) == expected
