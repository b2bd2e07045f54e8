"""Build a demo corpus from text that every machine has: this Python's library and its reference.

python scripts/demo.py [DATABASE]
"""

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from flags import Parser

STAGES = (["ingest.py", "stdlib"], ["curate.py"], ["tokenize_corpus.py"])


def build(database: str) -> None:
    """Build ``database`` under another name and rename it: it is whole or absent.

    Raises SystemExit where it is there, and when a stage fails.
    """
    database = database.rstrip("/")
    if Path(database).exists():
        raise SystemExit(f"{database} is there already: remove it, or name another")
    partial = f"{database}.partial"
    for script, *inputs in STAGES:
        path = Path(__file__).resolve().parent / script
        command = [sys.executable, str(path), "--db", partial, *inputs]
        if subprocess.run(command).returncode:
            raise SystemExit(f"could not build the demo corpus: {' '.join(command)}")
    os.rename(partial, database)


if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("database", nargs="?", default="lance_pretrain_db")
    build(parser.parse_args().database)
