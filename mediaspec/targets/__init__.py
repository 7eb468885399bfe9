"""One adapter per model family: a network behind the `Target` contract of `mediaspec.core.types`."""

from .llamagen import ClassCondition, LlamaGenTarget, TextCondition

__all__ = ["ClassCondition", "LlamaGenTarget", "TextCondition"]
