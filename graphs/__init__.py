"""Steps of fixed shape: bucket sizes, static buffers, eager, compiled and captured steps, library.

| module | owns |
|---|---|
| `buckets` | bucket sizes, and the smallest one that holds n (imports no torch) |
| `buffers` | fixed device buffers for a dataclass of tensors, one host mirror, one copy per step |
| `steps` | a step run eagerly, compiled, or as a captured CUDA graph; the library of all steps |
| `compilation` | runs a callable until nothing is left to compile; the errors of steps |

The package does not depend on a model. This file imports nothing, so that the scheduler can use
`buckets` without loading torch.
"""
