"""Values with named parts for kernels: tensors, tuples and compile-time constants under one name.

`triton.language.core._aggregate` is Triton 3.6's private name for this; a tuple would do, but its constants become
tensors when it is given a name.
"""

from triton.language.core import _aggregate


def record(cls: type) -> type:
    """Make of a class with annotated fields a value that Triton and Gluon kernels, and their interpreters, can make and
    pass on: `Name(...)` takes the fields in their order.

    Triton's cache on disk knows the kernels' source, not the order of the fields here: who changes it changes a line of
    the kernels too, or clears the cache.
    """
    names = tuple(cls.__annotations__)

    def __init__(self, *values):
        for name, value in zip(names, values, strict=True):
            setattr(self, name, value)

    cls.__init__ = __init__
    cls.__annotations__ = dict.fromkeys(names, object)  # as Triton checks them; one field may be a tensor or a constant
    made = _aggregate(cls)
    made.hash_attrs = []  # Triton would look for the source of __init__ as for a kernel's
    return made
