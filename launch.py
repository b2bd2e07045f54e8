"""Set-up of a run, in the order of its steps: where it starts, its data, its numbers, its parts.

Each step fails on all ranks or on none, and raises SystemExit for what a user can mend.
"""

import argparse
import secrets
from dataclasses import dataclass
from pathlib import Path

import lancedb
import torch

import checkpoints
import common
import elastic
import engine
import hardware
import loaders
import metrics
import model
import profiling
import stopping
import tokenizer
from blocks_loaders import ARMS
from distributed import World, agreed
from flags import Parser, not_negative, positive, seed
from loaders import LOADERS, Stream, loader_name

OWN_FLAGS = {"db", "plan_cache"}  # paths that may differ between nodes
TUNED = (  # may change, and is said
    *("lr", "min_lr_ratio", "warmup_steps", "weight_decay", "grad_clip"),
    *("decay_ratio", "z_loss", "skip_spikes", "dtype", "ddp_bf16"),
)
# that decide which weights there are and what they mean
MODEL_FLAGS = (
    "--model",
    "--arch",
    "--kv-heads",
    "--qk-norm",
    "--untied",
    "--seq-len",
    "--tokenizer",
)
MODULES = (
    *(common, model, loaders, elastic, engine, checkpoints),
    *(stopping, metrics, profiling, hardware),
)


def flag_parser(doc: str | None = None) -> Parser:
    """Every flag of train.py; each module adds its own group."""
    parser = Parser(doc)
    group = parser.add_argument_group("run")
    group.add_argument("--steps", type=not_negative, default=0, help="length, optimizer steps")
    group.add_argument("--epochs", type=positive, default=1, help="length where --steps is 0")
    group.add_argument("--seed", type=seed, default=1234, help="of the initial weights")
    for module in MODULES:
        module.add_arguments(parser)
    return parser


@dataclass(frozen=True)
class Start:
    """Where the run starts, a checkpoint or step 0, and where it writes."""

    run_id: str
    checkpoint: checkpoints.Found
    run_dir: Path
    ckpt_dir: Path

    @property
    def record(self) -> dict:
        """What the checkpoint says of the run; empty at step 0."""
        return self.checkpoint.record

    @property
    def step(self) -> int:
        return self.record.get("step", 0)

    @property
    def totals(self) -> list[int]:
        """Tokens trained on, steps skipped, tokens in those."""
        return [self.record.get(key, 0) for key in ("tokens", "skipped", "skipped_tokens")]

    def segments(self, new_data: bool) -> list[dict]:
        """Ledgers of what was read before this stream began."""
        recorded = self.record.get("segments", [])
        return recorded if new_data else recorded[:-1]

    def lines(self, args: argparse.Namespace) -> list[str]:
        path, _, _, notes = self.checkpoint
        if path is None:
            fresh = "--resume auto: no checkpoint there yet, starting at step 0"
            init = f"weights        those of {args.init_from}"
            return [fresh] * bool(args.resume) + [init] * bool(args.init_from)
        was, now = self.record["flags"], vars(args)
        changed = [k for k in TUNED if was.get(k, now[k]) != now[k]]
        changed = [f"--{k.replace('_', '-')} {was[k]} -> {now[k]}" for k in changed]
        lines = [f"resumed        {path} at step {self.step:,}", *notes]
        if args.init_from:
            lines.append("--init-from is not read: the run has a checkpoint")
        return lines + [f"changed        {', '.join(changed)}"] * bool(changed)


def find_start(args: argparse.Namespace, world: World) -> Start:
    given = {k: v for k, v in vars(args).items() if k not in OWN_FLAGS}
    flags = world.gather(given)
    with agreed(world):
        for name, value in given.items():
            if value != flags[0][name]:
                raise SystemExit(
                    f"flag {name} is {value} on rank {world.rank}, {flags[0][name]} on rank 0"
                )
        if args.wandb:
            metrics.require_wandb()
    found = checkpoints.find(args.resume, args.ckpt_dir, world)
    run_id, run_dir = world.broadcast(secrets.token_hex(4)), None
    ckpt_dir = Path(args.ckpt_dir or checkpoints.DEFAULT_ROOT / run_id)
    if found.path:
        ckpt_dir = Path(args.ckpt_dir or found.path.parent)
        if ckpt_dir.resolve() == found.path.parent.resolve():  # else it is a branch, a new run
            run_id, run_dir = found.record["run_id"], found.record["run_dir"]
    return Start(run_id, found, Path(args.run_dir or run_dir or Path("runs") / run_id), ckpt_dir)


@dataclass(frozen=True)
class Data:
    """The pinned table, which of its rows to train on, and how to read its ids."""

    table: lancedb.table.Table
    pin: common.Pin
    tokenizer: tokenizer.Tokenizer
    where: str
    lines: list[str]  # what the start prints of it


