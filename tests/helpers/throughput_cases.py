"""The programs of benchmarks/throughput.py, for tests/helpers/group.py to call."""

from benchmarks.throughput_programs import run

__all__ = ["run"]
