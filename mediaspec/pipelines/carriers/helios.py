"""Helios (`HeliosTransformer3DModel`, arXiv:2603.04379): long, mid and short history, told as timestep 0.

    [first frame][16 at 4x][2 at 2x][1][ window ]

Windows are chunks of 9 latent frames at one level; the network returns the velocity. Positions count slots, never the
frames of the video, so that it may go on without end.

Empty slots: empty="zeros" is what `HeliosPipeline` does at the beginning of a video, where it feeds zeros for frames
that do not exist, and what the released weights were trained on. empty="skip" leaves them out (the class takes groups
of any length, and none).

Its pipeline also adds some noise (0.111 to 0.135) to latents that come from a user's picture or video, and shows a
picture a second time as the last latent of a still video of it. Here the picture's own latent has both slots, without
noise; give `generate` other latents as history to do the same.

B videos, C channels, n frames of the window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ...memory.base import FrameMemory, Kernel, MemoryRead
from ...memory.references import ReferenceRule
from ...memory.registry import memory_for
from ...memory.window_schedule import WindowSchedule
from .packed import PackedWanCarrier
from .packed_history import Slots, anchored, check_groups, check_sizes, lay_out, shown

__all__ = ["HeliosCarrier"]


class HeliosCarrier(PackedWanCarrier):
    """`HeliosPipeline` and its transformer.

    Runs are chained by the memory: give the latents of one run as `history` of the next.

    Args:
        pipe_or_model: the pipeline or a `HeliosTransformer3DModel`.
        history_sizes: slots at 4x, 2x and full resolution; the first two may be 0. The weights know [16, 2, 1].
        num_latent_frames_per_chunk: latent frames of a window. The weights know 9.
        keep_first_frame: the oldest frame shown has a slot of its own; False gives that slot to the newest group.
        empty: "zeros" or "skip", see the head of this file.
        settings: of `PackedWanCarrier`.

    Raises:
        ValueError: a network without history embeddings, the pyramid pipeline, unknown settings.

    Example:
        >>> carrier = HeliosCarrier(pipe, history_sizes=(32, 4, 1))                          # doctest: +SKIP
        >>> carrier.condition("a red ball", guidance_scale=5.0)                              # doctest: +SKIP
        >>> noise = FrameNoise(torch.tensor([0]), carrier.latent_shape(384, 640))            # doctest: +SKIP
        >>> video = generate(carrier, carrier.schedule(), carrier.sampler(), noise, memory=carrier.memory())
        ... # doctest: +SKIP
    """

    name: ClassVar[str] = "helios"
    model_classes: ClassVar[tuple[str, ...]] = ("HeliosTransformer3DModel",)
    pipeline_classes: ClassVar[tuple[str, ...]] = ("HeliosPipeline", "HeliosPyramidPipeline")
    preset: ClassVar[str] = "helios"
    needs_ftfy: ClassVar[bool] = True
    default_size = (384, 640)

    def __init__(
        self,
        pipe_or_model: Any,
        *,
        history_sizes: Sequence[int] = (16, 2, 1),
        num_latent_frames_per_chunk: int = 9,
        keep_first_frame: bool = True,
        empty: Literal["zeros", "skip"] = "zeros",
        **settings: Any,
    ) -> None:
        super().__init__(pipe_or_model, **settings)
        if type(self.pipe).__name__ == "HeliosPyramidPipeline":
            raise ValueError(
                "HeliosPyramidPipeline denoises a chunk at growing sizes, which a window of frames cannot follow; "
                "load the base weights with HeliosPipeline"
            )
        if getattr(self.model, "patch_short", None) is None:
            raise ValueError(
                f"{type(self.model).__name__} has no history embeddings; Helios needs a HeliosTransformer3DModel with "
                "has_multi_term_memory_patch=True"
            )
        if empty not in ("zeros", "skip"):
            raise ValueError(f"empty={empty!r}; write 'zeros' or 'skip'")
        if num_latent_frames_per_chunk < 1:
            raise ValueError(f"num_latent_frames_per_chunk={num_latent_frames_per_chunk}; at least 1, usually 9")
        config = self.model.config
        one, height, width = config.patch_size
        self.patch = (one, height, width)
        self.kernels: tuple[Kernel, ...] = tuple((k * one, k * height, k * width) for k in (4, 2, 1))
        self.history_sizes = check_sizes(history_sizes, (0, 0, 1))
        self.keep_first_frame, self.empty, self.chunk = keep_first_frame, empty, num_latent_frames_per_chunk
        self.latent_channels = config.in_channels

    @property
    def _sizes(self) -> tuple[int, ...]:
        """Slots of the groups; without an anchor the newest has its slot too."""
        *older, newest = self.history_sizes
        return (*older, newest if self.keep_first_frame else newest + 1)

    # ---- how it is rolled out

    def default_schedule(self) -> tuple[str, dict[str, Any]]:
        return self.preset, {"frames": self.chunk}

    def _rule(self, sink: int) -> ReferenceRule:
        groups = [(size, kernel) for size, kernel in zip(self._sizes, self.kernels) if size]
        return ReferenceRule.packed(groups, sink=sink)

    def refer(self, schedule: WindowSchedule) -> WindowSchedule:
        return schedule.with_(references=self._rule(int(self.keep_first_frame)))

    def default_memory(self, **settings: Any) -> FrameMemory | None:
        """Raw frames in this carrier's history sizes."""
        if settings:
            return super().default_memory(**settings)
        return memory_for(self._rule(int(self.keep_first_frame)))

    def shift(self, frames: int, height: int | None, width: int | None) -> float:
        """As the pipeline, which names its levels itself, so that the scheduler's constant shift is not applied."""
        scheduler = getattr(self.pipe, "scheduler", None)
        if scheduler is None or not scheduler.config.get("use_dynamic_shifting"):
            return 1.0
        return super().shift(frames, height, width)

    # ---- a call

    def __call__(
        self, x: Tensor, levels: Tensor, frame_ids: Tensor, read: MemoryRead, actions: Tensor | None
    ) -> Tensor:
        self.check_actions(actions)
        self.check_call(x, levels, frame_ids)
        timestep = self.one_timestep(levels, x.shape[0], x.device)
        short, mid, long, window = self.slots(x, frame_ids, read)
        history: dict[str, Any] = {"indices_hidden_states": window[None]}
        for name, group in (("short", short), ("mid", mid), ("long", long)):
            if group is not None:
                history[f"latents_history_{name}"] = group.frames.to(self.dtype)
                history[f"indices_latents_history_{name}"] = group.indices[None]
        told = self.conditioning

        def predict(embeds: Tensor | None, extra: dict[str, Any]) -> Tensor:
            # caches of diffusers (`enable_cache`) keep the two calls of a step apart by these names
            with self.model.cache_context("cond" if embeds is told.embeds else "uncond"):
                out: Tensor = self.model(
                    hidden_states=x.to(self.dtype), timestep=timestep, encoder_hidden_states=embeds,
                    return_dict=False, **extra, **history,
                )[0]  # fmt: skip
            return out

        with self._key_scales():
            return told.guided(predict).to(x.dtype)

    @contextmanager
    def _key_scales(self) -> Iterator[None]:
        """The learned scales of history keys in the network's dtype for the time of a call.

        The class keeps them in float32 and multiplies keys with them, whose dtype attention then refuses in float16
        and bfloat16.
        """
        scales = [one for name, one in self.model.named_parameters() if name.endswith("history_key_scale")]
        before = [one.data for one in scales if one.device.type != "meta"]
        changed = [one for one in scales if one.device.type != "meta"]
        for one in changed:
            one.data = one.data.to(self.dtype)
        try:
            yield
        finally:
            for one, data in zip(changed, before):
                one.data = data

    def slots(
        self, x: Tensor, frame_ids: Tensor, read: MemoryRead
    ) -> tuple[Slots | None, Slots | None, Slots | None, Tensor]:
        """What the network sees beside x: short, mid and long history, and the window's positions [n].

        Raises:
            ValueError: frames after the window, or more than there are slots.
        """
        sizes, zeros = self._sizes, self.empty == "zeros"
        check_groups(read, sizes, self.kernels)
        beside, capacity = shown(read, x, frame_ids), sum(sizes)
        if beside.future.shape[2]:
            raise ValueError(
                f"the memory shows frames {beside.future_ids[0].tolist()} after the window; Helios goes forwards only"
            )
        first, anchor, past = 0, None, beside.past
        if self.keep_first_frame:
            first = 1
            anchor, past = anchored(beside.past, beside.past_ids, capacity, zeros=zeros)
        long, mid, newest = lay_out(past, sizes, first, at_end=True, zeros=zeros)
        window = torch.arange(x.shape[2], device=x.device) + first + capacity
        return Slots.cat((anchor, newest)), mid, long, window
