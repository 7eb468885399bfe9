"""`model.generate(**inputs, custom_generate=mediaspec.speculative, ...)`: generate of transformers on our own loop.

`generate` prepares inputs, processors and stopping criteria as always and then calls `speculative`, which decodes with
a `CausalLMTarget` and returns what the plain loop returns. Greedy decoding gives its tokens, sampling its law.

Letters: B rows (already repeated for `num_return_sequences`), C prompt columns, T new tokens at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.stopping_criteria import EosTokenCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..core.engine import Engine
from ..core.prompt import TokenPrompt
from ..core.stats import DecodeStats
from ..core.tree import TreeSpec
from ..core.types import Drafter, Warp
from ..pipelines.lockstep import StepwiseProcessors, Texts, drafting_warp, split_warp
from ..pipelines.speculation import Drafting, prepare
from ..policies import DraftPolicy
from ..rules import AcceptanceRule, make_rule
from ..targets.causal_lm import CausalLMTarget
from .criteria import CriteriaEnding, ScoreBook
from .options import resolve
from .pace import Pace

__all__ = ["SpeculativeOutput", "speculative"]

PLAIN = {"attention_mask", "position_ids", "cache", "past_key_values", "logits_to_keep", "use_cache"}
"""What `generate` passes to every decoder; anything else would be an input this loop does not know."""

REFUSED = {
    "output_attentions": "attention maps are not kept",
    "output_hidden_states": "hidden states are not kept",
    "penalty_alpha": "contrastive search is another algorithm",
    "dola_layers": "DoLa is another algorithm",
    "assistant_early_exit": "early exit drafts are not supported; pass a drafter",
    "assistant_ensemble_weight": "choose a relaxed rule instead: rule='ensemble'",
    "use_mtp": "multi-token heads are not supported; pass a drafter",
}


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with what the run did and the settings it used.

    Args:
        stats: `DecodeStats` as a dictionary with "tokens_per_call", "rule", "drafter", "num_draft_tokens" (None where
            a policy chose), "tree", "policy" and "row_seeds".
    """

    stats: dict[str, Any] | None = None


