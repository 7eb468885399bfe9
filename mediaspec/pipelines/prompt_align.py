"""Token alignment of several prompts, field by field (PromptBlend, arXiv:2412.17254, organise and align).

Every field is tokenised without special tokens and filled up to the longest prompt's length of that field by repeating
its own tokens. Then token j means the same field in every prompt, and mixing two encodings mixes like with like.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from .keywords import nearest
from .prompt_fields import FIELDS, PromptFields

__all__ = ["FILLS", "Fill", "align_fields", "fill_tokens", "field_tokens", "special_tokens", "within_budget"]

T = TypeVar("T")
Fill = Literal["cycle", "stretch", "last"]
FILLS = ("cycle", "stretch", "last")


def fill_tokens(tokens: Sequence[T], length: int, fill: Fill = "cycle") -> list[T]:
    """Repeats tokens up to `length`.

    Args:
        tokens: at least one.
        length: at least len(tokens).
        fill: "cycle" a b -> a b a b a, "stretch" a b -> a a a b b, "last" a b -> a b b b b.

    Raises:
        ValueError: no tokens, too many, or an unknown rule.
    """
    if fill not in FILLS:
        raise ValueError(f"fill={fill!r} is not known; {nearest(str(fill), FILLS)}")
    count = len(tokens)
    if not count or length < count:
        raise ValueError(f"{count} tokens cannot be filled up to {length}; give 1 to {length} of them")
    if fill == "cycle":
        return [tokens[j % count] for j in range(length)]
    if fill == "stretch":
        return [tokens[j * count // length] for j in range(length)]
    return [tokens[min(j, count - 1)] for j in range(length)]


def align_fields(prompts: Sequence[Sequence[Sequence[T]]], fill: Fill = "cycle") -> list[list[list[T]]]:
    """Gives field c the same number of tokens in every prompt.

    Args:
        prompts: prompt -> field -> tokens. An empty field takes the tokens of the nearest prompt that has some (the
            earlier one of two equally near); a field that is empty everywhere stays empty.
        fill: rule of `fill_tokens`.

    Returns:
        prompt -> field -> tokens, new lists.

    Example:
        >>> align_fields([[["bear"], ["walking", "slowly"]], [["brown", "bear"], ["sitting"]]])
        [[['bear', 'bear'], ['walking', 'slowly']], [['brown', 'bear'], ['sitting', 'sitting']]]
    """
    if len({len(prompt) for prompt in prompts}) > 1:
        raise ValueError(f"prompts have {[len(p) for p in prompts]} fields; give every prompt the same fields")
    aligned: list[list[list[T]]] = [[] for _ in prompts]
    for c in range(len(prompts[0]) if prompts else 0):
        column = [list(prompt[c]) for prompt in prompts]
        given = [i for i, tokens in enumerate(column) if tokens]
        longest = max((len(tokens) for tokens in column), default=0)
        for i, tokens in enumerate(column):
            source = tokens or (column[min((abs(g - i), g) for g in given)[1]] if given else [])
            aligned[i].append(fill_tokens(source, longest, fill) if source else [])
    return aligned


def within_budget(
    aligned: Sequence[Sequence[Sequence[T]]], real: Sequence[Sequence[int]], budget: int | None
) -> list[list[list[T]]]:
    """Shortens prompts to `budget` tokens: filler of the longest field first, then the end of the quality field.

    Args:
        aligned: prompt -> field -> tokens, of `align_fields`.
        real: prompt -> field -> how many tokens were there before filling (0 for a borrowed field); what is beyond
            them is filler.
        budget: most tokens of a prompt, 75 for CLIP (77 less begin and end); None for no limit.

    Returns:
        prompt -> field -> tokens. Dropped filler shifts what follows it in that prompt alone; that is the price of
        keeping every word.

    Raises:
        ValueError: the first four fields of a prompt are longer than the budget by themselves.
    """
    result = []
    for number, (prompt, counts) in enumerate(zip(aligned, real, strict=True)):
        row = [list(tokens) for tokens in prompt]
        if budget is not None:
            for c in sorted(range(len(row)), key=lambda c: -len(row[c])):
                over = sum(map(len, row)) - budget
                if over > 0:
                    row[c] = row[c][: max(counts[c], len(row[c]) - over)]
            over = sum(map(len, row)) - budget
            if over > 0:
                row[-1] = row[-1][: max(0, len(row[-1]) - over)]
            over = sum(map(len, row)) - budget
            if over > 0:
                sizes = ", ".join(f"{name} {len(tokens)}" for name, tokens in zip(FIELDS, row))
                raise ValueError(
                    f"prompt {number} has {sum(map(len, row))} tokens in its fields ({sizes}), the text encoder reads "
                    f"{budget}; shorten the longest field by {over} tokens, or write align='none'"
                )
        result.append(row)
    return result


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What a tokenizer puts before and after a text, found by asking it."""
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    whole = list(tokenizer("a")["input_ids"])
    for start in range(len(whole) - len(plain) + 1):
        if plain and whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    raise ValueError(
        f"{type(tokenizer).__name__} makes {whole} of 'a' with and {plain} without special tokens, so fields cannot "
        "be joined; write align='none'"
    )


def field_tokens(
    prompts: Sequence[PromptFields], tokenizer: Any, length: int, fill: Fill = "cycle"
) -> list[list[int]]:
    """Token ids of aligned prompts, with special tokens and without padding.

    Args:
        prompts: fields of every prompt.
        tokenizer: of transformers.
        length: positions of the text encoder, special tokens included (77 for CLIP).
        fill: rule of `fill_tokens`.

    Returns:
        One row of at most `length` ids per prompt, all of one length unless the budget cut filler away.

    Raises:
        ValueError: fields that do not fit, see `within_budget`.
    """
    before, after = special_tokens(tokenizer)
    raw = [
        [list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else [] for text in prompt]
        for prompt in prompts
    ]
    aligned = align_fields(raw, fill)
    rows = within_budget(aligned, [[len(t) for t in row] for row in raw], length - len(before) - len(after))
    return [[*before, *(token for field in row for token in field), *after] for row in rows]
