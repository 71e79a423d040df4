"""Instruction sets: which this CPU has, and which compiled code uses. One name for each, on x86 the
compiler's: `avx512bf16` for its macro `__AVX512BF16__` and for Linux's flag `avx512_bf16`."""

from __future__ import annotations

import functools
import platform
import re
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_X86_NAME = re.compile(r"(sse|ssse|avx|fma|f16c|bmi|lzcnt|popcnt|movbe|adx|gfni|amx|apx)\w*")
_X86_FLAGS = {"pni": "sse3", "abm": "lzcnt", "bmi1": "bmi"}
"""Flags of /proc/cpuinfo that the compiler's macros name differently."""
_X86_MACRO = re.compile(r"^#define __(\w+?)__ 1$", re.MULTILINE)
_ARM_MACROS = {
    "__ARM_FEATURE_ATOMICS": "atomics",
    "__ARM_FEATURE_BF16_VECTOR_ARITHMETIC": "bf16",
    "__ARM_FEATURE_DOTPROD": "asimddp",
    "__ARM_FEATURE_FP16_VECTOR_ARITHMETIC": "asimdhp",
    "__ARM_FEATURE_MATMUL_INT8": "i8mm",
    "__ARM_FEATURE_SVE": "sve",
    "__ARM_FEATURE_SVE2": "sve2",
}


@functools.cache
def cpu_features() -> frozenset[str]:
    """Return the instruction sets of this machine's CPU.

    Where Linux does not list them, the name of the processor stands for all it can do.
    """
    try:
        features = parse_cpuinfo(_CPUINFO.read_text())
    except OSError:
        features = frozenset()
    return features or frozenset({platform.processor() or platform.machine()})


def parse_cpuinfo(text: str) -> frozenset[str]:
    """Return the instruction sets that all processors of a `/proc/cpuinfo` have."""
    processors = [
        frozenset(filter(None, map(_name_of_flag, line.partition(":")[2].split())))
        for line in text.splitlines()
        if line.partition(":")[0].strip() in ("flags", "Features")
    ]
    return frozenset.intersection(*processors) if processors else frozenset()


def _name_of_flag(flag: str) -> str | None:
    if flag in _ARM_MACROS.values():
        return flag
    name = _X86_FLAGS.get(flag, flag.replace("_", ""))
    return name if _X86_NAME.fullmatch(name) else None


def features_of_macros(macros: str) -> frozenset[str]:
    """Return the instruction sets that a compiler uses which predefines `macros` (`-dM -E`)."""
    x86 = {name.lower().replace("_", "") for name in _X86_MACRO.findall(macros)}
    used = {name for name in x86 if _X86_NAME.fullmatch(name) and not name.endswith("math")}
    return frozenset(used | {_ARM_MACROS[name] for name in _ARM_MACROS if f" {name} " in macros})
