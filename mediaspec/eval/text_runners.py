"""What `mediaspec bench text` times: the pipeline with one configuration, and transformers' own ways of decoding.

Peers run on the same weights in the same process, in modules of their own: nothing that the pipeline prepares in its
model reaches them.

    hf_generate        plain `generate`
    hf_prompt_lookup   `generate(prompt_lookup_num_tokens=...)`
    hf_assisted        `generate(assistant_model=...)`

Letters: R rows, C prompt positions.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .text_speed import TextRun, TextRunner
from .text_tasks import TextPrompt

__all__ = ["PEERS", "PrefillWatch", "Sampling", "encode", "first_layers", "own_modules", "peer_runner", "text_runner"]

PEERS = {
    "hf_generate": {},
    "hf_prompt_lookup": {"prompt_lookup_num_tokens": 10},
    "hf_assisted": {},
}
"""Names of peers, and what `generate` is given; other settings of it may be added."""


@dataclass(frozen=True)
class Sampling:
    """Args: max_new_tokens; temperature, 0 is greedy; top_k, 0 is off; top_p, 1 is off."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


class PrefillWatch:
    """Notes when a model has read C prompt positions, and counts its passes, between entering and leaving.

    Args:
        model: called with `input_ids`.
        positions: C, of the longest row.

    Attributes: `calls`; `ended`, `time.perf_counter()` at the end of the pass that read the last of C positions, None
    before.
    """

    def __init__(self, model: nn.Module, positions: int) -> None:
        self.model, self.positions = model, positions
        self.calls = 0
        self.ended: float | None = None
        self._read = 0

    def __enter__(self) -> PrefillWatch:
        self._hook = self.model.register_forward_hook(self._after, with_kwargs=True)
        return self

    def __exit__(self, *exc: object) -> None:
        self._hook.remove()

    def _after(self, module: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any], output: Any) -> None:
        self.calls += 1
        if self.ended is None:
            ids: Tensor = named["input_ids"] if "input_ids" in named else given[0]
            self._read += ids.shape[1]
            if self._read >= self.positions:
                if ids.device.type == "cuda":
                    torch.cuda.synchronize(ids.device)
                self.ended = time.perf_counter()


def encode(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[TextPrompt]) -> list[list[int]]:
    """Ids of every prompt: as a chat, or as it is where the tokenizer has no template."""
    rows: list[list[int]] = []
    for prompt in prompts:
        if tokenizer.chat_template is None:
            rows.append(list(tokenizer(prompt.prompt)["input_ids"]))
        else:
            encoded: Any = tokenizer.apply_chat_template(prompt.chat, add_generation_prompt=True, return_dict=True)
            rows.append(list(encoded["input_ids"]))
    return rows


def text_runner(
    pipe: Any, label: str, names: Mapping[str, str], keywords: Mapping[str, Any], sampling: Sampling
) -> TextRunner:
    """Times calls of a `TextGenerationPipeline`, from chats to texts.

    Args:
        pipe: the pipeline.
        label: row label.
        names: "rule", "policy" and "drafter" of the row.
        keywords: rule, drafter, policy, num_draft_tokens, ... of the call.
        sampling: of the call.
    """

    def run(prompts: Sequence[TextPrompt], seeds: Sequence[int]) -> TextRun:
        templated = pipe.tokenizer.chat_template is not None
        given = [prompt.chat if templated else prompt.prompt for prompt in prompts]
        start = time.perf_counter()
        out = pipe(
            given,
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seeds=list(seeds),
            **keywords,
        )
        seconds = time.perf_counter() - start
        stats = out.stats
        split = {name: value for name, value in stats["seconds"].items() if name != "total"}
        # as the pipeline tells it: a hook on the model, as the peers get, would keep it from its prepared decoder
        prefill = split.get("encode", 0.0) + split.get("prefill", 0.0)
        drift = sum(stats["drift"]) / max(len(stats["drift"]), 1)
        settings = {**stats["settings"], **({"arms": stats["arms"]} if stats.get("arms") else {})}
        return TextRun(
            seconds, prefill, out.tokens, stats["target_calls"], stats["tokens_per_call"], stats["guarantee"], drift,
            split, settings,
        )  # fmt: skip

    return TextRunner(label, run, names)


