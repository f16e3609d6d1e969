"""Maps an operation to the part of the model it belongs to, by the scope path that JAX records."""

import re

from jaxtrain.jaxprs import WIDE
from jaxtrain.ops.attention import BRANCH_SHARES
from jaxtrain.ops.grouped import TRIPS

# Passes of a gradient; what belongs to none has no name.
FORWARD, RECOMPUTED, BACKWARD = "forward", "recomputed", "backward"

# What stands in an operation's path and is no name of a part.
STRUCTURE = re.compile(
    rf"while|scan|body|cond|branch_\d+_fun|{BRANCH_SHARES}.*|{TRIPS}[\d_of]+|(core|closed|xla)_call|eval_jaxpr"
    rf"|pjit|shard_map|checkpoint|remat\d?|rematted_computation|{WIDE}"
    r"|custom_(jvp|vjp)_call(_jaxpr)?|.*->.*"
    # XLA gives some operations the Python function that made them: _Device.microbatch.
    r"|.*<locals>.*|_\w*\.\w+|"
)


def scopes_of(path: str) -> tuple[str, tuple[str, ...]]:
    """Reads the path that JAX gives an operation.

    Returns:
      Its direction, and the named scopes that it is in.

    >>> scopes_of("jit(step)/transpose(jvp())/while/body/closed_call/block/mlp/dot_general")
    ('backward', ('block', 'mlp'))
    >>> scopes_of("jit(step)/jvp(head)/reduce_sum"), scopes_of("jit(step)/optimizer/mul")
    (('forward', ('head',)), ('', ('optimizer',)))

    A rematerialised layer's backward pass is in its scope twice:

    >>> scopes_of("jit(step)/transpose(jvp())/blocks/attn/blocks/attn/checkpoint/dot_general")
    ('backward', ('blocks', 'attn'))
    >>> scopes_of("build_update.<locals>.step/_Device.microbatch/dynamic_slice")
    ('', ())
    """
    path = path.partition(";")[0]
    direction = FORWARD if "jvp(" in path else ""
    if "transpose(" in path:
        direction = BACKWARD
    if "rematted_computation" in path:
        direction = RECOMPUTED
    scopes: list[str] = []
    for part in _split(path)[:-1]:
        while wrapped := re.fullmatch(r"(\w+)\((.*)\)", part):
            # The names of functions are no names of parts.
            part = "" if wrapped[1] in ("jit", "pjit", "pmap") else wrapped[2]
        for name in _split(part):
            if not STRUCTURE.fullmatch(name) and scopes[-1:] != [name]:
                scopes.append(name)
    for n in range(len(scopes) // 2, 0, -1):
        if scopes[:n] == scopes[n : 2 * n]:
            scopes = scopes[n:]
    return direction, tuple(scopes)


def _split(path: str) -> list[str]:
    """The parts of a path between slashes that are in no parentheses."""
    parts, depth = [""], 0
    for character in path:
        depth += (character == "(") - (character == ")")
        if character == "/" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts
