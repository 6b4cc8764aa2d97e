"""What may be saved comes back equal, as it was when save() returned; what may not is named and nothing is written."""

from __future__ import annotations

import enum
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from torchloom.checkpoints.api import Checkpoints
from torchloom.checkpoints.staging import LOADED_WITHOUT_GRADIENT, StagingBuffers
from torchloom.errors import BadInput

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip


def trip(folder: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Saved, and loaded again."""
    with Checkpoints(folder, keep=1) as checkpoints:
        saving = checkpoints.save(1, state, now=True)
        assert saving is not None
        saving.wait()
        assert not saving.error, saving.error
        return checkpoints.load().state


def bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return torch.empty(0, dtype=torch.uint8).set_(plain.clone().untyped_storage())


def assert_equal(one: Any, other: Any, place: str = "state") -> None:
    """To the bit, NaN and all, and of the same types."""
    assert type(one) is type(other), place
    if isinstance(one, torch.Tensor):
        gradient = other.requires_grad and (
            type(other) is torch.nn.Parameter or other.dtype not in LOADED_WITHOUT_GRADIENT
        )
        assert (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, gradient), place
        assert torch.equal(bits(one), bits(other)), place
    elif isinstance(one, dict):
        assert list(one) == list(other), place
        for key in one:
            assert_equal(one[key], other[key], f"{place}[{key!r}]")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), place
        for at, pair in enumerate(zip(one, other, strict=True)):
            assert_equal(*pair, f"{place}[{at}]")
    else:
        assert one == other or repr(one) == repr(other), place


# ── trees of everything that may be saved ────────────────────────────────────────────────────────────────────────────


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = math.prod(shape)
    if dtype is torch.bool:
        tensor = torch.randint(0, 2, (count + 3,)).bool()
    else:
        tensor = torch.randint(0, 256, ((count + 3) * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    tensor = tensor[draw(st.integers(0, 3)) :][:count].reshape(shape)
    how = draw(st.sampled_from(["plain", "transposed", "expanded", "strided", "conjugate", "gradient", "parameter"]))
    if how == "transposed":
        return tensor.permute(tuple(reversed(range(tensor.dim()))))
    if how == "expanded":
        return tensor.unsqueeze(0).expand(3, *shape)
    if how == "strided" and shape:
        return tensor[..., ::2]
    if how == "conjugate" and tensor.is_complex() and dtype is not torch.complex32:
        return tensor.conj().imag if draw(st.booleans()) else tensor.conj()
    if how == "gradient" and (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.clone().requires_grad_()
    if how == "parameter":
        learned = tensor.is_floating_point() and draw(st.booleans())
        return torch.nn.Parameter(tensor, requires_grad=learned)
    return tensor


plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=5),
    st.binary(max_size=5),
)
fixed = st.sampled_from([torch.float8_e5m2, torch.int64, torch.device("cpu"), torch.device("cuda", 1), torch.Size([2])])
keys = st.one_of(plain, st.tuples(plain, plain)).filter(lambda key: repr(key).find("nan") < 0)
trees = st.recursive(
    st.one_of(plain, fixed, tensors(), st.builds(bytearray, st.binary(max_size=5))),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.dictionaries(keys, st.integers(-9, 9), max_size=4).map(Counter),
        st.sets(plain.filter(lambda item: item == item), max_size=4),
    ),
    max_leaves=12,
)


@examples(100)
@given(tree=trees)
def test_any_tree_of_what_may_be_saved_comes_back_equal(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    folder = tmp_path_factory.getbasetemp() / "trees"
    assert_equal(trip(folder, {"tree": tree})["tree"], tree)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_any_type_comes_back_to_the_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(32, dtype=torch.uint8).view(dtype) if dtype is not torch.bool else torch.arange(9) % 2 == 0
    loaded = trip(tmp_path, {"some": tensor, "none": tensor[:0], "one": tensor[1]})
    assert_equal(loaded, {"some": tensor, "none": tensor[:0], "one": tensor[1]})


@pytest.mark.parametrize("dtype", sorted(LOADED_WITHOUT_GRADIENT & set(DTYPES), key=str), ids=str)
def test_what_torch_cannot_load_with_a_gradient_comes_back_without(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(32, dtype=torch.uint8).view(dtype)
    learned = torch.nn.Parameter(tensor.clone())
    loaded = trip(tmp_path, {"leaf": tensor.clone().requires_grad_(), "learned": learned})
    assert_equal(loaded, {"leaf": tensor, "learned": learned})


@pytest.mark.parametrize("value", [b"", {b"": 1}, {(1, b""): b""}, bytearray(), (), set(), 2**2000, -(2**2000)])
def test_what_pickles_in_a_way_of_its_own_can_be_loaded_again(tmp_path: Path, value: Any) -> None:
    assert_equal(trip(tmp_path, {"value": value}), {"value": value})


def test_a_number_of_numpy_comes_back_as_one_of_python(tmp_path: Path) -> None:
    given_ = [np.float64(1.5), np.float32(0.5), np.int64(-3), np.uint8(7), np.bool_(True), np.str_("a"), np.array(2.5)]
    assert_equal(trip(tmp_path, {"numbers": given_})["numbers"], [1.5, 0.5, -3, 7, True, "a", 2.5])


def test_tensors_that_share_memory_still_do(tmp_path: Path) -> None:
    whole = torch.arange(12.0)
    state = {"whole": whole, "part": whole[3:6], "turned": whole.view(3, 4).t(), "other": whole.clone()}
    loaded = trip(tmp_path, state)
    loaded["whole"][4] = 100.0
    assert (loaded["part"][1], loaded["turned"][0, 1]) == (100.0, 100.0)
    assert loaded["other"][4] == 4.0
    tied = torch.nn.Linear(5, 5)
    both = torch.nn.ModuleDict({"a": tied, "b": tied})
    again = trip(tmp_path / "tied", {"model": both})["model"]
    assert again["a.weight"].data_ptr() == again["b.weight"].data_ptr()


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.requires_grad_(),
        lambda t: (t.requires_grad_() * 2).detach(),
        lambda t: t.requires_grad_().t(),
        torch.nn.Parameter,
        lambda t: torch.nn.Parameter(t, requires_grad=False),
        lambda t: t.conj(),
        lambda t: t.conj().requires_grad_(),
        lambda t: t.conj().imag,
        lambda t: torch.nn.Parameter(t.conj()),
        lambda t: t.t(),
        lambda t: t[1:, ::2],
        lambda t: t[:1].expand(5, 4),
        lambda t: t[:0],
        lambda t: t[2, 3],
    ],
)
def test_a_tensor_seen_in_any_way_comes_back_as_what_was_seen(tmp_path: Path, make: Callable[..., Any]) -> None:
    tensor = make(torch.randn(3, 4, dtype=torch.complex64))
    loaded = trip(tmp_path, {"tensor": tensor})["tensor"]
    assert_equal(loaded, tensor)
    assert loaded.is_leaf


def test_one_memory_seen_as_two_types_is_saved_as_both(tmp_path: Path) -> None:
    numbers = torch.randn(6, dtype=torch.complex64)
    state = {"complex": numbers, "real": torch.view_as_real(numbers), "raw": numbers.view(torch.uint8)}
    assert_equal(trip(tmp_path, state), state)


def test_sparse_tensors_come_back(tmp_path: Path) -> None:
    sparse = torch.eye(4).to_sparse()
    loaded = trip(tmp_path, {"sparse": sparse})["sparse"]
    assert loaded.is_sparse
    assert torch.equal(loaded.to_dense(), torch.eye(4))


# ── as it was at the call ────────────────────────────────────────────────────────────────────────────────────────────


def test_training_that_goes_on_does_not_change_what_is_saved(tmp_path: Path) -> None:
    model = torch.nn.Linear(400, 400)
    state = {
        "model": model,
        "large": torch.zeros(4_000_000),
        "list": [1, [2]],
        "dict": {"a": {"b": 1}},
        "bytes": bytearray(b"before"),
        "count": Counter("aab"),
        "set": {1},
    }
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):  # the second time in buffers that were used before
            saving = checkpoints.save(step, state)
            with torch.no_grad():
                model.weight.add_(1.0)
            state["large"].fill_(step)
            state["list"][1].append(3)
            state["dict"]["a"]["b"] = 2
            state["bytes"][:] = b"after!"
            state["count"]["a"] = 100
            state["set"].add(2)
            assert saving is not None
            saving.wait()
            loaded = checkpoints.load(step).state
            assert_equal(loaded["model"]["weight"], before["weight"] + (step - 1))
            assert bool((loaded["large"] == step - 1).all())
            if step == 1:
                wanted = {
                    "list": [1, [2]], "dict": {"a": {"b": 1}}, "bytes": bytearray(b"before"),
                    "count": Counter("aab"), "set": {1},
                }  # fmt: skip
                assert {name: loaded[name] for name in wanted} == wanted


class Registered:
    """What a script has told torch to be harmless."""

    def __init__(self, value: int) -> None:
        self.value = value


def test_an_object_torch_was_told_to_allow_is_saved_as_it_was(tmp_path: Path) -> None:
    with torch.serialization.safe_globals([Registered]):
        thing, text = Registered(1), bytearray(b"before")
        copied = StagingBuffers().copy({"thing": thing, "text": text}).tree
        thing.value = 2
        text[:] = b"after"
        assert (copied["thing"].value, copied["text"]) == (1, b"before")
        assert trip(tmp_path, {"thing": thing})["thing"].value == 2


# ── what may not be saved ────────────────────────────────────────────────────────────────────────────────────────────


class Color(enum.IntEnum):
    RED = 1


class Text(str):
    pass


def itself() -> list[Any]:
    endless: list[Any] = []
    endless.append(endless)
    return endless


def nested(depth: int) -> Any:
    tree: Any = 1
    for _ in range(depth):
        tree = [tree]
    return tree


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (lambda: len, "state['part']['at'][1]: a builtins.builtin_function_or_method"),
        (lambda: print, "state['part']['at'][1]"),
        (object, "state['part']['at'][1]: a builtins.object"),
        (lambda: Color.RED, "Color"),
        (lambda: Text("a"), "Text"),
        (lambda: frozenset({1}), "frozenset"),
        (lambda: defaultdict(int), "defaultdict"),
        (lambda: Path("a"), "PosixPath"),
        (lambda: np.zeros(3), "numpy.ndarray"),
        (lambda: np.longdouble(1), "numpy.longdouble"),
        (lambda: np.datetime64("2024-01-01"), "numpy.datetime64"),
        (lambda: np.timedelta64(5, "s"), "numpy.timedelta64"),
        (lambda: np.array(object(), dtype=object), "numpy.ndarray"),
        (lambda: 2**5000, "too large"),
        (lambda: -(2**5000), "too large"),
        (lambda: {2**5000: 1}, "too large"),
        (lambda: {Color.RED: 1}, "cannot be the key"),
        (lambda: {frozenset(): 1}, "cannot be the key"),
        (lambda: torch.zeros(3, device="meta"), "without data (meta)"),
        (torch.nn.parameter.UninitializedParameter, "UninitializedParameter"),
        (itself, "does it contain itself?"),
        (lambda: nested(100), "nested deeper than 64"),
    ],
)
def test_what_cannot_be_saved_is_refused_with_its_place_and_nothing_is_written(
    tmp_path: Path, value: Callable[[], Any], place: str
) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(BadInput) as caught:
            checkpoints.save(1, {"part": {"at": [0, value()]}})
        assert place in caught.value.message
        assert "state['part']" in caught.value.message
        assert [path.name for path in tmp_path.iterdir() if path.name != ".writer"] == []
        assert trip(tmp_path, {"part": 1}) == {"part": 1}, "the next one is saved"


@pytest.mark.parametrize("state", [None, [], {}, {1: 2}, {"": 1}, torch.nn.Linear(1, 1)])
def test_a_state_is_a_mapping_of_names(tmp_path: Path, state: Any) -> None:
    with pytest.raises(BadInput):
        Checkpoints(tmp_path).save(1, state)


@pytest.mark.parametrize("step", [-1, True, 1.0, "1", None, 10**18])
def test_a_step_is_a_whole_number(tmp_path: Path, step: Any) -> None:
    with pytest.raises(BadInput, match="step"):
        Checkpoints(tmp_path).save(step, {"a": 1})
