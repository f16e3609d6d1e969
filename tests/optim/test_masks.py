"""Masks and stacked axes by path and rank."""

import jax
import jax.numpy as jnp
import pytest

from jaxtrain.optim import by_path, decay_mask, hidden_matrices, stacked_axes
from jaxtrain.tree import named_leaves


def nested(shapes):
    """Builds a tree of abstract arrays from {path: shape}."""
    tree = {}
    for path, shape in shapes.items():
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = jax.ShapeDtypeStruct(shape, jnp.float32)
    return tree


def true_paths(mask):
    return {path for path, value in named_leaves(mask).items() if value}


def test_default_decay_is_by_rank_per_layer_and_by_name():
    decays = {
        "blocks/attn/q/kernel": (4, 8, 8),
        "blocks/normal_proj/kernel": (4, 8, 8),
        "blocks/lnear": (4, 8, 8),
        "wte": (16, 8),
        "conv/kernel": (3, 3, 8, 8),
        "biases_table": (8, 8),
    }
    does_not = {
        "blocks/attn/q/bias": (4, 2, 8),
        "blocks/mlp/b": (4, 8),
        "blocks/attn_norm/scale": (4, 8),
        "blocks/norm1/w": (4, 8, 8),
        "blocks/q_norm/w": (4, 2, 8),
        "LayerNorm_0/w": (8, 8),
        "BatchNorm_12/w": (8, 8),
        "rmsnorm/w": (8, 8),
        "norm_out/w": (8, 8),
        "ln_f/w": (8, 8),
        "ln1/w": (8, 8),
        "mlp/out_bias": (2, 8),
        "temperature": (),
        "position": (8,),
    }
    mask = decay_mask(nested(decays | does_not), stacked=(r"^blocks/",))
    assert true_paths(mask) == set(decays)


def test_without_stacking_a_stack_of_vectors_is_a_matrix():
    params = nested({"blocks/mlp/b": (4, 8)})
    assert true_paths(decay_mask(params)) == {"blocks/mlp/b"}
    assert true_paths(decay_mask(params, stacked=("blocks",))) == set()


def test_hidden_matrices_leave_out_tables_heads_and_other_ranks():
    hidden = {
        "blocks/attn/q/kernel": (4, 8, 8),
        "blocks/multi_head_attention/out": (4, 8, 8),
        "blocks/multihead/out": (4, 8, 8),
        "multi_head/out": (8, 8),
        "heads/w": (8, 8),
        "ahead/w": (8, 8),
    }
    others = {
        "wte": (16, 8),
        "tok_embedding/table": (16, 8),
        "PatchEmbed_0/kernel": (16, 8),
        "unembed": (8, 16),
        "head/kernel": (8, 16),
        "lm_head": (8, 16),
        "out_logits/w": (8, 16),
        "blocks/bias": (4, 8),
        "blocks/experts": (4, 3, 8, 8),
        "conv": (3, 3, 8, 8),
    }
    mask = hidden_matrices(nested(hidden | others), stacked=(r"^blocks/",))
    assert true_paths(mask) == set(hidden)


def test_first_matching_pattern_counts_the_axes():
    params = nested({"blocks/shared/w": (8, 8), "blocks/w": (2, 3, 8, 8), "wte": (16, 8)})
    axes = stacked_axes(params, {"shared": 0, r"^blocks/": 2})
    assert named_leaves(axes) == {"blocks/shared/w": 0, "blocks/w": 2, "wte": 0}


def test_errors_name_the_parameter_or_pattern():
    params = nested({"blocks/w": (4,)})
    with pytest.raises(ValueError, match=r"'blocks/w' has shape \(4,\), too few axes for the 2"):
        stacked_axes(params, {"blocks": 2})
    with pytest.raises(ValueError, match=r"`stacked` is the string 'blocks'; write \('blocks',\)"):
        stacked_axes(params, "blocks")
    with pytest.raises(ValueError, match=r"`stacked\['blocks'\]` is -1"):
        stacked_axes(params, {"blocks": -1})
    with pytest.raises(ValueError, match=r"pattern '\(' is not a regex"):
        by_path(("(",))
