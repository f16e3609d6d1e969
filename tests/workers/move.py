"""One process of several: restores a run's checkpoint on its mesh, says its digest, saves, trains.

    python -m tests.workers.move PROCESS PROCESSES PORT DEVICES STEPS FLAGS...

DEVICES are those of this process. With STEPS 0 it restores, prints the digest of the state in
natural order and saves it again under the next number; otherwise it resumes the run up to STEPS.
"""

import sys

import jax


def main() -> None:
    process, processes, port, devices, steps = map(int, sys.argv[1:6])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", processes, process)

    from experiments import gpt
    from jaxtrain.build import (
        make_abstract_state,
        make_experiment_mesh,
        restore_state,
        to_checkpoint,
    )
    from jaxtrain.host.paths import as_path
    from jaxtrain.run.checkpoints.checkpointer import Checkpointer, digest
    from jaxtrain.run.loop import fit
    from jaxtrain.run.main import parse

    config = parse(gpt.Config, sys.argv[6:])
    experiment = gpt.build(config).with_(conclude=None)
    if steps:
        fit(experiment.with_(steps=steps), config.run)
        return
    abstract = make_abstract_state(experiment, make_experiment_mesh(experiment))
    with Checkpointer(as_path(config.run.run_dir) / "checkpoints", keep=None) as checkpoints:
        last = checkpoints.latest_step()
        natural = to_checkpoint(
            experiment, restore_state(experiment, abstract, checkpoints.restore)
        )
        print("digest", digest(natural), flush=True)
        checkpoints.save(last + 1, natural, config=experiment.metadata.config)


if __name__ == "__main__":
    main()
