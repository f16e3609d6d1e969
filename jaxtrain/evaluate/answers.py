"""Answers that rows have, and how near another is to them, as SQuAD measures it."""

import collections
import re
import string
from collections.abc import Mapping
from typing import Any


def answers_of(row: Mapping[str, Any]) -> list[tuple[str, int]]:
    """The answers of a row and where they start: of lists of text and answer_start (also flattened
    to fields with a dot), or of a list of such; a question that has none has an empty list.

    >>> answers_of({"context": "a b", "answers": {"text": ["b"], "answer_start": [2]}})
    [('b', 2)]
    """
    if not all(isinstance(row.get(name, ""), str) for name in ("question", "context")):
        raise ValueError(f"the row {str(row)[:80]} has a question or context that is no text")
    flat = {name: row.get(f"answers.{name}") for name in ("text", "answer_start")}
    answers = flat if row.get("answers") is None else row["answers"]
    if isinstance(answers, list) and all(isinstance(each, dict) for each in answers):
        answers = {name: [each.get(name) for each in answers] for name in flat}
    texts, starts = (isinstance(answers, dict) and answers.get(name) for name in flat)
    if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
        raise ValueError(
            f"the question {row['question'][:60]!r} has answers that are no lists of text and "
            "answer_start: write them as SQuAD does, in JSON lines or Parquet"
        )
    for text, start in zip(texts, starts, strict=True):
        if type(start) is not int or not isinstance(text, str):
            raise ValueError(
                f"the question {row['question'][:60]!r} has the answer {text!r} at {start!r}: "
                "answer_start is a whole number, in letters from 0, and text a text"
            )
        if not text or row["context"][start : start + len(text)] != text:
            raise ValueError(
                f"the question {row['question'][:60]!r} has the answer {text!r} at {start}, where "
                "its context has something else: correct answer_start, in letters from 0"
            )
    return list(zip(texts, starts, strict=True))


def words_of(text: str) -> list[str]:
    """The words of a text as SQuAD compares them.

    >>> words_of("The answer, an 'Apple'!")
    ['answer', 'apple']
    """
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def exact_match(said: str, gold: str) -> float:
    """Whether two answers have the same words."""
    return float(words_of(said) == words_of(gold))


def word_f1(said: str, gold: str) -> float:
    """The harmonic mean of precision and recall of words.

    >>> round(word_f1("the red apple", "an apple"), 3), word_f1("the", "")
    (0.667, 1.0)
    """
    a, b = words_of(said), words_of(gold)
    if not a or not b:
        return float(a == b)
    both = (collections.Counter(a) & collections.Counter(b)).total()
    return 2 * both / (len(a) + len(b))
