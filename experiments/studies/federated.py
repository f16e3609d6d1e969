"""Rounds of federated averaging to 95 % on digits, as table 2 of McMahan et al. 2017 has them."""

from experiments.studies.sweep import REACHES, Rows, Study, mean

COLUMN, FEDSGD, CENTRAL = "rounds to 95 %", "FedSGD", "central, a pass a round"
SHARDS = "--federated.partition shards"
# Passes of a client, rows of its batch (0 for all), and rates: iid, and by shards.
GRID = ((1, 0, 0.5, 0.5), (1, 10, 0.2, 0.2), (5, 0, 0.5, 0.5), (5, 10, 0.2, 0.2))
GRID += ((20, 0, 0.5, 0.2), (20, 10, 0.2, 0.1))


def flags(epochs: int, batch: int, rate: float, more: str = "") -> str:
    """Returns the flags of a setting."""
    own = f"--federated.epochs {epochs} --global-batch {batch} --optimizer.learning-rate {rate}"
    return f"{own} {more}".strip()


def settings() -> dict[str, str]:
    """Returns the flags of all settings by name."""
    found = {}
    for epochs, batch, *rates in GRID:
        name = FEDSGD if (epochs, batch) == (1, 0) else f"E {epochs}, B {batch or 'all'}"
        for how, rate, more in zip(("iid", "shards"), rates, ("", SHARDS), strict=True):
            found[f"{name}, {how}"] = flags(epochs, batch, rate, more)
    for name, more in (
        ("nesterov", "--federated.outer nesterov"),
        ("FedAdam", "--federated.outer adam"),
        ("FedYogi", "--federated.outer yogi"),
        ("FedProx", "--federated.proximal 0.1"),
    ):
        found[f"E 5, B 10, shards, {name}"] = flags(5, 10, 0.2, f"{SHARDS} {more}")
    one = "--federated.clients 1 --federated.per-round 1"
    return found | {CENTRAL: flags(1, 10, 0.1, one)}


def conclude(rows: Rows) -> str:
    """Says how many times fewer rounds than FedSGD each setting takes."""
    told = []
    for name in rows:
        if not name.startswith((FEDSGD, CENTRAL)):
            base = mean(rows, f"{FEDSGD}, {'shards' if 'shards' in name else 'iid'}", COLUMN)
            told.append(f"{base / mean(rows, name, COLUMN):.1f} with {name}")
    return f"Rounds of {FEDSGD} on the same rows for one round: {'; '.join(told)}."


STUDY = Study(
    module="experiments.federated",
    flags="--steps 160 --eval-every 1 --save-every 1000000",
    settings=settings(),
    shown={COLUMN: f"eval/accuracy{REACHES}0.95"},
    conclude=conclude,
)
