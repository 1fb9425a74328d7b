"""The pages for the browser tests: an ordinary run, hostile text, and an answer of 500 objects."""

from tests.browser.samples import Book, Predicted, TrueShape

CUP = TrueShape("red cup", (96, 430, 300, 730))
PLATE = TrueShape("plate", (380, 600, 700, 800))
SPOON = TrueShape("spoon", (742, 470, 800, 852))
LEAF = TrueShape("green leaf", (520, 130, 640, 200, 655, 330, 560, 420, 450, 360, 440, 210))
BOTTLE = TrueShape("bottle of water", (832, 150, 962, 690))
TABLE = (CUP, PLATE, SPOON, LEAF, BOTTLE)
COLOURS = ("#c8413b", "#f2efe8", "#8d99a6", "#5d9a4b", "#6ea6cf")
LEAF_PREDICTED = (515, 140, 632, 196, 660, 322, 566, 428, 446, 352, 452, 214)


def demo_book() -> Book:
    """Return one image at five steps and two others, with a broken object, a truncated and a perfect answer."""
    book = Book("runs/table-top")
    for record in (12, 13, 14):
        book.add_image(record, TABLE, COLOURS)
    book.add("0.0.12", TABLE, [Predicted("thing", (10, 20, 980, 960))], loss=5.218, width=90)
    middle = Predicted(
        "plate", (380, 600, 700), reason="wrong_count", words="a box has four coordinates, and this has 3"
    )
    half = [Predicted("cup", (110, 410, 280, 745), 0, 0.78), middle, Predicted("lid", (560, 40, 700, 130))]
    book.add("49.0.12", TABLE, half, loss=2.871, width=30)
    cut = Predicted("bot", (832,), reason="truncated", words="the answer ends inside it", cut=True)
    long = [
        Predicted("red cup", (99, 428, 304, 727), 0, 0.95),
        Predicted("plate", (371, 590, 706, 806), 1, 0.9),
        cut,
    ]
    book.add("49.1.13", TABLE, long, loss=3.402, width=14, truncated=True, masked_desc=True)
    seen = [
        Predicted("red cup", (104, 424, 309, 722), 0, 0.91),
        Predicted("plate", (402, 581, 725, 792), 1, 0.81),
        Predicted("green leaf", LEAF_PREDICTED, 3, 0.88),
        Predicted("fork", (690, 500, 725, 830)),
    ]
    book.add("99.0.12", TABLE, seen, loss=1.634, width=11)
    better = [Predicted(true.desc, true.bins, j, 0.97) for j, true in enumerate(TABLE[:4])]
    book.add("149.0.12", TABLE, better, loss=0.412, width=5)
    perfect = [Predicted(true.desc, true.bins, j, 0.99) for j, true in enumerate(TABLE)]
    book.add("199.0.12", TABLE, perfect, loss=0.127, width=3)
    book.add("199.1.14", TABLE, perfect[:4], loss=None)
    return book


HOSTILE = '<img src=x onerror="alert(1)"></script><script>alert(2)</script>'
TWISTED = "\u202egnp.exe\u202c \x07\x00\x1b[31m \u0627\u0644\u0639\u0631\u0628\u064a\u0629"
LONG = "\U0001f680\U0001f469\u200d\U0001f4bb" * 700


def hostile_book() -> Book:
    book = Book('runs/<b>"bold"</b>')
    truth = [
        TrueShape(HOSTILE, (100, 100, 400, 400)),
        TrueShape(LONG, (600, 300, 980, 700)),
        TrueShape(TWISTED, (0, 0, 90, 60)),
    ]
    predicted = [
        Predicted(HOSTILE, (110, 90, 390, 410), 0, 0.9),
        Predicted(TWISTED, (900, 900, 999, 999)),
        Predicted("", (5, 5, 5, 5), reason="empty_desc", words="<i>no description</i>"),
    ]
    sample = book.add("9.0.1", truth, predicted, image=f"images/{HOSTILE}.png", remark=HOSTILE)
    sample["notes"] = [HOSTILE, "The answer could not be read: " + LONG]
    sample["facts"].append(["seed", TWISTED])
    sample["objects"][2]["key"] = HOSTILE
    return book


def huge_book(objects: int = 500, words: int = 7) -> Book:
    """Return 500 predicted and 500 true objects, with 32,251 tokens."""
    book = Book("runs/huge")

    def place(k: int) -> tuple[int, int, int, int]:
        x, y = k % 25 * 39 + 4, k // 25 * 48 + 4
        return x, y, x + 30, y + 40

    desc = " ".join(["bolt", "of", "the", "upper", "left", "outer", "row"][:words])
    truth = [TrueShape(f"{desc} {k}", place(k)) for k in range(objects)]
    predicted = [Predicted(f"{desc} {k}", place(k), k, 0.9) for k in range(objects // 2)]
    predicted += [Predicted(f"{desc} {k}", place(k)) for k in range(objects // 2, objects)]
    book.add_image(0, truth, COLOURS)
    book.add("99.0.0", truth, predicted)
    return book
