"""Machines from data sheets, and the one that this job runs on."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from .machine import H100, Machine, tensor_core_rates
from .network import INFINIBAND, Level, nvlink

# From NVIDIA's data sheets: dense operations per second in 16 bit, in TF32 and in 8 bit, bytes per
# second of memory, of NVLink each way, of a GPU's adapter, and of its link to host memory each way.
# As with the H100, products reach about seven tenths of that, copies and links eight tenths. The
# limits of NCCL's LL are its own.
A100 = replace(  # 312 and 156 TFLOP/s, 2.04 TB/s, 300 GB/s; PCIe 4, 32 GB/s; DGX A100: 200 Gbit/s
    H100,
    name="A100",
    flops=tensor_core_rates(218e12),
    bandwidth=1.63e12,
    host_bandwidth=25e9,
    intra=Level(240e9, protocols=nvlink(87.7e9)),
    inter=Level(21e9, protocols=INFINIBAND),
)
H200 = replace(H100, name="H200", bandwidth=3.84e12)  # an H100 with 4.8 TB/s
B200 = replace(  # 2,250, 1,125, 4,500 TFLOP/s, 8 TB/s, 900 GB/s; a DGX B200 has 400 Gbit/s
    H100,
    name="B200",
    flops=tensor_core_rates(1575e12, 3150e12),
    bandwidth=6.4e12,
    intra=Level(720e9, protocols=nvlink(282e9)),
)
# 2,500, 1,250, 5,000 TFLOP/s; NVLink joins a rack of 72 GPUs, 400 Gbit/s beyond. NVLink-C2C to the
# Grace CPU: 900 GB/s, half of it each way, shared by two GPUs.
GB200 = replace(
    B200,
    name="GB200",
    flops=tensor_core_rates(1750e12, 3500e12),
    host_bandwidth=180e9,
    ranks_per_node=72,
)

_DEVICES = (GB200, B200, H200, H100, A100)  # a name may contain a later one's


def job_machine() -> Machine:
    """Return the machine that estimates are for by default.

    Rates and links are those of the current CUDA device, found by its name. An unknown device, or
    none, counts as an H100, and the machine's name shows that. A node has ``LOCAL_WORLD_SIZE``
    ranks, which torchrun sets, else as many as the device's usual node. Ranks compare the machine
    before they run a plan made with it.
    """
    machine, why = _by_name()
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = int(local) if local.isdecimal() and int(local) else machine.ranks_per_node
    if machine is GB200:  # NVLink joins the hosts of a rack
        ranks = machine.ranks_per_node
    return replace(machine, name=machine.name + why, ranks_per_node=ranks)


def _by_name() -> tuple[Machine, str]:
    if not torch.cuda.is_available():
        return H100, ", for want of a CUDA device"
    name = torch.cuda.get_device_name()
    for machine in _DEVICES:
        if machine.name in name:
            return machine, ""
    return H100, f", for want of the data sheet of {name}"
