"""Check of a measured case: its tokens against the plain PyTorch reference, teacher-forced.

The reference is a decoder of the same weights on the same device in plain PyTorch. It reads a
prompt and the tokens that the engine sampled for it as one sequence. A token that was sampled
greedily is right if its reference logit is the largest one, or so close below it that rounding can
have swapped the two; rounding is relative to the spread of the logits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from ...cache.arena import Arena
from ...cache.spec import group_layers
from ..engine.engine import Engine
from ..kernels import RaggedBatch, select_kernels
from ..loading.loader import open_source, resolve_source
from ..models.config import ModelConfig
from ..models.decoder import Decoder, rope_lengths
from ..models.plan import plan_of
from ..models.transformers.config import TransformersConfig
from ..models.transformers.decoder import DecoderModel
from ..models.transformers.loading import load_decoder
from ..rope_lengths import RopeLengths

MOST_ROWS = 4
"""Rows of a batch that are scored, spread evenly from the first to the last."""

TOLERANCE = {torch.bfloat16: 0.15, torch.float16: 0.03, torch.float32: 1e-3}
"""How far below the largest reference logit a sampled token's may lie, in standard deviations of
the logits of its position."""

_CHUNK = 512
"""Tokens that the reference computes at a time: bounds the memory of its masks and logits."""


class TokenCheck:
    """The reference of one model, for all cases of the engines that serve it."""

    def __init__(self, engine: Engine, source: str) -> None:
        """Build the reference: it shares the weights of `engine` where they are not packed.

        Args:
            engine: one that is open and stays so while this is used.
            source: its model, read again where the engine's weights are packed.
        """
        config = engine.config
        self._block_size = config.user.block_size
        self._groups = group_layers(plan_of(engine.model_config).states)
        served = engine.decoder
        kernels = select_kernels(config.device, "eager", config.dtype, config.weights, "torch")
        sizes = kernels, config.dtype, config.device, self._groups, config.storage
        self._model: DecoderModel
        if isinstance(engine.model_config, ModelConfig):
            self._model = reference = Decoder(engine.model_config, *sizes)
            if isinstance(served, Decoder) and served.kernels.pack_parts is None:
                _share_weights(served, reference)
            else:
                with ExitStack() as open_files:  # read again, or drawn again as the engine did
                    opened = open_source(resolve_source(source), open_files)
                    weights = opened.weights(
                        config.dtype, seed=config.user.seed, device=config.device
                    )
                    reference.store(weights)
        else:
            model = engine.model_config
            assert isinstance(model, TransformersConfig)
            with ExitStack() as open_files:
                found = resolve_source(source, model_impl="transformers")
                stored = open_source(found, open_files).for_transformers(config.dtype)
                self._model = load_decoder(stored, model, *sizes)

    def check(
        self, prompts: Sequence[Sequence[int]], outputs: Sequence[Collection[tuple[int, ...]]]
    ) -> dict[str, Any]:
        """Return the `check` of a case of the benchmark's JSON.

        Args:
            prompts: of each row of the batch.
            outputs: of each row the distinct outputs of the repetitions, sampled greedily.

        Returns:
            Numbers of scored `rows` and `tokens`, and of tokens that `equal` the reference's
            choice; the `worst_gap` to its largest logit (null if not finite) and the `tolerance`
            in standard deviations of the logits; `repetitions_equal`, `passed`, and the `error`
            that kept the reference from running, or null.
        """
        last = len(prompts) - 1
        count = min(MOST_ROWS, len(prompts))
        rows = sorted({round(i * last / max(1, count - 1)) for i in range(count)})
        tolerance = TOLERANCE[self._model.dtype]
        gaps: list[torch.Tensor] = []
        error = None
        try:
            for row in rows:
                gaps += [self._gaps(prompts[row], output) for output in outputs[row]]
        except torch.OutOfMemoryError as found:
            error = f"the reference ran out of memory: {str(found).splitlines()[0]}"
        gap_N = torch.cat(gaps) if gaps else torch.empty(0)
        worst = float(gap_N.max()) if len(gap_N) and gap_N.isfinite().all() else None
        return {
            "rows": len(rows),
            "tokens": len(gap_N),
            "equal": int((gap_N == 0).sum()),
            "worst_gap": worst,
            "tolerance": tolerance,
            "repetitions_equal": all(len(distinct) == 1 for distinct in outputs),
            "passed": error is None and worst is not None and worst <= tolerance,
            "error": error,
        }

    def _gaps(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        """Return how far each token of `output` lies below the largest logit, float32 `[N]`."""
        sampled_N = torch.tensor(output, device=self._model.device)
        found: list[torch.Tensor] = []
        start = 0
        for logits_CV in self._logits([*prompt, *output[:-1]], len(prompt) - 1):
            logits_CV = logits_CV.float()
            token_C = sampled_N[start : start + len(logits_CV), None]
            below_C = logits_CV.amax(1) - logits_CV.gather(1, token_C)[:, 0]
            found.append(below_C / logits_CV.std(1))
            start += len(logits_CV)
        return torch.cat(found).cpu()

    @torch.no_grad()
    def _logits(self, token_ids: Sequence[int], first: int) -> Iterator[torch.Tensor]:
        """Yield the reference's logits from position `first` on, `[C, vocab_size]` at a time.

        `first` is the last position of the prompt. Sequences that outgrow their rotary parameters
        are computed again.
        """
        ropes = rope_lengths(self._model.config) or RopeLengths()
        limit = ropes.outgrown_at(first + 1)
        yield from self._prefilled(token_ids[:limit], first, first + 1)
        if len(token_ids) > limit:
            yield from self._prefilled(token_ids, limit, limit + 1)

    def _prefilled(
        self, token_ids: Sequence[int], first: int, rope_length: int
    ) -> Iterator[torch.Tensor]:
        """Prefill row 0 of a cache of its own in chunks; row 1 of the block tables is null."""
        model, size = self._model, self._block_size
        blocks, groups = -(-len(token_ids) // size), len(self._groups)
        arena = Arena(
            self._groups, groups * blocks + 1, size, model.dtype, model.device, model.storage
        )
        tables = torch.zeros(groups, 2, blocks, dtype=torch.int32)
        tables[:, 0] = 1 + torch.arange(groups * blocks).view(groups, blocks)
        tables = tables.to(model.device)
        ids_T = torch.tensor(token_ids, device=model.device)
        for start in range(0, len(ids_T), _CHUNK):
            end = min(start + _CHUNK, len(ids_T))
            positions_C = torch.arange(start, end, device=model.device)
            slots_GC = tables[:, 0, positions_C // size].long() * size + positions_C % size
            batch = RaggedBatch(
                positions=positions_C,
                slots=slots_GC,
                token_rows=torch.zeros_like(positions_C),
                rows=torch.zeros_like(positions_C[:1]),
                block_tables=tables,
                read_blocks=-(-end // size),
                block_size=size,
                tokens_per_row=end - start,
                rope_lengths=(positions_C + 1).clamp(min=rope_length),
                token_ids=ids_T[start:end],
            )
            hidden_CD = model.decode(model.embed(ids_T[start:end]), arena.tensor, batch)
            if end > first:
                yield model.logits(hidden_CD[max(0, first - start) :])


def _share_weights(served: Decoder, reference: Decoder) -> None:
    """Make a decoder use the weight tensors of another one, which must not be packed."""
    for name, module in reference.named_modules():
        other = served.get_submodule(name)
        for leaf in ("weight", "scales", "bias", "dtype"):
            if hasattr(module, leaf) and module is not reference:
                setattr(module, leaf, getattr(other, leaf))
