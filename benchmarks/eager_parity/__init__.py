"""Models, rows and ranks of the comparisons with eager FSDP2."""
