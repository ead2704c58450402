"""Print the oldest version of every package that setup.cfg names, as constraints for pip.

    python .ci/oldest_requirements.py EXTRA... > constraints.txt

A requirement `name>=1.2` becomes `name==1.2`, and `name==1.2` stays. A requirement without a lower bound is an error,
since nobody could say which of its versions are tested. Extras that are not named are left out.
"""

from __future__ import annotations

import configparser
import re
import sys
from pathlib import Path

SETUP = Path(__file__).resolve().parent.parent / "setup.cfg"
REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)\s*(?:>=|==)\s*(?P<version>[0-9][0-9A-Za-z.]*)\s*(?P<marker>;.*)?")


def oldest(requirements: list[str]) -> list[str]:
    """The constraint for each requirement."""
    constraints = []
    for requirement in requirements:
        match = REQUIREMENT.fullmatch(requirement)
        if match is None:
            raise SystemExit(f"{SETUP}: expected a requirement like name>=1.2, got {requirement!r}")
        constraints.append(f"{match['name']}=={match['version']}{match['marker'] or ''}")
    return constraints


def main(extras: list[str]) -> None:
    """Print the constraints."""
    parser = configparser.ConfigParser()
    parser.read(SETUP)
    texts = [parser["options"]["install_requires"]]
    texts += [parser["options.extras_require"][extra] for extra in extras]
    print("\n".join(oldest([line.strip() for text in texts for line in text.splitlines() if line.strip()])))


if __name__ == "__main__":
    main(sys.argv[1:])
