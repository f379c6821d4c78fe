"""The index of words: its scores beside BM25 counted by hand, growth, removal, and what a term is in any script."""

from __future__ import annotations

import math
import sqlite3
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lychee_local.lexicon import STOP_WORDS, search_terms, terms
from lychee_local.store import words

K1, B = 1.2, 0.75

TEXTS = [
    "Ana planted tomatoes in the garden behind the school",
    "The garden was full of bees, and bees love the tomatoes",
    "Ben repaired his bicycle",
    "Ben rides the bicycle to the garden of the school every single morning before work starts",
    "Rain",
    "A bicycle, a bicycle, my kingdom for a bicycle",
    "Ana sold honey of her bees at the market",
    "the of and",
    "Tomatoes tomatoes tomatoes",
    "We met at the market",
    "She plays the violin",
    "My violin teacher lives near the river",
]


@pytest.fixture
def db(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    connection = opened(tmp_path / "catalogue.sqlite")
    yield connection
    connection.close()


def opened(path: Path | str) -> sqlite3.Connection:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA secure_delete = ON")
    words.create(connection)
    connection.commit()
    return connection


def made(texts: dict[int, str]) -> sqlite3.Connection:
    connection = opened(":memory:")
    words.add(connection, "turns", texts.items())
    return connection


def by_hand(texts: dict[int, str], query: str, k: int = 1000) -> list[tuple[int, float]]:
    """BM25 as the formula stands, text by text; a text without terms is none."""
    counts = {row: Counter(search_terms(text)) for row, text in texts.items() if search_terms(text)}
    mean = sum(count.total() for count in counts.values()) / max(1, len(counts))
    scores: dict[int, float] = {}
    for term in set(search_terms(query)):
        holders = [row for row, count in counts.items() if term in count]
        rarity = math.log(1 + (len(counts) - len(holders) + 0.5) / (len(holders) + 0.5))
        for row in holders:
            times, length = counts[row][term], counts[row].total()
            gain = rarity * times * (K1 + 1) / (times + K1 * (1 - B + B * length / mean))
            scores[row] = scores.get(row, 0.0) + gain
    # Rounded, so that the order of adding does not decide between equals.
    return sorted(scores.items(), key=lambda hit: (-round(hit[1], 9), hit[0]))[:k]


def same(found: list[tuple[int, float]], expected: list[tuple[int, float]]) -> None:
    assert [row for row, _ in found] == [row for row, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], rel=1e-5)


def rows(found: list[tuple[int, float]]) -> list[int]:
    return [row for row, _ in found]


# --- scores ----------------------------------------------------------------------------------------------------------

QUERIES = [
    "tomatoes",
    "Who has a garden with bees?",
    "bicycle bicycle market",
    "violin of the teacher by the river",
    "Ana Ben school rain honey",
    "nothing like it: zeppelin",
]


@pytest.mark.parametrize("query", QUERIES)
def test_scores_are_bm25_as_counted_by_hand(db: sqlite3.Connection, query: str) -> None:
    texts = dict(enumerate(TEXTS))
    words.add(db, "turns", texts.items())
    same(words.search(db, "turns", query, 50), by_hand(texts, query))
    same(words.search(db, "turns", query, 2), by_hand(texts, query, 2))


def test_one_text_worked_out_on_paper(db: sqlite3.Connection) -> None:
    words.add(db, "records", [(3, "fish fish bird"), (9, "bird")])
    # Two texts, "fish" in one: log(1 + 1.5 / 1.5) = log 2. Lengths 3 and 1, so the mean is 2 and the norm of row 3 is
    # 1.2 * (0.25 + 0.75 * 1.5) = 1.65; "fish" twice gives 2 * 2.2 / 3.65.
    same(words.search(db, "records", "fish", 5), [(3, math.log(2) * 4.4 / 3.65)])
    assert rows(words.search(db, "records", "bird", 5)) == [9, 3]
    assert words.search(db, "turns", "fish", 5) == []


