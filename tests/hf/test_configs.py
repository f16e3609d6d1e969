"""What a ``config.json`` says: published ones, as they are, and what no model can be made of."""

import copy
import dataclasses
import json

import numpy as np
import pytest

from jaxtrain import hf
from jaxtrain.hf.families import family_of
from jaxtrain.hf.positions import _LLAMA3
from jaxtrain.models.config import windows_of
from jaxtrain.ops.rotary import DynamicScaling, rotary_frequencies
from tests.hf import models

# The fields of config.json in the repositories of these names.
PUBLISHED = {
    "gpt2-medium": """{
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2",
        "n_ctx": 1024, "n_embd": 1024, "n_head": 16, "n_layer": 24, "n_positions": 1024,
        "n_special": 0, "predict_special_tokens": true, "resid_pdrop": 0.1,
        "summary_activation": null, "summary_first_dropout": 0.1, "summary_proj_to_labels": true,
        "summary_type": "cls_index", "summary_use_proj": true,
        "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}},
        "vocab_size": 50257}""",
    "distilgpt2": """{
        "_num_labels": 1, "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256,
        "id2label": {"0": "LABEL_0"}, "initializer_range": 0.02, "label2id": {"LABEL_0": 0},
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768,
        "n_head": 12, "n_layer": 6, "n_positions": 1024, "resid_pdrop": 0.1,
        "summary_activation": null, "summary_first_dropout": 0.1, "summary_proj_to_labels": true,
        "summary_type": "cls_index", "summary_use_proj": true,
        "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}},
        "vocab_size": 50257}""",
    "Qwen2.5-0.5B": """{
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896,
        "initializer_range": 0.02, "intermediate_size": 4864, "max_position_embeddings": 32768,
        "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": true,
        "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": true,
        "use_mrope": false, "use_sliding_window": false, "vocab_size": 151936}""",
    "SmolLM2-135M": """{
        "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 576,
        "initializer_range": 0.041666666666666664, "intermediate_size": 1536,
        "is_llama_config": true, "max_position_embeddings": 8192, "model_type": "llama",
        "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": false,
        "rope_scaling": null, "rope_theta": 100000, "tie_word_embeddings": true,
        "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": true,
        "vocab_size": 49152}""",
    "llama-7b": """{
        "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 11008, "max_position_embeddings": 2048,
        "max_sequence_length": 2048, "model_type": "llama", "num_attention_heads": 32,
        "num_hidden_layers": 32, "pad_token_id": 0, "rms_norm_eps": 1e-06,
        "tie_word_embeddings": false, "torch_dtype": "float16", "transformers_version": "4.28.0",
        "use_cache": true, "vocab_size": 32000}""",
    "bert-base-multilingual-cased": """{
        "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1,
        "directionality": "bidi", "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
        "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072,
        "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert",
        "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0,
        "pooler_fc_size": 768, "pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3,
        "pooler_size_per_head": 128, "pooler_type": "first_token_transform",
        "position_embedding_type": "absolute", "transformers_version": "4.6.0.dev0",
        "type_vocab_size": 2, "use_cache": true, "vocab_size": 119547}""",
    "Phi-4-mini": """{
        "architectures": ["Phi3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "bos_token_id": 199999,
        "embd_pdrop": 0.0, "eos_token_id": 199999, "full_attn_mod": 1, "hidden_act": "silu",
        "hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 8192,
        "interpolate_factor": 1, "lm_head_bias": false, "max_position_embeddings": 131072,
        "mlp_bias": false, "model_type": "phi3", "num_attention_heads": 24,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "pad_token_id": 199999,
        "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
        "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": {"long_factor": [LONG],
        "short_factor": [SHORT], "type": "longrope"}, "rope_theta": 10000.0,
        "sliding_window": 262144, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0", "use_cache": true, "vocab_size": 200064}""",
    "roberta-base": """{
        "architectures": ["RobertaForMaskedLM"], "attention_probs_dropout_prob": 0.1,
        "bos_token_id": 0, "eos_token_id": 2, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
        "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072,
        "layer_norm_eps": 1e-05, "max_position_embeddings": 514, "model_type": "roberta",
        "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1,
        "type_vocab_size": 1, "vocab_size": 50265}""",
}
for name, number in (("LONG", 2.5), ("SHORT", 1)):  # one for each of the 48 pairs
    numbers = ", ".join([str(number)] * 48)
    PUBLISHED["Phi-4-mini"] = PUBLISHED["Phi-4-mini"].replace(f"[{name}]", f"[{numbers}]")


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gpt2-medium", (24, 1024, 16, 16, 1024)),
        ("distilgpt2", (6, 768, 12, 12, 1024)),
        ("Qwen2.5-0.5B", (24, 896, 14, 2, 32768)),
        ("SmolLM2-135M", (30, 576, 9, 3, 8192)),
        ("llama-7b", (32, 4096, 32, 32, 2048)),
        ("Phi-4-mini", (32, 3072, 24, 8, 131072)),
        ("bert-base-multilingual-cased", (12, 768, 12, 12, 512)),
        ("roberta-base", (12, 768, 12, 12, 512)),
    ],
)
def test_published_configs_are_read_as_they_are(name, sizes):
    theirs = json.loads(PUBLISHED[name])
    got = family_of(theirs).config(theirs)
    assert (got.layers, got.width, got.heads, got.kv_heads, got.seq_len) == sizes


