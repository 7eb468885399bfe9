"""Puts a `PromptBank` into a model: other text in other frames, steps and layers.

    with install_prompt_bank(pipe, bank, num_inference_steps=50) as handle:
        pipe(prompt_embeds=bank.anchor, negative_prompt_embeds=..., num_inference_steps=50)

Rows of the text that equal the bank's anchor, or what a sampler last got from `bank.embeddings`, are the conditional
ones; they are replaced, all others (the negative prompt) stay bit for bit. Rows are compared on the device, so the
loop is not synchronised. Everything sits in forward hooks of the one instance and goes away with `remove()`.

| model | route |
|---|---|
| UNetMotionModel | text per frame; early and late text side by side, each cross-attention takes its half |
| WanTransformer3DModel | projected text per frame, frames with equal text in one call (`prompt_cross`) |
| CogVideoX, HunyuanVideo | one text block per prompt, masses blended by log weights (`prompt_joint`) |
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from .keywords import nearest
from .prompt_bank import PromptBank

__all__ = ["PromptHandle", "StepClock", "install_prompt_bank", "matching_rows"]

FRAMES_PER_LATENT = {
    "UNetMotionModel": 1,
    "WanTransformer3DModel": 4,
    "CogVideoXTransformer3DModel": 4,
    "HunyuanVideoTransformer3DModel": 4,
}
ROWS = ("match", "last_half", "all")


class StepClock:
    """Which step a denoiser is at, by the timesteps it is called with: they fall within a run.

    Args:
        num_steps: steps of a run; None: the fraction is taken from the timestep itself, which is right for evenly
            spaced timesteps only.
        train_timesteps: the timestep of pure noise.
    """

    def __init__(self, num_steps: int | None, train_timesteps: float = 1000.0) -> None:
        if num_steps is not None and num_steps < 1:
            raise ValueError(f"num_inference_steps={num_steps}; write at least 1")
        self.num_steps = num_steps
        self.train_timesteps = train_timesteps
        self._last: float | None = None
        self._index = 0

    def fraction(self, timestep: Tensor | float) -> float:
        """Step index / number of steps of a call. One host synchronisation, as timesteps live on the device."""
        value = float(timestep.max()) if isinstance(timestep, Tensor) else float(timestep)
        if self._last is None or value > self._last:
            self._index = 0
        elif value < self._last:
            self._index += 1
        self._last = value
        if self.num_steps is None:
            return min(max(1 - value / self.train_timesteps, 0.0), 1.0)
        return min(self._index / self.num_steps, 1.0)


class PromptHandle:
    """An installed bank. Made by `install_prompt_bank`; as a context manager it is removed at the end.

    Args:
        bank: whose text.
        modules: names of the attention modules that read it.
        rows: see `install_prompt_bank`.
        clock: for calls that no sampler announced through `bank.embeddings`.
        frames_per_latent: video frames per latent frame.
    """

    def __init__(self, bank: PromptBank, rows: str, clock: StepClock, frames_per_latent: int) -> None:
        self.bank = bank
        self.rows = rows
        self.clock = clock
        self.frames_per_latent = frames_per_latent
        self.modules: list[str] = []
        self.calls = 0
        self._undo: list[Callable[[], None]] = []
        self._matched: Tensor | None = None

    def add(self, undo: Callable[[], None]) -> None:
        """Registers what `remove` has to do, last added first."""
        self._undo.append(undo)

    def moment(self, num_frames: int, timestep: Any) -> tuple[list[int], list[float]]:
        """Frame numbers and step fractions of a call with `num_frames` latent frames."""
        asked = self.bank.asked
        if asked is not None and len(asked.frames) == num_frames:
            return asked.frames, asked.fractions
        return [n * self.frames_per_latent for n in range(num_frames)], [self.clock.fraction(timestep)] * num_frames

    def conditional(self, text: Tensor, num_frames: int) -> Tensor:
        """Which rows of a text [R, S, C] are the bank's: [R] bool on its device."""
        count = text.shape[0]
        self.calls += 1
        if self.rows == "all":
            found = torch.ones(count, dtype=torch.bool, device=text.device)
        elif self.rows == "last_half":
            found = torch.arange(count, device=text.device) >= count // 2
        else:
            found = matching_rows(text, self.bank.anchor)
            asked = self.bank.asked
            if asked is not None and count % len(asked.frames) == 0:
                found = found | matching_rows(text, asked.result)
        hits = found.sum()
        self._matched = hits if self._matched is None else self._matched + hits
        return found

    def summary(self) -> dict[str, Any]:
        """ "modules" (how many cross-attentions), "calls" of the model, "rows" of text replaced, "settings"."""
        rows = 0 if self._matched is None else int(self._matched)
        return {"modules": len(self.modules), "calls": self.calls, "rows": rows, "settings": dict(self.bank.settings)}

    def remove(self) -> None:
        """Gives the model back as it was; a second call does nothing.

        Raises:
            RuntimeError: the model was called but no row of its text was the bank's, so the prompts had no effect.
        """
        undo, self._undo = self._undo, []
        for one in reversed(undo):
            one()
        if undo and self.calls and not self.summary()["rows"]:
            raise RuntimeError(
                f"the model was called {self.calls} times and never with the bank's text; pass "
                "prompt_embeds=bank.anchor to the pipeline, or write rows='last_half' (guidance) or rows='all'"
            )

    def __enter__(self) -> PromptHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.calls = 0  # the error that is on its way says more than an unused bank
        self.remove()


