"""What is said of processes and the page cache, against processes and files that are known."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts import processes
from tests.conftest import wait_for

MEMORY = 100 << 20


@pytest.fixture
def child(tmp_path):
    """A process with a child of its own in another session, which holds 100 MB and 20 files."""
    grandchild = f"import os,time;a=b'x'*{MEMORY};f=[open(os.devnull) for _ in range(20)];"
    grandchild += "open('ready','w').close();time.sleep(99)"
    code = f"import subprocess as s;s.run([{sys.executable!r},'-c',{grandchild!r}],"
    code += "start_new_session=True)"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    wait_for((tmp_path / "ready").exists)
    yield process
    processes.kill(process.pid)
    process.wait()


def test_killing_reaches_descendants_in_other_sessions(child):
    family = processes.descendants(child.pid)
    assert len(family) == 2 and family[0] == child.pid
    processes.kill(child.pid)
    child.wait()
    wait_for(lambda: not Path(f"/proc/{family[1]}").exists())


def test_peaks_are_those_of_all_processes(child):
    whole, launched = (processes.Sampler(child.pid, launched=x).look() for x in (False, True))
    assert MEMORY < launched["pss_bytes"] < whole["pss_bytes"] < MEMORY + (100 << 20)
    assert whole["threads"] == 2 and launched["threads"] == 1
    assert launched["descriptors"] >= 20


def test_bytes_read_are_counted(tmp_path):
    (tmp_path / "data").write_bytes(bytes(1 << 20))
    before, _ = processes.bytes_read()
    (tmp_path / "data").read_bytes()
    assert processes.bytes_read()[0] - before >= 1 << 20


def test_dropped_pages_are_no_longer_in_the_page_cache(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(os.urandom(300 * mmap.PAGESIZE + 1))
    path.read_bytes()
    pages = processes.in_page_cache(path)
    assert pages.shape == (301,) and pages.all()
    (tmp_path / "empty").touch()
    stayed = processes.drop_page_cache([path, tmp_path / "empty"])
    if stayed == 1:
        pytest.skip("this file system keeps its pages (tmpfs)")
    assert stayed == 0 and not processes.in_page_cache(path).any()
    assert processes.drop_page_cache([]) == 0


def test_shared_memory_is_removed_only_where_nobody_has_it_mapped():
    left, used, others = (Path(f"/dev/shm/test_processes_{n}") for n in ("left", "used", "others"))
    try:
        for path in (left, used, others):
            path.write_bytes(b"x")
        assert processes.shared_memory()[left.name] == 1
        mapped = np.memmap(used, np.uint8, "r")
        ours = {name for name in processes.mapped_by("self") if name.startswith("test_processes_")}
        assert ours == {used.name}  # other tests' loaders may have some mapped too
        processes.remove_shared_memory({left.name, used.name})
        assert others.exists() and used.exists() and not left.exists()
        del mapped
    finally:
        for path in (left, used, others):
            path.unlink(missing_ok=True)


def test_what_a_killed_program_had_mapped_is_removed_and_nothing_else(tmp_path):
    mine, others = (Path(f"/dev/shm/test_processes_{name}") for name in ("mine", "others"))
    script = tmp_path / "script.py"
    script.write_text(
        f"import numpy as np, time; open({str(others)!r}, 'wb').write(b'x');"
        f"m = np.memmap({str(mine)!r}, np.uint8, 'w+', shape=1); time.sleep(99)"
    )
    try:
        with processes.folder(tmp_path) as out, pytest.raises(processes.Failed):
            processes.launch([str(script)], 1, out, 10)
        assert others.exists() and not mine.exists()
    finally:
        for path in (mine, others):
            path.unlink(missing_ok=True)


def test_failures_say_why_and_leave_no_directory(tmp_path):
    script = tmp_path / "script.py"
    for code, words in (
        ("raise SystemExit('disk of clay')", "exit status 1: disk of clay"),
        ("import time; print('x'); time.sleep(99)", "not done after 1 s"),
        ("", None),
    ):
        script.write_text(code)
        with processes.folder(tmp_path) as out:
            if words is None:
                assert set(processes.launch([str(script)], 1, out, 60)) >= {"pss_bytes", "sampler"}
                continue
            with pytest.raises(processes.Failed, match=words):
                processes.launch([str(script)], 1, out, 1 if "sleep" in code else 60)
    assert list(tmp_path.iterdir()) == [script]


@pytest.mark.slow
def test_ranks_say_why_above_torchruns_own_lines(tmp_path):
    script = tmp_path / "script.py"
    main = "import os, signal, time; main = os.environ['RANK'] == '0'\n"
    for code, words in (
        ("raise SystemExit('disk of clay' if main else 1)", "exit status 1: disk of clay"),
        (
            "print('at work')\nif main: time.sleep(30)\nos.kill(os.getpid(), signal.SIGKILL)",
            "rank 1 was ended by signal 9",
        ),
    ):
        script.write_text(main + code)
        with processes.folder(tmp_path) as out, pytest.raises(processes.Failed) as failed:
            processes.launch([str(script)], 2, out, 60)
        assert str(failed.value) == words
