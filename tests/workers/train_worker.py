"""One process of a small run, for tests: ``train_worker.py RUN_DIR [options]``.

With RUN_DIR ``new`` the run is numbered, under the folder ``--chdir``.

With ``--processes`` above 1, or started by the launcher, it joins the others over gloo. The
batch takes a while to read, so that there is time to do something to the run, and can be made to
hang or fail.
"""

import argparse
import dataclasses
import os
import sys
import time

import jax


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", nargs="?")
    parser.add_argument("--run-dir", dest="named_run_dir")
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--port", type=int)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--memory-every", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--auto-resume", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.02, help="per batch")
    parser.add_argument("--start-seconds", type=float, default=0.0, help="until the loop begins")
    parser.add_argument("--slow-process", type=int, help="waits ten times as long for its data")
    parser.add_argument("--hang-at", type=int, help="the batch that never comes")
    parser.add_argument("--fail-at", type=int, help="the batch that fails, in the last process")
    parser.add_argument("--end-at", type=int, help="the last process's hook ends the run here")
    parser.add_argument("--raise-at", type=int, help="the last process's hook fails here")
    parser.add_argument("--exit-at", type=int, help="the last process's hook calls sys.exit here")
    parser.add_argument("--hang-seconds", type=float, default=0.0)
    parser.add_argument("--chdir", default=".")
    parser.add_argument("--eval-every", type=int, default=0)
    parser.add_argument("--eval-batches", type=int, default=0)
    parser.add_argument("--profile-steps")
    parser.add_argument("--exact", type=int, default=0, help="grains")
    parser.add_argument("--fsdp", action="store_true", help="over all devices")
    args = parser.parse_args()
    os.chdir(args.chdir)

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    if args.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{args.port}", args.processes, args.process)

    if "JAXTRAIN_COORDINATOR" in os.environ:
        from jaxtrain.host import distributed

        distributed.initialize()
        print("pid", os.getpid(), flush=True)

    import jaxtrain as jt
    from jaxtrain import data
    from jaxtrain.layout import MeshShape
    from jaxtrain.run.checkpoints.checkpointer import digest
    from tests import problems

    class Rows:
        batch = problems.make_batch(0, rows=64)

        def __len__(self):
            return 64

        def __getitem__(self, index):
            return {name: value[index] for name, value in self.batch.items()}

    def init(rng):
        print("starting", flush=True)
        time.sleep(args.start_seconds)
        return problems.init(rng)

    def loss_fn(params, batch, rng):
        metrics = {"columns": batch["x"].sum(0)}
        return dataclasses.replace(problems.loss_fn(params, batch, rng), metrics=metrics)

    batches = data.Batches(Rows(), global_batch=args.global_batch, seed=0)

    def make(step, sharding):
        slow = 10 if args.process == args.slow_process else 1
        time.sleep(args.seconds * slow)
        if step == args.fail_at and args.process == args.processes - 1:
            raise KeyError("a hole in the data")
        while step == args.hang_at:
            time.sleep(1)
        return batches.sharded(step, sharding)

    def evaluated(sharding):
        for number in range(args.eval_batches):
            print("evaluating", number, flush=True)
            yield make(number, sharding)

    class LastProcess(jt.Hook):
        def stops(self, step):
            last = args.process == args.processes - 1
            if last and step == args.raise_at:
                raise KeyError("a hole in the hook")
            if last and step == args.exit_at:
                sys.exit(3)
            return "it is late" if last and step == args.end_at else False

    mesh = MeshShape(data=1, fsdp=-1) if args.fsdp else MeshShape()
    experiment = jt.Experiment.of(
        name="worker",
        init_fn=init,
        loss_fn=jt.row_wise(loss_fn) if args.exact else loss_fn,
        layout=jt.Layout(exact=args.exact, mesh=mesh),
        optimizer=jt.make_optimizer("adamw", 1e-2),
        batch=batches.shapes,
        train_batches=lambda start, sharding: data.BatchStream(
            lambda step: make(step, sharding), start, prefetch=1
        ),
        eval_batches=evaluated if args.eval_batches else None,
        steps=args.steps,
        items_per_step=args.global_batch,
        item="rows",
    )
    options = jt.RunOptions(
        run_dir=None if args.run_dir == "new" else args.run_dir or args.named_run_dir,
        resume=args.resume,
        auto_resume=args.auto_resume,
        log_every=1,
        save_every=args.save_every,
        memory_every=args.memory_every,
        eval_every=args.eval_every,
        profile_steps=args.profile_steps,
        hang_minutes=args.hang_seconds / 60,
    )
    result = jt.fit(experiment, options, hooks=[LastProcess()])
    print("digest", digest(result.state), flush=True)


if __name__ == "__main__":
    main()
