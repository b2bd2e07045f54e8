"""Checkpoints: whole or absent, whatever happens while one is written."""

import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import checkpoints
from checkpoints import Saver, complete, find, load_record, load_tensors, prune, shares, take
from distributed import World
from tests.conftest import ROOT, small_disk

ALONE = World()
FIXTURE = ROOT / "tests/fixtures/checkpoint_format_1"


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    named = {f"h.{i}.w": torch.randn(17, 5 + i, generator=generator) for i in range(6)}
    return named | {"optimizer.step.h.0.w": torch.tensor(float(seed))}


def save(root, *steps, keep=(0, 0)):
    """Checkpoints of these steps, each with the tensors of its step."""
    lock, _ = take(root, max([checkpoints.step_of(p) for p in complete(root)], default=0))
    saver = Saver(root, ALONE, lock, *keep)
    for step in steps:
        saver.start(step, tensors(step), {"run_id": "x", "table_version": step})
        saver.finish()
    saver.close()
    return [root / f"step_{step:08d}" for step in steps]


def loaded(path):
    fresh = {name: torch.zeros_like(t) for name, t in tensors().items()}
    load_tensors(path, load_record(path), fresh, ALONE)
    return fresh


def flip(path):
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))


# -----------------------------------------------------------------------------
# saving and loading


def test_shares_hold_each_tensor_once_and_about_the_same_bytes():
    rng = np.random.default_rng(0)
    sizes = {f"t{i}": int(rng.integers(1, 1000)) for i in range(100)}
    for ranks in (1, 2, 3, 8):
        parts = shares(sizes, ranks)
        assert sorted(name for part in parts for name in part) == sorted(sizes)
        loads = [sum(sizes[name] for name in part) for part in parts]
        assert max(loads) - min(loads) <= max(sizes.values())
        assert parts == shares(dict(reversed(sizes.items())), ranks)
    assert [len(p) for p in shares({"a": 1}, 3)] == [1, 0, 0]


def test_saved_checkpoint_is_read_back_and_other_tools_can_open_it(tmp_path):
    (path,) = save(tmp_path, 3)
    for name, t in tensors(3).items():
        assert torch.equal(loaded(path)[name], t)
    (shard,) = path.glob("*.safetensors")
    assert load_file(shard).keys() == tensors().keys()
    assert sorted(p.name for p in path.iterdir()) == [checkpoints.MANIFEST, shard.name]


def test_training_may_go_on_while_a_save_is_written(tmp_path):
    """What is written are the values at the call, copied into buffers that are made once."""
    lock, _ = take(tmp_path, 0)
    saver, live = Saver(tmp_path, ALONE, lock, 0, 0), tensors(7)
    for step in (1, 2):
        saver.start(step, live, {"run_id": "x"})
        for t in live.values():
            t.add_(1)
        saver.finish()
        addresses = {name: b.data_ptr() for name, b in saver.buffers.items()}
    saver.close()
    assert addresses == {name: b.data_ptr() for name, b in saver.buffers.items()}
    for offset, path in enumerate(complete(tmp_path)):
        for name, t in tensors(7).items():
            assert torch.equal(loaded(path)[name], t + offset)


def test_tensors_of_another_model_are_refused(tmp_path):
    (path,) = save(tmp_path, 1)
    record = load_record(path)
    for wrong, words in (
        ({"h.9.w": torch.zeros(2)}, "has no tensor h.9.w"),
        ({"h.0.w": torch.zeros(2)}, r"h.0.w is \(17, 5\) torch.float32, the model's is \(2,\)"),
        ({"h.0.w": torch.zeros(17, 5, dtype=torch.float64)}, "the model's is .*float64"),
    ):
        with pytest.raises(SystemExit, match=words):
            load_tensors(path, record, wrong, ALONE)