def matching_rows(text: Tensor, wanted: Tensor) -> Tensor:
    """Which rows of `text` [R, S, C] equal `wanted` [W, S, C], tiled: [R] bool, False where sizes differ."""
    if text.shape[1:] != wanted.shape[1:] or text.shape[0] % wanted.shape[0]:
        return torch.zeros(text.shape[0], dtype=torch.bool, device=text.device)
    same = text.unflatten(0, (-1, wanted.shape[0])) == wanted.to(text.device, text.dtype)
    return same.flatten(0, 1).flatten(1).all(1)


def call_arguments(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a module's call by name."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    return {**dict(zip(names, args)), **kwargs}


def install_prompt_bank(
    pipe_or_model: Any,
    bank: PromptBank,
    *,
    num_inference_steps: int | None = None,
    frames_per_latent: int | None = None,
    rows: str = "match",
) -> PromptHandle:
    """Installs a bank in a denoiser.

    Args:
        pipe_or_model: a pipeline (its `unet` or `transformer` is taken) or the denoiser itself: UNetMotionModel,
            WanTransformer3DModel, CogVideoXTransformer3DModel or HunyuanVideoTransformer3DModel.
        bank: its prompts must be encoded by the same pipeline.
        num_inference_steps: of the pipeline call, so that steps are counted exactly; a sampler that calls
            `bank.embeddings` itself needs none.
        frames_per_latent: None: the pipeline's own, or 4 for the transformers and 1 for UNetMotionModel.
        rows: which rows of the text are replaced: "match", "last_half" (diffusers' order under guidance) or "all".

    Returns:
        A handle with `summary()` and `remove()`.

    Raises:
        ValueError: another kind of model, a bank that is installed already, or a gate depth beyond the model.
    """
    if rows not in ROWS:
        raise ValueError(f"rows={rows!r} is not known; {nearest(rows, ROWS)}")
    if isinstance(pipe_or_model, torch.nn.Module):
        models = [pipe_or_model]
    else:
        parts = [getattr(pipe_or_model, part, None) for part in ("unet", "transformer", "transformer_2")]
        models = [part for part in parts if part is not None]  # Wan 2.2 has one transformer per half of the schedule
        if frames_per_latent is None:
            frames_per_latent = getattr(pipe_or_model, "vae_scale_factor_temporal", None)
    for model in models or [pipe_or_model]:
        name = type(model).__name__
        if name not in FRAMES_PER_LATENT:
            raise ValueError(
                f"a prompt bank cannot be installed in {name}; it can in {', '.join(FRAMES_PER_LATENT)}, or in a "
                "pipeline with one of them"
            )
        if getattr(model, "_mediaspec_prompt_bank", None) is not None:
            raise ValueError(f"this {name} has a prompt bank already; remove it first (its handle has remove())")
    name = type(models[0]).__name__
    if frames_per_latent is None or name == "UNetMotionModel":
        frames_per_latent = FRAMES_PER_LATENT[name]
    handle = PromptHandle(bank, rows, StepClock(num_inference_steps), frames_per_latent)
    bank.asked = None  # of an earlier run
    try:
        for model in models:
            _install(model, handle)
    except BaseException:
        handle.calls = 0
        handle.remove()
        raise
    return handle


def _install(model: Any, handle: PromptHandle) -> None:
    model._mediaspec_prompt_bank = handle
    handle.add(lambda: delattr(model, "_mediaspec_prompt_bank"))
    name = type(model).__name__
    if name == "UNetMotionModel":
        _install_unet(model, handle)
    elif name == "WanTransformer3DModel":
        from .prompt_cross import install_wan

        install_wan(model, handle)
    else:
        from .prompt_joint import install_joint

        install_joint(model, handle)


def unet_cross_attentions(unet: Any) -> tuple[list[tuple[str, torch.nn.Module]], int]:
    """Text cross-attentions of a UNetMotionModel in the order of execution, and the depth of the first up block."""
    found: list[tuple[str, torch.nn.Module]] = []
    first_up = 0
    blocks = [*((f"down_blocks.{i}", b) for i, b in enumerate(unet.down_blocks)), ("mid_block", unet.mid_block)]
    blocks += [(f"up_blocks.{i}", b) for i, b in enumerate(unet.up_blocks)]
    for path, block in blocks:
        if path == "up_blocks.0":
            first_up = len(found)
        # below `attentions` only: motion modules have an attn2 too, without text
        for name, module in getattr(block, "attentions", torch.nn.Module()).named_modules():
            if name.endswith(".attn2") or name == "attn2":
                found.append((f"{path}.attentions.{name}", module))
    return found, first_up


def _install_unet(unet: Any, handle: PromptHandle) -> None:
    bank = handle.bank
    attentions, first_up = unet_cross_attentions(unet)
    first = first_up if bank.gate.depth == "up" else bank.gate.depth
    if isinstance(first, int) and first > len(attentions):
        raise ValueError(f"the gate mixes from depth {first} on, the model has {len(attentions)} cross-attentions")
    before, bank.first_open = bank.first_open, first
    handle.add(lambda: setattr(bank, "first_open", before))
    handle.modules = [name for name, _ in attentions]

    def replace(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = call_arguments(module, args, kwargs)
        sample, text = given["sample"], given["encoder_hidden_states"]
        count = sample.shape[2]
        if text.shape[0] != sample.shape[0] * count:
            raise ValueError(
                f"the text has {text.shape[0]} rows for {sample.shape[0]} x {count} frames; repeat it per frame, "
                f"[{sample.shape[0] * count}, {text.shape[1]}, {text.shape[2]}]"
            )
        frames, fractions = handle.moment(count, given["timestep"])
        numbers, steps = torch.tensor(frames), torch.tensor(fractions, dtype=torch.float64)
        mine = handle.conditional(text, count)[:, None, None]
        halves = []
        for depth in (0,) if first is None else (-1, first):
            new = bank.embeddings(numbers, steps, depth).to(text.device, text.dtype)
            halves.append(torch.where(mine, new.repeat(sample.shape[0], 1, 1), text))
        return (), {**given, "encoder_hidden_states": torch.cat(halves, 1)}

    def half(late: bool) -> Callable[..., Any]:
        def take(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            text = kwargs.get("encoder_hidden_states", args[1] if len(args) > 1 else None)
            if text is None:
                return None
            whole, *images = text if isinstance(text, tuple) else (text,)  # IP-Adapter adds its images
            mid = whole.shape[1] // 2
            part: Any = whole[:, mid:] if late else whole[:, :mid]
            part = (part, *images) if images else part
            if len(args) > 1:
                return (args[0], part, *args[2:]), kwargs
            return args, {**kwargs, "encoder_hidden_states": part}

        return take

    handle.add(unet.register_forward_pre_hook(replace, with_kwargs=True).remove)
    if first is not None:
        for depth, (_, module) in enumerate(attentions):
            handle.add(module.register_forward_pre_hook(half(depth >= first), with_kwargs=True).remove)
