"""Train the demo model's drafter, an EAGLE-3 head, on text that the demo model writes.

Run with `python -m stepgraph.runtime.demo.train_drafter --output DIR` (needs the `test` extra, for
`transformers`). Text is source code of this machine's standard library, without the files that
`train` holds out, and continuations of its lines by the demo model, half of them greedy, half at
temperature 0.8.

Loss: cross entropy against the target's distribution over the draft vocabulary (the most frequent
tokens of the text), at every position for the first draft, and at random ones for the following
drafts, which the head computes from its own hidden states as it will when drafting
(training-time test; EAGLE-3, https://arxiv.org/abs/2503.01840).
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .drafter_acceptance import measure
from .drafter_text import DEMO, KINDS, continuations, line_starts, prompt, tokenizer
from .eagle3 import Eagle3Config, Eagle3Head, TargetFeatures, load_head, save_head
from .train import MAX_POSITIONS, VOCAB_SIZE, encode, learning_rate, read_sources, source_files

LENGTH = 384
"""Tokens of a continuation with its prompt."""
SOURCE_LENGTH = 1536
"""Tokens of a window of source text: long, for the positions that continuations do not reach."""
DECAY = 0.85
"""Weight of the loss of a draft, relative to the draft before it."""
CHAIN_SHARE = 3
"""Further drafts are trained at one position in so many: neighbouring ones have much in common."""
ACCEPTANCE_ROWS = 24
"""Prompts of a kind, from held-out files, on which the head is judged."""
AUX_LAYER_IDS = (2, 4, 6)
"""vLLM's default, (2, L // 2, L - 3), has only two different ids for the L = 6 layers here."""


def head_config(target: Any, intermediate_size: int, draft_vocab_size: int) -> Eagle3Config:
    """Return the sizes of the head for a target of transformers."""
    config = target.config
    return Eagle3Config(
        hidden_size=config.hidden_size,
        intermediate_size=intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        draft_vocab_size=draft_vocab_size,
        aux_layer_ids=AUX_LAYER_IDS,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=config.rms_norm_eps,
    )


def build_head(config: Eagle3Config, ids: np.ndarray, target: Any) -> Eagle3Head:
    """Return the untrained head, its last layers begun as the target's."""
    head = Eagle3Head(config)
    for weight in head.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.02)
    head.set_vocabulary(torch.from_numpy(ids))
    with torch.no_grad():
        head.lm_head.weight.copy_(target.model.embed_tokens.weight[ids])
        head.norm.weight.copy_(target.model.norm.weight)
    return head


def write_text(stream: np.ndarray, count: int, threads: int) -> np.ndarray:
    """Return `count` continuations of lines of `stream`, int64 `[count, LENGTH]`."""
    rng = np.random.default_rng(1)
    starts = line_starts(stream[:-LENGTH])
    kinds = rng.choice(len(KINDS), size=count, p=(0.5, 0.3, 0.2))
    prompts = [prompt(KINDS[kind], stream, starts, rng) for kind in kinds]
    temperatures = rng.choice((0.0, 0.8), size=count).tolist()
    lengths = [LENGTH - len(ids) for ids in prompts]
    rows = continuations(prompts, temperatures, lengths, threads, seed=1)
    return np.asarray([row.token_ids for row in rows], dtype=np.int64)