def test_only_the_last_and_every_so_many_are_kept(tmp_path):
    save(tmp_path, 10, 15, 20, 25, 30)
    prune(tmp_path, 0, 0)
    assert len(complete(tmp_path)) == 5
    prune(tmp_path, 2, 20)
    assert [checkpoints.step_of(p) for p in complete(tmp_path)] == [20, 25, 30]
    save(tmp_path, 35, 40, keep=(1, 0))
    assert [p.name for p in tmp_path.iterdir() if p.name != ".lock"] == ["step_00000040"]


# -----------------------------------------------------------------------------
# damage


@pytest.mark.parametrize("damage", ["flipped", "shorter", "missing", "manifest", "edited"])
def test_damaged_checkpoint_is_passed_over_by_auto_and_refused_by_name(tmp_path, damage):
    old, new = save(tmp_path, 1, 2)
    (shard,) = new.glob("*.safetensors")
    manifest = new / checkpoints.MANIFEST
    if damage == "flipped":
        flip(shard)
    elif damage == "shorter":
        os.truncate(shard, shard.stat().st_size - 1)
    elif damage == "missing":
        shard.unlink()
    elif damage == "manifest":
        os.truncate(manifest, 100)
    else:
        record = json.loads(manifest.read_text())
        manifest.write_text(json.dumps(record | {"table_version": 7}))
    file = shard.name if damage in ("flipped", "shorter", "missing") else checkpoints.MANIFEST
    found = find("auto", str(tmp_path), ALONE)
    assert found.path == old and found.damaged == [new]
    assert f"passed over: checkpoint {new}: " in found.notes[0]
    with pytest.raises(SystemExit) as refusal:
        find(str(new), None, ALONE)
    assert damage == "manifest" or file in str(refusal.value)
    take(tmp_path, 1, found.damaged)[0].close()
    assert complete(tmp_path) == [old]
    assert any(p.name.startswith("damaged_step_00000002") for p in tmp_path.iterdir())


def test_auto_refuses_where_none_is_whole(tmp_path):
    for path in save(tmp_path, 1, 2):
        shutil.copy(path / checkpoints.MANIFEST, path / "x")
        flip(path / checkpoints.MANIFEST)
        os.truncate(path / checkpoints.MANIFEST, 50)
    with pytest.raises(SystemExit, match="none of 2 is whole: .*step_00000002"):
        find("auto", str(tmp_path), ALONE)
    assert len(complete(tmp_path)) == 2  # nothing was touched


def test_unknown_format_is_refused_and_format_1_is_read(tmp_path):
    """The fixture was written by the first version of this format: later ones must load it."""
    record = checkpoints.check(FIXTURE, ALONE)
    fresh = {name: torch.zeros_like(t) for name, t in tensors().items()}
    load_tensors(FIXTURE, record, fresh, ALONE)
    assert record["step"] == 5 and record["run_id"] == "x"
    assert all(torch.equal(t, tensors(5)[name]) for name, t in fresh.items())
    shutil.copytree(FIXTURE, tmp_path / "c")
    manifest = tmp_path / "c" / checkpoints.MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 2}))
    with pytest.raises(SystemExit, match="format 2, this version reads 1"):
        load_record(tmp_path / "c")


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_process_killed_inside_a_save_leaves_the_old_checkpoint_or_the_new_one(tmp_path, call):
    """By SIGKILL as it would sync the shard, the manifest, the new directory, the one above."""
    save(tmp_path, 1)
    code = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from tests.test_checkpoints import save\n"
        "fsync, left = os.fsync, [None] * int(sys.argv[3])\n"
        "def sync(fd):\n"
        "    left.pop()\n"
        "    fsync(fd) if left else os.kill(os.getpid(), signal.SIGKILL)\n"
        "os.fsync = sync\n"
        "save(Path(sys.argv[2]), 2)"
    )
    command = [sys.executable, "-c", code, str(ROOT), str(tmp_path), str(call)]
    assert subprocess.run(command, cwd=ROOT).returncode == -signal.SIGKILL
    found = complete(tmp_path)
    assert [checkpoints.step_of(path) for path in found] == [1, 2][: 1 + (call == 4)]
    assert find("auto", str(tmp_path), ALONE).path == found[-1]
    if call < 4:
        assert list(tmp_path.glob(".partial_*"))
        (new,) = save(tmp_path, 2)
        assert torch.equal(loaded(new)["h.0.w"], tensors(2)["h.0.w"])
    assert torch.equal(loaded(found[0])["h.0.w"], tensors(1)["h.0.w"])


