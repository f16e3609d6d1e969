"""Small encoders of transformers, randomly initialised and saved, that ours are compared with."""

import dataclasses

import numpy as np

from tests.hf import models
from tests.hf.models import random_model, transformers

SIZES = {name: n for name, n in models.SIZES.items() if name != "num_key_value_heads"}
ROBERTA = SIZES | dict(type_vocab_size=1, max_position_embeddings=66)
MODERN = SIZES | dict(
    num_hidden_layers=5,
    local_attention=6,
    rope_parameters={
        "full_attention": dict(rope_type="default", rope_theta=1e3),
        "sliding_attention": dict(rope_type="default", rope_theta=50.0),
    },
    **dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2),
)
TOKENS, CLASSES, TAGS, SPANS, NONE = (
    "AutoModelForMaskedLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
    "AutoModel",
)

SEVERAL = "multi_label_classification"

# By name: the model type, its fields, and what it is for. The first ones are in the everyday tests.
MODELS = {
    "bert, tokens": ("bert", SIZES, TOKENS),
    "roberta, classes": ("roberta", ROBERTA | dict(num_labels=3), CLASSES),
    "bert, classes": ("bert", SIZES | dict(num_labels=5), CLASSES),
    "bert, score": ("bert", SIZES | dict(num_labels=1, problem_type="regression"), CLASSES),
    "bert, labels": ("bert", SIZES | dict(num_labels=5, problem_type=SEVERAL), CLASSES),
    "roberta, labels": ("roberta", ROBERTA | dict(num_labels=4, problem_type=SEVERAL), CLASSES),
    "modernbert, score": (
        "modernbert",
        MODERN | dict(num_labels=1, problem_type="regression"),
        CLASSES,
    ),
    "bert, none": ("bert", SIZES, NONE),
    "bert, tanh gelu": (
        "bert",
        SIZES | dict(hidden_act="gelu_new", layer_norm_eps=1e-6, type_vocab_size=3),
        TOKENS,
    ),
    "roberta, tokens": ("roberta", ROBERTA, TOKENS),
    "roberta, none": ("roberta", ROBERTA, NONE),
    "modernbert, tokens": ("modernbert", MODERN, TOKENS),
    "modernbert, classes": ("modernbert", MODERN | dict(num_labels=3), CLASSES),
    "modernbert, mean": (
        "modernbert",
        MODERN
        | dict(num_labels=3, classifier_pooling="mean", hidden_activation="gelu_pytorch_tanh"),
        CLASSES,
    ),
    "modernbert, none": ("modernbert", MODERN, NONE),
    "bert, tags": ("bert", SIZES | dict(num_labels=5), TAGS),
    "bert, spans": ("bert", SIZES, SPANS),
    "roberta, tags": ("roberta", ROBERTA | dict(num_labels=3), TAGS),
    "roberta, spans": ("roberta", ROBERTA, SPANS),
    "modernbert, tags": ("modernbert", MODERN | dict(num_labels=3), TAGS),
    "modernbert, spans": ("modernbert", MODERN, SPANS),
}
EVERYDAY = [*list(MODELS)[:2], "modernbert, tokens", "bert, spans", "bert, labels"]


def save(name, folder, **options):
    """Saves a model whose every parameter is random, so that each of them counts."""
    kind, fields, head = MODELS[name]
    model = random_model(head, kind, fields, lambda path, x: "norm.weight" in path.lower())
    model.save_pretrained(folder, **options)
    return folder


def batch(name):
    """Rows of which two end in padding, with types and with targets."""
    kind, fields, head = MODELS[name]
    rng = np.random.default_rng(0)
    segments = (np.arange(24) < np.array([[24], [17], [24], [9]])).astype(np.int32)
    rows = {
        "tokens": rng.integers(3, 61, (4, 24)).astype(np.int32) * segments,
        "segments": segments,
        "types": rng.integers(0, fields.get("type_vocab_size", 2), (4, 24)).astype(np.int32),
    }
    if kind == "roberta":  # whose padding says where positions begin
        rows["tokens"] += 1 - segments
    if head == CLASSES:
        label = rng.integers(0, fields["num_labels"], 4).astype(np.int32)
        if "problem_type" in fields:
            several = fields["problem_type"] == SEVERAL
            label = (
                rng.normal(size=4) if not several else rng.random((4, fields["num_labels"])) < 0.4
            )
            label = label.astype(np.float32)
        return rows | {"label": label, "mask": np.ones(4, np.float32)}
    if head == SPANS:
        span = np.array([[3, 20], [0, 0], [1, 1], [2, 8]], np.int32)
        return rows | {"span": span, "mask": np.ones(4, np.float32)}
    mask = ((rng.random((4, 24)) < 0.4) & (segments > 0)).astype(np.float32)
    kinds = (0, fields["num_labels"]) if head == TAGS else (3, 61)
    return rows | {"targets": rng.integers(*kinds, (4, 24)).astype(np.int32), "mask": mask}


def without_dropout(config):
    return dataclasses.replace(config, dropout=0.0, attention_dropout=0.0)


def with_classes(config, number):
    return dataclasses.replace(config, head="classes", classes=number)


def theirs(name, folder, rows):
    """What transformers computes of a folder: outputs, the loss, and gradients by their names."""
    import torch

    head = MODELS[name][2]
    model = getattr(transformers(), head).from_pretrained(folder, dtype=torch.float32).eval()
    given = {"input_ids": rows["tokens"], "attention_mask": rows["segments"]}
    if MODELS[name][0] != "modernbert":
        given["token_type_ids"] = rows["types"]
    if head in (TOKENS, TAGS):
        given["labels"] = np.where(rows["mask"] > 0, rows["targets"], -100)
    elif head == CLASSES:
        given["labels"] = rows["label"]
    given = {
        key: torch.tensor(x, dtype=torch.float32 if x.dtype == np.float32 else torch.int64)
        for key, x in given.items()
    }
    found = model(**given)
    if head == NONE:
        return found.last_hidden_state.detach().numpy(), None, {}
    logits, loss = getattr(found, "logits", None), found.loss
    if head == SPANS:  # whose loss there counts padding among the places
        logits = torch.stack([found.start_logits, found.end_logits], -1)
        seen = torch.tensor(rows["segments"])[..., None] > 0
        span = torch.tensor(rows["span"], dtype=torch.int64)
        loss = torch.nn.functional.cross_entropy(logits.masked_fill(~seen, -1e30), span)
    loss.backward()
    grads = {path: x.grad.numpy() for path, x in model.named_parameters() if x.grad is not None}
    return logits.detach().numpy(), float(loss.detach()), grads
