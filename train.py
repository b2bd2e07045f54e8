"""Pretrain a GPT from one LanceDB table.

On one CPU process with the demo corpus, or on all GPUs of a node:
    python train.py --model tiny --steps 40
    torchrun --nproc-per-node 8 train.py --db DB --pack
"""

import argparse
import secrets
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import lancedb
import torch

import blocks_loaders
import checkpoints
import common
import distributed
import elastic
import engine
import hardware
import metrics
import model
import tokenizer
from distributed import World, agreed
from flags import Parser, not_negative, positive
from scripts import demo

MODULES = (common, model, blocks_loaders, elastic, engine, checkpoints, metrics, hardware)


def flag_parser() -> Parser:
    parser = Parser(__doc__)
    group = parser.add_argument_group("run")
    group.add_argument("--steps", type=not_negative, default=0, help="length, optimizer steps")
    group.add_argument("--epochs", type=positive, default=1, help="length where --steps is 0")
    group.add_argument("--seed", type=int, default=1234, help="of the initial weights")
    for module in MODULES:
        module.add_arguments(parser)
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = flag_parser()
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
    origin = find_origin(args, world)
    data = open_data(args, origin, world)
    plan, stream = plan_run(args, data, origin, world)
    trainer = build_engine(args, plan, origin, device, world)
    validation = read_validation(args, data, plan, world)
    notices = [*notices, validation.line(args)]
    log = start_log(args, data, plan, origin, trainer, world, notices)
    if origin.step >= plan.steps:
        log.say(f"nothing to do: {origin.step:,} of {plan.steps:,} steps are done")

    token_bytes = torch.from_numpy(data.tokenizer.token_bytes()).to(device)
    flops = trainer.model.flops_per_token()  # per token
    peak = hardware.device_peak_flops(device)  # per second and rank, None where not known
    # tokens in all, steps skipped, tokens in those
    totals = torch.tensor(origin.totals, dtype=torch.float64, device=device)
    meter, result = metrics.Meter(device, origin.totals[0]), {}
    with closing(log), closing(stream):
        steps = stream.steps()
        for step in range(origin.step + 1, plan.steps + 1):
            lr = engine.learning_rate(step, **plan.schedule)
            with meter.wait():
                batches = next(steps)
            if step == origin.step + 1:
                log.say(f"first batch    after {meter.waits[0]:.2f} s")
            for batch in batches:
                trainer.micro_step(batch)
            stats = trainer.update(lr)
            tokens, skipped = stats["tokens"], stats["skipped"]
            totals += torch.stack([tokens, skipped, tokens * skipped])

            if step == origin.step + 1 and args.compile:
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
                eta = meter.eta(step - origin.step, plan.steps - step)
                log.say(metrics.step_line(values, plan.steps, eta))
                meter.restart(tokens)
            if step == plan.steps or due(step, args.ckpt_every):
                with meter.pause():
                    record = snapshot(args, data, plan, origin, stream, totals)
                    path = checkpoints.save(
                        origin.checkpoints, step, trainer.tensors(), record, world
                    )
                    log.say(f"step {step}: saved {path}")
                    log.say(*data.pin.hold())
            if validation.tokens and (step == plan.steps or due(step, args.eval_every)):
                with meter.pause():
                    result = trainer.validate(validation.batches, token_bytes)
                    log.record({"step": step, **{f"val_{k}": v for k, v in result.items()}})
                    log.say(metrics.validation_line(step, result))
        if plan.steps > origin.step:
            segments = origin.segments(args) + [stream.ledger()]
            log.say(*metrics.ledger_lines(segments, int(totals[2])))
        data.pin.release()
    return result