def batches(text: np.ndarray, stream: np.ndarray, batch_tokens: int) -> Iterator[np.ndarray]:
    """Yield batches `[B, T]` for ever, one in eight of source text, the others continuations."""
    rng = np.random.default_rng(0)
    rows = batch_tokens // LENGTH
    order = np.empty(0, dtype=np.int64)
    while True:
        for _ in range(7):
            if len(order) < rows:
                order = rng.permutation(len(text))
            yield text[order[:rows]]
            order = order[rows:]
        starts = rng.integers(
            len(stream) - SOURCE_LENGTH, size=max(1, batch_tokens // SOURCE_LENGTH)
        )
        yield np.stack([stream[start : start + SOURCE_LENGTH] for start in starts])


def head_loss(
    head: Eagle3Head,
    features: torch.Tensor,
    embeds: torch.Tensor,
    wanted: torch.Tensor,
    chains: torch.Tensor,
    steps: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss, and the target's mean probability of each draft of row 0 `[steps]`.

    Args:
        head: what is trained.
        features: `[B, T, F]`, of which the last `steps` positions begin no chain.
        embeds: `[B, T, D]` of the tokens.
        wanted: `[B, T, V]`: the target's probability of each token of the draft vocabulary after
            each position; its sum is below 1.
        chains: int64 `[S]`.
        steps: drafts of a chain.
    """
    P = features.shape[1] - steps
    with torch.autocast("cpu", torch.bfloat16):
        outputs = head.unroll(features[:, :P], embeds[:, 1 : P + steps], chains, steps)
    loss = torch.zeros(())
    right = []
    for step, logits in enumerate(outputs):
        target = wanted[:, 1 : P + 1] if step == 0 else wanted[:, chains + step + 1]
        own = -(target * logits.float().log_softmax(-1)).sum(-1).mean()
        loss = loss + DECAY**step * own
        likeliest = logits[:1].argmax(-1, keepdim=True)
        right.append(target[:1].gather(-1, likeliest).mean())
    return loss / sum(DECAY**step for step in range(steps)), torch.stack(right)


@torch.no_grad()
def target_side(
    target: TargetFeatures, ids: torch.Tensor, batch: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return features, embeddings and the wanted probabilities of `head_loss`; `ids` `[V]`."""
    features, final = target(batch)
    logits = torch.nn.functional.linear(final, target.target.lm_head.weight).float()
    wanted = (logits[..., ids] - logits.logsumexp(-1, keepdim=True)).exp()
    return features.float(), target.embed(batch).float(), wanted


def train(
    head: Eagle3Head,
    target: TargetFeatures,
    source: Iterator[np.ndarray],
    steps: int,
    minutes: float,
    drafts: int,
    peak: float,
) -> tuple[int, float]:
    """Train in place, `steps` steps or so many minutes; return the steps and seconds it took."""
    matrices = [p for name, p in head.named_parameters() if p.dim() == 2 and "lm_head" not in name]
    rest = [p for name, p in head.named_parameters() if p.dim() < 2 or "lm_head" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=peak, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=peak, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    rng = np.random.default_rng(2)
    ids = head.target_ids()
    began = time.monotonic()
    smoothed: float | None = None
    right = torch.zeros(drafts)
    step, progress = 0, 0.0
    while progress < 1:
        batch = torch.from_numpy(next(source))
        positions = batch.shape[1] - drafts
        chosen = rng.choice(positions, size=positions // CHAIN_SHARE, replace=False)
        chains = torch.from_numpy(np.sort(chosen))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(int(10_000 * progress), 10_000, peak)
        loss, hits = head_loss(head, *target_side(target, ids, batch), chains, drafts)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        value = loss.item()
        smoothed = value if smoothed is None else 0.95 * smoothed + 0.05 * value
        right = hits if step == 0 else 0.95 * right + 0.05 * hits
        step += 1
        seconds = time.monotonic() - began
        progress = max(step / steps, seconds / 60 / minutes)
        if step % 20 == 0 or progress >= 1:
            print(
                f"step {step:5d}/{steps}  loss {smoothed:.3f}  right"
                f" {' '.join(f'{share:.3f}' for share in right.tolist())}  {seconds:.0f} s",
                flush=True,
            )
    return step, time.monotonic() - began


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and write the checkpoint and `training.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="directory to write to")
    parser.add_argument("--continue-from", type=Path, metavar="DIR", help="train this head further")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--minutes", type=float, default=math.inf, help="of training at most")
    parser.add_argument("--batch-tokens", type=int, default=3072)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--drafts", type=int, default=6, help="drafts of a chain in training")
    parser.add_argument("--draft-vocabulary", type=int, default=1536)
    parser.add_argument("--intermediate-size", type=int, default=512)
    parser.add_argument("--continuations", type=int, default=4096)
    parser.add_argument("--text", type=Path, help="file (.npy) that keeps the continuations")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    from transformers import LlamaForCausalLM

    train_paths, _ = source_files(Path(sysconfig.get_paths()["stdlib"]))
    stream = encode(tokenizer(), read_sources(train_paths))
    began = time.monotonic()
    if args.text is not None and args.text.exists():
        text = np.load(args.text)
    else:
        text = write_text(stream, args.continuations, args.threads)
        if args.text is not None:
            np.save(args.text, text)
    print(f"{text.size} tokens of continuations, {time.monotonic() - began:.0f} s", flush=True)
    counts = np.bincount(text.ravel(), minlength=VOCAB_SIZE)

    model = LlamaForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16).eval()
    target = TargetFeatures(model, AUX_LAYER_IDS)
    if args.continue_from is None:
        ids = np.sort(np.argsort(-counts, kind="stable")[: args.draft_vocabulary])
        config = head_config(model, args.intermediate_size, args.draft_vocabulary)
        head = build_head(config, ids, model)
    else:
        head = load_head(args.continue_from).train()
        ids = head.target_ids().numpy()
    source = batches(text, stream, args.batch_tokens)
    steps, seconds = train(
        head, target, source, args.steps, args.minutes, args.drafts, args.learning_rate
    )
    save_head(head, args.output)
    report = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in head.parameters()),
        "continuations": len(text),
        "continuation_tokens": text.size,
        "draft_vocabulary_coverage": round(counts[ids].sum() / counts.sum(), 4),
        "steps": steps,
        "batch_tokens": args.batch_tokens,
        "drafts": args.drafts,
        "learning_rate": args.learning_rate,
        "threads": args.threads,
        "seconds": round(seconds),
        "acceptance": measure(load_head(args.output), target, ACCEPTANCE_ROWS, args.threads),
    }
    (args.output / "training.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
