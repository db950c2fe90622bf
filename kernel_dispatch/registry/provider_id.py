"""The numbers of the fourteen providers, as the seed documents gave them."""

from __future__ import annotations

import enum


class ProviderId(enum.IntEnum):
    """GPUs from 0, CPUs from 10, what is special from 20. `BT_` names are the documents' own."""

    CUDA = 0
    MPS = 1
    CUDNN = 2
    CUSPARSELT = 3
    CPU = 10
    MKL = 11
    MKLDNN = 12
    OPENMP = 13
    XEON = 14
    NKI = 20
    TRITON = 21
    MHA = 22
    NNPACK = 23
    OPT_EINSUM = 24
    UNKNOWN = 999

    BT_CUDA = CUDA
    BT_MPS = MPS
    BT_CUDNN = CUDNN
    BT_CUSPARSELT = CUSPARSELT
    BT_CPU = CPU
    BT_MKL = MKL
    BT_MKLDNN = MKLDNN
    BT_OPENMP = OPENMP
    BT_XEON = XEON
    BT_NKI = NKI
    BT_TRITON = TRITON
    BT_MHA = MHA
    BT_NNPACK = NNPACK
    BT_OPT_EINSUM = OPT_EINSUM
    BT_UNKNOWN = UNKNOWN
