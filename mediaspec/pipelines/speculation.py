"""What a text run speculates with: drafters by name, a tree or a length, and the policy that chooses among them.

`mediaspec.speculative` and `TextGenerationPipeline` both end here, so that a setting means the same in both.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from transformers import AutoModelForCausalLM, PreTrainedModel

from ..attention.register import policy_of
from ..core.arm import Arm, make_arms
from ..core.pilot import drafter_name
from ..core.stats import DecodeResult
from ..core.tree import TreeSpec
from ..core.types import Drafter, Warp
from ..drafters import DRAFTERS, make_drafter
from ..drafters._warped import Warped
from ..drafters.jacobi import JacobiDrafter
from ..drafters.model import ModelDrafter
from ..drafters.ngram import NgramDrafter
from ..models.heads import head_kind, load_head, shipped_head, shipped_names
from ..policies import DraftPolicy, make_policy
from ..targets.causal_lm import CausalLMTarget
from .keywords import nearest

__all__ = ["DEFAULT_TOKENS", "Drafting", "Speculation", "prepare"]

DEFAULT_TOKENS = 5
LONGEST, FAR = 8, 4
"""Draft tokens a policy considers at most where nobody named a number: of a lookup, of anything that computes."""
SMALL_TREE = TreeSpec.from_widths([2, 1])
"""Two children, one grandchild each: five scored rows, which a pass over few rows hardly feels."""
ALIASES = {"prompt_lookup": "ngram", "light_transfer": "lazy", "eagle": "eagle3"}


@dataclass(frozen=True)
class Speculation:
    """What was asked for.

    Args:
        drafter: a name, a transformers model or head, a drafter object, a folder of a model or head; a list or a
            mapping of several; None for lookup and every shipped head that fits.
        tokens: draft length; 0 is off, None leaves it to a policy.
        tree: a draft tree; its depth replaces `tokens`.
        policy: a name, a policy, or None for the default: "survival" where neither length nor tree is given.
        ngram: settings of lookup drafters made by name.
    """

    drafter: Any = None
    tokens: int | None = None
    tree: TreeSpec | None = None
    policy: DraftPolicy | str | None = None
    ngram: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Drafting:
    """Drafters, policy and lengths of one run.

    Args:
        drafters: by name; empty where nothing is drafted.
        tokens: K without a policy; tree: likewise.
        policy: None for one fixed drafter.
        models: targets that draft models run in.
        lookups: the caller's own lookup drafters, which are told finished texts.
        model_name: what a policy's learned state belongs to.
    """

    drafters: dict[str, Drafter]
    tokens: int
    tree: TreeSpec | None = None
    policy: DraftPolicy | None = None
    models: list[CausalLMTarget] = field(default_factory=list)
    lookups: list[NgramDrafter] = field(default_factory=list)
    model_name: str = "default"
    _shelf: dict[str, Any] = field(default_factory=dict)
    _key: str | None = None

    @property
    def drafter(self) -> Drafter | dict[str, Drafter] | None:
        """What `Engine` takes."""
        if self.policy is not None:
            return self.drafters
        return next(iter(self.drafters.values()), None)

    @property
    def arguments(self) -> dict[str, Any]:
        """Keywords of `Engine.decode`."""
        return {
            "num_draft_tokens": self.tokens, "tree": self.tree, "policy": self.policy, "policy_model": self.model_name,
        }  # fmt: skip

    @contextmanager
    def at_work(self, target: CausalLMTarget) -> Iterator[None]:
        """Keeps all models attached for the length of a run; afterwards what the policy learned goes on the shelf."""
        with ExitStack() as stack:
            if self._key is not None:
                stack.callback(self._shelf.__setitem__, self._key, self.policy)
            for one in (target, *self.models):
                stack.enter_context(one.attached())
            yield

    def remember(self, result: DecodeResult) -> None:
        """Shows finished texts to lookup drafters that keep some."""
        for lookup in self.lookups:
            for row, count in enumerate(result.lengths):
                lookup.remember(result.tokens[row, :count].clone())

    def settings(self) -> dict[str, Any]:
        """What was used, for `stats`."""
        fixed = self.policy is None
        names = list(self.drafters)
        return {
            "drafter": "none" if not names else names[0] if len(names) == 1 else names,
            "num_draft_tokens": (self.tree.max_depth if self.tree is not None else self.tokens) if fixed else None,
            "tree": None if self.tree is None else list(self.tree.parents),
            "policy": "fixed" if self.policy is None else self.policy.name,
        }


_SHELVES: WeakKeyDictionary[PreTrainedModel, dict[str, Any]] = WeakKeyDictionary()
"""Per model: policies made by name with what they learned in earlier calls, and draft models loaded from folders."""


def prepare(asked: Speculation, target: CausalLMTarget, warp: Warp | None = None, share: bool = False) -> Drafting:
    """Makes the drafters and the policy of a run.

    Args:
        asked: see `Speculation`.
        target: the model being sped up.
        warp: the law drafts had best be drawn from where processors make the run's; None is the run's own.
        share: run the caller's drafter objects themselves; otherwise shallow copies, so that calls may overlap.

    Raises:
        ValueError: an unknown name, a head that does not fit, a tree for drafters of chains, settings that
            contradict each other. TypeError: neither name, model nor drafter.
    """
    if asked.tokens == 0 and asked.tree is None:
        return Drafting({}, 0)
    shelf = _SHELVES.setdefault(target.model, {})
    made = Drafting({}, DEFAULT_TOKENS if asked.tokens is None else asked.tokens, asked.tree, _shelf=shelf)
    made.model_name = f"{type(target.model).__name__}:{target.config.num_hidden_layers}x{target.hidden_size}"
    fixed = asked.policy == "fixed" or (asked.policy is None and (asked.tokens is not None or asked.tree is not None))
    for name, given in _named(asked.drafter, target, fixed, asked.tree is not None, shelf):
        drafter = _make(given, name, target, warp, asked, shelf, made)
        if drafter is None:
            continue
        if isinstance(drafter, NgramDrafter) and drafter.memory:
            made.lookups.append(drafter)
        own = drafter is not given or share
        label = name or (_word(given) if _word(given) in _words() else drafter_name(drafter))
        made.drafters[_free(label, made.drafters)] = drafter if own else copy.copy(drafter)
    if not made.drafters:
        return Drafting({}, 0)
    chains = [name for name, one in made.drafters.items() if _chains_only(one)]
    if asked.tree is not None and len(chains) == len(made.drafters):
        raise ValueError(
            f"the drafter {chains[0]!r} copies one continuation and makes no trees; leave the tree out, or draft with "
            f"a model or a trained head (drafter='eagle3', 'longspec')"
        )
    _choose(made, asked, fixed, chains)
    return made


def _choose(made: Drafting, asked: Speculation, fixed: bool, chains: Sequence[str]) -> None:
    """Sets the policy: the very one that already knows this model, where there is one."""
    policy = asked.policy
    if isinstance(policy, DraftPolicy):
        if asked.tokens is not None or asked.tree is not None:
            what = "num_draft_tokens" if asked.tree is None else "tree"
            raise ValueError(
                f"{what} was given together with a {type(policy).__name__}, whose arms say what is drafted; leave "
                f"{what} out, or name the policy: policy={policy.name!r}"
            )
        made.policy = policy
        return
    if policy is not None and not isinstance(policy, str):
        raise TypeError(f"policy is a {type(policy).__name__}; give a DraftPolicy or a name such as 'survival'")
    if fixed:
        if len(made.drafters) > 1:
            names = ", ".join(map(repr, made.drafters))
            raise ValueError(
                f"{names} are drafters to choose among, but {'policy' if policy else 'length or tree'} is fixed; name "
                f"one drafter, or write policy='survival'"
            )
        return
    settings = _settings(policy or "survival", made, asked, chains)
    name = policy or "survival"
    made._key = repr((name, sorted(made.drafters), sorted(settings.items(), key=lambda item: item[0])))
    # taken off the shelf, so that two calls at a time never run one policy
    known = made._shelf.pop(made._key, None)
    made.policy = make_policy(policy or "survival", **settings) if known is None else known
    made.tokens, made.tree = max(made.tokens, 1), None


def _settings(policy: str, made: Drafting, asked: Speculation, chains: Sequence[str]) -> dict[str, Any]:
    """Arms of a policy made by name: a given length is the longest one, a given tree an arm of its own."""
    longest = LONGEST if asked.tokens is None else asked.tokens
    kind = DraftPolicy.registry.get(policy)
    if kind is None:
        make_policy(policy)  # raises, naming the nearest one
    assert kind is not None
    takes = inspect.signature(kind.__init__).parameters
    lengths: Sequence[int] = range(1, longest + 1)
    if "max_draft_tokens" not in takes:
        lengths = sorted({*(one for one in kind.default_lengths if one <= longest), longest})
    if asked.tree is not None:
        able = [name for name in made.drafters if name not in chains]
        arms = [*make_arms(list(made.drafters), lengths)]
        arms += [Arm(name, asked.tree.max_depth, asked.tree) for name in able]
        return {"arms": [arm.to_dict() for arm in arms]}
    if policy == "survival" and asked.tokens is None:
        return {"arms": [arm.to_dict() for arm in _usual_arms(made, chains)]}
    if "max_draft_tokens" in takes:
        return {"max_draft_tokens": longest}
    return {} if asked.tokens is None or "lengths" not in takes else {"lengths": list(lengths)}


def _usual_arms(made: Drafting, chains: Sequence[str]) -> list[Arm]:
    """What `survival` chooses among where nobody named a length: lookups, which cost nothing, draft far; whatever
    computes its drafts drafts less far, or a small tree."""
    lookups = [name for name in made.drafters if name in chains]
    others = [name for name in made.drafters if name not in chains]
    arms = [*make_arms(lookups, range(1, LONGEST + 1))]
    arms += [arm for arm in make_arms(others, range(1, FAR + 1)) if not arm.off]
    return arms + [Arm(name, SMALL_TREE.max_depth, SMALL_TREE) for name in others]


def _default_heads(target: CausalLMTarget, names: list[str]) -> list[str]:
    """The trained head that drafts where nobody named a drafter: one, since every further one has to be tried out."""
    if policy_of(target.model) is not None:  # an attention policy may leave too few keys for a head that reads them
        names = [name for name in names if name != "longspec"]
    return names[:1]


def _named(
    given: Any, target: CausalLMTarget, fixed: bool, tree: bool, shelf: dict[str, Any]
) -> list[tuple[str | None, Any]]:
    """Names (None: to be found) and what they stand for."""
    if given is None:
        heads = _default_heads(target, _kept(shelf, "shipped", lambda: shipped_names(target)))
        names = [*heads, "ngram"] if not tree else heads or ["ngram"]
        return [(None, name) for name in (names[:1] if fixed else names)]
    if isinstance(given, Mapping):
        return list(given.items())
    if isinstance(given, Sequence) and not isinstance(given, str):
        return [(None, one) for one in given]
    return [(None, given)]


def _make(
    given: Any,
    name: str | None,
    target: CausalLMTarget,
    warp: Warp | None,
    asked: Speculation,
    shelf: dict[str, Any],
    made: Drafting,
) -> Drafter | None:
    """The drafter that a name, a model, a head, a folder or an object stands for."""
    if isinstance(given, str):
        word = _word(given)
        if word == "none":
            return None
        if word == "ngram":
            longest = max(asked.ngram.get("max_ngram", 6), asked.ngram.get("min_ngram", 1))
            # one token alone matches anywhere, and what it foretells is seldom followed
            return NgramDrafter(**{"max_ngram": longest, "min_ngram": min(2, longest), **asked.ngram})
        if word == "suffix":
            return NgramDrafter(**{"max_ngram": 24, "method": "suffix", **asked.ngram})
        if word in ("model", "jacobi") or (word not in DRAFTERS and not os.path.isdir(given)):
            raise ValueError(
                f"drafter={given!r}; {nearest(given, _words())}, a folder, a smaller model of the same tokenizer, or "
                f"a drafter object"
            )
        if word in DRAFTERS:
            takes = inspect.signature(DRAFTERS[word]).parameters
            if "head" not in takes:
                return make_drafter(word, **({"warp": warp} if warp is not None and "warp" in takes else {}))
            given = _kept(shelf, f"{word}:{target.device}:{target.model.dtype}", lambda: shipped_head(word, target))
        else:
            folder = str(given)
            given = _kept(shelf, f"{folder}:{target.device}:{target.model.dtype}", lambda: _load(folder, target))
    kind = head_kind(given)
    if kind is not None:
        # kept with its head, because a drafter prepares the head's weights once; a run gets a copy that shares them
        driver = copy.copy(_kept(shelf, f"{kind}@{id(given)}", lambda: make_drafter(kind, head=given)))
        return driver if warp is None else Warped(driver, warp)
    if isinstance(given, PreTrainedModel):
        small = CausalLMTarget(given, target.num_tokens, vocab_size=target.vocab_size)
        made.models.append(small)
        return ModelDrafter(small, warp)
    if not isinstance(given, Drafter):
        label = "" if name is None else f" {name!r}"
        raise TypeError(
            f"drafter{label} is a {type(given).__name__}; give a name, a smaller transformers model, or a drafter"
        )
    return given


def _kept(shelf: dict[str, Any], key: str, make: Callable[[], Any]) -> Any:
    """What lies on the shelf under a key, made at first."""
    found = shelf.get(key)
    return shelf.setdefault(key, make()) if found is None else found


def _word(given: Any) -> str:
    """The drafter's name behind a name in any spelling; empty for what is no name."""
    if not isinstance(given, str):
        return ""
    word = given if given in DRAFTERS else given.lower()
    return ALIASES.get(word, word)


def _words() -> list[str]:
    """Names that stand for drafters of texts."""
    return sorted({"ngram", "suffix", "none", *DRAFTERS} - {"model", "jacobi", "eagle"})


def _load(folder: str, target: CausalLMTarget) -> PreTrainedModel:
    """A draft model or head from a folder, in the target's dtype and on its device."""
    head = load_head(folder, target)
    if head is not None:
        return head
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=target.model.dtype)
    loaded: PreTrainedModel = model.to(target.device).eval()
    return loaded


def _free(name: str, taken: Mapping[str, Any]) -> str:
    """`name`, or with the first number that makes it new."""
    number = 2
    chosen = name
    while chosen in taken:
        chosen, number = f"{name}{number}", number + 1
    return chosen


def _chains_only(drafter: Drafter) -> bool:
    return isinstance(drafter, (NgramDrafter, JacobiDrafter)) or bool(getattr(drafter, "chains_only", False))
