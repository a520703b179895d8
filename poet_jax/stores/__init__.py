"""Storage for pages: stores, arrays in them, and the custom calls that move bytes."""

from poet_jax.stores.paged import PagedArray
from poet_jax.stores.store import FileStore, HostStore, Store

__all__ = ["FileStore", "HostStore", "PagedArray", "Store"]
