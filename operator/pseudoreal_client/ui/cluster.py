"""Jobs of a cluster as a source of the live page."""

import weakref

from pseudoreal.client import Client
from pseudoreal_trainer.cli.common import ClusterOptions
from pseudoreal_trainer.ui.view import Labels

from pseudoreal_client.commands.options import command_errors
from pseudoreal_client.ui.job_feed import ClusterJob
from pseudoreal_client.ui.table import JobTable, TableFeed


def cluster_jobs(cluster: ClusterOptions, *, everywhere: bool) -> "ClusterJobs":
    """Return the jobs of the namespace that the options name, or of all namespaces. Raises CommandError."""
    with command_errors():
        return ClusterJobs(cluster, everywhere=everywhere)


class ClusterJobs:
    """Source of the jobs of one namespace, or of all."""

    def __init__(self, cluster: ClusterOptions, *, everywhere: bool) -> None:
        self._cluster = cluster
        self._client = self._client_of(cluster.namespace)
        self._namespace = None if everywhere else self._client.namespace
        self._table: JobTable | None = None
        self._open: weakref.WeakValueDictionary[str, ClusterJob] = weakref.WeakValueDictionary()
        where = "all namespaces" if self._namespace is None else f"namespace {self._namespace}"
        context = f" of {cluster.context}" if cluster.context else ""
        self.labels = Labels(
            f"Jobs in {where}{context}",
            "Namespace",
            "Created (UTC)",
            "Read through the API server with your own rights. This page changes nothing.",
        )

    def _client_of(self, namespace: str | None) -> Client:
        # Sentences on objects that cannot be listed: their rows say so.
        return Client(self._cluster.context, namespace, kubeconfig=self._cluster.kubeconfig, warn=lambda _: None)

    def listing(self) -> TableFeed:
        # One watch, for as long as the program runs: it also says when the page of a job has to read again.
        self._table = self._table or JobTable(self._client.api, self._namespace, self._wake)
        return TableFeed(self._table)

    def job(self, id: str) -> ClusterJob | None:
        # A name in the page's address is never sent to the API server unless it has sent that name itself.
        if self._table is None or id not in self._table:
            return None
        namespace, _, name = id.partition("/")
        self._open[id] = job = ClusterJob(self._client_of(namespace), name, self._cluster)
        return job

    def _wake(self, id: str) -> None:
        if (job := self._open.get(id)) is not None:
            job.wake()
