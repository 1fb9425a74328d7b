"""Whole lines from pieces of text, and colours only on a terminal."""

import io

from coordexp.launch.parts import Lines, Log


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_lines_come_whole_however_the_text_is_cut():
    lines = Lines()
    text = "one\r\ntwo\n\nlast"
    assert [line for character in text for line in lines.feed(character)] == ["one", "two", ""]
    assert list(lines.end()) == ["last"]


def test_the_first_and_the_last_state_of_a_bar_that_redraws_itself_are_kept():
    lines = Lines()
    drawn = "".join(f"\r{k}%" for k in range(101))
    assert list(lines.feed(f"{drawn}\nnext\n")) == ["0%", "100%", "next"]


def test_a_bar_that_is_erased_leaves_its_last_state():
    lines = Lines()
    assert list(lines.feed("\r1%\r2%\r   \r\nnext\n")) == ["1%", "2%", "next"]


def test_a_line_without_end_is_cut():
    assert len(list(Lines().feed("x" * 100_000))) == 1


def test_a_terminal_gets_the_colours_of_the_parts_but_nothing_that_moves_the_cursor():
    stream = Terminal()
    Log(stream, ("server 0", "learner")).write(
        "learner", "\x1b[31mred\x1b[0m\x1b[2J\x1b[1A\x1b]0;title\x07\x1b7 end"
    )
    assert stream.getvalue() == "\x1b[33mlearner  | \x1b[0m\x1b[31mred\x1b[0m end\x1b[0m\n"


def test_a_file_gets_no_colours():
    stream = io.StringIO()
    Log(stream, ("server 10",)).write("server 10", "\x1b[31mred\x1b[0m \x1b[?25lend")
    assert stream.getvalue() == "server 10 | red end\n"
