"""Text from any transformers causal language model, decoded speculatively, in batches and with a seed per text."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..core.ending import Ending, StopAt
from ..core.engine import Engine, Round
from ..core.prompt import TokenPrompt
from ..core.tree import TreeSpec
from ..core.types import Warp
from ..models.smollm2 import resolve
from ..policies import DraftPolicy
from ..rules import AcceptanceRule, CoupledRule
from ..targets.causal_lm import CausalLMTarget
from .choices import choose_rule, name_of
from .draft_trees import draft_tree
from .keywords import refuse_unknown, strict
from .lockstep import StepwiseProcessors, Texts
from .seeds import row_seeds
from .speculation import Speculation, prepare
from .text_saving import read_parts, write_parts
from .text_stream import StopStrings, TextStream, cut_text, stop_strings
from .watch import Callback, Watch

__all__ = ["TextGenerationOutput", "TextGenerationPipeline"]

Chat = Sequence[Mapping[str, str]]
TENSORS = ("tokens", "num_accepted", "progress")
DOWNLOAD = ("cache_dir", "force_download", "local_files_only", "revision", "token")


@dataclass(frozen=True)
class TextGenerationOutput:
    """Texts, and how they came about.

    Args:
        texts: in the order prompt 0 text 0, prompt 0 text 1, ..., without special tokens, and without the stop string
            that ended them.
        tokens: the new ids of every text, with the stop id, or the ids of the stop string, where one was reached.
        stats: the run's `DecodeStats`, "tokens_per_call", "seeds", "settings", "interrupted" and "seconds" with
            "total".
    """

    texts: list[str]
    tokens: list[list[int]]
    stats: dict[str, Any]


class TextGenerationPipeline:
    """Writes on from prompts or chats.

    Args:
        model: a causal language model in evaluation mode.
        tokenizer: its tokenizer.
        rule: acceptance rule; `CoupledRule` where omitted, whose texts do not depend on the drafter.
        drafter: a smaller model of the same tokenizer, a trained head, the folder of either, a name ("ngram",
            "suffix", "eagle3", "longspec", "lazy", "sparse", "none"), a drafter object, or a list or mapping of
            several; None is lookup and every shipped head that belongs to the model.
        policy: who chooses drafter and draft length where a call names neither length nor tree: a `DraftPolicy`, a
            name, or None for "survival", which keeps what it learned about this model from call to call.

    Example:
        >>> pipe = TextGenerationPipeline.from_pretrained("path/to/model")              # doctest: +SKIP
        >>> out = pipe("Once upon a time", max_new_tokens=40, seeds=7)                  # doctest: +SKIP
        >>> print(out.texts[0], out.stats["tokens_per_call"])                           # doctest: +SKIP
    """

    _interrupt = False

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        rule: AcceptanceRule | None = None,
        drafter: Any = None,
        policy: DraftPolicy | str | None = None,
    ) -> None:
        self.model = model
        self.tokenizer: Any = tokenizer
        self.rule: AcceptanceRule = CoupledRule() if rule is None else rule
        self.drafter, self.policy = drafter, policy
        self._progress_bar_config: dict[str, Any] = {}
        CausalLMTarget(model, 1)  # refuses models that cannot run, now rather than at the first call

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        **kwargs: Any,
    ) -> TextGenerationPipeline:
        """Loads a model and its tokenizer by `AutoModelForCausalLM` and `AutoTokenizer`; "smollm2" is known by name.

        Args:
            pretrained_model_name_or_path: a folder or repository of a transformers model, or a folder that
                `save_pretrained` of this class wrote, with its rule, drafter and policy.
            dtype: of the weights; device: where they go.
            kwargs: `rule=`, `drafter=`, `policy=` instead of the saved ones, and transformers' download keywords.

        Raises:
            TypeError: an unknown keyword, naming the nearest valid one.
            ValueError: the folder holds another pipeline, or the model cannot be decoded.
        """
        own = ("rule", "drafter", "policy")
        refuse_unknown(kwargs, [*own, *DOWNLOAD], f"{cls.__name__}.from_pretrained()")
        source = resolve(os.fspath(pretrained_model_name_or_path))
        given = {name: kwargs.pop(name) for name in own if name in kwargs}
        parts = {**read_parts(source, [name for name in own if name not in given], dtype), **given}
        tokenizer = AutoTokenizer.from_pretrained(source, **kwargs)
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **kwargs)
        if isinstance(parts.get("rule"), str):
            parts["rule"] = choose_rule(parts["rule"], CoupledRule())
        if isinstance(parts.get("drafter"), torch.nn.Module):
            parts["drafter"] = parts["drafter"].to(device).eval()
        return cls(model.to(device).eval(), tokenizer, **parts)

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
        """Saves model and tokenizer as transformers does, and beside them rule, drafter and policy.

        Raises:
            ValueError: a drafter object that cannot be saved.
        """
        write_parts(save_directory, rule=self.rule, drafter=self.drafter, policy=self.policy)
        self.model.save_pretrained(save_directory)
        self.tokenizer.save_pretrained(save_directory)

    def set_progress_bar_config(self, **kwargs: Any) -> None:
        """Settings of the progress bar, those of tqdm; `disable=True` shows none."""
        self._progress_bar_config = kwargs

    def progress_bar(self, total: int) -> Any:
        """A bar of `total` tokens."""
        return tqdm(total=total, **self._progress_bar_config)

    @property
    def interrupt(self) -> bool:
        """Whether the running call was asked to stop; set `pipe._interrupt = True` from a callback."""
        return self._interrupt

    @strict
    @torch.no_grad()
    def __call__(
        self,
        prompt: str | Chat | Sequence[str] | Sequence[Chat],
        max_new_tokens: int | Sequence[int] = 128,
        num_texts_per_prompt: int = 1,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        seeds: int | Sequence[int] | Tensor | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        no_repeat_ngram_size: int = 0,
        stop: str | Sequence[str] | None = None,
        rule: AcceptanceRule | str | None = None,
        drafter: Any = None,
        num_draft_tokens: int | None = None,
        tree: TreeSpec | Sequence[Any] | None = None,
        policy: DraftPolicy | str | None = None,
        on_text: Callable[[int, str], Any] | None = None,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("tokens",),
    ) -> TextGenerationOutput:
        """Writes texts. A text depends on its prompt, its seed and the settings, never on the rest of the batch.

        Two exceptions: an attention policy (`mediaspec.enable`) chooses for the batch, and under rules that sample by
        rejection ("exact", the relaxed ones) a policy that measures time chooses among equally lawful texts; name
        `num_draft_tokens` there for a text that repeats itself.

        Args:
            prompt: a text, a chat (a list of {"role", "content"}), or a list of P of either.
            max_new_tokens: for all texts, or one per text.
            num_texts_per_prompt: texts per prompt, all from one prefill.
            generator, seeds: as in the image pipelines; `seeds=7` is 7, 8, ....
            temperature, top_k, top_p, min_p: the sampled law, in this order; temperature 0 is greedy, top_k 0, top_p 1
                and min_p 0 are off.
            repetition_penalty, no_repeat_ngram_size: as in transformers, over prompt and text; 1 and 0 are off.
            stop: texts that end an answer where they are completed; they are cut off.
            rule: an AcceptanceRule, its name, or "plain" for no speculation.
            drafter: None is the pipeline's own.
            num_draft_tokens: K, kept in every round; 0 switches speculation off, None lets the policy choose.
            tree: a draft tree instead: a `TreeSpec`, children per level, or paths of child ranks.
            policy: None is the pipeline's own.
            on_text: called after every round with a text's number and its new piece of text.
            callback_on_step_end: called after every round as in the image pipelines: with the pipeline, the round, the
                tokens of the shortest text, and the tensors named in `callback_on_step_end_tensor_inputs` out of
                "tokens", "num_accepted" and "progress". `pipe._interrupt = True` ends the call with what there is.

        Raises:
            TypeError: an unknown keyword, naming the nearest valid one.
            ValueError: an empty prompt, values out of range, or parts that do not fit.
        """
        started = time.perf_counter()
        ids = self._encode(prompt)
        if isinstance(num_texts_per_prompt, bool) or num_texts_per_prompt < 1:
            raise ValueError(f"num_texts_per_prompt={num_texts_per_prompt!r}; write an integer >= 1")
        copies = [row for row in range(len(ids)) for _ in range(num_texts_per_prompt)]
        chosen_seeds = row_seeds(len(copies), generator, seeds)
        limits, strings = _limits(max_new_tokens, len(copies)), stop_strings(stop)
        names = _tensor_names(callback_on_step_end, callback_on_step_end_tensor_inputs)
        processors, warp = _processors(
            Warp(temperature, top_k, top_p), min_p, repetition_penalty, no_repeat_ngram_size
        )
        chosen = choose_rule(rule, self.rule)
        target = CausalLMTarget(self.model, max(limits))
        if chosen is not None:
            chosen.prepare(target)
        asked = self._asked(drafter, num_draft_tokens, tree, policy) if chosen else Speculation("none", 0)
        guess = Warp(temperature, top_k, top_p)
        drafting = prepare(asked, target, None if guess == warp else guess)
        process, stops = None, self._stop_ids()
        if processors:
            whole = ids if num_texts_per_prompt == 1 else ids.select(torch.tensor(copies, device=target.device))
            held = Texts(whole.ids, max(limits), 0, whole.host_lengths)
            process = StepwiseProcessors(processors, held, stops, chosen is None or chosen.lossless)
        at_ids = StopAt(stops, torch.tensor(limits))
        ending: Ending = StopStrings(self.tokenizer, strings, at_ids) if strings else at_ids
        watch = Watch(self, len(copies), max(limits), callback_on_step_end, names)
        stream = None if on_text is None else TextStream(self.tokenizer, on_text, len(copies), strings)

        def follow(step: Round) -> bool:
            if stream is not None:
                stream.add(step)
            return watch(step)

        self._interrupt = False
        with drafting.at_work(target), self.progress_bar(total=sum(limits)) as watch.bar:
            result = Engine(target, chosen or CoupledRule(), drafting.drafter).decode(
                ids,
                torch.tensor(chosen_seeds, dtype=torch.int64),
                warp=warp,
                copies=torch.tensor(copies) if num_texts_per_prompt > 1 else None,
                process=process,
                ending=ending,
                on_round=follow,
                **drafting.arguments,
            )
        drafting.remember(result)
        tokens = [row[:length] for row, length in zip(result.tokens.tolist(), result.lengths, strict=True)]
        texts = [self.tokenizer.decode(row, skip_special_tokens=True) for row in tokens]
        texts = [cut_text(text, strings) for text in texts]
        if stream is not None:
            stream.finish(texts)
        settings = {
            "rule": "plain" if chosen is None else name_of(chosen), **drafting.settings(),
            "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
            "repetition_penalty": repetition_penalty, "no_repeat_ngram_size": no_repeat_ngram_size,
            "stop": list(strings), "max_new_tokens": limits,
            "dtype": str(self.model.dtype).removeprefix("torch."), "device": str(target.device),
        }  # fmt: skip
        stats = {
            **asdict(result.stats),
            "tokens_per_call": result.stats.tokens_per_call,
            "seeds": chosen_seeds,
            "settings": settings,
            "interrupted": self._interrupt,
        }
        stats["seconds"] = {"total": time.perf_counter() - started, **result.stats.seconds}
        return TextGenerationOutput(texts, tokens, stats)

    def _asked(self, drafter: Any, length: int | None, tree: Any, policy: DraftPolicy | str | None) -> Speculation:
        """The call's settings, with the pipeline's own where it names none."""
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 0):
            raise ValueError(f"num_draft_tokens={length!r}; write an integer >= 0, or leave it out")
        if policy is None and length is None and tree is None:
            policy = self.policy
        return Speculation(self.drafter if drafter is None else drafter, length, draft_tree(tree), policy)

    def _encode(self, prompt: Any) -> TokenPrompt:
        """Prompts of any form to ids on the model's device."""
        chat = isinstance(prompt, Sequence) and not isinstance(prompt, str) and bool(prompt)
        if isinstance(prompt, str) or (chat and isinstance(prompt[0], Mapping)):
            prompt = [prompt]
        rows: list[list[int]] = []
        for one in prompt:
            if isinstance(one, str):
                row = self.tokenizer(one)["input_ids"]
            else:
                row = self.tokenizer.apply_chat_template(list(one), add_generation_prompt=True, return_dict=True)
                row = row["input_ids"]
            if not row:
                raise ValueError(f"prompt {len(rows)} has no tokens; write at least one word")
            rows.append(list(row))
        if not rows:
            raise ValueError("no prompt was given; write a text, a chat, or a list of them")
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=self.model.device)
        lengths = [len(row) for row in rows]
        return TokenPrompt(ids, torch.tensor(lengths, device=ids.device), tuple(lengths))

    def _stop_ids(self) -> list[int]:
        stop = self.model.generation_config.eos_token_id if self.model.generation_config is not None else None
        stop = self.tokenizer.eos_token_id if stop is None else stop
        if stop is None:
            return []
        return [stop] if isinstance(stop, int) else list(stop)


