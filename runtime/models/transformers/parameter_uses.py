"""Records which torch functions use the parameters of a model while it runs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["LinearUse", "ParameterUses"]

_SELECTIONS = frozenset({"topk", "sort", "argsort", "argmax", "max", "kthvalue"})
"""Functions that select by their input."""


class LinearUse(NamedTuple):
    """A linear layer that is called once, and whose weight nothing else uses."""

    module: str
    """Path of the module."""
    out_features: int
    in_features: int
    bias: bool
    transposed: bool
    """Whether its weight is `[in_features, out_features]`."""
    input: int
    """Layers with the same number have the same input."""


class ParameterUses(TorchFunctionMode):
    """Counts the uses of each parameter, and the products with a weight by their inputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._parameters = {id(p) for p in model.parameters()}
        self._uses: Counter[int] = Counter()
        self._described: set[int] = set()
        """Parameters whose properties are read."""
        self._products: dict[int, int] = {}
        """Number of the input of the product with a weight, by id of the weight."""
        self._inputs: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._serial = itertools.count()
        self._rows: Counter[int] = Counter()
        self._scores: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Ids of the weights whose product a tensor is, or an elementwise function of it."""
        self._selecting: set[int] = set()
        """Ids of weights whose products select: routers."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        values = [*args, *keywords.values()]
        used = [id(v) for v in values if isinstance(v, Tensor) and id(v) in self._parameters]
        if getattr(func, "__name__", "") == "__get__":  # of a property such as dtype
            self._described.update(used)
        else:
            self._uses.update(used)
        if func is F.linear:
            weight = keywords.get("weight", args[1] if len(args) > 1 else None)
            self._products[id(weight)] = self._number(keywords.get("input", args[0]))
        elif func is torch.addmm and len(args) == 3:  # Conv1D
            self._products[id(args[2])] = self._number(args[1])
        elif func is F.embedding:
            self._rows[id(keywords.get("weight", args[1] if len(args) > 1 else None))] += 1
        result = func(*args, **keywords)
        self._follow_scores(func, args, keywords, result)
        return result

    def _follow_scores(self, func: Any, args: Any, keywords: dict[str, Any], result: Any) -> None:
        if func is F.linear and isinstance(result, Tensor):
            weight = keywords.get("weight", args[1] if len(args) > 1 else None)
            self._scores[result] = frozenset({id(weight)})
            return
        for value in (*args, *keywords.values()):
            found = self._scores.get(value) if isinstance(value, Tensor) else None
            if not found:
                continue
            if getattr(func, "__name__", "") in _SELECTIONS:
                self._selecting |= found
            elif isinstance(result, Tensor) and result.numel() == value.numel():
                self._scores[result] = found | self._scores.get(result, frozenset())

    def _number(self, x: Tensor) -> int:
        """Return a number of a tensor's contents, the same for a flattened view of it."""
        base = x._base
        if base is not None and x.numel() == base.numel() and x.is_contiguous():
            x = base
        version, number = self._inputs.get(x, (None, 0))
        if version != x._version:
            number = next(self._serial)
            self._inputs[x] = x._version, number
        return int(number)

    def module_path(self, module: nn.Module) -> str:
        """Return the path of a module in the model."""
        path: str = self._paths[id(module)]
        return path

    def looks_up_rows(self, module: nn.Module) -> bool:
        """Whether an embedding reads rows of its weight, which only it and products use.

        It may do something with the rows, such as to scale them.
        """
        if not isinstance(module, nn.Embedding) or module.max_norm is not None:
            return False
        key = id(module.weight)
        return self._rows[key] == 1 and self._uses[key] == 1 + (key in self._products)

    def linears(self) -> Iterator[LinearUse]:
        """Yield the linear layers that may be replaced, in the order of their calls.

        These are called once each. Their weight is not read by anything else but the input
        embeddings. Routers are left out: a rounded score sends a token to another expert.
        """
        from transformers.pytorch_utils import Conv1D

        owners: dict[int, list[tuple[str, nn.Module]]] = {}
        for path, module in self._model.named_modules(remove_duplicate=False):
            if type(module) in (nn.Linear, Conv1D):
                owners.setdefault(id(module.weight), []).append((path, module))
        for key, number in self._products.items():
            if len(owners.get(key, ())) != 1 or self._uses[key] != 1 + self._rows[key]:
                continue
            if key in self._selecting:
                continue
            if key in self._described and not self._rows[key]:
                continue  # its module needs a weight, where an embedding keeps its own
            ((path, module),) = owners[key]
            transposed = type(module) is Conv1D
            weight: Any = module.weight
            first, second = weight.shape
            yield LinearUse(
                module=path,
                out_features=second if transposed else first,
                in_features=first if transposed else second,
                bias=module.bias is not None,
                transposed=transposed,
                input=number,
            )
