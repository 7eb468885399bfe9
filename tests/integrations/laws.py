"""The exact law of two sampled tokens under transformers' own processors, and how far a sample is from it."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import torch
from scipy import stats
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from mediaspec.integrations.generate import speculative

PROMPT = [3, 4, 5, 3, 4]
ALL_ON: dict[str, Any] = dict(
    do_sample=True, temperature=0.8, top_k=0, top_p=0.9, min_p=0.02, repetition_penalty=1.4, renormalize_logits=True,
    eos_token_id=None, pad_token_id=0,
)  # fmt: skip


def law_of_two_tokens(model: PreTrainedModel, rows: int = 4000, given: Any = None, **speculation: Any) -> float:
    """The chi-square p of `rows` sampled pairs of tokens against the pairs' exact law.

    Args:
        model: without a stop id, with a vocabulary so small that all pairs can be written down.
        rows: how many are sampled, with seeds 0, 1, ....
        given: settings of `generate` instead of `ALL_ON`.
        speculation: drafter, rule, ... .
    """
    settings = ALL_ON if given is None else given
    model.generation_config.eos_token_id = None
    if "tree" not in speculation and "policy" not in speculation:
        speculation = {"num_draft_tokens": 2, **speculation}
    ids = torch.tensor([PROMPT])
    sampled = model.generate(
        input_ids=ids, custom_generate=speculative, max_new_tokens=2, num_return_sequences=rows,
        row_seeds=list(range(rows)), **settings, **speculation,
    )  # fmt: skip

    def law(text: list[int]) -> Tensor:
        config = GenerationConfig(**settings)
        model._prepare_special_tokens(config, device="cpu")
        processors = model._get_logits_processor(config, input_ids_seq_length=5, encoder_input_ids=ids, device="cpu")
        text_ids = torch.tensor([text])
        with torch.no_grad():
            logits = model(input_ids=text_ids).logits[:, -1].float()
        return processors(text_ids, logits).softmax(-1)[0].double()

    size = model.config.vocab_size
    first = law(PROMPT)
    second = {one: law([*PROMPT, one]) for one in range(size) if first[one] > 0}
    found = Counter(map(tuple, sampled[:, 5:].tolist()))
    chances = {(a, b): float(first[a] * second[a][b]) for a, b in itertools.product(second, range(size))}
    assert all(chances.get(pair, 0) > 0 for pair in found), "a token came out whose chance is zero"
    usual = [pair for pair, chance in chances.items() if chance * rows >= 5]
    observed = [found[pair] for pair in usual]
    expected = [chances[pair] * rows for pair in usual]
    if rows - sum(expected) >= 5:  # all the rare pairs together
        observed.append(rows - sum(observed))
        expected.append(rows - sum(expected))
    else:
        expected = [one * sum(observed) / sum(expected) for one in expected]
    assert len(expected) > 5
    return float(stats.chisquare(observed, expected).pvalue)
