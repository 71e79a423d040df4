"""llama.cpp with and without prompt lookup, for `speculation.py`. Runs in the Python that has it.

Arguments: a checkpoint, a number of threads and a number of drafts. Each line of standard input is
JSON with `prompt` (token ids), `max_tokens` and `drafts` (whether to draft). The answer is a line
with the tokens and the seconds at which each arrived. Both sides use the high-level API of
llama-cpp-python, which samples in Python: only that one can draft. Greedy, one request at a time.
"""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def main(checkpoint: str, threads: str, drafts: str) -> None:
    """Answer requests until the input ends."""
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    writer = runpy.run_path(str(Path(__file__).with_name("gguf_writer.py")))
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "model.gguf")
        writer["write_gguf"](Path(checkpoint), path)
        how: dict[str, Any] = {"n_ctx": 2048, "n_threads": int(threads), "verbose": False}
        how["n_threads_batch"] = how["n_threads"]
        lookup = LlamaPromptLookupDecoding(num_pred_tokens=int(drafts))
        models = [
            llama_cpp.Llama(str(path), **how),
            llama_cpp.Llama(str(path), **how, logits_all=True, draft_model=lookup),
        ]
    print(json.dumps({"version": f"llama-cpp-python {llama_cpp.__version__}"}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        tokens, seconds = [], []
        for token in models[request["drafts"]].generate(request["prompt"], temp=0.0):
            tokens.append(int(token))
            seconds.append(time.perf_counter())
            if len(tokens) == request["max_tokens"]:
                break
        print(json.dumps({"tokens": tokens, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
