"""`mediaspec.enable(model, attention="light_transfer")`: a lossy attention policy on one model, in one line.

    handle = mediaspec.enable(model, attention="light_transfer", w_recent=508)
    model.generate(**inputs, max_new_tokens=200)     # half the layers keep a sink and a recent window
    print(handle.summary()["lazy_layers"], handle.summary()["kv_share"])
    handle.remove()                                  # bit for bit the model it was

It acts on everything that decodes through this library: `mediaspec.speculative`, `TextGenerationPipeline`, and plain
`model.generate`, which the handle sends through `speculative` without a drafter. Calls of the model itself
(`model(input_ids)`) and processes that hold other copies of it are not concerned.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from transformers import PreTrainedModel

from ..attention.register import AttentionPolicy, attach_policy, detach_policy, make_policy
from ..targets.causal_lm import CausalLMTarget
from .generate import speculative

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


def enable(model: PreTrainedModel, *, attention: str, **settings: Any) -> AttentionHandle:
    """Enables an attention policy on a model.

    Args:
        model: a causal language model of transformers that `CausalLMTarget` serves.
        attention: "light_transfer": the layers whose late queries look at the first and the most recent tokens only
            are found in every prefill and keep those alone (arXiv:2410.13846). Lossy: texts are no longer the
            model's own; the drafter "lazy" uses the same idea without loss.
        settings: of the policy, see `mediaspec.attention.selection.LightTransfer`: full_layers, w_sink, w_recent,
            w_last, judge, min_head_ratio, lazy_layers, margin, chunk.

    Returns:
        A handle with `summary()` and `remove()`.

    Raises:
        ValueError: a model that cannot be served, an unknown policy or setting with the nearest valid one, a value out
            of range, or a policy that is enabled already. TypeError: not a transformers model.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=4,
        ...                      num_attention_heads=2)
        >>> model = LlamaForCausalLM(config).eval()
        >>> with enable(model, attention="light_transfer", w_recent=8) as handle:
        ...     handle.summary()["guarantee"]
        'lossy'
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"enable takes a transformers model and got a {type(model).__name__}; of a pipeline pass its model: "
            f"enable(pipe.model, attention={attention!r})"
        )
    policy = make_policy(attention, settings)
    target = CausalLMTarget(model, 1)
    handle = AttentionHandle(model, policy)
    try:
        target.new_cache(1, 0)  # settings that do not fit the model are refused here rather than at the first text
    except ValueError:
        handle.remove()
        raise
    return handle
