"""Compiles kernels for a GPU on a machine without one, and puts them into Triton's cache there.

    python .ci/carry_kernels.py pack FILE
    python .ci/carry_kernels.py unpack FILE

Triton's cache is addressed by a hash of Triton's own files, then of the kernel's source, signature
and options. Triton's files differ between versions of Python, so a pack has only the rest of each
key, and `unpack` completes it with the hash of the Triton that it runs in. Another version of
Triton is refused.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROWS = {
    "preset:llama-3.2-1b": [1, 4, 5, 8, 32],
    "preset:qwen3-0.6b": [1],
    "preset:qwen3.5-0.8b": [1],
    "preset:llama-3.1-8b": [1],
    "demo": [1, 8],
}
"""Models and numbers of rows that `.ci/gpu quick` and `second` measure."""
CONTEXT, OUTPUT = 1024, 129
CAPABILITY = 90
CARRIED = (".cubin", ".json")
"""What Triton needs to launch a kernel."""


def pack(path: Path) -> None:
    """Compile the kernels of `quick`, and write them to a file."""
    with tempfile.TemporaryDirectory(prefix="stepgraph-kernels-") as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        import triton
        from stepgraph.runtime import EngineConfig
        from stepgraph.runtime.bench.workload import BenchmarkCase
        from stepgraph.runtime.tools.compile_ahead import compile_kernel_calls, record_steps
        from triton.compiler import compiler
        from triton.runtime.cache import get_cache_manager, triton_key

        tails: dict[str, str] = {}
        whole_key = compiler.get_cache_key

        def noted_key(*args: Any, **keywords: Any) -> str:
            key: str = whole_key(*args, **keywords)
            tail = key.removeprefix(triton_key())
            tails[hashlib.sha256(key.encode()).hexdigest()] = tail
            return key

        compiler.get_cache_key = noted_key
        began = time.monotonic()
        calls = []
        for model, rows in ROWS.items():
            chunk = EngineConfig().prefill_chunk
            longest = BenchmarkCase(max(rows), CONTEXT, OUTPUT).longest_sequence(chunk)
            config = EngineConfig(max_num_seqs=max(rows), max_model_len=longest, prefix_cache=False)
            steps = record_steps(model, config, rows=rows, tokens=[32, chunk])
            calls += [call for step in steps for call in step.kernel_calls]
        threads = os.cpu_count() or 1
        with ThreadPoolExecutor(threads) as executor:  # most of Triton's compiler needs no lock
            shares = [calls[first::threads] for first in range(threads)]
            compiled = executor.map(
                lambda share: sum(1 for _ in compile_kernel_calls(share, CAPABILITY)), shares
            )
            assert sum(compiled) == len(calls)
        with tarfile.open(path, "w:gz") as archive:
            add(archive, "triton", triton.__version__.encode())
            for digest, tail in tails.items():
                folder = Path(get_cache_manager(digest).cache_dir)
                add(archive, f"{digest}/key", tail.encode())
                for file in folder.iterdir():
                    if file.suffix in CARRIED and not file.name.startswith("__grp__"):
                        add(archive, f"{digest}/{file.name}", file.read_bytes())
        print(
            f"{len(tails)} kernels of {len(calls)} launches in {time.monotonic() - began:.0f} s:"
            f" {path}, {path.stat().st_size / 2**20:.1f} MiB"
        )


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    """Add a file to an archive."""
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def unpack(path: Path) -> None:
    """Put the kernels of a file into the cache of this Triton."""
    import triton
    from triton.runtime.cache import get_cache_manager, triton_key

    kernels: dict[str, dict[str, bytes]] = {}
    with tarfile.open(path) as archive:
        for entry in archive:
            file = archive.extractfile(entry)
            assert file is not None
            digest, _, name = entry.name.rpartition("/")
            kernels.setdefault(digest, {})[name] = file.read()
    version = kernels.pop("")["triton"].decode()
    if version != triton.__version__:
        sys.exit(f"{path} has kernels of Triton {version}, and this is {triton.__version__}")
    for files in kernels.values():
        key = triton_key() + files.pop("key").decode()
        digest = hashlib.sha256(key.encode()).hexdigest()
        cache = get_cache_manager(digest)
        (metadata_name,) = (name for name in files if name.endswith(".json"))
        metadata = json.loads(files[metadata_name]) | {"hash": digest}
        files[metadata_name] = json.dumps(metadata).encode()
        group = {name: cache.put(content, name) for name, content in files.items()}
        cache.put_group(metadata_name, group)
    print(f"{len(kernels)} kernels carried to {os.environ.get('TRITON_CACHE_DIR', 'the cache')}")


if __name__ == "__main__":
    {"pack": pack, "unpack": unpack}[sys.argv[1]](Path(sys.argv[2]))
