"""Collective operations of the processes of a machine as C++ operators over shared memory.

`csrc/communicator.h` describes the exchange. Operators take their group as a tensor with the handle
of a communicator, so that compiled code does not depend on its number. They are declared to write
to it: compiled code keeps all of them, in their order.

Shape suffixes: B rows, F features.
"""

from __future__ import annotations

import torch

LINE_BYTES = 128
"""`Communicator::kAlignment`: of a rank's line, and what parts are rounded up to."""

torch.library.define(
    "stepgraph::communicator_create",
    "(Tensor region, Tensor abort, int rank, int ranks, float timeout_seconds) -> int",
)
torch.library.define("stepgraph::communicator_destroy", "(int handle) -> ()")
torch.library.define(
    "stepgraph::communicator_set_timeout", "(int handle, float timeout_seconds) -> ()"
)
torch.library.define("stepgraph::communicator_failure", "(int handle) -> (int, str, bool)")
torch.library.define("stepgraph::all_reduce", "(Tensor x, Tensor(a!) communicator) -> Tensor")
torch.library.define(
    "stepgraph::gather_columns", "(Tensor x, int[] sizes, Tensor(a!) communicator) -> Tensor"
)
torch.library.register_fake("stepgraph::all_reduce", lambda x, communicator: x.new_empty(x.shape))
torch.library.register_fake(
    "stepgraph::gather_columns",
    lambda x_BF, sizes, communicator: x_BF.new_empty(x_BF.shape[0], sum(sizes)),
)
