"""LlamaGen-compatible image networks: the VQ tokenizer and the autoregressive GPT (arXiv:2406.06525)."""

from transformers import AutoConfig, AutoModel

from .convert import convert_gpt, convert_vq
from .gpt import GPT_PRESETS, LlamaGenConfig, LlamaGenGPT
from .hf_generate import hf_generate_images
from .vq import VQ_PRESETS, LlamaGenVQ, LlamaGenVQConfig

for _config, _model in ((LlamaGenConfig, LlamaGenGPT), (LlamaGenVQConfig, LlamaGenVQ)):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _model, exist_ok=True)

__all__ = [
    "GPT_PRESETS",
    "VQ_PRESETS",
    "LlamaGenConfig",
    "LlamaGenGPT",
    "LlamaGenVQ",
    "LlamaGenVQConfig",
    "convert_gpt",
    "convert_vq",
    "hf_generate_images",
]
