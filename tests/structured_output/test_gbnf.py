"""GBNF is matched character by character: masks are equal to those of a slow recogniser, for random grammars."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import tokenizers
from bundled_grammars import allowed
from character_grammars import ALPHABET, OTHERS, Recogniser, gbnf_text, random_grammar
from tiers import count
from tokenizers import decoders, models, pre_tokenizers

from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output import GrammarCompiler, StructuredOutputs, lexing, terminal_automata
from nucleate.structured_output.gbnf import gbnf_lexing, lark_text
from nucleate.tokenization.tokenizer import Tokenizer

MERGES = [tuple(pair.split()) for pair in ("a b", "a a", "aa ab", 'b "', '" a', "a ]", "Ã ©", "Ã ¨", "Ã© a", "Ġ Ġ")]
EOS, OPEN, CLOSE = "</s>", "<open>", "<close>"
JSON_GBNF = r"""
root   ::= object # as llama.cpp writes it
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
SQL_GBNF = r"""
root ::= select ";"
select ::= "SELECT" ws expr ws "FROM" ws name (ws "WHERE" ws condition)? (ws "ORDER BY" ws name)?
expr ::= name | [0-9]+ | "(" select ")" | expr ws? "+" ws? expr
condition ::= expr ws? "=" ws? expr | "NOT" ws condition
name ::= [a-zA-Z_]+
ws ::= [ \t\n]+
"""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """All bytes, a few longer tokens of the alphabet of the random grammars, and special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = [*alphabet, *(left + right for left, right in MERGES)]
    backend = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(vocabulary)}, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS, OPEN, CLOSE])
    return Tokenizer(backend, eos_token_ids=[len(vocabulary)])


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


def accepts(grammars: GrammarCompiler, tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """Whether a grammar accepts a text in single-byte tokens."""
    matcher = grammars.compile(StructuredOutputs(grammar=grammar)).matcher()
    for byte in text.encode():
        token = next(i for i in range(256) if tokenizer.pieces.as_bytes(i) == bytes([byte]))
        try:
            matcher.accept_token(token)
        except ValueError:
            return False
    return matcher.accepting


def check_masks(grammars: GrammarCompiler, tokenizer: Tokenizer, seed: int) -> str | None:
    """Compare the masks of a random text of a random grammar with the recogniser. Returns the translated grammar."""
    rng = random.Random(seed)
    rules = random_grammar(rng, rng.choice((1, 2, 3, 4)))
    text, recogniser = gbnf_text(rules), Recogniser(rules)
    if not recogniser.finite:
        with pytest.raises(ParameterError, match="no finite text matches the rule root"):
            lark_text(text)
        return None
    lark = '%llguidance {"no_forcing": true}\n' + lark_text(text)  # allow every tokenization of forced text
    matcher = grammars.compile(StructuredOutputs(grammar=lark)).matcher()
    texts = {token: tokenizer.pieces.as_bytes(token).decode(errors="ignore") for token in range(256 + len(MERGES))}
    tokens = {token: text for token, text in texts.items() if text and set(text) <= {*ALPHABET, *OTHERS}}
    assert len(tokens) == len(ALPHABET + OTHERS) - 2 + len(MERGES)
    for _ in range(7):
        found = {*allowed(matcher)}
        expected = {token for token, text in tokens.items() if recogniser.can_read(text)}
        assert found & tokens.keys() == expected, (text, recogniser.text)
        assert (256 + len(MERGES) in found) == recogniser.complete, (text, recogniser.text)
        if not expected:
            break
        token = rng.choice(sorted(expected))
        matcher.accept_token(token)
        for letter in tokens[token]:
            recogniser.read(letter)
    return lark


def test_masks_equal_those_of_a_character_recogniser(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    larks = [check_masks(grammars, tokenizer, seed) for seed in range(count(40, 2000))]
    assert sum(lark is None for lark in larks) >= 2
    assert sum(lark is not None and "T_2" in lark for lark in larks) >= 2  # needs a parser


def test_masks_are_exact_without_long_terminals(
    grammars: GrammarCompiler, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal_automata, "MAX_STEPS", 0)
    gbnf_lexing.cache_clear()
    [check_masks(grammars, tokenizer, seed) for seed in range(3000, 3000 + count(20, 300))]
    assert r"/\x{22}/" in lark_text(JSON_GBNF)
    gbnf_lexing.cache_clear()


def test_without_splitting_terminals_masks_would_be_wrong(
    grammars: GrammarCompiler, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The random grammars find the errors of a longest-match lexer."""
    monkeypatch.setattr(lexing, "conflicts", lambda *_: set())
    gbnf_lexing.cache_clear()
    with pytest.raises(AssertionError):
        [check_masks(grammars, tokenizer, seed) for seed in range(200)]
    gbnf_lexing.cache_clear()


