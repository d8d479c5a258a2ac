# No types: those that come with this library, or that pyright brings for it, lack names that are there and differ from
# version to version. Whatever is taken from it is Any.
from typing import Any

def __getattr__(name: str) -> Any: ...
