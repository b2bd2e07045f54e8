"""Pretrain a GPT from one LanceDB table.

On one CPU process with the demo corpus, or on all GPUs of a node:
    python train.py --model tiny --steps 40
    torchrun --nproc-per-node 8 train.py --db DB --pack
"""

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import torch

import blocks_loaders
import checkpoints
import common
import distributed
import engine
import hardware
import launch
import metrics
from distributed import World, agreed
from scripts import demo


def main(argv: list[str] | None = None) -> None:
    parser = launch.flag_parser(__doc__)
    args = parser.parse_args(argv)
    world = distributed.world_from_environ()
    build = common.is_default_database(args) and not Path(common.DEFAULT_DB).exists()
    if build and world.local_rank == 0:
        print(f"no database yet: building the demo corpus in {common.DEFAULT_DB}", flush=True)
        demo.build(common.DEFAULT_DB)  # other ranks wait where the process group meets
    notices = hardware.apply_environment(world)  # before the first GPU call
    if unread := blocks_loaders.without_effect(args, parser):
        notices.append(f"without effect here: {', '.join(unread)}")
    torch.set_num_threads(hardware.cpu_threads(world.local_size) or torch.get_num_threads())
    device = hardware.choose_device(args.device, world.local_rank)
    world = distributed.join(world, device, args.dist_timeout)
    try:
        train(args, device, world, notices)
    except RuntimeError as error:
        if not hardware.is_out_of_memory(error):
            raise
        raise SystemExit(
            f"out of memory: lower --batch-size {args.batch_size} (and raise --grad-accum to keep "
            f"the global batch): {common.one_line(error)[:150]}"
        ) from None
    finally:
        distributed.leave()


def train(
    args: argparse.Namespace, device: torch.device, world: World, notices: Sequence[str] = ()
) -> dict[str, float]:
    """Train to the last step. Returns the last validation's ``loss`` and ``bpb``, if there was one.

    Raises SystemExit, on all ranks, for anything that a user can mend. ``notices`` are printed.
    """
    start = launch.find_start(args, world)
    data = launch.open_data(args, start, world)
    plan, stream = launch.plan_run(args, data, start, world)
    trainer = launch.build_engine(args, plan, start, device, world)
    validation = launch.read_validation(args, data, plan, world)
    notices = [*notices, validation.line(args)]
    log = start_log(args, data, plan, start, trainer, world, notices)
    if start.step >= plan.steps:
        log.say(f"nothing to do: {start.step:,} of {plan.steps:,} steps are done")

    token_bytes = torch.from_numpy(data.tokenizer.token_bytes()).to(device)
    flops = trainer.model.flops_per_token()  # per token
    peak = hardware.device_peak_flops(device)  # per second and rank, None where not known
    # tokens in all, steps skipped, tokens in those
    totals = torch.tensor(start.totals, dtype=torch.float64, device=device)
    meter, result = metrics.Meter(device, start.totals[0]), {}
    with closing(log), closing(stream):
        steps = stream.steps()
        for step in range(start.step + 1, plan.steps + 1):
            lr = engine.learning_rate(step, **plan.schedule)
            with meter.wait():
                batches = next(steps)
            if step == start.step + 1:
                first = {"first_batch_s": meter.waits[0], "plan_s": stream.plan_seconds}
                log.record({"step": step, **first})
                log.say(
                    "first batch    after {first_batch_s:.2f} s, plan {plan_s:.2f} s".format(
                        **first
                    )
                )
            for batch in batches:
                trainer.micro_step(batch)
            stats = trainer.update(lr)
            tokens, skipped = stats["tokens"], stats["skipped"]
            totals += torch.stack([tokens, skipped, tokens * skipped])

            if step == start.step + 1 and args.compile:
                meter.restart(totals[0].item())  # compiling is not throughput
            if step == plan.steps or due(step, args.log_every):
                numbers = torch.stack([*totals, stats["loss"], stats["grad_norm"]])
                tokens, skipped, _, loss, grad_norm = numbers.tolist()  # waits for the device
                rate = meter.tokens_per_second(tokens)
                p50, p95, p99 = world.maximum(meter.wait_percentiles(50, 95, 99))
                values = {
                    "step": step,
                    "epoch": stream.epoch,
                    "tokens": int(tokens),
                    "loss": loss,
                    "lr": lr,
                    "grad_norm": grad_norm,
                    "tokens_per_second": rate,
                    "mfu": rate * flops / (peak * world.size) if peak else None,
                    "data_wait_share": meter.wait_share(),
                    "data_wait_ms_p50": p50,
                    "data_wait_ms_p95": p95,
                    "data_wait_ms_p99": p99,
                    "queued_bytes": stream.queued_bytes(),
                    "skipped": int(skipped),
                    "memory_bytes": metrics.peak_memory(device),
                }
                log.record(values)
                eta = meter.eta(step - start.step, plan.steps - step)
                log.say(metrics.step_line(values, plan.steps, eta))
                meter.restart(tokens)
            if step == plan.steps or due(step, args.ckpt_every):
                with meter.pause():
                    record = snapshot(args, data, plan, start, stream, totals)
                    path = checkpoints.save(start.ckpt_dir, step, trainer.tensors(), record, world)
                    log.say(f"step {step}: saved {path}")
                    log.say(*data.pin.hold())
            if validation.tokens and (step == plan.steps or due(step, args.eval_every)):
                with meter.pause():
                    result = trainer.validate(validation.batches, token_bytes)
                    log.record({"step": step, **{f"val_{k}": v for k, v in result.items()}})
                    log.say(metrics.validation_line(step, result))
        if plan.steps > start.step:
            segments = start.segments(args) + [stream.ledger()]
            log.say(*metrics.ledger_lines(segments, int(totals[2])))
        data.pin.release()
    return result


