"""The tokens of a merged model: what a recipe says of its tokenizer, and the files that it gets.

tokenizer:
  source: union
  tokens:
    <|im_start|>: {source: lab/chat}
  pad_to_multiple_of: 64
chat_template: chatml
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from holdfast_formats.errors import StateMismatch
from holdfast_service.wings.merge.recipe_document import Located
from holdfast_service.wings.merge.recipe_models import ModelName, read_name

TOKENIZER, ABOUT, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
BYTES_MAX = 2**26  # of a tokenizer's file
ROWS_MAX = 2**24
# A tokenizer's other files. Those with a vocabulary of their own lack tokens that are added.
VOCABULARIES = ("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json")
FILES = (TOKENIZER, ABOUT, TEMPLATE, *VOCABULARIES, "special_tokens_map.json", "generation_config.json")
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_ALPACA = (
    "{% set asked = messages|selectattr('role', 'equalto', 'system')|list %}{% if asked %}{{ asked[-1]['content']|trim }}"
    "{% endif %}{{ '\\n\\n' }}"
    "{% set heads = {'user': 'Instruction', 'assistant': 'Response', 'user_context': 'Input'} %}"
    "{% for message in messages %}{% if message['role'] in heads %}"
    "{{ '### ' + heads[message['role']] + ':\\n' + message['content']|trim + ('' if loop.last else '\\n\\n') }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1]['role'] != 'assistant' %}{{ '### Response:\\n' }}{% endif %}"
)
_EXAONE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '        [|system|][|endofturn|]\\n\\n' }}{% endif %}"
    "{{ '    [|' + message['role'] + '|]' + message['content'] + '\\n        ' }}"
    "{{ '\\n\\n' if message['role'] == 'user' else '[|endofturn|]\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '    [|assistant|]\\n' }}{% endif %}"
)
_LLAMA3 = (
    "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}{{ '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\\n\\n' + message['content']|trim + '<|eot_id|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
_MISTRAL = (
    "{% set asked = messages[0]['content'] if messages[0]['role'] == 'system' %}"
    "{{ bos_token }}{% for message in (messages[1:] if asked is defined else messages) %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('the roles must alternate: user, assistant, user, …, after a system message if there is one') }}"
    "{% elif message['role'] == 'user' %}"
    "{{ ' [INST] ' + (asked + '\\n\\n' if loop.first and asked is defined else '') + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('the roles are user and assistant, after a system message if there is one') }}"
    "{% endif %}{% endfor %}"
)
# mergekit's names; each makes the text that mergekit's template makes.
TEMPLATES = {"alpaca": _ALPACA, "chatml": CHATML, "exaone": _EXAONE, "llama3": _LLAMA3, "mistral": _MISTRAL}
_PLAIN: dict[str, Any] = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}


class TokenSource(NamedTuple):
    """Where a token's row comes from: `model`'s row of `row` (a token or its number), or zeros without a model.

    `usual`: by the rule for tokens that the recipe does not name. `force`: also in models that have the token.
    """

    token: str
    usual: bool
    model: ModelName | None
    row: str | int
    force: bool
    line: int


class RecipeTokenizer(NamedTuple):
    """The tokenizer of the result: the base's, a model's, or the tokens of all models."""

    source: ModelName | Literal["base", "union"]
    tokens: tuple[TokenSource, ...]
    multiple: int  # of rows

    @property
    def named(self) -> list[ModelName]:
        """The models that it names."""
        models = [one.model for one in self.tokens if one.model is not None]
        return models if isinstance(self.source, str) else [self.source, *models]


def read_tokenizer(keys: Mapping[str, Located]) -> RecipeTokenizer | None:
    """What a recipe's `tokenizer` or `tokenizer_source` says; None without either."""
    if "tokenizer" in keys:
        if "tokenizer_source" in keys:
            keys["tokenizer_source"].refuse("is given besides tokenizer", "delete the line")
        inner = keys["tokenizer"].mapping(("source", "tokens", "pad_to_multiple_of"))
        source = _source(inner["source"]) if "source" in inner else "union"
        tokens = inner["tokens"].mapping() if "tokens" in inner and inner["tokens"].value is not None else {}
        sources = tuple(_token(token, given) for token, given in tokens.items())
        return RecipeTokenizer(source, sources, _multiple(inner.get("pad_to_multiple_of")))
    given = keys.get("tokenizer_source")
    return None if given is None or given.value is None else RecipeTokenizer(_source(given), (), 1)


