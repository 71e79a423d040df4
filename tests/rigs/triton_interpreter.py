"""Makes Triton's interpreter round and multiply as a GPU does, and takes less time over types.

Triton 3.6 keeps bfloat16 as its bits in uint16. There its interpreter multiplies matrices of the
bits instead of the numbers, and rounds to bfloat16 and float8 wrongly; and loops to a bound that is
an argument need an older numpy. Each interpreted operation describes its types anew, which takes
longer than the operation; here descriptions are kept. Each function below takes the place of the
one that it names.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_original_convert = interpreter._convert_float
_FLOAT8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


def convert_float(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    """`_convert_float`: the bits of numbers of one type as the bits of another, in nearest-even."""
    if source == tl.float32 and target == tl.bfloat16:
        numbers = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
        return numbers.bfloat16().view(torch.uint16).numpy()
    if target in _FLOAT8 and source in (tl.float32, tl.bfloat16):
        return _torch(data, source).to(_FLOAT8[target]).view(torch.uint8).numpy()
    if source in _FLOAT8 and target in (tl.float32, tl.bfloat16):
        wide = torch.from_numpy(np.ascontiguousarray(data)).view(_FLOAT8[source]).float()
        return (
            convert_float(wide.numpy(), tl.float32, target, None)
            if target == tl.bfloat16
            else (wide.numpy().view(np.uint32))
        )
    return _original_convert(data, source, target, rounding_mode)


def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
    """`InterpreterBuilder.create_dot`: a float32 (or int32) product of any two types.

    Summed in float64, since libraries sum float32 in an order that depends on the place of a row.
    """
    if d.data.dtype == np.int32:
        product = np.matmul(a.data.astype(np.int32), b.data.astype(np.int32))
    else:
        wide = [_torch(x.data, x.dtype.scalar).double().numpy() for x in (a, b)]
        product = np.matmul(*wide)
    return interpreter.TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)


def _torch(data: Any, dtype: Any) -> torch.Tensor:
    """The numbers of an interpreted tensor in float32."""
    whole = torch.from_numpy(np.ascontiguousarray(data))
    if dtype == tl.bfloat16:
        return whole.view(torch.bfloat16).float()
    if dtype in _FLOAT8:
        return whole.view(torch.uint8).view(_FLOAT8[dtype]).float()
    return whole.float()


_original_patch = interpreter._patch_lang_tensor


def patch_lang_tensor(tensor: Any, scope: Any) -> None:
    """`_patch_lang_tensor`: scalars are arrays of one element, which numpy 2.4 calls no index."""
    _original_patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


_original_patch_all = interpreter._patch_lang
_patched: set[frozenset[int]] = set()


class _Scope(interpreter._LangPatchScope):  # type: ignore[misc]
    """The changes of a kernel's launch, which those of the functions that it calls end with."""

    def restore(self) -> None:
        super().restore()
        _patched.clear()


@functools.cache
def _language_modules(function: Any) -> frozenset[int]:
    """The modules of the language that a function has as globals, by id."""
    used = function.__globals__.values()
    return frozenset(id(value) for value in used if value is tl or value is tl.core)


def patch_lang(function: Any) -> Any:
    """`_patch_lang`, once a launch: each call of a function (`tl.sum` is one) does it anew."""
    key = _language_modules(function)
    scope = _Scope()
    if key not in _patched:
        scope._changes = _original_patch_all(function)._changes
        _patched.add(key)
    return scope


_original_np_dtype = interpreter._get_np_dtype
_np_dtypes: dict[str, np.dtype[Any]] = {}


def get_np_dtype(dtype: Any) -> np.dtype[Any]:
    """`_get_np_dtype`, once for each type."""
    found = _np_dtypes.get(dtype.name)
    if found is None:
        found = _np_dtypes[dtype.name] = _original_np_dtype(dtype)
    return found


_original_block_type = tl.block_type.__init__
_block_types: dict[tuple[Any, ...], dict[str, Any]] = {}


def init_block_type(self: Any, element: Any, shape: Any) -> None:
    """`block_type.__init__`, which checks a shape and names its type once."""
    sizes = tuple([s.value if isinstance(s, tl.constexpr) else s for s in shape])
    key = (id(element), sizes)
    if key not in _block_types:
        _original_block_type(self, element, list(sizes))
        self.sizes = sizes
        _block_types[key] = vars(self).copy()  # with the element type, so that its id stays its own
    else:
        vars(self).update(_block_types[key])


@functools.cache
def _shape(sizes: tuple[int, ...]) -> tuple[tl.constexpr, tl.tuple]:
    return tl.constexpr(math.prod(sizes)), tl.tuple([tl.constexpr(size) for size in sizes])


def init_tensor(self: Any, handle: Any, type: Any) -> None:
    """`tensor.__init__`, which describes a shape once."""
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    self.numel, self.shape = _shape(type.sizes if type.is_block() else ())


def install() -> None:
    """Put the functions in their places."""
    interpreter._patch_lang = patch_lang
    interpreter._convert_float = convert_float
    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter._patch_lang_tensor = patch_lang_tensor
    interpreter._get_np_dtype = get_np_dtype
    tl.block_type.__init__ = init_block_type
    tl.tensor.__init__ = init_tensor
