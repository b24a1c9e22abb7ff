"""The part of the spec about the network between the pods of a job."""

from typing import Annotated, Literal

from pydantic import Field

from pseudoreal_api.base import ApiModel, Quantity

_QualifiedName = Annotated[
    str, Field(pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$", max_length=253)
]


class HugePages(ApiModel):
    page_size: Literal["2Mi", "1Gi"] = Field("2Mi", description="Size of a page.")
    amount: Quantity = Field(description="In all pages of a pod; a multiple of the page size.")


class Network(ApiModel):
    mode: Literal["Auto", "Socket", "RDMA"] = Field(
        "Auto",
        description="Auto: what NCCL finds. Socket: TCP only. RDMA: InfiniBand or RoCE, and no way back to TCP where"
        " there is none; needs rdmaResource or hostNetwork.",
    )
    interface: str | None = Field(
        None,
        min_length=1,
        max_length=64,
        description="Network interface of NCCL and gloo. For NCCL a prefix, =NAME for exactly that, ^NAME for all"
        " others; gloo takes a whole name only. Omitted: their own choice.",
    )
    hca: str | None = Field(
        None, min_length=1, max_length=256, description="Adapters that NCCL uses (NCCL_IB_HCA), such as mlx5_0,mlx5_1."
    )
    gid_index: int | None = Field(None, ge=0, le=255, description="GID index of RoCE (NCCL_IB_GID_INDEX).")
    nccl_config: str | None = Field(
        None,
        min_length=1,
        max_length=253,
        description="A ConfigMap in the job's namespace whose key nccl.conf NCCL reads (NCCL_CONF_FILE). Omitted: that"
        " of the site, if the operator was installed with one.",
    )
    rdma_resource: _QualifiedName | None = Field(
        None, description="Extended resource of the adapters, such as rdma/rdma_shared_device_a."
    )
    rdma_count: int = Field(1, ge=1, le=64, description="How many of it each pod of a training phase gets.")
    networks: Annotated[list[_QualifiedName], Field(max_length=16)] = Field(
        [], description="Multus networks that each pod of a training phase is attached to."
    )
    host_network: bool = Field(False, description="The pods use the network of their node; at most one fits on a node.")
    shared_memory: Quantity | None = Field(
        None,
        description="Size of /dev/shm, which NCCL uses inside a pod. It is memory: the memory limit and request of the"
        " trainer are raised by as much. Omitted: what the container runtime gives, mostly 64 MiB.",
    )
    huge_pages: HugePages | None = Field(
        None,
        description="Huge pages, mounted at /hugepages; the resources of each phase must name cpu or memory."
        " Omitted: none.",
    )
    isolation: Literal["JobOnly", "None"] = Field(
        "JobOnly",
        description="JobOnly: a NetworkPolicy lets only pods of the job reach its pods. It does not cover"
        " attached networks, and there is none with hostNetwork.",
    )
    preflight: bool = Field(
        False,
        description="Before the first step of an attempt every rank multiplies matrices and talks to others in pairs;"
        " a rank that is wrong, silent or slow is named with its node, and a broken one ends the attempt.",
    )
