"""Per-frame timesteps: every frame of one model call may stand at its own noise level.

`UNetMotionModel` and `UNet3DConditionModel` spread one timestep over all frames. `frame_times` hooks an instance so
that it also takes a timestep of shape [B, N]; its res blocks then get one time embedding per frame. Models of the Wan
kind take one timestep per token, which `token_timesteps` makes from one per frame. Gradients flow through both.
B rows of the batch (guidance halves included), N frames, D channels of the time embedding.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

__all__ = ["FrameTimes", "frame_times", "token_timesteps"]


class FrameTimes:
    """What `frame_times` returns: the hooks on one model, a context manager.

    Args:
        model: a `UNetMotionModel` or `UNet3DConditionModel`, or another model with `time_proj`, `time_embedding` and
            `ResnetBlock2D`s that see [B*N, ...].
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._times: Tensor | None = None
        self._embedding: Tensor | None = None
        self._added: Tensor | None = None
        blocks = [module for module in model.modules() if isinstance(module, ResnetBlock2D)]
        self._handles = [
            model.register_forward_pre_hook(self._take, with_kwargs=True),
            model.register_forward_hook(self._forget, always_call=True),
            *(block.register_forward_pre_hook(self._give, with_kwargs=True) for block in blocks),
        ]
        added = getattr(model, "add_embedding", None)
        if added is not None:
            self._handles.append(added.register_forward_hook(self._note_added))

    def remove(self) -> None:
        """Takes the hooks off; the model is bit-equal to before. A second call does nothing."""
        while self._handles:
            self._handles.pop().remove()

    def __enter__(self) -> FrameTimes:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _take(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keeps a [B, N] timestep and passes [B] on, which the model turns into an embedding that nobody reads."""
        self._forget()
        sample = args[0] if args else kwargs["sample"]
        times = args[1] if len(args) > 1 else kwargs.get("timestep")
        if not isinstance(times, Tensor) or times.ndim < 2:
            return None
        rows, frames = sample.shape[0], sample.shape[2]
        if times.ndim != 2 or times.shape[0] not in (1, rows) or times.shape[1] != frames:
            raise ValueError(
                f"timestep has shape {tuple(times.shape)} for a sample of {rows} rows and {frames} frames; give "
                f"[{rows}, {frames}], [1, {frames}] or one timestep per row"
            )
        if torch.is_grad_enabled() and getattr(model, "is_gradient_checkpointing", False):
            raise ValueError(
                "per-frame timesteps and gradient checkpointing exclude each other: the recomputed blocks run after "
                "the call whose timesteps they need; write model.disable_gradient_checkpointing()"
            )
        condition = kwargs.get("timestep_cond", args[3] if len(args) > 3 else None)
        if condition is not None:
            raise ValueError("timestep_cond cannot be combined with per-frame timesteps; leave it out")
        self._times = times.to(sample.device).expand(rows, frames)
        if len(args) > 1:
            args = (args[0], self._times[:, 0], *args[2:])
        else:
            kwargs = {**kwargs, "timestep": self._times[:, 0]}
        return args, kwargs

    def _give(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hands a res block the embeddings of its frames."""
        if self._times is None:
            return None
        given = kwargs["temb"] if "temb" in kwargs else args[1]
        if self._embedding is None:  # not in `_take`: under offloading the weights are on the device only now
            self._embedding = self._embed(self._times, given)
        if given.shape != self._embedding.shape:
            raise ValueError(
                f"a res block got {given.shape[0]} frames where the call has {self._embedding.shape[0]}; per-frame "
                "timesteps do not work with enable_free_noise_split_inference()"
            )
        if "temb" in kwargs:
            return args, {**kwargs, "temb": self._embedding}
        return (args[0], self._embedding, *args[2:]), kwargs

    def _embed(self, times: Tensor, given: Tensor) -> Tensor:
        """[B, N] timesteps to [B*N, D], in the row-major order of the model's own frames."""
        model: Any = self.model
        embedding: Tensor = model.time_embedding(model.time_proj(times.flatten()).to(given.dtype))
        if self._added is not None:
            embedding = embedding + self._added.repeat_interleave(times.shape[1], dim=0)
        return embedding

    def _note_added(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self._added = output

    def _forget(self, *_: Any) -> None:
        self._times = self._embedding = self._added = None


def frame_times(model: nn.Module) -> FrameTimes:
    """Lets a UNet with frames take one timestep per frame, until `remove()`.

    Args:
        model: `UNetMotionModel` or `UNet3DConditionModel`; the instance is hooked, its class stays as it is. Calls
            with one timestep, or one per row, stay bit-equal.

    Returns:
        The handle; also a context manager.

    Raises:
        ValueError: the model is of another kind; or, at a call, a timestep that is neither [B], [1, N] nor [B, N].

    Example:
        >>> with frame_times(pipe.unet):  # doctest: +SKIP
        ...     noise = pipe.unet(latents, times, encoder_hidden_states=text).sample  # times [B, N]
    """
    if not (hasattr(model, "time_proj") and hasattr(model, "time_embedding")):
        raise ValueError(
            f"{type(model).__name__} has no time_proj and time_embedding; per-frame timesteps are for UNetMotionModel "
            "and UNet3DConditionModel, and for Wan models through token_timesteps"
        )
    return FrameTimes(model)


def token_timesteps(times: Tensor, height: int, width: int, patch_size: tuple[int, int, int] = (1, 2, 2)) -> Tensor:
    """One timestep per frame as one per token, for `WanTransformer3DModel`.

    Args:
        times: [B, N] one per latent frame.
        height: latent rows. width: latent columns.
        patch_size: the model's (frames, rows, columns) per token. A token over several frames takes the noisiest.

    Returns:
        [B, L] with L = N/p_t * height/p_h * width/p_w, frame by frame.

    Raises:
        ValueError: a size that the patch does not divide.

    Example:
        >>> token_timesteps(torch.tensor([[0, 500]]), 4, 4).tolist()
        [[0, 0, 0, 0, 500, 500, 500, 500]]
    """
    frames, rows, columns = patch_size
    if times.shape[1] % frames or height % rows or width % columns:
        raise ValueError(
            f"latents of {times.shape[1]} x {height} x {width} do not divide into patches of {patch_size}"
        )
    times = times.unflatten(1, (-1, frames)).amax(2)
    return times.repeat_interleave((height // rows) * (width // columns), dim=1)
