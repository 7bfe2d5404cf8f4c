"""German phrases and their English translations, both as the Unicode CLDR formats them (through `babel`).

Only formats whose German determines the English are used: no two-digit years, no rounding, no shared names.
"""

import datetime
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from random import Random
from typing import Generic, Literal, TypeVar

from babel import Locale
from babel.dates import format_date, format_interval, format_skeleton, format_time, format_timedelta
from babel.lists import format_list
from babel.numbers import (
    format_compact_decimal,
    format_currency,
    format_decimal,
    format_percent,
    get_currency_name,
    get_territory_currencies,
)
from babel.units import format_unit

Item = TypeVar("Item")

LOCALES = ("de", "en")
PLAIN_SPACES = str.maketrans({"\u00a0": " ", "\u202f": " ", "\u2009": " "})
"""CLDR's narrow and unbreakable spaces differ between the languages by typographic custom only."""
FIRST_YEAR, LAST_YEAR = 1950, 2049
TENDER_DATE = datetime.date(2024, 1, 1)
"""Currencies in use on this day, and the territories that use one: a fixed day, so that the corpus never changes."""
MAX_NAME_LENGTH = 22
MAX_NAMES = {"territory": 160, "language": 140, "currency": 60}
"""Names of each kind in a corpus of the default size: few enough that each is seen some dozens of times."""
MAX_CURRENCY_CODES = 12
"""Currencies that stand in amounts as a code or sign too, which before or behind is spelled in several pieces."""
PAIRS_FOR_ALL_NAMES = 20_000

UNITS = (
    *("area-hectare", "area-square-kilometer", "area-square-meter", "digital-gigabyte", "digital-megabyte"),
    *("duration-century", "duration-day", "duration-hour", "duration-minute", "duration-month", "duration-second"),
    *("duration-week", "duration-year", "electric-ampere", "electric-volt", "energy-kilocalorie"),
    *("energy-kilowatt-hour", "length-centimeter", "length-foot", "length-inch", "length-kilometer"),
    *("length-light-year", "length-meter", "length-mile", "length-millimeter", "length-nautical-mile", "mass-gram"),
    *("mass-kilogram", "mass-milligram", "mass-ounce", "mass-tonne", "power-horsepower", "power-kilowatt"),
    *("pressure-bar", "speed-kilometer-per-hour", "speed-knot", "speed-meter-per-second", "temperature-celsius"),
    *("volume-cubic-meter", "volume-liter", "volume-milliliter", "volume-teaspoon"),
)


@dataclass(frozen=True, kw_only=True)
class Phrase:
    """A translated phrase, and the names in it that can only be learnt by heart."""

    source: str
    target: str
    names: tuple[str, ...] = ()


class Deck(Generic[Item]):
    """Deals its items in random order, and all of them before any comes again, so that none is rare."""

    def __init__(self, items: Sequence[Item], *, rng: Random) -> None:
        self._items, self._rng = list(items), rng
        self._left: list[Item] = []

    def __len__(self) -> int:
        return len(self._items)

    def deal(self) -> Item:
        """The next item."""
        if not self._left:
            self._left = self._rng.sample(self._items, len(self._items))
        return self._left.pop()

    def hand(self, size: int) -> list[Item]:
        """`size` different items, or all there are."""
        chosen: list[Item] = []
        while len(chosen) < min(size, len(self)):
            item = self.deal()
            if item not in chosen:
                chosen.append(item)
        return chosen


def translated(render: Callable[[str], str], *names: str) -> Phrase:
    """What `render` makes for German and for English, with plain spaces."""
    source, target = (render(locale).translate(PLAIN_SPACES) for locale in LOCALES)
    return Phrase(source=source, target=target, names=names)


def _named(code: str, source: str, target: str) -> Phrase:
    return Phrase(source=source.translate(PLAIN_SPACES), target=target.translate(PLAIN_SPACES), names=(code,))


