"""Sample a continuation from a checkpoint.

python scripts/sample.py --prompt "def main("                  # the newest checkpoint
python scripts/sample.py --checkpoint checkpoints/RUN/step_00000300 --temperature 0
"""

import sys
from pathlib import Path

import pyarrow as pa
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import checkpoints
import hardware
import model
import tokenizer
from distributed import World
from flags import Parser, magnitude, positive, seed


def main(argv: list[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--checkpoint", default="auto", help="checkpoint directory (auto: newest)")
    parser.add_argument("--ckpt-dir", help="where auto looks")
    parser.add_argument("--tokenizer", help="where it is now (default: as in training)")
    parser.add_argument("--prompt", default="The ", help="text to continue")
    parser.add_argument("--tokens", type=positive, default=200, help="tokens to sample at most")
    parser.add_argument("--temperature", type=magnitude, default=0.8, help="0: the likeliest token")
    parser.add_argument("--top-k", type=positive, default=50, help="sample among the k likeliest")
    parser.add_argument("--seed", type=seed, default=0, help="of the sampling")
    parser.add_argument("--device", default="auto", help="auto, cuda (also ROCm) or cpu")
    args = parser.parse_args(argv)

    path, record, _, notes = checkpoints.find(args.checkpoint, args.ckpt_dir, World())
    if path is None:
        where = args.ckpt_dir or checkpoints.DEFAULT_ROOT
        raise SystemExit(f"no checkpoint in {where}: train one, or name another --ckpt-dir")
    device = hardware.choose_device(args.device, local_rank=0)
    gpt, codec = load(path, record, device, args.tokenizer)
    ids = codec.encode(pa.array([args.prompt])).to_pylist()[0] or [codec.eos_id]
    generator = torch.Generator(device).manual_seed(args.seed)
    output = gpt.generate(
        torch.tensor([ids], device=device),
        args.tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        eos_id=codec.eos_id,
        generator=generator,
    )
    print(*notes, f"{path}: {args.prompt!r} continues as", sep="\n", file=sys.stderr)
    print(codec.decode(output[0].tolist()))


def load(
    path: Path, record: dict, device: torch.device, spec: str | None
) -> tuple[model.GPT, tokenizer.Tokenizer]:
    """The model of a checkpoint and its tokenizer, or ``spec``'s where it has moved."""
    codec = tokenizer.load_tokenizer(spec or record["tokenizer"])
    was, ours = record["must_match"]["--tokenizer"], tokenizer.in_full(codec)
    if was != ours:
        raise SystemExit(
            f"checkpoint {path} was trained on ids of another tokenizer ({was}) than {codec.spec} "
            f"({ours}): name it with --tokenizer"
        )
    gpt = model.GPT(model.GPTConfig(**record["model"])).to(device).eval()
    tensors = {name: p.detach() for name, p in gpt.named_parameters()}
    checkpoints.load_tensors(path, record, tensors, World())
    return gpt, codec


if __name__ == "__main__":
    main()