def _processors(
    warp: Warp, min_p: float, repetition_penalty: float, no_repeat_ngram_size: int
) -> tuple[LogitsProcessorList, Warp]:
    """What acts on the logits before the warp, in the order of `generate`. min-p comes last there, so with it the warp
    becomes a part of the list."""
    if isinstance(min_p, bool) or not 0 <= min_p <= 1:
        raise ValueError(f"min_p={min_p!r}; write a number from 0 (off) to 1")
    if isinstance(repetition_penalty, bool) or not repetition_penalty > 0:
        raise ValueError(f"repetition_penalty={repetition_penalty!r}; write a number above 0, 1 is off")
    size = no_repeat_ngram_size
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise ValueError(f"no_repeat_ngram_size={size!r}; write an integer >= 0, 0 is off")
    found = LogitsProcessorList()
    if repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(float(repetition_penalty)))
    if size:
        found.append(NoRepeatNGramLogitsProcessor(size))
    if min_p == 0 or warp.temperature == 0:
        return found, warp
    if warp.temperature != 1:
        found.append(TemperatureLogitsWarper(float(warp.temperature)))
    if warp.top_k:
        found.append(TopKLogitsWarper(warp.top_k))
    if warp.top_p < 1:
        found.append(TopPLogitsWarper(float(warp.top_p)))
    found.append(MinPLogitsWarper(float(min_p)))
    return found, Warp()


def _tensor_names(callback: Callback | None, names: Sequence[str]) -> list[str]:
    names = getattr(callback, "tensor_inputs", names) or []
    for name in names:
        if name not in TENSORS:
            raise ValueError(f"callback_on_step_end_tensor_inputs names {name!r}; allowed are {', '.join(TENSORS)}")
    return list(names)


def _limits(given: int | Sequence[int], count: int) -> list[int]:
    limits = [given] * count if isinstance(given, int) else list(given)
    if len(limits) != count or any(isinstance(one, bool) or not isinstance(one, int) or one < 1 for one in limits):
        raise ValueError(f"max_new_tokens={given!r}; write an integer >= 1, or a list of {count}, one per text")
    return limits
