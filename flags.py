"""The command line: one-line errors, and the integer types that flags share."""

import argparse
import importlib
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        """The help, with the default where there is one to speak of."""
        silent = action.default is None or action.default is False or action.default == ""
        return action.help if silent else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """argparse that shows the module's docstring and the defaults, and has errors of one line."""

    def __init__(self, doc: str | None, usage: str = "%(prog)s [flags]") -> None:
        super().__init__(description=doc, usage=usage, formatter_class=_Help, allow_abbrev=False)

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def dest(flag: str) -> str:
    """argparse's name of ``flag``: --grad-clip is grad_clip."""
    return flag.removeprefix("--").replace("-", "_")


def given(
    args: argparse.Namespace, parser: argparse.ArgumentParser, flags: Iterable[str]
) -> list[str]:
    """Those of ``flags`` that have another value than their default."""
    return [f for f in flags if getattr(args, dest(f)) != parser.get_default(dest(f))]


def require_package(module: str, asked_by: str, install: str) -> ModuleType:
    """The module of an optional package. Raises SystemExit, with how to get it, without one."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SystemExit(f"{asked_by} needs the package: pip install {install} ({error})") from None


@contextmanager
def interruptible(stays: str) -> Iterator[None]:
    """Ctrl-C inside ends the script with status 130 and one line, which says what ``stays``."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"interrupted: {stays}", file=sys.stderr)
        raise SystemExit(130) from None


def not_empty(text: str) -> str:
    """An argparse type: some text. An unset shell variable must not mean the default."""
    if not text.strip():
        raise argparse.ArgumentTypeError("empty: give a value, or leave the flag out")
    return text


def finite(text: str) -> float:
    """An argparse type: a number that is neither NaN nor infinite."""
    if not math.isfinite(float(text)):
        raise argparse.ArgumentTypeError(f"{text}: give a finite number")
    return float(text)


def seed(text: str) -> int:
    """An argparse type: an integer from 0 to 2^63 - 1."""
    if not 0 <= int(text) < 2**63:
        raise argparse.ArgumentTypeError(f"{text}: give an integer from 0 to 2^63 - 1")
    return int(text)


def fraction(text: str) -> float:
    """An argparse type: a number from 0 to 1."""
    if not 0 <= float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text}: give a number from 0 to 1")
    return float(text)


def magnitude(text: str) -> float:
    """An argparse type: a finite number of at least 0."""
    if not 0 <= float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: give a finite number of at least 0")
    return float(text)


def positive(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give at least 1")
    return int(text)


def at_least_two(text: str) -> int:
    """An argparse type: an integer of at least 2."""
    if int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text}: give at least 2")
    return int(text)


def not_negative(text: str) -> int:
    """An argparse type: an integer of at least 0."""
    if int(text) < 0:
        raise argparse.ArgumentTypeError(f"{text}: give at least 0")
    return int(text)
