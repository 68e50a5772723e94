"""`python -m evalops ct …` or `python -m evalops ies …`: the commands without their console scripts."""

import sys

from evalops.cli import ct, ies

if __name__ == "__main__":
    name = sys.argv.pop(1) if len(sys.argv) > 1 and sys.argv[1] in ("ct", "ies") else "ies"
    (ct if name == "ct" else ies)(prog_name=name)
