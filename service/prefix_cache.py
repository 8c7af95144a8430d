"""Full pages of context, kept for other sessions that share a prefix.

A context row is a function of the target's tokens up to its position, so a full page that starts at row 0, page_size,
2 * page_size... is named by the tokens before its end. Its key is a chain of hashes:

    root = hash(model fingerprint, namespace)      key[i] = hash(key[i - 1], tokens of page i)

The namespace is the client, or a salt the client chose to share; two namespaces never meet. The cache holds one reference
on each page it keeps; a session that attaches a page holds another, and whoever writes into a page with more than one
holder copies it first (sessions.py). A page is evicted only when the cache is its last holder, oldest first, and of one
chain the deepest first, so that what is left is still reachable.

Everything here belongs to the worker thread.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from attention.cache import PageAllocator


class PrefixChain:
    """The keys of one session's full pages, kept up to date as rows come and go."""

    def __init__(self, root: bytes, page_size: int) -> None:
        self._root = root
        self._page_size = page_size
        self._token_ids = array("i")
        self.keys: list[bytes] = []
        self.num_published = 0

    def __len__(self) -> int:
        return len(self._token_ids)

    def append(self, token_ids: Sequence[int]) -> None:
        """Add the tokens of the next rows, and a key for each page they fill."""
        self._token_ids.extend(token_ids)
        for page in range(len(self.keys), len(self._token_ids) // self._page_size):
            self.keys.append(self._key(page))

    def truncate(self, num_rows: int) -> None:
        """Forget the tokens from row `num_rows` on."""
        del self._token_ids[num_rows:]
        del self.keys[num_rows // self._page_size :]
        self.num_published = min(self.num_published, len(self.keys))

    def _key(self, page: int) -> bytes:
        parent = self.keys[page - 1] if page else self._root
        tokens = self._token_ids[page * self._page_size : (page + 1) * self._page_size]
        return hashlib.blake2b(parent + tokens.tobytes(), digest_size=32).digest()


class PrefixCache:
    """Pages by key, least recently used first.

    `queried_rows` and `hit_rows` count the prefix rows that sessions asked for and got.
    """

    def __init__(self, allocator: PageAllocator, *, page_size: int, fingerprint: str) -> None:
        self._allocator = allocator
        self._page_size = page_size
        self._fingerprint = fingerprint
        self._pages: OrderedDict[bytes, int] = OrderedDict()
        self.queried_rows = 0
        self.hit_rows = 0

    def __len__(self) -> int:
        return len(self._pages)

    def new_chain(self, namespace: str) -> PrefixChain:
        """An empty chain in `namespace`."""
        root = hashlib.blake2b(f"{self._fingerprint}\0{namespace}".encode(), digest_size=32).digest()
        return PrefixChain(root, self._page_size)

    def attach(self, chain: PrefixChain, token_ids: Sequence[int]) -> list[int]:
        """Find the longest run of held pages of a prefix. The caller owns one reference on each page returned.

        `chain` is left holding the tokens of those pages.
        """
        chain.append(token_ids)
        pages: list[int] = []
        for key in chain.keys:
            page = self._pages.get(key)
            if page is None:
                break
            pages.append(page)
        for key in reversed(chain.keys[: len(pages)]):
            self._pages.move_to_end(key)
        self._allocator.retain(pages)
        self.queried_rows += len(token_ids)
        self.hit_rows += len(pages) * self._page_size
        chain.truncate(len(pages) * self._page_size)
        chain.num_published = len(pages)
        return pages

    def publish(self, chain: PrefixChain, pages: Sequence[int]) -> None:
        """Keep the full pages of a session that are not kept yet; `pages` are the session's own, in row order."""
        for index in range(chain.num_published, len(chain.keys)):
            if chain.keys[index] not in self._pages:
                self._allocator.retain([pages[index]])
                self._pages[chain.keys[index]] = pages[index]
        if chain.num_published < len(chain.keys):
            for key in reversed(chain.keys):
                if key in self._pages:
                    self._pages.move_to_end(key)
        chain.num_published = len(chain.keys)

    def evict(self, count: int) -> int:
        """Free up to `count` pages that no session holds; returns how many."""
        victims: list[bytes] = []
        for key, page in self._pages.items():
            if len(victims) == count:
                break
            if self._allocator.reference_count(page) == 1:
                victims.append(key)
        self._allocator.release([self._pages.pop(key) for key in victims])
        return len(victims)

    def clear(self) -> None:
        """Let go of every page."""
        self._allocator.release(list(self._pages.values()))
        self._pages.clear()
