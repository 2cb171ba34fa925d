"""A digest of source code, for the `uuid()` of objects that Inductor keys its caches by.

A cache key made of a hook's fields alone goes on hitting after the hook's code was changed.
Upstream answers this by hashing the files of a custom pass
(`torch._inductor.custom_graph_pass.get_hash_for_files`); this does the same by module name, so that
it works for a package in a zip file, too.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util


@functools.cache
def source_digest(*module_names: str) -> str:
    """SHA-256 (hex) over the sources of the named modules, none of which is imported for it but its
    parents.

    Raises:
        RuntimeError: the source of a module can't be found: no uuid without it would be safe.
    """
    digest = hashlib.sha256()
    for name in module_names:
        spec = importlib.util.find_spec(name)
        get_source = getattr(spec and spec.loader, "get_source", None)
        source = get_source(name) if get_source is not None else None
        if source is None:
            raise RuntimeError(
                f"the source of module {name!r} can't be read, so no stable uuid can be made of "
                "it: "
                "install the package with its .py files"
            )
        digest.update(f"{name}\0{len(source)}\0{source}".encode())
    return digest.hexdigest()
