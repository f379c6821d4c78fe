"""Denials: what contradicts a sentence, and what only looks like it."""

from __future__ import annotations

import pytest

from lychee_local.negation import contradicts


@pytest.mark.parametrize(
    ("text", "said", "contradicted"),
    [
        ("Ana eats fish.", "I don't eat fish.", True),
        ("Ana never eats fish.", "I eat fish on Fridays.", True),
        ("Ana has no car.", "I have a red car.", True),
        ("Ana eats fish.", "I eat fish.", False),
        ("Ana doesn't eat fish.", "I never eat fish.", False),
        # The denial may be in another word of the record, or of what was said.
        ("Ana avoids fish.", "I don't eat fish.", False),
        ("Ana does not eat fish.", "I stopped eating fish.", False),
        # Another clause's denial, and clauses that cannot be told apart.
        ("Ana drinks coffee.", "I never drink tea, I drink coffee.", False),
        ("Ana likes walks.", "I like walks but not in rain.", False),
        # Denials that deny nothing.
        ("Ana looks forward to the trip to Rome.", "I can't wait for the trip to Rome!", False),
        ("Ana likes the new house.", "Don't you like the new house?", False),
        ("Ana likes the new house.", "No, I like the new house.", False),
        ("Ana bakes and sells bread.", "I not only bake bread, I sell it.", False),
        # Too little in common to say.
        ("Ana moved to Rome.", "I never liked Naples.", False),
        ("", "I don't eat fish.", False),
        ("Ana eats fish.", "", False),
    ],
)
def test_contradictions(text: str, said: str, contradicted: bool) -> None:
    assert contradicts(text, said, said, {"ana"}) is contradicted