def test_a_search_that_stops_early_finds_what_a_full_one_finds(db: sqlite3.Connection) -> None:
    texts = {row: f"common {'rare' if row % 50 == 0 else 'usual'} {'x' * (row % 7)}" for row in range(2_000)}
    texts[1_999] = "common common common"
    words.add(db, "turns", texts.items())
    for query in ("rare common", "common", "rare usual common xxx", "usual xxxx"):
        for k in (1, 10, 40, 41, 500):
            same(words.search(db, "turns", query, k), by_hand(texts, query, k))
    # A row passed over for one term and met again by a later one.
    more = {row: f"{'one ' * (row % 11)}{'two ' * (row % 7)}{'three ' * (row % 5)}word{row % 13}" for row in range(900)}
    for query in ("one two three", "word5 three two", "word5 word6 word7 one"):
        for k in (1, 3, 20, 200):
            same(words.search(made(more), "turns", query, k), by_hand(more, query, k))


def test_ties_go_to_the_lower_row_and_k_may_be_anything(db: sqlite3.Connection) -> None:
    words.add(db, "turns", [(row, "the same words") for row in (70, 5, 31, 2)])
    assert rows(words.search(db, "turns", "words", 3)) == [2, 5, 31]
    assert rows(words.search(db, "turns", "words", 10**9)) == [2, 5, 31, 70]
    assert words.search(db, "turns", "words", 0) == []


# --- growth and removal ----------------------------------------------------------------------------------------------


def long_run(count: int) -> dict[int, str]:
    return {row: f"{TEXTS[row % len(TEXTS)]} number{row % 97} {'tomatoes ' * (row % 3)}" for row in range(count)}


def test_one_at_a_time_is_all_at_once(db: sqlite3.Connection) -> None:
    texts = long_run(3_000)
    for row, text in texts.items():
        words.add(db, "turns", [(row, text)])
    bulk = made(texts)
    for query in QUERIES:
        found = words.search(db, "turns", query, 3_000)
        assert found == words.search(bulk, "turns", query, 3_000)
        same(found[:100], by_hand(texts, query, 100))


def test_a_term_of_many_texts_fills_many_blocks(db: sqlite3.Connection) -> None:
    words.add(db, "turns", ((row, "everywhere") for row in range(30_000)))
    for row in range(30_000, 30_700):
        words.add(db, "turns", [(row, "everywhere")])
    assert rows(words.search(db, "turns", "everywhere", 40_000)) == list(range(30_700))
    words.remove(db, "turns", ((row, "everywhere") for row in range(100, 30_600)))
    assert rows(words.search(db, "turns", "everywhere", 40_000)) == [*range(100), *range(30_600, 30_700)]
    words.add(db, "turns", [(30_700, "everywhere")])
    assert rows(words.search(db, "turns", "everywhere", 40_000))[-1] == 30_700


def test_rows_need_not_come_in_order(db: sqlite3.Connection) -> None:
    words.add(db, "turns", [(900, "late fish")])
    words.add(db, "turns", [(4, "early fish")])
    assert rows(words.search(db, "turns", "early late fish", 5)) == [4, 900]


def test_what_is_removed_is_as_if_it_had_never_been(db: sqlite3.Connection) -> None:
    texts = long_run(1_000)
    words.add(db, "turns", texts.items())
    gone = {row: text for row, text in texts.items() if row % 3 == 0 or row > 700}
    words.remove(db, "turns", gone.items())
    kept = {row: text for row, text in texts.items() if row not in gone}
    for query in QUERIES:
        same(words.search(db, "turns", query, 100), by_hand(kept, query, 100))
    words.remove(db, "turns", kept.items())
    assert all(words.search(db, "turns", query, 5) == [] for query in QUERIES)
    words.add(db, "turns", kept.items())
    same(words.search(db, "turns", QUERIES[0], 100), by_hand(kept, QUERIES[0], 100))


def test_to_remove_twice_or_what_was_never_there_changes_nothing(db: sqlite3.Connection) -> None:
    texts = dict(enumerate(TEXTS))
    words.add(db, "turns", texts.items())
    words.remove(db, "turns", [(3, TEXTS[3]), (77, "tomatoes"), (78, "")])
    words.remove(db, "turns", [(3, TEXTS[3])])
    del texts[3]
    for query in QUERIES:
        same(words.search(db, "turns", query, 50), by_hand(texts, query))


