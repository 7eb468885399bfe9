"""The untrained parts of moving-emoji: tokenizer, text encoder, denoiser and noise schedule, all library classes.

Sizes are chosen so that one CPU core trains the denoiser in about an hour.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import DDIMScheduler, UNetMotionModel
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from scene import MOTIONS, PLACES, SUBJECTS, caption, combinations  # isort: skip

TEXT_WIDTH = 128
TEXT_LENGTH = 16


def _byte_letters() -> list[str]:
    """The 256 letters that byte-level BPE writes bytes with."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def build_tokenizer(folder: Path) -> CLIPTokenizer:
    """Write vocab.json and merges.txt in which every word of the grid is one token; other text falls back to bytes.

    The merges are ordinary BPE merges on the word list, continued until each word is whole.
    """
    words = sorted({w for text in [*SUBJECTS, *MOTIONS, *PLACES, "a an"] for w in text.split()})
    parts = {w: [*w[:-1], w[-1] + "</w>"] for w in words}
    merges: list[tuple[str, str]] = []
    while any(len(p) > 1 for p in parts.values()):
        count: dict[tuple[str, str], int] = {}
        for p in parts.values():
            for pair in zip(p, p[1:], strict=False):
                count[pair] = count.get(pair, 0) + 1
        best = max(sorted(count), key=lambda pair: count[pair])
        merges.append(best)
        for w, p in parts.items():
            out: list[str] = []
            for piece in p:
                if out and (out[-1], piece) == best:
                    out[-1] += piece
                else:
                    out.append(piece)
            parts[w] = out
    letters = _byte_letters()
    tokens = letters + [a + "</w>" for a in letters] + [a + b for a, b in merges]
    tokens = list(dict.fromkeys(tokens)) + ["<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(tokens)}, ensure_ascii=False))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    return CLIPTokenizer.from_pretrained(folder, model_max_length=TEXT_LENGTH)


def new_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """Two causal layers of width 128."""
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=TEXT_WIDTH,
            intermediate_size=2 * TEXT_WIDTH,
            projection_dim=TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=TEXT_LENGTH,
            hidden_act="gelu",
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            initializer_factor=1.0,
        )
    )


def new_unet(widths: tuple[int, ...] = (64, 128), heads: tuple[int, ...] = (2, 4)) -> UNetMotionModel:
    """The denoiser: one layer per level; spatial, text and temporal attention (heads of 32) on both levels."""
    return UNetMotionModel(
        sample_size=8,
        in_channels=8,
        out_channels=8,
        down_block_types=("CrossAttnDownBlockMotion",) * len(widths),
        up_block_types=("CrossAttnUpBlockMotion",) * len(widths),
        block_out_channels=widths,
        layers_per_block=1,
        norm_num_groups=16,
        cross_attention_dim=TEXT_WIDTH,
        num_attention_heads=heads,
        motion_num_attention_heads=heads,
        motion_max_seq_length=32,
        use_linear_projection=True,
    )


def new_scheduler() -> DDIMScheduler:
    """Linear schedule with v-prediction.

    Where the subject goes is decided at signal-to-noise ratios between 0.0005 and 0.02: a single frame hardly tells,
    16 frames together do. A quarter of this schedule's steps lie there, of a cosine schedule's one in thirteen. The
    last step keeps 5 parts in 100 000 of the signal's power.
    """
    return DDIMScheduler(
        num_train_timesteps=1000,
        beta_schedule="linear",
        beta_start=0.0001,
        beta_end=0.02,
        prediction_type="v_prediction",
        timestep_spacing="trailing",
        clip_sample=False,
        set_alpha_to_one=True,
    )


def token_table(tokenizer: CLIPTokenizer) -> dict[str, Tensor]:
    """Token ids [16] int64 of every caption of the grid, and of the empty prompt."""
    texts = [caption(c) for c in combinations()] + [""]
    ids = tokenizer(
        texts, padding="max_length", max_length=TEXT_LENGTH, truncation=True, return_tensors="pt"
    ).input_ids
    return dict(zip(texts, ids, strict=True))


class FrameTimes:
    """Gives every frame of a clip its own timestep while `timesteps` is set.

    UNetMotionModel makes one time embedding per clip and repeats it; forward pre-hooks on its ResnetBlock2D modules
    put per-frame embeddings, made by the model's own layers, in its place.

    Args:
        unet: the denoiser.
    """

    def __init__(self, unet: UNetMotionModel) -> None:
        from diffusers.models.resnet import ResnetBlock2D

        self.unet, self.embedding = unet, None
        for module in unet.modules():
            if isinstance(module, ResnetBlock2D):
                module.register_forward_pre_hook(self._replace, with_kwargs=True)

    def set(self, timesteps: Tensor) -> None:
        """Use timesteps [B, F] in the next forward passes."""
        projected = self.unet.time_proj(timesteps.flatten()).to(self.unet.dtype)
        self.embedding = self.unet.time_embedding(projected)

    def clear(self) -> None:
        """Back to one timestep per clip."""
        self.embedding = None

    def _replace(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if self.embedding is None:
            return None
        if "temb" in kwargs:
            return args, kwargs | {"temb": self.embedding}
        return (args[0], self.embedding, *args[2:]), kwargs
