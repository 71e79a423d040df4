"""Train the demo checkpoint on the Python sources of this machine's standard library.

Run with `python -m stepgraph.runtime.demo.train --output DIR` (needs the `test` extra, for
`transformers`). A file belongs to the held-out set by the hash of its relative path, so the split
does not depend on the order in which a file system lists its files. Reported perplexity is per
token over the held-out files, cut into windows of the training length.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from .repeated_text import IGNORED, RepeatedText, Window

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 4096
MAX_POSITIONS = 2048
HELD_OUT_SHARE = 40
"""One file in so many is kept for evaluation."""
EXCLUDED = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
WORDS = r"\n *|\w+ ?|[^\w\s]+ ?|\s"
"""What the tokenizer never merges across. A space belongs to the word before it, so that a prompt
that ends in one (`def `, `import `) ends in a token that was seen in training."""


def source_files(root: Path) -> tuple[list[Path], list[Path]]:
    """Return the (training, held-out) Python files below `root`.

    Left out are installed packages, the test suite (more than half of all text, and much of it
    tables of test data) and generated tables.
    """
    train: list[Path] = []
    held_out: list[Path] = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if EXCLUDED & set(relative.parts):
            continue
        (held_out if in_sample(relative) else train).append(path)
    return train, held_out


def in_sample(relative: Path) -> bool:
    """Return whether a file is one of the `HELD_OUT_SHARE`th that the hash of its path picks."""
    digest = hashlib.sha256(relative.as_posix().encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_SHARE == 0


def read_sources(paths: list[Path]) -> list[str]:
    """Return the text of the files that are valid UTF-8 (a few test files are not, on purpose)."""
    texts = []
    for path in paths:
        try:
            texts.append(path.read_bytes().decode("utf-8"))
        except UnicodeDecodeError:
            continue
    return [text for text in texts if text.strip()]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Return a byte-level BPE tokenizer of `VOCAB_SIZE` tokens; id 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 0)]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Return all texts as one stream of token ids, each begun by the end-of-text token."""
    stream: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        stream.extend(encoding.ids)
    return np.asarray(stream, dtype=np.int64)


def windows(stream: np.ndarray, length: int, rng: np.random.Generator) -> Iterator[Window]:
    """Yield windows of `length` tokens in random order, epoch after epoch, for ever.

    Every epoch cuts the stream at another offset.
    """
    while True:
        offset = int(rng.integers(length))
        starts = np.arange(offset, len(stream) - length - 1, length)
        rng.shuffle(starts)
        for start in starts:
            text = stream[start : start + length + 1]
            yield Window(text[:-1], text[1:])


def mixed(
    plain: Iterator[Window], repeated: Iterator[Window], share: float, rng: np.random.Generator
) -> Iterator[Window]:
    """Yield windows of either for ever, that share of them from `repeated`."""
    while True:
        yield next(repeated if rng.random() < share else plain)


@torch.no_grad()
def perplexity(model: Any, stream: np.ndarray, length: int) -> float:
    """Return exp(mean negative log-likelihood) over the stream, windows of `length` tokens."""
    total, count = 0.0, 0
    for start in range(0, len(stream) - 1, length):
        window = torch.from_numpy(stream[start : start + length + 1])
        if len(window) < 2:
            continue
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(window[None, :-1]).logits[0]
        loss = torch.nn.functional.cross_entropy(logits.float(), window[1:], reduction="sum")
        total, count = total + float(loss), count + len(window) - 1
    return math.exp(total / count)


def build_model() -> Any:
    """Return the untrained decoder: Llama with 8 query heads over 2 key/value heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def load_model(directory: Path) -> Any:
    """Return the checkpoint in float32, to be trained further."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)


