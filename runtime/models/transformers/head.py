"""The part of a causal language model after its final hidden states.

Models may scale or cap their logits in `forward`. So logits are computed by the model's own
`forward`, in a shallow copy of the model whose base returns given hidden states.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

__all__ = ["head_of", "run_head"]


class _GivenStates(nn.Module):
    """Stands for the base of a model: returns its input as the final hidden states."""

    def __init__(self, output: type[Any]) -> None:
        super().__init__()
        self._output = output

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **unused: object,
    ) -> Any:
        return self._output(last_hidden_state=inputs_embeds)


def head_of(model: nn.Module, base: str, output: type[Any]) -> nn.Module:
    """Return a copy that shares all modules of a model except `base`.

    Args:
        model: the model.
        base: path of the module that returns the final hidden states.
        output: class of the base's result.
    """
    return _with(model, base, _GivenStates(output))


def _with(module: nn.Module, path: str, replacement: nn.Module) -> nn.Module:
    first, _, rest = path.partition(".")
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    inner = module.get_submodule(first)
    copied._modules[first] = _with(inner, rest, replacement) if rest else replacement
    return copied


def run_head(head: nn.Module, hidden_1TD: Tensor) -> Tensor:
    """Return logits `[1, T, vocab_size]` of final hidden states."""
    logits: Tensor = head(inputs_embeds=hidden_1TD, use_cache=False).logits
    return logits
