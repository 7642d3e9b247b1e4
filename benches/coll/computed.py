"""What scripts share that compute figures with `unbroken plan` and `unbroken simulate`."""

import argparse
import json
import subprocess
from pathlib import Path

from lib.fabric import UNBROKEN

LIMIT_S = 600


def said(*words) -> dict:
    """What the command says in JSON."""
    command = [str(UNBROKEN), *(str(word) for word in words), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def main(about: str, figures: dict) -> int:
    """The command of a script that computes the figures of these names."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=figures)
    parser.add_argument("--out", type=Path, required=True, help="where it is written")
    parser.add_argument("--python", help="not needed here")
    args = parser.parse_args()
    computed = figures[args.name]()
    args.out.write_text(json.dumps({"setting": "computed", **computed}, indent=1) + "\n")
    return 0
