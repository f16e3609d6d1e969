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
from jaxtrain.hf.family import ModelConfig, check_positive
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

# Names that PEFT 0.21 takes for experts in a model that has some, also those of other kernels.
AS_EXPERTS = (".gate_proj", ".up_proj", ".down_proj")


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
      ValueError: a kernel is no dense layer of theirs, or one that PEFT takes for experts, or
        DoRA's of a part of one; the folder is not empty.
    """
    folder = as_path(folder)
    check_new(folder)
    chosen = family_for(model, family)
    rows, shapes = chosen.rows_of(model)
    widths = {name: leaf.shape[-1] for name, leaf in named_leaves(shapes).items()}
    # Theirs have no padded vocabulary.
    widths |= {name: model.vocab_size for name, row in rows.items() if row.vocab is not None}
    mixture = any("{e}" in row.theirs for row in rows.values())
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
        magnitudes = [
            np.asarray(x.magnitude, np.float32)[..., : widths[row.ours]]
            for row, x in zip(group, parts, strict=True)
            if isinstance(x, Dora)
        ]
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
                block_LRF[..., first : first + rank, :] = b_LRF[..., : widths[row.ours]]
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
                tensors[f"{module}.{MAGNITUDE}"] = np.concatenate(magnitudes, axis=-1)[at]
        module = chosen.stored(model, template).removesuffix(".weight")
        if mixture and module.endswith(AS_EXPERTS):
            raise ValueError(
                f"parameter {group[0].ours!r} is {module!r} of a {chosen.name}, and PEFT takes "
                "that name for the experts': export the run without --adapter"
            )
        # All behind the number of the layer: c_proj alone would be those of attention and MLP.
        targets.add(module.split("{l}.")[-1])
        # The numbers of its layers: those of another group may have another rank.
        numbers = (str(l * group[0].stride + group[0].offset) for l in range(layers))
        pattern = re.escape(module).replace(r"\{l\}", f"({'|'.join(numbers)})")
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
    alpha, dora = fields.get("lora_alpha", 8), bool(fields.get("use_dora"))
    check_positive("lora_alpha", alpha)
    stabilized = bool(fields.get("use_rslora"))
    tensors = dict(safetensors.tensors_in(folder, stem=WEIGHTS))
    chosen = family_for(model, family)
    rows, shapes = chosen.rows_of(model)
    sizes = {name: leaf.shape for name, leaf in named_leaves(shapes).items()}
    additions, targets = {}, []
    for group in by_tensor(rows).values():
        row, shape = group[0], sizes[group[0].ours]
        names = row.names(*shape)
        modules = [chosen.stored(model, name).removesuffix(".weight") for name in names]
        has = [f"{PREFIX}{module}.lora_A.weight" in tensors for module in modules]
        if not any(has):
            continue
        if row.lead > row.stacked:
            raise ValueError(
                f"'{folder}' has an addition to {modules[has.index(True)]!r}, and additions to "
                "experts are not read here: merge the adapter into its model by PEFT"
            )
        if not all(has) or row.first:
            lacks = modules[0 if row.first else has.index(False)]
            raise ValueError(
                f"'{folder}' has no addition to {lacks!r} and has one to the same kernel of other "
                "layers: give that one too, of zeros"
            )
        kernel = row.their_shape(shape[row.lead :], model.vocab_size)
        D, F = (kernel[i] for i in row.order(kernel))

        def taken(kind: str, modules=modules) -> list[np.ndarray]:
            parts = (tensors.pop(f"{PREFIX}{module}.{kind}")[...] for module in modules)
            return [np.asarray(part, np.float32).T for part in parts]

        a_DR, b_RF = taken("lora_A.weight"), taken("lora_B.weight")
        m_LF = np.stack(taken(MAGNITUDE)) if dora else None
        # Layers here share one rank and one alpha. Zeros fill up the ranks, and b takes the ratio
        # of a layer's scale to the common one.
        ranks = [a.shape[-1] for a in a_DR]
        rank = max(ranks)
        layers = []
        for module, a, b, r in zip(modules, a_DR, b_RF, ranks, strict=True):
            if a.shape != (D, r) or b.shape != (r, F):
                raise ValueError(
                    f"'{folder}' has matrices {list(a.shape)} and {list(b.shape)} for {module!r}, "
                    f"which has {D} inputs and {F} outputs: the adapter is another model's"
                )
            layer_alpha = _of_pattern(fields.get("alpha_pattern"), module, alpha)
            ratio = layer_alpha / alpha * (rank / r) ** (0.5 if stabilized else 1)
            fill = (0, rank - r)
            layers.append(
                (np.pad(a, ((0, 0), fill)), np.pad(b * np.float32(ratio), (fill, (0, 0))))
            )
        a_LDR, b_LRF = map(np.stack, zip(*layers, strict=True))
        if not row.stacked:
            a_LDR, b_LRF, m_LF = a_LDR[0], b_LRF[0], m_LF if m_LF is None else m_LF[0]
        for row in group:
            part = row.place(F)
            outputs = [b_LRF[..., part], *([m_LF[..., part]] if dora else [])]
            padding = sizes[row.ours][-1] - outputs[0].shape[-1]  # of a padded vocabulary
            outputs = [np.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, padding)]) for x in outputs]
            additions[row.ours] = a_LDR, *outputs
            targets.append(f"^{re.escape(row.ours)}$={rank}")
    if tensors:
        raise ValueError(
            f"'{folder}' has the tensor {min(tensors)!r}, for which a {chosen.name} has no place"
        )
    return LoRA(1, tuple(targets), float(alpha), stabilized, dora), additions


def placed(params: PyTree, additions: Mapping[str, tuple[np.ndarray, ...]]) -> PyTree:
    """Returns parameters of which each kernel has the parts that :func:`read` returns."""

    def place(name: str, x: Any) -> Any:
        if not isinstance(x, LowRank | Dora):
            return x
        a, b, *magnitude = additions[name]
        low = dataclasses.replace(getattr(x, "low", x), a=a, b=b)
        return Dora(low, *magnitude) if magnitude else low

    return map_named(place, params, is_leaf=is_a(LowRank | Dora))


def _of_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The value of the first regex that is the end of a module's name, as PEFT takes it."""
    matches = (x for key, x in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module))
    return next(matches, default)
