"""The listening socket of `stepgraph serve`: TCP, or a unix socket with its file."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress

__all__ = ["listen_tcp", "listen_unix", "remove_socket"]

BACKLOG = 2048
SOCKET_MODE = 0o666
"""Every user may connect; the directory of the file restricts access."""


def listen_tcp(host: str, port: int) -> socket.socket:
    """Return a socket that listens on a TCP port, 0 for a free one.

    Raises:
        OSError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        number = error.errno or 0  # negative if the name is unknown
        reason = os.strerror(number) if number > 0 else error.strerror
        raise OSError(
            f"cannot listen on {host} port {port} ({reason}): choose another --host or --port"
        ) from error


def listen_unix(path: str) -> socket.socket:
    """Return a unix socket that listens at a path. A socket that a process left there is replaced.

    Raises:
        OSError: another process listens there, it is another kind of file, or the path cannot be
            used.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        _remove_unused(path)
        listener.bind(path)
        os.chmod(path, SOCKET_MODE)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise OSError(f"cannot listen on --uds {path} ({reason}): choose another path") from error
    return listener


def remove_socket(path: str, made: os.stat_result) -> None:
    """Remove the file of a unix socket, unless another one has replaced the one that was `made`."""
    with suppress(OSError):
        present = os.lstat(path)
        if os.path.samestat(present, made):
            os.unlink(path)


def _remove_unused(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError("it exists and is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise FileExistsError("another process listens there")
