"""The sockets of `stepgraph serve`: what a unix socket replaces."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from stepgraph.runtime.service.http.server import listen_unix


def test_a_unix_socket_replaces_the_one_of_a_process_that_has_ended(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    listen_unix(path).close()
    with listen_unix(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(path)


def test_a_unix_socket_that_is_used_and_other_files_stay(tmp_path: Path) -> None:
    used, file = tmp_path / "socket", tmp_path / "file"
    file.write_text("content")
    with listen_unix(str(used)):
        for path in (used, file, tmp_path):
            with pytest.raises(OSError, match=str(path)):
                listen_unix(str(path))
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(used))
    assert file.read_text() == "content"
