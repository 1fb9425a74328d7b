"""The page of the rollout inspector in a browser: highlighting, navigation, keys and numbers."""

import pytest
from playwright.sync_api import Page, expect

from tests.browser.books import demo_book
from tests.browser.conftest import Open
from tests.browser.samples import Book, Predicted, TrueShape

pytestmark = pytest.mark.timeout(60)


def lit_shapes(page: Page) -> set[tuple[str, str]]:
    """Return the owner and the kind of each highlighted shape."""
    shapes = page.locator("#stage .shape.lit").evaluate_all(
        "nodes => nodes.map(node => [node.dataset.owner, node.classList[1]])"
    )
    return {(owner, kind) for owner, kind in shapes}


def lit_tokens(page: Page) -> set[str]:
    return set(page.locator("#strip .token.lit").evaluate_all("nodes => nodes.map(node => node.dataset.owner)"))


def position(page: Page) -> str:
    return page.locator("#where").inner_text()


def sample_id(page: Page) -> str:
    return str(page.evaluate("location.hash.slice(1)"))


def focus_attribute(page: Page, name: str) -> str | None:
    return page.evaluate("name => document.activeElement.getAttribute(name)", name)  # type: ignore[no-any-return]


# Highlighting


def test_a_shape_highlights_its_tokens_and_its_row(open_page: Open) -> None:
    page = open_page(demo_book(), "#99.0.12")
    page.locator('#stage .shape.missed[data-owner="-4"] polygon >> nth=1').hover()
    assert lit_tokens(page) == {"-4"}
    assert page.locator(".object.lit .desc").all_inner_texts() == ["spoon"]


def test_an_invalid_object_has_no_shape_and_says_why(open_page: Open) -> None:
    page = open_page(demo_book(), "#49.0.12")
    row = page.locator(".object.invalid")
    expect(row).to_contain_text("a box has four coordinates, and this has 3")
    row.hover()
    assert lit_shapes(page) == set()
    assert lit_tokens(page) == {"1"}
    assert page.locator('#stage .shape[data-owner="1"]').count() == 0


# Navigation


@pytest.mark.parametrize(
    ("choice", "ids"),
    [
        ("invalid", ["49.0.12", "49.1.13"]),
        ("truncated", ["49.1.13"]),
        ("misses", ["0.0.12", "49.0.12", "49.1.13", "99.0.12", "149.0.12", "199.1.14"]),
        ("extra", ["0.0.12", "49.0.12", "99.0.12"]),
        ("all", ["0.0.12", "49.0.12", "49.1.13", "99.0.12", "149.0.12", "199.0.12", "199.1.14"]),
    ],
)
def test_a_filter_leaves_its_samples_and_goes_to_the_first(open_page: Open, choice: str, ids: list[str]) -> None:
    page = open_page(demo_book(), "#199.1.14")
    if choice == "all":
        page.locator("#filter").select_option("extra")
    page.locator("#filter").select_option(choice)
    assert walk(page) == ids


@pytest.mark.parametrize(
    ("choice", "ids"),
    [
        ("missed", ["0.0.12", "49.0.12", "49.1.13", "99.0.12", "149.0.12", "199.1.14", "199.0.12"]),
        ("loss", ["0.0.12", "49.1.13", "49.0.12", "99.0.12", "149.0.12", "199.0.12", "199.1.14"]),
    ],
)
def test_an_order_puts_the_worst_first_and_unknown_values_last(
    open_page: Open, choice: str, ids: list[str]
) -> None:
    page = open_page(demo_book(), "#99.0.12")
    page.locator("#order").select_option(choice)
    assert walk(page) == ids


def walk(page: Page) -> list[str]:
    ids = [sample_id(page)]
    while page.locator("#on").is_enabled():
        page.locator("#on").click()
        ids.append(sample_id(page))
    assert position(page) == f"{len(ids)} of {len(ids)}"
    return ids


def test_the_address_names_a_sample_or_a_step(open_page: Open) -> None:
    page = open_page(demo_book(), "#149.0.12")
    expect(page.locator("#name")).to_contain_text("Step 150")
    page.evaluate("location.hash = 'step=60'")
    expect(page.locator("#name")).to_contain_text("Step 100")
    page.locator("#filter").select_option("truncated")
    page.evaluate("location.hash = '199.0.12'")
    expect(page.locator("#name")).to_contain_text("Step 200")
    assert position(page) == "6 of 7"


