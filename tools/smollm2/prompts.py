"""What SmolLM2 is asked while it writes the text its draft heads learn from: chat, edits, and questions on documents.

A part of the chat prompts the model writes itself: given the opening of a user's turn it makes one up
(arXiv:2406.08464). The rest come from templates. The subjects differ from those of `mediaspec bench text`.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Request", "USER_TURN", "chat", "documents", "edits", "questions"]

USER_TURN = "<|im_start|>user\n"

TASKS = (
    "Explain {} to a child.", "What is {}?", "Write a short story about {}.", "Write a poem about {}.",
    "List five facts about {}.", "Give me three tips about {}.", "How does {} work?", "Why is {} important?",
    "Write an email to a colleague about {}.", "Describe {} in detail.", "What are the advantages of {}?",
    "Compare {} with {}.", "Write a dialogue between two friends about {}.", "Make a plan for a day with {}.",
    "What should a beginner know about {}?", "Write a Python function that deals with {}.",
    "Give a short history of {}.", "Write a product description for {}.", "What problems can {} cause?",
    "Write a letter of thanks for {}.", "Invent a game about {}.", "Explain step by step how to make {}.",
    "Write a review of a book about {}.", "Ask me three questions about {}.", "Summarise what you know about {}.",
)  # fmt: skip

SUBJECTS = (
    "a bridge", "a garden", "photosynthesis", "the ocean", "a train journey", "coffee", "a thunderstorm", "maps",
    "the violin", "a bakery", "gravity", "bees", "electricity", "winter", "a castle", "sleep", "the Roman Empire",
    "a telescope", "chess", "recycling", "the desert", "a dragon", "friendship", "the internet", "vaccines",
    "a painter", "sorting a list", "prime numbers", "a calendar", "a bank account", "the stock market", "soap",
    "a kite", "glass", "a farm", "a hospital", "dinosaurs", "honesty", "public transport", "a recipe for soup",
    "running", "whales", "the printing press", "a small town", "the Himalayas", "batteries", "steam engines", "rice",
    "a password", "magnets", "a parrot", "mushrooms", "time zones", "the skeleton", "a marathon", "planets",
    "a film festival", "cheese", "wool", "a sailing boat", "the Silk Road", "an orchestra", "probability", "rivers",
    "lightning", "a school", "ice cream", "the human eye", "a mountain hut", "ants", "the piano", "a job interview",
    "solar panels", "a neighbour", "trees", "a birthday party", "text files", "fractions", "binary search", "a hotel",
)  # fmt: skip

EDITS = (
    "Repeat the following text exactly.\n\n{text}",
    "Copy this text and change the word '{old}' to '{new}'.\n\n{text}",
    "Correct the spelling in the following text and return the whole text.\n\n{text}",
    "Rewrite this text with the same words, but put every sentence on its own line.\n\n{text}",
    "Return the following text unchanged and add one sentence at the end.\n\n{text}",
    "Rename '{old}' to '{new}' everywhere and give me the complete result.\n\n{text}",
    "Here is a draft:\n\n{text}\n\nPlease return the same draft with better punctuation.",
)

QUESTIONS = (
    "Summarise the following text.\n\n{text}", "{text}\n\nWhat is this text about? Answer in a few sentences.",
    "Read the text and list its main points.\n\n{text}", "{text}\n\nQuote the sentence that mentions '{word}'.",
    "{text}\n\nWhat does the text say about '{word}'?", "Write a title and a short abstract for this text.\n\n{text}",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """One user's turn and how it is answered: greedily where `temperature` is 0, with at most `limit` tokens."""

    text: str
    temperature: float
    limit: int


def chat(rng: random.Random) -> Request:
    """An open question."""
    task = rng.choice(TASKS)
    subjects = rng.sample(SUBJECTS, task.count("{}"))
    return Request(task.format(*subjects), rng.choice((0.0, 0.0, 0.7)), 192)


def edits(rng: random.Random, text: str) -> Request:
    """A request whose answer is mostly `text` again."""
    words = [word for word in text.split() if word.isalpha() and len(word) > 3] or ["text"]
    old, new = rng.choice(words), rng.choice(("river", "result", "Alice", "blue", "index", "value", "winter"))
    return Request(rng.choice(EDITS).format(text=text, old=old, new=new), 0.0, 192)


def questions(rng: random.Random, text: str) -> Request:
    """A request about a document."""
    words = [word for word in text.split() if word.isalpha() and len(word) > 4] or ["text"]
    return Request(rng.choice(QUESTIONS).format(text=text, word=rng.choice(words)), rng.choice((0.0, 0.0, 0.7)), 128)


def documents(rng: random.Random) -> Iterator[str]:
    """Ordinary text: documentation strings and comments of Python's standard library, module by module."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    rng.shuffle(files)
    for file in files:
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
        joined = "\n\n".join(text for text in texts if len(text) > 60)
        if len(joined) > 400:
            yield joined
