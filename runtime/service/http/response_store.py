"""Responses that clients may read again and continue, in the memory of this process."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

from ...bounded_repr import bounded_repr
from .exchange import HttpError, encode

Item = dict[str, Any]
"""A message, a reasoning, a call or the output of one, as the API writes it; it has an `id`."""


@dataclass(slots=True, eq=False)
class StoredResponse:
    """A response that its client may read and continue."""

    id: str
    owner: bytes | None  # digest of the API key of its request; None if the service has no keys
    items: list[Item]  # the conversation: the input, then the output once that is whole
    num_input: int
    response: object = None  # as clients get it, in its newest state
    task: asyncio.Task[None] | None = None  # makes it, if it is made in the background
    num_bytes: int = 0  # of the items and the response as JSON, once it is stored


class ResponseStore:
    """Holds the newest responses, up to a number of them and up to a number of bytes."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        """Begin empty. With `max_responses` 0 nothing is stored."""
        self.running: dict[str, StoredResponse] = {}
        """Responses that are made in the background, by id: the limits of the engine bound them."""
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._num_bytes = 0
        self._stored: dict[str, StoredResponse] = {}  # the oldest first
        self._items: dict[tuple[bytes | None, str], tuple[Item, int]] = {}
        """By owner and id: the newest item, and the number of responses that have it."""

    def add(self, response: StoredResponse) -> bool:
        """Store a whole response and drop the oldest ones; return False if it is too large."""
        response.num_bytes = len(encode((response.items, response.response)))
        if not self._max_responses or response.num_bytes > self._max_bytes:
            return False
        self._stored[response.id] = response
        self._num_bytes += response.num_bytes
        for item in response.items:
            key = response.owner, item["id"]
            self._items[key] = item, self._items.get(key, (item, 0))[1] + 1
        while len(self._stored) > self._max_responses or self._num_bytes > self._max_bytes:
            self.remove(next(iter(self._stored)))
        return True

    def remove(self, response_id: str) -> None:
        """Drop a response, if it is stored."""
        response = self._stored.pop(response_id, None)
        if response is None:
            return
        self._num_bytes -= response.num_bytes
        for item in response.items:
            key = response.owner, item["id"]
            kept, count = self._items.pop(key)
            if count > 1:
                self._items[key] = kept, count - 1

    def find(self, response_id: str, owner: bytes | None, field: str) -> StoredResponse:
        """Return a response; `field` of a request has its id. Raises `HttpError` 404."""
        found = self.running.get(response_id) or self._stored.get(response_id)
        if found is None or found.owner != owner:
            raise self._missing(field, response_id)
        return found

    def item(self, item_id: str, owner: bytes | None, field: str) -> Item:
        """Return an item of a stored response; as `find`."""
        found, _ = self._items.get((owner, item_id), (None, 0))
        if found is None:
            raise self._missing(field, item_id)
        return found

    def _missing(self, field: str, given: str) -> HttpError:
        return HttpError(
            404,
            f"{field}: nothing is stored as {bounded_repr(given)} for this API key. It was not"
            " stored, was deleted, or was dropped: until it stops, the server holds the newest"
            f" {self._max_responses} responses (--max-stored-responses) in {self._max_bytes} bytes"
            " (--max-stored-bytes). Send the whole conversation as input",
            param=field,
            code="response_not_found",
        )

    def check_integrity(self) -> None:
        """Assert that the bounds hold, and that nothing is left of responses that were dropped."""
        stored = self._stored.values()
        assert len(stored) <= self._max_responses
        assert self._num_bytes == sum(each.num_bytes for each in stored) <= self._max_bytes
        items = Counter((each.owner, item["id"]) for each in stored for item in each.items)
        assert items == {key: count for key, (_, count) in self._items.items()}