def open_data(args: argparse.Namespace, start: Start, world: World) -> Data:
    with agreed(world):
        version = None if args.resume_data == "new" else start.record.get("table_version")
        table, lines = common.open_pinned(args, version)
        common.require_columns(table, args)
        codec = tokenizer.load_tokenizer(args.tokenizer)
        notice = tokenizer.check_tokenizer(table.schema, args.tokens_column, codec)
        terms = common.training_terms(table.schema, args)
        counts = common.funnel(table, terms) if world.is_main else None
    version = world.broadcast(table.version)
    with agreed(world):
        try:
            table.checkout(version)  # somebody may append while we start
        except (ValueError, RuntimeError):
            raise SystemExit(f"this rank's table has no version {version}, rank 0's has") from None
    lines.insert(0, f"table          {table.name} version {table.version}")
    lines += common.funnel_lines(*counts) if counts else []
    lines += [notice] if notice else []
    pin = common.Pin(table, start.run_id, enabled=world.is_main and not args.no_pin_tag)
    return Data(table, pin, codec, common.conjunction(terms), lines)


@dataclass(frozen=True)
class Plan:
    """The numbers of the run that follow from flags, data and world."""

    global_batch: int  # blocks per optimizer step
    first_global_batch: int  # at the run's first start: --eval-batches counts these
    accumulation: int  # micro-batches per optimizer step
    blocks_per_epoch: int
    steps: int  # the last one
    schedule: dict[str, float | str]  # arguments of engine.learning_rate
    eval_blocks: int
    config: model.GPTConfig
    must_match: dict[str, object]  # what a resumed run must agree with
    new_data: bool  # whether the stream begins anew after a checkpoint
    lines: list[str]  # what the start prints of it


