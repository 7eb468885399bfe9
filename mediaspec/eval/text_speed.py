"""Speed of decoding texts: all configurations in turn on the same prompts, ratios per token, median over repeats.

What is compared is decoding: the seconds from the end of the pass that reads the prompt to the end of the call, over
the tokens that came in them (a row's first token comes out of the prompt's pass). Reading the prompt costs the same
whatever drafts afterwards, and on a long prompt it would hide everything else; ratios of whole calls stand beside as
`ratio_with_prefill`. A ratio of one repeat is that of sums over all prompts, so a prompt counts by its length.

Within a repeat, and within a batch of prompts, the configurations run one after the other in an order that rotates.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .speed import quartiles
from .text_tasks import TextPrompt

__all__ = ["PLAIN", "TextRun", "TextRunner", "interleave_texts", "summarise_texts"]

PLAIN = "plain"
"""Label of our own loop without speculation, the numerator of `ratio_to_plain`."""


@dataclass(frozen=True)
class TextRun:
    """One timed call.

    Args:
        seconds: wall time of the whole call, from chats to texts.
        prefill_seconds: the part of it until the prompts were read.
        tokens: new ids of every row, with the stop id where one was reached.
        target_calls: passes of the target, each for the whole batch; reading the prompts is one.
        tokens_per_call: new tokens per target pass and row.
        guarantee: of the rule; None for a peer.
        drift: mean accumulated TV bound per row.
        split: seconds per phase, as the pipeline reports them.
        settings: as resolved by the pipeline.
    """

    seconds: float
    prefill_seconds: float
    tokens: list[list[int]]
    target_calls: int
    tokens_per_call: float
    guarantee: str | None = None
    drift: float = 0.0
    split: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def new_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def decoded(self) -> int:
        """New tokens that did not come out of reading the prompt."""
        return self.new_tokens - len(self.tokens)


@dataclass(frozen=True)
class TextRunner:
    """One configuration.

    Args:
        label: distinct among the runners.
        run: `run(prompts, seeds)` writes one text per prompt.
        names: "rule", "policy" and "drafter" of the rows.
        peer: another library's decoding of the same weights.
    """

    label: str
    run: Callable[[Sequence[TextPrompt], Sequence[int]], TextRun]
    names: Mapping[str, str]
    peer: bool = False


Runs = dict[str, list[list[TextRun]]]
"""label -> repeat -> batch"""


def interleave_texts(
    runners: Sequence[TextRunner],
    prompts: Sequence[TextPrompt],
    *,
    repeats: int = 5,
    batch_size: int = 1,
    seed: int = 0,
    on_run: Callable[[int, int, str, TextRun], None] | None = None,
) -> Runs:
    """Times all runners in turn; every repeat decodes every prompt once with each of them.

    Args:
        runners: with distinct labels.
        prompts: cut into batches in their order; the last one may be smaller.
        repeats: timed rounds; the first batch is run once before them and thrown away.
        batch_size: prompts per call.
        seed: prompt k gets seed + k.
        on_run: told (repeat, batch, label, run) of every timed call.

    Raises:
        ValueError: nothing to run, a number below 1, or a label used twice.
    """
    if repeats < 1 or batch_size < 1 or not prompts or not runners:
        raise ValueError(
            f"repeats is {repeats}, batch_size {batch_size}, with {len(prompts)} prompts and {len(runners)} "
            f"configurations; give at least 1 of each"
        )
    labels = [runner.label for runner in runners]
    if len(set(labels)) != len(labels):
        raise ValueError(f"labels {labels} are not distinct; list each configuration once")
    batches = []
    for at in range(0, len(prompts), batch_size):
        some = prompts[at : at + batch_size]
        batches.append((some, [seed + at + k for k in range(len(some))]))
    for runner in runners:
        runner.run(*batches[0])
    runs: Runs = {label: [[] for _ in range(repeats)] for label in labels}
    for repeat in range(repeats):
        for number, (some, seeds) in enumerate(batches):
            shift = (repeat * len(batches) + number) % len(runners)
            for runner in [*runners[shift:], *runners[:shift]]:
                run = runner.run(some, seeds)
                runs[runner.label][repeat].append(run)
                if on_run is not None:
                    on_run(repeat, number, runner.label, run)
    return runs


def summarise_texts(runs: Runs, runners: Sequence[TextRunner], task: str) -> list[dict[str, Any]]:
    """Rows of the table, in the order of the runners.

    Args:
        runs: from `interleave_texts`.
        runners: the same; one of them is labelled `PLAIN`.
        task: written into every row.

    Returns:
        per runner: task, rule, policy, drafter, label, peer; ratio_to_plain and ratio_to_best_peer of decoding per
        token, with quartiles, and best_peer, the rule of the peer that decoded fastest (None without peers);
        ratio_with_prefill and ratio_with_prefill_to_best_peer of whole calls; tokens_per_call; seconds (mean of a
        call), seconds_iqr, prefill_seconds, seconds_per_token, tokens_per_second; tokens and target_calls of a repeat;
        equal_to_plain (texts with the very tokens of plain) of texts; guarantee, drift, seconds_split, settings,
        repeats. Medians over repeats.

    Raises:
        ValueError: plain was not run, or no text is longer than one token.
    """
    if PLAIN not in runs:
        raise ValueError(f"ratios need the configuration {PLAIN!r}, and only {', '.join(runs)} were run")
    decode = {label: [_per_token(calls, True) for calls in own] for label, own in runs.items()}
    whole = {label: [_per_token(calls, False) for calls in own] for label, own in runs.items()}
    peers = [runner for runner in runners if runner.peer]
    best = min(peers, key=lambda peer: statistics.median(decode[peer.label]), default=None)
    best_whole = min(peers, key=lambda peer: statistics.median(whole[peer.label]), default=None)
    rows = []
    for runner in runners:
        own = runs[runner.label]
        calls = [run for repeat in own for run in repeat]
        ratios = _ratios(decode[PLAIN], decode[runner.label])
        against = None if best is None else _ratios(decode[best.label], decode[runner.label])
        against_whole = None if best_whole is None else _ratios(whole[best_whole.label], whole[runner.label])
        seconds = [statistics.fmean(run.seconds for run in repeat) for repeat in own]
        equal, texts = _equal(runs[PLAIN], own)
        phases = sorted({phase for run in calls for phase in run.split})
        per_token = statistics.median(decode[runner.label])
        rows.append(
            {
                "task": task,
                **runner.names,
                "label": runner.label,
                "peer": runner.peer,
                "ratio_to_plain": round(statistics.median(ratios), 4),
                "ratio_quartiles": [round(q, 4) for q in quartiles(ratios)],
                "ratio_to_best_peer": None if against is None else round(statistics.median(against), 4),
                "best_peer_quartiles": None if against is None else [round(q, 4) for q in quartiles(against)],
                "best_peer": None if best is None else best.names["rule"],
                "ratio_with_prefill": round(statistics.median(_ratios(whole[PLAIN], whole[runner.label])), 4),
                "ratio_with_prefill_to_best_peer": None
                if against_whole is None
                else round(statistics.median(against_whole), 4),
                "tokens_per_call": round(_weighted_tokens_per_call(calls), 4),
                "seconds": round(statistics.median(seconds), 5),
                "seconds_iqr": round(quartiles(seconds)[1] - quartiles(seconds)[0], 5),
                "prefill_seconds": round(
                    statistics.median(statistics.fmean(run.prefill_seconds for run in repeat) for repeat in own), 5
                ),
                "seconds_per_token": round(per_token, 6),
                "tokens_per_second": round(1 / per_token, 2),
                "tokens": round(sum(run.new_tokens for run in calls) / len(own), 2),
                "target_calls": round(sum(run.target_calls for run in calls) / len(own), 2),
                "equal_to_plain": equal,
                "texts": texts,
                "guarantee": calls[0].guarantee,
                "drift": round(statistics.fmean(run.drift for run in calls), 6),
                "seconds_split": {
                    phase: round(statistics.fmean(run.split.get(phase, 0.0) for run in calls), 5) for phase in phases
                },
                "settings": dict(calls[0].settings),
                "repeats": len(own),
            }
        )
    return rows


def _per_token(calls: Sequence[TextRun], decoding: bool) -> float:
    """Seconds per token of one repeat: of decoding, or of whole calls."""
    tokens = sum(run.decoded if decoding else run.new_tokens for run in calls)
    seconds = sum(run.seconds - (run.prefill_seconds if decoding else 0.0) for run in calls)
    if tokens < 1:
        raise ValueError(
            "no text is longer than its first token, so there is no decoding to time; raise --max-new-tokens, or give "
            "prompts that the model answers"
        )
    return seconds / tokens


def _ratios(base: Sequence[float], own: Sequence[float]) -> list[float]:
    return [theirs / ours for theirs, ours in zip(base, own, strict=True)]


def _weighted_tokens_per_call(calls: Sequence[TextRun]) -> float:
    """Tokens of all texts over their passes: calls with many tokens count for more."""
    passes = sum(run.new_tokens / run.tokens_per_call for run in calls)
    return sum(run.new_tokens for run in calls) / passes


def _equal(plain: Sequence[Sequence[TextRun]], own: Sequence[Sequence[TextRun]]) -> tuple[int, int]:
    """How many texts are plain's, of how many."""
    pairs = [
        (ours, theirs)
        for repeat, base in zip(own, plain, strict=True)
        for run, other in zip(repeat, base, strict=True)
        for ours, theirs in zip(run.tokens, other.tokens, strict=True)
    ]
    return sum(ours == theirs for ours, theirs in pairs), len(pairs)
