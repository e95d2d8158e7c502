"""The pages of the caches: who holds each, and which are free."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations


class PagePool:
    """Hands out pages, most recently freed first; a page is free when its last holder releases it."""

    def __init__(self, num_pages: int) -> None:
        self._references = [0] * num_pages
        self._free = list(range(num_pages))  # the next one last
        self._freed: list[int] = []

    @property
    def num_pages(self) -> int:
        return len(self._references)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_shared(self) -> int:
        """Pages with several holders."""
        return sum(count > 1 for count in self._references)

    def references(self, page: int) -> int:
        return self._references[page]

    def allocate(self) -> int:
        """A page with one holder; RuntimeError when none is free."""
        if not self._free:
            raise RuntimeError(f"all {self.num_pages} pages are held")
        page = self._free.pop()
        self._references[page] = 1
        return page

    def share(self, page: int) -> int:
        """The same page with one holder more."""
        if self._references[page] == 0:
            raise RuntimeError(f"page {page} is free, so it can not be shared")
        self._references[page] += 1
        return page

    def release(self, page: int) -> None:
        """One holder less."""
        if self._references[page] == 0:
            raise RuntimeError(f"page {page} is free already")
        self._references[page] -= 1
        if self._references[page] == 0:
            self._free.append(page)
            self._freed.append(page)

    def take_freed(self) -> list[int]:
        """Pages that became free since the last call, even if they are held again by now."""
        freed, self._freed = self._freed, []
        return freed
