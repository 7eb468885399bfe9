"""`mediaspec.enable(model, attention=...)`: another attention for one model or pipeline, in one line.

    handle = mediaspec.enable(model, attention="light_transfer", w_recent=508)
    model.generate(**inputs, max_new_tokens=200)     # half the layers keep a sink and a recent window
    print(handle.summary()["lazy_layers"], handle.summary()["kv_share"])
    handle.remove()                                  # bit for bit the model it was

It acts on everything that decodes through this library: `mediaspec.speculative`, `TextGenerationPipeline`, and plain
`model.generate`, which the handle sends through `speculative` without a drafter. Calls of the model itself
(`model(input_ids)`) and processes that hold other copies of it are not concerned.

Video models of diffusers take `attention="tiara"` or `attention=TiARA(...)`, see `mediaspec.attention.tiara`:

    handle = mediaspec.enable(pipe, attention=TiARA.safe())
    frames = pipe("a taxi moves left", num_frames=32).frames[0]
    print(handle.summary()["mean_delta"], handle.summary()["own_frame_mass"])
    handle.remove()
"""

from __future__ import annotations

import difflib
import sys
from dataclasses import fields
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from transformers import PreTrainedModel

from ..attention.register import AttentionPolicy, attach_policy, detach_policy, make_policy
from ..attention.tiara import TiARA
from ..targets.causal_lm import CausalLMTarget
from .generate import speculative

if TYPE_CHECKING:
    from .video_attention import TiaraHandle

__all__ = ["AttentionHandle", "enable"]


class AttentionHandle:
    """An enabled policy. Made by `enable`; as a context manager it is removed at the end.

    Args:
        model, policy: whose and which.
    """

    def __init__(self, model: PreTrainedModel, policy: AttentionPolicy) -> None:
        attach_policy(model, policy)
        self.model: PreTrainedModel | None = model
        self.policy = policy
        self._before = model.__dict__.get("generate")
        model.__dict__["generate"] = _Generate(model)

    def summary(self) -> dict[str, Any]:
        """What is enabled and what the latest run did.

        Returns:
            "attention", "guarantee" ("lossy"), "settings", "enabled", "runs"; and of the latest run, None before it:
            "lazy_layers", "ratios" (share of attention on what a lazy layer keeps, by layer), "errors" (change of the
            layer's output without the rest), "kv_bytes", "full_kv_bytes", "kv_share" (their quotient),
            "prefill_peak_share" (the most that was held in the prefill, of full), "prompt_lengths".
        """
        return {**self.policy.summary(), "enabled": self.model is not None}

    def remove(self) -> None:
        """Gives the model back as it was; a second call does nothing."""
        if self.model is None:
            return
        detach_policy(self.model, self.policy)
        if self._before is None:
            self.model.__dict__.pop("generate", None)
        else:
            self.model.__dict__["generate"] = self._before
        self.model = None

    def __enter__(self) -> AttentionHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


