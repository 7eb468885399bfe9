"""Rule lists: grammar, values, settings after commas, errors with the nearest name."""

import pytest

from mediaspec.eval.rulespec import check_names, parse_rules


def test_the_readme_list() -> None:
    specs = parse_rules("plain,exact,coupled,cool_sd,lantern++,gsd")
    assert [s.name for s in specs] == ["plain", "exact", "coupled", "cool_sd", "lantern++", "gsd"]
    assert all(s.text == s.name and s.drafter is None and s.settings == {} for s in specs)


def test_settings_and_drafter() -> None:
    one, two = parse_rules("cool_sd@jacobi:delta=1.1,residual=band, exact")
    assert (one.name, one.drafter, one.settings) == ("cool_sd", "jacobi", {"delta": 1.1, "residual": "band"})
    assert one.text == "cool_sd@jacobi:delta=1.1,residual=band"
    assert two.text == "exact"


def test_a_setting_may_follow_a_bare_name() -> None:
    (spec,) = parse_rules("cool_sd,delta=2")
    assert spec.text == "cool_sd:delta=2" and spec.settings == {"delta": 2}


def test_values_are_typed() -> None:
    (spec,) = parse_rules("r:a=1,b=1.5,c=true,d=none,e=word,f=1e-3")
    assert spec.settings == {"a": 1, "b": 1.5, "c": True, "d": None, "e": "word", "f": 1e-3}
    assert type(spec.settings["a"]) is int


def test_settings_of_the_call_are_kept_apart() -> None:
    (spec,) = parse_rules("exact@eagle:num_draft_tokens=7,tree=3x2x1,delta=2")
    assert spec.call_settings() == {"num_draft_tokens": 7, "tree": "3,2,1"}
    assert spec.rule_settings() == {"delta": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty entry"),
        ("plain,,exact", "empty entry"),
        ("plain,plain", "listed twice"),
        ("cool_sd:delta", "write key=value"),
        ("cool_sd:delta=1,delta=2", "given twice"),
        ("Cool SD", "cannot read the rule"),
    ],
)
def test_malformed(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_rules(text)


def test_unknown_rule_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'cool_sd'"):
        check_names(parse_rules("plain,cool-sd:delta=2"), ["plain", "exact", "cool_sd"])
    check_names(parse_rules("plain"), ["plain"])
