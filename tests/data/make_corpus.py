"""Write swarmnet/data/corpus/small.txt: plain English of a small world, the same bytes on every machine.

Sentences come from templates, but people, places and things keep their traits throughout a chapter, sums are right and
questions are answered from what was told before: a model of a few thousand parameters learns the words within a hundred
steps and has something left to learn afterwards. Run it from anywhere; `test_data_corpus.py` holds the file to it.
"""

from __future__ import annotations

import random
from pathlib import Path

TARGET = Path(__file__).parents[2] / "swarmnet" / "data" / "corpus" / "small.txt"
NUM_CHAPTERS = 200


def words(text: str) -> list[str]:
    return text.split()


PEOPLE = words("Ada Bram Clara Dimitri Elin Farid Greta Hugo Ines Jonas Kaya Leon Mira Nils Olga Pavel Rosa Samir")
TRADES = words("baker carpenter weaver miller sailor gardener printer mason potter glazier tailor smith")
PLACES = {
    "harbour": ("boats", "salt", "gulls"),
    "market": ("stalls", "apples", "voices"),
    "mill": ("wheels", "flour", "sparrows"),
    "library": ("shelves", "dust", "whispers"),
    "forest": ("pines", "resin", "owls"),
    "bridge": ("arches", "moss", "swallows"),
    "orchard": ("ladders", "plums", "bees"),
    "square": ("benches", "bread", "pigeons"),
}
THINGS = words("lantern basket kettle ladder violin clock letter blanket compass hammer mirror wagon")
COLOURS = words("red blue green yellow grey white brown black")
WEATHER = {
    "it rained": ("wet", "the roofs dripped"),
    "the sun shone": ("warm", "the stones grew hot"),
    "it snowed": ("cold", "the paths went quiet"),
    "the wind blew": ("rough", "the shutters rattled"),
    "there was fog": ("dim", "the lamps burned all day"),
}
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
NUMBERS = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen"
)
DEEDS = {
    "carried": "carry",
    "painted": "paint",
    "mended": "mend",
    "borrowed": "borrow",
    "polished": "polish",
    "hid": "hide",
    "found": "find",
    "sold": "sell",
}


class Dice:
    """Choices from nothing but `Random.random`, the one method Python promises never to change."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def below(self, bound: int) -> int:
        return int(self._random() * bound)

    def one(self, items):
        items = list(items)
        return items[self.below(len(items))]

    def some(self, items, count: int) -> list:
        pool = list(items)
        return [pool.pop(self.below(len(pool))) for _ in range(count)]


def a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def opening(dice: Dice, number: int, day: str, place: str, weather: str) -> str:
    feel, effect = WEATHER[weather]
    sights = PLACES[place]
    return dice.one(
        [
            f"On {day} {weather}, and at the {place} {effect}. "
            f"You could see the {sights[0]} and smell the {sights[1]}.",
            f"{day} began {feel}, for {weather} since dawn. The {place} was full of {sights[2]}, and {effect}.",
            f"Nobody at the {place} minded that {weather}. It was {day}, a {feel} day of {sights[1]} and {sights[2]}.",
            f"When {weather}, {effect}; so it was on {day}, day {number} of the story, among the {sights[0]}.",
        ]
    )


def meeting(dice: Dice, first: str, second: str, trades: dict[str, str], place: str) -> str:
    return dice.one(
        [
            f"{first} the {trades[first]} met {second} the {trades[second]} by the {PLACES[place][0]}.",
            f"There {first}, who was {a(trades[first])}, waited for {second}, who was {a(trades[second])}.",
            f'"Good morning, {second}," said {first}. "Good morning," said the {trades[second]}.',
            f"The {trades[first]}, whose name was {first}, walked beside {second} the {trades[second]}.",
        ]
    )


def event(dice: Dice, who: str, deed: str, colour: str, thing: str) -> str:
    again = dice.one(["before noon", "in the evening", "twice", "without a word", "with great care", "as promised"])
    return dice.one(
        [
            f"{who} {deed} a {colour} {thing} {again}.",
            f"Then {who} {deed} the {colour} {thing}, {again}.",
            f"It was {who} who {deed} the {colour} {thing} {again}.",
        ]
    )


def arithmetic(dice: Dice, who: str, other: str, place: str) -> str:
    left, right = 1 + dice.below(9), 1 + dice.below(9)
    goods = dice.one(["apples", "coins", "loaves", "nails", "candles", "eggs"])
    total = NUMBERS[left + right]
    many = [f"{NUMBERS[n]} {goods if n > 1 else 'loaf' if goods == 'loaves' else goods[:-1]}" for n in (left, right)]
    return dice.one(
        [
            f"{who} had {many[0]} and {other} gave {many[1]} more, so now there were {total}.",
            f"{many[0].capitalize()} from {who} and {many[1]} from {other} make {total}.",
            f'"How many {goods}?" "{many[0].capitalize()} here, {many[1]} there, so {total}," said {who} to {other}.',
            f"At the {place} they counted {many[0]}, then {many[1]}, and wrote down {total}.",
        ]
    )


def question(dice: Dice, fact: tuple[str, str, str, str], trades: dict[str, str]) -> str:
    who, deed, colour, thing = fact
    return dice.one(
        [
            f'"Who {deed} the {thing}?" "That was {who}."',
            f'"What did {who} {DEEDS[deed]}?" "The {colour} {thing}."',
            f'"What colour was the {thing}?" "It was {colour}."',
            f'"What is the trade of {who}?" "{who} is {a(trades[who])}."',
        ]
    )


def chapter(dice: Dice, number: int) -> str:
    people = dice.some(PEOPLE, 3)
    trades = dict(zip(people, dice.some(TRADES, 3), strict=True))
    things = dict(zip(dice.some(THINGS, 4), dice.some(COLOURS, 4), strict=True))
    place, weather, day = dice.one(PLACES), dice.one(WEATHER), DAYS[number % 7]
    told = [(dice.one(people), dice.one(DEEDS), colour, thing) for thing, colour in things.items()]
    first, second = dice.some(people, 2)
    body = [opening(dice, number, day, place, weather), meeting(dice, first, second, trades, place)]
    for fact in told:
        body.append(event(dice, *fact))
        if dice.below(3) == 0:
            body.append(arithmetic(dice, *dice.some(people, 2), place))
    answers = [question(dice, fact, trades) for fact in dice.some(told, 3)]
    close = f"So ended {day} at the {place}, and {people[2]} went home."
    return "\n".join([f"Chapter {number}", "", " ".join(body), "", *answers, "", close, "", ""])


def corpus() -> str:
    dice = Dice(20)
    return "".join(chapter(dice, number) for number in range(1, NUM_CHAPTERS + 1))


if __name__ == "__main__":
    TARGET.write_bytes(corpus().encode())
