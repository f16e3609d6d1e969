"""Which of two sentences a model finds likelier: pairs that differ in a group that they name.

The form is that of CrowS-Pairs (Nangia et al. 2020, https://arxiv.org/abs/2010.00133) and of
StereoSet within sentences (Nadeem et al. 2021): rows with ``more``, the sentence that says what is
said of a group more often, ``less``, the same with another group or word, and perhaps ``kind``.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain import data
from jaxtrain.data.enclosed import MASK, row_ends, special_id
from jaxtrain.evaluate.intervals import interval
from jaxtrain.evaluate.scoring import MaskedScorer, Row, Scorer, with_all_rows
from jaxtrain.hf.opening import Opened
from jaxtrain.models.decoder import DecoderConfig

SIDES = ("more", "less")


def preferences(
    path: str, opened: Opened, *, mesh: Any, rows: int = 16
) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns, by score and by kind (``all`` has all pairs), how many ``pairs`` there are, the
    ``share`` of them in which ``more`` is likelier (a tie is half a pair), by how many ``nats`` it
    is so on average, and the 95 % intervals of both, ``share_interval`` and ``nats_interval``.

    Scores are ``whole``, the log-likelihood of a sentence (by an encoder its pseudo-log-likelihood)
    and, by an encoder, ``shared``: of the tokens that both sentences have, so that how frequent
    the words are in which they differ does not count (the score of CrowS-Pairs).

    Args:
      path: JSON lines, CSV, TSV or Parquet.
      opened: the model.
      mesh: where it lies.
      rows: of a batch.

    Raises:
      ValueError: there are no such rows, or one is too long for the model.
    """
    table = list(data.rows_in(path, SIDES))
    if not table:
        raise ValueError(f"'{path}' has no row: name a file of pairs")
    texts = [str(row[side]) for row in table for side in SIDES]
    sentences = [each.tolist() for each in opened.tokenizer.encode_batch(texts)]
    kinds = np.array([str(row.get("kind") or "") for row in table])
    more, less = sentences[::2], sentences[1::2]
    same = [_shared(*pair) for pair in zip(more, less, strict=True)]
    if isinstance(opened.model, DecoderConfig):
        scorer = Scorer(with_all_rows(opened), opened.params, mesh=mesh, rows=rows)
        begin = opened.begin[0][-1:] or (opened.tokenizer.eod,)
        asked = [Row([*begin, *tokens], len(tokens)) for tokens in sentences]
        nats = np.array([each.logprob for each in scorer(asked)]).reshape(-1, 2)
        scores = {"whole": nats}
    else:
        first, _, last = row_ends(opened.tokenizer)
        given = {"ends": (first, last), "mask": special_id(opened.tokenizer, MASK), "rows": rows}
        found = MaskedScorer(opened.model, opened.params, mesh=mesh, **given)(sentences)
        kept = [places for pair in same for places in pair]
        shared = [each[places].sum() for each, places in zip(found, kept, strict=True)]
        scores = {
            "whole": np.array([each.sum() for each in found]).reshape(-1, 2),
            "shared": np.array(shared).reshape(-1, 2),
        }
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for name, nats_N2 in scores.items():
        apart_N = nats_N2[:, 0] - nats_N2[:, 1]
        results[name] = {"all": _summary(apart_N)}
        if kinds.any():
            results[name] |= {kind: _summary(apart_N[kinds == kind]) for kind in sorted(set(kinds))}
    return results


def table_lines(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Returns the results as lines of text."""
    lines = []
    for score, kinds in results.items():
        for kind, found in kinds.items():
            (low, high), (least, most) = found["share_interval"], found["nats_interval"]
            lines.append(
                f"  {score:6}  {kind or '(no kind)':20}  {found['pairs']:6,} pairs  likelier "
                f"{found['share']:6.1%} ({low:.1%} to {high:.1%}), by {found['nats']:+.3f} nats "
                f"({least:+.3f} to {most:+.3f})"
            )
    return lines


def _summary(apart_N: np.ndarray) -> dict[str, Any]:
    wins_N = (apart_N > 0) + (apart_N == 0) / 2
    return {
        "pairs": len(apart_N),
        "share": float(wins_N.mean()),
        "share_interval": interval(np.mean, wins_N),
        "nats": float(apart_N.mean()),
        "nats_interval": interval(np.mean, apart_N),
    }


def _shared(a: Sequence[int], b: Sequence[int]) -> tuple[list[int], list[int]]:
    """The places of the tokens that two sentences have in common, in order, in each.

    >>> _shared([1, 2, 3, 9], [1, 5, 3, 9])
    ([0, 2, 3], [0, 2, 3])
    """
    blocks = difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    spans = [(range(i, i + n), range(j, j + n)) for i, j, n in blocks]
    return [i for one, _ in spans for i in one], [j for _, two in spans for j in two]
