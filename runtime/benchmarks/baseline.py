"""The same model in transformers, decoded by its continuous batching, to be compared with.

`generate_batch` of transformers runs a scheduler, a paged cache and, on CUDA, captured graphs and
asynchronous batching. It is given the same prompts and asked for as many tokens, greedily. Only
steps count that decode the whole batch and nothing else, as in `benchmark.py`: from the first token
of the last request on, while every request gets one token a step. Needs the extra "baseline".
"""

from __future__ import annotations

import dataclasses
import gc
import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ...profiling.stats import Summary
from ..errors import StepgraphError
from ..models.config import ModelConfig
from ..models.families import Family
from ..models.rope import Rope

__all__ = [
    "BaselineCase",
    "BaselineError",
    "TransformersBaseline",
    "hf_config",
    "whole_batch_steps",
]

LEAST_VERSION = (5, 17)
"""Of transformers: the first whose configuration of continuous batching is as it is used here."""

_STOP_SECONDS = 60.0


class BaselineError(StepgraphError, RuntimeError):
    """transformers is not there, or does not decode this model."""


class BaselineCase:
    """A case that is ready to be run as often as wanted."""

    def __init__(
        self, decode: Callable[[], tuple[list[list[float]], dict[str, Any]]], steps: int
    ) -> None:
        self._decode = decode
        self._steps = steps
        self._how: dict[str, Any] = {}
        self.step_ms: list[float] = []
        """Of the last `steps` steps of the whole batch in each run."""

    def run(self) -> None:
        """Decode the prompts once.

        Raises:
            BaselineError: transformers gave up, or decoded too few steps of the whole batch.
        """
        times, self._how = self._decode()
        found = whole_batch_steps(times)
        if len(found) < self._steps:
            raise BaselineError(
                f"transformers decoded the whole batch in {len(found)} steps, not {self._steps}"
            )
        self.step_ms += found[-self._steps :]

    def to_json(self, ours_ms: Sequence[float]) -> dict[str, Any]:
        """Return the `baseline` of a case of the benchmark's JSON.

        `ours_ms` are the steps that it is compared with: `speedup` is the ratio of the medians.
        """
        summary = Summary.of(self.step_ms)
        speedup = summary.p50 / Summary.of(list(ours_ms)).p50
        return {**self._how, "step_ms": summary.to_json(), "speedup": speedup}