@pytest.mark.parametrize(
    ("name", "field"),
    [("Qwen2.5-0.5B", "use_mrope"), ("SmolLM2-135M", "rope_interleaved")],
)
def test_what_is_no_effect_at_one_value_is_refused_at_another(name, field):
    theirs = json.loads(PUBLISHED[name]) | {field: True}
    with pytest.raises(ValueError, match=f"{field}=True is not known here"):
        family_of(theirs).config(theirs)


def windowed(**fields):
    """Fields of a Qwen 2 of two layers, all of which slide."""
    theirs = json.loads(PUBLISHED["Qwen2.5-0.5B"]) | {"num_hidden_layers": 2}
    theirs |= {"use_sliding_window": True, "max_window_layers": 0} | fields
    return {name: value for name, value in theirs.items() if value != "absent"}


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": "absent"},
        {"sliding_window": None},
        {"sliding_window": 7},
        {"sliding_window": 7, "use_sliding_window": False},
        {"sliding_window": 7, "layer_types": ["sliding_attention"] * 2},
        {"sliding_window": 7, "layer_types": ["full_attention"] * 2},
        {"sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"]},
        {"sliding_window": 7, "max_window_layers": 1},
    ],
)
def test_a_window_of_qwen_is_that_of_transformers(fields):
    theirs = windowed(**fields)
    got = models.transformers().Qwen2Config(**theirs)
    slides = [kind == "sliding_attention" for kind in got.layer_types]
    config = family_of(theirs).config(theirs)
    assert windows_of(config) == slides
    assert config.window == (got.sliding_window if any(slides) else None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["full_attention"] * 7}, "has no kind for each of 2 layers"),
        ({"layer_types": "sliding_attention"}, "has no kind for each of 2 layers"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types has 'linear_attention', which"),
        (
            {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": False},
            "and the other fields give no window",
        ),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": None},
            "and the other fields give no window",
        ),
    ],
)
def test_kinds_of_layers_that_no_model_has_are_refused(fields, message):
    theirs = windowed(**fields)
    with pytest.raises(ValueError, match=message):
        family_of(theirs).config(theirs)


