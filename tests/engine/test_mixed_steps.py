"""Steps that decode and prefill: one forward pass on the C++ operators, and bit for bit the results
of requests alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from stepgraph.runtime import Engine, RequestOutput, SamplingParams
from stepgraph.runtime.kernels import have_compiler
from stepgraph.runtime.kernels.ops.stack import DecoderStack

from ..rigs.engine_rig import Open, greedy, run
from ..rigs.tiny_models import Tiny

pytestmark = pytest.mark.skipif(not have_compiler(), reason="needs a C++ compiler")

NATIVE: dict[str, Any] = {"mode": "compile", "kernels": "native", "dtype": "bfloat16"}
PARAMS = [
    greedy(14, logprobs=3),
    SamplingParams(max_tokens=17, temperature=0.9, top_k=9, seed=5, ignore_eos=True, logprobs=2),
    greedy(9, logprobs=2, prompt_logprobs=2),
    SamplingParams(max_tokens=11, temperature=0.7, seed=8, repetition_penalty=1.3, n=2, logprobs=0),
    greedy(6),
]
GRAMMAR = SamplingParams(
    max_tokens=20, temperature=0.8, seed=3, logprobs=2, structured={"regex": "[a-c]{9,15}-[0-9]+"}
)


def bits(output: RequestOutput) -> tuple[Any, ...]:
    """Tokens and log-probabilities, which are floats that a comparison does not round."""
    own = [(c.token_ids, c.finish_reason, c.logprobs) for c in output.completions]
    return output.prompt_logprobs, own


def mixed_steps(engine: Engine) -> int:
    """Steps that decoded and prefilled, of those that the timeline has."""
    steps = engine.timeline().records()
    return sum(step.rows > 0 and step.prefill_tokens > 0 for step in steps)


@pytest.fixture
def stack_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of tokens of each call of the native layers."""
    calls: list[int] = []
    stack = DecoderStack.run

    def counted(self: DecoderStack, x_TD: Any, *arguments: Any) -> Any:
        calls.append(len(x_TD))
        return stack(self, x_TD, *arguments)

    monkeypatch.setattr(DecoderStack, "run", counted)
    return calls


def test_a_mixed_step_calls_the_layers_once(
    open_engine: Open, tiny: Tiny, stack_calls: list[int]
) -> None:
    """Decoding rows and prompts are tokens of one call, without padding."""
    short, long = tiny("base").prompts(5, 40)
    engine = open_engine("base", **NATIVE, prefill_chunk=13, max_num_seqs=3)
    for _ in range(2):
        engine.add_request(short, greedy(30))
    engine.step()
    engine.step()
    engine.add_request(long, greedy(2))
    stack_calls.clear()
    for _ in range(6):
        engine.step()
    assert stack_calls == [15, 15, 15, 3, 3, 2]
    run(engine, checked=True)


@pytest.mark.parametrize("chunk", [13, 64])
@pytest.mark.parametrize("variant", ["odd", "mixtral", "lfm2", "text"])
def test_rows_of_mixed_steps_get_what_requests_get_alone(
    open_engine: Open, tiny: Tiny, variant: str, chunk: int
) -> None:
    """Greedy and drawn tokens, log-probabilities of both, grammars, preemption and aborts."""
    prompts = tiny(variant).prompts(3, 61, 30, 45, 9)
    params = [*PARAMS[:4], GRAMMAR if variant == "text" else PARAMS[4]]
    settings = NATIVE | {"block_size": 8, "prefix_cache": False}
    engine = open_engine(variant, **settings, max_num_seqs=1, prefill_chunk=256)
    alone = [bits(engine.generate([p], s)[0]) for p, s in zip(prompts, params, strict=True)]
    engine.close()
    engine = open_engine(variant, **settings, max_num_seqs=4, prefill_chunk=chunk, num_blocks=17)
    waiting = [(f"{n}/{i}", i) for n in range(3) for i in range(len(prompts))]
    found: dict[str, RequestOutput] = {}
    while waiting or engine.has_unfinished():
        if waiting:
            name, index = waiting.pop(0)
            engine.add_request(prompts[index], params[index], name)
            {"0/4": engine.pause, "1/1": engine.resume}.get(name, str)("0/1")
            if name == "1/3":
                engine.abort("1/1")
        found |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
    aborted = found.pop("1/1")
    assert aborted.completions[0].finish_reason == "abort"
    for name, output in found.items():
        assert bits(output) == alone[int(name[2:])], name
    assert engine.stats()["preemptions"] > 0
    assert mixed_steps(engine) > 5
