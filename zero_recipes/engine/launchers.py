"""What launchers set in the environment of the processes that they start."""

# what the variables' names begin with: of torchrun, accelerate, and launchers by MPI
LAUNCHED = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "TORCHELASTIC_",
    "NODE_RANK",
    "ACCELERATE_",
    "FSDP_",
    "PARALLELISM_CONFIG_",
    "OMPI_",
    "PMI_",
    "MV2_",
    "PMIX_",
    "CROSS_",
)