@pytest.mark.parametrize(
    ("fields", "family"),
    [
        ({}, "mistral"),
        ({"architectures": None}, "mistral"),
        ({"architectures": []}, "mistral"),
        ({"model_type": None}, "mistral"),
        (
            {"architectures": ["LlamaForCausalLM"]},
            "architecture is LlamaForCausalLM, and of mistral",
        ),
        ({"architectures": "MistralForCausalLM"}, "='MistralForCausalLM' is not a list of names"),
        (
            {"architectures": [["x"], 1]},
            r"architecture is \['x'\], 1, and of mistral there is only",
        ),
        ({"model_type": "opt"}, "its model_type is opt, of which there is none here, but gpt2"),
        ({"model_type": ["mistral"]}, r"its model_type is \['mistral'\], of which there is none"),
        (
            {"model_type": None, "architectures": ["OPTModel"]},
            "its architecture is OPTModel, of which there is none here, but gpt2, .*Qwen3For",
        ),
        ({"model_type": None, "architectures": None}, "it names no model_type and no archit"),
    ],
)
def test_the_family_is_that_of_the_model_type(fields, family):
    theirs = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]} | fields
    if family == "mistral":
        assert family_of(theirs).name == family
        return
    with pytest.raises(ValueError, match=family):
        family_of(theirs)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_theta": 0}, "rope_theta=0 must be a number above 0"),
        ({"rope_theta": float("inf")}, "rope_theta=inf must be a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be a number above 0"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0 must be a number above 0"),
        ({"rope_scaling": [1]}, r"rope_scaling=\[1\] is not an object"),
        ({"rope_parameters": True}, "rope_parameters=True is not an object"),
        ({"hidden_act": ["silu"]}, r"hidden_act=\['silu'\] is not known here: only silu"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers='2' must be a whole number"),
        ({"max_window_layers": None}, "max_window_layers=None must be a whole number"),
    ],
)
def test_values_that_are_none_of_a_model_are_refused_in_a_sentence(fields, message, tmp_path):
    theirs = json.loads(PUBLISHED["Qwen2.5-0.5B"]) | fields
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    with pytest.raises(ValueError, match=rf"config\.json': {message}"):
        hf.read_config(tmp_path)


def test_what_is_nested_by_the_thousand_is_refused_in_a_sentence(tmp_path):
    deep = '{"a":' + "[" * 200_000 + "]" * 200_000 + "}"
    (tmp_path / "config.json").write_text(deep)
    with pytest.raises(ValueError, match=r"config\.json' is not JSON"):
        hf.read_config(tmp_path)


@pytest.mark.parametrize("fields", [{}, {"head_dim": 6}])
def test_dynamic_positions_are_those_of_transformers_at_every_length(fields):
    library = models.transformers()
    theirs = {"model_type": "llama"} | models.SIZES | fields
    theirs["rope_parameters"] = dict(models.DYNAMIC)
    config = family_of(theirs).config(dict(theirs))
    assert config.rope_scaling == DynamicScaling(4.0, 64)
    dynamic = library.modeling_rope_utils.ROPE_INIT_FUNCTIONS["dynamic"]
    for row in (3, 63, 64, 65, 200):
        expected, magnitude = dynamic(library.LlamaConfig(**theirs), seq_len=row)
        assert magnitude == 1
        found = rotary_frequencies(
            config.block.head_dim, theta=1e3, scaling=config.rope_scaling, row=row
        )
        np.testing.assert_allclose(found, expected, rtol=2e-6)


def test_dynamic_positions_are_written_with_the_length_that_they_had():
    theirs = {"model_type": "llama"} | models.SIZES | {"rope_parameters": dict(models.DYNAMIC)}
    family = family_of(theirs)
    config = family.config(dict(theirs))
    longer = dataclasses.replace(config, seq_len=256)  # rows of training
    for given in (config, longer):
        written = family.config_json(given)
        assert written["max_position_embeddings"] == 64
        assert written["rope_scaling"] == {"rope_type": "dynamic", "factor": 4.0}
        assert family.config(written) == config


def test_dynamic_positions_of_another_length_are_refused():
    theirs = {"model_type": "llama"} | models.SIZES
    # Which transformers does not read.
    own = models.DYNAMIC | {"original_max_position_embeddings": 32}
    with pytest.raises(ValueError, match="embeddings=32, and may have factor, max_pos"):
        family_of(theirs).config(theirs | {"rope_parameters": own})


def test_dynamic_positions_of_layers_without_a_window_come_back():
    sizes = models.GEMMA3 | {"rope_parameters": models.ROPES | {"full_attention": models.DYNAMIC}}
    theirs = {"model_type": "gemma3_text", "layer_types": ["full_attention"] * 7} | sizes
    config = family_of(theirs).config(theirs)
    assert config.rope_scaling == DynamicScaling(4.0, 64)
    assert family_of(theirs).config(family_of(theirs).config_json(config)) == config


def test_longrope_is_that_of_transformers_at_every_length():
    library, theirs = models.transformers(), json.loads(PUBLISHED["Phi-4-mini"])
    config = family_of(theirs).config(dict(theirs))
    longrope = library.modeling_rope_utils.ROPE_INIT_FUNCTIONS["longrope"]
    for row in (7, 4096, 4097, 9000):
        expected, magnitude = longrope(library.Phi3Config(**theirs), seq_len=row)
        assert magnitude == pytest.approx(config.rope_scaling.magnitude)
        found = rotary_frequencies(96, theta=1e4, scaling=config.rope_scaling, row=row)
        np.testing.assert_allclose(found, expected, rtol=2e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"short_factor": [1.0]}, "must be two lists of as many positive numbers"),
        ({"short_factor": [1.0], "long_factor": [2.0]}, "has 1 numbers for short rows .* 48"),
        ({"long_factor": [0.0] * 48}, "must be two lists of as many positive numbers"),
        ({"long_factor": None}, "must be two lists of as many positive numbers"),
        ({"factor": -1}, "must be a number above 0"),
    ],
)
def test_longrope_of_other_numbers_is_refused(change, message):
    theirs = json.loads(PUBLISHED["Phi-4-mini"])
    theirs["rope_scaling"] |= change
    with pytest.raises(ValueError, match=message):
        family_of(theirs).config(theirs)


def test_the_length_of_longrope_is_checked_beside_it_too():
    theirs = json.loads(PUBLISHED["Phi-4-mini"])
    one = family_of(theirs).config(theirs | {"original_max_position_embeddings": 1})
    assert one.rope_scaling[2:] == (1, 1.0)
    with pytest.raises(ValueError, match="original_max_position_embeddings='x' must be a whole"):
        family_of(theirs).config(theirs | {"original_max_position_embeddings": "x"})


