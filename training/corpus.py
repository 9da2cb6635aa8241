"""The training documents: plain stories, chats that request a story, and JSON records about a story.

Requests and records are derived from the stories by rules, so the text needs no annotation.
"""

from __future__ import annotations

import collections
import hashlib
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

SEPARATOR = "<|endoftext|>"
SYSTEM, USER, ASSISTANT, END = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"

PLACES = (
    "park forest garden beach school kitchen town village farm zoo river pond lake sea bedroom store shop castle mountain "
    "woods field cave city yard jungle barn playground library market hill island house"
).split()
NOT_TOPICS = frozenset(
    "time day day's lot thing things way morning night sun end bit moment story day. first other others same best next one "
    "two girl boy man woman mom dad mother father mum mommy daddy friend friends little big new old good while kind ground "
    "side hand head mouth face eye arm leg foot knee nose ear tail paw idea plan problem lesson surprise world voice air floor "
    "room walk distance corner bottom top middle word name family person child kid creature animal place home house one "
    "mess look hug smile laugh noise sound job adventure journey trip turn help cry bad sad happy right left wrong coming "
    "appeared instead sitting days minutes minute breath bite land ending line view chance difference pile step power crack "
    "frown knock life body pain number kiss".split()
)
# A word is taken for a noun when it often stands between a determiner and a punctuation mark or one of these words.
AFTER_NOUN = r"(?=[.,!?;]|\s(?:was|were|is|said|and|had|did|could|to|in|on|with|that|who|for|from|so|ran|went|looked|named|called)\b)"
NOUN = re.compile(r"\b(?:a|an|the|his|her|their|my)\s(?:[a-z]{3,12}\s){0,2}?([a-z]{3,12})" + AFTER_NOUN)
SINGULAR = re.compile(r"\b(?:a|an)\s(?:[a-z]{3,12}\s){0,2}?([a-z]{3,12})" + AFTER_NOUN)
KIND = re.compile(r"\b([a-z]{3,12})\s(?:named|called)\s[A-Z]")
NAME = re.compile(r"\b(?:named|called)\s([A-Z][a-z]{2,9})\b")
SPOKEN = re.compile(r"(?<=[a-z,] )([A-Z][a-z]{2,9})\b")
WORD = re.compile(r"[a-z]{3,12}")


@dataclass(frozen=True)
class Story:
    """A story with the data that the rules extracted. ``topics`` are nouns, the most specific first."""

    text: str
    hero: str
    named: bool
    place: str
    topics: tuple[str, ...]


def read(path: Path) -> list[str]:
    """The stories of a file, stripped, without very short ones."""
    return [text for part in path.read_text("utf-8").split(SEPARATOR) if len(text := part.strip()) > 200]


def held_out(text: str) -> bool:
    """Whether a story is held out: one in fifty, by its digest, so that the split never changes."""
    return hashlib.sha256(text.encode()).digest()[0] < 5


def nouns(texts: list[str]) -> dict[str, float]:
    """Every word that is used as a noun, with its inverse story frequency."""
    as_noun: collections.Counter[str] = collections.Counter()
    singular: collections.Counter[str] = collections.Counter()
    anywhere: collections.Counter[str] = collections.Counter()
    stories: collections.Counter[str] = collections.Counter()
    for text in texts:
        as_noun.update(NOUN.findall(text))
        singular.update(SINGULAR.findall(text))
        words = WORD.findall(text)
        anywhere.update(words)
        stories.update(set(words))
    return {
        word: len(texts) / stories[word]
        for word, count in as_noun.items()
        if count >= 12 and count > 0.25 * anywhere[word] and singular[word] > 0.12 * count and word not in NOT_TOPICS
    }


def annotate(text: str, weights: dict[str, float]) -> Story:
    """Find hero, place and topics of a story."""
    seen = collections.Counter(word for word in NOUN.findall(text) if word in weights)
    kinds = [word for word in KIND.findall(text) if word in weights]
    seen.update(dict.fromkeys(kinds, 6))
    early = set(WORD.findall(text[:300]))
    seen = collections.Counter({word: count * (3 if word in early else 1) for word, count in seen.items()})
    topics = sorted(seen, key=lambda word: (-seen[word] * min(weights[word], 60.0), word))[:4]
    names = collections.Counter(SPOKEN.findall(text)) + collections.Counter(NAME.findall(text) * 3)
    for word in (
        "The",
        "But",
        "And",
        "Then",
        "Mom",
        "Dad",
        "Mommy",
        "Daddy",
        "Yes",
        "They",
        "She",
        "Thank",
        "You",
        "What",
        "Can",
    ):
        names.pop(word, None)
    ranked = [name for name, count in names.most_common(1) if count >= 2]
    words = WORD.findall(text)
    place = next((word for word in words if word in PLACES), "home")
    hero = ranked[0] if ranked else topics[0] if topics else "a child"
    return Story(text, hero, bool(ranked), place, tuple(word for word in topics if word != place))