EXAMPLES: list[tuple[str, list[str], list[str]]] = [
    ('root ::= ("a" | "ab") "bc"', ["abc", "abbc"], ["ab", "abb", "bc"]),
    ('root ::= sentence "END"\nsentence ::= [A-Za-z ]+', ["an owl END", "ENDEND"], ["an owl", "END"]),
    ('root ::= "(" root ")" text "END" | "x"\ntext ::= [a-zA-Z]*', ["(x)END", "(x)ENDEND", "((x)END)aEND"], ["(x)"]),
    ('root ::= word | "not " root | root " and " root | "(" root ")"\nword ::= [a-z]+',
     ["not (a and not b)", "nota and b", "not and and"], ["not ", "(a"]),
    ('root ::= root "+" root | [0-9]', ["1+2+3"], ["1+", "+1"]),
    ('root ::= (text | tag)*\ntag ::= "<b>" root "</b>"\ntext ::= [^<>]+', ["a<b>b<b></b>c</b>", ""], ["<b>a", "a>"]),
    ('root ::= "- " item | "- " item root\nitem ::= [^\\n] item | "\\n"', ["- a\n- bc\n", "- \n"], ["- a", "\n"]),
    ('root ::= a | b\na ::= "x" a b "y" | "x" b "y"\nb ::= b "z" | "z"', ["xzy", "xxzyzy", "zz"], ["xy"]),
    (JSON_GBNF, ['{"a": [1, -2.5e3, {"b": null}] }', "{}", '{"é\\u00e9": "\\n"}'], ['{"a": 01}', '{"\n": 1}', "[]"]),
    ('root ::= root "é-" [^é]{0,3} | "b"', ["bé-é-", "bé-è-é-", "bé-"], ["bé-é"]),  # é and è share a byte
    # syntax
    ('# first\nroot ::= # then\n  ( "a"\n    | "b" # or\n  ) |\n  "c"\n  | "d"', ["a", "b", "c", "d"], [""]),
    (r'root ::= "\x41\u00e9\U0001F600\t\r\n\\\"\[\]\-"', ['Aé😀\t\r\n\\"[]-'], [""]),
    (r"root ::= [\x41-\x43\]\-\\^] [^\n\u00e9-\u00ff] [a-]", ["A\u0100-", "]xa", "-]-", "^^a"], ["Aé-", "A\n-"]),
    ("root ::= . . [\\x00-\\x1f]?", ["\n\n", "é😀\t"], ["a", "\0a", "aa\0"]),
    ('root ::= "ab"? "c"* "d"+ [e]{2} "fg"{1,} "h"{0,2} ("i" | "j"){2,3}',
     ["ddeefgfghij", "abcdeefgiji"], ["deefghhhij"]),
    ('root ::= "a"{2}{1,2} ""* | ', ["aa", "aaaa", ""], ["a", "aaa"]),
    ('root ::= A_1 b-2 | 3\nA_1 ::= "a"\nb-2 ::= "b"\n3 ::= "c"\nunused ::= "d" unused', ["ab", "c"], ["d"]),
    ('root ::= "a" | "b" endless\nendless ::= "c" endless', ["a"], ["b", "bc"]),
]  # fmt: skip


@pytest.mark.parametrize(("grammar", "texts", "others"), EXAMPLES)
def test_examples(
    grammars: GrammarCompiler, tokenizer: Tokenizer, grammar: str, texts: list[str], others: list[str]
) -> None:
    assert [text for text in texts if not accepts(grammars, tokenizer, grammar, text)] == []
    assert [text for text in others if accepts(grammars, tokenizer, grammar, text)] == []


