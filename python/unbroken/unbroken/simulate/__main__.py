"""What `unbroken simulate sweep --ray` runs: a JSON object on stdin says what is left to do; a line
on stdout for each part that is done."""

import json
import os
import sys
from contextlib import closing
from typing import Any

from . import on_ray


def main() -> int:
    """The exit status: 0 if all parts are done."""
    # What others print must not stand between our lines.
    ours = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(**what: Any) -> None:
        print(json.dumps(what), file=ours, flush=True)

    try:
        question = json.load(sys.stdin)
        with closing(on_ray.lines(question, question["address"])) as results:
            for lines in results:
                tell(lines=lines)
        tell(done=None)
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, RuntimeError) as error:
        tell(error=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
