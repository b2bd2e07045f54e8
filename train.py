"""Pretrain a GPT from one LanceDB table.

On one CPU process with the demo corpus, or on all GPUs of a node:
    python train.py --model tiny --steps 40
    torchrun --nproc-per-node 8 train.py --db DB --pack
"""

import argparse
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import torch

import checkpoints
import common
import distributed
import engine
import hardware
import launch
import loaders
import metrics
import profiling
from distributed import World, agreed
from scripts import demo
from stopping import Stopping


def main(argv: list[str] | None = None) -> None:
    began = time.monotonic()
    parser = launch.flag_parser(__doc__)
    args = parser.parse_args(argv)
    world = distributed.world_from_environ()
    build = common.is_default_database(args) and not Path(common.DEFAULT_DB).exists()
    if build and world.local_rank == 0:
        print(f"no database yet: building the demo corpus in {common.DEFAULT_DB}", flush=True)
        demo.build(common.DEFAULT_DB)  # other ranks wait where the process group meets
    notices = hardware.apply_environment(world)  # before the first GPU call
    unread = loaders.without_effect(args, parser)
    if unread := unread + engine.without_effect(args, parser, world.size):
        notices.append(f"without effect here: {', '.join(unread)}")
    torch.set_num_threads(hardware.cpu_threads(world.local_size) or torch.get_num_threads())
    device = hardware.choose_device(args.device, world.local_rank)
    hardware.keep_freed_memory(device)
    with distributed.joined(world, device, args.dist_timeout) as world:
        try:
            train(args, device, world, notices, began)
        except KeyboardInterrupt:
            raise SystemExit("interrupted") from None
        except RuntimeError as error:
            if not hardware.is_out_of_memory(error):
                raise
            raise SystemExit(
                f"out of memory: lower --batch-size {args.batch_size} (and raise --grad-accum to "
                f"keep the global batch): {common.one_line(error)[:150]}"
            ) from None


