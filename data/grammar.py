"""A corpus made offline: sentences of a random grammar whose entropy is known exactly.

    grammar = Grammar(seed)         the same words and rules for the same seed, on every machine
    grammar.text(seed)              yields sentences, for ever
    grammar.entropy_rate()          nats a byte: the loss of a model that knows the grammar
    grammar.sentence_entropy(), grammar.sentence_length()

The words are made from syllables, the rules are fixed. A taste of what comes out:

    This ho that two hos di res ty. Does this no that a lu fo tis know that the tu bu nu vas fi the fu hos?

What there is to learn, from easy to hard: spelling; which kind of word follows which; how often each word is used; that a
determiner, its noun and its verb agree in number, also where a clause stands between noun and verb ("ho that two hos di
res"), which may itself hold a clause; that a sentence which opens with Do or Does ends with a question mark.

Why the entropy rate is exact. Three facts:
1. The rules are LL(1): at every choice, the next word alone says which alternative was taken (tests/test_prepare.py checks
   this for the rules as they are). So a sentence has one derivation, its probability is the product of the choices made, and
   the entropy of a sentence is that of its derivation: H(A) = entropy of A's choice + sum over alternatives of their
   probability times the H of their symbols. That is one linear equation for each symbol A, as is the one for the expected
   length L(A), and both systems are solved here, not sampled.
2. Every sentence ends with "." or "?" and one blank or newline, and neither mark stands anywhere else. So the text can be
   cut back into its sentences in one way, and a text of n sentences, drawn independently, has entropy n H(Sentence).
3. After m bytes the number of complete sentences is m / L(Sentence) + o(m) almost surely (the law of large numbers for
   renewals), and the one cut off at the end adds o(m). So the entropy of m bytes is m H/L + o(m).
No predictor of the next byte, of whatever memory, has a lower expected loss than H/L in the long run. A model that starts in
the middle of the text, as it does in every window, does not know where in a sentence it is, and pays a little more.
"""
import bisect
import itertools
import math
import random

ONSETS = "b d f g h j k l m n p r t v z".split()
# How many words of each kind there are, and the vowels they end with: as in Esperanto, a word shows its kind. A word is one
# onset and one vowel, so that most bytes hold a choice: the more nats a byte, the less weighs what a window's start costs.
KINDS = {"noun": (20, "ao"), "adjective": (10, "u"), "adverb": (8, "y"), "intransitive": (10, "e"), "transitive": (10, "i")}

NUMBERS = ("one", "many")
DETERMINERS = {"one": "a my this".split(), "many": "the two some".split()}
PREPOSITIONS = "by in on".split()
BELIEFS = "know think".split()

# Where the sentence ends: the one place with these bytes.
GAPS = ((0.85, (" ",)), (0.15, ("\n",)))


class Grammar:
    """rules: symbol -> tuple of (probability, tuple of symbols). What is no key of rules is text, its blanks included."""

    def __init__(self, seed=1):
        rng = random.Random(seed)
        lexicon = {kind: _words(rng, size, vowels) for kind, (size, vowels) in KINDS.items()}
        self.rules = {"Sentence": _sentence(), "Gap": GAPS, "Tail": _optional(0.05, " while", "Clause"), **_shared(lexicon)}
        for number in NUMBERS:
            self.rules.update(_numbered(number, lexicon))

    def text(self, seed=1):
        """Yields independent sentences, the same ones for the same seed."""
        rng = random.Random(seed).random  # Python promises the same numbers in every version for this method alone
        choices = {symbol: (list(itertools.accumulate(p for p, _ in rule))[:-1], [alt[::-1] for _, alt in rule])
                   for symbol, rule in self.rules.items()}
        while True:
            parts, stack = [], ["Sentence"]
            while stack:
                symbol = stack.pop()
                if symbol in choices:
                    limits, alternatives = choices[symbol]
                    stack.extend(alternatives[bisect.bisect(limits, rng())])
                else:
                    parts.append(symbol)
            yield "".join(parts)

    def sentence_entropy(self):
        """Nats in a sentence."""
        return self._solve(lambda rule: -sum(p * math.log(p) for p, _ in rule))

    def sentence_length(self):
        """Expected bytes of a sentence."""
        return self._solve(lambda rule: sum(p * len(part) for p, alternative in rule for part in alternative
                                            if part not in self.rules))

    def entropy_rate(self):
        """Nats a byte, see above."""
        return self.sentence_entropy() / self.sentence_length()

    def _solve(self, own):
        """x(Sentence) where x(A) = own(rule of A) + sum of p * x(B) over every B in every alternative of A: by Gaussian
        elimination, with the pivot of the largest size."""
        symbols = list(self.rules)
        place = {symbol: i for i, symbol in enumerate(symbols)}
        n = len(symbols)
        rows = [[0.0] * n + [own(self.rules[symbol])] for symbol in symbols]
        for i, symbol in enumerate(symbols):
            rows[i][i] = 1.0
            for p, alternative in self.rules[symbol]:
                for part in alternative:
                    if part in place:
                        rows[i][place[part]] -= p
        for i in range(n):
            pivot = max(range(i, n), key=lambda r: abs(rows[r][i]))
            rows[i], rows[pivot] = rows[pivot], rows[i]
            for r in range(n):
                factor = rows[r][i] / rows[i][i] if r != i else 0.0
                if factor:
                    rows[r] = [a - factor * b for a, b in zip(rows[r], rows[i])]
        i = place["Sentence"]
        return rows[i][n] / rows[i][i]


