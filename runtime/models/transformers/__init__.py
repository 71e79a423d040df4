"""Decoders of transformers that run over this engine's cache and kernels.

`config.read_transformers_config` builds a model without memory for its weights and records what its
forward pass does (`probe.py`); `decoder.TransformersDecoder` runs it. transformers is imported
late: it is an optional dependency.
"""