def train(
    args: argparse.Namespace,
    device: torch.device,
    world: World,
    notices: Sequence[str] = (),
    began: float | None = None,
) -> dict[str, float]:
    """Train to the last step. Returns the last validation's ``loss`` and ``bpb``, if there was one.

    Raises SystemExit, on all ranks, for anything that a user can mend. ``notices`` are printed,
    ``began`` is when --time-limit begins, on the clock of time.monotonic (default: now).
    """
    start = launch.find_start(args, world)
    data = launch.open_data(args, start, world)
    plan, stream = launch.plan_run(args, data, start, world)
    trainer = launch.build_engine(args, plan, start, device, world)
    validation = launch.read_validation(args, data, plan, world)
    saver, about_saver = launch.open_checkpoints(args, start, world)
    log = start_log(args, data, plan, start, trainer, world)
    log.say(*notices, *about_saver, validation.line(args))
    if start.step >= plan.steps:
        log.say(f"nothing to do: {start.step:,} of {plan.steps:,} steps are done")

    token_bytes = torch.from_numpy(data.tokenizer.token_bytes()).to(device)
    flops, peak = trainer.model.flops_per_token(), hardware.device_peak_flops(device)
    # tokens in all, steps skipped, tokens in those
    totals = torch.tensor(start.totals, dtype=torch.float64, device=device)
    reported = ["loss", "grad_norm", "z_mean"] + ["loss_1024"] * (args.seq_len > engine.FIRST)
    result, stopped, step = {}, False, start.step
    profile = profiling.Profile(*args.profile, start.run_dir, device, world.is_main)
    stopping = Stopping(
        args.time_limit, began or time.monotonic(), device, lambda: saver.failed() or log.error
    )
    with log, closing(stream), closing(saver), closing(stopping):
        meter = metrics.Meter(device, start.totals[0], flops, peak)
        if plan.steps > start.step and (world.size > 1 or args.compile or device.type == "cuda"):
            with meter.pause():  # compiling is not throughput, nor is loading a GPU's kernels
                trainer.warm_up(args.batch_size, args.seq_len)
        first = {"warm_up_s": meter.last_pause}
        steps = stream.steps()
        for step in range(start.step + 1, plan.steps + 1):
            if profile.due(step):
                with meter.pause(), log.noted():
                    log.say(*profile.turn(step))
            lr = engine.learning_rate(step, **plan.schedule)
            with meter.span("data_wait"):
                batches = next(steps)
            if step == start.step + 1:
                waited = meter.seconds("data_wait")[0]
                first |= {"first_batch_s": waited, "plan_s": stream.plan_seconds}
                log.record({"step": step, **first})
                log.say(metrics.first_batch_line(**first))
            with meter.span("forward_backward"):
                for batch in batches:
                    trainer.micro_step(batch)
            norms = due(step, args.log_params)
            with meter.span("optimizer"):
                stats = trainer.update(lr, stop=stopping.wanted(), module_norms=norms)
            tokens, skipped = stats["tokens"], stats["skipped"]
            totals += torch.stack([tokens, skipped, tokens * skipped])
            stopped = stopping.agreed(stats["stop"])
            last = stopped or step == plan.steps

            if last or due(step, args.log_every):
                numbers = torch.stack([*totals, *stats.values()]).tolist()  # waits for the device
                tokens, skipped, _ = numbers[:3]
                shown = dict(zip(stats, numbers[3:], strict=True))
                values = {
                    "step": step,
                    "epoch": stream.epoch,
                    "tokens": int(tokens),
                    "lr": lr,
                    **{k: shown[k] for k in reported},
                    "z_max": world.maximum([shown["z_max"]])[0],
                    **meter.values(tokens, world),
                    "queued_bytes": stream.queued_bytes(),
                    "skipped": int(skipped),
                }
                if args.hash_batches:
                    values["batch_hash"] = metrics.batch_hash(batches, plan.global_batch, world)
                log.record(values)
                log.state("running", step)
                eta = meter.eta(step - start.step, plan.steps - step)
                log.say(metrics.step_line(values, plan.steps, eta))
                meter.restart(tokens)
                if shown["skips_in_a_row"] >= args.max_skips:
                    too_many_skips(args, shown, world)
            if norms:
                modules = {k: v for k, v in stats.items() if "/" in k}
                each = torch.stack([*modules.values()]).tolist()
                log.record({"step": step, **dict(zip(modules, each, strict=True))})
            if validation.tokens and (step == plan.steps or due(step, args.eval_every)):
                with meter.pause():
                    result = trainer.validate(validation.batches, token_bytes)
                seconds = {"validation_s": meter.last_pause}
                log.record({"step": step, **{f"val_{k}": v for k, v in result.items()}, **seconds})
                log.say(metrics.validation_line(step, result))
            if saver.written():
                finish(saver, data.pin, log)
            if last or due(step, args.ckpt_every):
                with meter.pause():
                    finish(saver, data.pin, log)  # the one before
                    record = snapshot(args, data, plan, start, stream, totals)
                    saver.start(step, trainer.tensors(), record)
                    if last or args.ckpt_sync:
                        finish(saver, data.pin, log)
                log.record({"step": step, "checkpoint_s": meter.last_pause})
            if stopped:
                break
        with log.noted():
            log.say(*profile.stop())
        if step > start.step:
            segments = start.segments(plan.new_data) + [stream.ledger()]
            log.say(*metrics.ledger_lines(segments, int(totals[2])))
            log.state("stopped" if step < plan.steps else "finished", step)
        if stopped and step < plan.steps:
            reasons = ", ".join(sorted(set(filter(None, world.gather(stopping.reason())))))
            log.say(
                f"stopped at step {step:,} ({reasons}): to go on, "
                f"--resume auto --ckpt-dir {start.ckpt_dir}"
            )
        if step >= plan.schedule["total"]:
            data.pin.hold(set())  # nothing will be resumed
        if log.error:
            raise SystemExit(f"--run-dir {start.run_dir}: {log.error}")
    return result