def test_a_removed_word_is_not_in_the_bytes_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "catalogue.sqlite"
    db = opened(path)
    secret = "my password is xyzzyplugh and grüezi"
    words.add(db, "turns", [*long_run(2_000).items(), (2_000, secret)])
    words.add(db, "records", [(0, secret)])
    db.commit()
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert b"xyzzyplugh" in path.read_bytes()
    words.remove(db, "turns", [(2_000, secret)])
    words.remove(db, "records", [(0, secret)])
    db.commit()
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert words.search(db, "turns", "password xyzzyplugh gruezi", 5) == []
    for file in tmp_path.iterdir():
        assert b"xyzzyplugh" not in file.read_bytes(), file.name
        assert b"gruezi" not in file.read_bytes(), file.name
    db.close()


def test_nothing_is_kept_of_a_transaction_that_fails(db: sqlite3.Connection) -> None:
    words.add(db, "turns", [(0, "before")])
    db.commit()
    words.add(db, "turns", [(1, "after")])
    db.rollback()
    assert words.search(db, "turns", "after", 5) == []
    same(words.search(db, "turns", "before", 5), by_hand({0: "before"}, "before"))


def test_another_connection_sees_what_was_committed(tmp_path: Path) -> None:
    writer, reader = opened(tmp_path / "a.sqlite"), opened(tmp_path / "a.sqlite")
    words.add(writer, "turns", [(0, "violin")])
    assert words.search(reader, "turns", "violin", 5) == []
    writer.commit()
    assert rows(words.search(reader, "turns", "violin", 5)) == [0]
    assert not reader.in_transaction
    writer.close()
    reader.close()


def test_making_the_tables_twice_keeps_what_is_there(db: sqlite3.Connection) -> None:
    words.add(db, "turns", [(0, "violin")])
    words.create(db)
    assert rows(words.search(db, "turns", "violin", 5)) == [0]


# --- within ----------------------------------------------------------------------------------------------------------


