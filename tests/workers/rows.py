"""One process of two: trains a step on rows of its own.

jaxtrain launch --processes 2 --simulate-devices-per-process 2 -- python tests/workers/rows.py
"""

import jax
import numpy as np
import optax

import jaxtrain as jt
from jaxtrain.host import distributed
from tests import problems


def main() -> None:
    distributed.initialize()
    mesh = jt.make_mesh(data=2, fsdp=2)
    optimizer = optax.sgd(0.5)
    state = jt.init_state(problems.init, optimizer, jax.random.key(0), mesh=mesh)
    step = jt.build_train_step(problems.loss_fn, optimizer)
    whole = problems.make_batch()
    half = problems.ROWS // 2 * jax.process_index()
    mine = jax.tree.map(lambda x: x[half : half + problems.ROWS // 2], whole)

    wrong = jt.compile_step(step, state, mine, mesh=mesh)
    try:
        wrong(state, mine)
    except ValueError as error:
        print("refused:", error, flush=True)
    try:
        jt.from_local_rows(jax.tree.map(lambda x: x[:3], mine), mesh)
    except ValueError as error:
        print("refused:", error, flush=True)

    batch = jt.from_local_rows(mine | {"scale": np.float32(1)}, mesh)
    assert batch.pop("scale").shape == ()
    train = jt.compile_step(step, state, batch, mesh=mesh)
    state, metrics = train(state, batch)
    total = sum(float(abs(x).sum()) for x in jax.tree.leaves(state.params))
    print("trained:", *(repr(float(x)) for x in (metrics["weight"], metrics["loss"], total)))


if __name__ == "__main__":
    main()
