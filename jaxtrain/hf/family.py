"""A family of models: names of tensors and fields of ``config.json``, read both ways."""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax

from jaxtrain.hf.table import REQUIRED, Field, Row
from jaxtrain.models import decoder
from jaxtrain.models.clip import ClipConfig
from jaxtrain.models.config import before_stack, deltas_of, windows_of
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.models.encoder import EncoderConfig
from jaxtrain.models.encoder_decoder import T5Config
from jaxtrain.models.llava import LlavaConfig
from jaxtrain.models.vit import ViTConfig
from jaxtrain.ops.activations import GATED
from jaxtrain.ops.rotary import DynamicScaling
from jaxtrain.tree import named_leaves

ModelConfig = DecoderConfig | EncoderConfig | T5Config | ViTConfig | ClipConfig
ModelConfig |= LlavaConfig

# Fields of config.json that change no logits, no loss and no gradient.
INERT = {
    *("_attn_implementation_autoset", "_name_or_path", "_num_labels", "_sliding_window_pattern"),
    *("architectures", "bos_token_id", "chunk_size_feed_forward", "deterministic_flash_attn"),
    "auto_map",  # code of their own, which is never run here
    *("classifier_dropout", "cls_token_id", "directionality", "dtype", "encoder_stride"),
    *("eos_token_id", "gradient_checkpointing", "id2label", "initializer_cutoff_factor"),
    *("initializer_factor", "initializer_range", "is_llama_config", "keys_to_ignore_at_inference"),
    *("label2id", "mask_token_id", "max_sequence_length", "max_window_layers", "model_type"),
    *("logit_scale_init_value", "n_ctx", "n_positions", "n_special", "output_attentions"),
    *("output_hidden_states", "output_past", "output_router_logits", "pad_token_id", "pooler_act"),
    *("pooler_fc_size", "pooler_num_attention_heads"),
    *("pooler_num_fc_layers", "pooler_output_size", "pooler_size_per_head", "pooler_type"),
    *("predict_special_tokens", "pretraining_tp", "problem_type", "reference_compile"),
    *("reorder_and_upcast_attn", "repad_logits_with_grad", "return_dict", "sep_token_id"),
    *("sparse_pred_ignore_index", "sparse_prediction", "summary_activation"),
    *("summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
    *("router_aux_loss_coef", "router_jitter_noise"),  # of their training
    *("aux_loss_alpha", "ep_size", "num_mtp_layers", "num_nextn_predict_layers", "seq_aux"),
    *("task_specific_params", "torch_dtype", "transformers_version", "use_cache"),
}
# Fields that change nothing at this value alone.
OFF = {
    "position_embedding_type": "absolute",
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "pruned_heads": {},
    "rope_interleaved": False,
    "use_bidirectional_attention": False,
    "use_mrope": False,
}
# Our fields that no other model tells: of training and of speed.
OURS = {"attention", "attention_dropout", "dropout", "remat", "scan_unroll", "loss_chunk", "z_loss"}
OURS |= {"balance", "balance_over", "router_z", "source_len", "target_len"}


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models.

    Args:
      name: ``model_type`` in config.json.
      rows: its tensors; those of parameters that a model lacks do not count.
      fields: of config.json, by their names.
      ours: what all its models have in common here.
      fixed: fields of config.json that have one value, which is meant where they are absent too.
      read, write: how config.json says what takes more than one field: positions and windows.
      prefix: of names, which some files leave out.
      buffers: a regex of tensors that are no parameters, or that no model here has.
      model: the class of our configs.
      module: has ``init(config, rng)`` and ``parameter_count(config)`` of them.
      gated_rows: those that stand for others where the MLP has a gate.
      dense_rows: those that stand for others in layers before the stack.
      delta_rows: those that stand for others in layers of the gated delta rule.
      settle: corrects a config by the names of the folder's tensors, which a function returns.
      others: architectures of other heads, with one and the same model.
      heads: a regex of the tensors of heads.
      copies: tensors that some files have, though they are others again: their names to those of
        the others. A name that is a parameter's of a model is no copy there.
      old_names: a regex in names of old files, and what stands there today.
      sized: fields of rows that the sizes of a model decide, by the beginning of the paths of
        their parameters.
    """

    name: str
    architecture: str
    rows: tuple[Row, ...]
    fields: Mapping[str, Field]
    ours: Mapping[str, Any]
    fixed: Mapping[str, Any]
    read: Callable[[dict[str, Any]], dict[str, Any]] = lambda theirs: {}
    write: Callable[[Any], dict[str, Any]] = lambda config: {}
    prefix: str = ""
    buffers: str = "$^"
    model: type = DecoderConfig
    module: Any = decoder
    gated_rows: tuple[Row, ...] = ()
    dense_rows: tuple[Row, ...] = ()
    delta_rows: tuple[Row, ...] = ()
    settle: Callable[[Any, Callable[[], Collection[str]]], Any] = lambda config, names: config
    others: tuple[str, ...] = ()
    heads: str = "$^"
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    old_names: tuple[str, str] = ("$^", "")
    sized: Callable[[Any], Mapping[str, Mapping[str, Any]]] = lambda config: {}

    @property
    def architectures(self) -> tuple[str, ...]:
        """All that are known."""
        return (self.architecture, *self.others)

    def config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        """Makes our config of the fields of a config.json. Raises ValueError where a field is
        missing, or unknown, or has a value that no model here has."""
        theirs, ours = dict(theirs), dict(self.ours)
        for name, value in self.fixed.items():
            if theirs.pop(name, value) != value:
                raise ValueError(f"only {name}={value!r} is known here of {self.architecture}")
        ours |= self.read(theirs)
        for name, field in self.fields.items():
            value = theirs.pop(name, field.default)
            if value is REQUIRED:
                raise ValueError(f"it has no {name}, which {self.architecture} needs")
            if field.ours == "norm_eps":
                check_positive(name, value)
            if field.values is not None and value not in list(field.values):  # it may be a list
                known = ", ".join(map(str, field.values))
                raise ValueError(f"{name}={value!r} is not known here: only {known}")
            value = value if field.values is None else field.values[value]
            if ours.setdefault(field.ours, value) != value:
                raise ValueError(
                    f"{name}={value!r} differs from the other fields that are {field.ours} here, "
                    f"{ours[field.ours]!r}: no model here has both"
                )
        for name, value in theirs.items():
            off = name in OFF and value == OFF[name]
            if name not in INERT and value is not None and not off:
                raise ValueError(f"{name}={value!r} is not known here, and may change the model")
        if ours.get("head_dim") and ours["head_dim"] * ours["heads"] == ours["width"]:
            ours["head_dim"] = None
        return self.model(**ours)

    def config_json(self, config: ModelConfig) -> dict[str, Any]:
        """Returns the fields of config.json, of which :meth:`config` makes the same model. Raises
        ValueError where the family has no such model."""
        if not isinstance(config, self.model):
            raise ValueError(f"{self.name} has no {type(config).__name__}")
        theirs = {"architectures": [self.architecture], "model_type": self.name}
        block = dataclasses.asdict(config.block) if hasattr(config, "block") else {}
        for name, field in self.fields.items():
            value = block.get(field.ours, getattr(config, field.ours))
            if field.values is not None:
                words = [word for word, ours in field.values.items() if ours == value]
                if not words:
                    raise ValueError(f"{self.name} has no {field.ours}={value!r}")
                value = words[0]
            theirs[name] = value
        theirs |= self.write(config) | self.fixed
        if isinstance(scaling := getattr(config, "rope_scaling", None), DynamicScaling):
            theirs["max_position_embeddings"] = scaling.length
        wanted, got = _essence(config), _essence(self.config(theirs))
        for name, value in wanted.items():
            if got[name] != value:
                raise ValueError(f"{self.name} has {name}={got[name]!r} and the model {value!r}")
        return theirs

    def rows_of(self, config: ModelConfig) -> tuple[dict[str, Row], Any]:
        """Returns the row of every parameter of a model by its path, and the tree of shapes; no
        file has the shares of experts, which are of training."""
        if getattr(config, "balance_over", "row") == "step":
            config = dataclasses.replace(config, balance_over="row")
        shapes = jax.eval_shape(lambda: self.module.init(config, jax.random.key(0)))
        rows = {row.ours: row for row in self.rows}
        rows |= {row.ours: row for row in self.gated_rows if getattr(config, "mlp", None) in GATED}
        if before := before_stack(config):
            first = [*rows.values(), *self.dense_rows]
            rows = {path: dataclasses.replace(row, offset=before) for path, row in rows.items()}
            for l, row in itertools.product(map(str, range(before)), first):
                path = row.ours.replace("blocks", f"dense/{l}", 1)
                theirs = row.theirs.replace("{l}", l)
                rows.setdefault(path, row)
                if row.stacked:
                    rows[path] = dataclasses.replace(row, ours=path, theirs=theirs)
        group = getattr(config, "group", ())
        if any(form.delta for form in group):
            found, of_delta = dict(rows), {row.ours: row for row in self.delta_rows}
            for i, form in enumerate(group):
                at = {"offset": i, "stride": len(group)}
                for path, row in (rows | of_delta if form.delta else rows).items():
                    if len(group) > 1:
                        path = path.replace("blocks", f"blocks/{i}", 1)
                    found[path] = dataclasses.replace(row, ours=path, **at)
            rows = found
        for start, own in self.sized(config).items():
            under = {path: row for path, row in rows.items() if path.startswith(start)}
            rows |= {x: dataclasses.replace(row, **own) for x, row in under.items()}
        return {path: rows[path] for path in named_leaves(shapes)}, shapes

    def stored(self, config: ModelConfig, name: str) -> str:
        """The name in a file: where there is no head, nothing has a prefix."""
        return name.removeprefix(self.prefix) if getattr(config, "head", "") == "none" else name


def check_positive(name: str, value: Any) -> None:
    """Raises where a field of a config.json is no number above 0."""
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ValueError(f"{name}={value!r} must be a number above 0")


def _essence(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields of a config that determine the function that its model computes."""
    if isinstance(config, ClipConfig | LlavaConfig):
        parts = {name: _essence(getattr(config, name)) for name in ("image", "text")}
        return vars(config) | parts
    fields = dataclasses.asdict(config) | dataclasses.asdict(config.block)
    fields |= {"window_pattern": windows_of(config), "delta_pattern": deltas_of(config)}
    if config.positions == "learned":
        del fields["rope_theta"]
    if isinstance(config.rope_scaling, DynamicScaling):
        del fields["seq_len"]  # theirs is the length beyond which positions are scaled
    return {name: value for name, value in fields.items() if name not in OURS | {"vocab_multiple"}}
