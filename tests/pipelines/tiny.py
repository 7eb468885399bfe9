"""Pipelines of real classes at toy size: 4 x 4 tokens of 16 codes, 8 x 8 pixels."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

from mediaspec.models.eagle import EagleHead, EagleHeadConfig
from mediaspec.models.llamagen import LlamaGenConfig, LlamaGenGPT, LlamaGenVQ, LlamaGenVQConfig
from mediaspec.pipelines import ClassToImagePipeline, TextToImagePipeline

WORDS = ["a", "red", "blue", "green", "apple", "cat", "dog", "car", "on", "background", ",", "flat", "style", "small"]
WORDS.append("beside")
VOCAB, GRID, TOKENS = 16, 4, 16


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "</s>", "<unk>", *WORDS]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def gpt(seed: int = 0, layers: int = 2, condition: str = "text", vocab: int = VOCAB) -> LlamaGenGPT:
    torch.manual_seed(seed)
    config = LlamaGenConfig(
        dim=32, n_layer=layers, n_head=2, multiple_of=16, vocab_size=vocab, block_size=TOKENS, condition=condition,
        cls_token_num=8 if condition == "text" else 1, caption_dim=16, num_classes=5,
    )  # fmt: skip
    model = LlamaGenGPT(config).eval()
    torch.nn.init.normal_(model.output.weight, std=0.4)  # zero by default, and a uniform law tests little
    return model


def vq() -> LlamaGenVQ:
    torch.manual_seed(1)
    return LlamaGenVQ(
        LlamaGenVQConfig(ch=8, ch_mult=(1, 2), num_res_blocks=1, z_channels=8, codebook_size=VOCAB, norm_groups=4)
    ).eval()


def text_encoder() -> T5EncoderModel:
    torch.manual_seed(2)
    config = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    return T5EncoderModel(config).eval()


def head() -> EagleHead:
    torch.manual_seed(3)
    grid = (GRID, GRID)
    config = EagleHeadConfig(
        hidden_size=32, vocab_size=VOCAB, num_attention_heads=2, intermediate_size=64, grid=grid
    )
    return EagleHead(config).eval()


def text_pipeline(rule=None, drafter="eagle", **defaults) -> TextToImagePipeline:
    if drafter == "eagle":
        drafter = head()
    pipe = TextToImagePipeline(gpt(), vq(), text_encoder(), tokenizer(), rule, drafter, **defaults)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def class_pipeline(rule=None, drafter=None) -> ClassToImagePipeline:
    pipe = ClassToImagePipeline(gpt(condition="class"), vq(), rule, drafter)
    pipe.set_progress_bar_config(disable=True)
    return pipe
