"""What tests read from an HTML page, by the standard library's parser."""

from __future__ import annotations

from html.parser import HTMLParser

_VOID = {"meta", "link", "input", "br", "wbr", "hr", "img"}


class Page(HTMLParser):
    """Elements with their attributes, the shown text, and each script's and element's own text."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.unclosed: list[str] = []
        self._pieces: list[str] = []
        self._texts: list[tuple[str, list[str]]] = []
        self._open: list[int] = []

    @property
    def text(self) -> str:
        """All text but that of scripts and styles."""
        return "".join(self._pieces)

    @property
    def ids(self) -> list[str]:
        return [attributes["id"] or "" for _, attributes in self.elements if "id" in attributes]

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """Attributes of all elements with a tag."""
        return [attributes for name, attributes in self.elements if name == tag]

    def cells(self, tag: str) -> list[str]:
        """Text of all elements with a tag, without space around it."""
        return ["".join(pieces).strip() for name, pieces in self._texts if name == tag]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._texts.append((tag, []))
        if tag not in _VOID:
            self.unclosed.append(tag)
            self._open.append(len(self._texts) - 1)

    def handle_endtag(self, tag: str) -> None:
        assert self.unclosed[-1:] == [tag], f"</{tag}> in {self.unclosed[-1:]} at {self.getpos()}"
        self.unclosed.pop()
        self._open.pop()

    def handle_data(self, data: str) -> None:
        if self.unclosed and self.unclosed[-1] in ("script", "style"):
            self.scripts.append(data)
            return
        self._pieces.append(data)
        for index in self._open:
            self._texts[index][1].append(data)


def parse(text: str) -> Page:
    """Read a page; its elements must be closed in the order in which they were opened."""
    page = Page()
    page.feed(text)
    page.close()
    assert page.unclosed == [], page.unclosed
    return page
