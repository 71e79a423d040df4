"""A fake engine whose answers are given texts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from stepgraph.runtime import Engine
from stepgraph.runtime.loading.chat_template import ChatTemplates
from stepgraph.runtime.loading.tokenizer import TextTokenizer
from tokenizers import Tokenizer, decoders, models

from .fake_engine import fake_engine, runner_of

PROMPT_TOKENS = 9
"""Of every prompt; two blocks of them are cached."""


def scripted_engine(answers: Mapping[str, str], template: str, seen: list[str]) -> Engine:
    """Return an engine that answers a prompt with the answer of the first key in its text.

    An answer has up to 7 characters a token. `seen` gets the texts of the prompts.
    """
    scripts = [re.findall(r"(?s).{1,7}", answer) for answer in answers.values()]
    known = {"<end>": 0} | {f"<prompt {n}>": n + 1 for n in range(len(scripts))}
    for piece in (piece for script in scripts for piece in script):
        known.setdefault(piece, len(known))
    tokenizer = Tokenizer(models.WordLevel(known, "<end>"))
    tokenizer.decoder = decoders.Fuse()
    text = TextTokenizer(tokenizer, templates=ChatTemplates({"default": template}, {}))
    engine = fake_engine(tokenizer=text, max_model_len=96)
    runner = runner_of(engine)
    read = runner.read

    def encode(prompt: str, *, special: bool = True) -> list[int]:
        seen.append(prompt)
        number = next(n for n, key in enumerate(answers) if key in prompt)
        return [1 + number] * PROMPT_TOKENS

    def scripted(launch: Any) -> Any:
        return [(r, r and next_token(r), scores) for r, _, scores in read(launch)]

    def next_token(request: Any) -> int:
        script = scripts[request.prompt_ids[0] - 1]
        place = request.num_output
        return known[script[place]] if place < len(script) else 0

    runner.read, text.encode = scripted, encode  # type: ignore[method-assign]
    return engine
