"""Spec of the network between the pods of a job."""

from typing import Annotated, Literal

from pydantic import Field

from pseudoreal_api.base import ATOMIC, ApiModel, Quantity

_QualifiedName = Annotated[
    str, Field(pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$", max_length=253)
]


class HugePages(ApiModel):
    page_size: Literal["2Mi", "1Gi"] = Field("2Mi", description="pageSize is the size of a page.")
    amount: Quantity = Field(description="amount is the memory in all pages of a pod; it is a multiple of pageSize.")


class Preflight(ApiModel):
    mode: Literal["None", "Warn", "Fail"] = Field(
        "None",
        description="mode says whether every rank multiplies matrices and exchanges data with others in pairs before"
        " the first step of an execution, and what follows where a rank is wrong or silent. None: nothing is checked."
        " Warn: the rank is named with its node. Fail: it ends the execution as well. A slow rank is only named.",
    )


class Network(ApiModel):
    mode: Literal["Auto", "Socket", "RDMA"] = Field(
        "Auto",
        description="mode says which transport NCCL uses. Auto: what NCCL finds. Socket: TCP only. RDMA:"
        " InfiniBand or RoCE, with no fallback to TCP; it needs rdmaResource or hostNetwork.",
    )
    interface: str | None = Field(
        None,
        min_length=1,
        max_length=64,
        description="interface is the network interface of NCCL and gloo. NCCL takes a prefix, =NAME for exactly"
        " that one, or ^NAME for all others; gloo takes a whole name only. Omitted: NCCL and gloo"
        " choose.",
    )
    ib_adapters: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="ibAdapters names the adapters that NCCL uses (NCCL_IB_HCA), such as mlx5_0,mlx5_1."
        " Omitted: NCCL chooses.",
    )
    gid_index: int | None = Field(
        None,
        ge=0,
        le=255,
        description="gidIndex is the GID index of RoCE (NCCL_IB_GID_INDEX). Omitted: NCCL chooses.",
    )
    nccl_config_map_name: str | None = Field(
        None,
        min_length=1,
        max_length=253,
        description="ncclConfigMapName is the name of a ConfigMap in the job's namespace whose key nccl.conf NCCL reads"
        " (NCCL_CONF_FILE). Omitted: that of the site, if the operator was installed with one.",
    )
    rdma_resource: _QualifiedName | None = Field(
        None,
        description="rdmaResource is the extended resource of the adapters, such as rdma/rdma_shared_device_a."
        " Omitted: the pods get none.",
    )
    rdma_count: int = Field(
        1, ge=1, le=64, description="rdmaCount is the number of rdmaResource that each pod of a training phase gets."
    )
    networks: Annotated[list[_QualifiedName], Field(max_length=16)] = Field(
        [],
        description="networks are Multus networks that each pod of a training phase is attached to.",
        json_schema_extra=ATOMIC,
    )
    host_network: bool = Field(
        False, description="hostNetwork gives the pods the network of their node; at most one pod then fits on a node."
    )
    shared_memory: Quantity | None = Field(
        None,
        description="sharedMemory is the size of /dev/shm, which NCCL uses inside a pod. It is memory: the memory"
        " limit and request of the trainer are raised by as much. Omitted: the default of the"
        " container runtime, mostly 64 MiB.",
    )
    huge_pages: HugePages | None = Field(
        None,
        description="hugePages are mounted at /hugepages; the resources of each phase must name cpu or memory."
        " Omitted: the pods get none.",
    )
    isolation: Literal["JobOnly", "None"] = Field(
        "JobOnly",
        description="isolation says who may reach the pods. JobOnly: a NetworkPolicy lets only pods of the job"
        " reach its pods. It does not cover attached networks, and there is none with hostNetwork."
        " None: there is no NetworkPolicy.",
    )
    preflight: Preflight = Field(
        Preflight(), description="preflight checks ranks and the network between them before the first step."
    )