def due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps (0: never) happens after this one."""
    return every > 0 and step % every == 0


def too_many_skips(args: argparse.Namespace, stats: dict[str, float], world: World) -> None:
    """End the run on all ranks alike, as all know the same numbers."""
    message = (
        f"{stats['skips_in_a_row']:.0f} steps in a row were skipped (--max-skips "
        f"{args.max_skips}), the last at loss {stats['loss']:.4g} and gradient norm "
        f"{stats['grad_norm']:.4g}: go on from a checkpoint at a lower --lr"
    )
    if args.skip_spikes:
        message += f", or at a higher --skip-spikes than {args.skip_spikes:g}"
    raise SystemExit(message if world.is_main else 1)


def finish(saver: checkpoints.Saver, pin: common.Pin, log: metrics.RunLog) -> None:
    """Wait for the save under way, if any; tag the table versions that can be resumed from."""
    lines = saver.finish()
    if lines and log.is_main:
        lines += pin.hold(saver.table_versions())
    log.say(*lines)


def start_log(
    args: argparse.Namespace,
    data: launch.Data,
    plan: launch.Plan,
    start: launch.Start,
    trainer: engine.Engine,
    world: World,
) -> metrics.RunLog:
    """Open the run directory and say what will happen, with every derived number."""
    with agreed(world, f"--run-dir {start.run_dir}"):
        owner = metrics.checkpoints_of(start.run_dir) if world.is_main else None
        if owner and (not args.resume or owner != str(start.ckpt_dir.resolve())):
            raise SystemExit(
                f"--run-dir {start.run_dir} holds the log of another run, whose checkpoints are in "
                f"{owner}: give another directory"
            )
        log = metrics.RunLog(start.run_dir, start.ckpt_dir, world.is_main, start.step, args.wandb)
        about = hardware.describe_environment(trainer.device)
        log.write_json("environment.json", about)
        log.write_json("config.json", {"flags": vars(args), "derived": asdict(plan)})
        if start.step < plan.steps:
            log.state("running", start.step)
    every = f"every {args.ckpt_every:,} steps and after" if args.ckpt_every else "after"
    parameters = sum(p.numel() for p in trainer.names)
    log.say(
        f"run            {start.run_id}, logs in {start.run_dir}",
        f"checkpoints    {start.ckpt_dir}, {every} the last step",
        *start.lines(args),
        f"ranks          {world.size} on {about['device_name'] or about['cpu']}",
        *data.lines,
        f"model          {args.model}, {parameters:,} parameters, "
        f"{hardware.autocast_dtype(args.dtype, trainer.device)[1]}",
        *plan.lines,
        f"FLOPs          {metrics.human(trainer.model.flops_per_token())} a token: 6 N + 12 L C T "
        "(PaLM, appendix B)",
    )
    return log


def snapshot(
    args: argparse.Namespace,
    data: launch.Data,
    plan: launch.Plan,
    start: launch.Start,
    stream: loaders.Stream,
    totals: torch.Tensor,
) -> dict:
    """What a checkpoint says of the run beside its tensors: JSON. A collective call."""
    tokens, skipped, skipped_tokens = map(int, totals.tolist())
    return {
        "run_id": start.run_id,
        "run_dir": str(start.run_dir),
        "table_version": data.table.version,
        "global_batch": plan.global_batch,
        "first_global_batch": plan.first_global_batch,
        "tokens": tokens,
        "skipped": skipped,
        "skipped_tokens": skipped_tokens,
        "stream": stream.state_dict(),
        "segments": start.segments(plan.new_data) + [stream.ledger()],
        "model": asdict(plan.config),
        "tokenizer": data.tokenizer.spec,
        "must_match": plan.must_match,
        "flags": vars(args),
    }


if __name__ == "__main__":
    main()
