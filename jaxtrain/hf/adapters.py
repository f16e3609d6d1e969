"""Adapters in PEFT's files, both ways: adapter_config.json and adapter_model.safetensors.

A module of theirs has ``lora_A.weight`` [R, D] and ``lora_B.weight`` [F, R], the transposes of our
``a`` and ``b``, and with DoRA ``lora_magnitude_vector`` [F]. Where several of our kernels are parts
of one tensor of theirs (q, k and v of GPT-2's ``c_attn``), their additions become one: A stacked, B
of blocks, of the sum of their ranks.

Shapes: L layers, D inputs, F outputs, R rank.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.finetune.low_rank import LoRA
from jaxtrain.hf import safetensors
from jaxtrain.hf.families import family_for
from jaxtrain.hf.family import ModelConfig
from jaxtrain.hf.table import by_tensor
from jaxtrain.hf.weights import check_new
from jaxtrain.host.paths import as_path, is_file, json_text, read_json
from jaxtrain.ops.linear import Dora, LowRank
from jaxtrain.tree import PyTree, is_a, map_named, named_leaves

MAGNITUDE = "lora_magnitude_vector"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model"
PREFIX = "base_model.model."
TASKS = {"decoder": "CAUSAL_LM", "encoder-decoder": "SEQ_2_SEQ_LM"}
# Fields of adapter_config.json that are read, or say nothing of what the model computes. Any other
# must be empty.
READ = "alpha_pattern lora_alpha peft_type r rank_pattern use_dora use_rslora"
INERT = """auto_mapping base_model_name_or_path ensure_weight_tying exclude_modules fan_in_fan_out
inference_mode layers_pattern layers_to_transform lora_dropout megatron_core peft_version
qalora_group_size revision runtime_config target_modules task_type"""


def save(
    folder: str | Path,
    model: ModelConfig,
    kernels: Mapping[str, LowRank | Dora],
    *,
    family: str | None = None,
    form: str = "decoder",
    base: str | None = None,
) -> None:
    """Writes a folder that ``PeftModel.from_pretrained`` opens over the base.

    Args:
      folder: new, or empty.
      model: the base's sizes.
      kernels: by path, in natural order; their ``base`` is not read.
      family: as for :func:`jaxtrain.hf.save`.
      form: of the model, as in a checkpoint's config.
      base: the name or folder of the base, which ``AutoPeftModel`` looks for.

    Raises:
      ValueError: a kernel is no dense layer of theirs, or DoRA's of a part of one; the folder is
        not empty.
    """
    folder = as_path(folder)
    check_new(folder)
    chosen = family_for(model, family)
    rows, shapes = chosen.rows_of(model)
    widths = {name: leaf.shape[-1] for name, leaf in named_leaves(shapes).items()}
    tensors, ranks, alphas, targets, whole = {}, {}, {}, set(), False
    for (template, _), group in by_tensor(rows).items():
        parts = [kernels.get(row.ours) for row in group]
        if not any(parts):
            continue
        if not group[0].ours.endswith("/kernel"):
            raise ValueError(
                f"parameter {group[0].ours!r} is no kernel of a dense layer: export the run "
                "without --adapter"
            )
        magnitudes = [x.magnitude for x in parts if isinstance(x, Dora)]
        if magnitudes and len(magnitudes) < len(parts):
            lacks = next(row.ours for row in group if row.ours not in kernels)
            raise ValueError(
                f"parameter {lacks!r} has no magnitude, and other parts of {template!r} have: "
                "export the run without --adapter"
            )
        parts = [getattr(x, "low", x) for x in parts]
        scale = next(part.scale for part in parts if part)
        R = sum(part.a.shape[-1] for part in parts if part)
        a_LDR, blocks, first = [], [], 0
        for row, part in zip(group, parts, strict=True):
            lead = next(x.a.shape[:-2] for x in parts if x)
            block_LRF = np.zeros((*lead, R, widths[row.ours]), np.float32)
            if part:
                rank = part.a.shape[-1]
                a_LDR.append(np.asarray(part.a, np.float32))
                b_LRF = np.asarray(part.b, np.float32) * (part.scale / scale)
                block_LRF[..., first : first + rank, :] = b_LRF
                first += rank
            blocks.append(block_LRF)
        a_LRD = np.concatenate(a_LDR, axis=-1).swapaxes(-1, -2)
        b_LFR = np.concatenate(blocks, axis=-1).swapaxes(-1, -2)
        layers = len(a_LRD) if group[0].stacked else 1
        for l, name in enumerate(group[0].names(layers), start=group[0].first):
            module = PREFIX + chosen.stored(model, name).removesuffix(".weight")
            at = l if group[0].stacked else ...
            tensors[f"{module}.lora_A.weight"] = np.ascontiguousarray(a_LRD[at])
            tensors[f"{module}.lora_B.weight"] = np.ascontiguousarray(b_LFR[at])
            if magnitudes:
                m_LF = np.concatenate([np.asarray(x, np.float32) for x in magnitudes], axis=-1)
                tensors[f"{module}.{MAGNITUDE}"] = m_LF[at]
        module = chosen.stored(model, template).removesuffix(".weight")
        # All behind the number of the layer: c_proj alone would be those of attention and MLP.
        targets.add(module.split("{l}.")[-1])
        pattern = re.escape(module).replace(r"\{l\}", r"\d+")
        ranks[pattern], alphas[pattern] = R, scale * R
        whole |= group[0].axes is None  # as a Conv1D of theirs has its weight
    rank, alpha = next(iter(ranks.values())), next(iter(alphas.values()))
    fields = {
        "peft_type": "LORA",
        "task_type": TASKS.get(form),
        "base_model_name_or_path": base,
        "inference_mode": True,
        "use_dora": any(isinstance(x, Dora) for x in kernels.values()),
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {name: x for name, x in ranks.items() if x != rank},
        "alpha_pattern": {name: x for name, x in alphas.items() if x != alpha},
        "target_modules": sorted(targets),
        "fan_in_fan_out": whole,
        "lora_dropout": 0.0,
        "bias": "none",
    }
    folder.mkdir(parents=True, exist_ok=True)
    kinds = {name: (x.shape, x.dtype) for name, x in tensors.items()}
    size = sum(x.nbytes for x in tensors.values())
    safetensors.write(folder, kinds, tensors.items(), max_shard_bytes=size + 1, stem=WEIGHTS)
    (folder / CONFIG).write_text(json_text(fields))


def read(
    folder: str | Path, model: ModelConfig, *, family: str | None = None
) -> tuple[LoRA, dict[str, tuple[np.ndarray, ...]]]:
    """Reads an adapter: the change that has its kernels and ranks, and the parts ``a`` and ``b`` of
    each by path, layers in natural order; with DoRA the magnitude too.

    Raises:
      FileNotFoundError, ValueError: there is no adapter, it has what LoRA here has not, or a tensor
        for which the model has no place.
    """
    folder = as_path(folder)
    if not is_file(folder / CONFIG):
        raise FileNotFoundError(f"there is no {CONFIG} in '{folder}'")
    fields = read_json(folder / CONFIG)
    for name, value in fields.items():
        known = name in f"{READ} {INERT}".split() or value in (None, False, [], {}, "none")
        known |= name == "init_lora_weights" and value in (True, "gaussian")
        if not known or (name == "peft_type" and value != "LORA"):
            raise ValueError(
                f"'{folder / CONFIG}' has {name} {value!r}, which is not read here: merge the "
                "adapter into its model by PEFT, and give that with --init-from"
            )
    tensors = dict(safetensors.tensors_in(folder, stem=WEIGHTS))
    chosen = family_for(model, family)
    rows, shapes = chosen.rows_of(model)
    counts = {name: leaf.shape[0] for name, leaf in named_leaves(shapes).items()}
    found, targets, dora = {}, [], bool(fields.get("use_dora"))
    for group in by_tensor(rows).values():
        names = group[0].names(counts[group[0].ours])
        modules = [chosen.stored(model, name).removesuffix(".weight") for name in names]
        has = [f"{PREFIX}{module}.lora_A.weight" in tensors for module in modules]
        if not any(has):
            continue
        if not all(has) or group[0].first:
            lacks = modules[0 if group[0].first else has.index(False)]
            raise ValueError(
                f"'{folder}' has no addition to {lacks!r} and has one to the same kernel of other "
                "layers: give that one too, of zeros"
            )

        def taken(kind: str, modules=modules, group=group) -> np.ndarray:
            each = [
                np.asarray(tensors.pop(f"{PREFIX}{module}.{kind}")[...], np.float32).T
                for module in modules
            ]
            return np.stack(each) if group[0].stacked else each[0]

        a_LDR, b_LRF = taken("lora_A.weight"), taken("lora_B.weight")
        m_LF = taken(MAGNITUDE) if dora else None
        rank = a_LDR.shape[-1]
        # Ours have one alpha; what theirs has beside it goes into b.
        alpha = _of_pattern(fields.get("alpha_pattern"), modules[0], fields["lora_alpha"])
        b_LRF = b_LRF * np.float32(alpha / fields["lora_alpha"])
        for row in group:
            part = row.place(b_LRF.shape[-1])
            found[row.ours] = a_LDR, b_LRF[..., part], *([m_LF[..., part]] if dora else [])
            targets.append(f"^{re.escape(row.ours)}$={rank}")
    if tensors:
        raise ValueError(
            f"'{folder}' has the tensor {min(tensors)!r}, for which a {chosen.name} has no place"
        )
    alpha, stabilized = float(fields["lora_alpha"]), bool(fields.get("use_rslora"))
    return LoRA(1, tuple(targets), alpha, stabilized, dora), found


def placed(params: PyTree, found: Mapping[str, tuple[np.ndarray, ...]]) -> PyTree:
    """Returns parameters of which each kernel has the parts that :func:`read` has found."""

    def place(name: str, x: Any) -> Any:
        if not isinstance(x, LowRank | Dora):
            return x
        a, b, *magnitude = found[name]
        low = dataclasses.replace(getattr(x, "low", x), a=a, b=b)
        return Dora(low, *magnitude) if magnitude else low

    return map_named(place, params, is_leaf=is_a(LowRank | Dora))


def _of_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The value of the first regex that is the end of a module's name, as PEFT takes it."""
    matches = (x for key, x in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module))
    return next(matches, default)