def next_token_loss(model: Any, token_ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of `targets` [windows, length] under bf16 autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(token_ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits.float().view(-1, VOCAB_SIZE), targets.view(-1), ignore_index=IGNORED
    )


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Warm up linearly over 2 % of the steps, then follow a cosine down to 1 % of the peak."""
    warmup = max(1, steps // 50)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(
    model: Any,
    source: Callable[[int], Iterator[Window]],
    steps: int,
    batch_tokens: int,
    peak: float,
    long_every: int | None = None,
) -> float:
    """Train in place on windows of `source(length)`, and return the seconds it took.

    The last sixth of the steps runs on windows of `MAX_POSITIONS` tokens, the others on a
    quarter of that: attention is cheaper on short windows, and the long ones come late enough
    to teach every position that the checkpoint claims. With `long_every`, one step in so many
    runs on long windows instead, for a model that knows these positions and is to keep them.
    """
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=peak,
        betas=(0.9, 0.95),
        fused=True,
    )
    compiled_loss = torch.compile(next_token_loss, dynamic=False)
    short, long = source(MAX_POSITIONS // 4), source(MAX_POSITIONS)
    model.train()
    began = time.monotonic()
    smoothed = float("nan")
    for step in range(steps):
        is_long = step % long_every == 0 if long_every else step >= steps * 5 // 6
        drawn, length = (long, MAX_POSITIONS) if is_long else (short, MAX_POSITIONS // 4)
        rows = [next(drawn) for _ in range(batch_tokens // length)]
        token_ids = torch.from_numpy(np.stack([row.token_ids for row in rows]))
        targets = torch.from_numpy(np.stack([row.targets for row in rows]))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak)
        loss = compiled_loss(model, token_ids, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        value = loss.item()
        smoothed = value if math.isnan(smoothed) else 0.95 * smoothed + 0.05 * value
        if step % 20 == 0 or step == steps - 1:
            seconds = time.monotonic() - began
            rate = (step + 1) * batch_tokens / seconds
            print(
                f"step {step:5d}/{steps}  loss {smoothed:.3f}  {rate:.0f} tok/s  {seconds:.0f} s",
                flush=True,
            )
    return time.monotonic() - began


def save(model: Any, tokenizer: Tokenizer, output: Path) -> None:
    """Write the checkpoint (bf16) and its tokenizer in the Hugging Face layout."""
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    output.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    model.save_pretrained(output)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(output)
    # The name that every version of transformers knows.
    path = output / "tokenizer_config.json"
    tokenizer_config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(tokenizer_config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="directory to write to")
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument(
        "--continue-from", type=Path, metavar="DIR", help="train this checkpoint further"
    )
    parser.add_argument(
        "--repeated",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of windows in which an excerpt is repeated",
    )
    parser.add_argument(
        "--long-every",
        type=int,
        metavar="N",
        help="run one step in N on long windows, instead of the last sixth",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order of windows")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    train_paths, held_out_paths = source_files(Path(sysconfig.get_paths()["stdlib"]))
    train_texts, held_out_texts = read_sources(train_paths), read_sources(held_out_paths)
    if args.continue_from is None:
        tokenizer = train_tokenizer(train_texts)
    else:
        tokenizer = Tokenizer.from_file(str(args.continue_from / "tokenizer.json"))
    stream, held_out = encode(tokenizer, train_texts), encode(tokenizer, held_out_texts)
    print(f"{len(train_texts)} files, {len(stream)} tokens; held out {len(held_out)} tokens")
    model = build_model() if args.continue_from is None else load_model(args.continue_from)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters} parameters")
    pieces = [tokenizer.decode([token]) for token in range(VOCAB_SIZE)]
    repeated = RepeatedText(stream, pieces, args.seed)
    rng = np.random.default_rng(args.seed)

    def source(length: int) -> Iterator[Window]:
        plain = windows(stream, length, rng)
        return mixed(plain, repeated.windows(length), args.repeated, rng)

    seconds = train(
        model, source, args.steps, args.batch_tokens, args.learning_rate, args.long_every
    )
    save(model, tokenizer, args.output)
    model.eval()
    report = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "parameters": parameters,
        "train_files": len(train_texts),
        "train_bytes": sum(len(t.encode()) for t in train_texts),
        "train_tokens": len(stream),
        "held_out_files": len(held_out_texts),
        "held_out_bytes": sum(len(t.encode()) for t in held_out_texts),
        "held_out_tokens": len(held_out),
        "steps": args.steps,
        "batch_tokens": args.batch_tokens,
        "learning_rate": args.learning_rate,
        "repeated": args.repeated,
        "long_every": args.long_every,
        "seconds": round(seconds),
        "held_out_perplexity_512": perplexity(model, held_out, 512),
        "held_out_perplexity_2048": perplexity(model, held_out, 2048),
    }
    (args.output / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