def due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps (0: never) happens after this one."""
    return every > 0 and step % every == 0


# -----------------------------------------------------------------------------
# set-up, in the order of its steps; each fails on all ranks or on none


@dataclass(frozen=True)
class Origin:
    """Where the run starts, a checkpoint or step 0, and where it writes."""

    run_id: str
    path: Path | None  # the checkpoint
    record: dict  # what it says of the run; empty at step 0
    run_dir: Path
    checkpoints: Path

    @property
    def step(self) -> int:
        return self.record.get("step", 0)

    @property
    def totals(self) -> list[int]:
        """Tokens trained on, steps skipped, tokens in those."""
        return [self.record.get(key, 0) for key in ("tokens", "skipped", "skipped_tokens")]

    def segments(self, args: argparse.Namespace) -> list[dict]:
        """Ledgers of what was read before this stream began: --resume-data new begins another."""
        recorded = self.record.get("segments", [])
        return recorded if args.resume_data == "new" else recorded[:-1]

    def lines(self, resume: str) -> list[str]:
        if self.path:
            return [f"resumed        {self.path} at step {self.step:,}"]
        return ["--resume auto: no checkpoint there yet, starting at step 0"] if resume else []


def find_origin(args: argparse.Namespace, world: World) -> Origin:
    with agreed(world):
        path = checkpoints.find(args.resume, args.ckpt_dir) if world.is_main else None
    path, run_id = world.broadcast((path, secrets.token_hex(4)))
    with agreed(world):
        record = checkpoints.load_record(path) if path else {}
    run_id = record.get("run_id", run_id)
    run_dir = Path(args.run_dir or record.get("run_dir") or Path("runs") / run_id)
    beside = path.parent if path else checkpoints.DEFAULT_ROOT / run_id
    return Origin(run_id, path, record, run_dir, Path(args.ckpt_dir or beside))


@dataclass(frozen=True)
class Data:
    """The pinned table, which of its rows to train on, and how to read its ids."""

    table: lancedb.table.Table
    pin: common.Pin
    tokenizer: tokenizer.Tokenizer
    where: str
    lines: list[str]  # what the start prints of it


def open_data(args: argparse.Namespace, origin: Origin, world: World) -> Data:
    with agreed(world):
        version = None if args.resume_data == "new" else origin.record.get("table_version")
        table, lines = common.open_pinned(args, version)
        common.require_columns(table, args)
        codec = tokenizer.load_tokenizer(args.tokenizer)
        notice = tokenizer.check_tokenizer(table.schema, args.tokens_column, codec)
        terms = common.training_terms(table.schema, args)
        counts = common.funnel(table, terms) if world.is_main else None
    table.checkout(world.broadcast(table.version))  # somebody may append while we start
    lines.insert(0, f"table          {table.name} version {table.version}")
    lines += common.funnel_lines(*counts) if counts else []
    lines += [notice] if notice else []
    pin = common.Pin(table, origin.run_id, enabled=world.is_main and not args.no_pin_tag)
    return Data(table, pin, codec, common.conjunction(terms), lines)


@dataclass(frozen=True)
class Plan:
    """The numbers of the run that follow from flags, data and world."""

    global_batch: int  # blocks per optimizer step
    accumulation: int  # micro-batches per optimizer step
    blocks_per_epoch: int
    steps: int  # the last one
    schedule: dict[str, float]  # arguments of engine.learning_rate
    eval_blocks: int
    config: model.GPTConfig
    meaning: dict[str, object]  # what a resumed run must agree with
    lines: list[str]  # what the start prints of it


def plan_run(
    args: argparse.Namespace, data: Data, origin: Origin, world: World
) -> tuple[Plan, blocks_loaders.LanceDBStream]:
    with agreed(world):
        at_once = args.batch_size * world.size
        size = args.global_batch or origin.record.get("global_batch") or at_once * args.grad_accum
        if size < world.size:
            raise SystemExit(
                f"--global-batch {size} on {world.size} ranks leaves ranks without a block: "
                f"give at least {world.size}"
            )
        accumulation = -(-size // at_once)
        loader = elastic.ElasticStream if args.loader == "elastic" else blocks_loaders.LanceDBStream
        stream = loader(
            data.table, args, data.where, data.tokenizer, global_batch=size, world=world
        )
        blocks = stream.blocks_per_epoch
        steps = args.steps or args.epochs * blocks // size
        if steps == 0 or blocks == 0 or (args.loader == "lancedb" and blocks < size):
            raise SystemExit(
                f"no step to train: an epoch has {blocks:,} blocks, a step takes {size:,}: lower "
                "--batch-size, --grad-accum, --global-batch or --seq-len, or train on more data"
            )
        schedule, about_schedule = plan_schedule(args, steps)
        config = model.GPTConfig.preset(args.model, data.tokenizer.vocab_size, args.seq_len)
        meaning = meaning_of(args, data, config, schedule)
        check_same(args, origin, meaning)
        if origin.path and args.resume_data == "same":
            stream.load_state_dict(origin.record["stream"])
    notes = [about_schedule]
    if args.steps and args.epochs != 1:
        notes.append(f"--epochs {args.epochs} is ignored: --steps {args.steps} decides")
    fill = size / (accumulation * at_once)
    lines = [
        f"global batch   {size:,} blocks on {world.size} ranks x {args.batch_size} blocks: "
        f"accumulation {accumulation}, {fill:.0%} of the slots full, "
        f"{size * args.seq_len:,} positions per step",
        f"epoch          {blocks:,} blocks of {args.seq_len:,} tokens = {blocks / size:,.1f} steps",
        f"this run       {steps:,} steps = {steps * size / blocks:.2f} epochs",
        *notes,
    ]
    eval_blocks = origin.record.get("eval_blocks", args.eval_batches * size)
    plan = Plan(size, accumulation, blocks, steps, schedule, eval_blocks, config, meaning, lines)
    return plan, stream


def plan_schedule(args: argparse.Namespace, steps: int) -> tuple[dict[str, float], str]:
    """Arguments of engine.learning_rate, and the line about them."""
    horizon, warmup, asked = args.lr_total_steps or steps, args.warmup_steps, ""
    if warmup >= horizon:
        warmup, asked = horizon // 10, f" ({warmup:,} do not fit)"
    least = args.min_lr_ratio * args.lr
    schedule = {
        "peak": args.lr,
        "warmup": warmup,
        "total": horizon,
        "min_ratio": args.min_lr_ratio,
    }
    return schedule, (
        f"schedule       LR {args.lr:g} after {warmup:,} steps of warm-up{asked}, "
        f"cosine to {least:g} at step {horizon:,}"
    )


def build_engine(
    args: argparse.Namespace, plan: Plan, origin: Origin, device: torch.device, world: World
) -> engine.Engine:
    """Model, optimizer and step; from the checkpoint where there is one."""
    with agreed(world):
        trainer = engine.Engine(
            model.GPT(plan.config, args.seed).to(device),
            accumulation=plan.accumulation,
            weight_decay=args.weight_decay,
            grad_clip=args.grad_clip,
            autocast=torch.bfloat16 if device.type == "cuda" else None,
            compile_mode=args.compile_mode if args.compile else None,
        )
    if origin.path:
        checkpoints.load_tensors(origin.path, origin.record, trainer.tensors(), world)
    return trainer


def meaning_of(
    args: argparse.Namespace, data: Data, config: model.GPTConfig, schedule: dict
) -> dict[str, object]:
    """What a run must agree with the checkpoint that it continues, by the flag that decides it;
    the stream compares the data."""
    t = data.tokenizer
    return {
        "--model": f"{args.model} {config.n_layer}x{config.n_embd}",
        "--seq-len": config.seq_len,
        "--tokenizer": f"{t.vocab_size} ids, EOS {t.eos_id}, fingerprint {t.fingerprint}",
        "--lr-total-steps": schedule["total"],
    }


def check_same(args: argparse.Namespace, origin: Origin, ours: dict[str, object]) -> None:
    """Refuse (SystemExit) to continue a checkpoint of a run that means something else.

    A schedule that was given by its flag is changed on purpose.
    """
    theirs = dict(origin.record.get("meaning", ours))
    if args.lr_total_steps:
        theirs["--lr-total-steps"] = args.lr_total_steps
    different = [f"{k} was {theirs.get(k)}, is {ours[k]}" for k in ours if theirs.get(k) != ours[k]]
    if different:
        raise SystemExit(f"--resume {origin.path}: another run: {'; '.join(different)}")


@dataclass(frozen=True)
class Validation:
    """This rank's batches, kept in memory, and the tokens in those of all ranks."""

    batches: list[engine.Batch]
    tokens: int

    def line(self, args: argparse.Namespace) -> str:
        where = common.validation_filter(args)
        if self.tokens == 0:
            return f"validation     none: no tokenized row where {where} (see --val-filter)"
        return f"validation     {self.tokens:,} tokens where {where}, the first --eval-batches"


