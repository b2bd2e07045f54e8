"""The README does what it says: its commands run, its flags and files exist."""

import json
import os
import re
import subprocess
import sys

import pyarrow as pa
import pytest

from tests.conftest import ROOT, documents

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", README, flags=re.S)


@pytest.fixture
def checkout(tmp_path):
    """A folder that looks like a fresh clone after `make test`, with some text to ingest."""
    for path in ROOT.iterdir():
        if path.suffix == ".py" or path.name == "scripts":
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "docs").mkdir()
    for i, text in enumerate(documents(50, longest=4000)):
        (tmp_path / "docs" / f"{i}.txt").write_text(text)
    (tmp_path / "dumps").mkdir()
    lines = "".join(json.dumps({"text": t}) + "\n" for t in documents(300, 1, longest=4000))
    with pa.CompressedOutputStream(str(tmp_path / "dumps" / "a.jsonl.zst"), "zstd") as out:
        out.write(lines.encode())
    return tmp_path


@pytest.mark.slow
def test_commands_from_text_to_a_model_run_as_written(checkout, monkeypatch):
    (block,) = [b for b in BLOCKS if "scripts/ingest.py" in b]
    # random letters are no prose: without this the default --min-score would leave nothing
    block = block.replace("--lr-total-steps 60", "--lr-total-steps 60 --min-score 0")
    environ = {k: v for k, v in os.environ.items() if k != "LANCE_PRETRAIN_DB"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=checkout,
        env=environ,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "added      350 documents" in done.stdout
    assert "step 60/60" in done.stdout and "bits per byte" in done.stdout
    assert (checkout / "ckpts" / "step_00000060").is_dir()
    assert (checkout / "runs" / "curate" / "report.png").is_file()
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    monkeypatch.chdir(checkout)
    exec(code, found := {})
    assert found["weights"]["wte.weight"].shape == (4096, 128)


def test_shell_blocks_are_valid_shell():
    for block in BLOCKS:
        done = subprocess.run(["bash", "-n", "-c", block], capture_output=True, text=True)
        assert done.returncode == 0, f"{block}\n{done.stderr}"


def test_every_flag_exists():
    """Flags of our own programs, in code or prose, against what --help lists."""
    known = {"--nproc-per-node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"}
    known |= {"--max-restarts", "--shutdown-timeout", "--signal"}  # of torchrun and sbatch
    known |= {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--cpus-per-task", "--index-url"}
    ours = ["train.py", "build_packed_datasets.py"]
    for script in [*ours, *(str(p.relative_to(ROOT)) for p in ROOT.glob("scripts/*.py"))]:
        text = (ROOT / script).read_text()
        if "def main(argv" in text:
            command = [sys.executable, str(ROOT / script), "--help"]
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
            assert done.returncode == 0, done.stderr
            known |= set(re.findall(r"--[a-z][a-z-]+", done.stdout))
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)) - {"--help"} <= known


def test_every_file_it_names_exists():
    named = set(re.findall(r"`((?:scripts/|docs/)?[a-z_]+\.(?:py|md))`", README, flags=re.I))
    assert {"train.py", "NOTES.md"} <= named
    scripts = {p.name for p in ROOT.glob("scripts/*.py")}
    assert all((ROOT / name).exists() or name in scripts for name in named)


def test_make_help_lists_the_two_commands():
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True)
    assert "make demo" in done.stdout and "make test" in done.stdout
