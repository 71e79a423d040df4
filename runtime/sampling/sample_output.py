"""What a step draws: tokens and log-probabilities, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["SampleOutput"]


@dataclass(frozen=True)
class SampleOutput:
    """What a step drew, on the device. B rows of a step, V tokens of the vocabulary.

    Log-probabilities are of the model's own distribution, the log-softmax of its logits in
    float32. Those of a row whose token is `NON_FINITE` are undefined.
    """

    tokens: torch.Tensor
    """int64 `[B]`: ids of the vocabulary, or `NON_FINITE`."""
    logprob: torch.Tensor
    """float32 `[B]`: log-probability of `tokens`."""
    top_logprobs: torch.Tensor
    """float32 `[B, min(20, V)]`: the highest log-probabilities, highest first."""
    top_ids: torch.Tensor
    """int64 `[B, min(20, V)]`: their tokens."""
    packed: torch.Tensor | None = None
    """uint8 `[packed_bytes]`: the buffer that the four are views of; None: separate tensors."""

    @staticmethod
    def packed_bytes(rows: int, tops: int) -> int:
        """Return the bytes of the four tensors, with `tops` top log-probabilities a row."""
        return -(-rows * (1 + tops) * 12 // 8) * 8

    @classmethod
    def unpack(cls, packed: torch.Tensor, rows: int, tops: int) -> SampleOutput:
        """Return the four as views of uint8 `[packed_bytes]`, or `[1 + k, packed_bytes]`."""
        views, at = [], 0
        for width, dtype in (
            (1, torch.int64),
            (tops, torch.int64),
            (1, torch.float32),
            (tops, torch.float32),
        ):
            end = at + rows * width * dtype.itemsize
            views.append(packed[..., at:end].view(dtype).unflatten(-1, (rows, width)))
            at = end
        tokens, top_ids, logprob, top_logprobs = views
        return cls(tokens.squeeze(-1), logprob.squeeze(-1), top_logprobs, top_ids, packed)

    def pack(self) -> SampleOutput:
        """Return itself if it is `packed`, else a packed copy."""
        if self.packed is not None:
            return self
        rows, tops = self.top_ids.shape[-2:]
        parts = (self.tokens, self.top_ids.flatten(-2), self.logprob, self.top_logprobs.flatten(-2))
        as_bytes = [part.contiguous().view(torch.uint8) for part in parts]
        missing = self.packed_bytes(rows, tops) - sum(part.shape[-1] for part in as_bytes)
        packed = torch.cat((*as_bytes, as_bytes[0][..., :missing]), dim=-1)
        return SampleOutput.unpack(packed, rows, tops)

    def by_position(self, rows: int, tokens_per_row: int) -> SampleOutput:
        """Return the output of `rows` times `tokens_per_row` tokens by position, then by row."""
        columns = (t.unflatten(0, (rows, tokens_per_row)).transpose(0, 1) for t in self._four())
        return SampleOutput(*(column.contiguous() for column in columns))

    def at(self, lanes: torch.Tensor) -> SampleOutput:
        """Return the output of some lanes, in the shape of `lanes`, int64."""
        return SampleOutput(*(tensor[lanes] for tensor in self._four()))

    def copy_(self, source: SampleOutput) -> None:
        """Copy asynchronously: the packed buffer, or the four tensors if either has none."""
        if self.packed is not None and source.packed is not None:
            self.packed.copy_(source.packed, non_blocking=True)
            return
        for own, other in zip(self._four(), source._four(), strict=True):
            own.copy_(other, non_blocking=True)

    def unbind(self) -> list[SampleOutput]:
        """Return the output of each position of a verify step, as views."""
        columns = zip(*(tensor.unbind() for tensor in self._four()), strict=True)
        return [SampleOutput(*column) for column in columns]

    def _four(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.tokens, self.logprob, self.top_logprobs, self.top_ids
