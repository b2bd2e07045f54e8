"""What only several ranks can show: run by torchrun (or as one process) from test_ranks.py.

    torchrun --nproc-per-node 3 tests/ranks.py CORPUS OUT

Every check below runs on all ranks and returns what the main rank writes to OUT as JSON; asserts
fail the launch. Checks that compare world sizes leave the comparison to test_ranks.py.
"""

import hashlib
import json
import math
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import checkpoints
import common
import distributed
import launch
from distributed import World, agreed
from elastic import ElasticStream
from engine import Engine
from lancedb_stream import LanceDBStream
from model import GPT, GPTConfig
from tokenizer import ByteTokenizer

CONFIG = GPTConfig(vocab_size=97, seq_len=16, n_layer=2, n_head=2, n_embd=32)
DIST_TIMEOUT = 12.0  # seconds
G = 7  # blocks of a global batch: divisible by 1 and 7 ranks only


def double_engine(**options) -> Engine:
    return Engine(GPT(CONFIG, seed=3).double(), **options)


def global_batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Seven blocks with 0 to 15 targets."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 97, (G, 16), generator=generator)
    lengths = torch.tensor([16, 9, 0, 16, 3, 1, 12])
    return {"input_ids": ids, "mask": torch.arange(16) < lengths[:, None]}


def share(batch: dict, world: World, size: int) -> list[dict]:
    """This rank's blocks as micro-batches of ``size``; missing slots are rows without a mask."""
    first, last = world.rank * G // world.size, (world.rank + 1) * G // world.size
    count = -(-G // (world.size * size))
    micro = []
    for i in range(count):
        cut = slice(min(first + i * size, last), min(first + (i + 1) * size, last))
        rows = {k: v[cut] for k, v in batch.items()}
        missing = size - len(rows["mask"])
        pad = {k: v.new_zeros(missing, v.shape[1]) for k, v in rows.items()}
        micro.append({k: torch.cat([rows[k], pad[k]]) for k in rows})
    return micro


def uneven_gradients(world: World, _: Path) -> dict:
    """Gradients of a global batch that the ranks do not divide: equal on all ranks, and given as
    sums by which test_ranks.py compares the world sizes."""
    result = {}
    for size in (1, 2, 7):
        micro = share(global_batch(), world, size)
        engine = double_engine(accumulation=len(micro))
        for batch in micro:
            engine.micro_step(batch)
        gradients = torch.cat([g.flatten() for g in engine.gradients().values()])
        for other in world.gather(gradients):
            assert torch.equal(other, gradients), "ranks hold different gradients"
        reference = double_engine().model
        targets = global_batch()["input_ids"].new_full((G, 16), -100)
        ids, mask = global_batch()["input_ids"], global_batch()["mask"]
        both = mask[:, :-1] & mask[:, 1:]
        targets[:, :-1][both] = ids[:, 1:][both]
        (reference(ids, targets).total / (targets != -100).sum()).backward()
        expected = torch.cat([p.grad.flatten() for p in reference.parameters()])
        torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-14)
        stats = engine.update(1e-3)
        result[size] = [stats[k].item() for k in ("loss", "grad_norm", "targets", "tokens")]
    return result


def one_exchange_per_step(world: World, _: Path) -> dict:
    """Gradients are exchanged once a step, however many micro-steps it has."""
    if world.size == 1:
        return {}
    calls = {}
    for accumulation in (1, 3):
        engine = double_engine(accumulation=accumulation)
        buckets = []

        def hook(group, bucket, buckets=buckets):
            buckets.append(bucket.index())
            return allreduce_hook(group, bucket)

        engine.replica.register_comm_hook(dist.group.WORLD, hook)
        per_step = []
        for _step in range(3):
            for _micro in range(accumulation):
                engine.micro_step(share(global_batch(), world, 7)[0])
            engine.update(1e-3)
            per_step.append(len(buckets))
            buckets.clear()
        calls[accumulation] = per_step[1:]  # DDP rebuilds its buckets after the first step
    assert calls[1] == calls[3] and calls[1][0] == calls[1][1] >= 1, calls
    return {}


