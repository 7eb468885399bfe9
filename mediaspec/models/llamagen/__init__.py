"""LlamaGen-compatible image networks: the VQ tokenizer and the autoregressive GPT (arXiv:2406.06525)."""

from .vq import VQ_PRESETS, LlamaGenVQ, LlamaGenVQConfig

__all__ = ["VQ_PRESETS", "LlamaGenVQ", "LlamaGenVQConfig"]
