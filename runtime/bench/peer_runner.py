"""Decodes in another runtime, as `peers` requests. Runs in that runtime's Python.

Requests and replies are JSON objects, one a line, on stdin and stdout. The first request loads the
model; each of the others decodes a batch. An `error` in a reply ends the process. Standard library
only, until a runtime is loaded.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import closing
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

LLAMA_CPP_TYPES = {"int8": "q8_0", "int4": "q4_0"}
"""The types of llama.cpp for values of `weight_dtype`; with q4_0 it stores the head as q6_k."""
GGUF = "gguf"
"""Type of weights that are stored as in their GGUF file."""


class Stepped(ABC):
    """A runtime whose steps are called one by one."""

    version: str
    stored_as: str | None = None
    """Type of the weights of linear layers; None: the dtype of everything else."""
    reads_gguf = True

    def __init__(self, load: dict[str, Any]) -> None:
        self._most_tokens: int = load["tokens"]

    @abstractmethod
    def decode(self, prompts: list[list[int]], max_tokens: int) -> Generator[Sequence[int]]:
        """Decode prompts greedily, each up to `max_tokens`; drop them when closed.

        Yields after each step the numbers of the prompts that got a token.
        """

    def run(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        """Decode a batch; return the milliseconds from one set of its tokens to the next, and
        those until the last row has its first token."""
        rows, decoding = set(range(len(prompts))), set[int]()
        began = time.perf_counter()
        with closing(self.decode(prompts, self._most_tokens - len(prompts[0]))) as decoded:
            while decoding < rows:
                decoding.update(next(decoded))
            seconds = [time.perf_counter()]
            for got in islice(decoded, steps):
                seconds.append(time.perf_counter())
                if set(got) != rows:
                    raise RuntimeError(f"a step decoded rows {list(got)}, expected all {len(rows)}")
        return times(began, seconds)


def times(began: float, seconds: list[float]) -> dict[str, Any]:
    """Return the milliseconds of prefill and of each step, from the times of the tokens."""
    prefill_ms, *step_ms = (1e3 * (b - a) for a, b in pairwise([began, *seconds]))
    return {"prefill_ms": prefill_ms, "step_ms": step_ms}


class Transformers:
    """`generate` of transformers with a static cache, whose steps a streamer times.

    It copies the tokens of every step to the host for the streamer, and its work between two steps
    is included. On CUDA it compiles decoding, on a CPU if that is demanded.
    """

    WARM_STEPS = 4
    """Decode steps, at least, before any counts: compiling, capturing and the first replays."""
    MOST_SHAPES = 64
    """Shapes that decoding is compiled for; beyond the limit it would silently run uncompiled."""
    stored_as = None
    reads_gguf = True

    def __init__(self, load: dict[str, Any]) -> None:
        import torch
        import transformers

        self._torch, self._transformers = torch, transformers
        self.version = transformers.__version__
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(load["threads"])
        self._device = torch.device(load["device"])
        self._compiles = load["compiled"] or self._device.type == "cuda"
        checkpoint, file = Path(load["checkpoint"]), None
        if checkpoint.is_file():  # its weights are dequantised
            checkpoint, file = checkpoint.parent, checkpoint.name
        from_pretrained = transformers.AutoModelForCausalLM.from_pretrained
        model: Any = from_pretrained(
            checkpoint, gguf_file=file, dtype=getattr(torch, load["dtype"])
        )
        self._model = model.to(self._device).eval()
        text = model.config.get_text_config()
        if getattr(text, "attn_logit_softcapping", None) is not None:
            model.set_attn_implementation("eager")  # sdpa ignores the soft cap
        # Our side ignores the checkpoint's generation settings (penalties, stop tokens) as well.
        model.generation_config = transformers.GenerationConfig()
        self._cache: Any = None
        self._shape = (0, 0, 0)

    def run(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        """Decode a batch, after runs that compile it if it has another shape than the last one."""
        shape = len(prompts), len(prompts[0]), steps
        if shape != self._shape:
            self._cache = None
            # Kept between the runs: captured graphs read its addresses.
            self._cache = self._transformers.StaticCache(
                config=self._model.config, max_cache_len=len(prompts[0]) + steps + 1
            )
            self._shape = shape
            for _ in range(-(-self.WARM_STEPS // steps)):
                self._generate(prompts, steps)
        return self._generate(prompts, steps)

    def _generate(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        torch = self._torch
        settings: dict[str, Any] = {}
        if self._compiles:
            # The default, but static shapes: else the second case would compile dynamic ones.
            settings["compile_config"] = self._transformers.CompileConfig(dynamic=False)
            settings["compile_config"]._compile_all_devices = True
        seconds: list[float] = []
        tokens: list[list[int]] = []

        class Streamer:
            def put(self, token_ids: Any) -> None:
                if token_ids.dim() == 1:  # the first call has the prompts
                    seconds.append(time.perf_counter())
                    tokens.append(token_ids.tolist())

            def end(self) -> None:
                pass

        self._cache.reset()
        began = time.perf_counter()
        prompts_BT = torch.tensor(prompts, device=self._device)
        with torch._dynamo.config.patch(recompile_limit=self.MOST_SHAPES):
            self._model.generate(
                prompts_BT,
                attention_mask=torch.ones_like(prompts_BT),
                generation_config=self._transformers.GenerationConfig(
                    do_sample=False, pad_token_id=0, max_new_tokens=steps + 1, **settings
                ),
                past_key_values=self._cache,
                streamer=Streamer(),
            )
        if len(tokens) != steps + 1:
            raise RuntimeError(f"transformers decoded {len(tokens) - 1} steps, not {steps}")
        return times(began, seconds) | {"token_ids": list(zip(*tokens, strict=True))}


class OpenVino(Stepped):
    """OpenVINO GenAI's continuous batching, over a GGUF file or what optimum-intel exports."""

    LEAST_BLOCK = 16
    """Tokens of a cache block, at least: 32 on current CPUs."""

    def __init__(self, load: dict[str, Any]) -> None:
        super().__init__(load)
        import openvino
        import openvino_genai

        self._openvino, self._genai = openvino, openvino_genai
        self.version = openvino_genai.get_version()
        model = Path(load["checkpoint"])
        if model.is_file():
            self.stored_as = GGUF
        else:
            from optimum.intel import OVModelForCausalLM

            exporter = OVModelForCausalLM.from_pretrained(
                model, export=True, load_in_8bit=False, compile=False
            )
            model = Path(load["scratch"], "openvino")
            exporter.save_pretrained(model)
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = load["batch_tokens"]
        scheduler.max_num_seqs = load["rows"]
        scheduler.enable_prefix_caching = False
        scheduler.num_kv_blocks = load["rows"] * (2 + load["tokens"] // self.LEAST_BLOCK)
        dtype = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[load["dtype"]]
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            model,
            openvino_genai.Tokenizer(model),
            scheduler,
            "CPU",
            INFERENCE_NUM_THREADS=load["threads"],
            INFERENCE_PRECISION_HINT=dtype,
            KV_CACHE_PRECISION=dtype,
        )

    def decode(self, prompts: list[list[int]], max_tokens: int) -> Generator[Sequence[int]]:
        import numpy as np

        config = self._genai.GenerationConfig(
            do_sample=False, eos_token_id=0, ignore_eos=True, max_new_tokens=max_tokens
        )
        handles = [
            self._pipeline.add_request(i, self._openvino.Tensor(np.array([prompt])), config)
            for i, prompt in enumerate(prompts)
        ]
        try:
            while True:
                self._pipeline.step()
                yield [i for i, h in enumerate(handles) if h.can_read() and h.read()]
        finally:
            for handle in handles:
                handle.cancel()
            while self._pipeline.has_non_finished_requests():
                self._pipeline.step()