def test_of_two_names_of_a_rope_type_the_newer_counts():
    llama3 = dict(zip(_LLAMA3, (8.0, 1.0, 4.0, 8192), strict=True))
    theirs = json.loads(PUBLISHED["llama-7b"])
    theirs["rope_scaling"] = {"type": "default", "rope_type": "llama3", **llama3}
    library = models.transformers().LlamaConfig(rope_scaling=dict(theirs["rope_scaling"]))
    assert library.rope_parameters["rope_type"] == "llama3"
    assert family_of(theirs).config(theirs).rope_scaling == tuple(llama3.values())
    theirs["rope_scaling"] = {"type": "yarn", "rope_type": "default"}
    assert family_of(theirs).config(theirs).rope_scaling is None
    theirs["rope_scaling"] = {"type": "yarn"}
    with pytest.raises(ValueError, match="rope_type='yarn' lacks factor, and no other field tells"):
        family_of(theirs).config(theirs)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False},
        {"attention_factor": 1.5, "beta_fast": 4.0, "beta_slow": 2},
        {"factor": 0.5, "beta_slow": 31.5, "mscale": 0.7},
    ],
)
def test_yarn_is_that_of_transformers(more):
    theirs = json.loads(PUBLISHED["llama-7b"])
    stretched = {"factor": 4.0, "original_max_position_embeddings": 64} | more
    theirs["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 1e3} | stretched
    library = models.transformers()
    yarn = library.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"]
    expected, magnitude = yarn(library.LlamaConfig(**theirs))
    config = family_of(theirs).config(dict(theirs))
    found = rotary_frequencies(128, theta=1e3, scaling=config.rope_scaling)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert config.rope_scaling.magnitude == pytest.approx(magnitude)


LENGTH = "original_max_position_embeddings"
SCALED = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 2.0}
LONG = {name: models.LONG[name][:4] for name in ("short_factor", "long_factor")}
LONG |= {"rope_type": "longrope"}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {"rope_scaling": LINEAR, "rope_parameters": LINEAR | {"factor": 4.0}}),
        ("llama", {"rope_scaling": LINEAR, "rope_parameters": {"rope_theta": 5e5}}),
        ("llama", {"rope_scaling": {}, "rope_parameters": SCALED | {"rope_theta": 5e5}}),
        ("llama", {"rope_scaling": SCALED}),
        ("llama", {"rope_parameters": SCALED | {LENGTH: 32}, LENGTH: 16}),
        ("llama", {"rope_scaling": SCALED | {"factor": None, LENGTH: 32}}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("llama", {"rope_parameters": LLAMA3 | {LENGTH: 32}, LENGTH: 16, "rope_theta": 1e3}),
        ("llama", {"rope_parameters": LONG, LENGTH: 16}),
        ("phi3", {"rope_parameters": LONG | {LENGTH: 16}}),
        ("phi3", {"rope_parameters": LONG, LENGTH: 16}),
        ("qwen3_moe", {"rope_scaling": SCALED, "rope_theta": 1e6, "num_experts": 9}),
        ("gpt_oss", {"rope_scaling": None}),
        ("gpt_oss", {"rope_scaling": LINEAR, "rope_parameters": SCALED}),
        ("deepseek_v3", {"rope_scaling": LINEAR, "rope_parameters": SCALED}),
        ("gemma3_text", {"rope_scaling": LINEAR, "rope_theta": 5e5}),
        ("gemma3_text", {"rope_parameters": {"full_attention": SCALED}}),
    ],
)
def test_positions_are_those_that_transformers_reads(kind, fields):
    library, sizes = models.transformers(), models.SIZES
    usual = {
        "gpt_oss": models.GPT_OSS,
        "deepseek_v3": models.DEEPSEEK,
        "gemma3_text": models.GEMMA3,
    }
    config_json = {"rope_parameters": None} | copy.deepcopy(usual.get(kind, sizes) | fields)
    read = library.AutoConfig.for_model(kind, **copy.deepcopy(config_json))
    nested = {"layer_type": "full_attention"} if kind == "gemma3_text" else {}
    positions = read.rope_parameters.get("full_attention", read.rope_parameters)
    config = family_of({"model_type": kind}).config({"model_type": kind} | config_json)
    expected, magnitude = library.modeling_rope_utils.ROPE_INIT_FUNCTIONS[positions["rope_type"]](
        read, seq_len=40, **nested
    )
    frequencies = rotary_frequencies(
        2 * len(expected), theta=config.rope_theta, scaling=config.rope_scaling, row=40
    )
    np.testing.assert_allclose(frequencies, expected, rtol=2e-6)
    assert getattr(config.rope_scaling, "magnitude", 1) == pytest.approx(magnitude)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": None}}, "low_freq_factor=None must be"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "'llama3' lacks factor, and no other"),
        ({"rope_scaling": SCALED | {"scale": 2}}, "'yarn' has scale=2, and may have factor, orig"),
        ({"rope_scaling": {"type": "ntk"}}, "rope_type='ntk' is not known here: only llama3, lin"),
    ],
)
def test_other_positions_are_refused_by_the_field(fields, message):
    config_json = {"model_type": "llama"} | models.SIZES | fields
    with pytest.raises(ValueError, match=message):
        family_of(config_json).config(config_json)


@pytest.mark.parametrize("layers", [2, 7, 12])
def test_the_windows_of_an_older_file_are_those_of_transformers(layers):
    sizes = models.GEMMA3 | {"num_hidden_layers": layers}
    theirs = models.transformers().Gemma3TextConfig(**sizes).to_dict()
    kinds = theirs.pop("layer_types")
    for name in [name for name in theirs if name.startswith(("rope", "_sliding"))]:
        del theirs[name]
    theirs = {n: x for n, x in theirs.items() if n not in ("architectures", "dtype")}
    found = windows_of(family_of(theirs).config(theirs))
    assert [bool(window) for window in found] == [kind == "sliding_attention" for kind in kinds]