def _words(rng, size, vowels):
    """Distinct words of one syllable that are none of the fixed ones."""
    fixed = {*PREPOSITIONS, *BELIEFS, *itertools.chain(*DETERMINERS.values())}
    words = {onset + vowel: rng.random() for onset in ONSETS for vowel in vowels}
    return sorted(words.keys() - fixed, key=words.get)[:size]


def _choose(words):
    """One of the words with a blank before it, the earlier ones more often."""
    weights = [1 / (rank + 12) for rank in range(len(words))]
    return tuple((weight / sum(weights), (" " + word,)) for word, weight in zip(words, weights))


def _optional(p, *symbols):
    return (1 - p, ()), (p, symbols)


def _sentence():
    return ((0.45, ("Opening_one", "Predicate_one", "Tail", ".", "Gap")),
            (0.35, ("Opening_many", "Predicate_many", "Tail", ".", "Gap")),
            (0.10, ("Does", "Phrase_one", "Predicate_many", "?", "Gap")),
            (0.10, ("Do", "Phrase_many", "Predicate_many", "?", "Gap")))


def _shared(lexicon):
    """Rules of what has no number."""
    return {
        "Clause": ((0.5, ("Phrase_one", "Predicate_one")), (0.5, ("Phrase_many", "Predicate_many"))),
        "Phrase": ((0.5, ("Phrase_one",)), (0.5, ("Phrase_many",))),
        "Agent": ((0.5, ("Phrase_one", "Transitive_one")), (0.5, ("Phrase_many", "Transitive_many"))),
        "Adjectives": _optional(0.3, "Adjective", "Adjectives"),
        "Adjective": _choose(lexicon["adjective"]),
        "Manner": ((0.4, ()), (0.3, ("Adverb",)), (0.3, ("Preposition", "Phrase"))),
        "Adverb": _choose(lexicon["adverb"]),
        "Preposition": _choose(PREPOSITIONS),
    }


def _numbered(number, lexicon):
    """Rules of what is singular or plural: as in English, nouns take their s in the plural and verbs in the singular."""
    noun_end, verb_end = ("", "s") if number == "one" else ("s", "")
    determiners = _choose(DETERMINERS[number])

    def verbs(words):
        return _choose([word + verb_end for word in words])

    n = number
    return {
        f"Opening_{n}": tuple((p, (word.strip().capitalize(), f"Core_{n}")) for p, (word,) in determiners),
        f"Phrase_{n}": tuple((p, (word, f"Core_{n}")) for p, (word,) in determiners),
        f"Core_{n}": ((1.0, ("Adjectives", f"Noun_{n}", f"Relative_{n}")),),
        f"Relative_{n}": _optional(0.15, " that", f"Relation_{n}"),
        f"Relation_{n}": ((0.6, (f"Predicate_{n}",)), (0.4, ("Agent",))),
        f"Predicate_{n}": ((0.45, (f"Intransitive_{n}", "Manner")), (0.50, (f"Transitive_{n}", "Phrase")),
                           (0.05, (f"Belief_{n}", " that", "Clause"))),
        f"Noun_{n}": _choose([word + noun_end for word in lexicon["noun"]]),
        f"Intransitive_{n}": verbs(lexicon["intransitive"]),
        f"Transitive_{n}": verbs(lexicon["transitive"]),
        f"Belief_{n}": verbs(BELIEFS),
    }
