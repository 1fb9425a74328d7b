"""The elements of a page, for tests of what a page shows."""

from html.parser import HTMLParser


class Reader(HTMLParser):
    """The elements of a page with their attributes, and the text directly inside each kind of element."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.texts, self._open = [], {}, []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._open.append(tag)

    def handle_endtag(self, tag):
        if tag in self._open:
            del self._open[len(self._open) - 1 - self._open[::-1].index(tag) :]

    def handle_data(self, data):
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def shown(self):
        """All text outside style and script."""
        return [text for tag, texts in self.texts.items() if tag not in ("style", "script") for text in texts]
