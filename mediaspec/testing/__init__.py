"""Conformance suites for parts that third parties write. Each raises AssertionError saying what is wrong and where."""

from .check_drafter import check_drafter
from .check_memory import check_memory
from .check_rule import check_rule
from .check_target import check_target

__all__ = ["check_drafter", "check_memory", "check_rule", "check_target"]