def _source(given: Located) -> ModelName | Literal["base", "union"]:
    if given.value == "base":
        return "base"
    return "union" if given.value == "union" else read_name(given)


def _multiple(given: Located | None) -> int:
    if given is None or given.value is None:
        return 1
    if isinstance(given.value, bool) or not isinstance(given.value, int) or not 1 <= given.value <= ROWS_MAX:
        given.refuse(f"is {given.value!r} instead of a whole number of at least 1", "for example `8`, or delete the line")
    return given.value


def _token(token: str, given: Located) -> TokenSource:
    keys = given.mapping(("source", "force")) if given.value is not None else {}
    force = keys["force"].value if "force" in keys else False
    if not isinstance(force, bool):
        keys["force"].refuse("is not true or false", "write `force: true`, or delete the line")
    if "source" not in keys or keys["source"].value is None:
        if force:
            given.refuse("is forced, but has no source", "name a model as its `source`")
        return TokenSource(token, True, None, token, False, given.line)
    source = keys["source"]
    if not isinstance(source.value, dict) or ("model" in source.value and "kind" not in source.value):
        return TokenSource(token, False, read_name(source), token, force, given.line)
    kind = source.mapping(("kind", "model", "token", "token_id")).get("kind")
    if kind is not None and kind.value == "zero":
        return TokenSource(token, False, None, token, force, given.line)
    if kind is None or kind.value != "model_token":
        source.refuse("has no known kind", "`kind` is model_token or zero")
    inner = source.mapping()
    rows = [inner[key] for key in ("token", "token_id") if key in inner and inner[key].value is not None]
    if "model" not in inner or len(rows) != 1:
        source.refuse("needs a model, and either token or token_id", "give `model` and one of `token` and `token_id`")
    row = rows[0].value
    if isinstance(row, bool) or not isinstance(row, str | int):
        rows[0].refuse("is neither a token nor its number", "write `token: TEXT` or `token_id: NUMBER`")
    return TokenSource(token, False, read_name(inner["model"]), row, force, given.line)


def read_template(given: Located | None) -> str | None:
    """A recipe's chat template as text, or `auto`; None if it has none."""
    if given is None or given.value is None:
        return None
    text = given.text()
    if text == "auto" or "{" in text:
        return text
    if text not in TEMPLATES:
        given.refuse(f"is {text!r}, which is no template", f"auto, {', '.join(TEMPLATES)}, or the template's text")
    return TEMPLATES[text]


class ModelTokens(NamedTuple):
    """A model's tokenizer: the numbers of its tokens, and its files as JSON values. Frozen by convention."""

    name: str
    numbers: Mapping[str, int]
    document: Mapping[str, Any]  # tokenizer.json
    about: Mapping[str, Any]  # tokenizer_config.json

    @property
    def added(self) -> list[dict[str, Any]]:
        return [dict(one) for one in self.document.get("added_tokens") or ()]


