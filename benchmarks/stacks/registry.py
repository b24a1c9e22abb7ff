"""All stacks by name."""

from benchmarks.stacks import data_parallel, deepspeed_zero3, fully_shard, ours, tensor_parallel
from benchmarks.work import Stack

STACKS: dict[str, Stack] = {
    "pseudoreal, device": ours.at("Device"),
    "pseudoreal, host": ours.at("Host"),
    "pseudoreal, disk": ours.at("Disk"),
    "pseudoreal, device, not sharded": ours.at("Device", sharding="None"),
    "DistributedDataParallel": data_parallel.train,
    "fully_shard": fully_shard.on_device,
    "fully_shard, weights kept": fully_shard.weights_kept,
    "fully_shard + offload": fully_shard.offloaded,
    "DeepSpeed ZeRO-3": deepspeed_zero3.on_device,
    "DeepSpeed ZeRO-3 + offload": deepspeed_zero3.offloaded,
}
OURS, TORCH = "pseudoreal, tensor ranks", "torch's tensor parallelism"
TENSOR_PARALLEL: dict[str, Stack] = {
    OURS: ours.at("Device", sharding="None", cuts_matrices=True),
    TORCH: tensor_parallel.train,
}
