"""Futexes in shared memory: wait until a word changes, wake everybody who waits for it.

Linux only (futex(2)). The calls release the GIL. A word is a uint32 at an aligned address. Each
process passes the address where it has mapped the memory.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys

from ..errors import ConfigError

__all__ = ["require_futex", "wait", "wake_all"]

_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
"""Number of the system call by machine."""
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_ALL = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


def _syscall() -> ctypes._NamedFuncPointer | None:
    if sys.platform != "linux" or platform.machine() not in _NUMBERS:
        return None
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    call.argtypes = (
        *(ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32),
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32),
    )
    return call


_call = _syscall()
_number = _NUMBERS.get(platform.machine(), -1)


def require_futex() -> None:
    """Raise `ConfigError` on a platform without futexes."""
    if _call is None:
        raise ConfigError(
            f"tensor_parallel needs Linux on {', '.join(_NUMBERS)}, and this is {sys.platform} on"
            f" {platform.machine()}: use tensor_parallel=1"
        )


def wait(address: int, expected: int, seconds: float) -> None:
    """Sleep while the word is `expected`, at most `seconds`. May return early: check the word."""
    assert _call is not None
    whole = int(seconds)
    timeout = _Timespec(whole, int((seconds - whole) * 1e9))
    status = _call(_number, address, _FUTEX_WAIT, expected, ctypes.addressof(timeout), None, 0)
    if status != 0 and ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
        raise OSError(ctypes.get_errno(), f"futex wait: {os.strerror(ctypes.get_errno())}")


def wake_all(address: int) -> None:
    """Wake every thread, of any process, that waits for the word."""
    assert _call is not None
    _call(_number, address, _FUTEX_WAKE, _ALL, None, None, 0)
