"""Which loader feeds the training, and the flags that all of them share.

A loader yields from ``steps()``, for each optimizer step, the list of its micro-batches: dicts of
``input_ids`` int64 (B, T), ``mask`` bool (B, T), true on real tokens, and ``doc_ids`` int64 (B, T)
when packed. ``epoch`` is that of the step last yielded, ``blocks_per_epoch`` how many blocks one
has. ``state_dict()`` is what was consumed, JSON-able and equal on all ranks; ``load_state_dict()``
continues there; ``ledger()`` says where the tokens are, if it is known; ``close()`` leaves nothing
running. The training loop cannot tell them apart.
"""

import argparse

from blocks_loaders import ARMS
from elastic import ElasticStream
from flags import given, not_negative, positive, seed
from lancedb_stream import LanceDBStream
from library_loaders import LibraryBlocks
from packed_blocks import PackedBlocks

Stream = ElasticStream | LanceDBStream | PackedBlocks
LOADERS: dict[str, type[Stream]] = {
    "elastic": ElasticStream,
    "lancedb": LanceDBStream,
    **ARMS,
}
WORKER_FLAGS = ("--num-workers", "--mp-context")
LANCEDB_FLAGS = (
    *("--read-batch-size", "--io-queue-depth"),
    *("--transform-parallelism", "--transform-queue-depth"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("batches")
    group.add_argument(
        "--batch-size", type=positive, default=8, help="blocks per rank and micro-batch"
    )
    group.add_argument("--grad-accum", type=positive, default=1, help="micro-batches per step")
    group.add_argument(
        "--global-batch",
        type=not_negative,
        default=0,
        help="blocks per optimizer step (0: batch size x ranks x --grad-accum)",
    )
    group.add_argument("--pack", action="store_true", help="pack documents into full blocks")
    group.add_argument("--shuffle-seed", type=seed, default=42, help="order of the documents")
    group = parser.add_argument_group("loader")
    group.add_argument("--loader", choices=["elastic", "lancedb"], help="default: elastic")
    group.add_argument(
        "--num-splits",
        type=not_negative,
        default=0,
        help="lanes an epoch is cut into (0: elastic 64, lancedb batch size x ranks)",
    )
    group.add_argument(
        "--blocks-per-epoch",
        default="",
        help="caps an epoch, blocks (empty: all there are; auto: lancedb's estimate)",
    )
    group.add_argument(
        "--num-workers",
        type=not_negative,
        default=0,
        help="lancedb, mosaic, webdataset, litdata: loader processes per rank",
    )
    group.add_argument("--mp-context", choices=["forkserver", "spawn"], default="forkserver")
    group.add_argument("--read-batch-size", type=positive, default=8, help="lancedb: rows per take")
    group.add_argument(
        "--io-queue-depth", type=positive, default=1, help="lancedb: takes per split"
    )
    group.add_argument(
        "--transform-parallelism",
        type=positive,
        default=2,
        help="lancedb: transform threads per rank",
    )
    group.add_argument(
        "--transform-queue-depth",
        type=not_negative,
        default=0,
        help="lancedb: cap on transformed rows per split, in read batches (0: its default)",
    )
    group.add_argument(
        "--blocks-mode",
        choices=["off", *LOADERS],
        default="off",
        help="A/B: read packed blocks instead of the table",
    )
    group.add_argument(
        "--blocks-path", default="", help="A/B: what build_packed_datasets.py wrote (--out)"
    )


def loader_name(args: argparse.Namespace) -> str:
    """Which loader ``--loader`` and ``--blocks-mode`` ask for. Raises SystemExit where they differ
    or where the blocks are not named."""
    mode, loader = args.blocks_mode, args.loader
    if mode == "off":
        return loader or "elastic"
    if loader and loader != mode:
        raise SystemExit(f"--loader {loader} and --blocks-mode {mode} differ: give one of them")
    if mode in ARMS and not args.blocks_path:
        raise SystemExit(
            f"--blocks-mode {mode} needs --blocks-path: the --out of build_packed_datasets.py"
        )
    return mode


def without_effect(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """Flags that were given and that the chosen loader does not read."""
    name = loader_name(args)
    unread = ["--num-splits", "--blocks-per-epoch"] if name in ARMS else ["--blocks-path"]
    if name != "elastic":
        unread += ["--shuffle-clump"]
    if name == "lancedb":
        unread += ["--no-shuffle", "--prefetch-mb"] + ["--blocks-per-epoch"] * (not args.pack)
    else:
        unread += LANCEDB_FLAGS
    if name != "lancedb" and not issubclass(LOADERS[name], LibraryBlocks):
        unread += WORKER_FLAGS
    return given(args, parser, unread)
