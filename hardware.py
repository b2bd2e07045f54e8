"""The machine: device choice, dense bf16 peaks for MFU, ROCm environment plan, process group."""

import argparse
import ctypes
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, MutableMapping, Set
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

import torch

from distributed import World

# Dense (no 2:4 sparsity) bf16 matrix peaks in TFLOP/s, by the exact name that torch reports. A
# prefix match would give an H100 PCIe the figure of an SXM, and a wrong MFU is worse than none.
# fmt: off
_NVIDIA = {
    # A100, A800, A30, A10, A40 datasheets; A10G datasheet (AWS); GA102 whitepaper (RTX A6000)
    "NVIDIA A100-SXM4-40GB": 312.0, "NVIDIA A100-SXM4-80GB": 312.0, "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0, "NVIDIA A800-SXM4-40GB": 312.0, "NVIDIA A800-SXM4-80GB": 312.0,
    "NVIDIA A800 80GB PCIe": 312.0, "NVIDIA A30": 165.0, "NVIDIA A10": 125.0, "NVIDIA A10G": 70.0,
    "NVIDIA A40": 149.7, "NVIDIA RTX A6000": 154.8,
    # Ada GPU architecture whitepaper v2 (RTX 6000 Ada); L4, L40, L40S datasheets
    "NVIDIA RTX 6000 Ada Generation": 364.2, "NVIDIA L4": 121.0, "NVIDIA L40": 181.05,
    "NVIDIA L40S": 362.05,
    # H100, H200, GH200 datasheets, which print the sparse figures 1,979, 1,513 and 1,671
    "NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H100 PCIe": 756.5, "NVIDIA H100 NVL": 835.5,
    "NVIDIA H200": 989.4, "NVIDIA H200 NVL": 835.5, "NVIDIA GH200 480GB": 989.4,
    "NVIDIA GH200 120GB": 989.4,
    # HGX B200/B300 (sparse 36,000 of 8 GPUs), GB200/GB300 NVL72 (360,000 of 72) datasheets
    "NVIDIA B200": 2250.0, "NVIDIA B300 SXM6 AC": 2250.0, "NVIDIA GB200": 2500.0,
    "NVIDIA GB300": 2500.0,
    # GA102, Ada, RTX Blackwell whitepapers: with FP32 accumulate, which torch uses for bf16; on
    # GeForce that is half of the advertised figure, which accumulates in FP16
    "NVIDIA GeForce RTX 3090": 71.0, "NVIDIA GeForce RTX 3090 Ti": 80.0,
    "NVIDIA GeForce RTX 4080": 97.5, "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 5080": 112.6, "NVIDIA GeForce RTX 5090": 209.5,
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": 503.8,
}
# With the compute units of the whole device, as CPX, DPX and QPX partitions keep its name. AMD
# Instinct MI200, MI300, MI350 data sheets; names: libdrm amdgpu.ids; VF: a GPU passed to a VM.
# torch sees one GCD of a MI250 or MI250X, which is half of what the sheet says.
_AMD = {
    "AMD Instinct MI210": (181.0, 104), "AMD Instinct MI250": (181.0, 104),
    "AMD Instinct MI250X": (191.5, 110), "AMD Instinct MI300A": (980.6, 228),
    "AMD Instinct MI300X": (1307.4, 304), "AMD Instinct MI300X VF": (1307.4, 304),
    "AMD Instinct MI325X": (1307.4, 304),
    "AMD Instinct MI350X": (2306.9, 256), "AMD Instinct MI350X VF": (2306.9, 256),
    "AMD Instinct MI355X": (2516.6, 256), "AMD Instinct MI355X VF": (2516.6, 256),
}
# fmt: on
PEAK_BF16_TFLOPS: dict[str, float] = _NVIDIA | {name: peak for name, (peak, _) in _AMD.items()}
# PCI id 740c is two cards under one name; only the compute units say which.
_SHARED = {"AMD Instinct MI250X/MI250": {104: "AMD Instinct MI250", 110: "AMD Instinct MI250X"}}