def test_a_filter_applies_before_the_best_are_taken(db: sqlite3.Connection) -> None:
    texts = long_run(1_200)
    words.add(db, "turns", texts.items())
    db.execute("CREATE TABLE lines (row INTEGER PRIMARY KEY, session TEXT)")
    db.executemany("INSERT INTO lines VALUES (?, ?)", ((row, f"S{row // 100}") for row in range(5_000)))
    for query in QUERIES:
        expected = [hit for hit in by_hand(texts, query, 1_200) if hit[0] // 100 in (3, 7)]
        select = ("SELECT row FROM lines WHERE session IN (?, ?)", ("S3", "S7"))
        same(words.search(db, "turns", query, 10, within=select), expected[:10])
        same(words.search(db, "turns", query, 1_000, within=select), expected)
    none = ("SELECT row FROM lines WHERE session = ?", ("S99",))
    assert words.search(db, "turns", "tomatoes", 10, within=none) == []


def test_a_filter_of_many_rows_gives_what_one_of_few_would(db: sqlite3.Connection) -> None:
    texts = {row: f"{TEXTS[row % len(TEXTS)]} {'bees ' * (row % 5)}" for row in range(3_000)}
    words.add(db, "turns", texts.items())
    db.execute("CREATE TABLE lines (row INTEGER PRIMARY KEY, speaker TEXT)")
    db.executemany("INSERT INTO lines VALUES (?, ?)", ((row, "AB"[row % 200 == 7]) for row in range(50_000)))
    for query in QUERIES:
        for speaker in "AB":
            expected = [hit for hit in by_hand(texts, query, 3_000) if "AB"[hit[0] % 200 == 7] == speaker]
            # The rows beyond the texts make the second filter long, whatever the speaker.
            for select in (
                "SELECT row FROM lines WHERE speaker = ?",
                "SELECT row FROM lines WHERE speaker = ? OR row > 9999",
            ):
                for k in (1, 7, 3_000):
                    same(words.search(db, "turns", query, k, within=(select, (speaker,))), expected[:k])


# --- terms -----------------------------------------------------------------------------------------------------------

FINDS = [
    # languages
    ("I met her at the café", "cafe"),
    ("the cafe was closed", "café"),
    ("her résumés are ready", "resume"),
    ("Ünïcode naïve", "naive unicode"),
    ("Die Straße war leer", "STRASSE"),
    ("İstanbul'a gittik", "istanbul"),
    ("ISPARTA", "ısparta"),
    ("Åsa from Łódź met Ørjan", "asa"),
    ("Åsa from Łódź met Ørjan", "lodz"),
    ("Åsa from Łódź met Ørjan", "orjan"),
    ("Ο Σωκράτης", "σωκρατης"),
    ("зелёная ёлка", "елка"),
    ("за́мок", "замок"),
    ("ذهب مُحَمَّد إلى السوق", "محمد"),
    ("ذهب إلى أحمد", "احمد"),
    ("שָׁלוֹם", "שלום"),
    ("मुझे हिन्दी पसंद है", "हिन्दी"),
    ("我昨天去了北京看朋友", "北京"),
    ("我喜欢猫和狗", "猫"),
    ("用Python写的", "python"),
    ("東京へ行きました", "東京"),
    ("ガーデンが好き", "ｶﾞｰﾃﾞﾝ"),
    ("저는 학교에 갑니다", "학교"),
    ("ฉันชอบภาษาไทย", "ภาษา"),
    ("ＡＢＣ ２０２３", "abc 2023"),
    ("٢٠٢٣ كانت سنة جيدة", "2023"),
    ("soft\u00adhyphen", "softhyphen"),
    ("𠮷野家", "𠮷"),
    # identifiers
    ("call get_user_name() first", "get_user_name"),
    ("call get_user_name() first", "user"),
    ("call getUserName() first", "getUserName"),
    ("call getUserName() first", "getusername"),
    ("call getUserName() first", "user name"),
    ("a parseHTTPResponse here", "http response"),
    ("see torch.nn.Linear", "torch.nn.Linear"),
    ("see torch.nn.Linear", "linear"),
    ("it is in lychee_local/store/words.py", "words.py"),
    ("it is in lychee_local/store/words.py", "lychee_local/store/words.py"),
    ("it is in lychee_local/store/words.py", "lychee_local"),
    (r"C:\Users\ann\notes.txt", "notes.txt"),
    ("upgraded to v1.12.3", "v1.12.3"),
    ("needs Python3.11", "python"),
    ("she writes C++ at work", "C++"),
    ("she writes C++17 at work", "c++"),
    ("she writes C# at work", "c#"),
    ("die C#-Entwicklerin", "C#"),
    ("she prefers .NET", ".net"),
    ("check .gitignore", "gitignore"),
    ("R&D and AT&T", "at&t"),
    ("my to-do list", "to-do"),
    ("mail ann.lee+x@example.co.uk", "ann.lee+x@example.co.uk"),
    ("mail ann.lee+x@example.co.uk", "ann.lee+x"),
    ("mail ann.lee+x@example.co.uk", "example.co.uk"),
    ("mail ann.lee+x@example.co.uk", "lee"),
    ("at https://www.example.com/a/page?x=1.", "https://www.example.com/a/page?x=1"),
    ("at https://www.example.com/a/page?x=1.", "example.com"),
    ("at https://www.example.com/a/page?x=1.", "page"),
    ("it cost $1,234,567", "1234567"),
    ("it cost 1234567 dollars", "1,234,567"),
    ("es kostet 1.234.567 Euro", "1234567"),
    ("il coûte 12\u202f500 euros", "12500"),
    ("it cost $1,200.50", "1200.50"),
    ("pi is 3.14", "3.14"),
    ("on 2023-05-07 at 10:30", "2023-05-07"),
    ("on 2023-05-07 at 10:30", "10:30"),
    ("issue #4711", "4711"),
]


@pytest.mark.parametrize(("text", "query"), FINDS)
def test_found(db: sqlite3.Connection, text: str, query: str) -> None:
    words.add(db, "turns", [(0, "something else entirely"), (1, text)])
    assert rows(words.search(db, "turns", query, 5))[:1] == [1]


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("my new phone", "йод"),
        ("мой дом", "мои"),  # й is a letter of its own
        ("the house", "thé"),  # no article
        ("北方", "北京市"[1:]),
        ("it cost 1,200", "200"),
        ("a hundred", "100%"),
    ],
)
def test_not_found(db: sqlite3.Connection, text: str, query: str) -> None:
    words.add(db, "turns", [(0, text)])
    assert words.search(db, "turns", query, 5) == []


def test_the_whole_identifier_is_better_than_its_parts(db: sqlite3.Connection) -> None:
    words.add(
        db, "turns", [(0, "the name of the user get it"), (1, "call get_user_name"), (2, "C is older"), (3, "C++")]
    )
    assert rows(words.search(db, "turns", "get_user_name", 5)) == [1, 0]
    assert rows(words.search(db, "turns", "C++", 5)) == [3, 2]