# -----------------------------------------------------------------------------
# the directory


def test_directory_has_one_owner_until_it_dies(tmp_path):
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); import checkpoints\n"
        "from pathlib import Path\n"
        "lock, _ = checkpoints.take(Path(sys.argv[2]), 0); print('taken', flush=True)\n"
        "time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(ROOT), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        owner.stdout.readline()
        with pytest.raises(SystemExit, match=f"in use by process {owner.pid} on "):
            take(tmp_path, 0)
        owner.send_signal(signal.SIGKILL)
    take(tmp_path, 0)[0].close()


def test_debris_goes_and_later_checkpoints_are_not_mixed_with_another_branch(tmp_path):
    save(tmp_path, 1, 2)
    (tmp_path / ".partial_step_00000003").mkdir()
    with pytest.raises(SystemExit, match="step_00000002, later than step 1 .*--resume auto"):
        take(tmp_path, 1)
    take(tmp_path, 2)[0].close()
    assert not (tmp_path / ".partial_step_00000003").exists()


def failing_save(root, saver, words):
    before = [p.name for p in complete(root)] if root.exists() else []
    saver.start(9, tensors(9), {"run_id": "x"})
    with pytest.raises(SystemExit, match=words) as refusal:
        saver.finish()
    assert str(refusal.value).startswith(f"cannot write checkpoint {root}/step_00000009: ")
    assert "\n" not in str(refusal.value)
    assert [p.name for p in complete(root)] == before
    assert not list(root.glob(".partial*"))


def test_directory_that_vanished_is_noticed_before_a_save(tmp_path):
    root = tmp_path / "c"
    save(root, 1)
    saver = Saver(root, ALONE, take(root, 1)[0], 0, 0)
    root.rename(tmp_path / "elsewhere")
    root.mkdir()
    failing_save(root, saver, "not the one it was")
    root.rmdir()
    saver.start(9, tensors(9), {"run_id": "x"})
    with pytest.raises(SystemExit, match="not the one it was"):
        saver.finish()
    saver.close()


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_disk_that_is_full_or_read_only_leaves_the_previous_checkpoint(tmp_path, fault):
    with small_disk(tmp_path / "disk", "3m") as disk:
        root = disk / "c"
        (path,) = save(root, 1)
        if fault == "full":
            saver = Saver(root, ALONE, take(root, 1)[0], 0, 0)
            (disk / "ballast").write_bytes(b"x" * (2 << 20))
            failing_save(root, saver, "No space left on device: it takes [0-9,]+ bytes")
            saver.close()
        else:
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
            with pytest.raises(OSError, match="Read-only file system"):
                take(root, 1)
        assert torch.equal(loaded(path)["h.0.w"], tensors(1)["h.0.w"])


def test_writer_that_fails_halfway_leaves_the_previous_checkpoint(tmp_path):
    """The operating system refuses to let a file grow: a real error in the middle of a write."""
    save(tmp_path / "c", 1)
    code = (
        "import resource, sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from tests.test_checkpoints import failing_save, take, Saver, ALONE\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))\n"
        "root = Path(sys.argv[2])\n"
        "failing_save(root, Saver(root, ALONE, take(root, 1)[0], 0, 0), 'File too large')"
    )
    command = [sys.executable, "-c", code, str(ROOT), str(tmp_path / "c")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert torch.equal(loaded(tmp_path / "c/step_00000001")["h.0.w"], tensors(1)["h.0.w"])
