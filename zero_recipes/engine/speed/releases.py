"""Stage 3 formats six messages for each parameter that it releases, and prints none.

Library: DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py (`__release_param`) and
    partition_parameters.py (`partition`).
Upstream: none found.
Here: a parameter is released without them; under hpZ, NVMe and fast sharding as DeepSpeed does it.
"""

from zero_recipes.engine.replacing import replaces


def apply() -> None:
    """Let stage 3 release parameters without messages. One that a module still uses is kept, as DeepSpeed keeps it."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, free_param
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    @replaces(Coordinator, "_PartitionedParameterCoordinator__release_param")
    def release_param(release, self, parameter, free_data=True):
        is_plain = parameter.ds_zero_param_process_group is None and parameter.ds_tensor.final_location is None
        if not (is_plain and free_data):
            release(self, parameter, free_data)
        elif parameter.ds_status == ZeroParamStatus.AVAILABLE and not parameter.ds_active_sub_modules:
            free_param(parameter)
            self._PartitionedParameterCoordinator__n_available_params -= parameter.ds_numel
