"""The carrier of our own frame model: a `FrameDiT` with its codec, and its cache as the memory.

    world = FrameWorld.from_pretrained("mediaspec/models/frame_worlds/panoroom/pack_k2")
    carrier = FrameDiTCarrier(world)
    carrier.steer(actions, poses)
    video = generate(carrier, carrier.schedule(), carrier.sampler(), noise, memory=carrier.memory(keep=256))

The model predicts clean frames, `num_frames` of them at a time, and reads keys and values of the past that were worked
out when the frames were written. B videos, w frames of a chunk, C channels, P numbers of a pose.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...memory.base import FrameMemory, MemoryRead
from ...memory.references import NO_REFERENCES
from ...memory.slot_steps import FlowPath, SlotSampler
from ...memory.window_schedule import WindowSchedule
from ...models.frame_cache import FrameCache
from ...models.frame_dit import FrameDiT, History, Memory
from ...models.frame_history import pack_length
from ...models.patch_codec import PATCH, PatchCodec
from ..keywords import nearest
from .base import Carrier

__all__ = ["CacheMemory", "CacheRead", "FrameDiTCarrier", "FrameWorld", "RatioSampler"]

CODEC = "codec.safetensors"
NO_TEXT = "a frame model reads no prompts; steer it with actions= and poses="
SHIFT = 2.0
"""Timestep shift of the chunks, that of the trainings' evaluation."""


