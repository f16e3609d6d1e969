"""The objects that the parts of a run share while it lasts."""

import dataclasses
from collections.abc import Callable

from jax.sharding import Mesh

from jaxtrain.experiment import Data, Metadata
from jaxtrain.run.folder import RunLock
from jaxtrain.run.observe.alerts import Alerts
from jaxtrain.run.observe.journal import Journal
from jaxtrain.run.observe.sampling import Sampling
from jaxtrain.run.observe.terminal import Progress
from jaxtrain.run.observe.throughput import Throughput
from jaxtrain.run.observe.writers import Fanout
from jaxtrain.run.options import RunOptions
from jaxtrain.run.survive.peer_group import PeerGroup
from jaxtrain.run.survive.watchdog import Watchdog
from jaxtrain.sharding.stack import Stack


@dataclasses.dataclass(frozen=True)
class Run:
    """The objects that the built-in hooks of one run share, and what they need of its experiment.

    Args:
      mfu: the utilisation of the devices by a step of so many seconds, None where unknown.
      owner: the claim to the run's folder, ``owner.path``.
      peers: joins the processes.
      journal: takes what happens, and knows where the time goes.
      alerts: check the logged values, and request actions.
    """

    data: Data
    metadata: Metadata
    steps: int
    steps_per_call: int
    stack: Stack
    mfu: Callable[[float], float | None]
    options: RunOptions
    mesh: Mesh
    owner: RunLock
    peers: PeerGroup
    watchdog: Watchdog
    log: Fanout
    journal: Journal
    alerts: Alerts
    progress: Progress
    rate: Throughput
    sampling: Sampling
