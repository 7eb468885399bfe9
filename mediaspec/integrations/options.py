"""Names under which users of other libraries know the settings of speculation, resolved to ours.

transformers   assistant_model, num_assistant_tokens, prompt_lookup_num_tokens, max_matching_ngram_size
vLLM           speculative_config={"method": ..., "model": ..., "num_speculative_tokens": ..., "prompt_lookup_max": ...}
SGLang         speculative_algorithm, speculative_num_steps
"""  # noqa: E501

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Speculation", "resolve"]

DEFAULT_TOKENS = 5
TRANSFORMERS_DEFAULT = 20  # `num_assistant_tokens` where nobody chose it: transformers fills the field in
METHODS = {
    "ngram": "ngram", "ngram_gpu": "ngram", "suffix": "suffix", "draft_model": "model", "model": "model",
    "standalone": "model", "none": "none",
}  # fmt: skip
CONFIG = {
    "method": None,
    "model": None,
    "num_speculative_tokens": None,
    "prompt_lookup_max": "max_ngram",
    "prompt_lookup_min": "min_ngram",
    "suffix_decoding_max_tree_depth": "max_ngram",
    "suffix_decoding_max_spec_factor": "spec_factor",
    "suffix_decoding_min_token_prob": "min_share",
}


@dataclass(frozen=True)
class Speculation:
    """What to draft with.

    Args:
        drafter: "ngram", "suffix", "none", a transformers model, or a drafter of this library.
        tokens: draft length; 0 is off.
        ngram: settings of the `NgramDrafter`.
    """

    drafter: Any
    tokens: int
    ngram: Mapping[str, Any]


def resolve(
    *,
    drafter: Any = None,
    num_draft_tokens: int | None = None,
    assistant_model: Any = None,
    num_assistant_tokens: int | None = None,
    prompt_lookup_num_tokens: int | None = None,
    max_matching_ngram_size: int | None = None,
    num_speculative_tokens: int | None = None,
    speculative_config: Mapping[str, Any] | None = None,
    speculative_algorithm: str | None = None,
    speculative_num_steps: int | None = None,
) -> Speculation:
    """Joins the names of all libraries; ours win, then the more special ones.

    Raises:
        ValueError: an unknown key or method, with the nearest known one; two drafters named at once.

    Example:
        >>> resolve(speculative_config={"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3})
        Speculation(drafter='ngram', tokens=4, ngram={'max_ngram': 3})
    """
    config = dict(speculative_config or {})
    for key in config:
        if key not in CONFIG:
            near = difflib.get_close_matches(key, CONFIG, 1, cutoff=0.0)[0]
            raise ValueError(f"speculative_config has no key {key!r}; did you mean {near!r}? It takes {list(CONFIG)}")
    ngram = {ours: config[key] for key, ours in CONFIG.items() if ours is not None and key in config}
    if max_matching_ngram_size is not None:
        ngram.setdefault("max_ngram", max_matching_ngram_size)
    method = config.get("method", speculative_algorithm)
    named = [one for one in (drafter, assistant_model, config.get("model")) if one is not None]
    if len(named) > 1:
        raise ValueError(
            "two drafters are named (drafter, assistant_model and speculative_config['model'] mean the same); keep one"
        )
    chosen: Any = named[0] if named else None
    if chosen is None and prompt_lookup_num_tokens is not None:
        chosen = "ngram"
    if chosen is None:
        chosen = _method(str(method)) if method is not None else "ngram"
    elif isinstance(chosen, str):
        chosen = _method(chosen)
    if chosen == "model":
        raise ValueError("a draft model is asked for and none is given; pass it as drafter=model")
    theirs = num_assistant_tokens if num_assistant_tokens != TRANSFORMERS_DEFAULT else None
    lengths = (
        num_draft_tokens, num_speculative_tokens, config.get("num_speculative_tokens"), speculative_num_steps,
        prompt_lookup_num_tokens, theirs,
    )  # fmt: skip
    tokens = next((one for one in lengths if one is not None), DEFAULT_TOKENS)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
        raise ValueError(f"the draft length must be an integer >= 0, got {tokens!r}; write num_draft_tokens=5")
    return Speculation(chosen, 0 if chosen == "none" else tokens, ngram)


def _method(name: str) -> str:
    if name.lower() not in METHODS:
        near = difflib.get_close_matches(name.lower(), METHODS, 1, cutoff=0.0)[0]
        raise ValueError(
            f"no drafter named {name!r} for language models; did you mean {near!r}? There are {sorted(METHODS)}, a "
            f"transformers model, or a drafter object"
        )
    return METHODS[name.lower()]
