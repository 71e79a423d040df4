"""Replicas of an engine on Ray Serve (extra `ray`).

    serve run stepgraph.runtime.service.ray_app:build model=demo replicas=2

    HTTP proxies of Serve → Ingress ──prefix router──→ EngineReplica, one engine each

The ingress reads a request, hashes its prompt as the prefix cache of the engines does, and passes
it to a replica. A request that a replica loses before its response begins goes to another one.
Importing this package needs neither Ray nor the extra `server`.
"""

from __future__ import annotations

from .application import build

__all__ = ["build"]
