"""The mesh never changes the mathematics: pipelines beside other axes, tiles, dropout.

Each case trains a small GPT through :func:`jaxtrain.compare.parity.compare`, as ``jaxtrain parity``
does: loss, gradients, parameters, optimizer state and evaluation against one device.
"""

import dataclasses

import pytest

import jaxtrain as jt
from jaxtrain.compare.parity import TOLERANCE, compare
from jaxtrain.models import decoder
from jaxtrain.ops import tiled
from tests.compare import noisy, test_parity

GPT2 = test_parity.GPT2
LLAMA = dataclasses.replace(test_parity.LLAMA, kv_heads=2)
# Several tiles of logits and, where one is of 8 or 4 queries, of attention; of 2, a loop over them.
FORMS = {
    "tied": GPT2,
    "shared key heads": LLAMA,
    "tiles": dataclasses.replace(LLAMA, loss_chunk=4),
    "dropout in tiles": dataclasses.replace(
        GPT2, dropout=0.1, attention_dropout=0.3, loss_chunk=8, remat="full"
    ),
}
FORMS["kept products"] = dataclasses.replace(FORMS["tiles"], remat="dots")
FORMS["70B"] = dataclasses.replace(FORMS["kept products"], kv_heads=4)
FORMS["405B"] = FORMS["kept products"]
FORMS["405B, attention kept"] = dataclasses.replace(
    FORMS["tiles"], kv_heads=1, remat="save_attention"
)
EXPERTS = dataclasses.replace(LLAMA, experts=4, mlp_width=32, balance=0.1, router_z=0.01)
FORMS["experts"] = EXPERTS
FORMS["experts, 8"] = dataclasses.replace(EXPERTS, experts=8, shared_experts=2, remat="full")
FORMS["one expert takes all"] = dataclasses.replace(EXPERTS, experts_per_token=1, dropout=0.1)
LATENT = {"kv_rank": 16, "q_rank": 16, "head_dim": 12, "rope_dim": 4, "v_dim": 8, "kv_heads": None}
FORMS["deepseek"] = dataclasses.replace(
    EXPERTS,
    **LATENT,
    experts=8,
    routing="sigmoid",
    routed_scale=1.5,
    groups=4,
    groups_per_token=2,
    dense_layers=1,
    shared_experts=1,
)
FORMS["gpt oss"] = dataclasses.replace(
    EXPERTS,
    bias=True,
    sinks=True,
    mlp="swiglu_clamped",
    window=5,
    window_pattern=(True, False),
)
FORMS["dense first"] = dataclasses.replace(EXPERTS, dense_layers=1, dense_width=48, dropout=0.1)
FORMS["experts, biased"] = dataclasses.replace(EXPERTS, routing="sigmoid", balance_over="step")
INTERLEAVED = {"schedule": "interleaved", "virtual": 2}


def slow(*cases):
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


# The form, queries per tile of attention, the layout and the pipeline's options.
CASES = [
    ("shared key heads", 16, "data=2,tensor=4", {}),
    *slow(
        ("deepseek", 16, "fsdp=2,expert=2,tensor=2", {}),
        ("experts", 16, "fsdp=2,expert=2,tensor=2", {}),
        ("gpt oss", 16, "fsdp=2,expert=2,tensor=2", {}),
        ("gpt oss", 4, "context=2,tensor=2,data=2", {}),
        ("gpt oss", 16, "context=8", {}),
        ("gpt oss", 4, "pipe=2,expert=2,data=2", {"remat": "none"}),
        ("deepseek", 16, "data=2,tensor=4", {}),
        ("deepseek", 16, "fsdp=8,zero=3", {}),
        ("deepseek", 16, "expert=4,context=2,dispatch=exchange", {}),
        ("deepseek", 16, "pipe=2,fsdp=2,tensor=2", {}),
        ("deepseek", 16, "pipe=2,expert=2,data=2", INTERLEAVED | {"remat": "none"}),
        ("experts, 8", 16, "expert=8", {}),  # an exchange by choice
        ("experts, 8", 16, "expert=8,dispatch=gather", {}),
        ("experts, 8", 16, "expert=4,tensor=2,dispatch=exchange", {}),
        ("experts, 8", 16, "fsdp=2,expert=4,zero=1", {}),
        ("experts", 16, "data=2,fsdp=2,expert=2,zero=2", {}),
        ("experts", 16, "data=2,fsdp=2,expert=2,zero=3,accumulate=2", {}),
        ("experts", 16, "data=2,fsdp=2,expert=2,accumulate=2,gather=step,dispatch=exchange", {}),
        ("one expert takes all", 16, "data=2,expert=4,accumulate=2", {}),
        ("experts", 16, "pipe=2,expert=2,data=2", {}),
        ("experts", 16, "pipe=2,expert=2,tensor=2", INTERLEAVED),
        ("experts", 16, "pipe=2,expert=4,dispatch=exchange", {"remat": "none"}),
        ("dense first", 16, "pipe=2,fsdp=2,tensor=2", {}),
        ("dense first", 16, "pipe=2,expert=2,data=2", INTERLEAVED),
        ("dense first", 16, "data=2,fsdp=2,expert=2,zero=3,accumulate=2", {}),
        ("experts, biased", 16, "pipe=2,expert=2,data=2,dispatch=exchange", {}),
        ("experts, biased", 16, "data=2,fsdp=2,expert=2,accumulate=2", {}),
        ("dropout in tiles", 8, "pipe=2,fsdp=2,tensor=2", {}),
        ("tiles", 2, "data=8,zero=3", {}),
        ("tiles", 2, "data=2,tensor=4", {}),
        ("tiles", 2, "pipe=4,fsdp=2", {"schedule": "gpipe"}),
        ("dropout in tiles", 4, "fsdp=8", {}),
        ("kept products", 4, "data=2,fsdp=2,tensor=2", {}),
        ("kept products", 16, "context=2,fsdp=2,tensor=2", {}),
        ("dropout in tiles", 4, "data=2,fsdp=2,tensor=2,zero=2", {}),
        ("dropout in tiles", 4, "pipe=2,data=2,tensor=2", INTERLEAVED),
        ("dropout in tiles", 4, "pipe=2,data=2,tensor=2,zero=2", {"remat": "none"}),
    ),
]

