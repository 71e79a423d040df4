"""Steps of fixed shape: their bucket sizes, input buffers, ways to run, and the library of them.

| module | owns |
|---|---|
| `buckets` | bucket sizes, and the smallest one that holds n (imports no torch) |
| `buffers` | fixed device buffers for a dataclass of tensors, one host mirror, one copy a step |
| `steps` | a step run eagerly, compiled, or as a captured CUDA graph, with one interface |
| `library` | key -> step: prepared largest first, with hits, misses, padding, bytes and seconds |

Nothing here knows a model. This file imports nothing, so that the scheduler can use `buckets`
without loading torch.
"""
