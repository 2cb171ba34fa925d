"""Test a model on CPU ranks, bit for bit against eager FSDP2.

::

    def digests(rank: Rank) -> list[list[str]]:
        found = []
        with ring_rank(rank, RingTopology(ranks_per_node=2)):
            mesh = init_device_mesh("cpu", (rank.world_size,))
            for compiled in (False, True):
                model = Transformer(ModelConfig(layers=1), seed=0)
                run = model
                if compiled:
                    data_parallel(model, mesh, param_dtype=BF16, reduce_dtype=BF16)
                    passes = recipe(model, units=["blocks.0", ""])
                    run = torch.compile(model, backend=backend("aot_eager", passes))
                else:
                    policy = MixedPrecisionPolicy(BF16, BF16, cast_forward_inputs=False)
                    for module in (*model.blocks, model):
                        fully_shard(module, mesh=mesh, mp_policy=policy)

                def step(number: int) -> torch.Tensor:
                    tokens, targets = text.batch(number, rank.rank, size=2, seq=32)
                    logits = run(tokens).float().flatten(0, 1)
                    loss = torch.nn.functional.cross_entropy(logits, targets.flatten())
                    loss.backward()
                    return loss

                found.append(train(model, step, steps=3).digests)
        return found


    def check() -> None:
        for eager, ours in run_ranks(digests, 4, timeout_s=240):
            assert ours == eager

The ranks are processes that never outlive the run (``ranks``), in a process group over gloo that
adds in the order of NCCL's rings (``ring``). :func:`compare` does all of this for the model that a
function returns, and finds why weights differ.
"""

from __future__ import annotations

from .compare_cli import compare

__all__ = ["compare"]
