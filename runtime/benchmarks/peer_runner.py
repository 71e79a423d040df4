"""Decodes in another runtime, step by step, as `peers` requests. Runs in that runtime's Python.

Requests and replies are JSON objects, one a line, on stdin and stdout. The first request loads the
model; `prefill`, `steps` and `end` follow in this order, any number of times. An `error` in a reply
ends the process. Standard library only, until a runtime is loaded.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

MODULES = {"openvino": ("openvino_genai", "optimum.intel"), "vllm": ("vllm",)}
"""What must be importable, by the name of the runtime."""


class Runtime(Protocol):
    """A model in another runtime."""

    version: str

    def __init__(self, load: dict[str, Any]) -> None:
        """Load the model. `load` is the first request: see `peers.Peer`."""

    def add(self, prompts: list[list[int]], max_tokens: int) -> None:
        """Queue prompts, decoded greedily to `max_tokens` tokens each."""

    def step(self) -> list[int]:
        """Run one step; return the numbers of the prompts that got a token."""

    def end(self) -> None:
        """Drop the requests."""


class OpenVino:
    """OpenVINO GenAI's continuous batching over a model that optimum-intel exports."""

    LEAST_BLOCK = 16
    """Tokens of a cache block, at least: 32 on current CPUs."""

    def __init__(self, load: dict[str, Any]) -> None:
        import openvino
        import openvino_genai
        from optimum.intel import OVModelForCausalLM

        self._openvino, self._genai = openvino, openvino_genai
        self.version = openvino_genai.get_version()
        exported = Path(load["scratch"], "openvino")
        OVModelForCausalLM.from_pretrained(
            load["checkpoint"], export=True, load_in_8bit=False, compile=False
        ).save_pretrained(exported)
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = load["batch_tokens"]
        scheduler.max_num_seqs = load["rows"]
        scheduler.enable_prefix_caching = False
        scheduler.num_kv_blocks = load["rows"] * (2 + load["tokens"] // self.LEAST_BLOCK)
        dtype = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[load["dtype"]]
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            exported,
            openvino_genai.Tokenizer(exported),
            scheduler,
            "CPU",
            INFERENCE_NUM_THREADS=load["threads"],
            INFERENCE_PRECISION_HINT=dtype,
            KV_CACHE_PRECISION=dtype,
        )
        self._handles: list[Any] = []

    def add(self, prompts: list[list[int]], max_tokens: int) -> None:
        import numpy as np

        config = self._genai.GenerationConfig(
            do_sample=False, eos_token_id=0, ignore_eos=True, max_new_tokens=max_tokens
        )
        self._handles = [
            self._pipeline.add_request(i, self._openvino.Tensor(np.array([prompt])), config)
            for i, prompt in enumerate(prompts)
        ]

    def step(self) -> list[int]:
        self._pipeline.step()
        return [i for i, h in enumerate(self._handles) if h.can_read() and h.read()]

    def end(self) -> None:
        for handle in self._handles:
            handle.cancel()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()


class Vllm:
    """vLLM's engine in this process, stepped by hand."""

    def __init__(self, load: dict[str, Any]) -> None:
        cpus = sorted(os.sched_getaffinity(0))[: load["threads"]]
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        }
        import vllm

        self.version = vllm.__version__
        self._vllm = vllm
        self._engine = vllm.LLMEngine.from_engine_args(
            vllm.EngineArgs(
                model=load["checkpoint"],
                skip_tokenizer_init=True,
                dtype=load["dtype"],
                max_num_seqs=load["rows"],
                max_num_batched_tokens=load["batch_tokens"],
                max_model_len=load["tokens"],
                enable_prefix_caching=False,
                disable_log_stats=True,
            )
        )
        self._ids: list[str] = []
        self._added = 0

    def add(self, prompts: list[list[int]], max_tokens: int) -> None:
        params = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        self._ids = [str(self._added + i) for i in range(len(prompts))]
        self._added += len(prompts)
        for request_id, prompt in zip(self._ids, prompts, strict=True):
            self._engine.add_request(request_id, {"prompt_token_ids": prompt}, params)

    def step(self) -> list[int]:
        return [self._ids.index(output.request_id) for output in self._engine.step()]

    def end(self) -> None:
        self._engine.abort_request(self._ids)
        while self._engine.has_unfinished_requests():
            self._engine.step()


RUNTIMES: dict[str, type[Runtime]] = {"openvino": OpenVino, "vllm": Vllm}


def prefill(runtime: Runtime, prompts: list[list[int]], max_tokens: int) -> None:
    """Run until every prompt has its first token."""
    runtime.add(prompts, max_tokens)
    decoding: set[int] = set()
    while len(decoding) < len(prompts):
        decoding.update(runtime.step())


def timed_steps(runtime: Runtime, rows: int, count: int) -> list[float]:
    """Return the milliseconds from one set of tokens to the next, of steps of the whole batch."""
    times = [time.perf_counter()]
    for _ in range(count):
        got = runtime.step()
        times.append(time.perf_counter())
        if sorted(got) != list(range(rows)):
            raise RuntimeError(f"a step decoded rows {got}, expected all {rows}")
    return [1e3 * (after - before) for before, after in pairwise(times)]


def main() -> None:
    """Serve requests until stdin ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no reply
    runtime: Runtime | None = None
    rows = 0
    for line in sys.stdin:
        request = json.loads(line)
        reply: dict[str, Any] = {}
        try:
            if runtime is None:
                runtime = RUNTIMES[request["runtime"]](request)
                reply = {"version": runtime.version}
            elif request["do"] == "prefill":
                rows = len(request["prompts"])
                prefill(runtime, request["prompts"], request["max_tokens"])
            elif request["do"] == "steps":
                reply = {"step_ms": timed_steps(runtime, rows, request["count"])}
            else:
                runtime.end()
        except Exception as error:  # whatever the runtime raises
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        if "error" in reply:
            return


if __name__ == "__main__":
    main()
