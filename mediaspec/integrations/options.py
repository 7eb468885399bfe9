"""Names under which users of other libraries know the settings of speculation, resolved to ours.

transformers   assistant_model, num_assistant_tokens, num_assistant_tokens_schedule, prompt_lookup_num_tokens,
               max_matching_ngram_size
vLLM           num_speculative_tokens, speculative_token_tree and speculative_config={"method": ..., "model": ...,
               "num_speculative_tokens": ..., "speculative_token_tree": ..., "prompt_lookup_max": ...,
               "disable_by_batch_size": ...}
SGLang         speculative_algorithm, speculative_num_steps, speculative_eagle_topk, speculative_num_draft_tokens,
               speculative_draft_model_path
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.tree import TreeSpec
from ..pipelines.draft_trees import draft_tree, likely_tree
from ..pipelines.speculation import Speculation
from ..policies import DraftPolicy

__all__ = ["Speculation", "resolve"]

TRANSFORMERS_DEFAULT = 20  # `num_assistant_tokens` where nobody chose it: transformers fills the field in
METHODS = {
    "ngram": "ngram", "ngram_gpu": "ngram", "prompt_lookup": "ngram", "suffix": "suffix",
    "draft_model": "model", "model": "model", "standalone": "model",
    "eagle": "eagle3", "eagle3": "eagle3", "longspec": "longspec", "lazy": "lazy", "sparse": "sparse", "none": "none",
}  # fmt: skip
ABSENT = {
    "mtp": "heads inside a model", "nextn": "heads inside a model", "medusa": "Medusa heads",
    "mlp_speculator": "MLP speculators", "dflash": "DFlash", "dspark": "DSpark",
}  # fmt: skip
CONFIG = {
    "method": None,
    "model": None,
    "num_speculative_tokens": None,
    "speculative_token_tree": None,
    "disable_by_batch_size": None,
    "prompt_lookup_max": "max_ngram",
    "prompt_lookup_min": "min_ngram",
    "suffix_decoding_max_tree_depth": "max_ngram",
    "suffix_decoding_max_spec_factor": "spec_factor",
    "suffix_decoding_min_token_prob": "min_share",
}
SCHEDULES = ("constant", "heuristic", "heuristic_transient")


def resolve(
    *,
    drafter: Any = None,
    num_draft_tokens: int | None = None,
    tree: TreeSpec | Sequence[Any] | None = None,
    tree_widths: Sequence[int] | None = None,
    policy: DraftPolicy | str | None = None,
    assistant_model: Any = None,
    num_assistant_tokens: int | None = None,
    num_assistant_tokens_schedule: str | None = None,
    prompt_lookup_num_tokens: int | None = None,
    max_matching_ngram_size: int | None = None,
    num_speculative_tokens: int | None = None,
    speculative_token_tree: Sequence[Any] | str | None = None,
    speculative_config: Mapping[str, Any] | None = None,
    speculative_algorithm: str | None = None,
    speculative_draft_model_path: Any = None,
    speculative_num_steps: int | None = None,
    speculative_eagle_topk: int | None = None,
    speculative_num_draft_tokens: int | None = None,
    batch: int = 1,
) -> Speculation:
    """Joins the names of all libraries; ours win, then the more special ones.

    Args:
        batch: rows of the call, for "disable_by_batch_size".

    Raises:
        ValueError: an unknown key or method, with the nearest known one; two drafters or two trees named at once.

    Example:
        >>> resolve(speculative_config={"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3})
        Speculation(drafter='ngram', tokens=4, tree=None, policy=None, ngram={'max_ngram': 3})
    """
    config = dict(speculative_config or {})
    for key in config:
        if key not in CONFIG:
            near = difflib.get_close_matches(key, CONFIG, 1, cutoff=0.0)[0]
            raise ValueError(f"speculative_config has no key {key!r}; did you mean {near!r}? It takes {list(CONFIG)}")
    ngram = {ours: config[key] for key, ours in CONFIG.items() if ours is not None and key in config}
    if "min_ngram" in ngram:  # as vLLM: a bound that is not given is no narrower than the other one
        ngram.setdefault("max_ngram", max(3, ngram["min_ngram"]))
    if max_matching_ngram_size is not None:
        ngram.setdefault("max_ngram", max_matching_ngram_size)
    method = config.get("method", speculative_algorithm)
    models = (drafter, assistant_model, config.get("model"), speculative_draft_model_path)
    named = [one for one in models if one is not None]
    if len(named) > 1:
        raise ValueError(
            "two drafters are named (drafter, assistant_model, speculative_config['model'] and "
            "speculative_draft_model_path mean the same); keep one"
        )
    chosen: Any = named[0] if named else None
    if chosen is None and prompt_lookup_num_tokens is not None:
        chosen = "ngram"
    if chosen is None and method is not None:
        chosen = _method(str(method))
    elif isinstance(chosen, str):
        chosen = METHODS.get(chosen.lower(), chosen)
    if chosen == "model":
        raise ValueError("a draft model is asked for and none is given; pass it as drafter=model")
    trees = {
        "tree": tree,
        "tree_widths": tree_widths,
        "speculative_token_tree": speculative_token_tree,
        "speculative_config['speculative_token_tree']": config.get("speculative_token_tree"),
    }
    shape = _tree(trees, speculative_eagle_topk, speculative_num_steps, speculative_num_draft_tokens)
    theirs = num_assistant_tokens if num_assistant_tokens != TRANSFORMERS_DEFAULT else None
    if num_assistant_tokens_schedule not in (None, *SCHEDULES):
        raise ValueError(
            f"num_assistant_tokens_schedule={num_assistant_tokens_schedule!r}; transformers has {', '.join(SCHEDULES)}"
        )
    if policy is None and theirs is not None and num_assistant_tokens_schedule in SCHEDULES[1:]:
        policy = "survival"  # a length that moves: here by what was accepted and measured, up to the given one
    lengths = (
        num_draft_tokens, num_speculative_tokens, config.get("num_speculative_tokens"), speculative_num_steps,
        _less_one(speculative_num_draft_tokens),
        prompt_lookup_num_tokens, theirs,
    )  # fmt: skip
    tokens = next((one for one in lengths if one is not None), None)
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0):
        raise ValueError(f"the draft length must be an integer >= 0, got {tokens!r}; write num_draft_tokens=5")
    limit = config.get("disable_by_batch_size")
    if isinstance(chosen, str) and chosen == "none" or (limit is not None and batch > limit) or tokens == 0:
        return Speculation("none", 0, None, None, ngram)
    return Speculation(chosen, tokens, shape, policy, ngram)


def _tree(given: Mapping[str, Any], topk: int | None, steps: int | None, draft_tokens: int | None) -> TreeSpec | None:
    """The one tree that is described. SGLang's number of draft tokens counts the tree's root."""
    there = [(name, one) for name, one in given.items() if one is not None]
    if topk is not None and topk > 1:
        there.append(("speculative_eagle_topk", None))
    if len(there) > 1:
        raise ValueError(f"{' and '.join(name for name, _ in there)} describe a tree each; keep one")
    if not there:
        return None
    if there[0][0] != "speculative_eagle_topk":
        return draft_tree(there[0][1])
    depth = 3 if steps is None else steps
    assert topk is not None
    nodes = topk * depth if draft_tokens is None else draft_tokens - 1
    return likely_tree(topk, depth, nodes)


def _less_one(count: int | None) -> int | None:
    """Drafted tokens behind SGLang's count of verified ones."""
    return None if count is None else count - 1


def _method(name: str) -> str:
    if name.lower() in ABSENT:
        raise ValueError(
            f"method {name!r} needs {ABSENT[name.lower()]}, which are not supported; there are {sorted(METHODS)}, a "
            f"transformers model, or a drafter object"
        )
    if name.lower() not in METHODS:
        near = difflib.get_close_matches(name.lower(), METHODS, 1, cutoff=0.0)[0]
        raise ValueError(
            f"no drafter named {name!r} for language models; did you mean {near!r}? There are {sorted(METHODS)}, a "
            f"transformers model, or a drafter object"
        )
    return METHODS[name.lower()]
