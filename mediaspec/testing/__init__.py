"""Conformance suites for parts that third parties write. Each raises AssertionError saying what is wrong and where."""

from .check_rule import check_rule

__all__ = ["check_rule"]
