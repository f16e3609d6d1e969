"""Starts a command on nodes of a Ray cluster, by `jaxtrain launch` on each of them:

    python tpu_setup/ray/launch.py --hosts 2 --processes 8 -- python -m experiments.gpt ...

It reserves whole nodes (a placement group, no two parts of it on one node), asks the first for its
address and a free port, and starts the launcher on each with these. The exit status is that of the
run, by jaxtrain.host.exit_codes. It needs the extra `ray`, on all nodes.
"""

import argparse
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jaxtrain.host import exit_codes
from jaxtrain.run.launch import free_port


def meeting_place() -> str:
    """Returns the address of the node that this runs on, with a port that is free."""
    return f"{ray.util.get_node_ip_address()}:{free_port()}"


def launch(command: list[str]) -> int:
    """Runs a launcher to its end; returns its exit status. Ray ends it where the node is lost."""
    launcher = subprocess.Popen([sys.executable, "-u", "-m", "jaxtrain", "launch", *command])
    try:
        return launcher.wait()
    finally:  # cancelled: SIGTERM has the run save and end
        launcher.terminate()
        launcher.wait()


def main() -> int:
    """Starts the launchers and waits for all of them."""
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, required=True, help="Nodes to run on.")
    parser.add_argument("--processes", type=int, required=True, help="Processes on each.")
    parser.add_argument("--gpus", type=int, help="GPUs of each; left out, one for each process.")
    options, command = parser.parse_args(words[:at]), words[at + 1 :]
    gpus = options.processes if options.gpus is None else options.gpus
    ray.init()
    each = {"CPU": 1} | ({"GPU": gpus} if gpus else {})
    nodes = placement_group([each] * options.hosts, strategy="STRICT_SPREAD")
    ray.get(nodes.ready())

    def on(index: int, function):
        """A call of the function on a node; no retry, for the launchers end together."""
        where = PlacementGroupSchedulingStrategy(nodes, placement_group_bundle_index=index)
        given = {"num_cpus": 1, "num_gpus": gpus, "max_retries": 0, "scheduling_strategy": where}
        return ray.remote(**given)(function)

    coordinator = ray.get(on(0, meeting_place).remote())
    shared = ["--processes", str(options.processes), "--hosts", str(options.hosts)]
    shared += ["--coordinator", coordinator]
    running = [
        on(i, launch).remote([*shared, "--host-index", str(i), "--", *command])
        for i in range(options.hosts)
    ]
    codes = []
    for launcher in running:
        try:
            codes.append(ray.get(launcher))
        except ray.exceptions.RayError as lost:
            print(f"a node was lost: {lost}", file=sys.stderr)
            codes.append(exit_codes.PEER_LOST)
    remove_placement_group(nodes)
    return exit_codes.of_run(codes)


if __name__ == "__main__":
    sys.exit(main())