def cldr_names() -> dict[str, dict[str, Phrase]]:
    """Names of territories, languages and currencies in use, by code. Each German name has one English one."""
    german, english = (Locale(locale) for locale in LOCALES)
    territories = [code for code in _two_letter_codes(german.territories) if code in english.territories]
    tender = {code: get_territory_currencies(code, start_date=TENDER_DATE) for code in territories}
    languages = [code for code in _two_letter_codes(german.languages) if code in english.languages]
    currencies = sorted({str(currency) for those in tender.values() for currency in those})
    found = {
        "territory": {
            code: _named(code, german.territories[code], english.territories[code])
            for code in territories
            if tender[code]
        },
        "language": {code: _named(code, german.languages[code], english.languages[code]) for code in languages},
        "currency": {
            code: _named(code, *(get_currency_name(code, locale=locale) for locale in LOCALES)) for code in currencies
        },
    }
    # "Fidschi" is a territory (Fiji) and a language (Fijian): what is not one name in both languages is left out.
    every = [phrase for names in found.values() for phrase in names.values()]
    sources, targets = (Counter(getattr(phrase, side) for phrase in every) for side in ("source", "target"))
    return {
        kind: {
            code: phrase
            for code, phrase in names.items()
            if sources[phrase.source] == targets[phrase.target] == 1 and _is_simple(phrase)
        }
        for kind, names in found.items()
    }


def _two_letter_codes(codes: Iterable[object]) -> list[str]:
    return sorted(code for code in map(str, codes) if len(code) == 2 and code.isalpha())


def _is_simple(phrase: Phrase) -> bool:
    """Whether a name is short and cannot be mistaken for a list or an amount."""
    return all(
        len(name) <= MAX_NAME_LENGTH
        and not any(sign in name for sign in "(),&0123456789")
        and not set(name.split()) & {"und", "and", "-"}
        for name in (phrase.source, phrase.target)
    )