def test_special_tokens(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    ids = {name: tokenizer.backend.token_to_id(name) for name in (OPEN, CLOSE)}
    for grammar in ('root ::= <open> [a-z]+ <close> "x"', f'root ::= <[{ids[OPEN]}]> [a-z]+ <[{ids[CLOSE]}]> "x"'):
        matcher = grammars.compile(StructuredOutputs(grammar=grammar)).matcher()
        assert allowed(matcher) == [ids[OPEN]]
        for name in (OPEN, "a", "b", CLOSE, "x"):
            matcher.accept_token(tokenizer.backend.token_to_id(name))
        assert matcher.terminated


INVALID = {
    "root ::= a": "in line 1: there is no rule 'a'",
    'a ::= "x"': "there is no rule 'root'",
    'root ::= "a"\nroot ::= "b"': "in line 2: the rule 'root' is defined twice",
    'root ::= "a': 'in line 1: a string must end with "',
    'root ::= "a" )': "in line 1: unexpected '\\)'",
    'root ::= ("a"\n': "in line 2: expected \\), got ''",
    'root ::= [a-z\n"b"': "in line 2: a character class must end with ]",
    "root ::= []": "in line 1: a character class must not be empty",
    "root ::= [z-a]": "the range 'z-a' is reversed",
    r'root ::= "\d"': r"unknown escape '\\\\d'; allowed are \\n",
    r'root ::= "\ud800"': r"\\ud800 is not a character",
    r"root ::= [\U00110000]": r"\\U00110000 is not a character",
    'root ::= "a"{3,2}': r"the repetition \{3,2\} has a maximum below its minimum",
    'root ::= "a"{,2}': r"a repetition must be \{m\}, \{m,\} or \{m,n\}",
    "root ::= *": r"nothing to repeat before '\*'",
    'root ::= "a"\n\nb = "c"': "in line 3: expected a rule, such as name ::= ...",
    'root ::= !<[1]> "a"': "negated token references",
    "root ::= <[7]>": r"<\[7\]> must be a special token in GBNF; write other tokens as text",
    "root ::= <[7": r"a token must be given as <\[id\]> or <name>",
    "root ::= root": "no finite text matches the rule root",
    'root ::= "a" root': "no finite text matches the rule root",
    "root ::= " + "(" * 70 + '"a"' + ")" * 70: "more than 64 levels of brackets",
    'root ::= a\na ::= b b\nb ::= c{200}\nc ::= "x"{200}': "the shortest text has 80000 characters; the maximum is 20",
    "\n".join(["root ::= a0", *(f"a{i} ::= a{i + 1} a{i + 1}" for i in range(30)), 'a30 ::= "x"']): "the shortest text",
}  # fmt: skip


@pytest.mark.parametrize("grammar", INVALID)
def test_errors_name_the_line_and_what_is_allowed(grammars: GrammarCompiler, grammar: str) -> None:
    with pytest.raises(ParameterError, match=INVALID[grammar]) as caught:
        grammars.compile(StructuredOutputs(grammar=grammar))
    assert caught.value.field == "grammar"
    assert len(str(caught.value)) < 250


LARGE: dict[str, Callable[[int], str]] = {
    "keywords": lambda n: "root ::= " + " | ".join(f'"k{i}" root "e{i}"' for i in range(7 * n)) + ' | "x"',
    "rules": lambda n: (
        "root ::= "
        + " | ".join(f"r{i}" for i in range(5 * n))
        + "\n"
        + "\n".join(f'r{i} ::= "k{i}" root "e"' for i in range(5 * n))
        + '| "x"'
    ),
    "prefixes": lambda n: "root ::= " + " | ".join(f'"{"a" * i}" root "b"' for i in range(1, 2 * n - 20)) + ' | "c"',
    "a chain": lambda n: (
        "root ::= a0\n" + "\n".join(f'a{i} ::= "x" a{i + 1} "y"?' for i in range(8 * n)) + f'\na{8 * n} ::= "z" | root'
    ),
    "doubled": lambda n: "\n".join(
        ["root ::= a0", *(f'a{i} ::= a{i + 1} a{i + 1} | "y"' for i in range(n // 3)), f'a{n // 3} ::= "x"?']
    ),
    "classes": lambda n: (
        "root ::= "
        + " | ".join(f'[\\U{4096 + 7 * i:08x}-\\U{4196 + 7 * i:08x}] root "x"' for i in range(4 * n))
        + '| "y"'
    ),
    "loops": lambda n: "root ::= " + "(" * (n // 2) + '"(" root ")"' + ' | "a")+' * (n // 2),
    "linear": lambda n: "root ::= a0\n" + "\n".join(
        f'a{i} ::= "x" a{(i * 7 + 3) % 16} | "y" a{(i * 11 + 5) % 16} | "z" a{(i * 5 + 2) % 16} | "w"'
        for i in range(16)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.fast_cases(1)
def test_large_grammars_compile_in_time(grammars: GrammarCompiler, name: str) -> None:
    begin = time.process_time()
    grammars.compile(StructuredOutputs(grammar=LARGE[name](count(40, 100))))
    assert time.process_time() - begin < 5


def test_keywords_do_not_split_names(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    lark = lark_text(SQL_GBNF)
    assert "/[A-Z\\x{5f}a-z]+|" in lark
    assert "/FROM/" in lark
    for text in ("SELECT a FROM b ORDER BY c;", "SELECT NOT FROM b WHERE NOT NOT = ORDER ORDER BY SELECT;"):
        assert accepts(grammars, tokenizer, SQL_GBNF, text)
    assert not accepts(grammars, tokenizer, SQL_GBNF, "SELECT a FROM b ORDERBY c;")


def test_long_parts_of_a_recursive_grammar_stay_terminals() -> None:
    """Single characters would make masks a hundred times slower."""
    terminals = [line for line in lark_text(JSON_GBNF).splitlines() if line.startswith("T_")]
    assert len(terminals) <= 12
    assert sum("u[0-9A-Fa-f]{4,4}" in line for line in terminals) >= 2  # whole strings