def one_bad_rank(world: World, _: Path) -> dict:
    """A gradient that is not finite on the last rank makes all ranks skip."""
    engine = double_engine()
    before = {k: t.clone() for k, t in engine.tensors().items() if "spikes" not in k}
    batch = share(global_batch(), world, 7)[0]
    if world.rank == world.size - 1:
        handle = engine.model.wte.weight.register_hook(lambda g: g * math.nan)
    engine.micro_step(batch)
    if world.rank == world.size - 1:
        handle.remove()
    assert engine.update(1e-3)["skipped"].item() == 1
    assert all(torch.equal(t, engine.tensors()[name]) for name, t in before.items())
    engine.micro_step(batch)
    assert engine.update(1e-3)["skipped"].item() == 0
    return {}


def validation(world: World, corpus: Path) -> dict:
    """Loss and bits per byte of a validation set with a ragged tail."""
    args = launch.flag_parser().parse_args(
        ["--db", str(corpus), "--val-filter", "id % 3 = 0", "--seq-len", "16", "--batch-size", "3"]
    )
    model = GPT(GPTConfig(257, 16, 2, 2, 32), seed=3)
    batches = common.validation_batches(common.open_table(args), args, 256, 1_000_000, world)
    return Engine(model).validate(batches, torch.tensor([1] * 256 + [0]))


def failing_together(world: World, _: Path) -> dict:
    """A failure on the last rank is everybody's, and the main rank says it."""
    try:
        with agreed(world, "--run-dir x"):
            if world.rank == world.size - 1:
                raise OSError("disk full")
    except SystemExit as exit:
        if world.is_main:
            rank = "" if world.size == 1 else f"rank {world.size - 1}: "
            assert exit.code == f"{rank}--run-dir x: disk full", exit.code
        else:
            assert exit.code == 1
        return {}
    raise AssertionError("nothing was raised")


def checkpoint(world: World, corpus: Path) -> dict:
    """Saved by this many ranks, spread over them, and read back equal."""
    engine = Engine(GPT(CONFIG, seed=3))
    engine.micro_step(share(global_batch(), world, 7)[0])
    engine.update(1e-2)
    root = Path(sys.argv[2]).parent / f"checkpoints{world.size}"
    lock = checkpoints.take(root, 0)[0] if world.is_main else None
    saver = checkpoints.Saver(root, world, lock, 0, 0)
    saver.start(1, engine.tensors(), {"run_id": "x"})
    (line,) = saver.finish()
    saver.close()
    path = root / "step_00000001"
    assert line.startswith(f"step 1: saved {path} in ")
    record = checkpoints.check(path, world)
    sizes = [file["bytes"] for file in record["files"].values()]
    assert len(sizes) == world.size and max(sizes) < 1.2 * min(sizes)
    fresh = Engine(GPT(CONFIG, seed=4))
    checkpoints.load_tensors(path, record, fresh.tensors(), world)
    for name, tensor in engine.tensors().items():
        assert torch.equal(tensor, fresh.tensors()[name]), name
    return {"path": str(path)}


def resume(world: World, _: Path) -> dict:
    """A run of six steps, and one that is saved after three and goes on in a fresh engine: equal
    to the last bit. DDP must not add up in another order after the resume."""
    modes = (None, "default") if world.size == 2 else (None,)  # compiling takes long
    for mode in modes:
        resume_exactly(world, f"resume{world.size}{mode}", compile_mode=mode)
    options = {"optimizer": "muon", "skip_spikes": 4.0, "bf16_exchange": world.size > 1}
    resume_exactly(world, f"muon{world.size}", **options)
    return {}


def resume_exactly(world: World, folder: str, **options) -> None:

    def steps(engine: Engine, first: int, last: int) -> Engine:
        for step in range(first, last):
            engine.micro_step(share(global_batch(step), world, 7)[0])
            engine.update(1e-2)
        return engine

    def fresh(seed: int) -> Engine:
        wide = GPTConfig(vocab_size=97, seq_len=16, n_layer=4, n_head=4, n_embd=256)
        # several of DDP's buckets
        engine = Engine(GPT(wide, seed), **options)
        engine.warm_up(7, 16)
        return engine

    whole = steps(fresh(3), 0, 6)
    root = Path(sys.argv[2]).parent / folder
    saver = checkpoints.Saver(
        root, world, checkpoints.take(root, 0)[0] if world.is_main else None, 0, 0
    )
    part = steps(fresh(3), 0, 3)
    saver.start(3, part.tensors(), {"run_id": "x"})
    saver.finish()
    saver.close()
    path, again = root / "step_00000003", fresh(4)
    checkpoints.load_tensors(path, checkpoints.check(path, world), again.tensors(), world)
    steps(again, 3, 6)
    for name, tensor in whole.tensors().items():
        assert torch.equal(tensor, again.tensors()[name]), (options, name)


