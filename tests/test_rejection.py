"""The rule that a record must not contradict its evidence: how often it refuses what is wrong, and what is right.

Every draft was written by hand for one of the dialogues below: a paraphrase that is true, or one with an invented name,
number or date, told of the wrong speaker, or denied. The finisher sees them as a model's output.
"""

from __future__ import annotations

import json
from datetime import datetime

import pytest

from lychee_local.backends import jobs
from lychee_local.backends.fake import FakeLLM
from lychee_local.encode import encode
from lychee_local.settings import EncodeSettings
from lychee_local.types import Segment, Turn

Said = tuple[tuple[str, str], ...]
# A draft: the turn that the model filed it under, the sentence, and what is wrong with it ("" for nothing).
Drafts = tuple[tuple[int, str, str], ...]

FLAT: Said = (
    ("Noor", "I moved to a flat in Bergen three weeks ago. It has two bedrooms and costs 1200 euros a month."),
    ("Piet", "Nice! My brother Lars studies there. He plays the cello in an orchestra."),
    ("Noor", "I adopted a dog called Biscuit last Saturday. She is afraid of bicycles."),
    ("Piet", "I'm allergic to dogs, sadly. I sold my old van for 3500 euros to pay for a boat trip."),
)
FLAT_DRAFTS: Drafts = (
    (0, "Noor moved into a flat in Bergen.", ""),
    (0, "Noor's flat in Bergen has two bedrooms.", ""),
    (0, "The monthly rent of Noor's flat is 1200 euros.", ""),
    (0, "Noor moved to Bergen three weeks before 10 June 2024.", ""),
    (1, "Piet's brother Lars studies in Bergen.", ""),
    (1, "Lars plays the cello in an orchestra.", ""),
    (2, "Noor adopted a dog named Biscuit on Saturday 8 June 2024.", ""),
    (2, "Noor's dog Biscuit is afraid of bicycles.", ""),
    (3, "Piet has an allergy to dogs.", ""),
    (3, "Piet sold his old van for 3500 euros.", ""),
    (3, "Piet sold his van to pay for a boat trip.", ""),
    (0, "Noor moved to a flat in Trondheim.", "name"),
    (0, "Noor's flat has four bedrooms.", "number"),
    (0, "Noor pays 1500 euros a month for the flat.", "number"),
    (0, "Piet moved to a flat in Bergen.", "speaker"),
    (1, "Piet's brother Henrik studies in Bergen.", "name"),
    (1, "Noor's brother Lars studies in Bergen.", "speaker"),
    (2, "Noor adopted a dog called Waffle.", "name"),
    (2, "Noor adopted a dog called Biscuit on 2 June 2024.", "date"),
    (2, "Piet adopted a dog called Biscuit.", "speaker"),
    (3, "Noor is allergic to dogs.", "speaker"),
    (3, "Piet sold an old van for 5300 euros.", "number"),
    (3, "Piet sold the van to Marek to pay for a boat trip.", "name"),
    (2, "Noor's dog Biscuit is not afraid of bicycles.", "negation"),
    (3, "Piet is not allergic to dogs.", "negation"),
    (1, "Lars does not play the cello.", "negation"),
)
CAFE: Said = (
    ("Salma", "Yesterday I signed the lease for my cafe in Ghent. We open on 14 September 2024 with twelve tables."),
    ("Owen", "Congratulations! I work as a nurse at Saint Lucas hospital, so I will drop by after night shifts."),
    ("Salma", "My cousin Dalia bakes the bread. She learned it in Beirut from our grandmother."),
    ("Owen", "I can't eat gluten, so I hope there is rice cake. I ran a half marathon in 2019, by the way."),
    ("Salma", "I'll keep one for you. I quit my job at the bank in March 2024."),
)
CAFE_DRAFTS: Drafts = (
    (0, "Salma signed a lease for a cafe in Ghent on 24 June 2024.", ""),
    (0, "Salma's cafe will have 12 tables.", ""),
    (0, "Salma opens the cafe in Ghent on 14 September 2024.", ""),
    (1, "Owen is a nurse at Saint Lucas hospital.", ""),
    (1, "Owen works night shifts at the hospital.", ""),
    (2, "Salma's cousin Dalia bakes bread for the cafe.", ""),
    (2, "Dalia learned to bake bread in Beirut.", ""),
    (2, "Dalia learned baking from their grandmother.", ""),
    (3, "Owen cannot eat gluten.", ""),
    (3, "Owen ran a half marathon in 2019.", ""),
    (4, "Salma quit a job at a bank in March 2024.", ""),
    (4, "Until March 2024 Salma had a job at the bank.", ""),
    (0, "Salma signed a lease for a cafe in Antwerp.", "name"),
    (0, "Salma's cafe opens with twenty tables.", "number"),
    (0, "Salma opens the cafe on 14 October 2024.", "date"),
    (0, "Salma signed the lease for the cafe on 25 June 2024.", "date"),
    (0, "Owen signed the lease for a cafe in Ghent.", "speaker"),
    (1, "Owen works as a nurse at Saint Mary hospital.", "name"),
    (1, "Salma works as a nurse at Saint Lucas hospital.", "speaker"),
    (2, "Salma's cousin Dalia learned to bake bread in Cairo.", "name"),
    (2, "Rania bakes the bread for Salma's cafe.", "name"),
    (3, "Salma can't eat gluten.", "speaker"),
    (3, "Owen ran a half marathon in 2017.", "date"),
    (4, "Salma quit the job at the bank in May 2024.", "date"),
    (4, "Owen quit his job at the bank in March 2024.", "speaker"),
    (3, "Owen eats gluten.", "negation"),
    (2, "Dalia did not learn it from their grandmother.", "negation"),
    (3, "Owen has an intolerance of gluten.", ""),
)
BIKE: Said = (
    ("Tariq", "My son Idris turned 7 last Friday. We gave him a green bike and a kite."),
    ("Wanda", "Sweet! I collect stamps; I own about 850 of them, most from Finland."),
    ("Tariq", "I start a new job at Larkspur on 1 August 2024. The commute takes 40 minutes."),
    ("Wanda", "I'd rather work from home. I have a couple of parrots who keep me company, Ziggy and Pepper."),
)
BIKE_DRAFTS: Drafts = (
    (0, "Tariq's son Idris turned 7 on Friday 28 June 2024.", ""),
    (0, "Idris got a green bike and a kite.", ""),
    (1, "Wanda collects stamps.", ""),
    (1, "Wanda owns about 850 stamps, mostly from Finland.", ""),
    (2, "Tariq starts a new job at Larkspur on 1 August 2024.", ""),
    (2, "Tariq's commute to Larkspur takes 40 minutes.", ""),
    (3, "Wanda would rather work from home.", ""),
    (3, "Wanda has two parrots, Ziggy and Pepper.", ""),
    (3, "Ziggy and Pepper, the parrots, keep Wanda company.", ""),
    (0, "Tariq's son Idris turned 9.", "number"),
    (0, "Tariq's son Yusuf got a green bike.", "name"),
    (0, "Idris turned 7 on 21 June 2024.", "date"),
    (1, "Wanda owns about 580 stamps.", "number"),
    (1, "Tariq collects stamps, most from Finland.", "speaker"),
    (2, "Tariq starts a new job at Hawthorn.", "name"),
    (2, "Tariq's commute takes 14 minutes.", "number"),
    (2, "Wanda starts a new job at Larkspur on 1 August 2024.", "speaker"),
    (3, "Wanda has three parrots.", "number"),
    (3, "Tariq would rather work from home.", "speaker"),
    (1, "Wanda does not collect stamps.", "negation"),
    (3, "Wanda's parrots keep her company, so she never gets lonely.", ""),
)
# This dialogue and the next were written after the rule was made for those before, and are looser in their wording.
FAIR: Said = (
    ("Ingrid", "Grandma gave me her old sewing machine when I turned eighteen. I make all my kids' clothes on it."),
    (
        "Felix",
        "That's lovely. You should sell them! I only know how to fix shoes, I learned it from Mr Baumann in Graz.",
    ),
    (
        "Ingrid",
        "I sold 30 dresses at the Linz market in the spring. Next month I'm renting a stall at the fair in Wels.",
    ),
    (
        "Felix",
        "My train gets in at 9:40 on the 5th of May, and I bring my drone. We lost the last one over Lake Attersee.",
    ),
    ("Ingrid", "Perfect. Bring warm clothes, we got snow last week and it's minus 3 degrees."),
)
FAIR_DRAFTS: Drafts = (
    (0, "Ingrid's grandmother gave Ingrid an old sewing machine.", ""),
    (0, "Ingrid sews the clothes of the children herself.", ""),
    (0, "Ingrid has had the old sewing machine since turning 18.", ""),
    (1, "Felix can repair shoes.", ""),
    (1, "Mr Baumann in Graz taught Felix to fix shoes.", ""),
    (1, "Felix thinks that Ingrid should sell the clothes.", ""),
    (2, "Ingrid sold thirty dresses at the market in Linz.", ""),
    (2, "Ingrid will rent a stall at the fair in Wels in May 2024.", ""),
    (3, "Felix arrives by train at 9:40 on 5 May 2024.", ""),
    (3, "Felix will bring a drone.", ""),
    (3, "A drone was lost over Lake Attersee.", ""),
    (4, "Snow fell last week, and it is minus 3 degrees.", ""),
    (0, "Ingrid got the old sewing machine at sixteen.", "number"),
    (0, "Felix makes all the kids' clothes on a sewing machine.", "speaker"),
    (1, "Felix learned to fix shoes from Mr Baumgartner in Graz.", "name"),
    (1, "Felix learned to fix shoes in Salzburg.", "name"),
    (1, "Ingrid only knows how to fix shoes.", "speaker"),
    (2, "Ingrid sold 300 dresses at the Linz market.", "number"),
    (2, "Ingrid sold 30 dresses at the Steyr market.", "name"),
    (2, "Ingrid is renting a stall at the fair in Wels in June 2024.", "date"),
    (2, "Felix sold 30 dresses at the Linz market.", "speaker"),
    (3, "Felix's train gets in on 6 May 2024.", "date"),
    (3, "Felix's train gets in at 9:45.", "number"),
    (3, "Ingrid brings a drone.", "speaker"),
    (3, "Felix lost a drone over Lake Traunsee.", "name"),
    (4, "It is minus 13 degrees and there is snow.", "number"),
    (4, "Hannah told Felix to bring warm clothes.", "name"),
    (1, "Felix does not know how to fix shoes.", "negation"),
    (3, "Felix will not bring a drone.", "negation"),
)
BOAT: Said = (
    ("Bruno", "We finally bought the boathouse on the river Oker. It needs a new roof for around 15,000."),
    ("Leila", "Wow! I spent the whole weekend grading exams. 27 of my students passed, three failed."),
    ("Bruno", "Our twins start school in September 2025; Emil already reads. Petra got promoted to head of logistics."),
    (
        "Leila",
        "I gave up coffee two months ago and sleep better. My doctor, Dr. Farouk, had warned me of my blood pressure.",
    ),
    ("Bruno", "I never drink tea, only coffee. On Thursday I'm off to Gdansk for a trade fair until Sunday."),
)
BOAT_DRAFTS: Drafts = (
    (0, "Bruno bought a boathouse on the river Oker.", ""),
    (0, "The roof of Bruno's boathouse must be renewed for around 15,000.", ""),
    (1, "Leila graded exams all weekend.", ""),
    (1, "Three of Leila's students failed the exam and 27 passed.", ""),
    (2, "Bruno's twins will start school in September 2025.", ""),
    (2, "Emil, one of Bruno's twins, can already read.", ""),
    (2, "Petra was promoted to head of logistics.", ""),
    (3, "Leila stopped drinking coffee in January 2025 and sleeps better.", ""),
    (3, "Dr. Farouk warned Leila about high blood pressure.", ""),
    (4, "Bruno doesn't drink tea.", ""),
    (4, "Bruno will be at a trade fair in Gdansk from Thursday to Sunday.", ""),
    (0, "Bruno bought a boathouse on the river Leine.", "name"),
    (0, "A new roof for Bruno's boathouse costs around 50,000.", "number"),
    (0, "Leila bought a boathouse on the river Oker.", "speaker"),
    (1, "Thirteen of Leila's students failed.", "number"),
    (1, "Bruno spent the weekend grading exams.", "speaker"),
    (2, "Bruno's twins start school in August 2025.", "date"),
    (2, "Jonas already reads.", "name"),
    (2, "Petra got promoted to head of logistics in 2023.", "date"),
    (3, "Leila gave up coffee three months ago.", "number"),
    (3, "Dr. Hassan warned Leila about her blood pressure.", "name"),
    (3, "Bruno gave up coffee two months ago.", "speaker"),
    (4, "Bruno is off to Krakow for a trade fair.", "name"),
    (4, "Leila never drinks tea.", "speaker"),
    (4, "Bruno drinks tea.", "negation"),
    (4, "Bruno drinks only coffee.", ""),
    (2, "Emil cannot read yet.", "negation"),
)
CASES = (
    (FLAT, datetime(2024, 6, 10, 18), FLAT_DRAFTS),
    (CAFE, datetime(2024, 6, 25, 9), CAFE_DRAFTS),
    (BIKE, datetime(2024, 7, 3, 20), BIKE_DRAFTS),
    (FAIR, datetime(2024, 4, 20, 12), FAIR_DRAFTS),
    (BOAT, datetime(2025, 3, 10, 20), BOAT_DRAFTS),
)