class _Generate:
    """`model.generate` of one instance on this library's loop; an object, so that a deep copy runs the copy."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(
        self, *args: Any, custom_generate: Any = None, streamer: Any = None, assistant_model: Any = None, **more: Any
    ) -> Any:
        kind: Any = type(self.model)
        if custom_generate is not None:
            return kind.generate(
                self.model,
                *args,
                custom_generate=custom_generate,
                streamer=streamer,
                assistant_model=assistant_model,
                **more,
            )
        if assistant_model is not None:
            more["drafter"] = assistant_model
        elif "drafter" not in more:
            more["drafter"] = "none"
        if streamer is not None:
            more["token_stream"] = streamer
        return kind.generate(self.model, *args, custom_generate=speculative, **more)


@overload
def enable(target: PreTrainedModel, *, attention: Literal["light_transfer"], **settings: Any) -> AttentionHandle: ...
@overload
def enable(target: Any, *, attention: TiARA | str, **settings: Any) -> AttentionHandle | TiaraHandle: ...
def enable(target: Any, *, attention: TiARA | str, **settings: Any) -> AttentionHandle | TiaraHandle:
    """Enables another attention.

    Args:
        target: for "light_transfer" a causal language model of transformers that `CausalLMTarget` serves; for TiARA a
            video pipeline of diffusers or its denoiser. Enable FreeNoise, fused projections and offloading before or
            after, in any order.
        attention: "light_transfer": the layers whose late queries look at the first and the most recent tokens only
            are found in every prefill and keep those alone (arXiv:2410.13846). Lossy: texts are no longer the
            model's own; the drafter "lazy" uses the same idea without loss. "tiara" or a `TiARA`: frames lean less on
            themselves where the clip is calm (arXiv:2412.17254).
        settings: of light_transfer, see `mediaspec.attention.selection.LightTransfer`: full_layers, w_sink, w_recent,
            w_last, judge, min_head_ratio, lazy_layers, margin, chunk. Of "tiara" the fields of
            `mediaspec.attention.tiara.TiARA`; a `TiARA` has them already. With either, measure=True also takes times
            (and waits for the device at every call).

    Returns:
        A handle with `summary()` and `remove()`.

    Raises:
        ValueError: a model that cannot be served, an unknown policy or setting with the nearest valid one, a value out
            of range, or one that is enabled already. TypeError: neither kind of model.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=4,
        ...                      num_attention_heads=2)
        >>> model = LlamaForCausalLM(config).eval()
        >>> with enable(model, attention="light_transfer", w_recent=8) as handle:
        ...     handle.summary()["guarantee"]
        'lossy'
    """
    if isinstance(attention, TiARA) or attention == "tiara":
        return _enable_tiara(target, attention, settings)
    if not isinstance(target, PreTrainedModel):
        if _is_video(target):
            raise ValueError(
                f"no attention named {attention!r} for a {type(target).__name__}; write 'tiara' or give a "
                "mediaspec.attention.tiara.TiARA"
            )
        raise TypeError(
            f"enable takes a transformers model and got a {type(target).__name__}; of a pipeline pass its model: "
            f"enable(pipe.model, attention={attention!r})"
        )
    policy = make_policy(attention, settings)
    serves = CausalLMTarget(target, 1)
    handle = AttentionHandle(target, policy)
    try:
        serves.new_cache(1, 0)  # settings that do not fit the model are refused here rather than at the first text
    except ValueError:
        handle.remove()
        raise
    return handle


def _enable_tiara(target: Any, attention: TiARA | str, settings: dict[str, Any]) -> TiaraHandle:
    if isinstance(target, PreTrainedModel) or not _is_video(target):
        raise TypeError(
            f"attention='tiara' is for video models of diffusers and got a {type(target).__name__}; pass a pipeline "
            "with a unet or transformer, or such a model"
        )
    from .video_attention import TiaraHandle  # imports diffusers, which language models do without

    measure = settings.pop("measure", False)
    if isinstance(attention, TiARA):
        if settings:
            raise ValueError(
                f"settings {', '.join(settings)} beside a TiARA object; write them into it: "
                f"TiARA({next(iter(settings))}=...)"
            )
        return TiaraHandle(target, attention, measure)
    known = [one.name for one in fields(TiARA)]
    for setting in settings:
        if setting not in known:
            near = difflib.get_close_matches(setting, known, 1, cutoff=0.0)[0]
            raise ValueError(f"tiara has no setting {setting!r}; did you mean {near!r}? It takes {', '.join(known)}")
    return TiaraHandle(target, TiARA(**settings), measure)


def _is_video(target: Any) -> bool:
    """Whether it comes from diffusers: a pipeline or a model, compiled ones too. Does not import diffusers."""
    diffusers = sys.modules.get("diffusers")
    if diffusers is None:
        return False
    target = getattr(target, "_orig_mod", target)
    return isinstance(target, (diffusers.DiffusionPipeline, diffusers.ModelMixin)) or (
        not isinstance(target, torch.nn.Module)
        and hasattr(target, "components")  # modular pipelines
        and (hasattr(target, "unet") or hasattr(target, "transformer"))
    )
