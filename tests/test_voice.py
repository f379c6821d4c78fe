"""The first person becomes the speaker where English grammar allows it; everything else is quoted."""

from __future__ import annotations

import pytest

from lychee_local.voice import by_name


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("I moved to Leeds, and I like a window seat.", "Mel moved to Leeds, and they like a window seat."),
        ("It rained, and I like rain.", "It rained, and Mel likes rain."),
        ("It was humbling and I'm glad.", "It was humbling and Mel is glad."),
        ("Talks are so necessary and I am glad.", "Talks are so necessary and Mel is glad."),
        ("Both Ana and I love jazz.", "Both Ana and Mel love jazz."),
        ("Yesterday Ana and I went swimming.", "Yesterday Ana and Mel went swimming."),
        ("Ana and I've two cats.", "Ana and Mel have two cats."),
        ("My wife and I love jazz.", "Mel and their wife love jazz."),
        ("My wife and I've two cats.", "Mel and their wife have two cats."),
        ("Me and my wife live in Bonn.", "Mel and their wife live in Bonn."),
        ("Ben came with my brother and me.", "Ben came with Mel and their brother."),
        ("Ana went with Ben and me.", "Ana went with Ben and Mel."),
        ("I think my wife and I should go.", "Mel thinks they and their wife should go."),
        ("- I love **jazz**.", "Mel loves jazz."),
        ("I 100% agree.", "Mel 100% agrees."),
        ("Believing in myself really helped me.", "Believing in themselves really helped Mel."),
        ("I no longer eat meat.", "Mel no longer eats meat."),
        ("I rely on my bike.", "Mel relies on their bike."),
        ("I cannot swim.", "Mel cannot swim."),
        ("I gotta renew my visa.", "Mel has to renew their visa."),
        ("I wanna learn Greek.", "Mel wants to learn Greek."),
        ("I'm gonna move.", "Mel is going to move."),
        ("I dunno where my keys are.", "Mel doesn't know where their keys are."),
        ("I'd been there before.", "Mel had been there before."),
        ("I'd always wanted a boat.", "Mel had always wanted a boat."),
        ("I'd love a coffee.", "Mel would love a coffee."),
        ("I'd need a lift.", "Mel would need a lift."),
        ("I'd better go.", "Mel had better go."),
        ("I need a lift.", "Mel needs a lift."),
        ("I bet it rains.", "Mel bets it rains."),
        ("I first read it in 2019.", "Mel first read it in 2019."),
        ("i love jazz and i'm a nurse", "Mel loves jazz and they are a nurse"),
        ('My boss said "I am leaving" and I cried.', 'Mel\'s boss said "I am leaving" and they cried.'),
        ("She asked me if I'm vegan.", "She asked Mel if they are vegan."),
        ("I’ve two cats.", "Mel has two cats."),
        ("I love jazz, you know?", "Mel loves jazz."),
        ("Did you know that I moved to Porto?", "Mel moved to Porto."),
    ],
)
def test_grammar_stays_right(said: str, named: str) -> None:
    assert by_name(said, "Mel") == named


@pytest.mark.parametrize(
    "said",
    [
        "I see, so that is the key.",
        "Me gusta el jazz.",
        "Mi hermana me llamó.",
        "Ma sœur me connaît bien.",
        "Ich war in Rom.",
        "I told you so.",
        "Painting is great for expressing myself.",
        "The room was cold.",
    ],
)
def test_what_cannot_be_said_of_the_speaker_is_quoted(said: str) -> None:
    assert by_name(said, "Mel") == f'Mel said: "{said}"'


def test_who_has_no_name_is_the_user_inside_of_a_sentence() -> None:
    assert by_name("It rained, and I was cold.", "The user") == "It rained, and the user was cold."
    assert by_name("I was cold.", "The user") == "The user was cold."
    assert by_name("* Dress in **layers**", "The assistant") == 'The assistant said: "Dress in layers"'


def test_quotation_marks_inside_of_a_quotation_become_inner_ones() -> None:
    assert by_name('We saw "Dune" twice.', "Mel") == 'Mel said: "We saw “Dune” twice."'


def test_somebody_who_is_only_called_is_left_out() -> None:
    assert by_name("John, I agree.", "Mel", ("Mel", "John Doe")) == "Mel agrees."
    assert by_name("I moved to Oslo, John!", "Mel", ("John",)) == "Mel moved to Oslo!"
    assert by_name("I met John, Ana and Bo.", "Mel", ("John",)) == "Mel met John, Ana and Bo."
    assert by_name("Lately, I paint.", "Mel", ("John",)) == "Lately, Mel paints."


@pytest.mark.parametrize("name", ["Me", "My Nguyen", "Mine", "I", "Myself"])
def test_a_name_that_is_a_word_of_the_first_person_stays_a_name(name: str) -> None:
    assert by_name("I moved to Lisbon.", name) == f"{name} moved to Lisbon."
    assert by_name("My sister Eva plays the cello, and I sing.", name) == (
        f"{name}'s sister Eva plays the cello, and they sing."
    )