class PhraseMaker:
    """Draws phrases of all kinds at random. `num_pairs`, the size of the corpus, decides how many names it uses."""

    def __init__(self, *, rng: Random, num_pairs: int) -> None:
        self._rng = rng
        share = min(1.0, num_pairs / PAIRS_FOR_ALL_NAMES)
        self._names: dict[str, dict[str, Phrase]] = {}
        for kind, names in cldr_names().items():
            size = min(len(names), max(4, round(share * MAX_NAMES[kind])))
            self._names[kind] = {code: names[code] for code in sorted(rng.sample(sorted(names), size))}
        units = rng.sample(UNITS, max(4, round(share * len(UNITS))))
        self._list_decks = {kind: Deck(sorted(names), rng=rng) for kind, names in self._names.items()}
        self._kinds = Deck(["territory", "territory", "language", "language", "currency"], rng=rng)
        self._currencies = Deck(sorted(self._names["currency"]), rng=rng)
        self._units = Deck(sorted(units), rng=rng)
        self._codes = Deck(sorted(self._names["currency"])[:MAX_CURRENCY_CODES], rng=rng)
        makers = {self._list: 40, self._date: 18, self._period: 5, self._interval: 4, self._time: 10}
        makers |= {self._money: 8, self._money_in_short: 3, self._unit: 8, self._timedelta: 2, self._number: 5}
        self._makers = Deck([maker for maker, weight in makers.items() for _ in range(weight)], rng=rng)

    def names(self) -> Iterator[Phrase]:
        """Every name that lists are made of, by itself."""
        for names in self._names.values():
            yield from names.values()

    def draw(self) -> Phrase:
        """A random phrase."""
        return self._makers.deal()()

    def _list(self) -> Phrase:
        kind = self._kinds.deal()
        codes = self._list_decks[kind].hand(self._rng.choice((2, 2, 3)))
        style: Literal["standard", "or"] = self._rng.choice(("standard", "standard", "or"))
        names = [self._names[kind][code] for code in codes]
        return Phrase(
            source=format_list([name.source for name in names], style=style, locale=LOCALES[0]),
            target=format_list([name.target for name in names], style=style, locale=LOCALES[1]),
            names=tuple(codes),
        )

    def _day(self) -> datetime.date:
        first, last = datetime.date(FIRST_YEAR, 1, 1), datetime.date(LAST_YEAR, 12, 31)
        return datetime.date.fromordinal(self._rng.randint(first.toordinal(), last.toordinal()))

    def _clock(self) -> datetime.time:
        return datetime.time(self._rng.randrange(24), self._rng.randrange(60), self._rng.randrange(60))

    def _date(self) -> Phrase:
        day, length = self._day(), self._rng.choice(("full", "long", "medium"))
        return translated(lambda locale: format_date(day, length, locale=locale), f"month {day.month}")

    def _period(self) -> Phrase:
        """A month, a quarter or a week of a year."""
        day, skeleton = self._day(), self._rng.choice(("yMMMM", "yQQQQ", "yw"))
        moment = datetime.datetime.combine(day, datetime.time())
        if skeleton == "yw":  # whose first and last days of January and December belong to another year's weeks
            moment = moment.replace(month=self._rng.randint(2, 11)) if moment.day <= 28 else moment.replace(month=7)
        return translated(lambda locale: format_skeleton(skeleton, moment, locale=locale))

    def _interval(self) -> Phrase:
        start = self._day()
        end = min(start + datetime.timedelta(days=self._rng.randint(1, 90)), datetime.date(start.year, 12, 31))
        return translated(lambda locale: format_interval(start, end, "yMMMd", locale=locale), f"month {start.month}")

    def _time(self) -> Phrase:
        clock, length = self._clock(), self._rng.choice(("short", "medium", "medium"))
        return translated(lambda locale: format_time(clock, length, locale=locale))

    def _amount(self, *, digits: int) -> Decimal:
        """A number of up to `digits` digits, one or two of them behind the point in half of all cases."""
        whole = self._rng.randrange(1, 10 ** self._rng.randint(1, digits))
        return Decimal(whole).scaleb(-self._rng.choice((0, 0, 1, 2)))

    def _money(self) -> Phrase:
        code, amount = self._currencies.deal(), self._amount(digits=5) + 2  # never one of something, the odd singular
        return translated(lambda locale: format_currency(amount, code, locale=locale, format_type="name"), code)

    def _money_in_short(self) -> Phrase:
        code, amount = self._codes.deal(), self._amount(digits=5)
        return translated(lambda locale: format_currency(amount, code, locale=locale), code)

    def _unit(self) -> Phrase:
        unit, amount = self._units.deal(), self._amount(digits=4)
        return translated(lambda locale: format_unit(amount, unit, locale=locale), unit)

    def _timedelta(self) -> Phrase:
        units: tuple[Literal["day", "hour", "minute", "second", "week"], ...]
        units = ("day", "hour", "minute", "second", "week")
        unit = self._rng.choice(units)
        delta = datetime.timedelta(**{f"{unit}s": self._rng.choice((-1, 1)) * self._rng.randint(1, 999)})
        return translated(
            # An infinite threshold keeps to the unit: others would round.
            lambda locale: format_timedelta(
                delta, granularity=unit, threshold=math.inf, add_direction=True, locale=locale
            )
        )

    def _number(self) -> Phrase:
        amount, style = self._amount(digits=4), self._rng.choice(("percent", "compact", "plain"))
        if style == "percent":
            return translated(lambda locale: format_percent(amount / 100, locale=locale, decimal_quantization=False))
        if style == "plain":
            return translated(lambda locale: format_decimal(amount * 1001, locale=locale, decimal_quantization=False))
        tenths = Decimal(self._rng.randint(10, 9_999)) / 10
        value = tenths * 1_000 ** self._rng.randint(1, 4)
        return translated(
            lambda locale: format_compact_decimal(value, format_type="long", fraction_digits=1, locale=locale)
        )
