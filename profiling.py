"""A trace of some steps, and what the device says of itself."""

import argparse
import contextlib
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


def first_and_count(text: str) -> tuple[int, int]:
    """An argparse type: START:COUNT, steps to trace."""
    start, _, count = text.partition(":")
    if not (start.isdecimal() and count.isdecimal() and int(start) and int(count)):
        raise argparse.ArgumentTypeError(f"{text}: give START:COUNT, such as 20:3")
    return int(start), int(count)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument_group("profiling").add_argument(
        "--profile",
        type=first_and_count,
        default=(0, 0),
        metavar="START:COUNT",
        help="write a trace of these steps (and a GPU's memory history) into the run directory",
    )


class Profile:
    """Traces ``count`` of the main rank's steps from ``first`` on; ``stop`` when the run ends."""

    def __init__(
        self, first: int, count: int, run_dir: Path, device: torch.device, is_main: bool
    ) -> None:
        self.steps = range(first, first + count * is_main)
        self.run_dir, self.device = run_dir, device
        self.profiler: profile | None = None

    def due(self, step: int) -> bool:
        """Whether tracing begins or ends before this step."""
        return (step in self.steps) != (self.profiler is not None)

    def turn(self, step: int) -> list[str]:
        """Begin or end. Returns what to say. Raises OSError where the trace cannot be written."""
        if step in self.steps:
            gpu = self.device.type == "cuda"
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * gpu
            self.profiler = profile(activities=activities, record_shapes=True)
            if gpu:
                torch.cuda.memory._record_memory_history(max_entries=200_000)
            self.profiler.start()
            self.first = step
            return []
        return self.stop()

    def stop(self) -> list[str]:
        if self.profiler is None:
            return []
        profiler, self.profiler = self.profiler, None
        profiler.stop()
        trace = self.run_dir / f"trace_step_{self.first:08}.json.gz"
        profiler.export_chrome_trace(str(trace))
        lines = [f"profile        {trace} (open it in ui.perfetto.dev)"]
        if self.device.type == "cuda":
            history = self.run_dir / f"memory_step_{self.first:08}.pickle"
            torch.cuda.memory._dump_snapshot(str(history))
            torch.cuda.memory._record_memory_history(enabled=None)
            lines.append(f"{'':<15}{history} (open it in pytorch.org/memory_viz)")
        return lines


def device_readings(device: torch.device) -> dict[str, float]:
    """Power in W, clock of the compute units in MHz, temperature in degrees C, and the vendor's
    bits of why it runs slower, where its library (nvidia-ml-py, amdsmi) is there; {} on a CPU."""
    if device.type != "cuda":
        return {}
    amd = torch.version.hip is not None  # its library counts power in W, NVIDIA's in mW
    readings = {
        "power_w": lambda: torch.cuda.power_draw(device) * (1 if amd else 1e-3),
        "clock_mhz": lambda: torch.cuda.clock_rate(device),
        "temperature_c": lambda: torch.cuda.temperature(device),
        "throttle_bits": lambda: _throttle_amd(device) if amd else _throttle_nvidia(device),
    }
    found = {}
    for name, read in readings.items():
        # a missing library, driver or sensor is no reason to stop a run
        with contextlib.suppress(Exception):
            found[name] = float(read())
            if name != "throttle_bits" and found[name] <= 0:  # torch's word for AMD's "N/A"
                del found[name]
    return found


def _throttle_nvidia(device: torch.device) -> int:
    import pynvml

    handle = torch.cuda._get_pynvml_handler(device)
    return pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)


def _throttle_amd(device: torch.device) -> int:
    import amdsmi

    handle = torch.cuda._get_amdsmi_handler(device)
    return amdsmi.amdsmi_get_gpu_metrics_info(handle)["throttle_status"]
