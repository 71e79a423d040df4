"""An `Engine` over the fake device: every public method, and no model."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from stepgraph.runtime import Engine, EngineConfig, SamplingParams
from stepgraph.runtime.loading.tokenizer import TextTokenizer
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.resolved_config import ResolvedConfig
from stepgraph.runtime.request import Request
from stepgraph.runtime.sampling_params import SamplingDefaults

from .engine_rig import loop_of
from .fake_device import VOCAB, FakeRunner, oracle
from .scheduler_rig import groups_of

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
FAKE_MODEL = dataclasses.replace(MODEL, vocab_size=VOCAB, max_position_embeddings=64)

Prompt = list[int]


class EngineRunner(FakeRunner):
    """What an engine calls besides what its loop calls."""

    times_device = False
    library: Any = SimpleNamespace(steps={}, misses=0, padding_fraction=0.0)

    def __init__(self) -> None:
        """Begun by the engine, which makes the scheduler; see `fake_engine`."""

    def launch(self, number: int, plan: Any) -> Any:
        launch = super().launch(number, plan)
        lanes = [request for request, _, _ in launch.sampled]
        logits = torch.tensor([[float(token)] for _, token, _ in launch.sampled])
        parts = ((lanes or [None], SimpleNamespace(logits=logits)),)
        fields = {f.name: getattr(launch, f.name) for f in dataclasses.fields(launch)}
        return SimpleNamespace(parts=parts, **fields)

    def read(self, launch: Any) -> Any:
        self.unread.popleft()
        return launch.sampled

    def force_token(self, row: int, token_id: int) -> None:
        self.device.tokens[row] = token_id

    def close(self) -> None:
        self.plans.clear()


def fake_engine(
    num_blocks: int = 60,
    max_num_seqs: int = 4,
    tokenizer: TextTokenizer | None = None,
    max_model_len: int = 48,
    **options: Any,
) -> Engine:
    """Return an engine whose tokens are those of `expected`."""
    user = EngineConfig(
        device="cpu",
        mode="eager",
        max_num_seqs=max_num_seqs,
        block_size=4,
        prefill_chunk=16,
        freeze_gc=False,
        structured_output=False,  # there are no masks
        **options,
    )
    runner = EngineRunner()
    parts = SimpleNamespace(
        config=dataclasses.replace(
            ResolvedConfig.resolve(user, FAKE_MODEL), max_model_len=max_model_len
        ),
        model=SimpleNamespace(
            config=FAKE_MODEL,
            stack=None,
            kernels=SimpleNamespace(
                library=None, name="fake", fallbacks=(), formats=(), collectives=None
            ),
        ),
        tokenizer=tokenizer,
        sampling_defaults=SamplingDefaults(),
        groups=groups_of((None,)),
        plan=SimpleNamespace(num_blocks=num_blocks, host_blocks=0, max_batch_tokens=64),
        runner=runner,
        reconcile=dict,
        phases=(),
        start_seconds=0.0,
        code_cache={"hits": 0, "misses": 0},
        num_parameters=0,
        compiled_kernels=None,
    )
    engine = Engine(parts)  # type: ignore[arg-type]
    FakeRunner.__init__(runner, loop_of(engine).scheduler, 0, (None,))
    return engine


def params(seed: int, max_tokens: int = 6, **options: Any) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True, **options)


def runner_of(engine: Engine) -> Any:
    """The runner of an engine, whose methods a test may replace."""
    return loop_of(engine).runner


def completions_of(engine: Engine, prompt: Prompt, own: SamplingParams) -> list[Request]:
    """The completions of a request that is not queued."""
    return engine._builder.accept("reference", prompt, own, 0).requests


def expected(engine: Engine, prompt: Prompt, own: SamplingParams) -> list[int]:
    """The output tokens of a request that runs alone."""
    (request,) = completions_of(engine, prompt, own)
    tokens, _ = oracle(request)
    return tokens


def check_serves(engine: Engine) -> None:
    """Assert that an engine without requests gives the right tokens and has lost nothing."""
    while engine.has_unfinished():
        engine.step()
    prompts = [[1, 2, 3, 4, 5], [6, 7], [1, 2, 3, 4, 9, 9]]
    own = [params(seed) for seed in range(3)]
    outputs = engine.generate(prompts, own)
    assert [output.token_ids for output in outputs] == [
        expected(engine, prompt, p) for prompt, p in zip(prompts, own, strict=True)
    ]
    engine.check_integrity()
    stats = engine.stats()
    assert stats["healthy"] is True
    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert stats["blocks"]["free"] == stats["blocks"]["usable"]
    assert stats["requests"] == stats["finished"]
    assert not engine.has_unfinished()