def read_tokens(name: str, document: bytes, about: bytes | None) -> ModelTokens:
    """A model's tokens, from its files. `StateMismatch` by file for what is not a tokenizer of the library `tokenizers`."""
    whole, more = _json(name, TOKENIZER, document), _json(name, ABOUT, about or b"{}")
    try:
        model = whole["model"]
        entries = model["vocab"]
        words = entries if isinstance(entries, dict) else {word: number for number, (word, _) in enumerate(entries)}
        named = [(one["content"], one["id"]) for one in whole.get("added_tokens") or ()]
        named += [(one["content"], int(number)) for number, one in (more.get("added_tokens_decoder") or {}).items()]
        numbers = {**words, **dict(named)}
        sound = all(isinstance(word, str) and type(number) is int for word, number in numbers.items())
    except (AttributeError, KeyError, TypeError, ValueError):
        sound, numbers = False, {}
    if not sound or not numbers or not 0 <= min(numbers.values()) <= max(numbers.values()) < ROWS_MAX:
        raise StateMismatch(
            f"{name}: {TOKENIZER} has no vocabulary of whole numbers",
            hint="write it by AutoTokenizer.from_pretrained(MODEL).save_pretrained(MODEL)",
            file=TOKENIZER,
        )
    return ModelTokens(name, numbers, whole, more)


def _json(name: str, file: str, data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise StateMismatch(
            f"{name}: {file} is no JSON object",
            hint="write it by AutoTokenizer.from_pretrained(MODEL).save_pretrained(MODEL)",
            file=file,
        )
    return document


def used(tokens: ModelTokens, rows: int) -> ModelTokens:
    """The tokens that the model has a row for."""
    numbers = {token: number for token, number in tokens.numbers.items() if number < rows}
    if len(numbers) == len(tokens.numbers):
        return tokens
    document = dict(tokens.document)
    document["added_tokens"] = [one for one in tokens.added if one["id"] < rows]
    about = dict(tokens.about)
    decoder = about.get("added_tokens_decoder") or {}
    about["added_tokens_decoder"] = {number: one for number, one in decoder.items() if int(number) < rows}
    model = dict(document["model"])
    gone = tokens.numbers.keys() - numbers.keys()
    if isinstance(model["vocab"], dict):
        model["vocab"] = {token: number for token, number in model["vocab"].items() if number < rows}
        model["merges"] = [one for one in model.get("merges") or () if not gone.intersection(_halves(one))]
    else:
        model["vocab"] = model["vocab"][:rows]
    return ModelTokens(tokens.name, numbers, {**document, "model": model}, about)


def _halves(merge: Any) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else list(merge)


def united(first: ModelTokens, others: Sequence[ModelTokens], more: Sequence[str]) -> ModelTokens:
    """The first tokenizer, with the tokens of the others that it lacks, and then `more`, as added tokens."""
    about = {one["content"]: one for tokens in (*others[::-1], first) for one in tokens.added}
    plain = (token for tokens in others for token in sorted(tokens.numbers, key=lambda one: tokens.numbers[one]))
    wanted = [*(token for token in plain if token not in about), *about, *more]
    missing = [token for token in dict.fromkeys(wanted) if token not in first.numbers]
    if not missing:
        return first
    start, numbers, added = max(first.numbers.values()) + 1, dict(first.numbers), first.added
    decoder = dict(first.about.get("added_tokens_decoder") or {})
    for number, token in enumerate(missing, start):
        entry = {**_PLAIN, **about.get(token, {}), "content": token}
        numbers[token] = number
        added.append({**entry, "id": number})
        decoder[str(number)] = {key: value for key, value in entry.items() if key != "id"}
    changed = {**first.about, "added_tokens_decoder": decoder} if "added_tokens_decoder" in first.about else first.about
    return ModelTokens(first.name, numbers, {**first.document, "added_tokens": added}, changed)


def template_of(about: Mapping[str, Any], file: bytes | None) -> str | None:
    """A model's chat template, from its own file or tokenizer_config.json."""
    if file is not None:
        return file.decode(errors="replace")
    template = about.get("chat_template")
    if isinstance(template, list):
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def commonest(templates: Sequence[str | None]) -> str | None:
    """The template that most models have; the first of them, if several have equally many."""
    counts = Counter(one.strip() for one in templates if one)
    return counts.most_common(1)[0][0] if counts else None


def written(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=2, ensure_ascii=False).encode(errors="surrogatepass") + b"\n"
