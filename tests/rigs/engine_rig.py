"""Greedy parameters, the way to the last outputs and the parts of an engine, for its tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stepgraph.runtime import Engine, EngineConfig, RequestOutput, SamplingParams
from stepgraph.runtime.engine.loop import StepLoop
from stepgraph.runtime.engine.startup import EngineParts

Open = Callable[..., Engine]
"""The fixture `open_engine`: opens an engine on a variant or a directory."""


def greedy(max_tokens: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **more)


MIXED_PARAMS = [
    greedy(18),
    SamplingParams(max_tokens=21, temperature=0.9, top_k=9, seed=5, ignore_eos=True, n=2),
    greedy(20),
    SamplingParams(max_tokens=13, temperature=0.6, top_p=0.9, seed=8, repetition_penalty=1.2),
]
"""Of four requests: greedy ones, and others with what the full sampler does."""


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    """The tokens of every completion."""
    return [[completion.token_ids for completion in output.completions] for output in outputs]


def shown(outputs: Sequence[RequestOutput]) -> list[Any]:
    """All that a user can see of outputs, but times and log-probabilities."""
    return [
        [
            (c.token_ids, c.finish_reason, c.text, [(p.token_id, list(p.top)) for p in c.logprobs])
            for c in output.completions
        ]
        for output in outputs
    ]


@contextmanager
def opened(source: Path | str, **config: Any) -> Iterator[Engine]:
    """An engine on a directory: eager on the CPU with four rows, unless told otherwise."""
    fields: dict[str, Any] = {"device": "cpu", "mode": "eager", "max_num_seqs": 4} | config
    with Engine.from_pretrained(source, EngineConfig(**fields)) as engine:
        yield engine


def loop_of(engine: Engine) -> StepLoop:
    return engine._loop


def parts_of(engine: Engine) -> EngineParts:
    return engine._open_parts()


def keep_in_flight(engine: Engine, steps: int) -> None:
    """Commit a step after `steps` more were launched, as on an asynchronous device."""
    engine._loop._in_flight = steps


def run(engine: Engine, *, checked: bool = False) -> dict[str, RequestOutput]:
    """Step to the end; return the final output of each request, of which there is one each.

    With `checked`, all invariants must hold after every step.
    """
    final: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        for output in engine.step():
            assert output.request_id not in final, "an output after the final one"
            if output.finished:
                final[output.request_id] = output
        if checked:
            engine.check_integrity()
    return final
