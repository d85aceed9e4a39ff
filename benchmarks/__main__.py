"""Everything that is measured on this machine: `kvstore bench`, then the cost of a miss where vLLM is installed."""

from __future__ import annotations

import importlib.util
import sys

from benchmarks import miss_overhead
from kvstore import cli


def main() -> int:
    """Options go to `kvstore bench`; with -o json both print a document. The first exit code that is not 0."""
    code = cli.main(["bench", *sys.argv[1:]])
    if code == cli.OK and importlib.util.find_spec("vllm") is not None:
        code = miss_overhead.main(["-o", "json"] if "json" in sys.argv else [])
    return code


if __name__ == "__main__":
    sys.exit(main())
