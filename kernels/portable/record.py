"""Values with named parts for kernels: tensors, tuples and compile-time constants under one name.

`triton.language.core._aggregate` is Triton 3.6's private name for this. A tuple would do, but its constants become
tensors when it is assigned to a name.
"""

from triton.language.core import _aggregate


def record(cls: type) -> type:
    """Turn a class with annotated fields into a value that Triton and Gluon kernels, and their interpreters, can create
    and pass: `Name(...)` has the fields as arguments, in their order.

    Triton's cache on disk is keyed by the kernels' source, not by the order of the fields here. After a change of the
    order, change a line of the kernels too, or clear the cache.
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
