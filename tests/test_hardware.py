"""Peaks, environment plan, ranks and process group, on facts passed in and real subprocesses."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import hardware
from distributed import World
from hardware import Facts

ROOT = Path(hardware.__file__).resolve().parent
MI300X = Facts("rocm", "gfx942", 304, 8, True, 8, 8)


def planned(facts, environ=None):
    return {s.name: s.value for s in hardware.environment_plan(facts, environ or {})}


# Units x dense bf16 FLOP per clock and unit x boost clock: not the datasheet's own bf16 row.
@pytest.mark.parametrize(
    ("name", "units", "flop_per_clock", "ghz"),
    [
        ("NVIDIA A100-SXM4-80GB", 108, 2048, 1.41),
        ("NVIDIA A30", 56, 2048, 1.44),
        ("NVIDIA A10", 72, 1024, 1.695),
        ("NVIDIA A10G", 80, 512, 1.71),
        ("NVIDIA RTX A6000", 84, 1024, 1.8),
        ("NVIDIA H100 80GB HBM3", 132, 4096, 1.83),
        ("NVIDIA H100 PCIe", 114, 4096, 1.62),
        ("NVIDIA H200", 132, 4096, 1.83),
        ("NVIDIA L4", 58, 1024, 2.04),
        ("NVIDIA L40S", 142, 1024, 2.49),
        ("NVIDIA RTX 6000 Ada Generation", 142, 1024, 2.505),
        ("NVIDIA GeForce RTX 3090", 82, 512, 1.695),
        ("NVIDIA GeForce RTX 3090 Ti", 84, 512, 1.86),
        ("NVIDIA GeForce RTX 4080", 76, 512, 2.505),
        ("NVIDIA GeForce RTX 4090", 128, 512, 2.52),
        ("NVIDIA GeForce RTX 5080", 84, 512, 2.617),
        ("NVIDIA GeForce RTX 5090", 170, 512, 2.407),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 188, 1024, 2.617),
        ("AMD Instinct MI210", 104, 1024, 1.7),
        ("AMD Instinct MI250X", 110, 1024, 1.7),
        ("AMD Instinct MI300A", 228, 2048, 2.1),
        ("AMD Instinct MI300X", 304, 2048, 2.1),
        ("AMD Instinct MI325X", 304, 2048, 2.1),
        ("AMD Instinct MI350X", 256, 4096, 2.2),
        ("AMD Instinct MI355X", 256, 4096, 2.4),
    ],
)
def test_peak_agrees_with_units_times_clock(name, units, flop_per_clock, ghz):
    expected = units * flop_per_clock * ghz * 1e9
    assert hardware.peak_flops(name, multiprocessors=units) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA A100 80GB PCIe MIG 1g.10gb",
        "NVIDIA H100",  # says neither SXM nor PCIe
        "nvidia a100-sxm4-40gb",
        "NVIDIA A1000",
        "AMD Instinct MI300X HF",
        "AMD Instinct MI250X/MI250",  # either of two cards while the compute units are unknown
        "",
    ],
)
def test_unknown_or_partitioned_name_has_no_peak(name):
    assert hardware.peak_flops(name) is None


@pytest.mark.parametrize("units", [38, 76, 152])  # CPX, QPX, DPX
def test_partition_of_an_mi300x_has_no_peak(units):
    assert hardware.peak_flops("AMD Instinct MI300X", multiprocessors=units) is None


def test_name_shared_by_two_cards_is_told_apart_by_compute_units():
    peaks = [
        hardware.peak_flops("AMD Instinct MI250X/MI250", multiprocessors=units)
        for units in (104, 110, 52)
    ]
    assert peaks == [181.0e12, 191.5e12, None]


def test_cpu_has_no_peak():
    assert hardware.device_peak_flops(torch.device("cpu")) is None


def test_plan_for_a_whole_mi300x_node():
    assert planned(MI300X) == {
        "HIP_FORCE_DEV_KERNARG": "1",
        "TORCH_NCCL_HIGH_PRIORITY": "1",
        "GPU_MAX_HW_QUEUES": "2",
        "NCCL_MIN_NCHANNELS": "112",
    }
    assert hardware.environment_notice(MI300X) is None


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (Facts("cuda", None, 0, 0, False, 8, 8), set()),
        (Facts("cpu-only", None, 0, 0, False, 4, 4), set()),
        (Facts("rocm", None, 0, 0, False, 8, 8), set()),  # the topology is hidden
        (Facts("rocm", "gfx942", 304, 8, True, 1, 1), {"HIP_FORCE_DEV_KERNARG"}),
        (
            Facts("rocm", "gfx90a", 110, 8, True, 8, 8),
            {"TORCH_NCCL_HIGH_PRIORITY", "GPU_MAX_HW_QUEUES"},
        ),
        (
            Facts("rocm", "gfx950", 256, 8, True, 8, 8),
            {"TORCH_NCCL_HIGH_PRIORITY", "GPU_MAX_HW_QUEUES"},
        ),
        (Facts("rocm", "gfx1100", 96, 2, False, 2, 2), {"HSA_FORCE_FINE_GRAIN_PCIE"}),
    ],
)
def test_plan_differs_by_architecture_and_ranks(facts, expected):
    assert set(planned(facts)) == expected


def test_channels_are_not_raised_on_fewer_compute_units_than_channels_need():
    mi308x = Facts("rocm", "gfx942", 80, 8, True, 8, 8)
    partitioned = Facts("rocm", "gfx942", 38, 64, True, 8, 8)
    assert "NCCL_MIN_NCHANNELS" not in planned(mi308x) | planned(partitioned)


@pytest.mark.parametrize("used", range(1, 9))
def test_notice_names_a_partly_used_mi300x_node(used):
    facts = Facts("rocm", "gfx942", 304, 8, True, used, used)
    notice = hardware.environment_notice(facts)
    if 2 <= used <= 7:
        assert notice.startswith(f"{used} of 8 MI300X") and "\n" not in notice
    else:
        assert notice is None


def test_every_setting_shows_reason_and_source():
    for setting in hardware.environment_plan(MI300X, {}):
        assert str(setting).startswith(f"{setting.name}={setting.value}  ")
        assert setting.reason in str(setting) and f"[{setting.source}]" in str(setting)


def test_values_set_by_the_user_win(monkeypatch):
    monkeypatch.setattr(hardware, "collect_facts", lambda environ: MI300X)
    environ = {"NCCL_MIN_NCHANNELS": "64", "GPU_MAX_HW_QUEUES": ""}
    lines = hardware.apply_environment(World(local_size=2, size=2), environ)
    assert environ["NCCL_MIN_NCHANNELS"] == "64" and environ["GPU_MAX_HW_QUEUES"] == ""
    assert environ["TORCH_NCCL_HIGH_PRIORITY"] == "1"
    assert any(line.startswith("NCCL_MIN_NCHANNELS=64 kept (plan: 112)") for line in lines)


def test_nothing_is_set_where_there_is_no_rocm(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    environ = {}
    assert hardware.apply_environment(World(), environ) == [] and environ == {}


def write_node(topology, index, properties, links=()):
    node = topology / str(index)
    node.mkdir(parents=True)
    (node / "properties").write_text("".join(f"{k} {v}\n" for k, v in properties.items()))
    for number, (kind, to) in enumerate(links):
        link = node / "io_links" / str(number)
        link.mkdir(parents=True)
        (link / "properties").write_text(f"type {kind}\nnode_from {index}\nnode_to {to}\n")


@pytest.mark.parametrize(
    ("target", "arch"),
    [(90402, "gfx942"), (90010, "gfx90a"), (90500, "gfx950"), (110000, "gfx1100")],
)
def test_facts_come_from_the_kfd_topology(tmp_path, monkeypatch, target, arch):
    monkeypatch.setattr(torch.version, "hip", "7.1.0")
    write_node(tmp_path, 0, {"cpu_cores_count": 96, "simd_count": 0, "gfx_target_version": 0})
    gpu = {"simd_count": 1216, "simd_per_cu": 4, "gfx_target_version": target}
    write_node(tmp_path, 1, gpu, [(2, 0), (11, 2)])
    write_node(tmp_path, 2, gpu, [(2, 0), (11, 1)])
    integrated = {"simd_count": 4, "simd_per_cu": 2, "gfx_target_version": 100306}
    write_node(tmp_path, 3, integrated)
    facts = hardware.collect_facts(World(3, 4, 1, 2), tmp_path)
    assert facts == Facts("rocm", arch, 304, 2, True, 4, 2)


def test_gpus_linked_by_pcie_alone_are_not_xgmi(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.1.0")
    gpu = {"simd_count": 192, "simd_per_cu": 2, "gfx_target_version": 110000}
    write_node(tmp_path, 1, gpu, [(2, 0)])
    write_node(tmp_path, 2, gpu, [(2, 0), (11, 0)])  # a link to a CPU joins no GPUs
    assert not hardware.collect_facts(World(), tmp_path).xgmi


def test_cpu_threads_share_the_cores_unless_the_user_chose(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    torchrun = {"TORCHELASTIC_RUN_ID": "none"}
    assert hardware.cpu_threads(1, {}) is None
    assert hardware.cpu_threads(4, {}) == 3
    assert hardware.cpu_threads(4, torchrun | {"OMP_NUM_THREADS": "1"}) == 3
    assert hardware.cpu_threads(4, torchrun | {"OMP_NUM_THREADS": "2"}) is None
    assert hardware.cpu_threads(4, {"OMP_NUM_THREADS": "1"}) is None
    assert hardware.cpu_threads(64, {}) == 1


def test_auto_takes_the_cpu_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hardware.choose_device("auto", 0) == torch.device("cpu")
    assert hardware.choose_device("cpu", 5) == torch.device("cpu")


def test_cuda_without_a_gpu_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="--device cuda.*CUDA or ROCm build") as refusal:
        hardware.choose_device("cuda", 0)
    assert "\n" not in str(refusal.value)


def test_more_local_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert hardware.choose_device("auto", 1) == torch.device("cuda", 1)
    with pytest.raises(SystemExit, match="local rank 2.*--nproc-per-node 2"):
        hardware.choose_device("auto", 2)


def test_arguments_have_defaults_that_need_no_flags():
    parser = argparse.ArgumentParser()
    hardware.add_arguments(parser)
    args = parser.parse_args([])
    assert (args.device, args.dist_timeout) == ("auto", 600.0)
    assert parser.parse_args(["--dist-timeout", "30"]).dist_timeout == 30.0


def test_description_is_json_and_names_the_versions():
    about = hardware.describe_environment(torch.device("cpu"))
    assert json.loads(json.dumps(about)) == about
    assert about["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert about["device"] == "cpu" and about["device_count"] == 0
    assert about["cpu_cores"] == os.cpu_count() and about["command"] == sys.orig_argv


def test_missing_package_and_missing_git_are_none(monkeypatch):
    monkeypatch.setattr(hardware, "PACKAGES", ("no-such-package",))
    monkeypatch.setenv("PATH", "/nonexistent")
    about = hardware.describe_environment(torch.device("cpu"))
    assert about["no-such-package"] is None
    assert about["git_commit"] is None and about["git_dirty"] is None


@pytest.mark.parametrize(
    ("name", "flags", "expected", "reason"),
    [
        ("auto", {"avx2", "avx512_bf16"}, torch.bfloat16, "avx512_bf16"),
        ("auto", {"amx_bf16", "avx512_bf16"}, torch.bfloat16, "amx_bf16, avx512_bf16"),
        ("auto", {"asimd", "bf16"}, torch.bfloat16, "bf16"),
        ("auto", {"avx2"}, None, "no bf16 instructions"),
        ("bf16", {"avx2"}, torch.bfloat16, "--dtype bf16"),
        ("fp32", {"amx_bf16"}, None, "--dtype fp32"),
    ],
)
def test_products_are_bf16_where_the_cpu_has_it_and_the_reason_is_said(
    name, flags, expected, reason
):
    dtype, line = hardware.autocast_dtype(name, torch.device("cpu"), flags)
    assert dtype == expected and line.endswith(f"({reason})")


@pytest.mark.parametrize("keep", [False, True])
def test_freed_memory_is_kept_on_a_cpu(keep):
    code = (
        "import resource, sys, torch, hardware\n"
        "if sys.argv[1] == 'True': hardware.keep_freed_memory(torch.device('cpu'))\n"
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "torch.ones(10_000_000); before = faults()\n"
        "for _ in range(40): torch.ones(10_000_000)\n"
        "print(faults() - before)"
    )
    command = [sys.executable, "-c", code, str(keep)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    pages = 40 * 40_000_000 // os.sysconf("SC_PAGE_SIZE")
    assert int(done.stdout) < pages / 4 if keep else int(done.stdout) > pages / 2
