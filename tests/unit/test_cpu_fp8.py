"""One emulated linear layer: its three products and its history, against float64 oracles."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_p3o.config import PrecisionSection
from megatron_p3o.parallel.cpu_fp8 import AmaxHistory, Recipe, _Fp8Product

# T tokens, I inputs, O outputs: none a multiple of a block, so that groups end early.
T, I, O = 70, 140, 150  # noqa: E741
Round = Callable[[Tensor], Tensor]
DTYPES = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}


def recipe_of(trainer: str, **details: Any) -> Recipe:
    return Recipe.of(PrecisionSection.model_validate({"trainer": trainer, "fp8": details}))


def rounder(number_format: str, *, rows: int, columns: int, power_of_two: bool) -> Round:
    """Rounds [n, m] group by group; a size of 0 is all."""
    dtype, top = DTYPES[number_format]

    def round_all(matrix: Tensor) -> Tensor:
        height, width = rows or matrix.shape[0], columns or matrix.shape[1]
        parts = [
            torch.cat([round_group(group) for group in band.split(width, dim=1)], dim=1)
            for band in matrix.split(height)
        ]
        return torch.cat(parts)

    def round_group(group: Tensor) -> Tensor:
        scale = group.abs().max().float() / top
        if power_of_two:
            scale = torch.exp2(torch.ceil(torch.log2(scale.double()))).float()
        return (group.float() / scale).to(dtype).double() * scale.double()

    return round_all


def whole(number_format: str) -> Round:
    return rounder(number_format, rows=0, columns=0, power_of_two=False)


def along(length: int, number_format: str) -> Round:
    return rounder(number_format, rows=1, columns=length, power_of_two=True)


def square(number_format: str) -> Round:
    return rounder(number_format, rows=128, columns=128, power_of_two=True)


def of_columns(round_rows: Round) -> Round:
    """The same groups, of columns."""
    return lambda matrix: round_rows(matrix.t()).t()


# How x, w and g are rounded; groups lie along the sum of each product.
RECIPES: dict[str, tuple[Recipe, Round, Round, Round]] = {
    "tensorwise": (recipe_of("fp8-tensorwise"), whole("e4m3"), whole("e4m3"), whole("e5m2")),
    "tensorwise e4m3": (
        recipe_of("fp8-tensorwise", format="e4m3"),
        whole("e4m3"),
        whole("e4m3"),
        whole("e4m3"),
    ),
    "blockwise": (
        recipe_of("fp8-blockwise"),
        along(128, "e4m3"),
        square("e4m3"),
        along(128, "e4m3"),
    ),
    "blockwise hybrid": (
        recipe_of("fp8-blockwise", format="hybrid"),
        along(128, "e4m3"),
        square("e4m3"),
        along(128, "e5m2"),
    ),
    "mxfp8": (recipe_of("fp8-mxfp8"), along(32, "e4m3"), along(32, "e4m3"), along(32, "e4m3")),
    "mxfp8 hybrid": (
        recipe_of("fp8-mxfp8", format="hybrid"),
        along(32, "e4m3"),
        along(32, "e4m3"),
        along(32, "e5m2"),
    ),
}


def factors() -> tuple[Tensor, Tensor, Tensor]:
    """x, w, g whose magnitudes span what the formats do, so that groups matter."""

    def draw(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns) * torch.exp(2 * torch.randn(rows, columns))

    return draw(T, I), draw(O, I), draw(T, O)


@pytest.mark.parametrize("name", RECIPES)
def test_the_three_products_are_those_of_the_rounded_factors(name: str) -> None:
    recipe, of_x, of_w, of_g = RECIPES[name]
    x, w, g = factors()
    # Rounding must be seen, and be rounding.
    assert all(0.005 < (r(m) - m).norm() / m.norm() < 0.1 for r, m in ((of_x, x), (of_g, g)))
    x.requires_grad_()
    w.requires_grad_()
    y = _Fp8Product.apply(x, w, recipe, None)
    y.backward(g)
    exact_x, exact_w = x.detach(), w.detach()
    wanted = {
        "y": of_x(exact_x) @ of_w(exact_w).t(),
        "dx": of_g(g) @ of_columns(of_w)(exact_w),
        "dw": of_columns(of_g)(g).t() @ of_columns(of_x)(exact_x),
    }
    for product, got in (("y", y.detach()), ("dx", x.grad), ("dw", w.grad)):
        assert got is not None
        error = (got.double() - wanted[product]).abs().max() / wanted[product].abs().max()
        assert error < 1e-6, product


@pytest.mark.parametrize("name", ["blockwise", "mxfp8"])
def test_a_factor_of_two_products_is_rounded_from_its_exact_numbers_each_time(name: str) -> None:
    """Rounding what is already rounded along the other direction would be another number."""
    _, of_x, of_w, _ = RECIPES[name]
    x, w, _ = factors()
    assert not torch.equal(of_columns(of_x)(of_x(x)), of_columns(of_x)(x))
    # Square blocks are the same in both directions; groups of 32 are not.
    assert torch.equal(of_columns(of_w)(w), of_w(w)) == (name == "blockwise")


def test_only_the_gradients_that_are_needed_are_computed() -> None:
    recipe = recipe_of("fp8-tensorwise")
    x, w, g = factors()
    y = _Fp8Product.apply(x.requires_grad_(), w, recipe, None)
    y.backward(g)
    assert x.grad is not None and w.grad is None


def test_recipes_follow_the_section() -> None:
    delayed = recipe_of("fp8-delayed", margin=3, amax_history=7, amax_from="most_recent")
    assert (delayed.history, delayed.margin, delayed.from_most_recent) == (7, 3, True)
    assert delayed.gradients.name == "e5m2"
    for trainer in ("fp8-tensorwise", "fp8-blockwise", "fp8-mxfp8"):
        assert recipe_of(trainer).history == 0
    assert recipe_of("fp8-blockwise").gradients.name == "e4m3"


INPUT, WEIGHT, GRADIENT = range(3)
ONE_OF_448 = torch.tensor([[448.0, 17.0, -3.3]])


def test_the_first_step_uses_its_own_magnitude() -> None:
    recipe, history = recipe_of("fp8-delayed", amax_history=3), AmaxHistory(3)
    rounded = recipe.rounded(ONE_OF_448, INPUT, history)
    assert rounded.tolist() == [[448.0, 16.0, -3.25]]
    rounded = recipe.rounded(2 * ONE_OF_448, INPUT, history)  # another microbatch: still its own
    assert rounded.tolist() == [[896.0, 32.0, -6.5]]
    assert history.past.count_nonzero() == 0
    assert history.present.tolist() == [896.0, 0.0, 0.0]


def test_later_steps_use_the_past_and_saturate() -> None:
    recipe, history = recipe_of("fp8-delayed", amax_history=3), AmaxHistory(3)
    history.advance(torch.tensor([224.0, 0.0, 57344.0]))
    # The scale is 1/2: numbers beyond 224 become 224; 17 is 34 halves, a tie between 32 and 36.
    assert recipe.rounded(ONE_OF_448, INPUT, history).tolist() == [[224.0, 16.0, -3.25]]
    # A tensor without a past has its own; a gradient is e5m2, with 2 bits: 17 is 16, 3.3 is 3.5.
    assert recipe.rounded(ONE_OF_448, WEIGHT, history).tolist() == [[448.0, 16.0, -3.25]]
    assert recipe.rounded(ONE_OF_448, GRADIENT, history).tolist() == [[448.0, 16.0, -3.5]]
    assert history.present.tolist() == [448.0, 448.0, 448.0]


def test_the_margin_gives_room_above_the_past() -> None:
    recipe, history = recipe_of("fp8-delayed", amax_history=3, margin=1), AmaxHistory(3)
    history.advance(torch.full((3,), 224.0))
    assert recipe.rounded(ONE_OF_448, INPUT, history).tolist() == [[448.0, 16.0, -3.25]]


@pytest.mark.parametrize(
    ("amax_from", "largest"),
    [("max", [1, 4, 4, 4, 2]), ("most_recent", [1, 4, 2, 0.5, 0.25])],
)
def test_which_magnitude_of_the_window_gives_the_scale(
    amax_from: str, largest: list[float]
) -> None:
    """Magnitudes 1, 4, 2, 1/2, 1/4 in turn; the window of three forgets 4 with the fifth."""
    recipe = recipe_of("fp8-delayed", amax_history=3, amax_from=amax_from)
    history = AmaxHistory(3)
    scales = []
    for magnitude in (1.0, 4.0, 2.0, 0.5, 0.25):
        history.advance(torch.full((3,), magnitude))
        scale = history.scale(INPUT, torch.tensor([[9.0]]), recipe.gradients, recipe)
        scales.append(float(57344.0 * scale))
    assert scales == pytest.approx(largest, rel=1e-6)
    assert history.past[INPUT].tolist() == [0.25, 0.5, 2.0]
    assert history.past.shape == (3, 3)


def test_a_step_remembers_its_largest_microbatch_and_forgets_it_with_the_next_step() -> None:
    recipe, history = recipe_of("fp8-delayed", amax_history=2), AmaxHistory(2)
    for factor in (1.0, 3.0, 2.0):
        recipe.rounded(factor * torch.ones(2, 2), INPUT, history)
    assert history.present[INPUT] == 3.0
    history.advance(history.present)
    assert history.past[INPUT].tolist() == [3.0, 0.0]
    assert history.present.tolist() == [0.0, 0.0, 0.0]


def test_products_with_a_history_round_as_it_says() -> None:
    recipe, history = recipe_of("fp8-delayed", amax_history=4), AmaxHistory(4)
    x, w, g = factors()
    largest = torch.stack([m.abs().max() for m in (x, w, g)])
    history.advance(0.5 * largest)

    def rounded(matrix: Tensor, which: int, number_format: str) -> Tensor:
        dtype, top = DTYPES[number_format]
        scale = 0.5 * largest[which] / top
        return (matrix / scale).clamp(-top, top).to(dtype).double() * scale.double()

    y = _Fp8Product.apply(x.requires_grad_(), w.requires_grad_(), recipe, history)
    y.backward(g)
    round_x, round_w = rounded(x.detach(), INPUT, "e4m3"), rounded(w.detach(), WEIGHT, "e4m3")
    round_g = rounded(g, GRADIENT, "e5m2")
    wanted = (round_x @ round_w.t(), round_g @ round_w, round_g.t() @ round_x)
    for got, want in zip((y.detach(), x.grad, w.grad), wanted, strict=True):
        assert got is not None
        assert (got.double() - want).abs().max() / want.abs().max() < 1e-6
    assert torch.equal(history.present, largest)


def test_no_tokens_give_no_output_and_no_gradient() -> None:
    """An expert that no token chose."""
    _, w, _ = factors()
    for name, (recipe, *_) in {**RECIPES, "delayed": (recipe_of("fp8-delayed"),)}.items():
        history = AmaxHistory(2) if name == "delayed" else None
        x, weight = torch.zeros(0, I, requires_grad=True), w.clone().requires_grad_()
        y = _Fp8Product.apply(x, weight, recipe, history)
        assert y.shape == (0, O)
        y.sum().backward()
        assert weight.grad is not None and weight.grad.count_nonzero() == 0
        if history is not None:
            assert history.present[INPUT] == 0
