"""The checks of ranks.py under real torchrun on 1, 2, 3 and 4 ranks, and across them.

One launch per world size runs all checks; a check that fails fails its launch.
"""

import json
from pathlib import Path

import pytest
import torch

import checkpoints
from distributed import World
from engine import Engine
from model import GPT
from tests.conftest import run, torchrun
from tests.ranks import CONFIG

SIZES = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def results(corpus, tmp_path_factory):
    """What each world size reported, by size."""
    folder = tmp_path_factory.mktemp("ranks")
    reports = {}
    for size in SIZES:
        out = folder / f"{size}.json"
        command = ("tests/ranks.py", str(corpus), str(out))
        done = run(*command, cwd=folder) if size == 1 else torchrun(size, *command, cwd=folder)
        assert done.returncode == 0, f"{size} ranks:\n{done.stdout}\n{done.stderr}"
        print(f"{size} ranks:\n{done.stdout}")
        reports[size] = json.loads(out.read_text())
    return reports


def test_gradients_of_an_uneven_global_batch_are_those_of_one_big_batch(results):
    # ranks.py compared each world size with one big batch and the ranks with one another
    for micro_batch in ("1", "2", "7"):
        for size in SIZES:
            expected = results[1]["uneven_gradients"][micro_batch]
            assert results[size]["uneven_gradients"][micro_batch] == pytest.approx(
                expected, rel=1e-9
            )


def test_validation_is_equal_on_every_world_size(results):
    for size in SIZES:
        for key in ("loss", "bpb"):
            expected = results[1]["validation"][key]
            assert results[size]["validation"][key] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("mode", ["packed", "rows"])
def test_elastic_stream_gives_the_same_global_batches_in_order_on_any_world_size(results, mode):
    for size in SIZES:
        assert results[size]["elastic_stream"][mode] == results[1]["elastic_stream"][mode]
    assert len(set(results[1]["elastic_stream"][mode])) == 60


@pytest.mark.parametrize("saved_by", SIZES)
def test_checkpoint_of_any_world_size_is_read_by_one_process(results, saved_by):
    def loaded(ranks: int) -> dict[str, torch.Tensor]:
        path = Path(results[ranks]["checkpoint"]["path"])
        tensors = {n: torch.zeros_like(t) for n, t in Engine(GPT(CONFIG)).tensors().items()}
        checkpoints.load_tensors(path, checkpoints.load_record(path), tensors, World())
        return tensors

    tensors, expected = loaded(saved_by), loaded(1)
    assert tensors["optimizer.step.wte.weight"].item() == 1
    for name in expected:  # an update of AdamW's, of either sign where the gradient is about 0
        atol = 1e-6 if name.startswith("optimizer.") else 2.1e-2
        torch.testing.assert_close(tensors[name], expected[name], rtol=1e-4, atol=atol)
    for name in ("wte.weight", "wpe.weight"):
        torch.testing.assert_close(tensors[name], expected[name], rtol=0, atol=1e-4)


def test_lancedb_stream_gives_the_same_global_batches_for_any_ranks_and_workers(results):
    streams = {}
    for size in SIZES:
        for key, hashes in results[size]["lancedb_stream"].items():
            pack = key.split()[0]
            assert streams.setdefault(pack, hashes) == hashes, (size, key)
    assert len(streams) == 2
    assert [len(results[size]["lancedb_stream"]) for size in SIZES] == [2, 4, 0, 2]
