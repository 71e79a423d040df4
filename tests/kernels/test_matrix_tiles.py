"""Products as matrix tiles (AMX), which portable code emulates here with the same bits."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from stepgraph.runtime import kernels
from stepgraph.runtime.kernels.ops.packed_parts import instruction_sets, int8_inputs

from ..rigs.thread_rig import kernel_threads
from . import test_kernels_attention as attention
from . import test_kernels_codes as codes
from .test_kernels_codes import BF16, FLOAT, FORMATS, INT8_INPUTS, SHAPES

torch.library.define("stepgraph::emulate_tiles", "(bool emulated) -> ()")
SOURCES = Path(kernels.__file__).parent / "cpu" / "csrc"
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++20", "-ffp-contract=fast", "-w", f"-I{Path(torch.__file__).parent}/include"]
ENTRY = """
#include "tiles.h"
using namespace stepgraph;
extern "C" void product(const void* x, long x_stride, long rows, const void* w, long words,
                        void* sums, bool more, bool int8) {
  TileState state;
  EmulatedTiles tiles(state);
  const auto run = int8 ? tile_product<EmulatedTiles, true> : tile_product<EmulatedTiles, false>;
  run(tiles, x, x_stride, rows, w, words, nullptr, sums, kStepBytes, more);
}
"""
ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 65, 96, 97)
WORDS = (1, 5, 16, 17, 35)
Words = npt.NDArray[np.uint32]


def emulate(emulated: bool) -> None:
    torch.ops.stepgraph.emulate_tiles.default(emulated)


@pytest.fixture
def emulated(cpu_ops: None) -> Iterator[None]:
    """Products run as matrix tiles."""
    emulate(True)
    yield
    emulate(False)


def compiled(output: Path, *arguments: str) -> str:
    if shutil.which(COMPILER) is None:
        pytest.skip("needs a C++ compiler")
    command = [COMPILER, *FLAGS, f"-I{SOURCES}", *arguments, "-o", str(output)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return str(output)


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """`tile_product` of the emulation: x, w and sums are modified or read in place."""
    folder = tmp_path_factory.mktemp("tiles")
    (folder / "entry.cpp").write_text(ENTRY)
    source = str(folder / "entry.cpp")
    library = compiled(folder / "entry.so", "-O2", "-march=native", "-shared", "-fPIC", source)
    entry = ctypes.CDLL(library).product

    def run(x: Words, w: Words, sums: Words, *, more: bool, int8: bool) -> None:
        x_place, w_place, place = (ctypes.c_void_p(array.ctypes.data) for array in (x, w, sums))
        stride, rows, words = map(ctypes.c_long, (x.strides[0], len(sums), len(w)))
        entry(x_place, stride, rows, w_place, words, place, more, int8)

    return run


def flushed(value: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.where(np.abs(value) < 2.0**-126, np.copysign(np.float32(0), value), value)


def multiply_add(
    sums: npt.NDArray[np.float32], a: npt.NDArray[np.uint32], b: npt.NDArray[np.uint32]
) -> npt.NDArray[np.float32]:
    """A fused multiply-add in float32 with exponents of any size, whose small results are zero."""
    a_exact, b_exact = (flushed(n.view(np.float32)).astype(np.longdouble) for n in (a, b))
    exact = a_exact * b_exact + sums
    is_small = np.abs((exact * 2.0**64).astype(np.float32)) < 2.0 ** (64 - 126)
    result = exact.astype(np.float32)
    return np.where(is_small, np.copysign(np.float32(0), result), result)


def bf16_sums(x: Words, w: Words, sums: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """TDPBF16PS of Intel's manual over 16 words at a time."""
    for first in range(0, len(w), 16):
        halves = [np.zeros_like(sums) for _ in range(2)]
        for k in range(first, min(first + 16, len(w))):
            for half, shift in enumerate((16, 0)):
                a, b = x[:, k, None] << shift & 0xFFFF0000, w[k] << shift & 0xFFFF0000
                halves[half] = multiply_add(halves[half], a, b)
        sums = flushed(flushed(sums) + flushed(halves[0] + halves[1]))
    return sums


def random_words(kind: str, *shape: int) -> Words:
    """Pairs of bf16 of 16 exponents, or of any bits."""
    words = np.random.randint(0, 1 << 32, shape, dtype=np.uint32)
    if kind == "any":
        return words
    exponent = {"ordinary": 0x3800, "small": 0x2000, "smaller": 0x1800}[kind]
    return words & np.uint32(0x87FF87FF) | np.uint32(exponent * 0x10001)


@pytest.mark.parametrize("kinds", ["ordinary", "small", "small smaller", "any"])
@np.errstate(all="ignore")
def test_products_of_bf16_have_the_bits_of_the_manual(
    product: Callable[..., None], kinds: str
) -> None:
    """On both sides of 2**-126 too, and whatever lies behind the rows."""
    kind, *others = kinds.split()
    for rows in ROWS:
        for words in WORDS:
            x = random_words("any", rows, words + 3)
            w = random_words((others or [kind])[0], words, 32)
            x[:, :words] = random_words(kind, rows, words)
            for more in (False, True):
                found = random_words(kind, rows, 32)
                before = found.view(np.float32) if more else np.zeros((rows, 32), np.float32)
                expected = bf16_sums(x, w, before)
                product(x, w, found, more=more, int8=False)
                nan = np.isnan(expected)
                assert np.array_equal(nan, np.isnan(found.view(np.float32)))
                assert np.array_equal(found[~nan], expected.view(np.uint32)[~nan])