def test_the_same_image_at_other_steps_links_to_them(open_page: Open) -> None:
    page = open_page(demo_book(), "#99.0.12")
    assert page.locator(".step b").all_inner_texts() == ["step 1", "step 50", "step 100", "step 150", "step 200"]
    expect(page.locator(".step[aria-current]")).to_contain_text("3 of 5 found")
    assert page.locator(".step .shape.missed").count() == 5 + 4 + 2 + 1
    page.locator(".step").last.click()
    assert sample_id(page) == "199.0.12"
    expect(page.locator(".step[aria-current]")).to_contain_text("loss 0.127")


# Keys


def test_everything_can_be_done_with_the_keyboard_only(open_page: Open) -> None:
    page = open_page(demo_book(), "#99.0.12")
    for _ in range(30):
        page.keyboard.press("Tab")
        if focus_attribute(page, "data-i"):
            break
    assert page.evaluate("document.activeElement.matches('#strip .token:focus-visible')")
    page.keyboard.press("Control+Home")
    assert focus_attribute(page, "data-i") == "0"
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("End")
    assert focus_attribute(page, "data-owner") == "-1" or lit_shapes(page) == {("3", "extra")}
    page.keyboard.press("Home")
    assert lit_shapes(page) == {("3", "extra")}
    page.keyboard.press("ArrowDown")
    assert lit_shapes(page) == {("-4", "missed")}
    page.keyboard.press("j")
    assert sample_id(page) == "149.0.12"
    assert page.evaluate("document.activeElement.matches('#strip .token')"), "the focus stays in the tokens"
    page.keyboard.press("k")
    assert sample_id(page) == "99.0.12"


# Numbers


def numbers(page: Page) -> dict[str, str]:
    names = page.locator(".numbers dt").all_inner_texts()
    return dict(zip(names, page.locator(".numbers dd").all_inner_texts(), strict=True))


def test_a_coordinate_shows_its_distribution_in_numbers(open_page: Open) -> None:
    book = Book()
    sample = book.add(
        "99.0.1", [TrueShape("cup", (100, 100, 400, 400))], [Predicted("cup", (90, 110, 390, 400), 0, 0.8)]
    )
    first = sample["tokens"]["roles"].index(2)
    sample["trained"]["bins"][str(first)] = [[90, 5000], [100, 2500, 2500]]
    sample["trained"]["nll"][str(first)] = 0.6931
    sample["trained"]["mass"][str(first)] = 0.9
    page = open_page(book)
    page.locator(f'#strip [data-i="{first}"]').hover()
    shown = numbers(page)
    assert shown["written bin"] == "90"
    assert shown["target"] == "100"
    assert shown["probability of the target bin"] == "25.0 %"
    assert shown["expected bin"] == "95.3"  # (90 * 2 + 100 + 101) / 4
    assert shown["probability of any coordinate"] == "90.0 %"
    assert shown["probability of the written bin"] == "50.0 %"
    distance = shown["distance to the target (W1)"].removesuffix(" bins")
    assert float(distance) == pytest.approx(w1_of_example(), abs=0.051)
    expect(page.locator(".owner")).to_contain_text("x1 of object_1, cup (matched)")


def w1_of_example(sigma: float = 8.0) -> float:
    """Return the distance to a Gaussian around 100, as a sum of cumulative differences."""
    from math import exp

    weights = [exp(-0.5 * ((bin - 100) / sigma) ** 2) for bin in range(1000)]
    model = {90: 0.5, 100: 0.25, 101: 0.25}
    difference = total = 0.0
    for bin, weight in enumerate(weights):
        difference += model.get(bin, 0.0) - weight / sum(weights)
        total += abs(difference)
    return total


def test_a_page_without_samples_says_so_and_takes_keys(open_page: Open) -> None:
    page = open_page(Book())
    expect(page.locator("#nothing")).to_be_visible()
    for key in ("j", "t", "o", "m", "s", "Escape"):
        page.keyboard.press(key)


def test_an_address_that_is_not_on_the_page_is_reported(open_page: Open) -> None:
    page = open_page(demo_book(), "#step=100")
    expect(page.locator("#astray")).to_be_hidden()
    page.evaluate("location.hash = 'step=101'")
    expect(page.locator("#astray")).to_contain_text("step=101 is not on this page, which holds 7 answers")
    assert sample_id(page) == "149.0.12"
