"""ROUGE and BLEU of what a model writes, by the libraries that publications use."""

import functools
from collections.abc import Sequence
from typing import Literal

import numpy as np

from jaxtrain.host import extras

Measures = tuple[Literal["rouge", "bleu"], ...]
_NEEDS = "ROUGE and BLEU come with rouge-score and sacrebleu"
_rouge = functools.partial(extras.load, _NEEDS, "eval", "rouge_score.rouge_scorer")
_bleu = functools.partial(extras.load, _NEEDS, "eval", "sacrebleu")
ROUGE = ("rouge1", "rouge2", "rougeL")


def check(measures: Measures) -> None:
    """Raises ImportError, before anything is trained, where a library is missing."""
    for name, library in (("rouge", _rouge), ("bleu", _bleu)):
        if name in measures:
            library()


def lines(measures: Measures, found: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Says how near texts are to those that are wanted: the mean F of ROUGE with stemming, in
    percent, as rouge-score has it, and sacrebleu's BLEU of all together, with its signature."""
    told = []
    if "rouge" in measures:
        scorer = _rouge().rouge_scorer.RougeScorer(list(ROUGE), use_stemmer=True)
        scores = [scorer.score(*pair) for pair in zip(wanted, found, strict=True)]
        means = (np.mean([each[name].fmeasure for each in scores]) for name in ROUGE)
        words = ", ".join(f"{n} {100 * x:.2f}" for n, x in zip(ROUGE, means, strict=True))
        told.append(f"ROUGE of {len(found)} held-out texts: {words}")
    if "bleu" in measures:
        bleu = _bleu().BLEU()
        score = bleu.corpus_score(list(found), [list(wanted)]).score
        told.append(f"BLEU of {len(found)} held-out texts: {score:.2f} ({bleu.get_signature()})")
    return told
