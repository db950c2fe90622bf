"""`python -m benchmarks.gpu`."""

import sys

from benchmarks.gpu.command import main

sys.exit(main())