TUNING = "rocm.docs.amd.com/en/latest/how-to/rocm-for-ai/inference-optimization/workload.html"
TRAINING = "rocm.docs.amd.com/en/latest/how-to/rocm-for-ai/training/train-a-model.html"
RCCL_TIPS = "rocm.docs.amd.com/projects/rccl/en/latest/how-to/rccl-usage-tips.html"
PRIMUS = "github.com/AMD-AGI/Primus: runner/helpers/envs/base_env.sh"
BF16_FLAGS = {"amx_bf16", "avx512_bf16", "bf16"}  # x86 and Arm CPUs that multiply bf16
PACKAGES = ("torch", "lancedb", "pylance", "pyarrow", "numpy", "transformers", "tokenizers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument group "hardware"."""
    add = parser.add_argument_group("hardware").add_argument
    devices = ("auto", "cuda", "cpu")
    add("--device", choices=devices, default="auto", help="cuda is also ROCm")
    about = "of products; auto: bf16 where the device has it. Weights stay float32"
    add("--dtype", choices=("auto", "fp32", "bf16"), default="auto", help=about)
    about = "time-out of a collective, seconds"
    add("--dist-timeout", type=float, default=600.0, metavar="SECONDS", help=about)


def backend_name() -> str:
    """What torch was built for: "cuda", "rocm" or "cpu-only". Touches no device."""
    return "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu-only"


def choose_device(name: str, local_rank: int) -> torch.device:
    """This rank's device; `name`: auto, cuda (also ROCm), cpu. Call after `apply_environment`."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SystemExit(
            f"--device {name}: this torch ({torch.__version__}, {backend_name()}) sees no GPU: use "
            "--device cpu, or a CUDA or ROCm build from https://pytorch.org/get-started/locally"
        )
    if local_rank >= (count := torch.cuda.device_count()):
        raise SystemExit(f"local rank {local_rank}: {count} GPUs, use --nproc-per-node {count}")
    return torch.device("cuda", local_rank)


def autocast_dtype(
    name: str, device: torch.device, cpu_flags: Set[str] | None = None
) -> tuple[torch.dtype | None, str]:
    """The dtype of products under `--dtype name`, None for float32, and what to say of it.

    `cpu_flags` are those of /proc/cpuinfo (None: this machine's). Float32 means float32: TF32 is
    torch's to leave off, and is.
    """
    if device.type == "cuda":
        has = "the GPU has it" if torch.cuda.is_bf16_supported(including_emulation=False) else ""
    else:
        if cpu_flags is None:
            found = re.search(r"^(?:flags|Features)\s*: (.+)$", _read(Path("/proc/cpuinfo")), re.M)
            cpu_flags = set(found.group(1).split()) if found else set()
        has = ", ".join(sorted(cpu_flags & BF16_FLAGS))
    if name == "bf16" or (name == "auto" and has):
        return torch.bfloat16, f"bf16 products, float32 weights ({has or '--dtype bf16'})"
    reason = "--dtype fp32" if name == "fp32" else "no bf16 instructions"
    return None, f"float32 products, TF32 off ({reason})"


def peak_flops(name: str, *, multiprocessors: int | None = None) -> float | None:
    """Dense bf16 peak in FLOP/s of the device called `name`; the sources stand at the tables.

    None if unknown, as every MIG slice is ("NVIDIA A100-SXM4-40GB MIG 1g.5gb"), or if
    `multiprocessors` (compute units) shows a partition of an AMD device.
    """
    name = _SHARED.get(name, {}).get(multiprocessors, name)
    whole = _AMD[name][1] if name in _AMD else multiprocessors
    if name not in PEAK_BF16_TFLOPS or multiprocessors not in (None, whole):
        return None
    return PEAK_BF16_TFLOPS[name] * 1e12


def device_peak_flops(device: torch.device) -> float | None:
    """`peak_flops` of a torch device in FLOP/s; None on a CPU."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return peak_flops(properties.name, multiprocessors=properties.multi_processor_count)


@dataclass(frozen=True)
class Facts:
    """What the environment plan depends on."""

    backend: str = "cpu-only"  # as `backend_name`
    arch: str | None = None  # LLVM target of the GPUs: gfx90a (MI200), gfx942 (MI300), gfx950
    compute_units: int = 0  # of one GPU or partition
    node_gpus: int = 0  # GPUs or partitions on this node, used or not
    xgmi: bool = False  # GPUs are linked by Infinity Fabric, not by PCIe alone
    world_size: int = 1
    local_world_size: int = 1

    @property
    def mi300x_node(self) -> bool:
        """Eight whole MI300X or MI325X (one die); MI300A and MI308X have fewer compute units."""
        return (self.arch, self.compute_units, self.node_gpus) == ("gfx942", 304, 8)


@dataclass(frozen=True)
class Setting:
    """A variable of the plan. `kept` is the value that the user had set, which wins."""

    name: str
    value: str
    reason: str
    source: str
    kept: str | None = None

    def __str__(self) -> str:
        value = self.value if self.kept is None else f"{self.kept} kept (plan: {self.value})"
        return f"{self.name}={value}  {self.reason}  [{self.source}]"


def environment_plan(facts: Facts, environ: Mapping[str, str]) -> list[Setting]:
    """What AMD recommends for a plain DDP job on this machine; empty unless torch is for ROCm.

    Left to the site: NCCL_IB_* (its network cards), HSA_NO_SCRATCH_RECLAIM, RCCL_MSCCL_ENABLE
    (workarounds for some models and old releases).
    """
    if facts.backend != "rocm" or facts.arch is None:
        return []
    several = facts.world_size > 1 and facts.arch in ("gfx90a", "gfx942", "gfx950")
    eight = facts.mi300x_node and facts.local_world_size == 8
    pcie = facts.local_world_size > 1 and not facts.xgmi
    kernarg = "kernel arguments in GPU memory: shorter launches"
    queues = "default 4; DDP computes on one stream and reduces on another"
    table = (
        (facts.arch == "gfx942", "HIP_FORCE_DEV_KERNARG", "1", kernarg, TUNING),
        (several, "TORCH_NCCL_HIGH_PRIORITY", "1", "all-reduce overlaps with backward", TRAINING),
        (several, "GPU_MAX_HW_QUEUES", "2", queues, PRIMUS),
        (eight, "NCCL_MIN_NCHANNELS", "112", "more channels over all xGMI links", TUNING),
        (pcie, "HSA_FORCE_FINE_GRAIN_PCIE", "1", "peer-to-peer access over PCIe", RCCL_TIPS),
    )
    return [Setting(*row, kept=environ.get(row[0])) for when, *row in table if when]


def environment_notice(facts: Facts) -> str | None:
    """A warning when 2 to 7 GPUs of an eight-GPU MI300X node are used."""
    used = facts.local_world_size
    if facts.backend != "rocm" or not facts.mi300x_node or not 2 <= used <= 7:
        return None
    why = "each pair has its own link, so collectives get a part of the node's bandwidth"
    return f"{used} of 8 MI300X: {why}; use 1 or 8, or try NCCL_MIN_NCHANNELS=32  [{RCCL_TIPS}]"


def _read(path: Path) -> str:
    """A file of /proc or /sys; empty where it is missing or a container forbids it."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _properties(path: Path) -> dict[str, int]:
    """A KFD topology file, lines of "key number"."""
    return {k: int(v) for k, v in re.findall(r"^(\w+) (\d+)$", _read(path), re.MULTILINE)}


def collect_facts(
    world: World, topology: Path = Path("/sys/class/kfd/kfd/topology/nodes")
) -> Facts:
    """The facts of this node from sysfs, without initialising HIP."""
    nodes = {int(p.parent.name): _properties(p) for p in topology.glob("*/properties")}
    nodes = {i: n for i, n in nodes.items() if n.get("gfx_target_version")}  # 0 is a CPU
    units = {i: n.get("simd_count", 0) // max(n.get("simd_per_cu", 1), 1) for i, n in nodes.items()}
    best = max(units, key=units.__getitem__, default=-1)  # an integrated GPU is the smaller one
    target = nodes[best]["gfx_target_version"] if nodes else 0  # 90402 is gfx942, 90010 gfx90a
    gpus = {i for i, n in nodes.items() if n["gfx_target_version"] == target}
    links = [_properties(p) for i in gpus for p in topology.glob(f"{i}/io_links/*/properties")]
    return Facts(
        backend=backend_name(),
        arch=f"gfx{target // 10000}{target // 100 % 100:x}{target % 100:x}" if target else None,
        compute_units=units.get(best, 0),
        node_gpus=len(gpus),
        xgmi=any(n.get("type") == 11 and n.get("node_to") in gpus for n in links),  # 11 is xGMI
        world_size=world.size,
        local_world_size=world.local_size,
    )


def apply_environment(world: World, environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """Set what the plan wants and the user has not set; returns the lines to print.

    Call it first: HIP and RCCL read these variables once, when they initialise.
    """
    facts = collect_facts(world)
    plan = environment_plan(facts, environ)
    for setting in plan:
        environ.setdefault(setting.name, setting.value)
    return [str(line) for line in [*plan, environment_notice(facts)] if line]


def keep_freed_memory(device: torch.device) -> None:
    """On a CPU, have malloc keep what tensors free for the next ones, as a GPU's allocator does.

    glibc gives large blocks back to the kernel at once, which then has to clear them anew page by
    page in every step. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if device.type == "cpu" and sys.platform == "linux" and mallopt is not None:
        trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD, M_MMAP_MAX of malloc.h
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**31 - 1)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a GPU's allocator or the CPU's had no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def cpu_threads(local_world_size: int, environ: Mapping[str, str] = os.environ) -> int | None:
    """Threads per rank for `torch.set_num_threads`: usable cores // local ranks. None: leave it.

    torchrun sets OMP_NUM_THREADS=1 where it was unset and there are several ranks. A user's own 1
    looks the same; it is taken for torchrun's, since one thread is rarely meant. Others win.
    """
    chosen = environ.get("OMP_NUM_THREADS")
    from_torchrun = chosen == "1" and "TORCHELASTIC_RUN_ID" in environ
    if local_world_size <= 1 or (chosen is not None and not from_torchrun):
        return None
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)


