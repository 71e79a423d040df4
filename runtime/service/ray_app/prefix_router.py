"""`PrefixRouter`: the request router of the replicas. Ray Serve imports this module by name."""

from __future__ import annotations

from collections.abc import Sequence

from ray.serve._private.replica_result import ReplicaResult
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .routing import CachedPrefixes, by_preference, read_fingerprints


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray is untyped
    """Prefers the replica that caches most chunks of a prompt, within a bound on its load.

    The second argument of a request is the fingerprints of its chunks.
    """

    def initialize_state(self, *, load_bound: float, spare_requests: int) -> None:
        """Take the settings of `RoutingOptions`."""
        self._load_bound = load_bound
        self._spare_requests = spare_requests
        self._open: dict[str, tuple[ReplicaID, PendingRequest]] = {}
        self._cached = CachedPrefixes()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas one by one, in the order of preference."""
        if pending_request is None:
            return [list(candidate_replicas)]
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        self._cached.keep(replicas)
        prompt = _prompt_of(pending_request)
        self._open.pop(pending_request.metadata.internal_request_id, None)
        order = by_preference(
            self._loads(candidate_replicas),
            lambda id: self._cached.num_cached(id, prompt),
            load_bound=self._load_bound,
            spare_requests=self._spare_requests,
        )
        if order:
            self._assign(pending_request, replicas[order[0]])
        return [[replicas[id]] for id in order]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """Note where the prompt will be cached."""
        replica = self.curr_replicas.get(replica_id)
        if replica is not None:
            self._assign(pending_request, replica)
        self._cached.sent(replica_id, _prompt_of(pending_request))

    def _assign(self, request: PendingRequest, replica: RunningReplica) -> None:
        """Count a request for the replica that is tried first, until it ends."""
        self._open[request.metadata.internal_request_id] = (replica.replica_id, request)
        # Without it Serve asks again at once, in a loop, while no replica accepts the request.
        request.routing_context.should_backoff = True

    def _loads(self, candidates: Sequence[RunningReplica]) -> dict[ReplicaID, int]:
        """Return the open requests of each candidate, also of other routers, if known."""
        for id, (_, request) in tuple(self._open.items()):
            if request.future.cancelled():  # before a replica got it
                del self._open[id]
        loads = dict.fromkeys((replica.replica_id for replica in candidates), 0)
        for replica, _ in self._open.values():
            if replica in loads:
                loads[replica] += 1
        reported = self._replica_queue_len_cache
        return {id: max(own, reported.get(id) or 0) for id, own in loads.items()}

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._open.pop(internal_request_id, None)


def _prompt_of(request: PendingRequest) -> Sequence[int]:
    return read_fingerprints(request.args[1] if len(request.args) > 1 else b"")