class Vllm(Stepped):
    """vLLM's engine in this process, stepped by hand."""

    reads_gguf = False  # on a CPU

    def __init__(self, load: dict[str, Any]) -> None:
        super().__init__(load)
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
        self._added = 0

    def decode(self, prompts: list[list[int]], max_tokens: int) -> Generator[Sequence[int]]:
        params = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        ids = [str(self._added + i) for i in range(len(prompts))]
        self._added += len(prompts)
        for request_id, prompt in zip(ids, prompts, strict=True):
            self._engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        try:
            while True:
                yield [ids.index(output.request_id) for output in self._engine.step()]
        finally:
            self._engine.abort_request(ids)
            while self._engine.has_unfinished_requests():
                self._engine.step()


class LlamaCpp(Stepped):
    """llama.cpp, through the low-level API of llama-cpp-python.

    It reads a GGUF file, or a checkpoint that `gguf_writer` converts.
    """

    CHUNK = 512
    """Prompt tokens of a call, its default."""

    def __init__(self, load: dict[str, Any]) -> None:
        super().__init__(load)
        import llama_cpp

        self._api = llama_cpp
        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        checkpoint = path = Path(load["checkpoint"])
        if checkpoint.is_file():
            self.stored_as = GGUF
        else:
            path = Path(load["scratch"], "model.gguf")
            writer = runpy.run_path(str(Path(__file__).with_name("gguf_writer.py")))
            writer["write_gguf"](checkpoint, path)
            self.stored_as = LLAMA_CPP_TYPES.get(load["weight_dtype"])
            if self.stored_as is not None:
                path = self._quantised(path, self.stored_as)
        model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = load["rows"] * load["tokens"]
        params.n_seq_max = load["rows"]
        params.n_threads = params.n_threads_batch = load["threads"]
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError("llama.cpp cannot load the model")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(max(self.CHUNK, load["rows"]), 0, 1)

    def _quantised(self, path: Path, stored_as: str) -> Path:
        """Replace a file by one that llama.cpp quantises, which is returned."""
        params = self._api.llama_model_quantize_default_params()
        params.ftype = getattr(self._api, f"LLAMA_FTYPE_MOSTLY_{stored_as.upper()}")
        smaller = path.with_name(f"{stored_as}.gguf")
        if self._api.llama_model_quantize(bytes(path), bytes(smaller), params) != 0:
            raise RuntimeError(f"llama.cpp cannot quantise the model to {stored_as}")
        path.unlink()
        return smaller

    def decode(self, prompts: list[list[int]], max_tokens: int) -> Generator[Sequence[int]]:
        latest: list[int] = []
        try:
            for row, prompt in enumerate(prompts):
                for start in range(0, len(prompt), self.CHUNK):
                    chunk = prompt[start : start + self.CHUNK]
                    tokens = [(token, start + i, row) for i, token in enumerate(chunk)]
                    last = start + self.CHUNK >= len(prompt)
                    latest[row:] = self._decode(tokens, outputs=int(last))
                yield [row]
            rows = range(len(prompts))
            for step in range(max_tokens):
                lengths = [len(prompt) + step for prompt in prompts]
                tokens = list(zip(latest, lengths, rows, strict=True))
                latest = self._decode(tokens, outputs=len(tokens))
                yield rows
        finally:
            self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)

    def _decode(self, tokens: list[tuple[int, int, int]], outputs: int) -> list[int]:
        """Run (token, position, sequence) triples; return what follows the last `outputs`."""
        import numpy as np

        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence) in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = i >= len(tokens) - outputs
        if self._api.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        if not outputs:
            return []
        logits = self._api.llama_get_logits(self._context)
        best = np.ctypeslib.as_array(logits, (outputs, self._vocab)).argmax(axis=1)
        return [int(token) for token in best]


RUNTIMES: dict[str, type[Stepped | Transformers]] = {
    "openvino": OpenVino,
    "vllm": Vllm,
    "llama.cpp": LlamaCpp,
    "transformers": Transformers,
}


def main() -> None:
    """Serve requests until stdin ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not a reply
    runtime: Stepped | Transformers | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if runtime is None:
                runtime = RUNTIMES[request["runtime"]](request)
                reply = {"version": runtime.version, "stored_as": runtime.stored_as}
            else:
                reply = runtime.run(**request)
        except Exception as error:  # whatever the runtime raises
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        if "error" in reply:
            return


if __name__ == "__main__":
    main()
