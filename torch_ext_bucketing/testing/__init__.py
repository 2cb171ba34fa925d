"""For testing a model of your own on CPU ranks, bit for bit against eager FSDP2.

ring       a process group over gloo that adds in the order of NCCL's rings
sums       these additions, as functions of tensors
gloo       gloo without two faults of torch's
compare    digests of weights, and counts of collectives
payloads   what lies where in the buffers of collectives, eager's and compiled ones   (no torch)
untouched  that torch is as it was installed
ranks      processes that never outlive the run   (no torch)
text       real text as tokens
model      a LLaMA-style decoder
demo/      the main job of the README: eager FSDP2 and ours side by side
"""
