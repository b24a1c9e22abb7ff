"""Spec of the network between the pods of a job."""

from typing import Annotated, Literal

from pydantic import Field

from pseudoreal_api.base import ATOMIC, ApiModel, Quantity

_QualifiedName = Annotated[
    str, Field(pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$", max_length=253)
]


class HugePages(ApiModel):
    page_size: Literal["2Mi", "1Gi"] = Field(
        "2Mi", description="pageSize is the size of a huge page. The nodes must have pages of this size."
    )
    amount: Quantity = Field(description="amount is the memory in huge pages of each pod; a multiple of pageSize.")


class Preflight(ApiModel):
    mode: Literal["None", "Warn", "Fail"] = Field(
        "None",
        description="mode says whether each execution is preceded by a check: every rank multiplies matrices and"
        " exchanges data with other ranks in pairs. None: no check. Warn: an event names each rank with wrong"
        " results or without an answer, and its node. Fail: such a rank also ends the execution, as a fault. A slow"
        " rank is only named.",
    )


class Network(ApiModel):
    mode: Literal["Auto", "Socket", "RDMA"] = Field(
        "Auto",
        description="mode says which transport NCCL uses. Auto: NCCL chooses. Socket: TCP only. RDMA: InfiniBand or"
        " RoCE, without fallback to TCP; it needs rdmaResource or hostNetwork.",
    )
    interface: str | None = Field(
        None,
        min_length=1,
        max_length=64,
        description="interface is the network interface of NCCL (NCCL_SOCKET_IFNAME) and gloo (GLOO_SOCKET_IFNAME)."
        " For NCCL it may be a prefix, =NAME for exactly one interface, or ^NAME to exclude one; gloo accepts only"
        " a full name. Set it if pods have several interfaces. Omitted: NCCL and gloo choose.",
    )
    ib_adapters: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="ibAdapters names the InfiniBand or RoCE adapters that NCCL uses (NCCL_IB_HCA), such as"
        " mlx5_0,mlx5_1. Omitted: NCCL chooses.",
    )
    gid_index: int | None = Field(
        None,
        ge=0,
        le=255,
        description="gidIndex is the RoCE GID index (NCCL_IB_GID_INDEX). Omitted: NCCL chooses.",
    )
    nccl_config_map_name: str | None = Field(
        None,
        min_length=1,
        max_length=253,
        description="ncclConfigMapName is the name of a ConfigMap in the job's namespace. Its key nccl.conf is a"
        " configuration file of NCCL (NCCL_CONF_FILE). Omitted: the configuration that the operator was installed"
        " with, if there is one.",
    )
    rdma_resource: _QualifiedName | None = Field(
        None,
        description="rdmaResource is the extended resource of RDMA adapters, as the device plugin names it, such as"
        " rdma/rdma_shared_device_a. Omitted: pods request no adapter.",
    )
    rdma_count: int = Field(
        1,
        ge=1,
        le=64,
        description="rdmaCount is the amount of rdmaResource that each pod of a training phase requests.",
    )
    networks: Annotated[list[_QualifiedName], Field(max_length=16)] = Field(
        [],
        description="networks are Multus network attachments of each pod of a training phase. The default attaches"
        " none.",
        json_schema_extra=ATOMIC,
    )
    host_network: bool = Field(
        False,
        description="hostNetwork runs the pods in the network namespace of their node. At most one pod of the job"
        " then fits on a node.",
    )
    shared_memory: Quantity | None = Field(
        None,
        description="sharedMemory is the size of /dev/shm, which NCCL uses between the ranks of a pod. It counts as"
        " memory, so the trainer's memory request and limit are raised by it. Omitted: the default of the container"
        " runtime, usually 64 MiB.",
    )
    huge_pages: HugePages | None = Field(
        None,
        description="hugePages mounts huge pages at /hugepages. The resources of each phase must then name cpu or"
        " memory. Omitted: pods get no huge pages.",
    )
    isolation: Literal["JobOnly", "None"] = Field(
        "JobOnly",
        description="isolation says which pods may connect to the job's pods. JobOnly: a NetworkPolicy admits only"
        " pods of the same job. It does not cover networks attached by Multus, and with hostNetwork there is no"
        " policy. None: no NetworkPolicy is created.",
    )
    preflight: Preflight = Field(
        Preflight(),
        description="preflight checks ranks, and the network between them, before the first step of each execution.",
    )