def refused(said: Said, at: datetime, number: int, sentence: str) -> bool:
    """Whether a draft, filed under one turn, yields no record of the model; each is finished by itself."""
    turns = [Turn("s", i, text, "user", speaker, at) for i, (speaker, text) in enumerate(said)]
    item = {
        "memory_type": "fact",
        "semantic_text": sentence,
        "entities": [],
        "temporal": {"t_ref": "", "t_valid_from": "", "t_valid_to": ""},
        "tags": [],
        "evidence_turns": [number],
        "source_role": "user",
    }
    llm = FakeLLM([json.dumps({"records": [item], "disambiguation_context": ""})], prompt_style="full")
    segment = Segment("s", 0, len(turns) - 1, "session_flush", 1, len(turns), 1.0)
    encoded = jobs.run(encode(segment, turns, llm=llm, context="", settings=EncodeSettings()), llm)
    out = all(record.origin == "rules" for record in encoded.records)
    assert ("rejected" in encoded.detail) == out
    return out


def judged() -> list[tuple[str, str, bool]]:
    return [
        (sentence, wrong, refused(said, at, number, sentence))
        for said, at, drafts in CASES
        for number, sentence, wrong in drafts
    ]


def test_the_set_is_balanced() -> None:
    labels = [wrong for _, _, drafts in CASES for _, _, wrong in drafts]
    assert len(labels) >= 60
    assert abs(labels.count("") - len(labels) / 2) <= 0.1 * len(labels)
    assert all(labels.count(kind) >= 5 for kind in ("name", "number", "date", "speaker", "negation"))


def test_precision_and_recall_of_the_rejection() -> None:
    results = judged()
    rejected = [(sentence, wrong) for sentence, wrong, out in results if out]
    wrong = [sentence for sentence, wrong, _ in results if wrong]
    precision = sum(1 for _, label in rejected if label) / len(rejected)
    recall = sum(1 for _, label in rejected if label) / len(wrong)
    mistakes = [r for r in results if bool(r[1]) != r[2]]
    assert precision >= 0.95, mistakes
    assert recall >= 0.9, mistakes


@pytest.mark.parametrize("kind", ["name", "number", "date", "speaker", "negation"])
def test_every_kind_of_invention_is_found(kind: str) -> None:
    outcomes = [out for _, wrong, out in judged() if wrong == kind]
    assert sum(outcomes) >= 0.8 * len(outcomes)
