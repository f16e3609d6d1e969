#!/usr/bin/env bash
# On a CPU, XLA's exp, log and arctan of a piece of an array differ in bits from those of the array.
#
# Versions: jax 0.10.2, Python 3.11, x86-64 with AVX2 (AMD EPYC), default flags.
# Expected: an elementwise function of an element depends on this element alone, so that
# exp(x)[:7] has the bits of exp(x[:7]). It does not: XLA compiles one approximation for the elements
# that fill a vector and another one for the rest, so the last bits depend on the length of the array
# and on the place of the element. exp, log and arctan do so; sqrt, tanh, erf and sin do not. With jax
# 0.12.0.1 only arctan was seen to.
#
# Output seen (out of 56 elements in 8 pieces of 7):
#   exp: True, log: True, arctan: True, sqrt: False, tanh: False
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
python3 -m venv venv
venv/bin/pip install -q "jax==0.10.2" "jaxlib==0.10.2"
cat > check.py <<'PY'
import jax
import jax.numpy as jnp
import numpy as np

x = np.abs(np.random.default_rng(0).normal(size=56)).astype(np.float32)
differs = {}
for name in ("exp", "log", "arctan", "sqrt", "tanh"):
    function = jax.jit(getattr(jnp, name))
    whole = np.asarray(function(x))
    pieces = np.concatenate([np.asarray(function(piece)) for piece in x.reshape(8, 7)])
    differs[name] = bool((whole.view(np.uint32) != pieces.view(np.uint32)).any())
    np.testing.assert_allclose(whole, pieces, rtol=1e-6)
print(", ".join(f"{name}: {value}" for name, value in differs.items()))
wanted = {"exp": True, "log": True, "arctan": True, "sqrt": False, "tanh": False}
if differs != wanted:
    raise SystemExit("the behaviour has changed")
PY
JAX_PLATFORMS=cpu XLA_FLAGS= venv/bin/python check.py 2>/dev/null
