"""`mediaspec demo` refuses what it would otherwise ignore, before it loads anything."""

from __future__ import annotations


def test_a_strength_the_rule_does_not_have_is_refused(command, tmp_path) -> None:
    result = command("demo", "--rule", "exact", "--delta", 2, "--out", tmp_path / "out")
    assert result.exit_code == 2 and "no setting 'delta'" in result.stderr and not (tmp_path / "out").exists()