def _git(*arguments: str) -> str | None:
    """Output of git in the project's directory; None without git or outside a repository."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), *arguments]
    try:
        return subprocess.check_output(
            command, text=True, stderr=subprocess.DEVNULL, timeout=10
        ).strip()
    except (OSError, subprocess.SubprocessError):
        return None


def describe_environment(device: torch.device) -> dict[str, object]:
    """Versions, machine and state of the code, JSON-able; memory in bytes; unknown is None."""
    changes = _git("status", "--porcelain", "--untracked-files=no")
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    cpu = re.search(r"^model name\s*: (.+)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    drivers = [_read(Path(f"/sys/module/{name}/version")).strip() for name in ("nvidia", "amdgpu")]
    return {
        "python": platform.python_version(),
        **{p: next((d.version for d in distributions(name=p)), None) for p in PACKAGES},
        "os": platform.platform(),
        "hostname": socket.gethostname(),
        "cpu": cpu.group(1) if cpu else platform.processor() or None,
        "cpu_cores": os.cpu_count(),
        "backend": backend_name(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "driver": drivers[0] or drivers[1] or None,
        "device": str(device),
        "device_name": gpu.name if gpu else None,
        "device_count": torch.cuda.device_count() if gpu else 0,
        "device_memory_bytes": gpu.total_memory if gpu else None,
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": None if changes is None else bool(changes),
        "command": sys.orig_argv,
    }
