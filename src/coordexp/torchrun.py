"""What torchrun tells its own processes by their environment. Others that heard it would wait for them."""

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_", "LOCAL_", "ROLE_", "TORCHELASTIC_")
