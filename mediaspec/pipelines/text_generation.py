"""Text from any transformers causal language model, decoded speculatively, in batches and with a seed per text."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..core.ending import StopAt
from ..core.engine import Engine, Round
from ..core.prompt import TokenPrompt
from ..core.types import Drafter, Warp
from ..drafters.model import ModelDrafter
from ..drafters.ngram import NgramDrafter
from ..rules import AcceptanceRule, CoupledRule
from ..targets.causal_lm import CausalLMTarget
from .choices import choose_rule, name_of
from .keywords import strict
from .seeds import row_seeds

__all__ = ["TextGenerationOutput", "TextGenerationPipeline"]

Chat = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class TextGenerationOutput:
    """Texts, and how they came about.

    Args:
        texts: in the order prompt 0 text 0, prompt 0 text 1, ..., without special tokens.
        tokens: the new ids of every text, with the stop id where one was reached.
        stats: the run's `DecodeStats`, "tokens_per_call", "seeds", "settings" and "seconds" with "total".
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
        drafter: a smaller model of the same tokenizer, "ngram", "suffix", a drafter object, or "none".

    Example:
        >>> pipe = TextGenerationPipeline.from_pretrained("path/to/model")              # doctest: +SKIP
        >>> out = pipe("Once upon a time", max_new_tokens=40, seeds=7)                  # doctest: +SKIP
        >>> print(out.texts[0], out.stats["tokens_per_call"])                           # doctest: +SKIP
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        rule: AcceptanceRule | None = None,
        drafter: PreTrainedModel | Drafter | str = "ngram",
    ) -> None:
        self.model = model
        self.tokenizer: Any = tokenizer
        self.rule: AcceptanceRule = CoupledRule() if rule is None else rule
        self.drafter = drafter
        CausalLMTarget(model, 1)  # refuses models that cannot run, now rather than at the first call

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str,
        *,
        drafter: PreTrainedModel | Drafter | str = "ngram",
        rule: AcceptanceRule | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> TextGenerationPipeline:
        """Loads a model and its tokenizer by `AutoModelForCausalLM` and `AutoTokenizer`."""
        tokenizer = AutoTokenizer.from_pretrained(pretrained_model_name_or_path)
        model: Any = AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path, dtype=dtype)
        return cls(model.to(device).eval(), tokenizer, rule, drafter)

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
        rule: AcceptanceRule | str | None = None,
        drafter: PreTrainedModel | Drafter | str | None = None,
        num_draft_tokens: int = 5,
        on_text: Callable[[int, list[int]], Any] | None = None,
    ) -> TextGenerationOutput:
        """Writes texts. A text depends on its prompt, its seed and the settings, never on the rest of the batch.

        Args:
            prompt: a text, a chat (a list of {"role", "content"}), or a list of P of either.
            max_new_tokens: for all texts, or one per text.
            num_texts_per_prompt: texts per prompt, all from one prefill.
            generator, seeds: as in the image pipelines; `seeds=7` is 7, 8, ....
            temperature, top_k, top_p: the sampled law; temperature 0 is greedy, top_k 0 and top_p 1 are off.
            rule: an AcceptanceRule, its name, or "plain" for no speculation.
            drafter: None is the pipeline's own.
            num_draft_tokens: tokens drafted per round; 0 switches speculation off.
            on_text: called after every round with a text's number and its new ids.

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
        limits = _limits(max_new_tokens, len(copies))
        warp = Warp(temperature, top_k, top_p)
        chosen = choose_rule(rule, self.rule)
        target = CausalLMTarget(self.model, max(limits))
        budget = 0 if chosen is None else num_draft_tokens
        proposer = self._drafter(self.drafter if drafter is None else drafter, target) if budget else None
        if chosen is not None:
            chosen.prepare(target)
        stops = self._stop_ids()
        listen = None if on_text is None else _Listener(on_text, len(copies))
        result = Engine(target, chosen or CoupledRule(), proposer).decode(
            ids,
            torch.tensor(chosen_seeds, dtype=torch.int64),
            warp=warp,
            num_draft_tokens=budget,
            copies=torch.tensor(copies) if num_texts_per_prompt > 1 else None,
            ending=StopAt(stops, torch.tensor(limits)),
            on_round=listen,
        )
        tokens = [row[:length] for row, length in zip(result.tokens.tolist(), result.lengths, strict=True)]
        settings = {
            "rule": "plain" if chosen is None else name_of(chosen),
            "drafter": type(proposer).__name__ if proposer is not None else "none",
            "num_draft_tokens": budget if proposer is not None else 0,
            "temperature": temperature, "top_k": top_k, "top_p": top_p, "max_new_tokens": limits,
            "dtype": str(self.model.dtype).removeprefix("torch."), "device": str(target.device),
        }  # fmt: skip
        stats = {
            **asdict(result.stats),
            "tokens_per_call": result.stats.tokens_per_call,
            "seeds": chosen_seeds,
            "settings": settings,
        }
        stats["seconds"] = {"total": time.perf_counter() - started, **result.stats.seconds}
        texts = [self.tokenizer.decode(row, skip_special_tokens=True) for row in tokens]
        return TextGenerationOutput(texts, tokens, stats)

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

    @staticmethod
    def _drafter(given: PreTrainedModel | Drafter | str, target: CausalLMTarget) -> Drafter | None:
        if isinstance(given, PreTrainedModel):
            return ModelDrafter(CausalLMTarget(given, target.num_tokens, vocab_size=target.vocab_size))
        if isinstance(given, str):
            made: dict[str, Drafter | None] = {
                "ngram": NgramDrafter(3), "suffix": NgramDrafter(24, method="suffix"), "none": None,
            }  # fmt: skip
            if given not in made:
                raise ValueError(f"drafter={given!r}; write one of {', '.join(made)}, a smaller model, or a drafter")
            return made[given]
        if not isinstance(given, Drafter):
            raise TypeError(f"drafter is a {type(given).__name__}; give a smaller model, a name, or a drafter object")
        return copy.copy(given)  # a run's state lives in the drafter, and calls in several threads may overlap


class _Listener:
    """Tells new ids of every text after each round."""

    def __init__(self, tell: Callable[[int, list[int]], Any], count: int) -> None:
        self.tell, self.told = tell, [0] * count

    def __call__(self, step: Round) -> bool:
        tokens = step.state.tokens.tolist()
        for live, row in enumerate(step.rows):
            now = step.lengths[row]
            if now > self.told[row]:
                self.tell(row, tokens[live][self.told[row] : now])
                self.told[row] = now
        return True


def _limits(given: int | Sequence[int], count: int) -> list[int]:
    limits = [given] * count if isinstance(given, int) else list(given)
    if len(limits) != count or any(isinstance(one, bool) or not isinstance(one, int) or one < 1 for one in limits):
        raise ValueError(f"max_new_tokens={given!r}; write an integer >= 1, or a list of {count}, one per text")
    return limits
