"""Write one epoch's packed blocks, in one order, in the formats that other loaders read.

python build_packed_datasets.py --db my_db --seq-len 1024 --out blocks
python train.py --db my_db --seq-len 1024 --blocks-mode memmap --blocks-path blocks

The flags that decide which tokens are in which block are train.py's. A format is complete or
absent: each is written under another name and renamed when all of them are whole; a second call
writes those that are missing. In an object store (--out s3://bucket/prefix), where nothing can be
renamed, what the manifest does not name is absent: it is written last.
"""

import fcntl
import hashlib
import io
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext

import numpy as np
from tqdm import tqdm

import launch
from blocks_writers import EXTRA, FORMATS, READ, shard_size
from common import one_line
from distributed import World
from elastic import ElasticStream
from flags import not_empty
from packed_blocks import BLOCK_HASHES, MANIFEST, block_hashes
from stores import Store

OTHER = "--out {} holds blocks of other data: give another directory"


def main(argv: list[str] | None = None) -> None:
    parser = launch.flag_parser(__doc__)
    group = parser.add_argument_group("packed blocks")
    group.add_argument(
        "--out", type=not_empty, default="packed_blocks", help="directory, or s3://bucket/prefix"
    )
    group.add_argument("--formats", help="with commas between (default: those of requirements.txt)")
    args = parser.parse_args(argv)
    args.pack, args.batch_size = True, READ
    out = Store(args.out, "--out")
    able = [n for n, writer in FORMATS.items() if writer.remote or not out.remote]
    names = args.formats.split(",") if args.formats else [n for n in able if n not in EXTRA]
    if unknown := [name for name in names if name not in FORMATS]:
        raise SystemExit(f"--formats {unknown[0]}: there are {', '.join(FORMATS)}")
    if local := [name for name in names if name not in able]:
        raise SystemExit(f"--out {out}: {local[0]} is for local disks: --formats {','.join(able)}")
    world = World()
    data = launch.open_data(args, launch.find_start(args, world), world)
    print(*data.lines, sep="\n", flush=True)
    stream = ElasticStream(
        data.table, args, data.where, data.tokenizer, global_batch=READ, world=world
    )
    with closing(stream):
        build(out, names, stream, data)


def build(out: Store, names: list[str], stream: ElasticStream, data: launch.Data) -> None:
    """Write the formats that ``out`` lacks. Raises SystemExit where it holds other blocks."""
    # boto's and mosaicml-streaming's errors have no class in common with the others
    failures = Exception if out.remote else OSError
    try:
        about = about_blocks(stream, data)
        with nullcontext() if out.remote else alone(out):
            manifest = begun(out, about)
            missing = [name for name in names if name not in manifest["formats"]]
            # a version that is new may have other tokens in documents of the same lengths
            if missing or manifest["table_version"] != about["table_version"]:
                add_formats(out, missing, stream, manifest | about)
            else:
                print(f"nothing to do: {out} has {', '.join(names)}")
    except failures as error:
        raise SystemExit(f"--out {out}: {one_line(error)}") from error


@contextmanager
def alone(out: Store) -> Iterator[None]:
    """One build at a time in a local directory. Its lock ends with the process that has it."""
    out.make()
    directory = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(
                f"--out {out}: another build writes there: wait for its end, or give another "
                "directory"
            ) from None
        yield
    finally:
        os.close(directory)


def add_formats(out: Store, names: list[str], stream: ElasticStream, manifest: dict) -> None:
    """Write formats that no manifest names, if any, and then the manifest that does. Raises
    SystemExit where those that it names are of other tokens."""
    at = out if out.remote else out / "partial"
    unnamed = [out / name for name in names]  # left by a call that failed
    try:
        for place in unnamed if out.remote else [at]:
            place.remove()
        written, hashes, digest = write(at, names, stream, manifest)
        if manifest.setdefault("hash", digest) != digest:
            raise SystemExit(OTHER.format(out))
        manifest["formats"] |= written
        (at / BLOCK_HASHES).write(hashes)
        (at / MANIFEST).write(json.dumps(manifest, indent=1).encode() + b"\n")
        if not out.remote:
            for place in unnamed:
                place.remove()
            for name in (*names, BLOCK_HASHES, MANIFEST):
                (at / name).become(out / name)
    finally:
        if not out.remote:
            at.remove()
    for name, made in written.items():
        print(f"{out / name}: {made['bytes']:,} bytes in {made['seconds']:.1f} s")
    if not names:
        print(f"nothing to do: {out} has these tokens")


def about_blocks(stream: ElasticStream, data: launch.Data) -> dict:
    """What a manifest says of the blocks, whatever their formats."""
    if not stream.blocks_per_epoch:
        raise SystemExit("no whole block in an epoch: lower --seq-len, or train on more data")
    return {
        "blocks": stream.blocks_per_epoch,
        "seq_len": stream.args.seq_len,
        "dtype": "uint16" if data.tokenizer.vocab_size <= 1 << 16 else "uint32",
        "tokenizer": stream.fingerprint["--tokenizer"],
        "table_version": data.table.version,
        "fingerprint": stream.fingerprint,
    }


def begun(out: Store, about: dict) -> dict:
    """The manifest in ``out``, which must be of the same blocks, or one without formats."""
    if not (out / MANIFEST).exists():
        return {"formats": {}, **about}
    manifest = json.loads((out / MANIFEST).read())
    for key in ("fingerprint", "seq_len", "blocks"):
        if manifest[key] != about[key]:
            raise SystemExit(OTHER.format(out))
    return manifest


def write(
    to: Store, names: list[str], stream: ElasticStream, manifest: dict
) -> tuple[dict[str, dict], bytes, str]:
    """Write the epoch's blocks into a directory for each format. Returns bytes and seconds of each,
    the file of the blocks' hashes, and the SHA-256 of them all."""
    writers, seconds, left = {}, dict.fromkeys(names, 0.0), stream.blocks_per_epoch
    dtype = np.dtype(manifest["dtype"])
    to.make()
    for name in names:
        (to / name).make()
        writers[name] = FORMATS[name](to / name, stream.args.seq_len, dtype, shard_size(left))

    def timed(name: str, action: Callable, *arguments: np.ndarray) -> None:
        began = time.perf_counter()
        action(*arguments)
        seconds[name] += time.perf_counter() - began

    digest, hashes, steps = hashlib.sha256(), [], stream.steps()
    with tqdm(total=left, unit="block", desc="packing") as progress:
        while left:
            (batch,) = next(steps)
            blocks = np.ascontiguousarray(batch["input_ids"][:left].numpy().astype(dtype))
            digest.update(blocks.data)
            hashes.append(block_hashes(blocks))
            for name, writer in writers.items():
                timed(name, writer.write, blocks)
            left -= len(blocks)
            progress.update(len(blocks))
    for name, writer in writers.items():
        timed(name, writer.close)
    np.save(file := io.BytesIO(), np.concatenate(hashes))
    made = {n: {"bytes": (to / n).size(), "seconds": seconds[n]} for n in names}
    return made, file.getvalue(), digest.hexdigest()


if __name__ == "__main__":
    main()
