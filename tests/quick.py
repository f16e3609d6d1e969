"""Compiling for programs that run for microseconds: what counts is how long the compiler takes."""

import functools

import jax

OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    # XLA's newer emitters take three times as long over each fusion.
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}

jit = functools.partial(jax.jit, compiler_options=OPTIONS)
