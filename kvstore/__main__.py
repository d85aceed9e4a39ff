"""`python -m kvstore` is the same as the `kvstore` command."""

import sys

from kvstore.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
