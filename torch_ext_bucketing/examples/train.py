"""Train a small decoder on real text, compiled and bucketed: a script to start from.

    torchrun --nproc-per-node 4 -m torch_ext_bucketing.examples.train --steps 200
    ... --eager    # the same under eager FSDP2

Run again, it goes on from the last checkpoint in --folder, whichever of the two wrote it and on any
number of ranks; on as many as before, to the same bits as a run that nothing interrupted. Put your
own model for ``Transformer``, your own data for ``text.batch``.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import torch_ext_bucketing as teb
from torch_ext_bucketing.testing import text
from torch_ext_bucketing.testing.model import ModelConfig, Transformer
from torch_ext_bucketing.testing.ring import init_ring_process_group
from torch_ext_bucketing.testing.training import digest

BF16 = torch.bfloat16
HELD_OUT = 1_000_000
"""The step whose batch is evaluated on, far from those that are trained on."""


def main(argv: Sequence[str] | None = None) -> str:
    """Train; rank 0 prints a line per step. Returns a hash of this rank's weights."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default="checkpoints", help="that all ranks see")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--compiler", default="inductor", choices=("inductor", "aot_eager"))
    parser.add_argument("--eager", action="store_true", help="eager FSDP2, nothing compiled")
    args = parser.parse_args(argv)

    # torchrun sets these, and where the ranks meet (MASTER_ADDR, MASTER_PORT).
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    else:
        init_ring_process_group(rank, world)
    mesh = init_device_mesh(device, (world,))

    # Shard, then compile; the optimizer takes the shards.
    model = Transformer(ModelConfig(layers=args.layers), seed=0).to(device)
    run: Any = model
    if args.eager:
        policy = MixedPrecisionPolicy(BF16, BF16, cast_forward_inputs=False)
        for unit in teb.transformer_block_plan(model).units:  # recipe() takes the same
            fully_shard([model.get_submodule(n) for n in unit], mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    else:
        teb.data_parallel(model, mesh, param_dtype=BF16, reduce_dtype=BF16)
        run = torch.compile(model, backend=teb.backend(args.compiler, teb.recipe(model)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_of(step: int) -> torch.Tensor:
        tokens, targets = (t.to(device) for t in text.batch(step, rank, size=4, seq=64))
        return F.cross_entropy(run(tokens).float().flatten(0, 1), targets.flatten())

    def state() -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer}

    # The file .metadata is written last: a checkpoint without it was cut off.
    last = max((int(p.parent.name) for p in args.folder.glob("*/.metadata")), default=0)
    if last:
        loaded = state()
        dcp.load(loaded, checkpoint_id=args.folder / str(last))
        of_model, of_optimizer = loaded["model"], loaded["optimizer"]
        set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
        if rank == 0:
            print(f"going on from {args.folder / str(last)}", flush=True)

    for step in range(last + 1, args.steps + 1):
        loss = loss_of(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            bar = "#" * (30 * step // args.steps)
            print(f"[{bar:30}] step {step} of {args.steps}, loss {loss.item():.4f}", flush=True)
        if step % args.save_every == 0 or step == args.steps:
            dcp.save(state(), checkpoint_id=args.folder / str(step))
            model.eval()
            with torch.no_grad():
                held_out = loss_of(HELD_OUT)
            model.train()
            dist.all_reduce(held_out)
            if rank == 0:
                where = args.folder / str(step)
                print(f"saved {where}, held-out loss {held_out.item() / world:.4f}", flush=True)
    weights = digest(model)
    print(f"rank {rank}: weights {weights}", flush=True)
    dist.destroy_process_group()
    return weights


if __name__ == "__main__":
    main()