class TransformersBaseline:
    """A model in transformers: `prepare` each case, `close` at the end."""

    def __init__(
        self,
        config: ModelConfig,
        directory: Path | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
    ) -> None:
        """Load the checkpoint in `directory`; without one, a model of these shapes.

        Raises:
            BaselineError: transformers is missing, too old, or cannot load the model.
        """
        self._transformers = _import_transformers()
        self._device = device
        transformers = self._transformers
        try:
            if directory is not None:
                model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
            else:
                torch.manual_seed(seed)
                with device:
                    model = transformers.AutoModelForCausalLM.from_config(
                        hf_config(config), dtype=dtype
                    )
        except (OSError, ValueError, RuntimeError) as error:
            raise BaselineError(f"transformers cannot load the model: {error}") from error
        self._model = model.to(device).eval()

    def __enter__(self) -> TransformersBaseline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def prepare(
        self, prompts: Sequence[list[int]], steps: int, max_batch_tokens: int
    ) -> BaselineCase:
        """Warm up for a case: capture its graphs and run it once. It ends the last case.

        Args:
            prompts: token ids, all prompts of one length.
            steps: steps of the whole batch that each run of the case returns.
            max_batch_tokens: prompt tokens of one step at most.

        Raises:
            BaselineError: the model or the case cannot be run.
        """
        self._forget()
        count, length = len(prompts), len(prompts[0])
        # The first request decodes while the others are prefilled, and must not end before them.
        new_tokens = steps + 2 + count + 2 * -(-count * length // max_batch_tokens)
        generation = self._transformers.GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=new_tokens
        )
        make = self._transformers.ContinuousBatchingConfig
        pages = -(-(length + new_tokens) // make().page_size) + 1
        # Graphs and asynchronous batching are asked for where there are graphs; where transformers
        # fails with them, it is left to choose. What ran is said.
        choices: list[dict[str, Any]] = [{}]
        if self._device.type == "cuda":
            choices.insert(0, {"use_cuda_graph": True, "use_async_batching": True})
        while True:
            batching = make(
                num_blocks=2 * count * pages,
                max_blocks_per_request=pages + pages % 2,
                max_requests_per_batch=count,
                max_batch_tokens=max(max_batch_tokens, count),
                safety_margin=0.0,  # no prompt is held back
                allow_block_sharing=False,  # every repetition prefills its prompts
                **choices.pop(0),
            )
            case = BaselineCase(partial(self._run, list(prompts), generation, batching), steps)
            try:
                case.run()
            except BaselineError:
                self._forget()
                if not choices:
                    raise
            else:
                case.step_ms.clear()
                return case

    def _run(
        self, prompts: list[list[int]], generation: Any, batching: Any
    ) -> tuple[list[list[float]], dict[str, Any]]:
        """Decode the prompts; return the seconds at which the tokens of each came, and how."""
        context = self._model.continuous_batching_context_manager(
            generation_config=generation,
            continuous_batching_config=batching,
            persistent_manager=True,
            timeout=_STOP_SECONDS,
        )
        times: dict[str, list[float]] = {}
        try:
            with context as manager:
                ids = manager.add_requests(prompts, record_timestamps=True)
                while len(times) < len(ids):
                    result = manager.get_result(timeout=1)
                    if result is None and not manager.is_running():
                        raise BaselineError("transformers stopped decoding the prompts")
                    if result is not None and result.error is not None:
                        raise BaselineError(f"transformers gave a prompt up: {result.error}")
                    if result is not None and result.is_finished():
                        times[result.request_id] = result.timestamps
                chosen = manager.continuous_batching_config
        except BaselineError:
            raise
        except Exception as error:  # whatever a scheduler, a capture or an allocation raises
            raise BaselineError(f"transformers did not decode the prompts: {error}") from error
        graphs = chosen.use_cuda_graph
        return list(times.values()), {
            "name": "transformers",
            "version": self._transformers.__version__,
            "attention": self._model.config._attn_implementation,
            "cuda_graphs": any(graphs) if isinstance(graphs, tuple) else bool(graphs),
            "async": bool(chosen.use_async_batching),
        }

    def _forget(self) -> None:
        """Let go of the cache and the graphs of the last case."""
        self._model.destroy_cached_continuous_batching_manager()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Give back the memory. Idempotent."""
        if self._model is not None:
            self._forget()
            self._model = None
            gc.collect()


def whole_batch_steps(times: Sequence[Sequence[float]]) -> list[float]:
    """Return the milliseconds of the steps that gave every request exactly one token.

    Args:
        times: for each request the seconds at which its tokens came, ascending.
    """
    last = max(times, key=lambda of_request: of_request[0])
    # Wherever in a step a request gets its token, it gets one between two of another's.
    return [
        1e3 * (end - start)
        for start, end in pairwise(last)
        if all(bisect_right(t, end) - bisect_right(t, start) == 1 for t in times)
    ]


def hf_config(config: ModelConfig) -> Any:
    """Return the transformers configuration of a model of these shapes.

    Raises:
        BaselineError: transformers is missing or too old.
    """
    family, latent = config.family, config.latent
    fields: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        family.activation_key: config.hidden_act,
        "rope_parameters": _rope_parameters(config, family),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "pad_token_id": None,
    }
    if latent is None:
        fields |= {"num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim}
    else:
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
        fields |= {name: getattr(latent, name) for name in (*names, "v_head_dim")}
        fields |= {
            "num_key_value_heads": config.num_heads,
            "rope_interleave": latent.rope_interleave,
            "first_k_dense_replace": config.num_layers,  # no mixture of experts
        }
    windowed = config.sliding_window is not None
    if windowed or family.window_switch:
        fields |= {"sliding_window": config.sliding_window}
    if family.window_switch:
        fields |= {"use_sliding_window": windowed}
    if family.lists_layer_types and config.layer_types:
        fields |= {"layer_types": list(config.layer_types)}
    if family.query_scalar:
        fields |= {"query_pre_attn_scalar": round(config.query_pre_attn_scalar or 0)}
    if family.score_softcap:
        fields |= {"attn_logit_softcapping": config.attn_logit_softcapping}
    if family.logits_softcap:
        fields |= {"final_logit_softcapping": config.final_logit_softcapping}
    transformers = _import_transformers()
    return transformers.AutoConfig.for_model(config.model_type, **fields)


def _rope_parameters(config: ModelConfig, family: Family) -> dict[str, Any]:
    full = _rope(Rope(config.rope_theta, config.rope_scaling))
    if not family.two_ropes:
        return full
    return {
        "full_attention": full,
        "sliding_attention": full if config.sliding_rope is None else _rope(config.sliding_rope),
    }


def _rope(rope: Rope) -> dict[str, Any]:
    scaling = dataclasses.asdict(rope.scaling)
    kind = scaling.pop("type")
    names: tuple[str, ...] = ()
    if kind != "default":
        names = ("factor",)
    if kind in ("llama3", "yarn"):
        names += ("original_max_position_embeddings",)
    if kind == "llama3":
        names += ("low_freq_factor", "high_freq_factor")
    if kind == "yarn":
        names += ("beta_fast", "beta_slow", "truncate", "attention_factor")
        names += ("mscale", "mscale_all_dim")
    given = {name: scaling[name] for name in names if scaling[name] is not None}
    return {"rope_type": kind, "rope_theta": rope.theta, **given}


def _import_transformers() -> Any:
    """Return the module; its progress bars and warnings are kept off the terminal."""
    try:
        import transformers
    except ImportError as error:
        raise BaselineError(
            'to compare with transformers it must be there: pip install "stepgraph[baseline]"'
        ) from error
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise BaselineError(
            f"transformers {transformers.__version__} is too old to compare with, {least} is the"
            ' oldest that will do: pip install --upgrade "stepgraph[baseline]"'
        )
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    return transformers
