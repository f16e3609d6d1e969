"""The logs of a folder that another start of the run may take over."""

import math
import time
from collections.abc import Mapping

import jax

from jaxtrain.host.paths import is_remote
from jaxtrain.run.folder import RunLock
from jaxtrain.run.hook import Value
from jaxtrain.run.observe.writers import Fanout, Shown
from jaxtrain.run.survive.peer_group import PeerGroup


class OwnedLog:
    """The logs, while the folder is this start's own; then it has all processes stop together,
    after which the last save finds the same."""

    # A bucket takes long enough to answer for the devices to wait.
    LOOK_SECONDS = 10.0

    def __init__(self, log: Fanout, owner: RunLock, peers: PeerGroup):
        self._log, self._owner, self._peers = log, owner, peers
        self._taken, self._looked_at = False, -math.inf

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        if not self._is_taken():
            self._log.write(step, values)

    def show(self, step: int, values: Mapping[str, Shown]) -> None:
        if not self._is_taken():
            self._log.show(step, values)

    def close(self) -> None:
        if not self._is_taken():  # In a bucket, closing writes.
            self._log.close()

    def _is_taken(self) -> bool:
        seconds = self.LOOK_SECONDS if is_remote(self._owner.path) else 0.0
        if jax.process_index() == 0 and time.monotonic() - self._looked_at >= seconds:
            self._looked_at = time.monotonic()
            if not self._taken and self._owner.taken_by() is not None:
                self._taken = True
                self._peers.want_stop()
        return self._taken
