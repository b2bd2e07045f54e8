"""Packed blocks as a run reads them: manifest, hashes, and what all their loaders share."""

import argparse
import hashlib
import json
import os

import lancedb
import numpy as np
import torch

from distributed import World
from elastic import FILTERS, Slots
from feed import Batch, documents_by_eos
from stores import Store
from tokenizer import Tokenizer, brief

MANIFEST = "manifest.json"
BLOCK_HASHES = "block_hashes.npy"


def read_manifest(path: str | os.PathLike) -> dict:
    """What build_packed_datasets.py says of the blocks in ``path``. Raises SystemExit."""
    try:
        return json.loads((Store(path, "--blocks-path") / MANIFEST).read())
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"--blocks-path {path}: no {MANIFEST} to read ({error}): build the blocks with "
            "python build_packed_datasets.py"
        ) from None


def block_hashes(blocks: np.ndarray) -> np.ndarray:
    """What tells blocks (n, T) apart: uint64 (n,), the BLAKE2b of their bytes, little-endian. The
    dtype of ``blocks`` matters: block_hashes.npy has those of the manifest's."""
    rows = np.ascontiguousarray(blocks, blocks.dtype.newbyteorder("<"))
    digests = [hashlib.blake2b(row.data, digest_size=8).digest() for row in rows]
    return np.frombuffer(b"".join(digests), "<u8")


class PackedBlocks:
    """Packed blocks as a run reads them: what all arms share. ``format`` is their directory, and
    ``remote`` says whether that may be in an object store."""

    format, remote = "", False

    def __init__(
        self,
        table: lancedb.table.Table,
        args: argparse.Namespace,
        where: str,
        tokenizer: Tokenizer,
        *,
        global_batch: int,
        world: World,
    ) -> None:
        root = Store(args.blocks_path, "--blocks-path")
        if root.remote and not self.remote:
            raise SystemExit(
                f"--blocks-mode {args.blocks_mode}: reads no object store, and --blocks-path is "
                f"{root}: give a local copy, or --blocks-mode lance or mosaic"
            )
        manifest = read_manifest(args.blocks_path)
        if self.format and self.format not in manifest["formats"]:
            raise SystemExit(
                f"--blocks-mode {args.blocks_mode}: {root} has no {self.format}: python "
                f"build_packed_datasets.py --out {root} --formats {self.format}"
            )
        for flag, was, ours in (
            ("--seq-len", manifest["seq_len"], args.seq_len),
            ("--tokenizer", manifest["tokenizer"], brief(tokenizer)),
            (FILTERS, manifest["fingerprint"][FILTERS], where),
        ):
            if was != ours:
                raise SystemExit(f"--blocks-path {root}: {flag} was {was}, is {ours}")
        self.path, self.manifest, self.args = root / self.format, manifest, args
        self.world, self.global_batch, self.consumed = world, global_batch, 0
        self.eos_id, self.vocab_size = tokenizer.eos_id, tokenizer.vocab_size
        self.dtype = np.dtype(manifest["dtype"])
        self.blocks_per_epoch = manifest["blocks"]
        self.slots = Slots(global_batch, args.batch_size, args.seq_len, world)
        self.line = f"loader         {args.blocks_mode}, {self.blocks_per_epoch:,} packed blocks"
        self.plan_seconds = 0.0

    @property
    def epoch(self) -> int:
        return max(self.consumed - 1, 0) // self.blocks_per_epoch

    def state_dict(self) -> dict:
        return {
            "loader": self.args.blocks_mode,
            "consumed": self.consumed,
            "blocks": self.manifest["hash"],
            "shuffle_seed": self.args.shuffle_seed,
            "no_shuffle": self.args.no_shuffle,
        }

    def load_state_dict(self, state: dict) -> None:
        ours = self.state_dict()
        for field in ours:
            if field != "consumed" and state.get(field) != ours[field]:
                raise SystemExit(
                    f"--resume: {field} was {state.get(field)}, is {ours[field]} "
                    "(--resume-data new begins with it)"
                )
        self.consumed = state["consumed"]

    def ledger(self) -> dict[str, int]:
        """Not kept: a whole epoch of blocks is all that there is."""
        return {}

    def queued_bytes(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing is open."""

    def _step(self, blocks: np.ndarray) -> list[Batch]:
        """This rank's blocks (n, T) of a step as micro-batches."""
        ids = blocks.astype(np.int64)
        doc_ids = documents_by_eos(torch.from_numpy(ids), self.eos_id).numpy()
        return self.slots.micro_batches({"input_ids": ids, "doc_ids": doc_ids})
