"""Frame models of a few hundred weights, saved as trainings save theirs."""

from __future__ import annotations

from pathlib import Path

import torch

from mediaspec.eval.worlds import WORLDS, make_episode
from mediaspec.models.frame_dit import FrameDiT, FrameDiTConfig
from mediaspec.models.patch_codec import fit_codec


def save_tiny(root: Path, world: str, memory: str, folder: str | None = None, seed: int = 0) -> None:
    torch.manual_seed(seed)
    episode = make_episode(world, next(iter(WORLDS[world].protocols)), 3)
    codec = fit_codec(torch.from_numpy(episode.frames), components=6)
    config = FrameDiTConfig(
        hidden_size=16, memory_size=16, num_hidden_layers=1, num_attention_heads=2, channels=6, memory=memory,
        position=WORLDS[world].position,
    )  # fmt: skip
    model = FrameDiT(config)
    for weight in (model.out.weight, model.blocks[0].mix.weight):  # zero at first, where the past changes nothing
        torch.nn.init.normal_(weight, std=0.1)
    target = root / world / (folder or memory)
    model.save_pretrained(target)
    codec.save(target / "codec.safetensors")
