"""A few random kills; `make chaos` has more."""

import pytest

from tests.conftest import run


@pytest.mark.slow
def test_killed_run_trains_every_global_batch_once_and_in_order(tmp_path):
    work = str(tmp_path / "chaos")
    done = run("tests/chaos.py", "--kills", "4", "--work", work, cwd=tmp_path, timeout=550)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same 200 steps after 4 kills" in done.stdout
