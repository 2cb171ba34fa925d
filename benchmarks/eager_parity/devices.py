"""Start ranks on GPUs or on the CPU, and describe the machine that estimates are for."""

import os
from dataclasses import replace

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.distributed as dist

from torch_ext_bucketing.planner.cost.machine import H100, Level, Machine
from torch_ext_bucketing.testing.ranks import Rank


def nccl_environment(rank: int, ranks: int, devices: int) -> dict[str, str]:
    """Return the environment variables of one NCCL rank.

    With a GPU for every rank NCCL is left alone. With fewer, NCCL refuses two ranks on one GPU of
    one host, so every rank claims to be a host of its own (``NCCL_HOSTID``) and talks over sockets
    on the loopback interface.
    """
    # cuBLAS picks an algorithm by what workspace it has; a fixed one is asked for by name.
    variables = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if ranks <= devices:
        return variables
    if ranks % devices:
        raise ValueError(
            f"{ranks} ranks can't be spread evenly over {devices} GPUs; "
            "hide some with CUDA_VISIBLE_DEVICES"
        )
    return variables | {
        "NCCL_HOSTID": f"simulated-host-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
    }


def start(rank: Rank, backend_name: str) -> torch.device:
    """Join the process group, ``"nccl"`` or ``"gloo"``; return the current device."""
    torch.set_num_threads(1)
    # A graph from a cache has not been through the passes.
    inductor_config.fx_graph_cache = False
    functorch_config.enable_autograd_cache = False
    device = torch.device("cpu")
    inductor_config.compile_threads = 2
    if backend_name == "nccl":
        # Before the first CUDA call of this process, which is when these are read.
        devices = torch.cuda.device_count()
        os.environ.update(nccl_environment(rank.rank, rank.world_size, devices))
        device = torch.device("cuda", rank.rank % devices)
        torch.cuda.set_device(device)
        # Triton compiles in processes of their own, per rank; a GPU's machine has cores for it.
        cores = len(os.sched_getaffinity(0))
        inductor_config.compile_threads = max(1, min(8, cores // rank.world_size))
        # Of the attention kernels only this one is made of operators that eager and a traced
        # graph run alike, and adds in a fixed order in backward.
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.enable_math_sdp(True)
    dist.init_process_group(
        backend_name,
        store=dist.FileStore(rank.store_path, rank.world_size),
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=rank.timeout,
    )
    return device


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def why_no_nccl() -> str:
    """Return why there can be no rank on a GPU here, ``""`` if there can."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    if not dist.is_nccl_available():
        return f"torch {torch.__version__} has no NCCL"
    return ""


def nodes(gb_per_s: float | None) -> Machine:
    """Return nodes of 8 H100s with the given GB/s of each rank between them, or :data:`H100`."""
    if gb_per_s is None:
        return H100
    assert isinstance(H100.inter, Level)
    return replace(H100, inter=replace(H100.inter, bandwidth=gb_per_s * 1e9))
