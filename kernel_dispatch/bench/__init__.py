"""The benchmark harness: contenders side by side on one workload, verified before they are timed.

`python -m kernel_dispatch bench` is its command line; these names are its Python API.
"""

from kernel_dispatch.bench.contender import Contender, ContenderWarning
from kernel_dispatch.bench.results import Row, Run
from kernel_dispatch.bench.workload import Case, Workload

__all__ = ["Case", "Contender", "ContenderWarning", "Row", "Run", "Workload"]
