"""RIFLEx on diffusers' video transformers: Wan, CogVideoX (with rotary positions) and HunyuanVideo.

    handle = install_riflex(pipe)          # then ask the pipeline for more frames than the model was trained on
    handle.remove()

Wan and HunyuanVideo make their rotary tables in `model.rope`, CogVideoX gets them from its pipeline; forward hooks on
the one instance change the tables on their way. The length is that of each call.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..attention.riflex import INTRINSIC, periods, riflex_frequency, set_frequency

__all__ = ["RiflexHandle", "install_riflex"]


class RiflexHandle:
    """Installed RIFLEx; a context manager.

    Args:
        models: transformers that are hooked.
        k: component, from 1. share: part of a turn that the whole video may take.
    """

    def __init__(self, models: list[nn.Module], k: int, share: float) -> None:
        self.k, self.share = k, share
        self.calls = self.changed = 0
        self._handles = []
        for model in models:
            if type(model).__name__ == "CogVideoXTransformer3DModel":
                self._handles.append(model.register_forward_pre_hook(self._on_call, with_kwargs=True))
            else:
                self._handles.append(model.rope.register_forward_hook(self._on_rope(model)))  # type: ignore[union-attr,operator,arg-type]

    def remove(self) -> None:
        """Takes the hooks off; a second call does nothing."""
        while self._handles:
            self._handles.pop().remove()

    def summary(self) -> dict[str, Any]:
        """ "k", "share", "calls" of the model, and "changed": calls long enough to need the lower frequency."""
        return {"k": self.k, "share": self.share, "calls": self.calls, "changed": self.changed}

    def __enter__(self) -> RiflexHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _tables(self, tables: Any, frames: int, channels: int, base: float) -> Any:
        self.calls += 1
        trained = riflex_frequency(channels, self.k, 1, base, share=1.0)
        frequency = riflex_frequency(channels, self.k, frames, base, self.share)
        if frequency >= trained:
            return tables
        self.changed += 1
        return set_frequency(tables[0], tables[1], frames, self.k, frequency)

    def _on_rope(self, model: Any) -> Any:
        channels, base = _time_axis(model)

        def change(rope: Any, args: tuple[Any, ...], output: Any) -> Any:
            size = rope.patch_size[0] if hasattr(rope, "t_dim") else rope.patch_size_t
            return self._tables(output, args[0].shape[2] // size, channels, base)

        return change

    def _on_call(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tables = kwargs.get("image_rotary_emb")
        if tables is None:
            raise ValueError("CogVideoX was called without image_rotary_emb=...; RIFLEx changes those tables")
        hidden = args[0] if args else kwargs["hidden_states"]
        frames = -(-hidden.shape[1] // (model.config.patch_size_t or 1))
        channels, base = _time_axis(model)
        return args, {**kwargs, "image_rotary_emb": self._tables(tables, frames, channels, base)}


def install_riflex(pipe_or_model: Any, k: int | None = None, share: float = 0.9) -> RiflexHandle:
    """Lowers the intrinsic frequency of a model's rotary positions along time.

    Args:
        pipe_or_model: a Wan, CogVideoX or HunyuanVideo pipeline of diffusers, or its transformer.
        k: component, from 1; None: the published one of the model's class. See `attention.riflex.intrinsic_index`.
        share: part of a turn that the whole video may take.

    Returns:
        A handle with `summary()` and `remove()`.

    Raises:
        ValueError: another model, CogVideoX without rotary positions (2B), or a component that it has not.

    Example:
        >>> with install_riflex(pipe):  # doctest: +SKIP
        ...     video = pipe("a cat walks", num_frames=161).frames[0]
    """
    if isinstance(pipe_or_model, nn.Module):
        models = [pipe_or_model]
    else:
        found = [getattr(pipe_or_model, name, None) for name in ("transformer", "transformer_2")]
        models = [model for model in found if isinstance(model, nn.Module)]
    names = {type(model).__name__ for model in models}
    if not models or not names <= set(INTRINSIC):
        raise ValueError(
            f"RIFLEx cannot be installed in {', '.join(sorted(names)) or type(pipe_or_model).__name__}; it can in "
            f"{', '.join(INTRINSIC)}, or in a pipeline with one of them"
        )
    for model in models:
        channels, base = _time_axis(model)
        chosen = INTRINSIC[type(model).__name__] if k is None else k
        if not 1 <= chosen <= channels // 2:
            raise ValueError(
                f"k={chosen}; this {type(model).__name__} has components 1 to {channels // 2} along time, with "
                f"periods of {', '.join(map(str, periods(channels, base)))} latent frames"
            )
    if not 0 < share <= 1:
        raise ValueError(f"share={share}; allowed is above 0 up to 1, the part of a turn that the video may take")
    return RiflexHandle(models, chosen, share)


def _time_axis(model: Any) -> tuple[int, float]:
    """Rotary channels that belong to time, and the base."""
    name = type(model).__name__
    if name == "WanTransformer3DModel":
        return model.rope.t_dim, 10000.0
    if name == "HunyuanVideoTransformer3DModel":
        return model.rope.rope_dim[0], model.rope.theta
    if not model.config.use_rotary_positional_embeddings:
        raise ValueError("this CogVideoX model adds sinusoidal positions (2B); RIFLEx needs rotary ones (5B, 1.5)")
    return model.config.attention_head_dim // 4, 10000.0
