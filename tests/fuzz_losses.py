"""Random losses of users, optimizers and layouts against the definition, all in float64.

    python -m tests.fuzz_losses --seed 0 --seconds 60

The losses have terms of every row, of some and of the whole batch, weights of any sign, of none and
of integers, dropout, and model state. What a step makes of them is compared with the sums that they
are by definition, differentiated whole, and with the optimizer's own update of their mean. Every
case is drawn from its own number, so ``--case N ...`` repeats some.
"""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np

import jaxtrain as jt
from jaxtrain import optim
from jaxtrain.compare.parity import worst
from jaxtrain.ops.numerics import drop
from jaxtrain.tree import named_leaves
from tests import fuzz

ROWS, WIDTH, WORDS, LAYERS, STEPS, DEVICES = 16, 8, 6, 4, 3, 8
TOLERANCE = 1e-6  # the weight of a call that accumulates is float32
QUICK = {"xla_backend_optimization_level": 0}
RULES = [("^blocks/w$", ("layers", "embed", "mlp")), ("^blocks/b$", ("layers", None))]
POLICY = jt.Policy(jnp.float64, jnp.float64)


@dataclasses.dataclass(frozen=True)
class Loss:
    """What was drawn of a loss."""

    error: str
    extra: str | None
    weight: str
    rate: float
    of_batch: bool
    stateful: bool
    declared: bool

    @property
    def by_row(self) -> bool:
        """Whether it is a sum over rows."""
        return not self.of_batch and self.weight != "scalar"

    def of(self, y, batch):
        """The loss of the model's results, [B, WORDS]."""
        target, w = batch["target"], batch["w"]
        e = {
            "square": lambda: jnp.square(y - target).mean(-1),
            "cosh": lambda: jnp.logaddexp(y - target, target - y).sum(-1),
            "words": lambda: -jax.nn.log_softmax(y)[jnp.arange(len(y)), batch["word"]],
        }[self.error]()
        z = jnp.square(jax.nn.logsumexp(y, -1))
        total = (e * w).sum() + {None: 0.0, "every": 0.1 * z.sum(), "some": 0.1 * (z * w).sum()}[
            self.extra
        ]
        total += 0.1 * jnp.square(y.sum(0)).sum() if self.of_batch else 0.0
        if self.weight == "scalar":
            return total / len(y)
        weight = {"own": w.sum(), "rows": jnp.int32(len(y)), "other": batch["v"].sum()}[self.weight]
        metrics = {"error": (e * w).sum(), "plain": (e.sum(), len(y))}
        metrics |= {"largest": jt.Max(e.max()), "sum": jt.Sum(e.sum())}
        return jt.WeightedLoss(total, weight, metrics)


def embed(loss):
    return lambda params, batch, rng: drop(jnp.tanh(batch["x"] @ params["in"]), loss.rate, rng)


def block(layer, x, batch, rng):
    return x + 0.5 * jnp.tanh(x @ layer["w"] + layer["b"])


def make_stages(loss, stack):
    def head_loss(params, x, batch):
        return loss.of(x @ params["out"], batch)

    declared = loss.declared and loss.by_row
    return jt.Stages(embed(loss), block, head_loss, stacked=stack, row_wise=declared)


def with_state(loss_fn):
    """The loss on inputs that a running mean is taken from; the mean and a smallest input go on."""

    def stateful(params, state, batch, rng):
        mean = jax.lax.stop_gradient(0.5 * (state["mean"] + batch["x"].mean(0)))
        low = jnp.minimum(state["low"], batch["x"].min())
        return loss_fn(params, batch | {"x": batch["x"] - mean}, rng), {"mean": mean, "low": low}

    return stateful


def definition(loss, loss_fn, params, state, batch, rng, parts):
    """Sums of the loss over strided parts, and the gradient of their total."""
    parts = 1 if loss.by_row and state is None else parts

    def total(params, state):
        found = []
        for j in range(parts):
            rows = {name: x[j::parts] for name, x in batch.items()}
            # Draws are by row; a loss that is no sum over rows has none here.
            one = loss_fn(params, rows, rng) if state is None else None
            if state is not None:
                one, state = loss_fn(params, state, rows, rng)
            found.append(one)
        totals = [getattr(one, "total", one) for one in found]
        return sum(totals), (found, state)

    grads, (found, state) = jax.grad(total, has_aux=True)(params, state)
    weight = sum(getattr(one, "weight", 1) for one in found)
    sums = {"loss": sum(getattr(one, "total", one) for one in found) / weight, "weight": weight}
    if loss.weight != "scalar":
        metrics = [one.metrics for one in found]
        sums["error"] = sum(m["error"] for m in metrics) / weight
        sums["plain"] = sum(m["plain"][0] for m in metrics) / len(batch["w"])
        sums["largest"] = jnp.stack([m["largest"].value for m in metrics]).max()
        sums["sum"] = sum(m["sum"].value for m in metrics)
    return grads, sums, state


