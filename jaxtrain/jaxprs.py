"""Traced programs: their equations, and the dtypes of their products."""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# The scope of what a model computes in float32 on purpose, such as a sum over whole rows.
WIDE = "float32_on_purpose"
# The scope of what writes the rows that a step learns from, in a precision of its own.
SAMPLED = "sampled"
REDUCED = {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)}


def float32_products(function: Callable[..., Any], *args: Any) -> list[str]:
    """Lists the matrix products and convolutions that take a float32 operand.

    In a bf16 step the list should be empty: one float32 product on an accelerator costs what many
    bfloat16 ones do, and nothing else shows that it is there. Pallas kernels are not looked into.

    Args:
      function: anything JAX can trace, such as an un-jitted train step.
      *args: its arguments; shapes suffice.

    Returns:
      One line per product: operand dtypes and shapes, and where in the source it stands.
    """
    return products_in(jax.make_jaxpr(function)(*args).jaxpr)[1]


def products_in(jaxpr: Any, *, outside: Sequence[str] = ()) -> tuple[int, list[str], bool]:
    """Counts the products of a traced program, leaving out named scopes.

    Returns:
      How many there are, those with a float32 operand as :func:`float32_products` lists them, and
      whether the program computes anything in bfloat16 or float16 at all: what it rounds to them,
      or multiplies in them. A leaf of the batch may have such a dtype, and is only read.
    """
    count, lines, reduced = 0, [], False
    for eqn in equations(jaxpr, outside=outside):
        is_product = eqn.primitive.name in ("dot_general", "conv_general_dilated")
        sides = eqn.invars, eqn.outvars
        came, left = ({getattr(v.aval, "dtype", None) for v in side} for side in sides)
        reduced |= bool(left & REDUCED) and (is_product or not came & REDUCED)
        if not is_product:
            continue
        count += 1
        operands = [v.aval for v in eqn.invars[:2]]
        if any(a.dtype in (jnp.float32, jnp.float64) for a in operands):
            shapes = " x ".join(a.str_short() for a in operands)
            lines.append(f"{eqn.primitive.name} {shapes}{_where(eqn)}")
    return count, lines, reduced


def multiplies_8_bits(jaxpr: Any) -> bool:
    """Whether a traced program multiplies floating-point numbers of 8 bits."""
    products = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "dot_general")
    dtypes = (eqn.invars[0].aval.dtype for eqn in products)
    return any(d.itemsize == 1 and jnp.issubdtype(d, jnp.floating) for d in dtypes)


def digest(closed_jaxpr: Any) -> str:
    """Hashes a traced program with its constants.

    Equal programs of the same versions of JAX have equal digests; another version may trace the
    same function to other equations. Constants above 1 MiB count by their shape alone.
    """
    # In a terminal or a notebook, the text would have colours by default.
    text = closed_jaxpr.pretty_print(use_color=False)
    # The text of a function in a parameter ends in its address.
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    digests = hashlib.sha256(text.encode())
    for constant in _constants(closed_jaxpr):
        digests.update(str(jax.typeof(constant)).encode())
        if jnp.issubdtype(constant.dtype, jax.dtypes.prng_key):
            constant = jax.random.key_data(constant)
        digests.update(np.asarray(constant).tobytes() if constant.nbytes <= 1 << 20 else b"")
    return digests.hexdigest()[:12]


def _constants(closed_jaxpr: Any) -> Iterator[Any]:
    """Yields the constants of a program and of its inner programs, because jit hides its own."""
    yield from closed_jaxpr.consts
    for eqn in equations(closed_jaxpr.jaxpr):
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                yield from getattr(inner, "consts", ())


def _where(eqn: Any) -> str:
    frames = getattr(eqn.source_info.traceback, "frames", None) or ()
    for frame in frames:
        if "/jax/" not in frame.file_name and "/flax/" not in frame.file_name:
            return f" at {frame.file_name}:{frame.line_num}"
    return ""


def equations(jaxpr: Any, *, but: str | None = None, outside: Sequence[str] = ()) -> Iterator[Any]:
    """Yields the equations of a jaxpr and of its nested jaxprs, except those of Pallas kernels.

    Args:
      jaxpr: where to look.
      but: the name of a primitive, or of a jitted function, that is not looked into either.
      outside: named scopes, whose equations, and those of their gradients, are left out.
    """
    for eqn in jaxpr.eqns:
        scopes = outside and re.findall(r"\w+", str(eqn.source_info.name_stack))
        if scopes and not set(outside).isdisjoint(scopes):
            continue
        yield eqn
        name = eqn.primitive.name
        if name == "pallas_call" or (but and but in (name, eqn.params.get("name"))):
            continue
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner, but=but, outside=outside)
