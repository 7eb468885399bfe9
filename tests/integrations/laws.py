"""The exact law of three sampled tokens under transformers' own processors, and how far a sample is from it."""

from __future__ import annotations

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


def law_of_tokens(model: PreTrainedModel, rows: int = 2500, given: Any = None, **speculation: Any) -> float:
    """The chi-square p of the first three of four sampled tokens, for `rows` rows, against their exact law.

    The first token comes from the prefill, and the last one of a row is always the target's own draw; so the second
    and the third are verified drafts or what stands in for rejected ones.

    Args:
        model: with a vocabulary so small that all triples can be written down.
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
        input_ids=ids, custom_generate=speculative, max_new_tokens=4, num_return_sequences=rows,
        row_seeds=list(range(rows)), **settings, **speculation,
    )  # fmt: skip
    config = GenerationConfig(**settings)
    model._prepare_special_tokens(config, device="cpu")
    processors = model._get_logits_processor(
        config, input_ids_seq_length=len(PROMPT), encoder_input_ids=ids, device="cpu"
    )

    def laws(texts: list[list[int]]) -> Tensor:
        """[n, V]"""
        whole = torch.tensor(texts)
        with torch.no_grad():
            logits = model(input_ids=whole, use_cache=False).logits[:, -1].float()
        return processors(whole, logits).softmax(-1).double()

    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        known = list(chances)
        rest = laws([[*PROMPT, *text] for text in known]).tolist()
        chances = {
            (*text, token): chances[text] * chance
            for text, law in zip(known, rest, strict=True)
            for token, chance in enumerate(law)
            if chance > 0
        }
    found = Counter(map(tuple, sampled[:, len(PROMPT) : len(PROMPT) + 3].tolist()))
    assert all(text in chances for text in found), "a text came out whose chance is zero"
    usual = [text for text, chance in chances.items() if chance * rows >= 5]
    observed = [found[text] for text in usual]
    expected = [chances[text] * rows for text in usual]
    if rows - sum(expected) >= 5:  # all the rare ones together
        observed.append(rows - sum(observed))
        expected.append(rows - sum(expected))
    else:
        expected = [one * sum(observed) / sum(expected) for one in expected]
    assert len(expected) > 20
    return float(stats.chisquare(observed, expected).pvalue)