@pytest.mark.parametrize(
    "query", ["", "  ", "the of and", "?!", "and/or", "\x00", "\ud800", '"', "*", "()", "🤷", "%_%"]
)
def test_a_query_without_terms_finds_nothing(db: sqlite3.Connection, query: str) -> None:
    words.add(db, "turns", [(0, "the of and"), (1, "tea"), (2, query)])
    assert words.search(db, "turns", query, 5) == []


@pytest.mark.parametrize(
    "query",
    [
        'tea"',
        '"tea" OR "',
        "tea*",
        "te%a tea",
        "tea AND nothing",
        "NOT tea",
        "tea NEAR(a b, 2)",
        "terms : tea",
        "{terms} : tea",
        "^tea + (",
        "tea'); DROP TABLE words_turns; --",
        "tea\x00\ud800\udfff",
        "tea " * 5_000,
        " ".join(f"w{n}" for n in range(40_000)) + " tea",
        "(" * 5_000 + "tea",
    ],
)
def test_a_query_is_plain_text(db: sqlite3.Connection, query: str) -> None:
    words.add(db, "turns", [(0, "the tea"), (1, "coffee")])
    assert rows(words.search(db, "turns", query, 5)) == [0]


def test_a_prefix_or_a_placeholder_finds_no_more_than_itself(db: sqlite3.Connection) -> None:
    words.add(db, "turns", [(0, "teapot"), (1, "texa")])
    assert words.search(db, "turns", "tea*", 5) == []
    assert words.search(db, "turns", "te_a", 5) == []
    assert words.search(db, "turns", "te%", 5) == []


def test_very_long_texts_are_indexed(db: sqlite3.Connection) -> None:
    words.add(
        db, "turns", [(0, "a." * 100_000 + "zebra"), (1, "x" * 100_000), (2, "猫" * 100_000), (3, "tea " * 70_000)]
    )
    assert rows(words.search(db, "turns", "zebra", 5)) == [0]
    assert rows(words.search(db, "turns", "x" * 100_000, 5)) == [1]
    assert rows(words.search(db, "turns", "猫", 5)) == [2]
    assert rows(words.search(db, "turns", "tea", 5)) == [3]


anything = st.text(st.characters(exclude_categories=()), max_size=80)


@given(anything)
@settings(deadline=None)
def test_terms_of_any_text(text: str) -> None:
    for extract in (terms, search_terms):
        found = extract(text)
        assert all(term and not set(term) & set("\"' \t\n\x00") for term in found)
        " ".join(found).encode("utf-8")  # no surrogate is left
        assert extract(unicodedata.normalize("NFC", text)) == extract(unicodedata.normalize("NFD", text))
        assert extract(f"{text} é") == [*found, "e"]  # what is not ASCII elsewhere changes nothing here
    assert not Counter(terms(text)) - Counter(search_terms(text))


@given(st.lists(anything, min_size=1, max_size=8), anything)
@settings(deadline=None)
def test_any_text_is_found_by_itself_and_scored_as_by_hand(texts: list[str], query: str) -> None:
    numbered = dict(enumerate(texts))
    db = made(numbered)
    for asked in (*texts, query):
        same_scores = words.search(db, "turns", asked, 10)
        expected = dict(by_hand(numbered, asked))
        assert dict(same_scores) == pytest.approx(expected, rel=1e-4)
    words.remove(db, "turns", numbered.items())
    assert all(words.search(db, "turns", asked, 10) == [] for asked in texts)
    db.close()


def test_texts_are_compared_by_words_and_found_by_names_too() -> None:
    text = "Read docs/setup_guide.md for getName, C++ and Python3, on 2023-07-02"
    words_alone = ["read", "doc", "setup", "guid", "md", "getnam", "c", "python3", "2023", "07", "02"]
    assert terms(text) == words_alone
    names = ["docs/setup_guide.md", "setup_guide.md", "nam", "c++", "python", "2023-07-02"]
    assert sorted(search_terms(text)) == sorted(words_alone + names)


def test_stop_words_alone_are_no_terms() -> None:
    assert terms(" ".join(sorted(STOP_WORDS))) == []
    assert search_terms(" ".join(sorted(STOP_WORDS))) == []
