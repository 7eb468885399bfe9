"""A small diffusion transformer that writes a few frames at a time, steered by actions, with a memory of past frames.

Letters: B rows, w new frames, F past frames, C latent channels, G cells along a side, n tokens of a frame
((G / patch)^2), D hidden size, M memory size, P numbers of a pose, L layers.

Latents are [B, F, C, G, G]. A level u in 0..1 belongs to every frame: x_u = (1 - u) x + u noise, and the model answers
with the clean x. Past tokens pass one block of their own and become keys and values of every layer; they never look at
new frames, so that they are worked out once and kept. Which of them are read is `frame_history`'s affair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init

from .block_codec import BlockCodec
from .frame_blocks import BlockPacker, ChannelReader, FrameBlock, KeysValues
from .frame_dit_config import FrameDiTConfig
from .frame_history import Reading, pack_length, plan_reading
from .frame_positions import (
    centre_pose,
    motion_features,
    motion_size,
    position_features,
    position_size,
)

__all__ = ["FrameDiT", "FrameDiTConfig", "History", "Memory"]

LEVEL_WAVES = 8


@dataclass(frozen=True)
class History:
    """Past frames, oldest first.

    Args:
        latents: [B, F, C, G, G]; poses: [B, F, P] float32; actions: [B, F] int64.
        levels: [B, F] how much noise was put on them, 0 for clean.
    """

    latents: Tensor
    poses: Tensor
    actions: Tensor
    levels: Tensor

    @property
    def frames(self) -> int:
        return self.latents.shape[1]

    def pick(self, index: Tensor) -> History:
        """The frames index [B, n] of every row."""
        rows = torch.arange(len(index), device=index.device)[:, None]
        return History(*(value[rows, index] for value in (self.latents, self.poses, self.actions, self.levels)))

    def last(self, count: int) -> History:
        """The newest `count` frames."""
        start = max(self.frames - count, 0)
        return History(*(value[:, start:] for value in (self.latents, self.poses, self.actions, self.levels)))


@dataclass(frozen=True)
class Memory:
    """What an AR step reads, ready for the layers.

    Args:
        recent: keys and values in front of the new tokens; crossed: those of a cross-attention of its own.
        channel: [B, F, n, patch * patch * C] old frames for the channels, with their poses.
        tokens: history tokens that are read, as they are kept: a packed one counts once.
        attended: those that attention sees, more than `tokens` where packed ones are unpacked.
    """

    recent: KeysValues | None = None
    crossed: KeysValues | None = None
    channel: tuple[Tensor, Tensor] | None = None
    tokens: int = 0
    attended: int = 0


class FrameDiT(PreTrainedModel):
    """Predicts w clean frames from noisy ones, their actions and poses, and a memory.

    Example:
        >>> model = FrameDiT(FrameDiTConfig(hidden_size=32, num_hidden_layers=2, memory="pack_k2"))
        >>> past = History(torch.randn(2, 11, 40, 8, 8), torch.zeros(2, 11, 2) + 512, torch.ones(2, 11).long(),
        ...                torch.zeros(2, 11))
        >>> new_poses = torch.zeros(2, 4, 2) + 512
        >>> memory = model.read(past, new_poses)
        >>> x = model(torch.randn(2, 4, 40, 8, 8), torch.ones(2, 4), new_poses, torch.ones(2, 4).long(), memory)
        >>> x.shape, memory.tokens     # 5 recent frames of 16 tokens and 3 blocks of 4
        (torch.Size([2, 4, 40, 8, 8]), 92)
    """

    config: FrameDiTConfig
    config_class = FrameDiTConfig
    main_input_name = "x"
    latent_deviation: Tensor

    def __init__(self, config: FrameDiTConfig) -> None:
        super().__init__(config)
        d, m = config.hidden_size, config.memory_size
        values = config.channels * config.patch**2
        places, motions = position_size(config.position), motion_size(config.position)
        # deviation of every latent over the training data, which tells how far to believe a noisy one
        self.register_buffer("latent_deviation", torch.ones(config.channels, config.grid))
        self.embed = nn.Linear(values, d)
        self.place = nn.Linear(places, d)
        self.step_in = nn.Linear(3, d)
        self.level = nn.Sequential(nn.Linear(2 * LEVEL_WAVES, d), nn.SiLU(), nn.Linear(d, d))
        self.action = nn.Embedding(config.num_actions, d)
        self.blocks = nn.ModuleList(
            FrameBlock(d, config.num_attention_heads, cross=config.memory == "cross")
            for _ in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(d)
        self.out = nn.Linear(d, values)
        if config.memory != "none":
            self.past_embed = nn.Linear(values, m)
            self.past_place = nn.Linear(places, m)
            self.past_action = nn.Embedding(config.num_actions, m)
            self.past_level = nn.Linear(2 * LEVEL_WAVES, m)
            self.past_norm = nn.RMSNorm(m)
            self.past_mlp = nn.Sequential(nn.Linear(m, 2 * m), nn.GELU(), nn.Linear(2 * m, m))
            self.past_out = nn.RMSNorm(m)
            self.past_kv = nn.Linear(m, config.num_hidden_layers * 2 * d, bias=False)
            # age moves a key along a learned direction, so that kept keys stay good while they grow older
            self.age_key = nn.Parameter(torch.zeros(config.num_hidden_layers, d))
        length = pack_length(config.memory)
        packed = config.packed_size
        self.packer = BlockPacker(m, length, motions) if length and not packed else None
        self.block_codec = BlockCodec(m, packed, length, motions) if length and packed else None
        self.channel = ChannelReader(values, config.channel_frames, motions, d) if config.memory == "channel" else None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=0.2)
        elif isinstance(module, nn.RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, FrameDiT):
            # here and not at the modules themselves: transformers passes over modules without parameters of their own
            for part in module.modules():
                if isinstance(part, FrameBlock | BlockPacker | BlockCodec | ChannelReader):
                    part.zero_outputs()
            init.zeros_(module.out.weight)
            init.zeros_(module.out.bias)
            init.ones_(module.latent_deviation)
            if module.config.memory != "none":
                init.zeros_(module.age_key)

    def to_tokens(self, latents: Tensor) -> Tensor:
        """[..., C, G, G] latents as [..., n, patch * patch * C] tokens; any G that is a multiple of the patch."""
        p = self.config.patch
        *lead, c, g, _ = latents.shape
        parts = latents.reshape(*lead, c, g // p, p, g // p, p)
        k = len(lead)
        order = (*range(k), k + 1, k + 3, k + 2, k + 4, k)
        return parts.permute(order).reshape(*lead, (g // p) ** 2, p * p * c)

    def to_latents(self, tokens: Tensor) -> Tensor:
        """[..., n, patch * patch * C] tokens as [..., C, G, G] latents."""
        p, g, c = self.config.patch, self.config.grid, self.config.channels
        *lead, _, _ = tokens.shape
        k = len(lead)
        parts = tokens.reshape(*lead, g // p, g // p, p, p, c)
        order = (*range(k), k + 4, k, k + 2, k + 1, k + 3)
        return parts.permute(order).reshape(*lead, c, g, g)

    def _level_features(self, levels: Tensor) -> Tensor:
        angle = math.pi * levels[..., None] * 2.0 ** torch.arange(LEVEL_WAVES, device=levels.device) / 2
        return torch.cat([angle.sin(), angle.cos()], dim=-1).to(self.embed.weight.dtype)

    def _places(self, poses: Tensor, side: int) -> Tensor:
        places = position_features(self.config.position, poses, side, side, self.config.field_of_view)
        return places.to(self.embed.weight.dtype)

    def encode_frames(self, past: History) -> Tensor:
        """Memory tokens [B, F * n, M] of whole frames."""
        return self._finish(
            self._embed_past(past) + self._past_places(past.poses, self.config.grid // self.config.patch)
        )

    def pack(self, past: History, length: int) -> Tensor:
        """Packed tokens [B, F / length, n / length^2, M or P] of frames in blocks, without their places."""
        b, f = past.levels.shape
        content, motion = self.block_frames(past, length)
        if self.block_codec is not None:
            return self.block_codec.pack(content, motion)
        assert self.packer is not None
        pooled: list[Tensor] = []
        while len(pooled) < len(self.packer.stages):
            past = _halved(past)
            size = content.shape[3] >> (len(pooled) + 1)
            pooled.append(self._embed_past(past).reshape(b, f // length, -1, size, size, content.shape[-1]))
        return self.packer(content, pooled, motion)

    def block_frames(self, past: History, length: int) -> tuple[Tensor, Tensor]:
        """What is packed of frames in consecutive blocks: [B, F / length, length, side, side, M] and their motion."""
        b, f = past.levels.shape
        side = self.config.grid // self.config.patch
        content = self._embed_past(past).reshape(b, f // length, length, side, side, -1)
        return content, self.block_motion(past.poses.reshape(b, f // length, length, -1))

    def place_blocks(self, packed: Tensor, poses: Tensor) -> Tensor:
        """Memory tokens of packed ones [B, N, n / length^2, M or P] at poses [B, N, length, P].

        Returns:
            [B, N * n / length^2, M], or [B, N * length * n, M] where they are unpacked.
        """
        side = self.config.grid // self.config.patch
        if self.block_codec is not None:
            frames = self.block_codec.unpack(packed, self.block_motion(poses))
            return self._finish((frames + self._past_places(poses, side)).flatten(1, 2))
        centre = centre_pose(self.config.position, poses)
        return self._finish(packed + self._past_places(centre, side // poses.shape[2]))

    def block_motion(self, poses: Tensor) -> Tensor:
        """[B, N, length * R] of poses [B, N, length, P] against the centre of their block."""
        centre = centre_pose(self.config.position, poses)
        motion = motion_features(self.config.position, poses, centre[:, :, None]).flatten(2)
        return motion.to(self.embed.weight.dtype)

    def _embed_past(self, past: History) -> Tensor:
        extra = self.past_level(self._level_features(past.levels))
        return self.past_embed(self.to_tokens(past.latents)) + (extra + self.past_action(past.actions))[:, :, None]

    def _past_places(self, poses: Tensor, side: int) -> Tensor:
        return self.past_place(self._places(poses, side))

    def _finish(self, tokens: Tensor) -> Tensor:
        tokens = tokens.flatten(1, 2)
        return tokens + self.past_mlp(self.past_norm(tokens))

    def keys_values(self, tokens: Tensor) -> Tensor:
        """Keys and values [B, L, 2, N, D] of memory tokens [B, N, M], without age."""
        b, n, _ = tokens.shape
        both = self.past_kv(self.past_out(tokens)).reshape(b, n, len(self.blocks), 2, self.config.hidden_size)
        return both.permute(0, 2, 3, 1, 4)

    def aged(self, kept: Tensor, ages: Tensor) -> KeysValues:
        """Kept keys and values [B, L, 2, N, D] with the ages [B, N] (frames before the first new one) of their tokens,
        split into heads."""
        heads = self.config.num_attention_heads
        keys = kept[:, :, 0] + (0.2 * torch.log1p(ages.to(kept.dtype)))[:, None, :, None] * self.age_key[:, None]
        return KeysValues.split(keys, kept[:, :, 1], heads)

    def plan(self, poses: Tensor, targets: Tensor) -> Reading:
        """Which past frames (poses [B, F, P]) the next ones (targets [B, w, P]) read."""
        c = self.config
        return plan_reading(
            c.memory, c.position, poses, targets, window=c.window, retrieve=c.retrieve,
            channel_frames=c.channel_frames, memory_limit=c.memory_limit,
        )  # fmt: skip

    def read(self, past: History, targets: Tensor) -> Memory:
        """Encodes what the next frames read of the past.

        Args:
            past: all frames so far; none at all is allowed.
            targets: [B, w, P] poses of the frames to come.
        """
        if self.config.memory == "none" or not past.frames:
            return Memory()
        reading = self.plan(past.poses, targets)
        n, f = self.config.tokens, past.frames
        kept = [self.keys_values(self.encode_frames(past.pick(reading.recent)))]
        ages = [(f - reading.recent).repeat_interleave(n, 1)]
        crossed = channel = None
        extra = 0
        if reading.older.shape[1]:
            old = past.pick(reading.older)
            if self.config.memory == "channel":
                channel = (self.to_tokens(old.latents), old.poses)
            else:
                old_kv = self.keys_values(self.encode_frames(old))
                old_ages = (f - reading.older).repeat_interleave(n, 1)
                if self.config.memory == "cross":
                    crossed, extra = self.aged(old_kv, old_ages), old_ages.shape[1]
                else:
                    kept, ages = [old_kv, *kept], [old_ages, *ages]
        if reading.blocks.shape[1]:
            length = reading.blocks.shape[2]
            chosen = past.pick(reading.blocks.flatten(1))
            poses = chosen.poses.unflatten(1, (-1, length))
            block_kv = self.keys_values(self.place_blocks(self.pack(chosen, length), poses))
            kept, ages = [block_kv, *kept], [self.block_ages(reading.blocks, f), *ages]
        recent = self.aged(torch.cat(kept, 3), torch.cat(ages, 1))
        attended = sum(one.shape[1] for one in ages) + extra
        return Memory(recent, crossed, channel, attended - self.unpacked_extra(reading), attended)

    def block_ages(self, blocks: Tensor, frames: int) -> Tensor:
        """Ages [B, N] of the memory tokens of blocks [B, N, length] after so many frames."""
        if self.block_codec is not None:
            return (frames - blocks).flatten(1).repeat_interleave(self.config.tokens, 1)
        return (frames - blocks[..., -1]).repeat_interleave(self.config.tokens // blocks.shape[2] ** 2, 1)

    def unpacked_extra(self, reading: Reading) -> int:
        """Tokens that attention sees beyond those that are kept."""
        _, blocks, length = reading.blocks.shape
        return blocks * (length * self.config.tokens - self.config.tokens // length**2) if self.block_codec else 0

    def forward(
        self, x: Tensor, levels: Tensor, poses: Tensor, actions: Tensor, memory: Memory | None = None
    ) -> Tensor:
        """Clean frames [B, w, C, G, G].

        Args:
            x: [B, w, C, G, G] noisy latents.
            levels: [B, w] float32 whatever the weights are, 0 clean to 1 noise, free for every frame.
            poses: [B, w, P]; actions: [B, w] int64, those that led to the frames.
            memory: from `read`; None is no past.
        """
        memory = memory or Memory()
        b, w = levels.shape
        side = self.config.grid // self.config.patch
        u = levels[:, :, None, None, None].to(x.dtype)
        deviation = self.latent_deviation[..., None]
        scale = ((1 - u) ** 2 * deviation**2 + u**2).sqrt()
        place = torch.arange(w, device=x.device, dtype=x.dtype)
        order = torch.stack([place / 8, (place == 0).to(x.dtype), torch.full_like(place, float(w) / 8)], dim=-1)
        frame = self.action(actions) + self.level(self._level_features(levels)) + self.step_in(order)
        h = self.embed(self.to_tokens(x / scale)) + frame[:, :, None] + self.place(self._places(poses, side))
        if memory.channel is not None and self.channel is not None:
            content, old_poses = memory.channel
            motion = motion_features(self.config.position, old_poses[:, None], poses[:, :, None])
            h = h + self.channel(content, motion.to(h.dtype))
        h = h.flatten(1, 2)
        for i, block in enumerate(self.blocks):
            own = memory.recent.layer(i) if memory.recent is not None else None
            other = memory.crossed.layer(i) if memory.crossed is not None else None
            h = block(h, own, other)
        change = self.to_latents(self.out(self.norm(h)).unflatten(1, (w, -1)))
        return (1 - u) * (deviation / scale) ** 2 * x + u * deviation / scale * change


def _halved(past: History) -> History:
    """Latents, levels and actions of pairs of frames, pooled by 2 in time, height and width; of actions the later."""
    wide = torch.promote_types(past.latents.dtype, torch.float32)  # the CPU has no pooling of half-precision numbers
    pooled = F.avg_pool3d(past.latents.to(wide).transpose(1, 2), 2).transpose(1, 2).to(past.latents.dtype)
    return History(pooled, past.poses[:, 1::2], past.actions[:, 1::2], past.levels.unflatten(1, (-1, 2)).mean(2))
