"""Drives a drafter as the steps of an engine do, beside a reference without cache.

Rows decode what the rig decides: of a row's drafts the first few are accepted, then follows another
token. Features of the target are random, those of rejected positions too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from stepgraph.cache.arena import Arena, Storage
from stepgraph.cache.spec import group_layers
from stepgraph.runtime.kernels import Kernels, RaggedBatch, select_kernels
from stepgraph.runtime.kernels.weights import MODEL, WeightStorage
from stepgraph.runtime.loading.checkpoint import read_config
from stepgraph.runtime.loading.drafter_loading import load_drafter
from stepgraph.runtime.models.decoder import Decoder
from stepgraph.runtime.models.drafters.drafter import (
    Drafter,
    DrafterConfig,
    Drafts,
    FollowedTokens,
    NewestTokens,
)
from stepgraph.runtime.models.plan import plan_of

from .stack_rig import BLOCK_SIZE, CPU, ragged_batch
from .tiny_models import load_weights

LENGTH = 96
GROUPS, GROUP = 2, 1
"""Layer groups of the target, and the one whose block table the drafter uses."""

Reference = Callable[[list[int], torch.Tensor, int], list[tuple[int, float, float]]]
"""Tokens of a row, features `[tokens, F]` of all but the newest and a number of drafts, to drafts:
the token, its probability, and how much less likely the second best token is (its logit)."""


def load_target(
    directory: Path, dtype: torch.dtype, mode: str = "compile", weights: WeightStorage = MODEL
) -> tuple[Decoder, Kernels]:
    """A target with the weights of a checkpoint, and its kernels."""
    config = read_config(directory)
    kernels = select_kernels(CPU, mode, dtype, weights)  # type: ignore[arg-type]
    groups = group_layers(plan_of(config).states)
    target = Decoder(config, kernels, dtype, CPU, groups)
    load_weights(target, directory)
    return target.eval(), kernels


class DrafterRig:
    """A drafter with an arena of its own, and rows of tokens."""

    def __init__(
        self,
        config: DrafterConfig,
        target: Decoder,
        kernels: Kernels,
        rows: int = 4,
        *,
        storage: Storage = "model",
        window: int | None = None,
    ) -> None:
        dtype = target.dtype
        group = config.layer_group(GROUP, window)
        target.storage = storage
        self.drafter: Drafter = load_drafter(config, target, kernels, group)
        assert self.drafter.weight_bytes == config.weight_bytes(kernels, dtype)
        self.config, self.dtype, self.rows = config, dtype, rows
        self.features = len(config.aux_layers) * target.config.hidden_size
        self.vocab = target.config.vocab_size
        self.random = random.Random(0)
        generator = torch.Generator().manual_seed(0)
        columns = LENGTH // BLOCK_SIZE
        blocks = 1 + rows * columns
        self.arena = Arena([group], blocks, BLOCK_SIZE, dtype, CPU, storage).tensor
        if storage == "model":
            self.arena[:, :, 1:] = torch.nan
        order = 1 + torch.randperm(blocks - 1, generator=generator, dtype=torch.int32)
        self.tables = torch.zeros(GROUPS, rows + 1, columns, dtype=torch.int32)
        self.tables[GROUP, :rows] = order.view(rows, columns)
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        """Known tokens of each row, the newest included."""
        self.known = [torch.randn(LENGTH, self.features, generator=generator) for _ in range(rows)]
        """Features of the positions of each row."""
        self.drafts: list[list[int]] = [[] for _ in range(rows)]

    def token(self) -> int:
        return self.random.randrange(self.vocab)

    def followed(
        self,
        rows: Sequence[int],
        positions: Sequence[int],
        token_ids: Sequence[int],
        next_ids: Sequence[int],
        right: Sequence[bool],
        live: Sequence[bool],
        per_row: int | None,
    ) -> FollowedTokens:
        """Tokens of a step; features of those that are not `right` are noise."""
        features = None
        if self.features:
            known = [self.known[r][p] for r, p in zip(rows, positions, strict=True)]
            noise = [torch.full((self.features,), 3.0) * self.random.gauss(0, 1) for _ in rows]
            chosen = [k if ok else n for k, n, ok in zip(known, noise, right, strict=True)]
            features = torch.stack(chosen).to(self.dtype)
        return FollowedTokens(
            torch.tensor(token_ids),
            torch.tensor(next_ids),
            features,
            ragged_batch(self.tables, rows, positions, live, per_row),
        )

    def prefill(self, prompts: Sequence[Sequence[int]], most: int = 1000) -> None:
        """Compute prompts in ragged steps of at most `most` tokens of a row."""
        done = [0] * self.rows
        while any(done[row] < len(prompt) for row, prompt in enumerate(prompts)):
            chunks = [
                (row, at)
                for row, prompt in enumerate(prompts)
                for at in range(done[row], min(len(prompt), done[row] + most))
            ]
            after = [[*prompt, self.token()] for prompt in prompts]
            tokens = self.followed(
                [row for row, _ in chunks],
                [at for _, at in chunks],
                [prompts[row][at] for row, at in chunks],
                [after[row][at + 1] for row, at in chunks],
                *([[True] * len(chunks)] * 2),
                per_row=None,
            )
            with torch.inference_mode():
                self.drafter.follow(tokens, self.arena)
            for row, at in chunks:
                done[row] = at + 1
                if at + 1 == len(prompts[row]):
                    self.tokens[row] = after[row]

    def verify(self, per_row: int, count: int) -> Drafts:
        """A step that verifies the drafts of the step before; then propose `count` drafts.

        Of each row's drafts a random number is accepted.
        """
        rows, positions, token_ids, next_ids, right, live, index = [], [], [], [], [], [], []
        for row in range(self.rows):
            drafts = self.drafts[row][: self.random.randint(0, per_row - 1)]
            accepted = self.random.randint(0, len(drafts))
            newest = len(self.tokens[row]) - 1
            computed = [self.tokens[row][-1], *drafts]
            self.tokens[row] += [*drafts[:accepted], self.token()]
            sampled = self.tokens[row][newest + 1 :]
            index.append(row * per_row + accepted)
            for place in range(per_row):
                is_live = place < len(computed)
                rows.append(row)
                positions.append(newest + place if is_live else newest)
                token_ids.append(computed[place] if is_live else 0)
                next_ids.append(sampled[place] if place < len(sampled) else self.token())
                right.append(place <= accepted)
                live.append(is_live)
        tokens = self.followed(rows, positions, token_ids, next_ids, right, live, per_row)
        newest_at = [len(known) - 1 for known in self.tokens]

        def later(first: int, tokens_each: int) -> RaggedBatch:
            rows = [row for row in range(self.rows) for _ in range(tokens_each)]
            positions = [at + first + i for at in newest_at for i in range(tokens_each)]
            return ragged_batch(self.tables, rows, positions, per_row=tokens_each)

        newest = NewestTokens(
            torch.tensor([known[-1] for known in self.tokens]),
            torch.tensor([known[-2] for known in self.tokens]),
            torch.tensor(index),
            later,
        )
        with torch.inference_mode():
            drafts = self.drafter.propose(tokens, newest, self.arena, count)
        assert drafts.token_ids.shape == drafts.probabilities.shape == (self.rows, count)
        assert drafts.probabilities.dtype == torch.float32
        self.drafts = drafts.token_ids.tolist()
        return drafts

    def check(self, drafts: Drafts, reference: Reference, tolerance: float) -> int:
        """Compare drafts with a reference; return how many of them were compared.

        Those after a token that is nearly as likely as another one are not.
        """
        compared = 0
        for row, known in enumerate(self.tokens):
            count = drafts.token_ids.shape[1]
            features = self.known[row][: len(known) - 1].to(self.dtype)
            expected = reference(known, features, count)
            assert len(expected) == count
            for place, (token, probability, margin) in enumerate(expected):
                if drafts.token_ids[row, place] != token:
                    assert margin < 20 * tolerance, (row, place, margin)
                    break
                error = abs(float(drafts.probabilities[row, place]) - probability)
                assert error < tolerance, (row, place, error)
                compared += 1
        return compared

    def compare(self, prompts: Sequence[Sequence[int]], reference: Reference) -> int:
        """Prefill, and check steps of several shapes; return how many drafts were compared."""
        self.prefill(prompts, most=11)
        shapes = ((1, 3), (4, 4), (5, 1), (2, 5), (5, 4))
        return sum(self.check(self.verify(*shape), reference, 1e-3) for shape in shapes)