def article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def request(story: Story, rng: random.Random) -> str:
    """A user request for this story."""
    topics = list(story.topics[:3])
    if rng.random() < 0.5:
        rng.shuffle(topics)
    phrases = [article(topic) for topic in topics[: rng.choice((1, 1, 2, 2, 3))]]
    if story.named and (not phrases or rng.random() < 0.3):
        phrases.insert(0, story.hero)
    if not phrases or rng.random() < 0.05:
        return rng.choice(
            ("Tell me a story.", "Can you tell me a story?", "Please tell me a bedtime story.", "Write a short story.")
        )
    about = phrases[0] if len(phrases) == 1 else ", ".join(phrases[:-1]) + " and " + phrases[-1]
    form = rng.choice(
        (
            "Tell me a story about {}",
            "Tell me a story about {}",
            "Tell me a story about {}",
            "Write a story about {}",
            "Write a short story about {}",
            "Can you tell me a story about {}?",
            "I want a story about {}",
            "Please tell me a story with {}",
            "A story about {}, please",
        )
    ).format(about)
    return form if form.endswith("?") or rng.random() < 0.4 else form + "."


def record(story: Story) -> str:
    """The story as a short JSON record."""
    other = next((topic for topic in story.topics if topic != story.hero), story.place)
    hero = story.hero if story.named else f"The {story.hero.removeprefix('a ').title()}"
    return json.dumps({"title": f"{hero} and the {other.title()}", "hero": story.hero, "place": story.place})


SMALL_TALK = (
    (("Hello!", "Hi!", "Hello", "Hi there!", "Good morning!", "Hey"), "Hello! Would you like to hear a story?"),
    (
        ("Who are you?", "What are you?", "What can you do?"),
        "I am a small storyteller. Ask me for a story about something you like!",
    ),
    (("How are you?", "How are you today?"), "I am happy today, thank you! What should my story be about?"),
    (("Yes", "Yes, please!", "Yes please"), "What should the story be about?"),
)
THANKS = (
    (
        ("Thank you!", "Thanks!", "That was nice.", "I like it!"),
        "I am glad you liked it! Would you like another story?",
    ),
    (("Bye!", "Goodbye!", "Good night!"), "Goodbye! Sleep well and dream of stories."),
)
ASK_RECORD = (
    "Describe the story as JSON.",
    "Now give me a JSON record of it.",
    "Write a JSON record about the story.",
    "Give me the title, hero and place as JSON.",
)


def turn(role: str, text: str) -> str:
    return f"{role}{text}{END}"


def exchange(pair: tuple[tuple[str, ...], str], rng: random.Random) -> str:
    return turn(USER, rng.choice(pair[0])) + turn(ASSISTANT, pair[1])


def chat(story: Story, rng: random.Random) -> str:
    """A conversation with the story as the response; sometimes with small talk, or a record after it."""
    parts = []
    if rng.random() < 0.15:
        parts.append(
            turn(
                SYSTEM,
                rng.choice(("You are a storyteller.", "You tell short stories.", "You are a helpful assistant.")),
            )
        )
    if rng.random() < 0.12:
        parts.append(exchange(rng.choice(SMALL_TALK), rng))
    parts.append(turn(USER, request(story, rng)) + turn(ASSISTANT, story.text))
    if rng.random() < 0.3:
        parts.append(turn(USER, rng.choice(ASK_RECORD)) + turn(ASSISTANT, record(story)))
    elif rng.random() < 0.2:
        parts.append(exchange(rng.choice(THANKS), rng))
    return "".join(parts)


def record_chat(story: Story, rng: random.Random) -> str:
    """A conversation with only a record as the response: of a story in the prompt, or of a requested one."""
    if rng.random() < 0.35:
        asked = f"Give me a JSON record of this story: {story.text}"
    else:
        asked = request(story, rng).replace("Tell me a story", "Write a JSON record of a story")
        asked = asked if "JSON" in asked else "As a JSON record: " + asked
    return turn(USER, asked) + turn(ASSISTANT, record(story))


def documents(stories: list[Story], plain: list[str], rng: random.Random, chats: float = 0.5) -> list[str]:
    """One epoch: every story once, a part of them as chats (one in five a record), the plain texts, in random order."""
    made = list(plain)
    for story in stories:
        kind = rng.random()
        if kind < chats:
            made.append(chat(story, rng) if kind < 0.8 * chats else record_chat(story, rng))
        else:
            made.append(story.text)
    made += [exchange(rng.choice(SMALL_TALK + THANKS), rng) for _ in range(len(stories) // 40)]
    rng.shuffle(made)
    return made


@dataclass(frozen=True)
class Corpus:
    """Training and held-out text. ``hard``: the old fairy tales, whose language is more difficult."""

    stories: list[Story]
    easy: list[str]
    hard: list[str]
    held_out: list[str]


def load(folder: Path) -> Corpus:
    """Read the corpus folder: tinystories.txt, storybooks_ccby.txt, fairytales.txt."""
    tiny = read(folder / "tinystories.txt")
    train = [text for text in tiny if not held_out(text)]
    weights = nouns(train)
    fairy, size, hard = read(folder / "fairytales.txt"), 0, []
    for text in fairy:  # simplest first: the first 1.5 MB
        size += len(text)
        if size < 1_500_000:
            hard.append(text[:6000])
    return Corpus(
        stories=[annotate(text, weights) for text in train],
        easy=read(folder / "storybooks_ccby.txt"),
        hard=hard,
        held_out=[text for text in tiny if held_out(text)],
    )
