"""Requests with and without grammars join, leave and are preempted; outputs stay what they are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from stepgraph.runtime import SamplingParams

from ..rigs.engine_rig import Open
from ..rigs.structured_rig import GRAMMARS

pytestmark = pytest.mark.native_kernels

PROMPTS = [[7, 30, 41], [5, 5, 90, 12], [60], [100, 3, 8, 8, 8]]
CHOICES = [None, *GRAMMARS]
TIGHT = {"num_blocks": 12, "block_size": 4, "prefill_chunk": 4, "max_num_seqs": 3}


def params_of(grammar: int, seed: int, fields: dict[str, Any]) -> SamplingParams:
    return SamplingParams(seed=seed, structured=CHOICES[grammar], **fields)


@pytest.mark.parametrize(
    ("config", "examples"),
    [
        (TIGHT, 15),
        (TIGHT | {"host_cache_bytes": 1 << 16, "kernels": "native"}, 15),
        ({"steps_per_launch": 3, "max_num_seqs": 2}, 8),
        (TIGHT | {"speculation": {"adaptive": False, "prompt_lookup_min": 2}}, 15),
    ],
    ids=["recompute", "swap", "launches", "drafts"],
)
def test_outputs_depend_on_nothing_else(
    open_engine: Open, config: dict[str, Any], examples: int
) -> None:
    engine = open_engine("text", structured_output=True, **config)
    alone = open_engine("text", structured_output=True, prefix_cache=False)
    known: dict[Any, list[tuple[tuple[int, ...], Any]]] = {}

    def expected(prompt: int, *of_params: Any) -> list[tuple[tuple[int, ...], Any]]:
        grammar, seed, fields = of_params
        key = prompt, grammar, seed, str(fields)
        if key not in known:
            (output,) = alone.generate([PROMPTS[prompt]], params_of(*of_params))
            known[key] = [(c.token_ids, c.finish_reason) for c in output.completions]
        return known[key]

    class Machine(RuleBasedStateMachine):
        @initialize()
        def begin(self) -> None:
            self.open: dict[str, Any] = {}
            self.count = 0

        @rule(
            prompt=st.integers(0, len(PROMPTS) - 1),
            grammar=st.integers(0, len(CHOICES) - 1),
            seed=st.integers(0, 2),
            fields=st.sampled_from(
                [
                    {"temperature": 0.0, "max_tokens": 20},
                    {"max_tokens": 25},
                    {"max_tokens": 9, "n": 2, "logprobs": 1},
                    {"max_tokens": 20, "min_tokens": 12},
                    {"max_tokens": 20, "ignore_eos": True, "presence_penalty": 1.0},
                ]
            ),
        )
        def join(self, prompt: int, grammar: int, seed: int, fields: dict[str, Any]) -> None:
            self.count += 1
            request_id = f"r{self.count}"
            engine.add_request(PROMPTS[prompt], params_of(grammar, seed, fields), request_id)
            self.open[request_id] = prompt, grammar, seed, fields

        @rule(which=st.integers(0, 5))
        def leave(self, which: int) -> None:
            if which < len(self.open):
                request_id = sorted(self.open)[which]
                engine.abort(request_id)
                del self.open[request_id]

        @rule(steps=st.integers(1, 12))
        def run(self, steps: int) -> None:
            for _ in range(steps):
                self.take()

        def take(self) -> None:
            for output in engine.step():
                if output.finished and output.request_id in self.open:
                    of_request = self.open.pop(output.request_id)
                    found = [(c.token_ids, c.finish_reason) for c in output.completions]
                    assert found == expected(*of_request), of_request

        @invariant()
        def consistent(self) -> None:
            engine.check_integrity()

        def teardown(self) -> None:
            while engine.has_unfinished():
                self.take()
            assert not self.open

    run_state_machine_as_test(
        Machine, settings=settings(max_examples=examples, stateful_step_count=12, deadline=None)
    )
    if config.get("num_blocks"):
        assert engine.stats()["preemptions"] > 0
