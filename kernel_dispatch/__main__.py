"""`python -m kernel_dispatch` is the console script `kernel-dispatch`."""

import sys

from kernel_dispatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
