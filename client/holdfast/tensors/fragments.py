"""Shards that are declared by hand, and questions about tensors of the state: their memory and shape."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from operator import index
from typing import Any, NamedTuple, TypeGuard

import torch

from holdfast.tensors.torch_dtypes import has_memory
from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.region import Box, Shape, check_box, first_overlap, flat_boxes


def extent(tensor: torch.Tensor) -> int:
    """The number of elements of memory from the tensor's first element to its last."""
    return (
        1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    )


def start_in(part: torch.Tensor, outer: torch.Tensor) -> int | None:
    """Offset of a view in elements from the first of `outer`, which has no gaps; None if it is outside.

    An empty view is inside of everything, at its beginning.
    """
    if not part.numel():
        return 0
    if part.device != outer.device or part.element_size() != outer.element_size() or not has_memory(part):
        return None
    start, rest = divmod(part.data_ptr() - outer.data_ptr(), outer.element_size())
    return start if not rest and start >= 0 and start + extent(part) <= extent(outer) else None


class _Term(NamedTuple):
    """A whole number of times from `low` to `high` that a distance may contain `bytes`."""

    bytes: int
    low: int
    high: int


def any_share_memory(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether two of these tensors have a byte of memory in common; those without plain memory do not count."""
    return next(sharing(tensors), None) is not None


class Shared(NamedTuple):
    """The places, in a list of tensors, of two that have a byte of memory in common."""

    first: int
    second: int


def sharing(tensors: Iterable[torch.Tensor]) -> Iterator[Shared]:
    """All pairs of these tensors with a byte of memory in common; those without plain memory do not count."""
    placed = [(number, tensor) for number, tensor in enumerate(tensors) if has_memory(tensor) and tensor.numel()]
    active: list[tuple[int, torch.Tensor]] = []
    for number, tensor in sorted(placed, key=lambda one: one[1].data_ptr()):
        start = tensor.data_ptr()
        active = [one for one in active if one[1].data_ptr() + extent(one[1]) * one[1].element_size() > start]
        for before, other in active:
            if _share_memory(other, tensor):
                yield Shared(*sorted((before, number)))
        active.append((number, tensor))


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.device != b.device:
        return False
    reach: dict[int, tuple[int, int]] = {}  # stride in bytes -> how often the way from a to b may contain it
    for tensor, sign in ((a, 1), (b, -1)):
        size = tensor.element_size()
        for stride, n in ((1, size), *zip((stride * size for stride in tensor.stride()), tensor.shape, strict=True)):
            low, high = reach.get(stride, (0, 0))
            reach[stride] = (low, high + n - 1) if sign > 0 else (low - n + 1, high)
    terms = [_Term(stride, *reach[stride]) for stride in sorted(reach, reverse=True) if stride and any(reach[stride])]
    return _is_sum(b.data_ptr() - a.data_ptr(), terms)


def _is_sum(distance: int, terms: Sequence[_Term]) -> bool:
    if not terms:
        return distance == 0
    first, *rest = terms
    least, most = sum(term.bytes * term.low for term in rest), sum(term.bytes * term.high for term in rest)
    low = max(first.low, -((most - distance) // first.bytes))
    high = min(first.high, (distance - least) // first.bytes)
    return any(_is_sum(distance - times * first.bytes, rest) for times in range(low, high + 1))


DESCRIBED_MAX = 4  # parts of a list whose places its placement names


class Fragment:
    """A shard declared by hand: a live local tensor and its place in a global one.

    It is the box whose corner is `offset` (and whose shape is the tensor's); or, with `flat`, the elements [start, stop) of
    the row-major global tensor; or, with all three, the elements [start, stop) of the row-major box of shape `box` at
    `offset`. The tensor stays the caller's: saves read it, restores write into it.

    Args:
        tensor: The local tensor.
        shape: The shape of the global tensor, in elements.
        offset: The corner of the box in the global tensor, in elements of each dimension.
        box: The shape of the box of which `flat` is a part, in elements.
        flat: The first element, and the one after the last.
        held: The tensor that the optimizer has for this parameter, if it is another object.

    Raises:
        InvalidRequest: If the place does not fit the tensor or the global shape.

    Example:
        >>> Fragment(local, (4096, 4096), offset=(rank * 1024, 0))
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        shape: Sequence[int],
        *,
        offset: Sequence[int] | None = None,
        box: Sequence[int] | None = None,
        flat: tuple[int, int] | None = None,
        held: torch.Tensor | None = None,
    ) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise InvalidRequest(
                f"a Fragment holds a torch.Tensor, not a {type(tensor).__name__}",
                hint="pass this rank's part: Fragment(tensor, shape, offset=…)",
            )
        if held is not None and not isinstance(held, torch.Tensor):
            raise InvalidRequest(
                f"held= is the optimizer's torch.Tensor, not a {type(held).__name__}",
                hint="pass the parameter that the optimizer has, or leave held= out",
            )
        if is_dtensor(tensor):
            raise InvalidRequest(
                "a DTensor already describes its own placement", hint="pass it directly, without a Fragment"
            )
        self.tensor = tensor
        self.held = tensor if held is None else held
        self.shape = _whole_numbers(shape, "shape")
        self.offset = None if offset is None else _whole_numbers(offset, "offset")
        self.box = None if box is None else _whole_numbers(box, "box")
        self.flat = None if flat is None else _range(flat)
        self._check_described()
        _ = self.boxes  # refuses a place outside the shape now

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def place(self) -> tuple[Shape | None, ...]:
        """Its declared place, for comparison."""
        return self.shape, self.offset, self.box, self.flat

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The boxes of the global tensor that the local one holds, in memory order; elements as torch counts them."""
        if self.flat is None:
            box = Box(self.offset or (), tuple(self.tensor.shape))
            check_box(box, self.shape, "Fragment")
            return (box,) if box.volume else ()
        start, stop = self.flat
        if not self.tensor.is_contiguous() or self.tensor.numel() != stop - start:
            raise StateMismatch(
                f"the flat range [{start}, {stop}) needs a contiguous tensor of {stop - start} elements, "
                f"not one of {self.tensor.numel()}{'' if self.tensor.is_contiguous() else ', not contiguous'}",
                hint="pass these elements alone: Fragment(tensor.flatten()[…], shape, flat=(start, stop))",
            )
        if self.box is None:
            return tuple(flat_boxes(start, stop, self.shape))
        outer = Box(self.offset or (), self.box)
        check_box(outer, self.shape, "Fragment")
        return tuple(outer.place(inner) for inner in flat_boxes(start, stop, outer.shape))

    @property
    def described(self) -> str:
        """Its place as text."""
        if self.flat is None:
            return f"box at {list(self.offset or ())}"
        within = "" if self.box is None else f" of the box {list(self.offset or ())}+{list(self.box)}"
        return f"flat {list(self.flat)}{within}"

    def with_tensor(self, tensor: torch.Tensor) -> Fragment:
        return Fragment(tensor, self.shape, offset=self.offset, box=self.box, flat=self.flat)

    def _check_described(self) -> None:
        if self.box is None and (self.offset is None) == (self.flat is None):
            raise InvalidRequest(
                "a Fragment has both an offset and a flat range, or neither",
                hint="pass either offset= or flat=; pass both only together with box=, for a flat range of that box",
            )
        if self.box is not None and (self.offset is None or self.flat is None):
            raise InvalidRequest(
                "a Fragment with box= needs offset= and flat=: the corner of the box, and the range of its elements",
                hint="if the tensor is the whole box, give offset= alone",
            )


def _whole_numbers(values: Sequence[int], what: str) -> Shape:
    try:
        return tuple(index(value) for value in values)
    except TypeError:
        raise InvalidRequest(
            f"the {what} of a Fragment must be a sequence of whole numbers, not {values!r}",
            hint="for example Fragment(tensor, (4096, 1024), offset=(0, 512))",
        ) from None


def _range(flat: tuple[int, int]) -> tuple[int, int]:
    numbers = _whole_numbers(flat, "flat range")
    if len(numbers) != 2:
        raise InvalidRequest(
            f"the flat range of a Fragment is (start, stop), not {flat!r}",
            hint="give the first element and the one after the last: flat=(start, stop)",
        )
    return numbers[0], numbers[1]


class FragmentList:
    """A list or tuple of Fragments in the state: the parts of one tensor that this rank holds.

    `given` is the caller's list, `parts` its items, all of one shape and dtype, without common elements or memory.
    """

    def __init__(self, given: Sequence[Fragment], path: str) -> None:
        self.given = given
        self.parts = tuple(given)
        first = self.parts[0]
        for part in self.parts[1:]:
            if (part.shape, part.dtype) != (first.shape, first.dtype):
                raise InvalidRequest(
                    f"{path}: a list of Fragments is one tensor, but this one has parts of {_spec(first)} and of "
                    f"{_spec(part)}",
                    hint="put Fragments of different tensors under different names, in a dict",
                )
        overlap = first_overlap(self.boxes)
        if overlap is not None:
            a, b = overlap
            raise InvalidRequest(
                f"{path}: a list of Fragments is one tensor, but its parts {list(a.offset)}+{list(a.shape)} and "
                f"{list(b.offset)}+{list(b.shape)} overlap",
                hint="list each element of the tensor once; put Fragments of different tensors under different names, "
                "in a dict",
            )
        if any_share_memory([part.tensor for part in self.parts]):
            raise InvalidRequest(
                f"{path}: two Fragments of this list share memory, so a restore would overwrite one with the other",
                hint="give each Fragment its slice of the local tensor",
            )

    @property
    def shape(self) -> Shape:
        return self.parts[0].shape

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def boxes(self) -> tuple[Box, ...]:
        return tuple(box for part in self.parts for box in part.boxes)

    @property
    def described(self) -> str:
        """Its place as text."""
        more = f" and {len(self.parts) - DESCRIBED_MAX} more" if len(self.parts) > DESCRIBED_MAX else ""
        return ", ".join(part.described for part in self.parts[:DESCRIBED_MAX]) + more

    def with_new_memory(self, dtype: torch.dtype | None = None) -> FragmentList:
        """The same places, with copies of the parts' tensors, of another dtype if one is given."""
        copies = [part.with_tensor(part.tensor.detach().to(dtype, copy=True)) for part in self.parts]
        return FragmentList(tuple(copies) if isinstance(self.given, tuple) else copies, "copy")

    def check_held(self, tensor: torch.Tensor, path: str) -> None:
        """Raise if the parts are not all views of the parameter that an optimizer holds for them."""
        if any(part.held is not tensor for part in self.parts) or self._starts() is None:
            raise InvalidRequest(
                f"{path}: the optimizer holds a tensor of shape {list(tensor.shape)}, but the Fragments of this list are "
                "not all views of it, so it is not known which part of its moments belongs to which",
                hint="make the Fragments views of that tensor, and pass it to each of them as held=",
            )

    def views_of(self, local: torch.Tensor, path: str) -> list[torch.Tensor]:
        """The place of each part in `local`, which has the shape of the optimizer's parameter, such as a moment.

        Raises `InvalidRequest` with the path for a tensor of another shape.
        """
        held = self.parts[0].held
        starts = self._starts()
        if starts is None or (local.shape, local.stride()) != (held.shape, held.stride()):
            raise InvalidRequest(
                f"{path}: a tensor of shape {list(local.shape)} and strides {list(local.stride())} is not laid out as its "
                f"parameter, of shape {list(held.shape)} and strides {list(held.stride())}, so its Fragments are not known",
                hint="keep it in the shape and strides of the parameter, or save without this optimizer: save(groups=…)",
            )
        origin = local.storage_offset()
        forms = [(part.tensor.shape, part.tensor.stride()) for part in self.parts]
        return [local.as_strided(*form, origin + start) for form, start in zip(forms, starts, strict=True)]

    def _starts(self) -> list[int] | None:
        """Offset of each part in the parameter, in elements; None if one is not inside of it."""
        held = self.parts[0].held.detach()
        if is_dtensor(held) or not has_memory(held) or extent(held) != held.numel():
            return None
        starts = []
        for part in self.parts:
            start = start_in(part.tensor, held)
            if start is None:
                return None
            starts.append(start)
        return starts


def _spec(part: Fragment) -> str:
    return f"{part.dtype} {list(part.shape)}"


def fragment_list(value: object, path: str) -> FragmentList | None:
    """The tensor that a list or tuple of Fragments represents, or None for anything else.

    Raises `InvalidRequest`, with the path, for a list with other items, or with parts of several tensors.
    """
    if not holds_fragments(value):
        return None
    others = sorted({type(item).__name__ for item in value if not isinstance(item, Fragment)})
    if others:
        raise InvalidRequest(
            f"{path}: a list of Fragments is one tensor, but this one has values of type {', '.join(others)} among them",
            hint="put the Fragments of each tensor into their own list, and everything else under other keys of a dict",
        )
    return FragmentList(value, path)


def holds_fragments(value: object) -> TypeGuard[Sequence[Any]]:
    return type(value) in (list, tuple) and any(issubclass(kind, Fragment) for kind in set(map(type, value)))  # type: ignore[call-overload]


OneTensor = torch.Tensor | Fragment  # with one local tensor
Storable = OneTensor | FragmentList


def is_dtensor(value: object) -> bool:
    """There is none before its module is imported, which takes half a second: a restart without one does not wait for it."""
    known = sys.modules.get("torch.distributed.tensor")
    return known is not None and isinstance(value, getattr(known, "DTensor", ()))


def is_sharded(value: object) -> bool:
    """Whether a tensor states its own place: a DTensor, Fragment or list of Fragments."""
    return isinstance(value, Fragment | FragmentList) or is_dtensor(value)


def local_tensor(value: OneTensor) -> torch.Tensor:
    """The memory of this rank behind a tensor, DTensor or Fragment; detached, and still the live memory."""
    if isinstance(value, Fragment):
        return value.tensor.detach()
    if is_dtensor(value):
        with torch.no_grad():  # outside autograd, to_local returns the local tensor itself
            return value.to_local().detach()  # type: ignore[attr-defined,no-any-return]
    return value if torch.nn.parameter.is_lazy(value) else value.detach()  # a lazy tensor has no memory, and raises


def parts_of(value: Storable) -> tuple[OneTensor, ...]:
    """The Fragments of a list; of anything else, the value alone."""
    return value.parts if isinstance(value, FragmentList) else (value,)


def local_tensors(value: Storable) -> tuple[torch.Tensor, ...]:
    """This rank's memory of a tensor of the state, part by part."""
    return tuple(map(local_tensor, parts_of(value)))


def objects(value: Storable) -> tuple[int, ...]:
    """The ids of the caller's tensors or Fragments, in order: a FragmentList is made again whenever the state is read."""
    return tuple(map(id, parts_of(value)))


def same_memory(one: Storable, other: Storable) -> bool:
    """Whether both are the same live memory (writes into one appear in the other), or have no elements."""
    mine, others = parts_of(one), parts_of(other)
    return len(mine) == len(others) and all(map(_is_same, mine, others))


def _is_same(one: OneTensor, other: OneTensor) -> bool:
    if _own(one) is _own(other):
        return True
    a, b = local_tensor(one), local_tensor(other)
    if a.shape != b.shape or a.dtype != b.dtype or not a.numel():
        return a.shape == b.shape and a.dtype == b.dtype
    return has_memory(a) and has_memory(b) and a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


def _own(value: OneTensor) -> torch.Tensor:
    return value.tensor if isinstance(value, Fragment) else value


def global_shape(value: Storable) -> Shape:
    """The shape of the whole tensor, with elements counted as in torch."""
    return tuple(value.shape)