# Small versions of the meshes of a thousand chips in planning's README, whose names these are: the
# same remat, gather and schedule, and key heads more than the tensor axis has devices, or fewer.
BY_LAYER = {"gather": "model", "when": "layer"}
PIPELINED = INTERLEAVED | {"virtual": 4, "remat": "none", "gather": "model", "when": "step"}
AT_SCALE = {
    "70B, 1,024 v5p or H100, fsdp 512 x tensor 2": ("70B", "fsdp=4,tensor=2", BY_LAYER),
    "405B, 4,096 v5p or H100, fsdp 512 x tensor 8": ("405B", "fsdp=2,tensor=4", BY_LAYER),
    "405B, 4,096 H100, fsdp 64 x tensor 8 x pipe 8": (
        "405B, attention kept",
        "pipe=2,fsdp=2,tensor=2,dcn_pipe=2,dcn_fsdp=2",  # hosts of a tensor axis each
        PIPELINED,
    ),
}


def errors_on(layout, model, options, policy="f32"):
    layers = noisy.chunks_on(layout, options) + (model.dense_layers or 0)
    model = dataclasses.replace(model, layers=layers)
    return noisy.errors_of(experiment(model, **options), layout, policy)


def experiment(model, **options):
    batches = test_parity.batches()
    train = [{name: x[step] for name, x in batches.items()} for step in range(3)]
    return noisy.experiment_of(decoder, model, train, **options)


@pytest.mark.parametrize(("form", "block", "layout", "options"), CASES)
def test_layout_agrees_with_one_device(form, block, layout, options, monkeypatch):
    monkeypatch.setattr(tiled, "_block", lambda T: block)
    errors = errors_on(layout, FORMS[form], options)
    assert not {part: e for part, e in errors.items() if e[0] > TOLERANCE}, errors


@pytest.mark.slow
@pytest.mark.parametrize("name", AT_SCALE)
def test_a_small_version_of_a_thousand_chips_agrees_with_one_device(name, monkeypatch):
    form, layout, options = AT_SCALE[name]
    test_layout_agrees_with_one_device(form, 4, layout, options, monkeypatch)


# A pipeline rounds what an accumulation rounds, but for the table of tokens that is the head too:
# bfloat16 rounds its two gradients one by one, or their sum. Elsewhere a sum in float32 that
# another program orders otherwise turns the rounding of an odd element. A mesh rounds parts.
SAME, TIED, PARTS = 1e-4, 2**-8, 1e-2


@pytest.mark.parametrize(
    ("form", "layout", "options", "bound"),
    [
        *slow(
            ("shared key heads", "pipe=2", {}, SAME),
            ("tiles", "pipe=2", INTERLEAVED, SAME),
            ("tiles", "pipe=4", {"remat": "none"}, SAME),
            ("tied", "pipe=2", {"schedule": "gpipe"}, TIED),
            ("dropout in tiles", "pipe=2", {}, TIED),
            ("tied", "data=2,fsdp=2,tensor=2", {}, PARTS),
            ("tied", "fsdp=8", {}, PARTS),
            ("tied", "pipe=2,fsdp=2,tensor=2", {}, PARTS),
            ("tiles", "data=8,zero=2", {}, PARTS),
            ("tiles", "data=2,tensor=4", {}, PARTS),
        ),
    ],
)
def test_bf16_differs_from_one_device_by_the_rounding_of_parts(form, layout, options, bound):
    errors = errors_on(layout, FORMS[form], options, "bf16")
    assert errors["gradients"][0] < bound, errors
    assert errors["loss"][0] < (1e-3 if bound == PARTS else TOLERANCE), errors
    assert errors["evaluation"][0] < 1e-3, errors
    # With the gradients of one device, the update is one device's.
    assert errors["parameters"][0] < TOLERANCE, errors
    assert errors["optimizer state"][0] < TOLERANCE, errors


VALUES = (
    "pipe=2,data=2",  # 2 layers and 3
    "pipe=2,data=2,pipeline.schedule=interleaved,pipeline.virtual=2",
    "data=2,tensor=2,zero=2,remat=full,scan_unroll=2,attention=xla,sequence_parallel=false",
)


@pytest.mark.slow
def test_one_experiment_in_natural_order_takes_any_layout_as_a_value():
    """Of five layers and by LAMB, whose norms are of each: the layout cuts both."""
    built = experiment(dataclasses.replace(GPT2, layers=5)).with_(
        optimizer=lambda stack: jt.make_optimizer("lamb", 1e-2, eps=1e-4, stacked=stack.axes),
    )
    found = list(compare(built, layouts=VALUES[:2], steps=2))
    assert [each.refusal for each in found] == [None] * 2
    assert not [each for each in found if not each.agrees(TOLERANCE)]
    first, second, third = (
        dataclasses.replace(built, layout=jt.Layout.parse(text, built.layout)) for text in VALUES
    )
    assert (first.stack.counts, second.stack.counts) == ((2, 3), (1, 1, 1, 2))
    assert third.stack == jt.Stack()
    assert third.laid.stages.remat.args == ("full",)
