"""The KV cache: what a layer stores, which blocks a request holds, how much memory it takes.

```
layer group 0 (layers 0 2)          one arena: one allocation at a fixed address
layer group 1 (layers 1 3)            arena[layer in group][k|v][block][head][slot in block][dim]

   blocks:  [0 null][1 g0][2 g1][3 g0][4 free][5 free]...
```

A *slot* has room for the keys and values of one token in one layer; a *block* is `block_size`
consecutive slots and the unit of allocation. A block id that a layer group holds is that block in
all layers of the group. Block 0 is the *null block*: no request gets it, padding reads and writes
it.

Import from the modules. Only `arena` and `memory.device_memory` import torch.
"""
