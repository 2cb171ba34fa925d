"""As eager FSDP2 has it: units, the order of their bytes, sharding, whom a collective serves."""
