#!/usr/bin/env bash
# JAX_DEBUG_NANS=1 stops checking jitted functions once jnp.var has been called or traced.
#
# Versions: jax 0.10.2 (0.12.0.1 behaves alike), numpy 2, Python 3.11.
# Expected: with JAX_DEBUG_NANS=1 a jitted function that returns NaN raises FloatingPointError, for
# the life of the process. It does at first. After one jnp.var(x), or after any other function of JAX
# that leaves `with jax.debug_nans(False)`, a jitted or compiled function that has returned once
# returns NaN without a word in this thread, although jax.config.jax_debug_nans is still True. Such
# a loop never checks a loss that uses jnp.var. `with jax.debug_nans(True)` around a call checks it.
# (A first call is checked, because it does not take the fast path.)
#
# Output seen:
#   before: FloatingPointError
#   after jnp.var: nan, jax_debug_nans is True
#   within jax.debug_nans(True): FloatingPointError
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
python3 -m venv venv
venv/bin/pip install -q "jax==0.10.2" "jaxlib==0.10.2"
cat > check.py <<'PY'
import jax
import jax.numpy as jnp

log = jax.jit(jnp.log)
minus_one = jnp.float32(-1.0)
log(jnp.float32(1.0))


def called():
    try:
        return str(log(minus_one))
    except FloatingPointError:
        return "FloatingPointError"


before = called()
jnp.var(jnp.ones(3))
after = called()
with jax.debug_nans(True):
    within = called()
print(f"before: {before}")
print(f"after jnp.var: {after}, jax_debug_nans is {jax.config.jax_debug_nans}")
print(f"within jax.debug_nans(True): {within}")
if (before, after, within) != ("FloatingPointError", "nan", "FloatingPointError"):
    raise SystemExit("the behaviour has changed")
PY
JAX_PLATFORMS=cpu JAX_DEBUG_NANS=1 venv/bin/python check.py 2>/dev/null