def due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps (0: never) happens after this one."""
    return every > 0 and step % every == 0


def start_log(
    args: argparse.Namespace,
    data: launch.Data,
    plan: launch.Plan,
    start: launch.Start,
    trainer: engine.Engine,
    world: World,
    notices: Sequence[str],
) -> metrics.RunLog:
    """Open the run directory and say what will happen, with every derived number."""
    with agreed(world, f"--ckpt-dir {start.ckpt_dir}"):
        if world.is_main:
            start.ckpt_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=start.ckpt_dir):
                pass  # found out now, not at the first save
    with agreed(world, f"--run-dir {start.run_dir}"):
        if world.is_main and not args.resume and (start.run_dir / "metrics.jsonl").exists():
            raise SystemExit(
                f"--run-dir {start.run_dir} holds the log of another run: give another directory"
            )
        log = metrics.RunLog(start.run_dir, world.is_main, start.step, args.wandb)
        about = hardware.describe_environment(trainer.device)
        log.write_json("environment.json", about)
        log.write_json("config.json", {"flags": vars(args), "derived": asdict(plan)})
    every = f"every {args.ckpt_every:,} steps and after" if args.ckpt_every else "after"
    parameters = sum(p.numel() for p in trainer.names)
    log.say(
        f"run            {start.run_id}, logs in {start.run_dir}",
        f"checkpoints    {start.ckpt_dir}, {every} the last step",
        *start.lines(args.resume),
        f"ranks          {world.size} on {about['device_name'] or about['cpu']}",
        *data.lines,
        f"model          {args.model}, {parameters:,} parameters",
        *plan.lines,
        *notices,
    )
    return log


def snapshot(
    args: argparse.Namespace,
    data: launch.Data,
    plan: launch.Plan,
    start: launch.Start,
    stream: launch.Stream,
    totals: torch.Tensor,
) -> dict:
    """What a checkpoint says of the run beside its tensors: JSON. A collective call."""
    tokens, skipped, skipped_tokens = map(int, totals.tolist())
    return {
        "run_id": start.run_id,
        "run_dir": str(start.run_dir),
        "table_version": data.table.version,
        "global_batch": plan.global_batch,
        "eval_blocks": plan.eval_blocks,
        "tokens": tokens,
        "skipped": skipped,
        "skipped_tokens": skipped_tokens,
        "stream": stream.state_dict(),
        "segments": start.segments(args) + [stream.ledger()],
        "model": asdict(plan.config),
        "tokenizer": data.tokenizer.spec,
        "must_match": plan.must_match,
        "flags": vars(args),
    }


if __name__ == "__main__":
    main()
