"""Train a byte-level BPE on the text of the corpus: a tokenizer.json for --tokenizer bpe:<file>.

python scripts/train_tokenizer.py --db DB --vocab-size 16384 --out tokenizer.json
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import lancedb
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common
from flags import Parser, interruptible, positive
from tokenizer import EOS_TOKENS

MIN_VOCABULARY = 257  # every byte, and the end of text


def main(argv: list[str] | None = None) -> None:
    parser = Parser(__doc__)
    common.add_table_arguments(parser)
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--vocab-size", type=positive, default=16384, help="ids, EOS included")
    group.add_argument("--out", type=Path, default=Path("tokenizer.json"), help="file to write")
    group.add_argument("--filter", default="", help="SQL predicate: which documents to learn from")
    group.add_argument(
        "--max-bytes", type=positive, default=1 << 30, help="UTF-8 bytes of text to learn from"
    )
    group.add_argument("--overwrite", action="store_true", help="replace the file if it is there")
    args = parser.parse_args(argv)
    if args.out.exists() and not args.overwrite:
        raise SystemExit(
            f"--out {args.out} exists, and a table may have been tokenized with it: "
            "give another name, or --overwrite"
        )
    if args.vocab_size < MIN_VOCABULARY:
        raise SystemExit(f"--vocab-size {args.vocab_size}: give at least {MIN_VOCABULARY}")
    if not args.out.parent.is_dir():
        raise SystemExit(f"--out {args.out}: there is no directory {args.out.parent}")
    table = common.open_table(args)
    common.require_text(table, args)
    with interruptible("nothing is written"):
        train(table, args)


def train(table: lancedb.table.Table, args: argparse.Namespace) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=args.vocab_size,
        special_tokens=[EOS_TOKENS[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts(table, args), trainer)
    partial = args.out.with_name(args.out.name + ".partial")
    try:
        bpe.save(str(partial))
        os.replace(partial, args.out)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise SystemExit(f"--out {args.out}: cannot write it: {error}") from None
    found = bpe.get_vocab_size()
    less = f" (the text has no pairs left for {args.vocab_size:,})" * (found < args.vocab_size)
    print(f"{args.out}: {found:,} ids{less}; use it with --tokenizer bpe:{args.out}")


def texts(table: lancedb.table.Table, args: argparse.Namespace) -> Iterator[list[str]]:
    """Batches of documents, up to ``--max-bytes``. Raises SystemExit where there is none."""
    query = table.search().select([args.text_column])
    if args.filter:
        query = query.where(common.bracketed(args.filter, "--filter"))
    left = args.max_bytes
    with tqdm(total=left, unit="B", unit_scale=True, desc="read", disable=None) as bar:
        try:
            for batch in query.to_batches():
                documents = batch.column(0).drop_null()
                yield documents.to_pylist()
                bar.update(documents.nbytes)
                left -= documents.nbytes
                if left <= 0:
                    return
        except (ValueError, RuntimeError) as error:
            raise SystemExit(f"--filter {args.filter}: {common.one_line(error)}") from None
    if left == args.max_bytes:
        raise SystemExit(f"table {table.name!r}: no text to learn from (see --filter)")


if __name__ == "__main__":
    main()
