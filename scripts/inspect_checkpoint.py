"""Say what a checkpoint holds and whether it is whole.

python scripts/inspect_checkpoint.py                            # the newest
python scripts/inspect_checkpoint.py checkpoints/RUN/step_00000300
"""

import math
import sys
from collections import Counter
from pathlib import Path

from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import checkpoints
from distributed import World
from flags import Parser


def main(argv: list[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("checkpoint", nargs="?", default="auto", help="directory (auto: newest)")
    parser.add_argument("--ckpt-dir", help="where auto looks")
    args = parser.parse_args(argv)
    found = checkpoints.find(args.checkpoint, args.ckpt_dir, World())
    if found.path is None:
        where = args.ckpt_dir or checkpoints.DEFAULT_ROOT
        raise SystemExit(f"no checkpoint in {where}: train one, or name another --ckpt-dir")
    print(*found.notes, *about(found.path, found.record), sep="\n")


def about(path: Path, record: dict) -> list[str]:
    """Lines on a checkpoint whose files were verified."""
    flags, matched = record["flags"], record["must_match"]
    parameters = {k: n for k, n in numels(path, record).items() if not k.startswith("optimizer.")}
    modules = Counter()
    for name, n in parameters.items():
        modules["h, all layers" if name.startswith("h.") else name.split(".")[0]] += n
    size = sum(file["bytes"] for file in record["files"].values())
    return [
        f"checkpoint     {path}",
        f"run            {record['run_id']}, logs in {record['run_dir']}",
        f"step           {record['step']:,}, {record['tokens']:,} tokens, "
        f"{record['skipped']:,} steps skipped",
        f"position       {position(record)}",
        f"data           {flags['table'] or 'corpus'}, tokenizer {record['tokenizer']}",
        f"model          {matched['--model']}, {sum(parameters.values()):,} parameters",
        *(f"{'':<15}{module:<24}{n:>14,}" for module, n in modules.items()),
        f"files          {len(record['files'])}, {size:,} bytes, checksums right",
        *(f"{'':<15}{name:<40}{f['bytes']:>16,}" for name, f in record["files"].items()),
    ]


def position(record: dict) -> str:
    """Where in the data the run is, in words."""
    state, version = record["stream"], record["table_version"]
    if state["loader"] != "elastic":
        return (
            f"epoch {state['epoch']}, step {state['steps_done']:,} of it, table version {version}"
        )
    blocks = state["fingerprint"]["--blocks-per-epoch"]
    return (
        f"epoch {state['epoch']}, block {state['block']:,} of {blocks:,}, table version {version}"
    )


def numels(path: Path, record: dict) -> dict[str, int]:
    """Numbers in each tensor, by name, from the files' headers."""
    found = {}
    for shard in record["files"]:
        with safe_open(path / shard, "np") as file:
            names = file.keys()
            found |= {name: math.prod(file.get_slice(name).get_shape()) for name in names}
    return found


if __name__ == "__main__":
    main()