@dataclass
class FrameWorld:
    """A frame model and its codec, saved as config.json, model.safetensors and codec.safetensors in one folder.

    Args:
        transformer: in evaluation mode; codec: None for latents alone.
    """

    transformer: FrameDiT
    codec: PatchCodec | None = None

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32) -> FrameWorld:
        """Loads a folder; computes in `dtype`, whatever the weights are stored in.

        Raises:
            ValueError: no frame model there, or no codec.
        """
        folder = Path(folder)
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} holds no config.json; give the folder of a saved frame model")
        model: FrameDiT = FrameDiT.from_pretrained(folder, dtype=dtype).eval()
        return cls(model, PatchCodec.load(folder / CODEC))

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes what `from_pretrained` reads."""
        self.transformer.save_pretrained(folder)
        if self.codec is not None:
            self.codec.save(Path(folder) / CODEC)

    @property
    def components(self) -> dict[str, Any]:
        return {"transformer": self.transformer, "codec": self.codec}

    def to(self, *args: Any, **kwargs: Any) -> FrameWorld:
        """Moves both; the codec stays in float32."""
        self.transformer.to(*args, **kwargs)  # type: ignore[arg-type]
        if self.codec is not None:
            self.codec.to(next(self.transformer.parameters()).device)
        return self


@dataclass(frozen=True)
class CacheRead(MemoryRead):
    """What a cache shows: keys and values instead of frames.

    Args:
        kept: as `FrameDiT.forward` takes it.
    """

    kept: Memory | None = None


class CacheMemory(FrameMemory):
    """A `FrameCache` as a memory; it knows actions and poses from its carrier.

    Args:
        carrier: whose model the keys and values are of.
        keep: frames before the recent ones that are held, None for all; see `FrameCache`.
    """

    name = "frame_cache"

    def __init__(self, carrier: FrameDiTCarrier, keep: int | None = None) -> None:
        super().__init__()
        self.carrier, self.keep = carrier, keep
        self._cache = FrameCache(carrier.model, keep)

    def _write(self, frames: Tensor, ids: list[int], poses: Tensor | None) -> None:
        if ids != list(range(self._cache.frames, self._cache.frames + len(ids))):
            raise ValueError(f"frames {ids} after {self._cache.frames} frames; a frame cache takes them in order")
        where = self.carrier.poses_of(ids) if poses is None else poses.float()
        levels = torch.zeros(frames.shape[0], len(ids), device=frames.device)
        latents = frames.transpose(1, 2).to(self.carrier.dtype)
        self._cache.write(History(latents, where, self.carrier.actions_of(ids), levels.to(latents.dtype)))

    def _read(self, targets: Sequence[int] | Tensor | None, query: Tensor | None, pose: Tensor | None) -> CacheRead:
        if targets is None:
            raise ValueError("a frame cache chooses by the poses of the frames to come; give their ids as targets")
        return CacheRead(kept=self._cache.read(self.carrier.poses_of([int(i) for i in targets])))

    def _clear(self) -> None:
        self._cache = FrameCache(self.carrier.model, self.keep)

    def _contents(self) -> dict[str, Tensor]:
        return self._cache.state_dict()

    def _restore(self, state: dict[str, Tensor]) -> None:
        device = self.carrier.device
        self._cache.load_state_dict({key: value.to(device) for key, value in state.items() if key not in _OURS})

    @property
    def frames_held(self) -> int:
        return self._cache.held

    @property
    def nbytes(self) -> int:
        return self._cache.nbytes


_OURS = ("written", "shape", "kind")


class RatioSampler(SlotSampler):
    """Euler steps for clean predictions on the flow path, x_s = x0 + (s / t) (x_t - x0): what the trained frame models
    are evaluated with, bit for bit. Other kinds of steps are those of `SlotSampler`."""

    def _move(
        self, output: Tensor, x: Tensor, t: Tensor, s: Tensor, noise: Tensor | None, variance: Tensor | None
    ) -> Tensor:
        if self.kind != "euler" or self.clip is not None:
            return super()._move(output, x, t, s, noise, variance)
        ratio = torch.where(t > 0, s / t.clamp_min(1e-12), torch.zeros_like(t)).to(x.device, x.dtype)
        clean = output.to(x.dtype)
        return clean + ratio.reshape(1, 1, -1, *[1] * (x.dim() - 3)) * (x - clean)


class FrameDiTCarrier(Carrier):
    """Rolls a `FrameDiT` out.

    Args:
        pipe_or_model: a `FrameWorld`, or a bare `FrameDiT` (then there is no codec).
    """

    name = "frame_dit"
    prediction = "clean"
    path = "flow"
    model_classes = ("FrameDiT",)
    pipeline_classes = ("FrameWorld",)
    temporal_ratio = 1
    spatial_ratio = PATCH
    owns_memory = True
    cost_mode = "cache"

    def __init__(self, pipe_or_model: Any, **settings: Any) -> None:
        super().__init__(pipe_or_model, **settings)
        config = self.model.config
        self.codec: PatchCodec | None = getattr(pipe_or_model, "codec", None)
        self.latent_channels = config.channels
        self.patch = (1, config.patch, config.patch)
        self.default_size = (PATCH * config.grid, PATCH * config.grid)

    # ---- actions and poses instead of texts

    @property
    def default_guidance(self) -> float:
        """There is none."""
        return 1.0

    def condition(
        self, prompt: Any = None, negative_prompt: Any = None, guidance_scale: float = 1.0, **more: Any
    ) -> None:
        """A frame model reads no texts.

        Raises:
            ValueError: a text, or guidance.
        """
        self.check_texts([prompt, negative_prompt])
        if more.get("prompt_embeds") is not None:
            raise ValueError(NO_TEXT)
        if guidance_scale > 1:
            raise ValueError(f"guidance_scale={guidance_scale}; a frame model has no guidance, leave it out")

    def check_texts(self, texts: Sequence[str | None]) -> None:
        if any(texts):
            raise ValueError(NO_TEXT)

    def steer(self, actions: Tensor | None, poses: Tensor | None) -> None:
        """Keeps the actions that led to the frames, and where the camera was, by frame id.

        Args:
            actions: [B, N, 1] or [B, N] int64; poses: [B, N, P].

        Raises:
            ValueError: one of them is missing, or holds numbers that the model does not know.
        """
        config = self.model.config
        wide = 2 if config.position == "column" else 3
        what = "(first column seen, columns of the world)" if wide == 2 else "(x, y in squares, yaw in radians)"
        if actions is None or poses is None:
            raise ValueError(
                f"this frame model needs actions (0 to {config.num_actions - 1}, the one that led to each frame) and "
                f"poses {what}, one of each per frame"
            )
        actions = actions[..., 0] if actions.dim() == 3 else actions
        if actions.dim() != 2 or poses.dim() != 3 or poses.shape[2] != wide:
            raise ValueError(
                f"actions {tuple(actions.shape)} and poses {tuple(poses.shape)}; give [B, N] and [B, N, {wide}] {what}"
            )
        if actions.is_floating_point() or int(actions.min()) < 0 or int(actions.max()) >= config.num_actions:
            raise ValueError(
                f"actions reach from {actions.min().item()} to {actions.max().item()} ({actions.dtype}); allowed are "
                f"whole numbers from 0 to {config.num_actions - 1}"
            )
        if not bool(torch.isfinite(poses).all()):
            raise ValueError("poses hold NaN or infinite values")
        self.actions = actions.to(self.device, torch.int64)
        self.poses = poses.to(self.device, torch.float32)

    def actions_of(self, ids: Sequence[int]) -> Tensor:
        """[B, n] of frames; the last one goes on behind the end."""
        return _rows(self.actions, ids)

    def poses_of(self, ids: Sequence[int]) -> Tensor:
        """[B, n, P] likewise."""
        return _rows(self.poses, ids)

    # ---- pictures and latents

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """(C, G, G): a frame model makes one size.

        Raises:
            ValueError: another size.
        """
        if (height, width) != self.default_size:
            raise ValueError(
                f"height={height}, width={width}; this frame model makes {self.default_size[0]} x "
                f"{self.default_size[1]} pixels, leave both out"
            )
        grid = self.model.config.grid
        return self.latent_channels, grid, grid

    def _codec(self) -> PatchCodec:
        if self.codec is None:
            raise ValueError("this frame model has no codec; give a FrameWorld, or latents and output_type='latent'")
        return self.codec

    def encode(self, video: Tensor) -> Tensor:
        """Latents [B, C, T, G, G] of pictures [B, 3, T, H, W] in -1..1."""
        self.check_video(video)
        codec = self._codec()
        rows = [codec.encode(one.permute(1, 2, 3, 0).to(codec.mean) / 2 + 0.5) for one in video]
        return torch.stack(rows).transpose(1, 2)

    def decode(self, latents: Tensor) -> Tensor:
        """Pictures [B, 3, T, H, W] in -1..1 of latents [B, C, T, G, G]."""
        pictures = [self._codec().decode(one.transpose(0, 1)).permute(3, 0, 1, 2) for one in latents]
        return torch.stack(pictures) * 2 - 1

    def decoder(self) -> Any:
        self._codec()
        return _CodecDecoder(self)

    # ---- how it is rolled out

    def memory(self, name: str | None = None, **settings: Any) -> FrameMemory | None:
        """The model's own memory, a `CacheMemory`.

        Args:
            name: None or the memory the model was trained with; another is another model.
            settings: keep, frames before the recent ones that are held. None holds all of them, and memory grows
                with the video (but for models with the memory "window"); with a number it is constant, and what is
                older is forgotten.

        Raises:
            ValueError: another memory, or an unknown setting.
        """
        own = self.model.config.memory
        if name not in (None, own, CacheMemory.name):
            raise ValueError(
                f"memory {name!r}; this frame model was trained with {own!r}, which it cannot change: another memory "
                "is another model, as panoroom/pack_k2"
            )
        for key in settings:
            if key != "keep":
                raise ValueError(f"a frame model's memory has no setting {key!r}; {nearest(key, ['keep'])}")
        return CacheMemory(self, **settings)

    def schedule(self, steps: int = 10, shift: float = SHIFT, **unknown: Any) -> WindowSchedule:
        """Chunks of `num_frames` frames, from noise to clean in `steps` calls.

        Raises:
            ValueError: an unknown setting.
        """
        for key in unknown:
            raise ValueError(f"a frame model's schedule has no setting {key!r}; {nearest(key, ['steps', 'shift'])}")
        w = self.model.config.num_frames
        return WindowSchedule(w, w, (1.0,) * w, steps, shift=shift, references=NO_REFERENCES, name="frame_dit")

    def sampler(self, kind: str = "euler", **settings: Any) -> SlotSampler:
        return RatioSampler(FlowPath(), kind, "sample", **settings)

    def dimensions(self) -> dict[str, int]:
        config = self.model.config
        return {"dim": config.hidden_size, "ffn": 4 * config.hidden_size, "layers": config.num_hidden_layers}

    def memory_tokens(self, read: MemoryRead) -> int:
        return read.kept.tokens if isinstance(read, CacheRead) and read.kept is not None else 0

    def expected_memory(self, memory: FrameMemory | None, frames: int, height: int, width: int) -> tuple[int, int]:
        """Tokens that a step reads after `frames` frames, and bytes that are held then, by the model's own plan."""
        config, keep = self.model.config, getattr(memory, "keep", None)
        if memory is None or config.memory == "none" or not frames:
            return 0, 0
        length, recent = pack_length(config.memory), min(frames, config.window)
        old = frames - recent
        if length:
            recent += old % length
            old = old // length * length
        old = 0 if config.memory == "window" else old if keep is None else min(old, keep)
        old = old // length * length if length else old
        poses = torch.zeros(1, old + recent, 2 if config.position == "column" else 3)
        poses[..., 1] = 1.0  # columns of a world
        reading = self.model.plan(poses, poses[:, -1:])
        n, size = config.tokens, torch.finfo(self.dtype).bits // 8
        channel = config.memory == "channel"
        whole = reading.recent.shape[1] + (0 if channel else reading.older.shape[1])
        blocks = reading.blocks.shape[1] if length else 0
        tokens = n * whole + (blocks * n // length**2 if blocks else 0)
        unit = 2 * config.num_hidden_layers * config.hidden_size * size
        frame = config.channels * config.grid**2 * size + 8 + size
        held = poses[0, 0].nbytes * (old + recent)
        if length:
            packed = config.packed_size * size if config.packed_size else unit
            held += unit * n * recent + packed * (n // length**2) * (old // length) + frame * recent
        else:
            held += unit * n * (recent if channel else old + recent) + (frame * (old + recent) if channel else 0)
        return tokens, held

    def __call__(
        self, x: Tensor, levels: Tensor, frame_ids: Tensor, read: MemoryRead, actions: Tensor | None
    ) -> Tensor:
        self.check_call(x, levels, frame_ids)
        ids = frame_ids.tolist()
        kept = read.kept if isinstance(read, CacheRead) else None
        told = self.actions_of(ids) if actions is None else actions[..., 0].to(x.device, torch.int64)
        clean = self.model(
            x.transpose(1, 2).to(self.dtype),
            levels.float().expand(x.shape[0], -1),
            self.poses_of(ids),
            told,
            kept,
        )
        return clean.transpose(1, 2).to(x.dtype)


class _CodecDecoder:
    """Latents to pictures, frame by frame; nothing is carried over."""

    def __init__(self, carrier: FrameDiTCarrier) -> None:
        self.codec = carrier._codec()

    def __call__(self, latents: Tensor) -> Iterator[Tensor]:
        """[C, n, h, w] to pictures [n, 3, H, W] in 0..1."""
        yield self.codec.decode(latents.transpose(0, 1)).permute(0, 3, 1, 2)

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Nothing is carried from frame to frame."""


def _rows(table: Tensor | None, ids: Sequence[int]) -> Tensor:
    if table is None:
        raise ValueError("actions and poses are not known; call steer(actions, poses) first")
    return table[:, [min(i, table.shape[1] - 1) for i in ids]]