def test_products_of_int8_are_exact(product: Callable[..., None]) -> None:
    for rows in ROWS:
        for words in WORDS:
            x, w = random_words("any", rows, words + 3), random_words("any", words, 32)
            a = x[:, :words].copy().view(np.int8).astype(np.int64)
            b = w.view(np.uint8).reshape(words, 32, 4).astype(np.int64)
            expected = np.einsum("mkj,knj->mn", a.reshape(rows, words, 4), b)
            found = random_words("any", rows, 32)
            sums = found + expected.astype(np.uint32)
            product(x, w, found, more=True, int8=True)
            assert np.array_equal(found, sums)


STORAGES = ["model", *FORMATS, *(name + INT8_INPUTS for name in ("q4_k", "q6_k", "int8_rows"))]


@pytest.mark.parametrize("storage", STORAGES)
def test_a_layer_matches_float64_whatever_its_batch(emulated: None, storage: str) -> None:
    """NaN between rows included."""
    assert instruction_sets(torch.bfloat16)["weights"] == "emulated amx"
    for n, k in SHAPES:
        layer, bias = codes.make_layer(storage, n, k, BF16), torch.randn(n).to(BF16)
        x = torch.full((97, k + 3), torch.nan, dtype=BF16)[:, :k]
        x[:] = torch.randn(97, k)
        out = layer(x, bias)
        if INT8_INPUTS not in storage:
            codes.assert_is_product(out, x, layer.exact, bias)
        for rows in (1, 2, 17, 32, 63):
            with kernel_threads(1 + rows % 3):
                assert torch.equal(layer(x[97 - rows :], bias), out[97 - rows :])


@pytest.mark.parametrize("dtype", [BF16, FLOAT])
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("mxfp4", "nvfp4")])
def test_int8_inputs_have_the_bits_of_vector_instructions(
    cpu_ops: None, name: str, dtype: torch.dtype
) -> None:
    if not int8_inputs():
        pytest.skip("needs AVX512-VNNI")
    if FORMATS[name].levels is codes.E4M3:
        pytest.skip("codes are not integers")
    for n, k in SHAPES:
        layer = codes.make_layer(name + INT8_INPUTS, n, k, dtype)
        for rows in (1, 5, 33, 100):
            x = torch.randn(rows, k).to(dtype)
            out = layer(x)
            emulate(True)
            found = layer(x)
            emulate(False)
            assert torch.equal(found, out)


def test_experts_run_as_matrix_tiles(emulated: None) -> None:
    for formats in (("q4_k", "q6_k"), ("nvfp4", "q5_1")):
        codes.test_experts_in_codes_equal_decoded_ones(*formats, 328, 264, BF16, False)


def test_faulty_instructions_are_reported(cpu_ops: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = instruction_sets(BF16) | {"faulty": "amx"}
    monkeypatch.setattr(kernels, "instruction_sets", lambda _: found)
    with pytest.warns(RuntimeWarning):
        kernels.select_kernels("cpu", "compile", BF16)


@pytest.mark.parametrize("form", [{}, *attention.FORMS.values()], ids=str)
def test_attention_matches_float64(emulated: None, form: dict[str, Any]) -> None:
    """NaN in memory that no token sees included, and infinite values that some tokens see."""
    attention.test_forms_in_all_dtypes(kernels.paged_attention, BF16, form)
    for chunks, bad in (([(40, 3), (5, 3)], 1), ([(3, 40), (0, 8)], 20)):
        attention.test_what_is_not_finite_reaches_tokens_that_see_it(
            kernels.paged_attention, chunks, bad, BF16, form
        )


@pytest.mark.parametrize(
    ("heads", "form"),
    [
        *[(heads, {}) for heads in [(9, 3, 64), (13, 1, 7)]],
        *[((6, 1, 34), attention.FORMS[name]) for name in ("window", "int8", "all")],
    ],
)
def test_attention_of_a_token_does_not_depend_on_its_batch(
    emulated: None, heads: tuple[int, int, int], form: dict[str, Any]
) -> None:
    attention.test_a_token_does_not_see_its_batch(BF16, heads, form)


def test_code_for_amx_compiles(tmp_path: Path) -> None:
    source = f"{SOURCES}/tiles.cpp"
    code = compiled(tmp_path / "tiles.o", "-O2", "-march=sapphirerapids", "-c", source)
    if shutil.which("objdump") is None:
        pytest.skip("needs objdump")
    listing = subprocess.run(["objdump", "-d", code], capture_output=True, text=True, check=True)
    for instruction in ("ldtilecfg", "tileloadd", "tdpbf16ps", "tdpbsud", "tilestored"):
        assert instruction in listing.stdout
