"""How weights of linear layers are stored, in memory and in checkpoints."""

from .awq import AWQ
from .checkpoint_format import CheckpointFormat
from .gptq import GPTQ
from .grouped import GroupedWeight
from .mxfp4 import MXFP4
from .stored import FP8, INT8, MODEL, WeightStorage, dequantise

__all__ = [
    "AWQ",
    "CHECKPOINT_FORMATS",
    "FP8",
    "GPTQ",
    "INT8",
    "MODEL",
    "MXFP4",
    "STORAGES",
    "CheckpointFormat",
    "GroupedWeight",
    "WeightStorage",
    "dequantise",
]

STORAGES = {storage.name: storage for storage in (MODEL, INT8, FP8)}
"""By name."""

CHECKPOINT_FORMATS: tuple[CheckpointFormat, ...] = (MXFP4, AWQ, GPTQ)