def speculative(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    drafter: PreTrainedModel | Drafter | str | Sequence[Any] | Mapping[str, Any] | None = None,
    rule: AcceptanceRule | str = "coupled",
    num_draft_tokens: int | None = None,
    tree: TreeSpec | Sequence[Any] | None = None,
    tree_widths: Sequence[int] | None = None,
    policy: DraftPolicy | str | None = None,
    row_seeds: Sequence[int] | Tensor | None = None,
    token_stream: Any = None,
    streamer: Any = None,
    assistant_model: PreTrainedModel | None = None,
    num_speculative_tokens: int | None = None,
    speculative_token_tree: Sequence[Any] | str | None = None,
    speculative_config: Mapping[str, Any] | None = None,
    speculative_algorithm: str | None = None,
    speculative_draft_model_path: str | None = None,
    speculative_num_steps: int | None = None,
    speculative_eagle_topk: int | None = None,
    speculative_num_draft_tokens: int | None = None,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> SpeculativeOutput | Tensor:
    """The decoding loop to give to `generate` as `custom_generate`.

    Every field of `GenerationConfig`, every logits processor, stopping criterion and streamer means what it means in
    plain `generate`; what cannot be honoured exactly is refused (see `REFUSED`). A processor is asked about several
    texts per round, some of which are taken back, so it must be a function of the ids and scores it is given. Rows
    advance at their own pace: of the batch it sees, rows it is not asked about hold an earlier text or padding.

    `generate` drops `streamer`, `assistant_model` and `tokenizer` before it calls any loop of its users. Write
    `token_stream`, `drafter`, and stop strings as `stopping_criteria=[StopStringCriteria(tokenizer, ["..."])]`.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs: from `generate`.
        drafter: a smaller transformers model of the same tokenizer, a trained head, the folder of either, "ngram",
            "suffix", "eagle3", "longspec", "lazy", "sparse", "none", or a drafter of this library; a list or a mapping
            of several for a policy to choose among. Default: lookup, and every shipped head that belongs to the model.
            A `NgramDrafter(memory=n)` is told the finished texts and copies from them later.
        rule: an acceptance rule or its name; "coupled" and "exact" are lossless.
        num_draft_tokens: K; a given one is kept in every round, without one the policy chooses while it runs.
        tree: a draft tree instead of K tokens in a row: a `TreeSpec`, children per level, or paths of child ranks.
            tree_widths: children per level.
        policy: who chooses drafter and length: a `DraftPolicy` or a name, e.g. "survival" (the default), "ucb",
            "fixed". One that is named keeps what it learned about this model for the next call; K is then its longest
            draft. Under rule "exact" the choice moves which of the equally lawful tokens come out.
        row_seeds: one integer per returned sequence; default drawn from torch's global generator when sampling.
        token_stream: a streamer. `generate` tells its own `streamer` the prompt and nothing more, so it has this name.
        streamer, assistant_model: the same as `token_stream` and `drafter`, for `functools.partial` or a direct call;
            `generate` does not pass them on.
        num_speculative_tokens, speculative_token_tree, speculative_config, speculative_algorithm,
            speculative_draft_model_path, speculative_num_steps, speculative_eagle_topk, speculative_num_draft_tokens:
            names of vLLM and SGLang, see `mediaspec.integrations.options`.
        synced_gpus: must be false.

    Returns:
        [B, C + n] int64 ids, or a `SpeculativeOutput` with `return_dict_in_generate`.

    Raises:
        ValueError: a setting this loop cannot honour exactly, saying what to do instead.

    Example:
        >>> model.generate(**inputs, custom_generate=speculative, max_new_tokens=64)  # doctest: +SKIP
    """
    config = generation_config if generation_config is not None else model.generation_config
    processors = logits_processor if logits_processor is not None else LogitsProcessorList()
    criteria = stopping_criteria if stopping_criteria is not None else StoppingCriteriaList()
    _refuse(config, model_kwargs, synced_gpus, input_ids)
    asked = resolve(
        drafter=drafter,
        num_draft_tokens=num_draft_tokens,
        tree=tree,
        tree_widths=tree_widths,
        policy=policy,
        assistant_model=assistant_model,
        num_assistant_tokens=config.num_assistant_tokens,
        num_assistant_tokens_schedule=config.num_assistant_tokens_schedule,
        prompt_lookup_num_tokens=config.prompt_lookup_num_tokens,
        max_matching_ngram_size=config.max_matching_ngram_size,
        num_speculative_tokens=num_speculative_tokens,
        speculative_token_tree=speculative_token_tree,
        speculative_config=speculative_config,
        speculative_algorithm=speculative_algorithm,
        speculative_draft_model_path=speculative_draft_model_path,
        speculative_num_steps=speculative_num_steps,
        speculative_eagle_topk=speculative_eagle_topk,
        speculative_num_draft_tokens=speculative_num_draft_tokens,
        batch=len(input_ids),
    )
    batch, columns = input_ids.shape
    horizon = _longest(config, criteria) - columns
    if horizon < 1:
        raise ValueError(f"the prompt has {columns} ids and max_length is {horizon + columns}; set max_new_tokens")
    target = CausalLMTarget(model, horizon)
    ids = input_ids.to(target.device)
    prompt, copies = _prompts(ids, model_kwargs.get("attention_mask"), config.num_return_sequences or 1)
    stop_ids = [int(one) for part in criteria if isinstance(part, EosTokenCriteria) for one in part.eos_token_id]
    native = (EosTokenCriteria, MaxLengthCriteria)
    others = StoppingCriteriaList([one for one in criteria if type(one) not in native])
    texts = Texts(ids, horizon, _pad(config))

    full = bool(config.return_dict_in_generate)
    scores, logits = full and bool(config.output_scores), full and bool(config.output_logits)
    warp = guess = Warp(temperature=0.0)
    if config.do_sample:
        warp, guess = Warp(), drafting_warp(processors)
        if not scores:
            processors, warp = split_warp(processors)
    chosen = make_rule(rule) if isinstance(rule, str) else rule
    chosen.prepare(target)
    process: StepwiseProcessors | None = None
    if processors:
        process = StepwiseProcessors(processors, texts, stop_ids, chosen.lossless)
    book = ScoreBook(process, logits, scores) if scores or logits else None
    apart, follow = bool(stop_ids) or batch == 1, process is not None and process.reads_texts
    ending = CriteriaEnding(stop_ids, others, texts, apart=apart, book=book, follow=follow)
    drafting = prepare(asked, target, None if guess == warp else guess, share=True)
    seeds = _seeds(row_seeds, batch, bool(config.do_sample)).to(target.device)
    engine = Engine(target, chosen, drafting.drafter)
    listener = token_stream if token_stream is not None else streamer
    pace = Pace(batch, horizon, stop_ids, texts.pad, listener, ending)
    if listener is not None:
        listener.put(input_ids.cpu())
    with drafting.at_work(target):
        result = engine.decode(
            prompt,
            seeds,
            warp=warp,
            copies=copies,
            process=book if book is not None else process,
            ending=ending,
            on_round=pace.add if listener is not None or not ending.apart else None,
            **drafting.arguments,
        )
    tokens = pace.finish(result)
    length = tokens.shape[1]
    drafting.remember(result)
    sequences = torch.cat([input_ids, tokens.to(input_ids.device)], 1)
    if not full:
        return sequences
    fields: dict[str, Any] = {"sequences": sequences, "stats": _stats(result.stats, chosen, drafting, seeds)}
    if book is not None:
        fields["scores"] = ScoreBook.steps(book.scores, batch, length) if scores else None
        fields["logits"] = ScoreBook.steps(book.logits, batch, length) if logits else None
    return SpeculativeOutput(**fields)


def _refuse(config: GenerationConfig, model_kwargs: Mapping[str, Any], synced_gpus: bool, input_ids: Tensor) -> None:
    """What cannot be honoured exactly is an error."""
    if synced_gpus:
        raise ValueError("synced_gpus is not supported: rows of different ranks advance at different pace")
    if (config.num_beams or 1) > 1:
        raise ValueError(f"num_beams={config.num_beams}: beam search is not speculative; set num_beams=1")
    for name, why in REFUSED.items():
        if getattr(config, name, None):
            raise ValueError(f"{name}={getattr(config, name)!r} is not supported: {why}")
    if getattr(config, "token_healing", False):
        raise ValueError("token_healing is not supported; heal the prompt before calling generate")
    unknown = [name for name, value in model_kwargs.items() if name not in PLAIN and value is not None]
    if unknown:
        raise ValueError(f"the model inputs {unknown} are not supported: this loop feeds token ids alone")
    cache = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
    if cache is not None and (cache.get_seq_length() or getattr(cache, "_is_user_defined", False)):
        raise ValueError(
            "a cache was passed to generate(); keys and values are kept in a store of this library: leave "
            "past_key_values (cache) out and pass the whole text as input_ids"
        )
    mask, places = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if places is not None:
        there = torch.ones_like(input_ids) if mask is None else (mask != 0).long()
        wrong = (places.to(there.device) != there.cumsum(1) - 1) & (there != 0)
        if bool(wrong.any()):
            raise ValueError("position_ids other than 0, 1, 2, ... over the prompt are not supported; leave them out")


def _longest(config: GenerationConfig, criteria: StoppingCriteriaList) -> int:
    """The length at which plain `generate` ends: that of the criteria, which a user may have replaced."""
    given = [one.max_length for one in criteria if isinstance(one, MaxLengthCriteria)]
    if given:
        return int(min(given))
    if config.max_length is None:
        raise ValueError("neither max_length nor max_new_tokens is set; set max_new_tokens")
    return int(config.max_length)


def _pad(config: GenerationConfig) -> int:
    """The id behind rows that stopped; without one no row stops before the others, and any id will do."""
    pad = getattr(config, "_pad_token_tensor", None)
    pad = config.pad_token_id if pad is None else pad
    return 0 if pad is None else int(pad)


def _prompts(ids: Tensor, mask: Tensor | None, repeats: int) -> tuple[TokenPrompt, Tensor | None]:
    """One prompt per `num_return_sequences` rows, which fork after one prefill."""
    mask = None if mask is None else mask.to(ids.device)
    if repeats == 1 or not all(one is None or _repeated(one, repeats) for one in (ids, mask)):
        return TokenPrompt.from_padded(ids, mask), None
    copies = torch.arange(len(ids), device=ids.device) // repeats
    return TokenPrompt.from_padded(ids[::repeats], None if mask is None else mask[::repeats]), copies


def _repeated(rows: Tensor, repeats: int) -> bool:
    return len(rows) % repeats == 0 and torch.equal(rows[::repeats].repeat_interleave(repeats, 0), rows)


def _seeds(given: Sequence[int] | Tensor | None, batch: int, sampling: bool) -> Tensor:
    if given is None:
        if not sampling:
            return torch.arange(batch)
        return torch.randint(2**63 - 1, (batch,))
    seeds = torch.as_tensor(given, dtype=torch.int64)
    if seeds.shape != (batch,):
        raise ValueError(f"row_seeds has shape {list(seeds.shape)}; give {batch}, one per returned sequence")
    return seeds


def _stats(stats: DecodeStats, rule: AcceptanceRule, drafting: Drafting, seeds: Tensor) -> dict[str, Any]:
    return {
        **asdict(stats),
        "tokens_per_call": stats.tokens_per_call,
        "rule": rule.name,
        **drafting.settings(),
        "row_seeds": seeds.tolist(),
    }
