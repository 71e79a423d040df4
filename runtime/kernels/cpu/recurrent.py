"""Recurrences and convolutions over the state of rows in C++; see `csrc/recurrence.h`.

They need `load_cpu_ops`. Decode and prefill steps give the same bits for a token. Raises
RuntimeError for inconsistent arguments, and IndexError for an entry or a row that is out of range.
"""

from ..ops.convolution import CONVOLUTION_ARGUMENTS, Convolution
from ..ops.recurrence import RECURRENCE_ARGUMENTS, Recurrence
from ..ops.row_states import define_state_operator

cpu_recurrence: Recurrence = define_state_operator("cpu_recurrence", RECURRENCE_ARGUMENTS, like=2)
cpu_causal_conv: Convolution = define_state_operator(
    "cpu_causal_conv", CONVOLUTION_ARGUMENTS, like=0
)
