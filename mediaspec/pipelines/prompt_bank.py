"""The text of every frame of a multi-prompt video, by denoising step and by layer.

    bank = PromptBank.from_timeline(pipe, [("a cat sleeps", 0, 23), ("a cat runs", 40, 63)])
    text = bank.embeddings(torch.arange(16, 32), step_fraction=0.2)          # [16, S, C]

A sampler asks `embeddings` for the frames it denoises and hands the result to the model. What a bare tensor cannot say
(other text in other layers, one text per frame in a transformer) is put into the model by `prompt_conditioning`:

    with install_prompt_bank(pipe, bank):
        pipe(prompt_embeds=bank.anchor, ...)

P prompts, N frames, S text positions, C width of the text features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .prompt_align import Fill
from .prompt_blend import PromptGate, blend_prompts
from .prompt_encoding import EncodedPrompts, check_align, encode_aligned, encode_each
from .prompt_fields import Organiser
from .timeline import Timeline, is_timeline_file

__all__ = ["Asked", "PromptBank"]


class Asked(NamedTuple):
    """The latest request of a sampler: frames and step fractions as lists, and the tensor it got."""

    frames: list[int]
    fractions: list[float]
    result: Tensor


class PromptBank:
    """Encoded prompts, when they hold, and where they mix.

    Args:
        prompts: text features [P, S, C], one row per segment of the timeline, or `EncodedPrompts`.
        timeline: whose segments they are.
        blend: "promptblend" or "linear" (transition frames mix), or "cut" (the prompt switches in the middle).
        gate: in which steps and layers transition frames mix; None: `PromptGate.unet()` for "promptblend" and
            everywhere for the others.

    Raises:
        ValueError: another number of prompts than segments, a wrong shape, or an unknown blend.
    """

    def __init__(
        self,
        prompts: Tensor | EncodedPrompts,
        timeline: Timeline,
        *,
        blend: str = "promptblend",
        gate: PromptGate | None = None,
    ) -> None:
        encoded = prompts if isinstance(prompts, EncodedPrompts) else EncodedPrompts(prompts, tuple(timeline.texts))
        count = len(timeline.segments)
        if encoded.embeds.ndim != 3 or encoded.embeds.shape[0] != count:
            raise ValueError(
                f"prompts have shape {tuple(encoded.embeds.shape)}, the timeline has {count} segments; give [{count}, "
                "positions, width]"
            )
        self.encoded = encoded
        self.timeline = timeline
        self.blend = blend
        self.gate = gate if gate is not None else PromptGate.unet() if blend == "promptblend" else PromptGate.always()
        self.settings: dict[str, Any] = {"blend": blend, "gate_steps": self.gate.steps, "gate_depth": self.gate.depth}
        self.first_open: int | None = self.gate.depth if isinstance(self.gate.depth, int) else None
        """Depth from which on layers always mix; "up" is resolved when the bank is installed in a model."""
        self.asked: Asked | None = None
        self._schedule = timeline.schedule(blend)

    @classmethod
    def from_timeline(
        cls,
        pipe: Any,
        timeline: Any,
        num_frames: int | None = None,
        *,
        blend: str | None = None,
        align: str | None = None,
        fill: Fill | None = None,
        gate: PromptGate | None = None,
        llm: Organiser | None = None,
    ) -> PromptBank:
        """Encodes the prompts of a timeline.

        Args:
            pipe: the pipeline whose text encoder reads them.
            timeline: `Timeline`, list of (text or fields, start, end), or the path of a YAML or JSON file.
            num_frames: length of the video; None: the timeline's own.
            blend: see `PromptBank`; None: what the file says, else "promptblend".
            align: "fields" or "none" (every prompt by itself); None: what the file says, else fields for "promptblend"
                on pipelines with cross-attention to one text encoder, none otherwise.
            fill: "cycle", "stretch" or "last", see `prompt_align.fill_tokens`; None: what the file says, else "cycle".
            gate: None: the default of the pipeline's kind of model.
            llm: callback that splits texts into fields, see `prompt_fields.organise`.

        Raises:
            ValueError: from the timeline, the fields or the encoder.
        """
        line = Timeline.of(timeline, num_frames)
        written: dict[str, Any] = Timeline.read_options(timeline) if is_timeline_file(timeline) else {}
        blend = written.get("blend", "promptblend") if blend is None else blend
        align = written.get("align") if align is None else align
        fill = written.get("fill", "cycle") if fill is None else fill
        if align is None:  # joint attention blends masses, which needs no alignment
            crosses = hasattr(pipe, "unet") or type(pipe).__name__.startswith("Wan")
            alike = blend == "promptblend" and crosses and getattr(pipe, "text_encoder_2", None) is None
            align = "fields" if alike and len(line.segments) > 1 else "none"
        check_align(align)
        encoded = (
            encode_aligned(pipe, line.prompts, fill, llm) if align == "fields" else encode_each(pipe, line.prompts)
        )
        if gate is None and blend == "promptblend" and not hasattr(pipe, "unet"):
            gate = PromptGate.transformer()
        bank = cls(encoded, line, blend=blend, gate=gate)
        bank.settings |= {"align": align, "fill": fill if align == "fields" else None}
        return bank

    def describe(self) -> dict[str, Any]:
        """JSON-ready: texts, schedule and settings; runs that share work must agree on it."""
        return {"texts": list(self.encoded.texts), "schedule": str(self._schedule), "settings": str(self.settings)}

    def __len__(self) -> int:
        return self.encoded.embeds.shape[0]

    @property
    def prompts(self) -> Tensor:
        """[P, S, C]."""
        return self.encoded.embeds

    @property
    def anchor(self) -> Tensor:
        """[1, S, C]: the first prompt. A classic pipeline gets it as `prompt_embeds`, and an installed bank replaces
        it by the text of every frame."""
        return self.prompts[:1]

    def plan(
        self, frames: Sequence[int], fractions: Sequence[float], depth: int | None = None
    ) -> tuple[list[int], list[float]]:
        """Per frame i and a, with a = 0 where the gate is closed.

        Args:
            frames: frame numbers of the video; those outside hold its first or last frame's prompt.
            fractions: step index / number of steps, one per frame.
            depth: layer, None where it is not known.
        """
        last = self.timeline.length - 1
        index, amount = [], []
        for frame, fraction in zip(frames, fractions, strict=True):
            i, a = self._schedule[min(max(int(frame), 0), last)]
            is_open = a == 0.0 or self.gate.is_open(fraction, depth, self.first_open)
            index.append(i)
            amount.append(a if is_open else 0.0)
        return index, amount

    def embeddings(self, frames: Tensor, step_fraction: float | Tensor, depth: int | None = None) -> Tensor:
        """Text features of frames at a denoising step.

        Args:
            frames: [N] int64 frame numbers of the video, on the CPU to spare a synchronisation.
            step_fraction: step index / number of steps, in 0..1; [N] where frames are at different steps (FIFO).
            depth: index of the cross-attention in the order of execution; None leaves the depth gate shut.

        Returns:
            [N, S, C] on the device and in the dtype of the prompts.

        Raises:
            ValueError: no frames, or shapes that do not fit.
        """
        numbers = torch.as_tensor(frames).flatten().tolist()
        if not numbers:
            raise ValueError("frames is empty; give the numbers of the frames that are denoised")
        fractions = torch.as_tensor(step_fraction, dtype=torch.float64).flatten().tolist()
        if len(fractions) == 1:
            fractions = fractions * len(numbers)
        if len(fractions) != len(numbers):
            raise ValueError(f"{len(fractions)} step fractions were given for {len(numbers)} frames; give one or all")
        result = blend_prompts(self.prompts, *self.plan(numbers, fractions, depth))
        if depth is None:
            self.asked = Asked(numbers, fractions, result)
        return result

    def to(self, *args: Any, **kwargs: Any) -> PromptBank:
        """The same bank with its tensors moved or cast, as `Tensor.to`."""
        embeds = self.encoded.embeds.to(*args, **kwargs)
        moved = [None if one is None else one.to(embeds.device) for one in (self.encoded.mask, self.encoded.pooled)]
        bank = PromptBank(
            EncodedPrompts(embeds, self.encoded.texts, *moved), self.timeline, blend=self.blend, gate=self.gate
        )
        bank.settings, bank.first_open = dict(self.settings), self.first_open
        return bank
