"""Build a demo corpus from text that every machine has: this Python's library and its reference.

python scripts/demo.py [DATABASE]
"""

import os
import subprocess
import sys
from pathlib import Path

STAGES = (["ingest.py", "stdlib"], ["curate.py"], ["tokenize_corpus.py"])


def build(database: str) -> None:
    """Build ``database`` under another name and rename it: it is whole or absent.

    Raises SystemExit when a stage fails.
    """
    partial = f"{database}.partial"
    for script, *inputs in STAGES:
        path = Path(__file__).resolve().parent / script
        command = [sys.executable, str(path), "--db", partial, *inputs]
        if subprocess.run(command).returncode:
            raise SystemExit(f"could not build the demo corpus: {' '.join(command)}")
    os.rename(partial, database)


if __name__ == "__main__":
    build(sys.argv[1] if len(sys.argv) > 1 else "./lance_pretrain_db")
