"""AnyFlow-FAR (`AnyFlowFARTransformer3DModel`, arXiv:2605.13724, 2503.19325): causal chunks, average velocities.

    [ older chunks at (1, 4, 4) ][ 2 chunks in full ][ window ]

The network is a flow map: it is told where a step starts and where it ends (`timestep`, `r_timestep`), and returns the
mean velocity between the two, so that one Euler step is exact however long it is. Where a step ends is read from the
schedule that `schedule` made last, or `follow` was given. Levels that no such step starts from get r = t, the velocity
at that level.

Keys and values of the history come from one call per chunk on clean frames (the class's cache-writing call); all steps
of the chunk read them. That call goes over all frames shown, since chunks change their resolution as they age: with T
old and 6 full frames of 480 x 832 it has 390 T + 9360 tokens, beside 4680 of the window per step. use_kv_cache=False
gives the network the whole history in every step, at m_ar times that cost, and needs no cache memory. The two agree up
to rounding where the window's tokens are a multiple of 128; elsewhere the class fills the window up with keys of zeros
and reads them in its cached calls, as in its pipeline.

The cache belongs to a `MemoryRead` and is written again when another one comes; nothing of it is saved.

B videos, C channels, n frames of the window, p history frames, F = p + n.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ...memory.base import FrameMemory, MemoryRead
from ...memory.packers import token_count
from ...memory.references import ReferenceRule
from ...memory.registry import memory_for
from ...memory.window_schedule import WindowSchedule
from .base import Carrier
from .conditioning import guide
from .packed import PackedWanCarrier
from .packed_history import shown
from .signatures import extends

__all__ = ["FARCarrier", "chunks_of"]

SAME = 1e-9
"""Levels this close are one."""


def chunks_of(count: int, chunk: int) -> list[int]:
    """History frames in chunks, counted from the window back; the oldest may be short, as the first of a video is.

    Example:
        >>> chunks_of(7, 3)
        [1, 3, 3]
    """
    rest = count % chunk
    return ([rest] if rest else []) + [chunk] * (count // chunk)


class FARCarrier(PackedWanCarrier):
    """`AnyFlowFARPipeline` and its transformer.

    The released weights make 21 latent frames in chunks of 1, 3, 3, ..., 2. Here a picture is a history of one frame
    and every window has `chunk` frames; a video from text alone starts with a whole chunk.

    Args:
        pipe_or_model: the pipeline or an `AnyFlowFARTransformer3DModel`.
        chunk: latent frames of a window; None is the longest of the network's `chunk_partition` (3).
        old: frames that the memory keeps for (1, 4, 4).
        use_kv_cache: keys and values of the history are kept for a chunk, see the head of this file.
        settings: of `PackedWanCarrier`.

    Raises:
        ValueError: another network, unknown settings.

    Example:
        >>> carrier = FARCarrier(pipe)                                                       # doctest: +SKIP
        >>> carrier.condition("a red ball")                                                  # doctest: +SKIP
        >>> noise = FrameNoise(torch.tensor([0]), carrier.latent_shape(480, 832))            # doctest: +SKIP
        >>> video = generate(carrier, carrier.schedule(steps=4), carrier.sampler(), noise, num_frames=60)
        ... # doctest: +SKIP
    """

    name: ClassVar[str] = "far"
    model_classes: ClassVar[tuple[str, ...]] = ("AnyFlowFARTransformer3DModel",)
    pipeline_classes: ClassVar[tuple[str, ...]] = ("AnyFlowFARPipeline",)
    preset: ClassVar[str] = "anyflow_far"

    def __init__(
        self,
        pipe_or_model: Any,
        *,
        chunk: int | None = None,
        old: int = 64,
        use_kv_cache: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(pipe_or_model, **settings)
        if getattr(self.model, "far_patch_embedding", None) is None:
            raise ValueError(
                f"{type(self.model).__name__} has no embedding of old frames; AnyFlow-FAR is an "
                "AnyFlowFARTransformer3DModel"
            )
        config = self.model.config
        self.chunk = max(config.chunk_partition) if chunk is None else chunk
        if self.chunk < 1 or old < 1:
            raise ValueError(f"chunk={chunk}, old={old}; both are at least 1")
        self.old, self.use_kv_cache = old, use_kv_cache
        self.cost_mode = "cache" if use_kv_cache else "recompute"
        self.patch, self.coarse = tuple(config.patch_size), tuple(config.compressed_patch_size)
        self.full_chunks = config.full_chunk_limit - 1
        self.latent_channels = config.in_channels
        self._steps: list[tuple[Tensor, Tensor]] = []
        self._read: MemoryRead | None = None
        self._cache: dict[int, dict[str, Tensor]] = {}

    # ---- how it is rolled out

    def default_schedule(self) -> tuple[str, dict[str, Any]]:
        return self.preset, {"frames": self.chunk, "steps": 4}

    def refer(self, schedule: WindowSchedule) -> WindowSchedule:
        return schedule.with_(references=self._rule())

    def _rule(self) -> ReferenceRule:
        full = [(self.full_chunks * self.chunk, self.patch)] if self.full_chunks else []
        return ReferenceRule.packed([(self.old, self.coarse), *full], sink=0)

    def default_memory(self, **settings: Any) -> FrameMemory | None:
        """The last frames, as many as the network reads in full and `old` more."""
        if settings:
            return super().default_memory(**settings)
        return memory_for(self._rule())

    def schedule(self, **settings: Any) -> WindowSchedule:
        """As for all carriers of this kind; its steps are those that the network is told from now on."""
        made = super().schedule(**settings)
        self.follow(made)
        return made

    def follow(self, schedule: WindowSchedule) -> None:
        """Tells the network where steps end: needed only for a schedule that this carrier did not make last."""
        levels = [torch.tensor(schedule.level(m), dtype=torch.float64) for m in range(schedule.m_ar + 1)]
        self._steps = list(zip(levels, levels[1:]))

    def ends(self, levels: Tensor) -> Tensor:
        """[n] levels at which the steps from `levels` end; `levels` themselves where there is no such step."""
        for now, then in self._steps:
            skipped = len(now) - len(levels)
            if skipped >= 0 and torch.allclose(now[skipped:], levels.cpu().double(), rtol=0, atol=SAME):
                return then[skipped:].to(levels.device)
        return levels

    @extends(Carrier.condition)
    def condition(self, *args: Any, **settings: Any) -> None:
        """Encodes texts and keeps them, see `Carrier.condition`; the cache, which depends on them, is dropped.

        The released weights hold their guidance: guidance_scale=1.
        """
        super().condition(*args, **settings)
        self._read, self._cache = None, {}

    def reset(self) -> None:
        super().reset()
        self._read, self._cache = None, {}

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values that are kept now."""
        return sum(part.nbytes for layer in self._cache.values() for part in layer.values())

    def memory_tokens(self, read: MemoryRead) -> int:
        frames = sum(group.frames.shape[2] for group in read.groups)
        if not frames:
            return 0
        height, width = read.groups[0].frames.shape[3:]
        fine = min(frames, self.full_chunks * self.chunk)
        # cells that fill no whole coarse patch are not read
        return token_count(fine, height, width, self.patch) + (frames - fine) * (
            (height // self.coarse[1]) * (width // self.coarse[2])
        )

    # ---- a call

    def __call__(
        self, x: Tensor, levels: Tensor, frame_ids: Tensor, read: MemoryRead, actions: Tensor | None
    ) -> Tensor:
        self.check_actions(actions)
        self.check_call(x, levels, frame_ids)
        beside = shown(read, x, frame_ids)
        if beside.future.shape[2]:
            raise ValueError(
                f"the memory shows frames {beside.future_ids[0].tolist()} after the window; FAR is causal and goes "
                "forwards only"
            )
        history = beside.past
        parts = [*chunks_of(history.shape[2], self.chunk), x.shape[2]]
        self._check_parts(parts, x)
        told, start = self.conditioning, levels.to(x.device, torch.float64)
        times = torch.stack([start, self.ends(levels).to(start)]) * self.num_train_timesteps  # [2, n]: t and r
        text: Tensor | None
        if told.guides:
            x_in, past = torch.cat([x, x]), torch.cat([history, history])
            assert told.negative is not None and told.embeds is not None
            if told.negative.shape != told.embeds.shape:
                raise ValueError(
                    f"negative_prompt_embeds {tuple(told.negative.shape)} and prompt_embeds "
                    f"{tuple(told.embeds.shape)}; both share a cache, give the same number of tokens"
                )
            text = torch.cat([told.negative, told.embeds])
        else:
            x_in, past, text = x, history, told.embeds
        if self.use_kv_cache:
            out = self._cached(x_in, times, past, parts, read, text)
        else:
            out = self._whole(x_in, times, past, parts, read.level, text)
        out = out.transpose(1, 2)
        if told.guides:
            untold, seen = out.chunk(2)
            out = guide(seen, untold, told.guidance_scale)
        return out.to(x.dtype)

    def _check_parts(self, parts: list[int], x: Tensor) -> None:
        longest = self.model.config.rope_max_seq_len
        if sum(parts) > longest:
            raise ValueError(
                f"{sum(parts)} frames in one call, and the network has positions for {longest}; make the carrier with "
                f"a smaller old= (now {self.old}) and take its memory"
            )
        aged = len(parts) - 1 > self.full_chunks
        if aged and (x.shape[3] < self.coarse[1] or x.shape[4] < self.coarse[2]):
            raise ValueError(
                f"frames of {x.shape[3]} x {x.shape[4]} cells are smaller than the patch {self.coarse} of old frames; "
                "make larger pictures, or a memory of at most full_chunks * chunk = "
                f"{self.full_chunks * self.chunk} frames"
            )

    def _call(self, frames: Tensor, times: Tensor, text: Tensor | None, parts: list[int], **more: Any) -> Any:
        """The network on frames [B, C, n, h, w] and times [2, n]."""
        rows = frames.shape[0]
        return self.model(
            hidden_states=frames.transpose(1, 2).to(self.dtype), timestep=times[0].expand(rows, -1),
            r_timestep=times[1].expand(rows, -1), encoder_hidden_states=text, chunk_partition=parts,
            return_dict=False, **more,
        )  # fmt: skip

    def _cached(
        self, x: Tensor, times: Tensor, past: Tensor, parts: list[int], read: MemoryRead, text: Tensor | None
    ) -> Tensor:
        """[B, n, C, h, w] with keys and values of the history from the cache, which is written if it is not there."""
        if self._read is not read or self._cache[0]["full_cache"].shape[1] != x.shape[0]:
            self._cache = self._empty_cache(past, parts[:-1], x.shape[0])
            if past.shape[2]:
                self._write(past, parts[:-1], read.level, text)
            self._read = read
        flag = {"num_cached_chunks": len(parts) - 1, "is_cache_step": False}
        out: Tensor = self._call(x, times, text, parts, kv_cache=self._cache, kv_cache_flag=flag)[0]
        return out

    def _empty_cache(self, past: Tensor, parts: list[int], rows: int) -> dict[int, dict[str, Tensor]]:
        config, (height, width) = self.model.config, past.shape[3:]
        aged = max(len(parts) - self.full_chunks, 0)
        fine = sum(parts[aged:]) * (height // self.patch[1]) * (width // self.patch[2])
        coarse = sum(parts[:aged]) * (height // self.coarse[1]) * (width // self.coarse[2])

        def room(tokens: int) -> Tensor:
            shape = (2, rows, config.num_attention_heads, tokens, config.attention_head_dim)
            return torch.zeros(shape, dtype=self.dtype, device=past.device)

        return {
            layer: {"full_cache": room(fine), "compressed_cache": room(coarse)} for layer in range(config.num_layers)
        }

    def _write(self, past: Tensor, parts: list[int], level: float, text: Tensor | None) -> None:
        """The call that fills the cache with the history's keys and values."""
        times = torch.full((2, past.shape[2]), level * self.num_train_timesteps, device=past.device)
        mask = self.model.build_attention_mask(
            chunk_partition=parts, height=past.shape[3], width=past.shape[4], device=past.device, mode="cache"
        )
        flag = {"num_cached_chunks": len(parts) - 1, "is_cache_step": True}
        self._call(past, times, text, parts, attention_mask=mask, kv_cache=self._cache, kv_cache_flag=flag)

    def _whole(
        self, x: Tensor, times: Tensor, past: Tensor, parts: list[int], level: float, text: Tensor | None
    ) -> Tensor:
        """[B, n, C, h, w] of one call on history and window together, the way the network is trained."""
        before = torch.full((2, past.shape[2]), level * self.num_train_timesteps, dtype=times.dtype, device=x.device)
        out: Tensor = self._call(torch.cat([past, x], 2), torch.cat([before, times], 1), text, parts)[0]
        return out[:, out.shape[1] - x.shape[2] :]
