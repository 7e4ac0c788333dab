"""Small formats and scales: torch's own casts, values written by hand, plain float64 loops."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_p3o.numerics import (
    E2M1,
    E4M3,
    E5M2,
    FloatFormat,
    Scaling,
    fake_quantize,
    num_blocks,
    round_to_format,
    to_blocks,
)
from megatron_p3o.numerics.scaling import scale_of
from megatron_p3o.weights.quantize import dequantize_blockwise, quantize_blockwise

FORMATS = (E4M3, E5M2, E2M1)
# The same numbers by the arithmetic that formats without a dtype go through.
GENERIC = tuple(replace(f, dtype=None) for f in (E4M3, E5M2))
BLOCKS = ((128, 128), (1, 128), (1, 32))
TINY = torch.finfo(torch.float32).tiny


def by_name(value: object) -> str:
    return value.name if isinstance(value, FloatFormat) else str(value)


def numbers_of(number_format: FloatFormat) -> list[float]:
    """All finite non-negative numbers, in order, from the definition of the format."""
    steps, least = 2**number_format.mantissa_bits, number_format.min_exponent
    found = [mantissa / steps * 2.0**least for mantissa in range(steps)]
    for exponent in range(least, 64):
        found += [(1 + mantissa / steps) * 2.0**exponent for mantissa in range(steps)]
    return [number for number in found if number <= number_format.max_value]


def nearest(value: float, number_format: FloatFormat) -> float:
    """By search: ties go to the even place in the list, which is the even mantissa."""
    numbers = np.array(numbers_of(number_format))
    distance = np.abs(numbers - min(abs(value), number_format.max_value))
    ties = np.flatnonzero(distance == distance.min())
    place = next((i for i in ties if i % 2 == 0), ties[0])
    return float(np.copysign(numbers[place], value))


def interesting(number_format: FloatFormat) -> Tensor:
    """Every number, every midpoint, their neighbours in float32, and what saturates."""
    numbers = torch.tensor(numbers_of(number_format))
    values = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2])
    inf = torch.tensor(torch.inf)
    values = torch.cat([values, values.nextafter(inf), values.nextafter(-inf)])
    top = number_format.max_value
    values = torch.cat([values, torch.tensor([1.01 * top, 1.07 * top, 2 * top, 1e30, torch.inf])])
    return torch.cat([values, -values])


def test_the_formats_have_the_numbers_of_their_definitions() -> None:
    assert numbers_of(E2M1) == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for number_format, count in ((E4M3, 127), (E5M2, 124)):  # NaN, and infinity for e5m2, left out
        assert number_format.dtype is not None
        stored = torch.arange(256, dtype=torch.uint8).view(number_format.dtype).float()
        finite = stored[stored.isfinite() & (stored >= 0)].unique().tolist()
        assert finite == numbers_of(number_format)
        assert len(finite) == count
        assert finite[-1] == number_format.max_value == torch.finfo(number_format.dtype).max


@pytest.mark.parametrize("number_format", [*FORMATS, *GENERIC], ids=by_name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_is_to_the_nearest_number_ties_to_even(
    number_format: FloatFormat, dtype: torch.dtype
) -> None:
    values = interesting(number_format)
    rounded = round_to_format(values.to(dtype), number_format)
    assert rounded.dtype is dtype
    assert rounded.tolist() == [nearest(v, number_format) for v in values.tolist()]


@pytest.mark.parametrize("number_format", GENERIC, ids=by_name)
def test_the_arithmetic_gives_the_bits_of_torchs_cast(number_format: FloatFormat) -> None:
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[number_format.name]
    values = torch.cat(
        [interesting(number_format), torch.randn(20_000) * 2 ** (8 * torch.randn(1))]
    )
    cast = values.clamp(-number_format.max_value, number_format.max_value).to(dtype).float()
    ours = round_to_format(values, number_format)
    assert torch.equal(ours.view(torch.int32), cast.view(torch.int32))  # signs of zeros too


@pytest.mark.parametrize("number_format", [*FORMATS, *GENERIC], ids=by_name)
def test_nan_stays_nan_and_infinity_saturates(number_format: FloatFormat) -> None:
    values = torch.tensor([torch.nan, torch.inf, -torch.inf])
    rounded = round_to_format(values, number_format).tolist()
    assert rounded[0] != rounded[0]
    assert rounded[1:] == [number_format.max_value, -number_format.max_value]


@pytest.mark.parametrize(
    ("value", "rounded"),
    # Ties: the upper and the lower neighbour in turn are even; 5 lies between 4 and 6.
    [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4), (5.01, 6), (9, 6)],
)
def test_four_bit_ties_written_by_hand(value: float, rounded: float) -> None:
    values = torch.tensor([value, -value])
    assert round_to_format(values, E2M1).tolist() == [rounded, -rounded]


@pytest.mark.parametrize("number_format", [*FORMATS, *GENERIC], ids=by_name)
@given(values=st.lists(st.floats(-1e5, 1e5, width=32), min_size=1, max_size=20))
def test_rounding_again_changes_nothing_and_signs_do_not_matter(
    number_format: FloatFormat, values: list[float]
) -> None:
    given_values = torch.tensor(values)
    once = round_to_format(given_values, number_format)
    assert torch.equal(round_to_format(once, number_format), once)
    assert torch.equal(round_to_format(-given_values, number_format), -once)


positive = st.floats(2.0**-110, 2.0**120, width=32)


@pytest.mark.parametrize("number_format", FORMATS, ids=by_name)
@given(largest=positive)
def test_the_scale_maps_the_largest_onto_the_formats_largest(
    number_format: FloatFormat, largest: float
) -> None:
    scale = float(scale_of(torch.tensor(largest), number_format))
    assert scale == np.float32(largest) / np.float32(number_format.max_value)


@pytest.mark.parametrize("number_format", FORMATS, ids=by_name)
@given(largest=positive, exponent=st.integers(-100, 100))
def test_a_power_of_two_scale_is_the_least_that_reaches(
    number_format: FloatFormat, largest: float, exponent: int
) -> None:
    top = number_format.max_value
    # Exact multiples and their neighbours are where an exponent can be one off.
    exact = torch.tensor(top * 2.0**exponent)
    up, down = exact.nextafter(torch.tensor(torch.inf)), exact.nextafter(torch.tensor(0.0))
    for value in (torch.tensor(largest), exact, up, down):
        scale = float(scale_of(value, number_format, power_of_two=True))
        assert np.frexp(scale)[0] == 0.5
        needed = Fraction(float(value)) / Fraction(top)
        assert Fraction(scale) / 2 < needed <= Fraction(scale)


def test_scales_of_nothing_and_of_the_least_numbers() -> None:
    largest = torch.tensor([0.0, 1e-45, TINY])
    for power_of_two in (False, True):
        scales = scale_of(largest, E4M3, power_of_two=power_of_two)
        assert scales.tolist() == [1.0, TINY, TINY]


def plain(matrix: Tensor, number_format: FloatFormat, scaling: Scaling) -> np.ndarray:
    """Group by group and number by number, in float64; scales in float32 as they are stored."""
    values = matrix.double().numpy()
    rows, columns = scaling.block or values.shape
    result = np.zeros_like(values)
    numbers = np.array(numbers_of(number_format))
    for top in range(0, values.shape[0], rows):
        for left in range(0, values.shape[1], columns):
            group = values[top : top + rows, left : left + columns]
            largest = np.abs(group).max()
            scale = float(np.float32(largest) / np.float32(number_format.max_value)) or 1.0
            if scaling.power_of_two:
                scale = 2.0 ** np.ceil(np.log2(largest / number_format.max_value)) if largest else 1
            scaled = (group / scale).astype(np.float32).astype(np.float64)
            distance = np.abs(np.minimum(np.abs(scaled), numbers[-1])[..., None] - numbers)
            tied = distance == distance.min(-1, keepdims=True)
            even = tied & (np.arange(len(numbers)) % 2 == 0)
            place = np.where(even.any(-1), even.argmax(-1), tied.argmax(-1))
            result[top : top + rows, left : left + columns] = (
                np.sign(group) * numbers[place] * scale
            )
    return result


@pytest.mark.parametrize("number_format", FORMATS, ids=by_name)
@pytest.mark.parametrize("block", [None, *BLOCKS, (4, 3)], ids=str)
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("shape", [(5, 300), (130, 131)], ids=str)
def test_blocks_against_a_plain_loop(
    number_format: FloatFormat,
    block: tuple[int, int] | None,
    power_of_two: bool,
    shape: tuple[int, int],
) -> None:
    """Both shapes leave blocks at the right or lower edge that are not full."""
    matrix = torch.randn(shape) * torch.exp(2 * torch.randn(shape))
    matrix[0, :128] = 0.0  # a group of zeros
    scaling = Scaling(block, power_of_two)
    got = fake_quantize(matrix, number_format, scaling)
    assert (got.shape, got.dtype) == (matrix.shape, torch.float32)
    want = plain(matrix, number_format, scaling)
    # The product of number and scale is rounded to float32, once.
    assert np.array_equal(got.numpy(), want.astype(np.float32))


@pytest.mark.parametrize("shape", [(128, 128), (1100, 130), (1, 1), (129, 3), (3000, 40)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_square_blocks_give_what_published_weights_hold(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = (torch.randn(shape) * torch.exp(2 * torch.randn(shape))).to(dtype)
    weight[: shape[0] // 2, : shape[1] // 3] = 0.0
    stored = dequantize_blockwise(*quantize_blockwise(weight), dtype=dtype)
    assert torch.equal(fake_quantize(weight, E4M3, Scaling((128, 128))), stored)


@given(
    rows=st.integers(1, 7),
    columns=st.integers(1, 7),
    block=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    exponent=st.integers(-30, 30),
    power_of_two=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_error_is_within_half_a_spacing(
    rows: int,
    columns: int,
    block: tuple[int, int],
    exponent: int,
    power_of_two: bool,
    seed: int,
) -> None:
    """The bound of `weights.quantize` for e4m3, and for the other formats by their definitions."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randint(-12, 3, (rows, columns), generator=generator)
    matrix = torch.randn(rows, columns, generator=generator) * 2.0 ** (exponent + spread)
    largest = to_blocks(matrix, block).abs().amax(dim=(1, 3))
    down, across = (torch.arange(n) // b for n, b in zip((rows, columns), block, strict=True))
    for f in FORMATS:
        scale = scale_of(largest, f, power_of_two=power_of_two)[down][:, across].double()
        error = (fake_quantize(matrix, f, Scaling(block, power_of_two)).double() - matrix).abs()
        normal = matrix.double().abs() * 2.0 ** -(f.mantissa_bits + 1)
        subnormal = scale * 2.0 ** (f.min_exponent - f.mantissa_bits - 1)
        assert (error <= torch.maximum(normal, subnormal) * (1 + 1e-6)).all()


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("block", [None, *BLOCKS], ids=str)
def test_empty_matrices_stay_empty(shape: tuple[int, int], block: tuple[int, int] | None) -> None:
    assert fake_quantize(torch.empty(shape), E4M3, Scaling(block)).shape == shape


@pytest.mark.parametrize("block", [None, *BLOCKS], ids=str)
def test_zeros_stay_zeros(block: tuple[int, int] | None) -> None:
    assert torch.equal(
        fake_quantize(torch.zeros(3, 200), E4M3, Scaling(block)), torch.zeros(3, 200)
    )


@pytest.mark.parametrize("number_format", FORMATS, ids=by_name)
@pytest.mark.parametrize("block", [None, *BLOCKS], ids=str)
def test_rounding_with_powers_of_two_twice_is_rounding_once(
    number_format: FloatFormat, block: tuple[int, int] | None
) -> None:
    """A scale that shrinks with the rounded maximum still holds what is held: only the exponents
    of the numbers rise. With other scales the product of number and scale is itself rounded."""
    scaling = Scaling(block, power_of_two=True)
    once = fake_quantize(torch.randn(140, 150) * 1e3, number_format, scaling)
    assert torch.equal(fake_quantize(once, number_format, scaling), once)


def test_scales_that_are_no_powers_of_two_are_idempotent_to_float32() -> None:
    """The largest of a group comes back as itself, so the scale does, up to its last bit."""
    once = fake_quantize(torch.randn(140, 150), E4M3, Scaling((1, 128)))
    torch.testing.assert_close(
        fake_quantize(once, E4M3, Scaling((1, 128))), once, rtol=3e-7, atol=0
    )


def test_a_given_scale_is_used_and_numbers_beyond_its_reach_saturate() -> None:
    matrix = torch.tensor([[1.0, 8.0, 17.0, 1000.0, -2000.0]])
    # In units of 2: 0.5, 4, 8.5 (between 8 and 9: 8 is even), 500 and -1000 (448 is the largest).
    got = fake_quantize(matrix, E4M3, scale=torch.tensor(2.0))
    assert got.tolist() == [[1.0, 8.0, 16.0, 896.0, -896.0]]


def test_bfloat16_is_rounded_from_float32_once() -> None:
    matrix = torch.randn(7, 260).bfloat16()
    for scaling in (Scaling(), Scaling((1, 128)), Scaling((1, 32), power_of_two=True)):
        got = fake_quantize(matrix, E4M3, scaling)
        assert got.dtype is torch.bfloat16
        assert torch.equal(got, fake_quantize(matrix.float(), E4M3, scaling).bfloat16())


def test_blocks_begin_at_the_first_row_and_column() -> None:
    assert num_blocks((3, 5), (2, 4)) == (2, 2)
    blocks = to_blocks(torch.arange(15.0).reshape(3, 5), (2, 4))
    assert blocks.shape == (2, 2, 2, 4)
    assert blocks[0, :, 0].tolist() == [[0, 1, 2, 3], [5, 6, 7, 8]]
    assert blocks[0, :, 1].tolist() == [[4, 0, 0, 0], [9, 0, 0, 0]]
    assert blocks[1, :, 0].tolist() == [[10, 11, 12, 13], [0, 0, 0, 0]]