def lancedb_stream(world: World, corpus: Path) -> dict:
    """The set of blocks of each of the first global batches, with 0 and 2 workers."""
    seen = {}
    for pack in (True, False):
        for workers in (0, 2):
            flags = ["--db", str(corpus), "--seq-len", "16", "--num-splits", "8"]
            flags += ["--batch-size", str(24 // world.size), "--num-workers", str(workers)]
            args = launch.flag_parser().parse_args(flags + ["--pack"] * pack)
            if 8 % world.size or (workers and world.size != 2):  # starting workers takes long
                continue
            stream = LanceDBStream(
                common.open_table(args),
                args,
                "id % 100 != 0",
                ByteTokenizer(),
                global_batch=args.batch_size * world.size,
                world=world,
            )
            steps, hashes = stream.steps(), []
            for _ in range(3):
                (batch,) = next(steps)
                rows = world.gather(
                    [
                        bytes(row.tolist().__repr__(), "ascii")
                        for row in batch["input_ids"].masked_fill(~batch["mask"], -1)
                    ]
                )
                rows = sorted(row for part in rows for row in part)
                hashes.append(hashlib.sha256(b"".join(rows)).hexdigest())
            stream.close()
            seen[f"{pack} {workers}"] = hashes
    return seen


def elastic_stream(world: World, corpus: Path) -> dict:
    """The global batches, in order, of a size that the ranks do not divide; all ranks map one
    plan, which whoever comes first builds."""
    seen = {}
    for mode in (["--pack"], []):
        flags = ["--db", str(corpus), "--seq-len", "16", "--batch-size", "2", *mode]
        flags += ["--plan-cache", str(Path(sys.argv[2]).parent / f"plans{world.size}")]
        args = launch.flag_parser().parse_args(flags)
        stream = ElasticStream(
            common.open_table(args),
            args,
            "id % 100 != 0",
            ByteTokenizer(),
            global_batch=G,
            world=world,
        )
        steps, hashes = stream.steps(), []
        for _ in range(60):  # across an epoch's end in row mode
            mine = [b["input_ids"][b["mask"]].tolist() for b in next(steps)]
            batch = [token for rank in world.gather(mine) for part in rank for token in part]
            hashes.append(hashlib.sha256(repr(batch).encode()))
        stream.close()
        seen["packed" if mode else "rows"] = [h.hexdigest() for h in hashes]
        assert len(set(map(str, world.gather(stream.state_dict())))) == 1
    return seen


def late_rank(world: World, _: Path) -> dict:
    """A rank may take longer than --dist-timeout to build something: no collective waits for it."""
    with agreed(world):
        if world.size == 2 and world.rank == 1:
            time.sleep(DIST_TIMEOUT + 2)
    total = torch.ones(1)
    if world.size > 1:
        dist.all_reduce(total)
    assert total.item() == world.size
    return {}


CHECKS = (
    uneven_gradients,
    one_exchange_per_step,
    one_bad_rank,
    validation,
    failing_together,
    checkpoint,
    resume,
    lancedb_stream,
    elastic_stream,
    late_rank,
)


def main() -> None:
    world = distributed.world_from_environ()
    world = distributed.join(world, torch.device("cpu"), DIST_TIMEOUT)
    torch.set_num_threads(1)
    results = {}
    for check in CHECKS:
        began = time.perf_counter()
        results[check.__name__] = check(world, Path(sys.argv[1]))
        if world.is_main:
            print(f"{check.__name__} {time.perf_counter() - began:.1f} s", flush=True)
    if world.is_main:
        Path(sys.argv[2]).write_text(json.dumps(results))
    distributed.leave()


if __name__ == "__main__":
    main()
