"""Writers of packed blocks, a small class for each format; blocks_loaders.py reads them."""

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flags import require_package
from stores import Store, lance_options

READ = 64  # blocks read at once, and rows of a group of parquet-random
SHARD = 4096  # most blocks of a shard or a Lance fragment; 8 MB at T = 1,024
SHARDS = 16  # at least, of blocks enough: ranks and workers divide them
GROUP = 1024  # rows of a group of parquet-seq


def shard_size(blocks: int) -> int:
    """Blocks of a shard, of an epoch that has ``blocks``."""
    return max(1, min(SHARD, blocks // SHARDS))


class Writer:
    """Writes blocks of ``dtype`` (n, T) into the directory ``to``, ``shard`` to a file where it
    shards; ``close`` makes them whole. ``remote`` ones can write to an object store."""

    remote = False

    def __init__(self, to: Store, seq_len: int, dtype: np.dtype, shard: int) -> None:
        self.to, self.seq_len, self.dtype, self.shard = to, seq_len, dtype, shard
        item = pa.from_numpy_dtype(dtype)
        self.schema = pa.schema([("input_ids", pa.list_(item, seq_len))])
        self.open()

    def open(self) -> None:
        raise NotImplementedError

    def write(self, blocks: np.ndarray) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def arrow(self, blocks: np.ndarray) -> pa.Table:
        lists = pa.FixedSizeListArray.from_arrays(pa.array(blocks.ravel()), self.seq_len)
        return pa.table([lists], schema=self.schema)


class Buffered(Writer):
    """Writes ``shard`` blocks at a time by ``flush(blocks)``."""

    def open(self) -> None:
        self.parts: list[np.ndarray] = []
        self.flushed = 0

    def write(self, blocks: np.ndarray) -> None:
        self.parts.append(blocks)
        held = sum(map(len, self.parts))
        if held >= self.shard:
            whole = held - held % self.shard
            joined = np.concatenate(self.parts)
            for first in range(0, whole, self.shard):
                self._flush(joined[first : first + self.shard])
            self.parts = [joined[whole:]]

    def close(self) -> None:
        if sum(map(len, self.parts)):
            self._flush(np.concatenate(self.parts))
        self.parts = []

    def flush(self, blocks: np.ndarray) -> None:
        raise NotImplementedError

    def _flush(self, blocks: np.ndarray) -> None:
        self.flush(blocks)
        self.flushed += 1


class LanceBlocksWriter(Buffered):
    """A table has one file, its fragments are not divided among ranks: they may be large."""

    remote = True

    def open(self) -> None:
        super().open()
        self.shard = SHARD
        self.options = lance_options() if self.to.remote else None

    def flush(self, blocks: np.ndarray) -> None:
        table = str(self.to / "blocks.lance")
        lance.write_dataset(self.arrow(blocks), table, mode="append", storage_options=self.options)


class ParquetSeqWriter(Buffered):
    def flush(self, blocks: np.ndarray) -> None:
        shard = self.to / f"shard_{self.flushed:05}.parquet"
        pq.write_table(self.arrow(blocks), shard, row_group_size=GROUP, compression="none")


class WebDatasetWriter(Buffered):
    """Tar shards whose samples are named by the block's number and hold its bytes."""

    def open(self) -> None:
        super().open()
        self.library = require_package("webdataset", "--formats webdataset", "webdataset")

    def flush(self, blocks: np.ndarray) -> None:
        rows = blocks.astype(self.dtype.newbyteorder("<"), copy=False)
        shard = self.to / f"shard_{self.flushed:05}.tar"
        with open(shard, "wb") as file, self.library.TarWriter(file, encoder=False) as tar:
            for number, row in enumerate(rows, self.flushed * self.shard):
                tar.write({"__key__": f"{number:09}", "bin": row.tobytes()})


class LitDataWriter(Writer):
    """Chunks of tokens, by the class that litdata's own ``optimize`` has in every process."""

    def open(self) -> None:
        require_package("litdata", "--formats litdata", "litdata")
        from litdata.streaming import Cache, TokensLoader

        tokens, loader = self.shard * self.seq_len, TokensLoader(self.seq_len)
        self.cache = Cache(str(self.to), chunk_size=tokens, item_loader=loader)
        self.written = 0

    def write(self, blocks: np.ndarray) -> None:
        for number, block in enumerate(blocks, self.written):
            self.cache[number] = block
        self.written += len(blocks)

    def close(self) -> None:
        self.cache.done()
        self.cache.merge()


class ParquetRandomWriter(Writer):
    def open(self) -> None:
        self.file = pq.ParquetWriter(self.to / "blocks.parquet", self.schema, compression="none")

    def write(self, blocks: np.ndarray) -> None:
        self.file.write_table(self.arrow(blocks), row_group_size=READ)

    def close(self) -> None:
        self.file.close()


class MemmapWriter(Writer):
    def open(self) -> None:
        self.file = open(self.to / "blocks.bin", "wb")

    def write(self, blocks: np.ndarray) -> None:
        self.file.write(blocks.data)

    def close(self) -> None:
        self.file.close()


class MDSBlocksWriter(Writer):
    remote = True

    def open(self) -> None:
        streaming = require_package("streaming", "--formats mds", "mosaicml-streaming")
        columns = {"tokens": f"ndarray:{self.dtype.name}:{self.seq_len}"}
        self.mds = streaming.MDSWriter(out=str(self.to), columns=columns, progress_bar=False)
        # a shard has a header, and a sample an offset: not known before
        sample = self.mds.extra_bytes_per_sample + self.seq_len * self.dtype.itemsize
        self.mds.size_limit = self.mds.extra_bytes_per_shard + self.shard * sample

    def write(self, blocks: np.ndarray) -> None:
        for block in blocks:
            self.mds.write({"tokens": block})

    def close(self) -> None:
        self.mds.finish()


FORMATS: dict[str, type[Writer]] = {
    "lance": LanceBlocksWriter,
    "mds": MDSBlocksWriter,
    "webdataset": WebDatasetWriter,
    "litdata": LitDataWriter,
    "parquet-random": ParquetRandomWriter,
    "parquet-seq": ParquetSeqWriter,
    "memmap": MemmapWriter,
}
EXTRA = ("webdataset", "litdata")  # of requirements-ab.txt