def peer_runner(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    sampling: Sampling,
    settings: Mapping[str, Any] | None = None,
    assistant: PreTrainedModel | None = None,
    label: str | None = None,
) -> TextRunner:
    """Times `model.generate`, from chats to texts.

    When sampling it draws from torch's generator: texts of the same law, and not the same texts.

    Args:
        model: see `own_modules`.
        tokenizer: its tokenizer.
        name: one of `PEERS`.
        sampling: of the call.
        settings: more keywords of `generate`.
        assistant: of hf_assisted.
        label: row label; None is the name.
    """
    keywords: dict[str, Any] = {**PEERS[name], **(settings or {})}
    if name == "hf_assisted":
        keywords["assistant_model"] = assistant
    stops = _stop_ids(model, tokenizer)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (stops or [0])[0]
    law: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        law = {
            "do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p
        }  # fmt: skip

    @torch.no_grad()
    def run(prompts: Sequence[TextPrompt], seeds: Sequence[int]) -> TextRun:
        start = time.perf_counter()
        rows = encode(tokenizer, prompts)
        longest = max(map(len, rows))
        ids = torch.tensor([[padding] * (longest - len(row)) + row for row in rows], device=model.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=model.device)
        torch.manual_seed(seeds[0])
        with PrefillWatch(model, longest) as watch:
            out: Any = model.generate(  # type: ignore[operator]
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=sampling.max_new_tokens,
                eos_token_id=stops or None,
                pad_token_id=padding,
                **law,
                **keywords,
            )
        tokens = [_until_stop(row, stops) for row in out[:, longest:].tolist()]
        for row in tokens:
            tokenizer.decode(row, skip_special_tokens=True)
        seconds = time.perf_counter() - start
        assert watch.ended is not None
        settings_used = {"rule": name, **{k: v for k, v in keywords.items() if k != "assistant_model"}}
        if assistant is not None:
            settings_used["assistant_layers"] = assistant.config.num_hidden_layers
        tokens_per_call = max(map(len, tokens)) / watch.calls
        return TextRun(seconds, watch.ended - start, tokens, watch.calls, tokens_per_call, settings=settings_used)

    drafter = {"hf_prompt_lookup": "prompt_lookup", "hf_assisted": "model"}.get(name, "none")
    names = {"rule": name if label is None else label, "policy": "none", "drafter": drafter}
    return TextRunner(label or name, run, names, peer=True)


def own_modules(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model whose modules are its own and whose weights are those of the model."""
    shared: dict[int, Any] = {id(weight): weight for weight in model.parameters()}
    copied: PreTrainedModel = copy.deepcopy(model, shared)
    return copied


def first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """A draft model that needs no training and is often wrong: the first layers, with the model's embedding and head.

    Args:
        model: its weights are shared.
        count: layers, fewer than the model has.

    Raises:
        ValueError: a count out of range, or a model without a list of layers.
    """
    small = own_modules(model)
    layers = getattr(small.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not 1 <= count < len(layers):
        have = len(layers) if isinstance(layers, nn.ModuleList) else "no list of"
        raise ValueError(
            f"an assistant of {count} layers was asked for and {type(model).__name__} has {have} layers; write a "
            f"smaller number, or name a model's folder with --assistant"
        )
    small.base_model.layers = layers[:count]
    config: Any = small.config
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:count]
    return small


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """As the pipeline finds them."""
    stop: Any = model.generation_config.eos_token_id if model.generation_config is not None else None
    stop = tokenizer.eos_token_id if stop is None else stop
    return [] if stop is None else [stop] if isinstance(stop, int) else list(stop)


def _until_stop(row: list[int], stops: Sequence[int]) -> list[int]:
    """The row with its first stop id as its end."""
    ends = [place + 1 for place, token in enumerate(row) if token in stops]
    return row[: ends[0]] if ends else row