def make_batches(r, microbatches):
    n = np.random.default_rng(r.randrange(10**6))
    kind = r.choice(["mask", "signed", "integers", "sparse"])
    batches = []
    for _ in range(STEPS):
        w = {
            "mask": lambda: (n.random(ROWS) < 0.6).astype(float),
            "signed": lambda: n.normal(size=ROWS) + 0.3,
            "integers": lambda: n.integers(-2, 4, ROWS),
            "sparse": lambda: (n.random(ROWS) < 0.15) * n.random(ROWS),
        }[kind]()
        if r.random() < 0.5:
            w[r.randrange(microbatches) :: microbatches] = 0  # a microbatch
        if r.random() < 0.3:
            w[: ROWS // 2] = 0  # the rows of half of the devices
        if r.random() < 0.15:
            w[:] = 0
        batches.append(
            {
                "x": n.normal(size=(ROWS, WIDTH)),
                "target": n.normal(size=(ROWS, WORDS)),
                "word": n.integers(0, WORDS, ROWS),
                "w": w,
                "v": n.normal(size=ROWS) + r.choice([-1.0, 1.0]),
            }
        )
    return kind, batches


def make_params(r):
    n = np.random.default_rng(r.randrange(10**6))
    shapes = {"in": (WIDTH, WIDTH), "out": (WIDTH, WORDS)}
    params = {name: 0.3 * n.normal(size=shape) for name, shape in shapes.items()}
    shapes = {"w": (LAYERS, WIDTH, WIDTH), "b": (LAYERS, WIDTH)}
    return params | {"blocks": {k: 0.3 * n.normal(size=shape) for k, shape in shapes.items()}}


def make_layout(r, stateful):
    """Returns sizes of mesh axes (none for no mesh), the stack, and options of the engine."""
    sizes, options, stack = {}, {}, jt.Stack()
    if not stateful and r.random() < 0.4:
        sizes["pipe"] = r.choice([2, 2, 4])
        schedule = r.choice(["gpipe", "1f1b", "interleaved"])
        virtual = 2 if schedule == "interleaved" else 1
        counts = [0] * (sizes["pipe"] * virtual)
        for _ in range(LAYERS):
            counts[r.randrange(len(counts))] += 1
        even = LAYERS % len(counts) == 0 and r.random() < 0.5
        stack = jt.Stack(virtual=virtual, counts=None if even else tuple(counts))
        options = {"schedule": schedule, "remat": r.choice(["full", "none"])}
    if sizes or r.random() < 0.7:
        left = DEVICES // sizes.get("pipe", 1)
        for axis in r.sample(["data", "fsdp", "tensor"], 3):
            sizes[axis] = r.choice([k for k in (1, 2, 4) if k <= left])
            left //= sizes[axis]
        options["gather"] = r.choice([None, None, "step"])
    over = sizes.get("data", 1) * sizes.get("fsdp", 1)
    microbatches = r.choice([k for k in (1, 2, 4, 8) if ROWS % (k * over) == 0])
    return sizes, stack, options, microbatches


def run(number: int) -> str | None:
    """Runs a case; returns what is wrong with it."""
    with jax.enable_x64(True):
        return _run(random.Random(number))


def _run(r: random.Random) -> str | None:
    of_batch, stateful = r.random() < 0.2, r.random() < 0.25
    weight = r.choice(["own", "own", "own", "rows", "other", "scalar"])
    loss = Loss(
        error=r.choice(["square", "cosh", "words"]),
        extra=r.choice([None, "every", "some"]),
        weight=weight,
        # A microbatch has a mask of its own where parts are no rows: only sums over rows drop here.
        rate=0.3 if not (of_batch or stateful or weight == "scalar") and r.random() < 0.5 else 0.0,
        of_batch=of_batch,
        stateful=stateful,
        declared=r.random() < 0.8,
    )
    sizes, stack, options, microbatches = make_layout(r, stateful)
    kind, batches = make_batches(r, microbatches)
    name, calls, zero = r.choice(optim.OPTIMIZERS), r.choice([1, 1, 2]), r.choice([0, 0, 1, 2, 3])
    given = {"weight_decay": r.choice([0.0, 0.1]), "clip_norm": r.choice([None, 0.5])}
    given |= {"accumulate": calls, "learning_rate": 0.05}
    params = make_params(r)
    about = f"{loss} weights {kind}, {sizes} zero={zero} {stack} {options} parts={microbatches} "
    about += f"{name} {given}"

    loss_fn = jt.loss_from_stages(make_stages(loss, stack))
    natural_fn = jt.loss_from_stages(make_stages(loss, jt.Stack()))
    if stateful:
        loss_fn, natural_fn = with_state(loss_fn), with_state(natural_fn)
    mesh = jt.make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])
    mesh = mesh if sizes else None
    tx = jt.make_optimizer(name, stacked=stack.axes, **given)
    begin = {"mean": np.zeros(WIDTH), "low": np.array(np.inf)} if stateful else None

    def init(rng):
        cut = jax.tree.map(jnp.asarray, stack.cut(params))
        return (cut, jax.tree.map(jnp.asarray, begin)) if stateful else cut

    rules = jt.Rules(RULES, stacked=stack)
    on = {"mesh": mesh, "rules": rules, "zero": zero if mesh else 0} if mesh else {}
    state = jt.init_state(
        init, tx, jax.random.key(0), policy=POLICY, has_model_state=stateful, **on
    )
    if mesh is not None:
        options["gradient_shardings"] = jt.gradient_shardings(state, zero=zero)
    if "schedule" in options:
        # XLA's partitioner moves a table between these axes by permutes. In the branch that a stage
        # takes alone, each waits for ever on a CPU, where all devices must join one.
        over = sizes.get("data", 1) * sizes.get("fsdp", 1)
        if loss.error == "words" and min(over, sizes.get("tensor", 1)) > 1:
            options["skip_bubbles"] = False
        engine = jt.pipeline(
            make_stages(loss, stack), mesh=mesh, microbatches=microbatches, policy=POLICY, **options
        )
        step = jt.build_update(engine, tx, policy=POLICY)
    else:
        options |= {"accumulate": microbatches, "has_model_state": stateful}
        step = jt.build_train_step(loss_fn, tx, policy=POLICY, **options)
    step = jt.compile_step(step, state, batches[0], mesh=mesh, rules=rules, compiler_options=QUICK)
    key = jax.random.split(jax.random.key(0))[1]

    plain = jt.make_optimizer(name, stacked=jt.Stack().axes, **given)
    expected, moments, kept = params, jax.jit(plain.init)(params), begin
    define = jax.jit(definition, static_argnums=(0, 1, 6))

    @jax.jit
    def update(grads, moments, params, value, weight):
        updates, moments = plain.update(grads, moments, params, value=value, weight=weight)
        return jax.tree.map(jnp.add, params, updates), moments

    for number, batch in enumerate(batches):
        rng = jax.random.fold_in(key, number)
        grads, sums, after = define(loss, natural_fn, expected, kept, batch, rng, microbatches)
        weight = float(sums["weight"])
        mean = jax.tree.map(lambda g, w=weight: g / w if w else 0 * g, grads)
        if weight or calls > 1:
            expected, moments = update(mean, moments, expected, sums["loss"], weight)
        kept = after if weight else kept
        sums["grad_norm"] = np.sqrt(sum(np.square(g).sum() for g in jax.tree.leaves(mean)))
        state, metrics = step(state, batch)
        found = {"params": stack.natural(jax.device_get(state.params)), "state": state.model_state}
        found |= {"metrics": {k: metrics[k] for k in sums}}
        wanted = {"params": expected, "state": kept, "metrics": sums}
        for part, tree in wanted.items():
            for leaf, value in named_leaves(jax.device_get(tree)).items():
                got = np.asarray(named_leaves(jax.device_get(found[part]))[leaf])
                if not np.isfinite(value).all():
                    same = np.array_equal(np.isfinite(got), np.isfinite(value))
                    error = 0.0 if same else np.inf
                else:
                    error = worst({leaf: got}, {leaf: np.asarray(value)})[0]
                if not error < TOLERANCE:
                    return f"{about}: {part} {leaf} of step {number} is off by {error:.1e}"
    return None


if __name__ == "__main__":
    raise SystemExit(fuzz.main(run, __doc__, DEVICES))
