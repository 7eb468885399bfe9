"""Rule lists as one string: `plain,exact,cool_sd:delta=1.1,residual=band,coupled@jacobi`.

    list  = entry {"," entry}
    entry = name ["@" drafter] [":" key "=" value {"," key "=" value}]

A piece `key=value` after a comma belongs to the entry before it, so settings may be separated by commas too. Values
are read as int, float, true / false / none, or text. `plain` is the target alone, with nothing drafted. Two keys
concern the call and not the rule: `num_draft_tokens=6` and `tree=3x2x1` (children per level).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..pipelines.keywords import nearest

__all__ = ["RuleSpec", "Value", "check_names", "parse_rules"]

Value = int | float | bool | str | None

CALL_KEYS = ("num_draft_tokens", "tree")

_ENTRY = re.compile(r"^(?P<name>[a-z][a-z0-9_+\-]*)(?:@(?P<drafter>[a-z][a-z0-9_\-]*))?(?::(?P<settings>.*))?$")
_SETTING = re.compile(r"^[a-z_][a-z0-9_]*=")


@dataclass(frozen=True)
class RuleSpec:
    """One entry.

    Args:
        text: the entry in canonical writing, the label of its rows in every table.
        name: rule name, or "plain" or "hf_generate".
        drafter: drafter name, None for the pipeline's own.
        settings: all of its settings, those of the rule and those of the call.
    """

    text: str
    name: str
    drafter: str | None = None
    settings: dict[str, Value] = field(default_factory=dict)

    def rule_settings(self) -> dict[str, Value]:
        """The settings that the rule itself is built with."""
        return {key: value for key, value in self.settings.items() if key not in CALL_KEYS}

    def call_settings(self) -> dict[str, Value]:
        """The settings of the call: num_draft_tokens, and tree as "3,2,1"."""
        found = {key: value for key, value in self.settings.items() if key in CALL_KEYS}
        if "tree" in found:
            found["tree"] = str(found["tree"]).replace("x", ",")
        return found


def _value(text: str) -> Value:
    lowered = text.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    if lowered == "none":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def parse_rules(text: str) -> list[RuleSpec]:
    """Reads a list of rules.

    Args:
        text: see the module's head.

    Returns:
        The entries in order. Writing the same entry twice is an error, its rows could not be told apart.

    Raises:
        ValueError: empty list, malformed entry, repeated key or entry.

    Example: `[r.text for r in parse_rules("plain,cool_sd:delta=2")] == ["plain", "cool_sd:delta=2"]`
    """
    entries: list[str] = []
    for piece in (p.strip() for p in text.split(",")):
        if _SETTING.match(piece) and entries:
            entries[-1] += ("," if ":" in entries[-1] else ":") + piece
        elif piece:
            entries.append(piece)
        else:
            raise ValueError(f"{text!r} has an empty entry; write rules as 'plain,exact,cool_sd:delta=1.1'")
    out: list[RuleSpec] = []
    for entry in entries:
        match = _ENTRY.match(entry)
        if match is None:
            raise ValueError(
                f"cannot read the rule {entry!r}; write name, name@drafter or name:key=value, as in cool_sd:delta=1.1"
            )
        settings: dict[str, Value] = {}
        for part in filter(None, (match["settings"] or "").split(",")):
            key, sign, value = part.partition("=")
            if not sign or not key or not value:
                raise ValueError(
                    f"cannot read the setting {part!r} of {entry!r}; write key=value, as in 'cool_sd:delta=1.1'"
                )
            if key in settings:
                raise ValueError(f"{key!r} is given twice in {entry!r}; give it once")
            settings[key] = _value(value)
        written = ",".join(f"{k}={v}" for k, v in settings.items())
        label = (
            match["name"] + (f"@{match['drafter']}" if match["drafter"] else "") + (f":{written}" if written else "")
        )
        if label in [spec.text for spec in out]:
            raise ValueError(f"{label!r} is listed twice in {text!r}; list each rule once")
        out.append(RuleSpec(label, match["name"], match["drafter"], settings))
    return out


def check_names(specs: Iterable[RuleSpec], rules: Iterable[str]) -> None:
    """Refuses rule names that do not exist, naming the nearest one that does.

    Args:
        specs: parsed entries.
        rules: allowed rule names, "plain" included.
    """
    allowed = list(rules)
    for spec in specs:
        if spec.name not in allowed:
            raise ValueError(f"there is no rule {spec.name!r}; {nearest(spec.name, allowed)}")
