"""HTML, escaped by type: `Html` is markup, a plain `str` is text and is escaped wherever it is put in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str | None) -> Html:
    """An element. A trailing underscore in an attribute's name is left out; None leaves the attribute out.

    >>> tag("p", "1 < 2 ", tag("b", "yes"), class_="note")
    '<p class="note">1 &lt; 2 <b>yes</b></p>'
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name == "meta":  # has no end
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def join(parts: Iterable[str]) -> Html:
    """Parts one after the other, text among them escaped."""
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str = "", words: Sequence[str] = ()
) -> Html:
    """A table whose first column names the row; the others hold numbers, but for those named in `words`."""
    kinds = ["words" if name in words else None for name in head]
    cells = [tag("th", text, scope="col", class_=kind) for text, kind in zip(head, kinds, strict=True)]
    body = []
    for first, *rest in rows:
        values = [tag("td", text, class_=kind) for text, kind in zip(rest, kinds[1:], strict=True)]
        body.append(tag("tr", tag("th", first, scope="row"), *values))
    heading = tag("thead", tag("tr", *cells))
    title = [tag("caption", caption)] if caption else []
    return tag("div", tag("table", *title, heading, tag("tbody", *body)), class_="scroll")
