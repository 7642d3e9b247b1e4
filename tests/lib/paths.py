"""Where things lie: the repository, what cargo builds, logs of tests."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve()
BUILD = TARGET / "release"
LOGS = TARGET / "test-logs"
EXAMPLES = TARGET / "tests-c"
