"""How many drafts of the demo model's drafter are right, in plain PyTorch and without an engine.

Run with `python -m stepgraph.runtime.demo.drafter_acceptance` (needs the `test` extra). The demo
model continues prompts greedily and at temperature 0.8; at every position of what it wrote, the
head drafts a chain, greedily, and a draft is right if the model wrote the same. Prompts are those
of `stepgraph.runtime.bench.speculation` and lines of the files that training held out.

Each line of JSON has `acceptance[i]`, the share of positions at which draft i+1 and all before it
are right, and `accepted_length[k-1]`, the tokens of a verify step with k drafts, that of the target
included, if one such step follows the other.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..bench.prompt_texts import TextKind, prompt_text
from .drafter_text import (
    DEMO,
    KINDS,
    Continuation,
    continuations,
    line_starts,
    prompt,
    tokenizer,
)
from .eagle3 import Eagle3Head, TargetFeatures, load_head
from .perplexity import held_out_tokens

__all__ = ["bench_prompts", "held_out_prompts", "measure", "right_drafts", "summary"]

DRAFTS = 7
OUTPUT = 200
"""Tokens of an output."""


def bench_prompts(kind: TextKind, rows: int) -> list[list[int]]:
    """Return prompts of `stepgraph.runtime.bench.speculation`."""
    ids = tokenizer()
    return [ids.encode(prompt_text(kind, index)).ids for index in range(rows)]


def held_out_prompts(kind: TextKind, rows: int) -> list[list[int]]:
    """Return prompts from files that neither the target nor its drafter was trained on."""
    stream = np.asarray(held_out_tokens())
    starts = line_starts(stream[:-512])
    rng = np.random.default_rng(KINDS.index(kind))
    return [prompt(kind, stream, starts, rng) for _ in range(rows)]


@torch.no_grad()
def right_drafts(
    head: Eagle3Head, target: TargetFeatures, text: Continuation, drafts: int
) -> torch.Tensor:
    """Return how many drafts of a chain are right, int64 `[chains]`.

    The first chain drafts the second token of the output; there are as many chains as the output
    has tokens, but `drafts`.
    """
    tokens = torch.tensor([text.token_ids])
    chains = torch.arange(text.prompt_length - 1, tokens.shape[1] - drafts - 1)
    P = int(chains[-1]) + 1
    features, _ = target(tokens)
    embeds = target.embed(tokens[:, 1 : P + drafts]).float()
    outputs = head.unroll(features[:, :P].float(), embeds, chains, drafts)
    outputs[0] = outputs[0][:, chains]
    ids = head.target_ids()
    right = [
        ids[logits[0].argmax(-1)] == tokens[0, chains + 2 + step]
        for step, logits in enumerate(outputs)
    ]
    return torch.stack(right).cumprod(0).sum(0)


def summary(right: list[torch.Tensor], drafts: int) -> dict[str, Any]:
    """Return the shares and lengths that the module describes, for `right_drafts` of some texts."""
    every = torch.cat(right)
    lengths = []
    for k in range(1, drafts + 1):
        steps = tokens = 0
        for own in right:
            at = 0
            while at < len(own):
                accepted = min(int(own[at]), k)
                steps, tokens, at = steps + 1, tokens + accepted + 1, at + accepted + 1
        lengths.append(tokens / steps)
    return {
        "texts": len(right),
        "positions": len(every),
        "acceptance": [round(float((every > i).float().mean()), 4) for i in range(drafts)],
        "accepted_length": [round(length, 3) for length in lengths],
    }


def measure(
    head: Eagle3Head, target: TargetFeatures, rows: int, threads: int
) -> list[dict[str, Any]]:
    """Return a line for each kind of prompt, where it is from, and the temperature."""
    lines = []
    for kind in KINDS:
        for source, make, count in (
            ("bench", bench_prompts, 8),
            ("held-out", held_out_prompts, rows),
        ):
            prompts = make(kind, count)
            for temperature in (0.0, 0.8):
                texts = continuations(
                    prompts, [temperature] * count, [OUTPUT] * count, threads, seed=3
                )
                right = [right_drafts(head, target, text, DRAFTS) for text in texts]
                lines.append(
                    {"prompts": source, "kind": kind, "temperature": temperature}
                    | summary(right, DRAFTS)
                )
                print(json.dumps(lines[-1]), flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafter", type=Path, default=DEMO / "drafter")
    parser.add_argument("--rows", type=int, default=64, help="prompts of held-out files of a kind")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    from transformers import LlamaForCausalLM

    head = load_head(args.drafter)
    model = LlamaForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16).eval()
    target = TargetFeatures(model, head.config.aux_layer_ids)
    measure(head, target, args.rows, args.threads)


if __name__ == "__main__":
    main()