def read_validation(args: argparse.Namespace, data: Data, plan: Plan, world: World) -> Validation:
    with agreed(world):
        batches = common.validation_batches(
            data.table, args, data.tokenizer.eos_id, plan.eval_blocks, world.rank, world.size
        )
        mine = list(batches)
    tokens = sum(world.gather(sum(int(batch["mask"].sum()) for batch in mine)))
    return Validation(mine, tokens)


def start_log(
    args: argparse.Namespace,
    data: Data,
    plan: Plan,
    origin: Origin,
    trainer: engine.Engine,
    world: World,
    notices: Sequence[str],
) -> metrics.RunLog:
    """Open the run directory and say what will happen, with every derived number."""
    with agreed(world, f"--run-dir {origin.run_dir}"):
        log = metrics.RunLog(origin.run_dir, world.is_main, origin.step, args.wandb)
        about = hardware.describe_environment(trainer.device)
        log.write_json("environment.json", about)
        log.write_json("config.json", {"flags": vars(args), "derived": asdict(plan)})
    every = f"every {args.ckpt_every:,} steps and after" if args.ckpt_every else "after"
    parameters = sum(p.numel() for p in trainer.names)
    log.say(
        f"run            {origin.run_id}, logs in {origin.run_dir}",
        f"checkpoints    {origin.checkpoints}, {every} the last step",
        *origin.lines(args.resume),
        f"ranks          {world.size} on {about['device_name'] or about['cpu']}",
        *data.lines,
        f"model          {args.model}, {parameters:,} parameters",
        *plan.lines,
        *notices,
    )
    return log


def snapshot(
    args: argparse.Namespace,
    data: Data,
    plan: Plan,
    origin: Origin,
    stream: blocks_loaders.LanceDBStream,
    totals: torch.Tensor,
) -> dict:
    """What a checkpoint says of the run beside its tensors: JSON. A collective call."""
    tokens, skipped, skipped_tokens = map(int, totals.tolist())
    return {
        "run_id": origin.run_id,
        "run_dir": str(origin.run_dir),
        "table_version": data.table.version,
        "global_batch": plan.global_batch,
        "eval_blocks": plan.eval_blocks,
        "tokens": tokens,
        "skipped": skipped,
        "skipped_tokens": skipped_tokens,
        "stream": stream.state_dict(),
        "segments": origin.segments(args) + [stream.ledger()],
        "model": asdict(plan.config),
        "tokenizer": data.tokenizer.spec,
        "meaning": plan.meaning,
        "flags": vars(args),
    }


if __name__ == "__main__":
    main()