def plan_run(
    args: argparse.Namespace, data: Data, start: Start, world: World
) -> tuple[Plan, Stream]:
    with agreed(world):
        at_once = args.batch_size * world.size
        size = args.global_batch or start.record.get("global_batch") or at_once * args.grad_accum
        if size < world.size:
            raise SystemExit(
                f"--global-batch {size} on {world.size} ranks leaves ranks without a block: "
                f"give at least {world.size}"
            )
        accumulation = -(-size // at_once)
        loader = LOADERS[loader_name(args)]
        stream = loader(
            data.table, args, data.where, data.tokenizer, global_batch=size, world=world
        )
        blocks = stream.blocks_per_epoch
        steps = args.steps or args.epochs * blocks // size
        if steps == 0 or blocks == 0 or (blocks < size and loader is not elastic.ElasticStream):
            raise SystemExit(
                f"no step to train: an epoch has {blocks:,} blocks, a step takes {size:,}: lower "
                "--batch-size, --grad-accum, --global-batch or --seq-len, or train on more data"
            )
        schedule, about_schedule = plan_schedule(args, steps)
        config = model.GPTConfig.preset(
            args.model,
            data.tokenizer.vocab_size,
            args.seq_len,
            arch=args.arch,
            n_kv_head=args.kv_heads,
            qk_norm=args.qk_norm,
            tied=not args.untied,
        )
        if args.doc_mask and not args.pack and args.blocks_mode not in ARMS:
            raise SystemExit("--doc-mask: only --pack puts several documents into a block")
        matched = must_match(args, data, config, schedule)
        check_match(args, start, matched)
        notes = [about_schedule, stream.line]
        state = start.record.get("stream")
        new_data = state is not None and args.resume_data == "new"
        if new_data and state.get("fingerprint", 0) == getattr(stream, "fingerprint", None):
            new_data = False  # an unattended restart gives the flag again
            notes.append("--resume-data new: these are the checkpoint's data, going on in them")
        if state is not None and not new_data:
            stream.load_state_dict(state)
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
    first_size = start.record.get("first_global_batch", size)
    return Plan(
        global_batch=size,
        first_global_batch=first_size,
        accumulation=accumulation,
        blocks_per_epoch=blocks,
        steps=steps,
        schedule=schedule,
        eval_blocks=args.eval_batches * first_size,
        config=config,
        must_match=matched,
        new_data=new_data,
        lines=lines,
    ), stream


def plan_schedule(args: argparse.Namespace, steps: int) -> tuple[dict[str, float | str], str]:
    """Arguments of engine.learning_rate, and the line about them."""
    horizon, warmup, asked = args.lr_total_steps or steps, args.warmup_steps, ""
    if warmup >= horizon:
        warmup, asked = horizon // 10, f" (--warmup-steps {warmup:,} do not fit)"
    decay = round(args.decay_ratio * horizon)
    schedule = {
        "peak": args.lr,
        "warmup": warmup,
        "total": horizon,
        "min_ratio": args.min_lr_ratio,
        "schedule": args.schedule,
        "decay": decay,
    }
    least = f"{args.min_lr_ratio * args.lr:g} at step {horizon:,}"
    then = {
        "cosine": f"cosine to {least}",
        "wsd": f"constant, in the last {decay:,} steps down to {least}",
        "constant": "constant",
    }[args.schedule]
    return schedule, (
        f"schedule       LR {args.lr:g} after {warmup:,} steps of warm-up{asked}, {then}"
    )


def build_engine(
    args: argparse.Namespace, plan: Plan, start: Start, device: torch.device, world: World
) -> engine.Engine:
    """Model, optimizer and step; from the checkpoint where there is one."""
    with agreed(world):
        engine.check_compile_mode(args, plan.accumulation, device)
        trainer = engine.Engine(
            model.GPT(plan.config, args.seed, args.recompute).to(device),
            accumulation=plan.accumulation,
            optimizer=args.optimizer,
            weight_decay=args.weight_decay,
            grad_clip=args.grad_clip,
            z_loss=args.z_loss,
            skip_spikes=args.skip_spikes,
            doc_mask=args.doc_mask,
            autocast=hardware.autocast_dtype(args.dtype, device)[0],
            compile_mode=args.compile_mode if args.compile else None,
            bucket_mb=args.ddp_bucket_mb,
            bf16_exchange=args.ddp_bf16,
        )
    path, record, _, _ = start.checkpoint
    if path:
        checkpoints.load_tensors(path, record, trainer.tensors(), world)
    elif args.init_from:
        path = Path(args.init_from)
        record = checkpoints.check(path, world)
        with agreed(world):
            for flag in MODEL_FLAGS:
                ours = plan.must_match[flag]
                was = record["must_match"].get(flag, ours)
                if was != ours:
                    raise SystemExit(f"--init-from {path}: {flag} was {was}, is {ours}")
        weights = {name: p.detach() for p, name in trainer.names.items()}
        checkpoints.load_tensors(path, record, weights, world)
    return trainer


def open_checkpoints(
    args: argparse.Namespace, start: Start, world: World
) -> tuple[checkpoints.Saver, list[str]]:
    """The saver, with its directory locked for this run, and what to say of it."""
    lock, notices = None, []
    with agreed(world, f"--ckpt-dir {start.ckpt_dir}"):
        if world.is_main:
            damaged = start.checkpoint.damaged
            lock, notices = checkpoints.take(start.ckpt_dir, start.step, damaged)
    keep = args.keep_last, args.keep_every
    return checkpoints.Saver(start.ckpt_dir, world, lock, *keep), notices


def must_match(
    args: argparse.Namespace, data: Data, config: model.GPTConfig, schedule: dict
) -> dict[str, object]:
    """What a run must agree with the checkpoint that it continues, by the flag that decides it;
    the stream compares the data."""
    return {
        "--model": f"{args.model} {config.n_layer}x{config.n_embd}",
        "--arch": config.arch,
        "--kv-heads": config.kv_heads,
        "--qk-norm": config.qk_norm,
        "--untied": not config.tied,
        "--seq-len": config.seq_len,
        "--doc-mask": args.doc_mask,
        "--optimizer": args.optimizer,
        "--tokenizer": tokenizer.in_full(data.tokenizer),
        "--schedule": schedule["schedule"],
        "--lr-total-steps": 0 if schedule["schedule"] == "constant" else schedule["total"],
    }


def check_match(args: argparse.Namespace, start: Start, ours: dict[str, object]) -> None:
    """Refuse (SystemExit) to continue a checkpoint of a run that means something else.

    A schedule that was given by its flag is changed on purpose.
    """
    theirs = ours | start.record.get("must_match", {})
    if args.lr_total_steps:
        theirs["--lr-total-steps"] = ours["--lr-total-steps"]
    different = [
        f"{k} was {theirs[k]}, is {ours[k]}" for k in ours if theirs.get(k, ours[k]) != ours[k]
    ]
    if different:
        mend = ""
        if ours["--lr-total-steps"] != theirs["--lr-total-steps"]:
            was, now = theirs["--lr-total-steps"], ours["--lr-total-steps"]
            mend = f" (--lr-total-steps {was} keeps the schedule of the LR, {now} changes it)"
        raise SystemExit(
            f"--resume {start.checkpoint.path}: another run: {'; '.join(different)}{mend}"
        )


@dataclass(frozen=True)
class Validation:
    """This rank's batches, kept in memory, and the tokens in those of all ranks."""

    batches: list[engine.Batch]
    tokens: int

    def line(self, args: argparse.Namespace) -> str:
        where = common.validation_filter(args)
        if self.tokens == 0:
            return f"validation     none: no tokenized row where {where} (see --val-filter)"
        return f"validation     {self.tokens:,} tokens where {where} (see --eval-batches)"


def read_validation(args: argparse.Namespace, data: Data, plan: Plan, world: World) -> Validation:
    with agreed(world):
        batches = common.validation_batches(
            data.table, args, data.tokenizer.eos_id, plan.eval_blocks, world
        )
        mine = list(batches)
        for batch in mine:
            common.check_ids(batch["input_ids"], data.tokenizer, args)
    tokens = sum(world.gather(sum(int(batch["mask"].sum()) for batch in mine)))
    return Validation(mine, tokens)
