"""Lookup drafting against a plain search through the text, token by token."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mediaspec.core.engine import Engine
from mediaspec.core.prompt import TokenPrompt
from mediaspec.core.tree import TreeSpec
from mediaspec.drafters import NgramDrafter, make_drafter
from mediaspec.rules import make_rule
from mediaspec.testing.check_drafter import check_drafter
from tests.toy import ToyTarget

CASE = json.loads((Path(__file__).parents[1] / "data" / "language_cases.json").read_text())["prompt_lookup"]


def occurrences(text: list[int], most: int, least: int) -> tuple[int, list[int]]:
    """The longest suffix that stands earlier, and the positions behind all its earlier occurrences."""
    for length in range(min(most, len(text) - 1), least - 1, -1):
        tail = text[len(text) - length :]
        found = [i for i in range(length, len(text)) if text[i - length : i] == tail]
        if found:
            return length, found
    return 0, []


def walk(text: list[int], count: int, most: int, share: float) -> list[int]:
    """The commonest continuation of all occurrences, ties to the latest, while the product of shares is enough."""
    _, places = occurrences(text, most, 1)
    out: list[int] = []
    left = 1.0
    while len(out) < count:
        following = [(i, text[i + len(out)]) for i in places if i + len(out) < len(text)]
        if not following:
            break
        votes = Counter(token for _, token in following)
        best = max(votes, key=lambda token: (votes[token], max(i for i, other in following if other == token)))
        left *= votes[best] / len(following)
        if left < share - 1e-6:
            break
        places = [i for i, token in following if token == best]
        out.append(best)
    return out


def drafted(drafter: NgramDrafter, text: list[int], count: int) -> list[int]:
    tokens, lengths, _ = drafter.continuation(torch.tensor([text]), count)
    return tokens[0, : int(lengths[0])].tolist()


@pytest.mark.parametrize(("key", "stop"), [("plain", ()), ("with_eos", tuple(CASE["inputs"]["eos"]))])
def test_the_cases_of_the_specification(key: str, stop: tuple[int, ...]) -> None:
    inputs, (draft, length, start) = CASE["inputs"], CASE["expected"][key]
    drafter = NgramDrafter(inputs["max_ngram"], pick="earliest", stop_ids=stop)
    text = torch.tensor([inputs["ids"]])
    tokens, lengths, matched = drafter.continuation(text, inputs["num"])
    assert tokens[0, : int(lengths)].tolist() == draft and matched.tolist() == [length]
    assert inputs["ids"][start + length :][: len(draft)] == draft


def test_nothing_is_drafted_where_nothing_repeats() -> None:
    draft, length, _ = CASE["expected"]["none"]
    for method in ("lookup", "suffix"):
        tokens, lengths, matched = NgramDrafter(2, method=method).continuation(torch.tensor([[1, 2, 3]]), 4)
        assert tokens.shape == (1, 4) and lengths.tolist() == [len(draft)] and matched.tolist() == [length]


def test_latest_and_earliest_occurrence_differ() -> None:
    text = [1, 2, 3, 4, 9, 1, 2, 3, 5, 6, 7, 1, 2, 3]
    assert drafted(NgramDrafter(), text, 3) == [5, 6, 7]
    assert drafted(NgramDrafter(pick="earliest"), text, 3) == [4, 9, 1]


def test_a_copy_that_reaches_the_end_goes_on_with_its_period() -> None:
    assert drafted(NgramDrafter(), [9, 1, 2, 3, 1, 2, 3], 8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert drafted(NgramDrafter(), [5, 5], 3) == [5, 5, 5]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_rows_of_different_length_equal_a_plain_search(data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=1, max_size=3))
    most, least = data.draw(st.sampled_from([(3, 1), (3, 2), (24, 1)]))
    share = data.draw(st.sampled_from([0.1, 0.5, 0.9]))
    width = max(map(len, rows)) + 3
    text = torch.full((len(rows), width), 2)
    for row, tokens in enumerate(rows):
        text[row, : len(tokens)] = torch.tensor(tokens)
    ends = torch.tensor([len(tokens) for tokens in rows])
    tokens, lengths, matched = NgramDrafter(most, least).continuation(text, 4, ends)
    for row, known in enumerate(rows):
        length, places = occurrences(known, most, least)
        assert int(matched[row]) == length
        if not length:
            assert int(lengths[row]) == 0
            continue
        extended = list(known)
        while len(extended) < len(known) + 4:
            extended.append(extended[places[-1] + len(extended) - len(known)])
        assert tokens[row].tolist() == extended[len(known) :] and int(lengths[row]) == 4
    if least == 1:
        drafter = NgramDrafter(most, method="suffix", min_share=share)
        tokens, lengths, _ = drafter.continuation(text, 4, ends)
        for row, known in enumerate(rows):
            assert tokens[row, : int(lengths[row])].tolist() == walk(known, 4, most, share)


def test_long_matches_carry_long_drafts() -> None:
    text = [7, 1, 2, 3, 4, 5, 6, 8, 7, 1, 2]
    assert drafted(NgramDrafter(24, method="suffix"), text, 6) == [3, 4, 5, 6, 8, 7]
    assert drafted(NgramDrafter(24, method="suffix", spec_factor=1.0), text, 6) == [3, 4, 5]


@pytest.mark.parametrize("method", ["lookup", "suffix"])
def test_conformance(method: str) -> None:
    target = ToyTarget(vocab_size=3, num_tokens=12)
    check_drafter(
        lambda: NgramDrafter(4, method=method), target, lambda rows: torch.zeros(rows), budgets=(1, 6), rows=32
    )


class PromptToy(ToyTarget):
    """A toy that reads token prompts of one token."""

    def prefill(self, condition: TokenPrompt, cache):  # type: ignore[no-untyped-def, override]
        return super().prefill(condition.ids[:, 0], cache)


def test_the_prompt_and_older_texts_are_searched() -> None:
    target = PromptToy(vocab_size=5, num_tokens=12)
    prompt, seeds = TokenPrompt.from_padded(torch.tensor([[3], [1]])), torch.tensor([4, 5, 6])
    copies = torch.tensor([1, 0, 1])
    plain = Engine(target, make_rule("coupled")).decode(prompt, seeds, copies=copies)
    drafter = NgramDrafter(6, memory=64)
    engine = Engine(target, make_rule("coupled"), drafter)
    first = engine.decode(prompt, seeds, copies=copies, num_draft_tokens=4)
    for row in first.tokens:
        drafter.remember(row)
    again = engine.decode(prompt, seeds, copies=copies, num_draft_tokens=4)
    assert torch.equal(first.tokens, plain.tokens) and torch.equal(again.tokens, plain.tokens)
    assert again.stats.target_calls <= 6 < first.stats.target_calls  # the texts themselves were remembered


def test_settings_are_checked() -> None:
    assert isinstance(make_drafter("ngram", max_ngram=2), NgramDrafter)
    with pytest.raises(ValueError, match="min_ngram"):
        NgramDrafter(2, 3)
    with pytest.raises(ValueError, match="method"):
        NgramDrafter(method="tree")
    with pytest.raises(ValueError, match="chains"):
        Engine(ToyTarget(), make_rule("exact"), NgramDrafter()).decode(
            torch.zeros(1), torch.tensor([1]), tree=TreeSpec.from_widths((2,))
        )
