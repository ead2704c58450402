"""What launchers tell their ranks: the launchers' own variables of real runs, without paths and addresses.

`launch_environments.json` says of each what was run. Those whose source begins with "not seen here" are written from
documentation. `SLURM_*_PACK_GROUP_*` is left out where `SLURM_*_HET_GROUP_*` says the same.
"""

from __future__ import annotations

import json
from pathlib import Path

RECORDED = json.loads(Path(__file__).with_suffix(".json").read_text())


def ranks_of(name: str) -> list[dict[str, str]]:
    """The environment of each rank of a recorded run, in the order of the ranks."""
    run = RECORDED[name]
    return [{**run["common"], **own} for own in run["ranks"]]
