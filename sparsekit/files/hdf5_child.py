"""Say what an HDF5 file holds, as JSON on standard output, in a process of its own.

The HDF5 library crashes on some damaged files and asks for gigabytes on others. Here that ends this process only.
"""

import base64
import json
import math
import os
import sys

_MEMORY = 3 << 30
_SECONDS = 120
_MOST_OBJECTS = 1_000_000
_DEFLATE, _SHUFFLE, _CHECKSUM = 1, 2, 3


def limit() -> None:
    """Bound memory and time where the system can."""
    try:
        import resource
    except ImportError:
        return
    for what, most in ((resource.RLIMIT_AS, _MEMORY), (resource.RLIMIT_CPU, _SECONDS), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(what)
        resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


class Reader:
    """Walks one open h5py.File, in which nothing is larger than `size` bytes."""

    def __init__(self, file, size: int) -> None:
        import h5py
        import numpy

        self.h5py, self.numpy = h5py, numpy
        self.size = size
        self.objects = 0
        self.tree = self.group(file, ())

    def attributes(self, owner) -> dict:
        found = {}
        for name in owner.attrs:
            header = owner.attrs.get_id(name)
            # Strings of free length lie elsewhere and take 16 bytes here, which NumPy counts as 8.
            if math.prod(header.shape or ()) * header.dtype.itemsize > self.size:
                raise ValueError(f"Attribute {name} is larger than the file.")
            value = self.plain(owner.attrs[name])
            if value is not None:
                found[name] = value
        return found

    def plain(self, value):
        """Strings, numbers and lists of them; anything else is none of ours."""
        if isinstance(value, bytes):
            return value.decode("utf-8", "replace")
        if isinstance(value, (str, bool, int, float)):
            return value
        if isinstance(value, self.numpy.generic):
            return self.plain(value.item())
        if isinstance(value, self.numpy.ndarray) and value.dtype.kind in "OSUifb":
            return [self.plain(one) for one in value.reshape(-1).tolist()]
        return None

    def group(self, group, above: tuple) -> dict:
        address = self.h5py.h5o.get_info(group.id).addr
        if address in above:
            raise ValueError("A group holds itself.")
        members = {}
        for name in group:
            self.objects += 1
            if self.objects > _MOST_OBJECTS:
                raise ValueError("There is no end of objects.")
            if not isinstance(group.get(name, getlink=True), self.h5py.HardLink):
                members[name] = {"link": True}
                continue
            member = group[name]
            if isinstance(member, self.h5py.Group):
                members[name] = self.group(member, (*above, address))
            elif isinstance(member, self.h5py.Dataset):
                members[name] = self.dataset(member)
        return {"attributes": self.attributes(group), "members": members}

    def dataset(self, dataset) -> dict:
        found = {"shape": list(dataset.shape or ()), "dtype": dataset.dtype.str, "kind": dataset.dtype.kind}
        if dataset.shape is None or dataset.dtype.kind not in "fiubV" or dataset.dtype.hasobject:
            return {**found, "layout": "other"}
        if dataset.external or dataset.is_virtual:
            return {**found, "layout": "outside"}
        if dataset.chunks is not None:
            return {**found, **self.chunks(dataset)}
        offset = dataset.id.get_offset()
        if offset is not None:
            return {**found, "layout": "contiguous", "offset": offset}
        if dataset.nbytes == 0:
            return {**found, "layout": "inline", "data": ""}
        if dataset.id.get_storage_size() < dataset.nbytes:
            return {**found, "layout": "missing"}
        return {**found, "layout": "inline", "data": base64.b64encode(dataset[()].tobytes()).decode()}

    def chunks(self, dataset) -> dict:
        settings = dataset.id.get_create_plist()
        filters = [settings.get_filter(place)[0] for place in range(settings.get_nfilters())]
        if any(one not in (_DEFLATE, _SHUFFLE, _CHECKSUM) for one in filters):
            return {"layout": "filtered", "filter": settings.get_filter(0)[3].decode("utf-8", "replace")}
        pieces = []
        for place in range(dataset.id.get_num_chunks()):
            info = dataset.id.get_chunk_info(place)
            pieces.append([list(info.chunk_offset), info.filter_mask, info.byte_offset, info.size])
        return {"layout": "chunked", "chunk": list(dataset.chunks), "filters": filters, "pieces": pieces}


if __name__ == "__main__":
    # The folder of this file has modules with names of their own, which are not meant to be found.
    sys.path.pop(0)
    limit()
    import h5py

    with h5py.File(sys.argv[1], "r") as opened:
        json.dump(Reader(opened, os.path.getsize(sys.argv[1])).tree, sys.stdout)
